"""The eight runs of ProRL at 1.5B (arXiv 2505.24864, "P1" below, appendix F) as one recipe of eight stages.

    python launch/train.py --config=configs/prorl_1p5b.py --config.model.path=FOLDER     # DeepSeek-R1-Distill-Qwen-1.5B

P1 trained on 4 x 8 H100-80GB for about 16,000 GPU-hours. Every number is followed by where it comes from; "choice" marks what no paper
tells. Four of P1's five domains have neither data nor graders in jaxprorl yet: the run is refused, and says which, until they have.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import prorl_v1
from configs.base import stage

FOUR_DOMAINS = ("math", "code", "stem", "logic")  # P1, appendix F: instruction following was not available yet in the first runs
STEPS = 260  # of each of the first seven, at the latest. Choice: P1 has "more than 2k" steps in all, and about 200 in the eighth run


def run_of_p1(number: int, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """One of the first seven runs.

    It ends when a person says so: in P1 one judges by validation that stagnates or degrades. From the second on it begins with a reset of
    reference and optimizer: P1 states them for runs 2, 6 and 7; for 3, 4, 5 and 8 they are a choice, since P1's figure 8 shows KL falling
    to about 0 at run boundaries.
    """
    first = number == 1
    return stage(f"run {number}", STEPS, changes, not first, "none" if first else "all", end="manual")


def get_config() -> ConfigDict:
    """ProRL v1 in its eight stages: prorl_v1.py with these fields changed."""
    c = prorl_v1.get_config()
    c.run_name = "prorl_1p5b"
    c.resets.every_steps = 0  # at the boundaries of stages, and there alone
    c.stages = (
        run_of_p1(1, {"data.mix": FOUR_DOMAINS}),  # 8k of context, n = 16, as in prorl_v1.py
        run_of_p1(2),  # P1: identical settings
        run_of_p1(3, {"data.mix": (*FOUR_DOMAINS, "instructions")}),  # P1: adds instruction-following data
        run_of_p1(4, {"shaping.stopping": "non_termination"}),  # P1: a penalty for responses that do not terminate; its size is unknown
        run_of_p1(5),  # P1 tells runs 4 and 5 apart by nothing
        # Choice: the penalty stays on in runs 6 to 8. P1 does not say when it ends.
        run_of_p1(6, {"rollout.samples_per_prompt": 32}),  # P1: from 16 to 32
        run_of_p1(7),  # P1: a second hard reset
        stage(
            "run 8", 200, reset_reference=True, reset_optimizer="all",  # P1 section 3.2: about 200 steps
            changes={
                "rollout.samples_per_prompt": 16,  # P1: back to 16
                "rollout.max_response_tokens": 15296,  # P1: 16k of context, less the prompt, in whole decode chunks
                "rollout.slots": 256,  # choice: half as many, of twice the length
                "batch.row_tokens": 16384,  # a row holds the longest sequence
                "batch.micro_batch_rows": 16,  # choice, as the slots
            },
        ),
    )  # fmt: skip
    c.steps = sum(row["steps"] for row in c.stages)  # at most
    return c
