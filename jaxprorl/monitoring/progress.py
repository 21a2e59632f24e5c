"""What a person watching sees: a live panel in a terminal, one plain line per step anywhere else.

It only shows; nothing here is stored and no decision reads it (the clock serves the ETA alone). Where it cannot be shown, work goes on.
"""

import functools
import io
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxprorl.evaluation.statistics import GainRow, gain_rows, rate_text
from jaxprorl.monitoring.views import Views

# (label in the panel, label in a plain line, metric, format)
_SHOWN = (
    ("reward", "reward", "reward.mean", "{:.3f}"),
    ("solve rate", "solved", "reward.solve_rate", "{:.3f}"),
    ("KL to reference (k3)", "kl", "kl.k3", "{:.4f}"),
    ("entropy, nats/token", "entropy", "entropy", "{:.4f}"),
    ("response tokens", "tokens", "response_tokens.mean", "{:.1f}"),
    ("sampled tokens/s", "tok/s", "time.completion_tokens_per_s", "{:.0f}"),
)
_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 32  # steps in a sparkline
_ETA_WINDOW = 20  # steps that the ETA averages over
_PHASE_REFRESH_S = 0.1  # a phase may report thousands of times; drawing each would cost seconds
_VIEW = "progress"
_P = ParamSpec("_P")


def duration(seconds: float) -> str:
    """`45s`, `3m20s`, `2h05m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def sparkline(values: list[float]) -> str:
    """The values as block characters from the smallest to the largest of them."""
    if not values:
        return ""
    low, span = min(values), max(values) - min(values)
    return "".join(_BARS[0 if span == 0 else min(len(_BARS) - 1, int((v - low) / span * len(_BARS)))] for v in values)


def _show(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _validation(metrics: Mapping[str, float]) -> str:
    """The validation of a step in words; empty without one."""
    rate, ungraded = metrics.get("validation.solve_rate"), metrics.get("validation.ungraded", 0)
    return "" if rate is None and not ungraded else rate_text({"solve_rate": rate, "ungraded": ungraded})


def _ungraded(metrics: Mapping[str, float]) -> str:
    """The share of a step's samples that are in neither reward nor solve rate; empty where all are graded."""
    share = metrics.get("grader.error_share", 0)
    return f"{100 * share:.1f}%" if share else ""


class _Console(Console):
    """rich would end the process when a pipe breaks, and turn `sys.stdout` away; here the error is raised as any other."""

    def on_broken_pipe(self) -> None:
        raise  # called while the error is handled


def _shows(method: "Callable[Concatenate[Progress, _P], None]") -> "Callable[Concatenate[Progress, _P], None]":
    """A method that shows something and, once that has failed, nothing more."""

    @functools.wraps(method)
    def guarded(self: "Progress", *args: _P.args, **kwargs: _P.kwargs) -> None:
        self.views.show(_VIEW, method, self, *args, **kwargs)

    return guarded


