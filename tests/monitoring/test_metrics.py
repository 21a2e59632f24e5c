"""metrics.jsonl: names, numbers, order of steps."""

import math

import numpy as np
import pytest

from jaxprorl.monitoring.metrics import METRICS, MetricsLog, check_name, read, truncate


def test_a_line_is_sorted_exact_and_begins_with_the_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append(1, {"updates": 4, "reward.mean": 0.1 + 0.2, "entropy": np.float32(0.1)})
    assert path.read_text() == '{"step": 1, "entropy": 0.10000000149011612, "reward.mean": 0.30000000000000004, "updates": 4}\n'
    assert read(path)[0]["reward.mean"] == 0.1 + 0.2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_what_is_not_finite_is_refused_by_name(tmp_path, value):
    with MetricsLog(tmp_path / "m") as log:
        with pytest.raises(ValueError, match=r"'kl\.k3'"):
            log.append(1, {"kl.k1": 0.0, "kl.k3": value})
        assert log.offset() == 0  # not even half a line


@pytest.mark.parametrize("value", [True, np.bool_(False), np.zeros(2)])
def test_what_is_no_number_is_refused_by_name(tmp_path, value):
    with MetricsLog(tmp_path / "m") as log, pytest.raises(TypeError, match="'entropy'"):
        log.append(1, {"entropy": value})


@pytest.mark.parametrize("name", ["entropi", "reward", "reward.", "kl.k4", "time.coffee_s", "loss.TASK", ""])
def test_unknown_names_are_refused(tmp_path, name):
    with MetricsLog(tmp_path / "m") as log, pytest.raises(ValueError, match="not in METRICS"):
        log.append(1, {name: 1.0})


def test_per_task_names(tmp_path):
    check_name("reward.chain_sum")
    check_name("validation.anything")
    with MetricsLog(tmp_path / "m", tasks=("chain_sum",)) as log:
        log.append(1, {"reward.chain_sum": 1.0, "reward.mean": 1.0, "validation.chain_sum": 0.5})
        with pytest.raises(ValueError, match=r"reward\.maen"):
            log.append(2, {"reward.maen": 1.0})


def test_per_domain_names(tmp_path):
    check_name("reward_std.anything")
    with MetricsLog(tmp_path / "m", tasks=("chain_sum",), domains=("arithmetic",)) as log:
        log.append(1, {"reward_std.arithmetic": 1.0, "advantage_mean.arithmetic": 0.0})
        with pytest.raises(ValueError, match=r"reward_std\.chain_sum.*domains \['arithmetic'\]"):
            log.append(2, {"reward_std.chain_sum": 1.0})


def test_a_task_may_not_hide_another_metric(tmp_path):
    with pytest.raises(ValueError, match=r"reward\.mean"):
        MetricsLog(tmp_path / "m", tasks=("mean",))


def test_steps_only_go_forward_also_over_a_restart(tmp_path):
    path = tmp_path / "m"
    with MetricsLog(path) as log:
        log.append(1, {"entropy": 1.0})
        offset = log.offset()
        log.append(2, {"entropy": 2.0})
        with pytest.raises(ValueError, match="step 2 after step 2"):
            log.append(2, {"entropy": 2.0})
    with MetricsLog(path) as log, pytest.raises(ValueError, match="truncate"):
        log.append(2, {"entropy": 2.0})
    truncate(path, offset)
    with MetricsLog(path) as log:
        log.append(2, {"entropy": 3.0})
    assert [row["entropy"] for row in read(path)] == [1.0, 3.0]


def test_every_metric_is_documented():
    for name, (unit, meaning) in METRICS.items():
        assert unit and meaning, name
        if unit in ("s", "tokens/s"):
            assert name.startswith("time."), f"{name} depends on the clock"
