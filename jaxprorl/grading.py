"""What becomes of samples that could not be graded, in training, validation and evaluation alike."""

from collections.abc import Sequence

from jaxprorl.monitoring.recorder import Recorder
from jaxprorl.rewards.pool import error_share, require_graded
from jaxprorl.types import Score


def check_graders(recorder: Recorder, step: int, what: str, max_error_share: float, scores: Sequence[Score]) -> None:
    """Logs grader errors, and stops the run when too many samples have no score.

    Args:
        what: was graded: "step", "validation" or an evaluation.

    Raises:
        GraderError: their share is over `grading.max_error_share`.
    """
    failed = [score for score in scores if score.outcome == "grader_error"]
    if failed:
        examples = [score.detail for score in failed[:3]]
        recorder.event(step, "grader_errors", of=what, count=len(failed), share=error_share(scores), examples=examples)
    require_graded(f"step {step}" if what == "step" else f"step {step}, {what}", scores, max_error_share)
