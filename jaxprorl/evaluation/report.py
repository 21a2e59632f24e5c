"""`report.html`: what a run did, told from its files alone. One file, no scripts, nothing loaded from elsewhere.

Whatever comes out of a file goes through `escape`: prompts, completions and task names may hold markup.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jaxprorl.evaluation.curves import CURVES, curve_svg, gains_svg
from jaxprorl.evaluation.page import facts, page, table, text
from jaxprorl.evaluation.statistics import GainRow, gain_rows
from jaxprorl.files import write_atomically
from jaxprorl.monitoring import events as event_log
from jaxprorl.monitoring import jsonl
from jaxprorl.monitoring.samples import read_samples

# Others are only counted.
_LISTED = (
    "run_start", "warm_start", "resume", "stage", "stage_end", "reset", "reset_effect", "alarm", "interrupted", "evaluation",
    "grader_errors", "run_end",
)  # fmt: skip
_SAMPLES_SHOWN = 4  # per step, one per task first


def _json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON object: {error}") from error


def _seconds(value: float) -> str:
    return f"{value / 60:.1f} min" if value >= 100 else f"{value:.1f} s"


def _tiles(summary: Mapping[str, Any], total: GainRow) -> str:
    tiles = [(f"{percent(total.before)} → {percent(total.after)}", f"held-out items solved, n = {total.n}{_ungraded(total.ungraded)}")]
    if total.gain is not None and total.gain_ci95 is not None:
        low, high = (100 * bound for bound in total.gain_ci95)
        tiles.append((f"{100 * total.gain:+.1f}", f"points gained, 95 % interval {low:+.1f} to {high:+.1f}"))
    tiles += [
        (f"{summary['steps']}", f"RL steps, {summary['resets']} reset{'' if summary['resets'] == 1 else 's'}"),
        (_seconds(summary["seconds"]["rl"]), f"of RL; {_seconds(summary['seconds']['total'])} in all"),
        (f"{summary['completion_tokens_per_s']:,.0f}", "sampled tokens per second"),
        (f"{summary['peak_memory_bytes'] / 2**30:.2f} GiB", "peak memory"),
    ]
    return (
        '<div class="tiles">' + "".join(f'<div class="card tile"><b>{big}</b><span>{small}</span></div>' for big, small in tiles) + "</div>"
    )


def percent(share: float | None) -> str:
    """A share as text."""
    return "none graded" if share is None else f"{100 * share:.1f} %"


def _ungraded(counts: tuple[int, int]) -> str:
    """How many items before and after are in no rate, as the end of a sentence; empty where all are."""
    return f"; ungraded {counts[0]} → {counts[1]}" if any(counts) else ""


def _gain_table(rows: Sequence[GainRow]) -> str:
    def rate(value: float | None, interval: tuple[float, float] | None, form: str = ".1f", ungraded: int = 0) -> str:
        told = "none"
        if value is not None and interval is not None:
            told = f"{100 * value:{form}} <small>[{100 * interval[0]:{form}}, {100 * interval[1]:{form}}]</small>"
        return told + (f" <small>{ungraded} ungraded</small>" if ungraded else "")

    def pair(first: float | None, second: float | None, scale: float, form: str) -> str:
        shown = ["none" if value is None else f"{scale * value:{form}}" for value in (first, second)]
        return "" if first is None and second is None else " → ".join(shown)

    body = []
    for row in rows:
        cells = [
            escape(row.task),
            rate(row.before, row.before_ci95, ungraded=row.ungraded[0]),
            rate(row.after, row.after_ci95, ungraded=row.ungraded[1]),
            rate(row.gain, row.gain_ci95, "+.1f"),
            '<span class="good">yes</span>' if row.clear and row.gain is not None and row.gain > 0 else "no",
            pair(row.mean_before, row.mean_after, 1, ".3f"),
            f"{pair(row.greedy_before, row.greedy_after, 100, '.1f')}<small>{_ungraded(row.greedy_ungraded)}</small>",
            str(row.n),
        ]
        body.append(f"<tr{' class=all' if row.task == 'all' else ''}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(
        f"<th>{h}</th>" for h in ("task", "before, %", "after, %", "gain, points", "intervals apart", "mean score", "greedy, %", "n")
    )
    return (
        f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
        '<p class="soft">Same items before and after but for the ungraded ones, one sample each at the evaluation temperature; '
        "greedy decoding beside it. In "
        "brackets: 95 % Wilson intervals, for the gain Newcombe's, which treats the two samples as independent. “Intervals apart”: the "
        "gain is positive and the two intervals do not touch. Rates count solved items, the mean score is the mean reward; “ungraded” "
        "items, whose grader failed, are in neither.</p>"
    )


def _explanation(warm_start: Mapping[str, Any] | None, total: GainRow | None) -> str:
    if warm_start is None:
        return "<p>The run folder has no <code>warm_start.json</code>: what the policy was before RL is not recorded here.</p>"
    parts = [f"<p>{escape(part.strip())}</p>" for part in str(warm_start.get("explanation", "")).split("\n\n") if part.strip()]
    if not parts:
        parts = ["<p>The warm start left no explanation of its demonstrations.</p>"]
    share = warm_start.get("careless_share")
    if share is not None and total is not None:
        parts.append(
            f"<p>In numbers: {100 * share:.0f} % of the demonstrations of the last supervised phase were careless (no work shown, wrong "
            f"answer). The policy then solved {percent(total.before)} of the held-out items; after RL it solves {percent(total.after)}"
            f"{_ungraded(total.ungraded)}.</p>"
        )
    return "".join(parts) + facts((name, value) for name, value in warm_start.items() if name != "explanation")


def _curves(rows: Sequence[Mapping[str, Any]], resets: Sequence[int], stages: Mapping[int, int]) -> str:
    figures = []
    for curve in CURVES:
        svg = curve_svg(curve, rows, resets, stages)
        if svg:
            smooth = " Thin: per step; thick: mean of the last five." if curve.smooth else ""
            note = f"<figcaption>{escape(curve.note + smooth)}</figcaption>"
            figures.append(f"<figure><h3>{escape(curve.title)}</h3>{svg}{note}</figure>")
    if not figures:
        return "<p>No metrics were recorded.</p>"
    said = ['The <span class="mark">dashed lines</span> mark resets.'] if resets else []
    said += ["Grey lines part the stages, whose numbers stand beside them."] if stages else []
    return (f'<p class="soft">{" ".join(said)}</p>' if said else "") + f'<div class="grid">{"".join(figures)}</div>'


def _stages(rows: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> str:
    """What each stage changed, how it ended and where it left validation; empty without stages."""
    ends = {event["number"]: event for event in events if event["kind"] == "stage_end"}
    resets = {event["step"]: event["reason"] for event in events if event["kind"] == "reset"}
    cells = []
    for begun in (event for event in events if event["kind"] == "stage"):
        steps = [row for row in rows if row.get("stage") == begun["number"]]
        rates = [
            f"{100 * row['validation.solve_rate']:.1f}"
            + (f" ({row['validation.ungraded']} ungraded)" if row.get("validation.ungraded") else "")
            for row in steps
            if "validation.solve_rate" in row
        ]
        cells.append(
            [
                str(begun["number"]),
                escape(begun["name"]),
                f"{steps[0]['step']} to {steps[-1]['step']}" if steps else "",
                "; ".join(f"{escape(field)} = {text(value)}" for field, value in begun["changes"].items()) or "nothing",
                "yes" if resets.get(begun["step"]) == f"stage {begun['name']}" else "no",
                escape(ends[begun["number"]]["reason"]) if begun["number"] in ends else "with the run",
                rates[-1] if rates else "",
            ]
        )
    if not cells:
        return ""
    head = ("", "stage", "steps", "changes", "reset at its start", "ended", "last validation, % solved")
    return "<h2>Stages</h2>" + table(head, cells, frozenset({1, 3, 5}))


def _events(events: Sequence[Mapping[str, Any]]) -> str:
    if not events:
        return "<p>No events were recorded.</p>"
    counts = Counter(event["kind"] for event in events)
    refilled = sum(event.get("prompts", 0) for event in events if event["kind"] == "refill")
    dropped = sum(len(event.get("prompt_ids", ())) for event in events if event["kind"] == "drop")
    said = ", ".join(f"{escape(kind)} {count}" for kind, count in sorted(counts.items()))
    extra = f" Groups dropped: {dropped}; prompts drawn in refills: {refilled}."
    listed = [
        [
            str(event["step"]),
            f'<span class="mark">{escape(event["kind"])}</span>' if event["kind"] == "reset" else escape(event["kind"]),
            "; ".join(f"{escape(name)}: {text(value)}" for name, value in event.items() if name not in ("step", "kind")),
        ]
        for event in events
        if event["kind"] in _LISTED
    ]
    validations = [
        [
            str(event["step"]),
            *("none" if event.get(name) is None else f"{event[name]:.3f}" for name in ("solve_rate", "mean_score")),
            str(event.get("ungraded") or ""),
        ]
        for event in events
        if event["kind"] == "validation"
    ]
    out = f"<p>Counts: {said}.{extra}</p>" + table(("step", "event", "what"), listed, frozenset({1, 2}))
    if validations:
        shown = table(("step", "solve rate", "mean score", "ungraded"), validations)
        out += f"<details><summary>{len(validations)} validations</summary>{shown}</details>"
    return out


def _samples(folder: Path) -> str:
    paths = sorted(folder.glob("step_*.parquet"))
    out = ""
    for path in [paths[0], paths[-1]] if len(paths) > 1 else paths:
        by_task: dict[str, list[dict[str, Any]]] = {}
        for row in read_samples(path):
            by_task.setdefault(row["task"], []).append(row)
        rows = [rows[0] for _, rows in sorted(by_task.items())][:_SAMPLES_SHOWN]
        cells = [[escape(r["task"]), escape(r["prompt"]), escape(r["completion"]), escape(r["answer"]), text(r["score"])] for r in rows]
        if cells:
            out += f"<h3>Step {rows[0]['step']}, the first sample of each task</h3>"
            out += table(("task", "prompt", "completion", "reference", "score"), cells, frozenset({1, 2, 3}))
    return f"<h2>Answers</h2>{out}" if out else ""


def render(run_dir: str | os.PathLike[str]) -> str:
    """The report of a run folder as HTML; says which of the run's files are not there.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: a file in it cannot be read (names it).
    """
    run = Path(run_dir)
    if not run.is_dir():
        raise FileNotFoundError(f"no run folder {run}")
    config, summary, warm_start = (_json(run / name) for name in ("config.json", "summary.json", "warm_start.json"))
    rows, events = (jsonl.read(run / name) if (run / name).exists() else [] for name in ("metrics.jsonl", "events.jsonl"))
    names = ("config.json", "metrics.jsonl", "events.jsonl", "summary.json", "warm_start.json")
    missing = [name for name in names if not (run / name).exists()]
    start: Mapping[str, Any] = next((event for event in events if event["kind"] == "run_start"), {})
    resets = [event["step"] for event in events if event["kind"] == "reset"]

    title = escape(str((config or {}).get("run_name") or run.resolve().name))
    body = [f"<h1>{title}</h1>"]
    total: GainRow | None = None
    if summary:
        greedy = summary.get("greedy", {})
        gains = gain_rows(summary["before"], summary["after"], greedy.get("before"), greedy.get("after"))
        total = gains[-1]
        verdict = "the intervals do not touch" if total.clear else "the intervals touch: this run cannot tell the two apart"
        if total.before is None or total.after is None:
            verdict = "nothing could be graded on one side: there is no gain to tell"
        body.append(
            f'<p class="lead">Reinforcement learning with verifiable rewards took the policy from {percent(total.before)} to '
            f"{percent(total.after)} of the held-out items ({verdict}{_ungraded(total.ungraded)}).</p>"
        )
        body.append(_tiles(summary, total))
    else:
        body.append('<p class="lead">This run has not been evaluated after RL yet.</p>')
    if missing:
        absent = ", ".join(f"<code>{name}</code>" for name in missing)
        body.append(f'<p class="note">Not in the run folder: {absent}. What they would tell is missing below.</p>')
    if summary:
        body.append(f"<h2>Before and after, per task</h2>{_gain_table(gains)}<figure>{gains_svg(gains)}</figure>")
    body.append(f"<h2>What was demonstrated, and what kind of gain this is</h2>{_explanation(warm_start, total)}")
    body.append(_stages(rows, events))
    stages = {event["step"]: event["number"] for event in events if event["kind"] == "stage"}
    body.append(f"<h2>The run, step by step</h2>{_curves(rows, resets, stages)}")
    body.append(f"<h2>What the run decided</h2>{_events(events)}")
    body.append(_samples(run / "samples"))
    known = [
        ("seed", (summary or {}).get("seed", start.get("seed", (config or {}).get("seed")))),
        ("steps in the log", len(rows) or None),
        ("resets", len(resets)),
        ("parameters of the policy", start.get("parameters", (warm_start or {}).get("parameters"))),
        ("model", (config or {}).get("model")),
        ("devices", start.get("devices")),
        ("seconds", (summary or {}).get("seconds")),
        ("package versions", start.get("versions")),
    ]
    body.append(f"<h2>Facts</h2>{facts(known)}")
    if config:
        body.append(f"<details><summary>Resolved config</summary><pre>{escape(json.dumps(config, indent=2))}</pre></details>")
    kinds = "".join(f"<dt>{escape(kind)}</dt><dd>{escape(meaning)}</dd>" for kind, (meaning, _) in event_log.EVENTS.items())
    body.append(f'<details><summary>Event kinds</summary><div class="card"><dl>{kinds}</dl></div></details>')
    return page(f"{title}: run report", body)


def write_report(run_dir: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Writes `report.html` into the run's folder, or into another one, whole or not at all; may be called on an unfinished run and again.

    Errors as `render`.
    """
    path = Path(run_dir if output is None else output) / "report.html"
    write_atomically(path, render(run_dir))
    return path
