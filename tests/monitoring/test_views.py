import pytest

from jaxprorl import streams
from jaxprorl.monitoring.views import Views


def broken(error: BaseException) -> None:
    raise error


@pytest.fixture(autouse=True)
def no_stream_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "lost", {})


def test_what_works_gives_its_result() -> None:
    views = Views()
    assert views.show("report", lambda a, b: a + b, 1, b=2) == 3
    assert views.news() == {}


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
        (UnicodeEncodeError("ascii", "→", 0, 1, "ordinal not in range"), "UnicodeEncodeError: 'ascii' codec can't encode character"),
        (ValueError("I/O operation on closed file"), "ValueError: I/O operation on closed file"),
        (RuntimeError("two\nlines"), "RuntimeError: two lines"),
    ],
)
def test_a_view_that_fails_is_told_once_and_called_no_more(error: BaseException, told: str) -> None:
    views, calls = Views(), list[int]()
    assert views.show("report", broken, error) is None
    views.show("report", calls.append, 1)
    assert calls == []
    assert list(views.news()) == ["report"]
    assert views.news() == {}
    views.close("report", calls.append, 2)
    assert calls == [2], "what it holds is given back all the same"


def test_a_view_that_fails_takes_no_other_with_it() -> None:
    views, calls = Views(), list[int]()
    views.show("report", broken, OSError("full"))
    views.show("TensorBoard", calls.append, 1)
    assert calls == [1]
    assert views.news() == {"report": "OSError: full"}


def test_an_interrupt_is_no_failure_of_a_view() -> None:
    with pytest.raises(KeyboardInterrupt):
        Views().show("report", broken, KeyboardInterrupt())


def test_a_lost_stream_is_news_once_for_every_run() -> None:
    streams.lost["standard output"] = "Broken pipe"
    assert Views().news() == Views().news() == {"standard output": "Broken pipe"}
