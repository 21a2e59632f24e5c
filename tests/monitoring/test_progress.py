"""The progress view: plain lines, the panel, the table."""

import errno
import io
import sys

import pytest
from factories import summary_of
from rich.console import Console

from jaxprorl.monitoring.progress import Progress, before_after_table, before_after_text, duration, sparkline

METRICS = {
    "reward.mean": 0.5,
    "reward.solve_rate": 0.25,
    "kl.k3": 0.0123,
    "entropy": 0.2,
    "response_tokens.mean": 21.04,
    "groups.kept": 32.0,
    "groups.drawn": 41.0,
    "time.completion_tokens_per_s": 8123.4,
}


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def plain():
    return Console(file=io.StringIO(), force_terminal=False, width=40)  # narrow: plain lines must not wrap


def test_plain_lines():
    console, clock = plain(), Clock()
    with Progress(10, console=console, clock=clock) as progress:
        clock.now = 3.0
        progress.step(1, METRICS)
        progress.note("reference and optimizer reset after step 1")
        clock.now = 5.0
        progress.step(2, {**METRICS, "validation.solve_rate": 0.75})
    assert console.file.getvalue() == (
        "step 1/10 reward=0.500 solved=0.250 kl=0.0123 entropy=0.2000 tokens=21.0 tok/s=8123 kept=32/41 eta=27s\n"
        "reference and optimizer reset after step 1\n"
        "step 2/10 reward=0.500 solved=0.250 kl=0.0123 entropy=0.2000 tokens=21.0 tok/s=8123 kept=32/41 validation=0.750 eta=20s\n"
    )


def test_a_resumed_run_counts_its_own_steps_for_the_eta():
    console, clock = plain(), Clock()
    progress = Progress(100, console=console, clock=clock)
    clock.now = 2.0
    progress.step(51, {})
    assert console.file.getvalue() == "step 51/100 eta=1m38s\n"  # 49 steps of 2 s, not 2 s / 51 each


def test_a_phase_before_the_steps_is_not_in_their_eta():
    console, clock = plain(), Clock()
    progress = Progress(11, console=console, clock=clock)
    clock.now = 500.0
    progress.phase("warm start", 1, 1)
    clock.now = 502.0
    progress.step(1, {})
    assert console.file.getvalue().splitlines()[-1] == "step 1/11 eta=20s"


def test_a_plain_phase_prints_a_line_per_tenth():
    console = plain()
    progress = Progress(1, console=console)
    for done in range(0, 1001):
        progress.phase("warm start", done, 1000, loss=0.5, tokens_per_s=17000.0)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == "warm start 0/1000 loss=0.5 tokens_per_s=17000"
    assert lines[-1].startswith("warm start 1000/1000")


def test_not_enabled_shows_only_notes():
    console = plain()
    with Progress(10, enabled=False, console=console) as progress:
        progress.phase("warm start", 1, 2)
        progress.step(1, METRICS)
        progress.note("resumed from step 4")
    assert console.file.getvalue() == "resumed from step 4\n"


def test_the_panel_in_a_terminal_shows_everything_and_gives_the_cursor_back():
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with Progress(10, console=console, clock=Clock()) as progress:
        progress.phase("warm start", 5, 10, loss=0.5)
        progress.step(1, {**METRICS, "validation.solve_rate": 0.75})
        progress.note("[reset] reference")  # not rich markup
        progress.step(2, METRICS)
    progress.close()
    shown = console.file.getvalue()
    expected = (
        "step 2/10",
        "0.500",
        "0.250",
        "0.0123",
        "0.2000",
        "21.0",
        "8123",
        "32/41",
        "0.750 (step 1)",
        "ETA",
        "last event: [reset] reference",
    )
    for text in expected:
        assert text in shown[shown.rindex("step 2/10") - 10 :], text
    assert shown.endswith("\x1b[?25h")  # cursor visible again


