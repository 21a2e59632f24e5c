"""A reward whose module loads but cannot be prepared."""

from jaxprorl.types import Prompt


def prepare() -> None:
    raise OSError("no weights")


def score(text: str, prompt: Prompt) -> float:
    return 1.0
