"""`report.html` of an ablation, and the few lines for the terminal. One file, nothing loaded from elsewhere."""

from collections.abc import Sequence
from html import escape
from typing import Any

from jaxprorl.ablations.analysis import MAX_FLIPPED, Comparison
from jaxprorl.ablations.figures import BANDED, banded_svg, differences_svg, losses_svg
from jaxprorl.ablations.plan import Plan
from jaxprorl.ablations.results import COLUMNS, Result, lost_pairs, rows, ungraded
from jaxprorl.ablations.speed import WARM_UP_STEPS, Cost
from jaxprorl.evaluation.page import facts, page, table

ASSUMPTIONS = (
    "Pairs are runs of the same seed: same start weights, same prompt stream, same evaluation. The interval is Student's t over the seeds' "
    "differences. It takes them for independent and about normal, which few seeds cannot show; beside it stands the exact sign-flip test, "
    "which takes only that a difference is as likely to be positive as negative when the arms are equal, and which with n pairs cannot go "
    "below 2 / 2^n. Seeds stand for start model, prompts and sampling; tasks, model size and every field that is not an arm are fixed, and "
    "nothing here speaks of others."
)


def render(result: Result) -> str:
    """The report as HTML."""
    plan = result.plan
    title = escape(plan.name)
    body = [f"<h1>{title}</h1>", f'<p class="lead">{escape(headline(result))}</p>', *_notes(result)]
    body += _outcome(result) if plan.question == "outcome" else _speed(result)
    columns = [column for column in COLUMNS if not column.endswith("_digest")]
    shown = [[_cell(row[column]) for column in columns] for row in rows(result)]
    body.append("<h2>Runs</h2>" + table([column.replace("_", " ") for column in columns], shown, frozenset({4})))
    body.append('<p class="soft">The same, with digests, is in <code>runs.csv</code>; each run has a report of its own in its folder.</p>')
    body.append(f"<h2>The plan, fixed before the first run</h2>{_plan_facts(plan)}")
    changes = [[escape(arm), escape(", ".join(fields) or "nothing")] for arm, fields in plan.arms.items()]
    body.append(table(("arm", "what it changes"), changes, frozenset({1})))
    return page(f"{title}: ablation", body)


def headline(result: Result) -> str:
    """One sentence."""
    plan, runs = result.plan, len(result.records) + len(result.failures)
    ended = f"{len(result.records)} of {runs} runs finished"
    if plan.question == "speed":
        ranked = sorted(result.costs, key=lambda cost: cost.step_s[1])
        return f"{ended}; median step: {', '.join(f'{cost.arm} {cost.step_s[1]:.3g} s' for cost in ranked) or 'none'}."
    clear = [found for found in result.comparisons if found.verdict in ("better", "worse")]
    told = ", ".join(f"{found.arm} {found.verdict} than {found.control} ({found.mean:+.4g})" for found in clear)
    return f"{ended}; {told or 'no two arms are distinguishable'} ({plan.metric}, comparisons: {len(result.comparisons)})."


def text(result: Result) -> str:
    """The result for the terminal."""
    lines = [headline(result)]
    lines += [f"{found.arm} - {found.control}: {_sentence(found, result.plan)}" for found in result.comparisons]
    lines += [_cost_line(cost) for cost in result.costs]
    for found in result.agreements:
        largest = "no step to compare" if found.largest is None else f"largest loss difference {found.largest:.3g}"
        lines.append(f"{found.arm} - {found.control}, seed {found.seed}: {largest} over the {found.steps} steps with the same samples")
    lines += [f"{failure.state.upper()} {failure.run.name}: {failure.line}" for failure in result.failures]
    lines += [told] if (told := ungraded(result)) else []
    lines += [f"excluded: {lost}" for lost in lost_pairs(result)] if result.plan.question == "outcome" else []
    return "\n".join(lines)


def _sentence(found: Comparison, plan: Plan) -> str:
    if found.interval is None or found.interval_corrected is None or found.detectable is None:
        few = f"{len(found.differences)} pairs" if len(found.differences) < 2 else "the differences have no spread to judge by"
        return f"{found.verdict} ({few})"
    low, high = found.interval_corrected
    said = f"{found.mean:+.4g}, corrected interval {low:+.4g} to {high:+.4g}, {len(found.seeds)} pairs: {found.verdict}"
    if found.verdict == "not distinguishable":
        said += f"; {found.detectable:.3g} would have been found with {plan.power:.0%} chance at the spread seen"
    return said


def _notes(result: Result) -> list[str]:
    notes = []
    if result.failures:
        listed = "; ".join(f"{failure.run.name}: {failure.line}" for failure in result.failures)
        lost = "; ".join(lost_pairs(result)) if result.plan.question == "outcome" else ""
        excluded = f" Their pairs are left out ({lost})." if lost else ""
        notes.append(f'<p class="note">{len(result.failures)} runs have no result. {escape(listed)}.{escape(excluded)}</p>')
    if told := ungraded(result):
        notes.append(f'<p class="note">In no rate are {escape(told)}.</p>')
    for change in result.changes:
        fields = "; ".join(change["fields"])
        notes.append(f'<p class="note">The plan was changed after runs had begun: “{escape(change["why"])}”. {escape(fields)}.</p>')
    return notes


