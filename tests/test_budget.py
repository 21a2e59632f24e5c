"""Runs that end when a budget is used up: where, by what count, and after an interruption."""

import json
import signal
from pathlib import Path

import pytest
import tiny_run
from factories import tiny_config

from configs.base import stage
from jaxprorl import commit
from jaxprorl.budget import is_over, spent
from jaxprorl.state import RunState

KINDS = ("completion_tokens", "updates", "prompts")
RUN = RunState(step=3, completion_tokens=90, validation_tokens=10, updates=12, prompts_consumed=40)


def test_tokens_of_validations_count() -> None:
    assert spent(RUN) == {"completion_tokens": 100, "updates": 12, "prompts": 40}


def test_without_a_budget_the_steps_decide() -> None:
    assert [is_over(tiny_config(steps=steps), RUN) for steps in (2, 3, 4)] == [True, True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_over_once_a_budget_is_reached(kind: str) -> None:
    used = spent(RUN)[kind]
    over = [is_over(tiny_config(steps=100, **{f"budget__{kind}": size}), RUN) for size in (used - 1, used, used + 1)]
    assert over == [True, True, False]


def test_the_first_of_several_budgets_decides() -> None:
    assert is_over(tiny_config(steps=100, budget__completion_tokens=10**9, budget__prompts=40), RUN)


def test_a_run_is_over_with_its_last_stage_also_when_it_was_given_one_more() -> None:
    rows = tuple(stage(name, 9) for name in ("one", "two", "three"))
    over = [is_over(tiny_config(steps=100, stages=rows[:count]), RunState(step=3, stages_ended=2)) for count in (0, 1, 2, 3)]
    assert over == [False, True, True, False]


def cumulative(run: Path) -> list[int]:
    """Tokens sampled up to the end of each step, counted from the stored samples and the validations' own numbers."""
    total, totals = 0, []
    for row in tiny_run.lines(run / "metrics.jsonl"):
        total += int(row["tokens.completion"]) + int(row.get("validation.completion_tokens", 0))
        totals.append(total)
    return totals


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_ends_at_the_boundary_where_its_tokens_are_used_up_also_after_a_kill(tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tiny_run.new_home(tmp_path_factory)
    run = home / "runs/tiny"
    tiny_run.train(home, "steps=4")
    totals = cumulative(run)
    rows = tiny_run.lines(run / "metrics.jsonl")
    assert "validation.completion_tokens" in rows[tiny_run.VALIDATION_EVERY - 1]
    (end,) = [event for event in tiny_run.lines(run / "events.jsonl") if event["kind"] == "run_end"]
    assert end["spent"] == {"completion_tokens": totals[-1], "updates": 8, "prompts": sum(int(row["groups.drawn"]) for row in rows)}

    # Without the validation's tokens, the third step would not use this budget up.
    budget = totals[2] - int(rows[2]["validation.completion_tokens"]) + 1
    options = ("run_name=budgeted", "steps=1000", f"budget.completion_tokens={budget}")
    budgeted = home / "runs/budgeted"
    kill = [str(tiny_run.ROOT / "tests/kill_at.py"), "just_after_saving", "--"]
    assert tiny_run.Command(home, *options, program=kill).wait().status == -signal.SIGKILL
    assert commit.committed_steps(budgeted / "checkpoints") == [2]
    tiny_run.train(home, *options)
    assert tiny_run.timeless_metrics(budgeted) == tiny_run.timeless_metrics(run)[:3]
    assert commit.committed_steps(budgeted / "checkpoints")[-1] == 3
    assert json.loads((budgeted / "summary.json").read_text())["steps"] == 3

    before = (budgeted / "events.jsonl").read_bytes()
    tiny_run.train(home, *options)
    assert (budgeted / "events.jsonl").read_bytes() == before, "it is over: nothing is done again"
    tiny_run.train(home, "run_name=budgeted", "steps=4")
    assert tiny_run.timeless_metrics(budgeted) == tiny_run.timeless_metrics(run), "without the budget it goes on"
