"""From nothing to a better model on two CPU cores: `bash launch/quickstart.sh`.

Four reasoning-gym tasks from three categories, a 0.35M-parameter Qwen2-shaped policy made by a supervised warm start,
then ProRL's objective with one reference + optimizer reset halfway.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """The quickstart: base.py with these fields changed."""
    c = base.get_config()
    c.run_name = "quickstart"
    c.steps = 100
    c.data.tasks.chain_sum = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}
    c.data.tasks.spell_backward = {"min_word_len": 4, "max_word_len": 7}
    c.data.tasks.number_filtering = {
        "min_numbers": 3, "max_numbers": 5, "min_decimals": 0, "max_decimals": 0, "min_value": 1, "max_value": 9,
    }  # fmt: skip
    c.data.tasks.complex_arithmetic = {
        "min_real": 1, "max_real": 9, "min_imag": 1, "max_imag": 9, "operations_weights": (0.5, 0.5, 0.0, 0.0),
    }  # fmt: skip
    c.optimizer.learning_rate = 3e-4  # constant, as in the paper; larger because the model is 4000 times smaller
    c.optimizer.warmup_updates = 8
    c.resets.every_steps = 50
    return c