class Progress:
    """Shows the run; a context manager, so that the terminal is restored whatever happens. Its methods raise nothing.

    Attributes:
        views: what has failed, this one included.

    Args:
        steps: RL steps of the whole run.
        enabled: False shows nothing but notes, which always come through.
        console: where to; stdout when None. The live panel is used only when it is a terminal.
        clock: seconds, for the ETA.
    """

    def __init__(
        self, steps: int, enabled: bool = True, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.views = Views()
        self._steps = steps
        self._enabled = enabled
        self._console = console or _Console(file=sys.stdout)
        self._clock = clock
        self._marks: deque[tuple[int, float]] = deque([(-1, clock())], maxlen=_ETA_WINDOW + 1)  # (step, clock)
        self._last_note = ""
        self._phase_drawn = float("-inf")  # clock
        self._history: dict[str, deque[float]] = {metric: deque(maxlen=_HISTORY) for _, _, metric, _ in _SHOWN}
        self._validation = ""
        self._phase_tenth: tuple[str, int] = ("", -1)
        self._live: Live | None = None
        if enabled and self._console.is_terminal:
            # No refresh thread: it would compete with the compute threads, and there is something new only once per step.
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self.views.show(_VIEW, self._live.start)

    @_shows
    def phase(self, name: str, done: int, total: int, **values: Any) -> None:
        """Progress of a part outside RL (warm start, evaluation): `done` of `total`, with values worth seeing.

        Plain output prints a line per tenth of the total, so it may be called as often as is handy.
        """
        if not self._enabled:
            return
        self._marks = deque([(-1, self._clock())], maxlen=_ETA_WINDOW + 1)  # the ETA of the steps starts counting after the phase
        if self._live:
            if 0 < done < total and self._clock() - self._phase_drawn < _PHASE_REFRESH_S:
                return
            self._phase_drawn = self._clock()
            body = Table.grid(padding=(0, 2))
            body.add_row(ProgressBar(total=max(total, 1), completed=done, width=40), f"{done}/{total}")
            for key, value in values.items():
                body.add_row(key, _show(value))
            self._draw(name, body)
            return
        tenth = (name, done * 10 // max(total, 1))
        if tenth != self._phase_tenth:
            self._phase_tenth = tenth
            self._line(" ".join([f"{name} {done}/{total}", *(f"{key}={_show(value)}" for key, value in values.items())]))

    @_shows
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a finished step: `step` of the run's steps, with the values that went to metrics.jsonl."""
        if not self._enabled:
            return
        if self._marks[0][0] < 0 or step <= self._marks[-1][0]:
            start = self._marks[-1][1]
            self._marks.clear()
            self._marks.append((step - 1, start))
        self._marks.append((step, self._clock()))
        for metric, past in self._history.items():
            if metric in metrics:
                past.append(metrics[metric])
        if validation := _validation(metrics):
            self._validation = f"{validation} (step {step})"
        if self._live:
            self._draw(f"step {step}/{self._steps}", self._step_body(step, metrics))
        else:
            self._line(self._step_line(step, metrics))

    @_shows
    def note(self, text: str) -> None:
        """Something that happened (a reset, a resume, a checkpoint); stays above the panel. Shown even when not enabled."""
        if self._live:
            self._live.console.print(Text(text, style="dim"))
            self._last_note = text
        else:
            self._line(text)

    def close(self) -> None:
        """Leaves the last panel on the screen and gives the terminal back. May be called twice."""
        live, self._live = self._live, None
        if live:
            self.views.close(_VIEW, live.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _eta(self, step: int) -> str:
        (first, start), (last, now) = self._marks[0], self._marks[-1]
        return duration((now - start) / (last - first) * (self._steps - step))

    def _kept(self, metrics: Mapping[str, float]) -> str:
        return f"{metrics['groups.kept']:.0f}/{metrics['groups.drawn']:.0f}" if {"groups.kept", "groups.drawn"} <= set(metrics) else ""

    def _step_line(self, step: int, metrics: Mapping[str, float]) -> str:
        parts = [f"step {step}/{self._steps}"]
        parts += [f"{label}={form.format(metrics[metric])}" for _, label, metric, form in _SHOWN if metric in metrics]
        if ungraded := _ungraded(metrics):
            parts.append(f"ungraded={ungraded}")
        if kept := self._kept(metrics):
            parts.append(f"kept={kept}")
        if validation := _validation(metrics):
            parts.append(f"validation={validation}")
        return " ".join([*parts, f"eta={self._eta(step)}"])

    def _step_body(self, step: int, metrics: Mapping[str, float]) -> Group:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column(justify="right", style="bold")
        table.add_column(style="cyan", no_wrap=True)
        for label, _, metric, form in _SHOWN:
            if metric in metrics:
                table.add_row(label, form.format(metrics[metric]), sparkline(list(self._history[metric])))
        if ungraded := _ungraded(metrics):
            table.add_row("ungraded samples", ungraded, "")
        if kept := self._kept(metrics):
            table.add_row("groups kept/drawn", kept, "")
        if self._validation:
            table.add_row("last validation", self._validation, "")
        head = Table.grid(padding=(0, 2))
        head.add_row(ProgressBar(total=self._steps, completed=step, width=40), f"ETA {self._eta(step)}")
        return Group(head, Text(), table)

    def _draw(self, title: str, body: Group | Table) -> None:
        assert self._live is not None
        content = Group(body, Text(f"last event: {self._last_note}", style="yellow")) if self._last_note else body
        self._live.update(Panel(content, title=title, title_align="left", expand=False, padding=(0, 1)), refresh=True)

    def _line(self, text: str) -> None:
        print(text, file=self._console.file, flush=True)  # not through rich: it would wrap long lines and style numbers


def before_after_table(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    greedy_before: Mapping[str, Any] | None = None,
    greedy_after: Mapping[str, Any] | None = None,
) -> Table:
    """Solve rates per task and for all items; fits 80 columns. Arguments: results of `solve_summary`, or parts of `summary.json`."""
    table = Table(title="Held-out items solved before and after RL, in percent, with 95 % intervals", title_justify="left", box=SIMPLE_HEAD)
    table.show_edge = table.pad_edge = False  # the columns have to fit 80 characters
    table.collapse_padding = True
    table.add_column("task", no_wrap=True)
    for heading in ("before", "after", "gain, points", "mean\nscore", "greedy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in gain_rows(before, after, greedy_before, greedy_after):
        if row.task == "all":
            table.add_section()
        table.add_row(*map(Text, _cells(row)), style="bold" if row.task == "all" else "")
    return table


def _cells(row: GainRow) -> list[str]:
    def rate(value: float | None, interval: tuple[float, float] | None, form: str, ungraded: int = 0) -> str:
        told = (
            "none"
            if value is None or interval is None
            else f"{100 * value:{form}}\n[{100 * interval[0]:{form}}, {100 * interval[1]:{form}}]"
        )
        return told + (f"\n{ungraded} ungraded" if ungraded else "")

    def pair(first: float | None, second: float | None, scale: float, form: str) -> str:
        shown = ["none" if value is None else f"{scale * value:{form}}" for value in (first, second)]
        return "" if first is None and second is None else "\n> ".join(shown)

    greedy = pair(row.greedy_before, row.greedy_after, 100, ".1f")
    if any(row.greedy_ungraded):
        greedy += "\n{} > {}\nungraded".format(*row.greedy_ungraded)
    return [
        f"{row.task}\nn = {row.n}",
        rate(row.before, row.before_ci95, ".1f", row.ungraded[0]),
        rate(row.after, row.after_ci95, ".1f", row.ungraded[1]),
        rate(row.gain, row.gain_ci95, "+.1f"),
        pair(row.mean_before, row.mean_after, 1, ".3f"),
        greedy.strip(),
    ]


def before_after_text(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    greedy_before: Mapping[str, Any] | None = None,
    greedy_after: Mapping[str, Any] | None = None,
    encoding: str = "utf-8",
) -> str:
    """The same table as plain text without control codes, for logs. `encoding`: of where it goes, which may have no lines to draw with."""
    content = io.BytesIO()
    file = io.TextIOWrapper(content, encoding=encoding, errors="backslashreplace")
    Console(file=file, width=200, force_terminal=False, color_system=None).print(
        before_after_table(before, after, greedy_before, greedy_after)
    )
    file.flush()
    return content.getvalue().decode(encoding)