def _outcome(result: Result) -> list[str]:
    plan = result.plan
    heads = (
        "comparison", "pairs", "mean difference", f"{plan.confidence:.0%} interval", "corrected interval", f"p ({plan.correction})",
        "p, sign flips", "verdict", "would have been found",
    )  # fmt: skip
    compared = [
        [
            escape(f"{found.arm} − {found.control}"), str(len(found.seeds)), _signed(found.mean), _interval(found.interval),
            _interval(found.interval_corrected), _number(found.p_corrected), _number(found.sign_flip_p), _verdict(found),
            "" if found.detectable is None else f"{found.detectable:.3g}",
        ]
        for found in result.comparisons
    ]  # fmt: skip
    planned = (
        "" if plan.minimum_detectable is None else f" Planned for: {plan.minimum_detectable:.3g}, under a spread of {plan.paired_sd:g}."
    )
    out = [f"<h2>Paired differences of {escape(plan.metric)}</h2>", table(heads, compared)]
    out.append(
        f'<p class="soft">“Would have been found”: the difference that such a design finds with {plan.power:.0%} chance at the spread that '
        f"was seen, at the level of the corrected test.{planned} Sign flips are counted up to {MAX_FLIPPED} pairs. {ASSUMPTIONS}</p>"
    )
    out.append(f"<figure>{differences_svg(result.comparisons, plan.minimum_detectable)}</figure>")
    by_arm = {arm: result.of_arm(arm) for arm in plan.arms}
    figures = []
    for plot in BANDED:
        svg = banded_svg(plot, by_arm, plan.budget["kind"])
        if svg:
            smooth = " Each seed smoothed over five steps." if plot.smooth else ""
            figures.append(f"<figure><h3>{plot.title}</h3>{svg}<figcaption>Mean, lowest and highest seed.{smooth}</figcaption></figure>")
    out.append(f'<h2>Over the budget</h2><div class="grid">{"".join(figures)}</div>' if figures else "")
    return out


def _speed(result: Result) -> list[str]:
    heads = (
        "arm", "devices", "step, s", "quartiles", "updates, s", "quartiles", "sampled tokens/s", "trained tokens/s", "host peak, GB",
        "device peak, GB", "estimated per device, GB",
    )  # fmt: skip
    body = [
        [
            escape(cost.arm), str(cost.devices), f"{cost.step_s[1]:.3g}", f"{cost.step_s[0]:.3g} to {cost.step_s[2]:.3g}",
            f"{cost.update_s[1]:.3g}", f"{cost.update_s[0]:.3g} to {cost.update_s[2]:.3g}", f"{cost.tokens_per_s:,.0f}",
            f"{cost.trained_tokens_per_s:,.0f}", _gigabytes(cost.peak_bytes), _gigabytes(cost.device_peak_bytes),
            _gigabytes(cost.estimated_bytes),
        ]
        for cost in result.costs
    ]  # fmt: skip
    out = ["<h2>Cost of a step</h2>", table(heads, body)]
    out.append(
        f'<p class="soft">Medians over all steps but the first {WARM_UP_STEPS} of each run. “Updates” begin when the batch goes to devices '
        "and end when its metrics are there, the next rollout's first dispatch among it. Host peak: the process and its graders. "
        "Estimated: the compiler's memory analysis of the training step. A dash: the platform does not tell.</p>"
    )
    compared = [
        [
            escape(f"{found.arm} − {found.control}"), str(found.seed), str(found.steps),
            "–" if found.largest is None else f"{found.largest:.3g}",
        ]
        for found in result.agreements
    ]  # fmt: skip
    named = ("comparison", "seed", "steps with the same samples", "largest difference of the loss")
    out += ["<h2>Agreement</h2>", table(named, compared)]
    out.append(
        '<p class="soft">Rounding differs between arms. As long as all samples of a step are the same in both, the losses are of the same '
        "data and differ by rounding alone; from the first different sample on they are of different data and are not compared.</p>"
    )
    svg = losses_svg({f"{found.arm} − {found.control}, seed {found.seed}": found.per_step for found in result.agreements})
    return [*out, f"<figure>{svg}</figure>" if svg else ""]


def _plan_facts(plan: Plan) -> str:
    kind = plan.budget["kind"].replace("_", " ")
    pairs: list[tuple[str, Any]] = [
        ("experiment", plan.experiment),
        ("fields of all arms", ", ".join(plan.fields) or "unchanged"),
        ("seeds", plan.seeds),
        ("budget of a run", f"{plan.budget['size']:,} {kind}, to the first step boundary at which it is used up"),
        ("question", plan.question),
    ]
    if plan.question == "outcome":
        pairs += [
            ("primary metric", plan.metric),
            ("confidence", plan.confidence),
            ("correction", f"{plan.correction}, {len(plan.comparisons)} comparisons"),
            ("assumed spread of differences", plan.paired_sd),
            ("detectable difference", plan.minimum_detectable),
            ("power", plan.power),
        ]
    return facts([*pairs, ("digest", plan.digest)])


def _verdict(found: Comparison) -> str:
    mark = {"better": "good", "worse": "mark"}.get(found.verdict)
    return f'<span class="{mark}">{found.verdict}</span>' if mark else found.verdict


def _cost_line(cost: Cost) -> str:
    low, middle, high = cost.step_s
    estimated = "" if cost.estimated_bytes is None else f", {_gigabytes(cost.estimated_bytes)} GB per device estimated"
    return (
        f"{cost.arm}: step {middle:.3g} s ({low:.3g} to {high:.3g}), {cost.tokens_per_s:,.0f} sampled tokens/s, "
        f"{_gigabytes(cost.peak_bytes)} GB on the host{estimated}"
    )


def _cell(value: Any) -> str:
    return (
        f"{value:.4g}"
        if isinstance(value, float)
        else escape(f"{value:,}" if isinstance(value, int) and value >= 10_000 else "none" if value is None else str(value))
    )


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.4g}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _interval(interval: Sequence[float] | None) -> str:
    return "–" if interval is None else f"{interval[0]:+.4g} to {interval[1]:+.4g}"


def _gigabytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 1e9:.3g}"
