"""ProRL v2 (NVIDIA's post "ProRL v2", August 2025, "V2" below) as far as it and BroRL (arXiv 2510.01180, "BR") tell: v1 with these changes.

python launch/train.py --config=configs/prorl_v2.py --config.model.path=FOLDER     # DeepSeek-R1-Distill-Qwen-1.5B
"""

from ml_collections import ConfigDict

from configs import prorl_v1


def get_config() -> ConfigDict:
    """ProRL v2: prorl_v1.py with these fields changed, and no other."""
    c = prorl_v1.get_config()
    c.run_name = "prorl_v2"
    c.steps = 3000  # V2
    c.batch.prompts = 512  # BR, table 1: the row of the 3,000-step baseline
    c.algorithm.advantage = "reinforce_pp_trajectory"  # V2's formula; "reinforce_pp_token" is NeMo-RL's form
    c.algorithm.clip_high = 0.28  # V2; clip_low stays 0.2
    c.algorithm.kl_estimator = "k2"  # V2: half the squared log-ratio, clamped to 10 there and to 20 here
    c.shaping.cosine_weight = 0.1  # V2 has the term, on and off in turns; its size is unknown (choice), and so are its ends 0 and 1
    c.shaping.cosine_on_steps = 100  # V2's example
    c.shaping.cosine_off_steps = 500  # V2's example
    c.resets.optimizer = "none"  # V2: the optimizer state is not cleared; resets every 200 to 500 steps
    return c
