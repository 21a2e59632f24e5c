import dataclasses
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from factories import random_groups, tiny_model
from saved_states import CONFIG, HOST, new_state

from jaxprorl.checkpoint import Checkpoints
from jaxprorl.checkpoint_diff import compare, compare_arrays, compare_hosts
from jaxprorl.errors import CheckpointError
from jaxprorl.rollout.surplus import encode
from jaxprorl.sharding.mesh import make_mesh


def array(*values: float, dtype: str = "float32") -> np.ndarray:
    return np.array(values, dtype)


def test_equal_trees_have_no_difference_not_even_by_nan() -> None:
    tree = {"a": array(1.0, np.nan, -0.0), "b": [array(), array(1, 2, dtype="int32")]}
    assert compare_arrays(tree, jax.tree.map(np.array, tree)) == []


@pytest.mark.parametrize(
    ("left", "right", "text", "size"),
    [
        (array(1.0, 2.0, 3.0), array(1.0, 2.5, 3.25), "2 of 3 values differ, by 0.5 at most", 0.5),
        (array(0.0), array(-0.0), "0 of 1 values differ, by 0 at most", 0.0),
        (array(1.0), array(np.nan), "1 of 1 values differ, by inf at most", np.inf),
        (array(1.0), array(np.inf), "1 of 1 values differ, by inf at most", np.inf),
        (array(3, dtype="int32"), array(5, dtype="int32"), "1 of 1 values differ, by 2 at most", 2.0),
        (array(1.0).astype(ml_dtypes.bfloat16), array(2.0).astype(ml_dtypes.bfloat16), "1 of 1 values differ, by 1 at most", 1.0),
        (array(1.0, 2.0), array(1.0), "float32[2] against float32[1]", np.inf),
        (array(1.0), array(1.0, dtype="float16"), "float32[1] against float16[1]", np.inf),
    ],
)
def test_a_leaf_that_differs_says_how(left: np.ndarray, right: np.ndarray, text: str, size: float) -> None:
    (found,) = compare_arrays({"x": {"y": left}}, {"x": {"y": right}})
    assert (found.name, found.text, found.size) == ("['x']['y']", text, size)


def test_a_leaf_of_one_side_only_is_a_difference() -> None:
    found = compare_arrays({"a": array(1.0), "b": array(1.0)}, {"b": array(1.0), "c": array(1.0)})
    assert [(difference.name, difference.text) for difference in found] == [("['a']", "only in the first"), ("['c']", "only in the second")]


def test_bookkeeping_is_compared_field_by_field_without_the_clock_and_the_logs_bytes() -> None:
    later = dataclasses.replace(HOST.run, rl_s=9.0, rollout_s=8.0)
    assert compare_hosts(HOST, dataclasses.replace(HOST, run=later, offsets={"metrics": 1, "events": 2})) == []
    other = dataclasses.replace(HOST, run=dataclasses.replace(HOST.run, prompts_consumed=18), identity=HOST.identity | {"data": "x"})
    assert [(difference.name, difference.text) for difference in compare_hosts(HOST, other)] == [
        ("identity.data", "'d' against 'x'"),
        ("run.prompts_consumed", "17 against 18"),
    ]


def test_of_surplus_groups_only_the_seconds_of_grading_may_differ() -> None:
    group = random_groups(1)[0]
    slower = dataclasses.replace(group, scores=tuple(dataclasses.replace(score, seconds=9.0) for score in group.scores))
    better = dataclasses.replace(group, scores=(dataclasses.replace(group.scores[0], value=2.0), *group.scores[1:]))
    host, same, other, none = (dataclasses.replace(HOST, surplus=encode(groups)) for groups in ([group], [slower], [better], []))
    assert compare_hosts(host, same) == []
    assert [difference.name for difference in compare_hosts(host, other)] == ["surplus.0.scores.0.value"]
    assert len(compare_hosts(host, none)) > 10


def test_two_checkpoints_are_compared_from_disk_the_worst_last(tmp_path: Path) -> None:
    state = new_state(tiny_model(), make_mesh("dp"))
    name = sorted(state.params)[0]
    changed = dataclasses.replace(
        state,
        params=state.params | {name: state.params[name] + 0.125},
        reference=state.reference | {name: state.reference[name] + 2.0},
    )
    for folder, content in (("a", state), ("b", state), ("c", changed)):
        with Checkpoints(tmp_path / folder, CONFIG) as checkpoints:
            checkpoints.save(content, HOST)
    assert compare(tmp_path / "a", 3, tmp_path / "b", 3) == []
    found = compare(tmp_path / "a", 3, tmp_path / "c", 3)
    assert [difference.name for difference in found] == [f"['params']['{name}']", f"['reference']['{name}']"]
    assert found[-1].size == pytest.approx(2.0, rel=1e-5)
    with pytest.raises(CheckpointError, match="holds no committed checkpoint of step 4"):
        compare(tmp_path / "a", 4, tmp_path / "b", 3)