def test_a_panel_is_not_drawn_more_often_than_anyone_can_see():
    console, clock = Console(file=io.StringIO(), force_terminal=True, width=80), Clock()
    with Progress(10, console=console, clock=clock) as progress:
        progress.phase("fit", 0, 1000)
        before = len(console.file.getvalue())
        for done in range(1, 1000):
            progress.phase("fit", done, 1000)
        assert len(console.file.getvalue()) == before
        progress.phase("fit", 1000, 1000)
        assert "1000/1000" in console.file.getvalue()


def test_duration_and_sparkline():
    assert [duration(s) for s in (0.4, 59.6, 200, 7500)] == ["0s", "1m00s", "3m20s", "2h05m"]
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""


def test_before_after_table_fits_80_columns():
    tasks = ("a_long_task_name_x", "sums[/b]")
    before = summary_of({task: [1.0] * 100 + [0.0] * 300 for task in tasks})
    after = summary_of({task: [1.0] * 360 + [0.5] * 40 for task in tasks})
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(before_after_table(before, after, before, after))
    table = console.file.getvalue()
    assert "…" not in table
    for text in ("25.0", "[21.0, 29.5]", "90.0", "[86.7, 92.6]", "+65.0", "> 0.950", "> 90.0", "n = 400", "n = 800", "sums[/b]"):
        assert text in table, text
    assert "\x1b" not in before_after_text(before, after)


def test_before_after_table_counts_what_was_not_graded_and_fits_80_columns():
    before = summary_of({"some": [1.0] * 300 + [None] * 1100, "none": [None] * 1400})
    after = summary_of({"some": [1.0] * 1000 + [0.0] * 300 + [None] * 100, "none": [None] * 1400})
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(before_after_table(before, after, before, after))
    table = console.file.getvalue()
    assert "…" not in table
    for text in ("1100 ungraded", "100 ungraded", "1400 ungraded", "2500 ungraded", "none", "n = 1300", "1100 > 100", "n = 0"):
        assert text in table, text
    assert "ungraded" not in before_after_text(*[summary_of({"some": [1.0]})] * 4)


def test_a_validation_line_counts_what_was_not_graded():
    console = Console(file=io.StringIO(), width=80)
    with Progress(10, console=console) as progress:
        progress.step(1, {**METRICS, "validation.solve_rate": 0.75, "validation.items": 40, "validation.ungraded": 10})
        progress.step(2, {**METRICS, "validation.items": 0, "validation.ungraded": 50})
        progress.step(3, {**METRICS, "validation.solve_rate": 0.5, "validation.items": 50, "validation.ungraded": 0})
        progress.step(4, {**METRICS, "grader.error_share": 0.375})
    lines = console.file.getvalue().splitlines()
    assert "ungraded=37.5% " in lines[3] and not any("ungraded=" in line for line in lines[:3])
    assert "validation=0.750 (10 ungraded) eta" in lines[0]
    assert "validation=none (50 ungraded) eta" in lines[1]
    assert "validation=0.500 eta" in lines[2]


class Broken(io.StringIO):
    """A stream that cannot be written. As a terminal, it shows the live panel."""

    def __init__(self, error: Exception, terminal: bool):
        super().__init__()
        self.error, self.terminal = error, terminal

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        OSError(errno.EIO, "Input/output error"),
        UnicodeEncodeError("ascii", "→", 0, 1, "ordinal not in range(128)"),
        ValueError("I/O operation on closed file"),
    ],
)
def test_where_nothing_can_be_shown_nothing_is_raised_and_the_failure_is_told_once(
    error: Exception, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout = Broken(error, terminal)
    monkeypatch.setattr(sys, "stdout", stdout)
    with Progress(10) as progress:
        progress.phase("warm start", 0, 10)
        progress.note("a note")
        progress.step(1, {"reward.mean": 0.25})
        assert list(progress.views.news()) == ["progress"]
        progress.note("another")
    assert progress.views.news() == {}
    assert sys.stdout is stdout, "the live panel gives it back"


def test_the_table_is_drawn_with_what_the_encoding_has() -> None:
    side = summary_of({"a_task": [1.0, 0.0, 0.0]})
    for encoding in ("ascii", "latin-1"):
        text = before_after_text(side, side, encoding=encoding)
        assert text.isascii() and "\\u" not in text
        assert "a_task |" in text
    assert "─" in before_after_text(side, side)
