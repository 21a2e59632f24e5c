"""The first call of each reward: on made-up answers to a real question, in a grader process, before anything long starts."""

from contextlib import ExitStack

import numpy as np
from ml_collections import ConfigDict

from jaxprorl.data.prompts import Item
from jaxprorl.errors import GraderError, RewardError
from jaxprorl.rewards.pool import GraderPool, require_graded
from jaxprorl.types import Prompt


def try_rewards(config: ConfigDict, trained: Item, measured: Item) -> None:
    """Grades a right and an empty answer, to `trained` with the reward and to `measured` with the evaluation's.

    Raises:
        RewardError: a reward raises, hangs, ends its process or returns no number for more of them than `grading.max_error_share`; names
            the reward, the question's place and the error.
    """
    asked = {"reward": (config.reward, trained), "evaluation.reward": (config.evaluation.reward or config.reward, measured)}
    with ExitStack() as stack:
        pools = {}
        for field, (spec, item) in asked.items():  # both at work before one is waited for
            pools[field] = stack.enter_context(GraderPool(spec, None, 1, config.grading.timeout_s, config.grading.solved_from))
            for number, text in enumerate(made_up(item)):
                pools[field].submit_text(_prompt(item), number, text)
        for field, (spec, item) in asked.items():
            try:
                scores = list(pools[field].collect().values())
                require_graded(f"made-up answers to {item.place}", scores, config.grading.max_error_share)
            except GraderError as error:
                other = "" if field == "reward" else "; an empty evaluation.reward measures with reward"
                raise RewardError(f"{field} = {spec!r} fails: {error}{other}") from None


def made_up(item: Item) -> tuple[str, str]:
    """Completions as a model might give them: with the reference answer, and with none."""
    return f"<think>A made-up thought.</think><answer>{item.answer}</answer>", "<think></think><answer></answer>"


def _prompt(item: Item) -> Prompt:
    """The question without a tokenizer, which the warm start may have yet to make: its bytes stand for token ids."""
    token_ids = np.frombuffer(item.question.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)
    return Prompt(0, item.domain, token_ids, item.task, item.answer, item.item)
