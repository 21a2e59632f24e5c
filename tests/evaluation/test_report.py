"""report.html from run folders: complete, with parts missing, with hostile text."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from factories import summary_of

from jaxprorl.evaluation.curves import CURVES, curve_svg, running_mean
from jaxprorl.evaluation.report import render, write_report
from jaxprorl.evaluation.summary import build_summary, write_summary
from jaxprorl.monitoring.events import EventLog
from jaxprorl.monitoring.metrics import METRICS, MetricsLog
from jaxprorl.monitoring.samples import write_samples

EVIL = "<script>alert('x')</script>"
TASKS = ("chain_sum", f"$a$ & {EVIL}")


class Page(HTMLParser):
    """Tags with their attributes, whether every element is closed, and the text."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def side(rate: float) -> dict:
    solved = round(400 * rate)
    return summary_of({task: [1.0] * solved + [0.0] * (400 - solved) for task in TASKS})


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"run_name": f"demo {EVIL}", "seed": 3}))
    with MetricsLog(folder / "metrics.jsonl") as metrics:
        for step in range(1, 31):
            values = {name: 0.1 + step / 100 for curve in CURVES for name, _ in curve.series if not name.startswith("validation")}
            metrics.append(step, {**values, **({"validation.solve_rate": step / 60} if step % 10 == 0 else {})})
    with EventLog(folder / "events.jsonl") as events:
        events.append(0, "run_start", seed=3, parameters=354_432, versions={"jax": "0.12.0"})
        events.append(4, "refill", round=1, prompts=16)
        events.append(5, "drop", prompt_ids=[1, 2])
        events.append(10, "validation", solve_rate=0.25, mean_score=0.5)
        events.append(15, "reset", reference=True, optimizer="all", reason=EVIL)
        events.append(20, "reset", reference=True, optimizer="all", reason="schedule")
    (folder / "warm_start.json").write_text(
        json.dumps({"explanation": f"Careless answers {EVIL}.\n\nA change of habit.", "updates": 3550, "careless_share": 0.55})
    )
    summary = build_summary(
        before=side(0.3),
        after=side(0.9),
        greedy_before=side(0.4),
        greedy_after=side(0.95),
        steps=30,
        resets=2,
        completion_tokens_per_s=8123.0,
        seconds={"warm_start": 120.0, "rl": 150.0, "evaluation": 10.0, "total": 290.0},
        peak_memory_bytes=2**30,
        seed=3,
    )
    write_summary(folder, summary)
    row = {"prompt_id": 1, "domain": "d", "task": TASKS[1], "prompt": EVIL, "answer": EVIL, "sample": 0, "completion": f"</td>{EVIL}"}
    row |= {
        "response_tokens": 3,
        "finish_reason": "stop",
        "score": None,
        "solved": None,
        "outcome": "grader_error",
        "grader": "g",
        "grader_version": "1",
    }
    row |= {"kept": False, "advantage": None, "policy_version_first": 0, "policy_version_last": 0}
    write_samples(folder / "samples", 1, [row])
    return folder


def test_a_complete_run(run):
    path = write_report(run)
    assert path == run / "report.html"
    html = path.read_text()
    page = Page(html)
    assert page.open == []
    for text in (
        "30.0 % to 90.0 %",
        "+60.0",
        "A change of habit.",
        "55 % of the demonstrations",
        "354,432",
        "jax 0.12.0",
        "40.0 → 95.0",
        "8,123",
        "1.00 GiB",
        "Groups dropped: 2; prompts drawn in refills: 16.",
        "1 validations",
    ):
        assert text in page.text, text
    assert html.count('id="reset-15"') == html.count('id="reset-20"') == len(CURVES)
    assert "Not in the run folder" not in page.text


def test_every_image_has_a_text_alternative(run):
    images = [attributes for tag, attributes in Page(render(run)).tags if tag in ("svg", "img")]
    assert len(images) == len(CURVES) + 1
    assert all(image["role"] == "img" and len(image["aria-label"]) > 20 for image in images)
    assert "resets after step 15, 20" in images[1]["aria-label"]


def test_nothing_is_loaded_from_elsewhere_and_nothing_runs(run):
    html = render(run)
    page = Page(html)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href"):
                assert value.startswith("#"), (tag, value)
    assert "//" not in re.sub(r"alert.*?</", "", html).replace("<!--", "")
    assert "@import" not in html
    assert not re.findall(r"url\((?!#)", html)


def test_text_from_files_stays_text(run):
    html = render(run)
    assert "<script" not in html
    text = Page(html).text
    assert text.count(EVIL) >= 7  # title, heading, task in table and plot, reset reason, explanation, prompt, answer, completion


def test_the_same_files_give_the_same_bytes(run):
    assert render(run) == render(run)


