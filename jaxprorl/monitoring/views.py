"""Views of a run: what is derived from its logs, or only shown. One that fails is switched off, and the run goes on without it."""

from collections.abc import Callable
from typing import TypeVar

from jaxprorl import streams

T = TypeVar("T")


class Views:
    """Calls whatever makes a view, and remembers what failed: a full disk, a terminal that went away, a fault in a library."""

    def __init__(self) -> None:
        self._failed: dict[str, str] = {}  # view -> why
        self._told: set[str] = set()

    def show(self, view: str, act: Callable[..., T], *args: object, **kwargs: object) -> T | None:
        """What `act(*args, **kwargs)` returns; None where it fails, or where something of this view has failed before."""
        return None if view in self._failed else self.close(view, act, *args, **kwargs)

    def close(self, view: str, act: Callable[..., T], *args: object, **kwargs: object) -> T | None:
        """As `show`, but also for a view that has failed: what it holds is given back all the same."""
        try:
            return act(*args, **kwargs)
        except Exception as error:  # whatever it is, the run matters more
            self._failed.setdefault(view, " ".join(f"{type(error).__name__}: {error}".split()))
            return None

    def news(self) -> dict[str, str]:
        """Views that have failed since this was last asked, and why; standard streams that were lost among them."""
        failed = {view: why for view, why in (self._failed | streams.lost).items() if view not in self._told}
        self._told |= failed.keys()
        return failed


def warning(view: str, why: str) -> str:
    """What to tell of a view that failed."""
    return f"WARNING: {view} failed and is left out from here on: {why}"
