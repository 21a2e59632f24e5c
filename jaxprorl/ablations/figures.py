"""Plots of an ablation as inline SVG, in the look of a run's report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from jaxprorl.ablations.analysis import Comparison
from jaxprorl.ablations.records import Record
from jaxprorl.evaluation.curves import AFTER, COLOURS, MARK, STYLE, running_mean, svg_element

GRID_POINTS = 101
PALETTE = (*COLOURS, MARK, "#52606d", "#9c3587", "#7a5c00")


@dataclass(frozen=True)
class Banded:
    """A plot of one metric over the budget: mean over seeds, with a band from the lowest to the highest seed."""

    title: str
    metric: str
    unit: str
    smooth: bool


BANDED = (
    Banded("Validation", "validation.solve_rate", "solve rate", smooth=False),
    Banded("Training reward", "reward.mean", "mean reward", smooth=True),
    Banded("KL to the reference", "kl.k1", "nats per token", smooth=True),
    Banded("Entropy", "entropy", "nats per token", smooth=True),
    Banded("Response length", "response_tokens.mean", "tokens", smooth=True),
    Banded("Update norm", "update_norm", "norm of the parameter change", smooth=True),
)


def series(record: Record, metric: str, budget: str, smooth: bool) -> tuple[list[float], list[float]]:
    """(what was spent, value) after each step that has the metric."""
    points = [(float(spent), float(row[metric])) for spent, row in zip(record.spent(budget), record.rows, strict=True) if metric in row]
    values = [value for _, value in points]
    return [spent for spent, _ in points], running_mean(values) if smooth else values


def band(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """(spent, mean, lowest, highest) over the part that all curves cover, linear between their points; None where that is empty."""
    curves = [(xs, ys) for xs, ys in curves if xs]
    if not curves:
        return None
    first, last = max(xs[0] for xs, _ in curves), min(xs[-1] for xs, _ in curves)
    if first > last:
        return None
    grid = np.linspace(first, last, GRID_POINTS)
    values = np.array([np.interp(grid, xs, ys) for xs, ys in curves])
    return grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def banded_svg(plot: Banded, records: Mapping[str, Sequence[Record]], budget: str) -> str | None:
    """The plot for all arms; None when no run has the metric."""
    bands = {arm: band([series(record, plot.metric, budget, plot.smooth) for record in found]) for arm, found in records.items()}
    drawn = {arm: found for arm, found in bands.items() if found is not None}
    if not drawn:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.4, 2.9), layout="constrained")
        axes = figure.add_subplot()
        words = []
        for number, (arm, (grid, mean, low, high)) in enumerate(drawn.items()):
            colour = PALETTE[number % len(PALETTE)]
            axes.plot(grid, mean, color=colour, linewidth=1.7, label=arm, linestyle="-" if number < len(PALETTE) else "--")
            axes.fill_between(grid, low, high, color=colour, alpha=0.16, linewidth=0)
            words.append(f"{arm} from {mean[0]:.4g} to {mean[-1]:.4g}")
        axes.set_xlabel(budget.replace("_", " "))
        axes.set_ylabel(plot.unit)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        figure.legend(loc="outside upper left", ncols=4, fontsize=9, handlelength=1.8, columnspacing=1.4)
        return svg_element(figure, plot.title, f"{plot.title} over {budget.replace('_', ' ')}: {'; '.join(words)}")


def differences_svg(comparisons: Sequence[Comparison], detectable: float | None) -> str:
    """Each comparison's differences as dots, their mean and the corrected interval; the grey strip is below what the design can find."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 0.9 + 0.5 * len(comparisons)), layout="constrained")
        axes = figure.add_subplot()
        if detectable is not None:
            axes.axvspan(-detectable, detectable, color="#e4e7eb", alpha=0.6, linewidth=0)
        axes.axvline(0.0, color="#52606d", linewidth=1.0)
        words = []
        for place, found in enumerate(comparisons):
            axes.plot(found.differences, [place] * len(found.differences), "o", color="#9aa5b1", markersize=4.5)
            if found.interval_corrected is not None:
                axes.plot(found.interval_corrected, [place, place], color=AFTER, linewidth=2.2)
            if found.mean is not None:
                axes.plot([found.mean], [place], "D", color=AFTER, markersize=6.5)
                words.append(f"{found.arm} against {found.control} {found.mean:+.4g}, {found.verdict}")
        axes.set_yticks(range(len(comparisons)), [f"{found.arm} − {found.control}" for found in comparisons])
        axes.set_ylim(len(comparisons) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("difference (dots: seeds; diamond: mean; bar: corrected interval; grey: less than the design promises to find)")
        return svg_element(figure, "differences", f"Paired differences: {'; '.join(words) or 'none'}")


def losses_svg(per_step: Mapping[str, Sequence[float]]) -> str | None:
    """Loss difference of two arms in each step, one line per pair and seed; None without a step."""
    drawn = {label: values for label, values in per_step.items() if values}
    if not drawn:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 2.7), layout="constrained")
        axes = figure.add_subplot()
        for number, (label, values) in enumerate(drawn.items()):
            axes.plot(range(len(values)), values, color=PALETTE[number % len(PALETTE)], marker="o", markersize=3, label=label)
        axes.set_yscale("symlog", linthresh=1e-9)
        axes.set_xlabel("step")
        axes.set_ylabel("difference of the loss")
        figure.legend(loc="outside upper left", ncols=4, fontsize=9)
        return svg_element(figure, "losses", f"Largest loss difference: {', '.join(f'{label} {max(v):.2g}' for label, v in drawn.items())}")
