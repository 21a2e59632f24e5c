"""A reward whose preparation kills the process."""

import os

from jaxprorl.types import Prompt


def prepare() -> None:
    os._exit(9)


def score(text: str, prompt: Prompt) -> float:
    return 1.0
