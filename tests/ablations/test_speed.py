"""Costs and agreement of made-up runs, by hand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxprorl.ablations import speed
from jaxprorl.ablations.records import Record
from jaxprorl.ablations.runs import Run


def record(arm: str, step_s: list[float], losses: list[float | None], seed: int = 0, memory: dict[str, int] | None = None) -> Record:
    rows: list[dict[str, Any]] = []
    for step, (time_s, loss) in enumerate(zip(step_s, losses, strict=True)):
        row = {"step": step, "time.step_s": time_s, "time.update_s": time_s / 2, "tokens.completion": 100, "tokens.trained": 40}
        rows.append(row if loss is None else row | {"loss.total": loss})
    events = [{"kind": "compile", "name": name, **({"memory_bytes": memory} if memory else {})} for name in ("engine", "train_step")]
    return Record(Run(arm, seed), Path(arm), {}, {"devices": 2}, {}, events, rows, {"peak_memory_bytes": 10 * len(step_s)})


def plan(*arms: str, seeds: tuple[int, ...] = (0,)) -> Any:
    """The first arm is the control."""
    return SimpleNamespace(arms={arm: [] for arm in arms}, seeds=list(seeds), comparisons=[[arm, arms[0]] for arm in arms[1:]])


def test_the_first_step_of_every_run_is_left_out_of_times() -> None:
    memory = {"argument": 100, "output": 60, "alias": 50, "temp": 7}
    records = [record("a", [9.0, 1.0, 2.0], [0.0] * 3, 0, memory), record("a", [9.0, 3.0], [0.0] * 2, 1, memory), record("b", [9.0], [0.0])]
    (cost,) = speed.costs(plan("a", "b", seeds=(0, 1)), records)
    assert cost == speed.Cost(
        "a", 2, (1.5, 2.0, 2.5), (0.75, 1.0, 1.25), tokens_per_s=50.0, trained_tokens_per_s=40.0, peak_bytes=30, device_peak_bytes=None,
        estimated_bytes=117,
    )  # fmt: skip


def test_device_memory_is_the_largest_of_devices_and_runs() -> None:
    found = record("a", [1.0, 1.0], [0.0, 0.0])
    found.events.append({"kind": "device_memory", "peak_bytes": [5, 8, 6]})
    (cost,) = speed.costs(plan("a"), [found])
    assert (cost.device_peak_bytes, cost.estimated_bytes) == (8, None)


def test_equal_first_steps() -> None:
    assert speed.equal_steps([[["x"], ["y"]], [["x"], ["z"]]]) == 1
    assert speed.equal_steps([[["x"], ["y"]], [["x"]]]) == 1
    assert speed.equal_steps([[["q"]], [["x"]]]) == 0


def test_losses_are_compared_while_samples_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [record("a", [1.0] * 4, [1.0, 2.0, None, 0.0]), record("b", [1.0] * 4, [1.5, 2.0, 3.0, 9.0]), record("a", [1.0], [1.0], seed=1)]
    texts = {"a": [["x"], ["y"], ["z"], ["u"]], "b": [["x"], ["y"], ["z"], ["other"]]}
    monkeypatch.setattr(speed, "completions", lambda found: texts[found.run.arm])
    (agreement,) = speed.agreements(plan("a", "b", seeds=(0, 1)), runs)
    assert agreement == speed.Agreement(0, "b", "a", 3, (0.5, 0.0), 0.5), "a step without an update has no loss"


def test_an_arm_that_samples_otherwise_is_named_and_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [record(arm, [1.0] * 2, [loss, loss]) for arm, loss in (("dp", 1.0), ("tp", 1.25), ("fsdp", 1.5))]
    texts = {"dp": [["x"], ["y"]], "tp": [["other"], ["y"]], "fsdp": [["x"], ["y"]]}
    monkeypatch.setattr(speed, "completions", lambda found: texts[found.run.arm])
    found = speed.agreements(plan("dp", "tp", "lost", "fsdp"), runs)
    assert found == [speed.Agreement(0, "tp", "dp", 0, (), None), speed.Agreement(0, "fsdp", "dp", 2, (0.5, 0.5), 0.5)]
