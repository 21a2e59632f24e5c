"""Plots of a run as inline SVG: no pixels, no external fonts, and the same bytes for the same numbers."""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from jaxprorl.evaluation.statistics import GainRow

INK, GRID, BEFORE, AFTER, MARK = "#1f2933", "#e4e7eb", "#9aa5b1", "#0b6e99", "#c2410c"
COLOURS = (AFTER, "#c98a00", "#6d4ca3", "#3a7d44")
_SMOOTH = 5  # steps of the running mean drawn over noisy series

STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: sharp, selectable, in the reader's own sans-serif
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
    "text.parse_math": False,  # a task's name may hold a dollar sign
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9aa5b1",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": "#52606d",
    "ytick.color": "#52606d",
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Curve:
    """One plot of the report: what it is called, what it draws, what a reader should look for.

    `series` are (metric, label); `smooth` draws a running mean over the raw values; `log` draws a log axis above 0.01, linear below.
    """

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    note: str
    smooth: bool = False
    log: bool = False


CURVES = (
    Curve(
        "Reward and solve rate",
        "share, or reward",
        (("reward.mean", "mean reward"), ("reward.solve_rate", "solve rate")),
        "On the training prompts, at the rollout temperature.",
        smooth=True,
    ),
    Curve(
        "Validation",
        "share, or reward",
        (("validation.solve_rate", "solve rate"), ("validation.mean_score", "mean score")),
        "A split of its own. Only a reset whose event says `signals: validation` has seen it.",
    ),
    Curve(
        "KL to the reference",
        "nats per token",
        (("kl.k3", "k3"), ("kl.k1", "k1")),
        "Zero after a reset of the reference: it is the policy again. k3 jumps when one improbable token is drawn; k1 is the calmer gauge.",
        log=True,
    ),
    Curve("Entropy", "nats per token", (("entropy", "entropy"),), "How undecided the policy still is; zero means nothing left to explore."),
    Curve(
        "Response length",
        "tokens",
        (("response_tokens.mean", "mean"), ("response_tokens.max", "longest")),
        "Completions of the step, stop token included.",
    ),
    Curve("Groups", "groups", (("groups.drawn", "drawn"), ("groups.kept", "kept")), "Drawn includes refills; kept is what was trained on."),
    Curve(
        "Groups without signal",
        "share of drawn groups",
        (("groups.zero_spread_share", "no spread"), ("groups.all_correct_share", "all correct")),
        "All samples of a group have the same reward: dropped.",
        smooth=True,
    ),
    Curve("Gradient norm", "norm before clipping", (("grad_norm", "gradient norm"),), "Mean over the step's updates.", smooth=True),
)


def running_mean(values: Sequence[float], width: int = _SMOOTH) -> list[float]:
    """Mean over the last `width` values (fewer at the start)."""
    return [sum(values[max(0, i + 1 - width) : i + 1]) / min(width, i + 1) for i in range(len(values))]


def svg_element(figure: Figure, salt: str, label: str) -> str:
    """The figure as an `<svg>` element for HTML, with `label` as its text alternative (plain text, escaped here)."""
    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": salt}):
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)  # HTML needs no name spaces, and the file shall hold no address at all
    text = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", text, count=1), count=1)
    safe = label.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    return text.replace("<svg", f'<svg role="img" aria-label="{safe}"', 1)


def curve_svg(
    curve: Curve, rows: Sequence[Mapping[str, Any]], resets: Sequence[int], stages: Mapping[int, int] | None = None
) -> str | None:
    """The curve over the metric rows; None when no row has its metrics.

    Args:
        resets: steps right before which there is a dashed line.
        stages: first step -> number; a grey line right before the first step, with the number, for all but the one that begins at step 0.
    """
    drawn = [
        (label, [(row["step"], row[metric]) for row in rows if metric in row])
        for metric, label in curve.series
        if any(metric in row for row in rows)
    ]
    if not drawn:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.4, 2.7), layout="constrained")
        axes = figure.add_subplot()
        words = []
        for (label, points), colour in zip(drawn, COLOURS, strict=False):
            steps, values = [p[0] for p in points], [p[1] for p in points]
            marker = "o" if len(points) <= 24 else None
            if curve.smooth and len(points) > 2 * _SMOOTH:
                axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
                axes.plot(steps, running_mean(values), color=colour, linewidth=1.9, label=label)
            else:
                axes.plot(steps, values, color=colour, linewidth=1.7, marker=marker, markersize=3.5, label=label)
            words.append(f"{label} from {values[0]:.4g} to {values[-1]:.4g}")
        for index, step in enumerate(resets):
            axes.axvline(step, color=MARK, linewidth=1.1, linestyle=(0, (4, 3)), label="reset" if index == 0 else None, gid=f"reset-{step}")
        for step, number in (stages or {}).items():
            if step:
                axes.axvline(step - 0.5, color=BEFORE, linewidth=1.0, zorder=0, gid=f"stage-{number}")
            top = axes.get_xaxis_transform()
            axes.text(step - 0.5 if step else 0, 1.0, f" {number}", transform=top, va="top", fontsize=8, color="#52606d")
        if curve.log:
            axes.set_yscale("symlog", linthresh=1e-2)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            lowest = min(value for _, points in drawn for _, value in points)
            axes.set_ylim(bottom=min(1.3 * lowest, 0.0))
        elif curve.unit.startswith("share"):
            seen = [value for _, points in drawn for _, value in points]
            axes.set_ylim(min(-0.02, 1.05 * min(seen)), max(1.02, 1.05 * max(seen)))  # rewards may lie outside of 0 and 1
        else:
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.set_xlabel("step")
        axes.set_ylabel(curve.unit)
        figure.legend(loc="outside upper left", ncols=4, fontsize=9, handlelength=1.8, columnspacing=1.4)
        marks = f"; resets after step {', '.join(map(str, resets))}" if resets else ""
        marks += "".join(f"; stage {number} from step {step}" for step, number in (stages or {}).items())
        return svg_element(figure, curve.title, f"{curve.title} over steps: {', '.join(words)}{marks}")


def gains_svg(rows: Sequence[GainRow]) -> str:
    """Before and after per task, with their 95 % intervals, as two dots on a line each."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 0.62 + 0.42 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        for place, row in enumerate(rows):
            if row.before is not None and row.after is not None:
                axes.plot([100 * row.before, 100 * row.after], [place, place], color=GRID, linewidth=6, solid_capstyle="round", zorder=1)
            for value, interval, colour in ((row.before, row.before_ci95, BEFORE), (row.after, row.after_ci95, AFTER)):
                if value is None or interval is None:  # nothing was graded
                    continue
                low, high = interval
                axes.plot([100 * low, 100 * high], [place, place], color=colour, linewidth=2.2, zorder=2)
                axes.plot([100 * value], [place], "o", color=colour, markersize=7.5, zorder=3, label=None)
        axes.set_yticks(range(len(rows)), [row.task for row in rows])
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.set_xlim(0, 100)
        axes.set_xlabel("held-out items solved, % (grey: before RL, blue: after; bars: 95 % intervals)")
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        rates = ((row, ["none" if rate is None else f"{100 * rate:.1f}" for rate in (row.before, row.after)]) for row in rows)
        words = "; ".join(f"{row.task} from {before} to {after} percent" for row, (before, after) in rates)
        return svg_element(figure, "gains", f"Solve rates before and after RL: {words}")
