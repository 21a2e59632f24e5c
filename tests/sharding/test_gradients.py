"""Sums over micro-batches and devices, on two CPU devices, of small integers: exact in any order."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import QUICK_COMPILE, tiny_model
from jax.sharding import NamedSharding, PartitionSpec

from jaxprorl.sharding import strategies
from jaxprorl.sharding.collectives import read_collectives
from jaxprorl.sharding.gradients import mesh_of_whole, reduced_once
from jaxprorl.sharding.mesh import make_mesh, param_shardings
from jaxprorl.sharding.strategies import WHOLE, Strategy

SPECS = {"w": PartitionSpec(None, "fsdp"), "b": PartitionSpec(None)}
PARAMS = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.array([1, 2, 3], np.float32)}
ROWS = {"x": np.random.RandomState(0).randint(-3, 4, (3, 4, 5)).astype(np.float32)}  # three micro-batches of four rows


def accumulate(params: Any, rows: Any, used: Any) -> Any:
    """Gradients that every token adds to; a sum; twice the rows."""

    def body(m: Any, total: Any) -> Any:
        return total + jnp.sum(rows["x"][m])

    total = jax.lax.fori_loop(0, used, body, jnp.zeros(()))
    return {name: value * total for name, value in params.items()}, {"sum": total}, {"twice": 2 * rows["x"]}


@pytest.mark.parametrize("used", [0, 2, 3])
@pytest.mark.parametrize("strategy", ["dp", "zero1"])
def test_totals_are_those_of_all_rows_and_lie_where_they_should(strategy: str, used: int) -> None:
    mesh = make_mesh(strategy)
    shardings = {name: NamedSharding(mesh, spec if strategy == "zero1" else PartitionSpec()) for name, spec in SPECS.items()}
    run = jax.jit(reduced_once(accumulate, mesh, shardings, "float32"), compiler_options=QUICK_COMPILE)
    gradients, sums, tokens = run(PARAMS, ROWS, used)
    total = ROWS["x"][:used].sum()
    for name, value in PARAMS.items():
        np.testing.assert_array_equal(gradients[name], value * total)
        assert gradients[name].sharding.is_equivalent_to(shardings[name], value.ndim)
    assert sums == {"sum": total}
    np.testing.assert_array_equal(tokens["twice"], 2 * ROWS["x"])


def test_one_reduction_behind_the_loop_in_the_dtype_that_is_asked_for() -> None:
    mesh = make_mesh("zero1")
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    jitted = jax.jit(reduced_once(accumulate, mesh, shardings, "float16"), compiler_options=QUICK_COMPILE)
    found = read_collectives(jitted.lower(PARAMS, ROWS, 2).compile().as_text(), unknown_trips=1)
    assert all(collective.loops == () for collective in found)
    assert sum(collective.bytes for collective in found if collective.kind == "reduce-scatter") == 2 * 12
    assert sum(collective.bytes for collective in found if collective.kind == "all-reduce") == 2 * 3 + 4  # b, and the sum

    # 2049 is not a float16: every device's own total is rounded, the sum of two comes back as float32.
    rows = {"x": np.ones((1, 2, 1), np.float32)}
    gradients, sums, _ = jitted({"w": np.full((3, 4), 2049, np.float32), "b": np.full(3, 3, np.float32)}, rows, 1)
    assert gradients["w"].dtype == gradients["b"].dtype == np.float32
    np.testing.assert_array_equal(gradients["w"], 4096)
    np.testing.assert_array_equal(gradients["b"], 6)
    assert sums == {"sum": 2}


def test_only_meshes_that_split_nothing_but_rows_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    for strategy in ("dp", "zero1"):
        mesh = make_mesh(strategy)
        assert mesh_of_whole(param_shardings(model, mesh, strategy)) is mesh
        assert mesh_of_whole(param_shardings(model, make_mesh(strategy, jax.devices()[:1]), strategy)) is None
    for strategy in ("fsdp", "tp"):
        assert mesh_of_whole(param_shardings(model, make_mesh(strategy), strategy)) is None
    assert mesh_of_whole(None) is None
    # Whole parameters, but the tokens of a row are split.
    monkeypatch.setitem(strategies.STRATEGIES, "cp", Strategy(WHOLE, WHOLE, "context"))
    assert mesh_of_whole(param_shardings(model, make_mesh("cp"), "cp")) is None