def test_stages_are_told_and_parted(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    rows = [row | {"stage": 1 if row["step"] < 12 else 2} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with EventLog(run / "events.jsonl") as log:
        log.append(0, "stage", number=1, name=EVIL, changes={"data.mix": [EVIL]}, reason="start")
        log.append(11, "stage_end", number=1, name=EVIL, reason=f"command: {EVIL}")
        log.append(12, "stage", number=2, name="longer", changes={}, reason="command")
        log.append(12, "reset", reason="stage longer")
    html = render(run)
    page = Page(html)
    assert page.open == [] and "<script" not in html
    assert html.count('id="stage-2"') == len(CURVES) and 'id="stage-1"' not in html
    for text in ("Stages", "1 to 11", "12 to 30", f"data.mix = {EVIL}", f"command: {EVIL}", "with the run", "nothing"):
        assert text in page.text, text
    labels = [attributes["aria-label"] for tag, attributes in page.tags if tag == "svg"]
    assert sum("stage 1 from step 0; stage 2 from step 12" in label for label in labels) == len(CURVES)


def test_an_empty_run_folder_says_what_is_missing(tmp_path):
    page = Page(write_report(tmp_path).read_text())
    assert page.open == []
    for name in ("config.json", "metrics.jsonl", "events.jsonl", "summary.json", "warm_start.json"):
        assert name in page.text
    assert "has not been evaluated" in page.text


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "events.jsonl", "summary.json", "warm_start.json"])
def test_any_file_may_be_absent(run, name):
    (run / name).unlink()
    assert f"Not in the run folder: {name}." in Page(render(run)).text


def test_intervals_that_touch_are_said(run):
    summary = json.loads((run / "summary.json").read_text())
    summary["after"] = summary["before"]
    write_summary(run, summary)
    assert "cannot tell the two apart" in Page(render(run)).text


def test_errors_name_the_file(run, tmp_path):
    (run / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json: not a JSON object"):
        render(run)
    with pytest.raises(FileNotFoundError, match="no run folder"):
        render(tmp_path / "none")


def test_curves_draw_known_metrics():
    assert all(name in METRICS for curve in CURVES for name, _ in curve.series)
    assert running_mean([1.0, 2.0, 6.0], width=2) == [1.0, 1.5, 4.0]


def test_the_command_rebuilds_report_and_tensorboard_without_jax(run):
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-X", "importtime", str(root / "launch" / "report.py"), "--run", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (run / "report.html").exists()
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    assert not re.search(r"\| +jax(\.|$)", done.stderr, flags=re.MULTILINE)
    missing = subprocess.run([*command[:-1], str(run / "none")], capture_output=True, text=True, timeout=120, check=False)
    assert missing.returncode == 2
    assert "no run folder" in missing.stderr


def test_the_signal_that_each_reset_saw_is_told(run):
    saw = {21: "step", 22: "training", 23: "validation", 24: "person"}
    with EventLog(run / "events.jsonl") as log:
        for step, signals in saw.items():
            log.append(step, "reset", reason=f"reason {step}", signals=signals, blind=signals != "validation")
    rows = re.findall(r"<tr>.*?</tr>", render(run), re.DOTALL)
    for step, signals in saw.items():
        (row,) = [Page(row).text for row in rows if f"reason {step}" in row]
        assert [name for name in saw.values() if f"signals: {name}" in row] == [signals], row
        assert f"blind: {'no' if signals == 'validation' else 'yes'}" in row


def test_what_was_not_graded_is_counted_beside_each_rate(run):
    summary = json.loads((run / "summary.json").read_text())
    before = summary_of({TASKS[0]: [1.0] * 30 + [None] * 7, TASKS[1]: [None] * 5})
    summary["before"] = {name: before[name] for name in ("solve_rate", "mean_score", "ci95", "ungraded", "per_task")}
    (run / "summary.json").write_text(json.dumps(summary))
    with EventLog(run / "events.jsonl") as events:
        events.append(28, "validation", solve_rate=None, mean_score=None, ungraded=50, per_task={})
    text = render(run)
    assert text.count("; ungraded 12 → 0") == 3, "the first sentence, the greedy column or tile, and what was demonstrated"
    for shown in ("7 ungraded", "5 ungraded", "12 ungraded", "; ungraded 12 → 0", "<td>none</td>", "<td>50</td>"):
        assert shown in text, shown
    nothing = {"solve_rate": None, "mean_score": None, "ci95": None, "n": 0, "ungraded": 5}
    summary["before"] = summary["after"] = summary["greedy"]["after"] = nothing | {"per_task": {TASKS[1]: nothing}}
    (run / "summary.json").write_text(json.dumps(summary))
    text = render(run)
    assert "from none graded to none graded of the held-out items (nothing could be graded on one side" in text
    assert "intervals touch" not in text


def test_a_summary_of_before_the_count_is_told_as_ever(run):
    now = render(run)
    summary = json.loads((run / "summary.json").read_text())
    for side in (summary["before"], summary["after"], *summary["greedy"].values()):
        for part in (side, *side["per_task"].values()):
            del part["ungraded"]
    (run / "summary.json").write_text(json.dumps(summary))
    assert render(run) == now


def test_rewards_outside_of_0_and_1_are_inside_their_plot():
    curve = next(curve for curve in CURVES if curve.title == "Reward and solve rate")
    rows = [{"step": step, "reward.mean": -3.0 + step, "reward.solve_rate": 0.5} for step in range(9)]
    ticks = [float(tick.replace("\u2212", "-")) for tick in re.findall(r">([-\u2212]?[0-9.]+)</text>", curve_svg(curve, rows, []))]
    assert min(ticks) <= -2
    assert max(ticks) >= 4
