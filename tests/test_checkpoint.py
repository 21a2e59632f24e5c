import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from factories import random_params, tiny_config, tiny_model
from jax.sharding import Mesh

from jaxprorl import checkpoint
from jaxprorl.checkpoint import CheckpointError, Checkpoints
from jaxprorl.compilation import no_compilation
from jaxprorl.models.qwen2 import Qwen2Config
from jaxprorl.sharding.mesh import make_mesh, param_shardings
from jaxprorl.start import abstract_params
from jaxprorl.state import RunState, TrainState, abstract_state, start_state, state_shardings

ROOT = Path(__file__).resolve().parent.parent
CONFIG = tiny_config()
RUN = RunState(step=3, prompts_consumed=17, policy_version=3, resets=1, reference_step=2, completion_tokens=99, rl_s=1.5, rollout_s=0.7)
OFFSETS = {"metrics": 12, "events": 34}


def new_state(model: Qwen2Config, mesh: Mesh, strategy: str = "dp") -> TrainState:
    """A state in which every array differs from every other and from zero."""
    config = tiny_config(mesh__strategy=strategy)
    shardings = state_shardings(config, model, mesh)
    params = {name: jax.device_put(value, shardings.params[name]) for name, value in random_params(model).items()}
    state = start_state(config, params, shardings)
    numbers = iter(range(1, 1000))
    return jax.tree.map(lambda x: jax.device_put((np.asarray(x) + next(numbers)).astype(x.dtype), x.sharding), state)


def abstract(model: Qwen2Config, mesh: Mesh, strategy: str = "dp") -> TrainState:
    config = tiny_config(mesh__strategy=strategy)
    shardings = state_shardings(config, model, mesh)
    return abstract_state(config, abstract_params(model, shardings.params), shardings)


def assert_equal(a: object, b: object) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh("dp")


@pytest.fixture(scope="module")
def state(mesh: Mesh) -> TrainState:
    return new_state(tiny_model(), mesh)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        yield checkpoints


def test_what_was_saved_comes_back_to_the_bit_with_the_optimizer_state(checkpoints: Checkpoints, state: TrainState, mesh: Mesh) -> None:
    checkpoints.save(state, RUN, OFFSETS)
    checkpoints.wait()
    restored, run, offsets = checkpoints.restore(abstract(tiny_model(), mesh))
    assert_equal(restored, state)
    assert (run, offsets) == (RUN, OFFSETS)
    assert all(x.sharding == y.sharding for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True))


def test_the_policy_alone_can_be_restored(checkpoints: Checkpoints, state: TrainState, mesh: Mesh) -> None:
    checkpoints.save(state, RUN, OFFSETS)
    checkpoints.wait()
    params, run = checkpoints.restore_params(abstract_params(tiny_model(), param_shardings(tiny_model(), mesh, "dp")))
    assert_equal(params, state.params)
    assert run == RUN


def test_saving_compiles_nothing_and_copies_before_the_arrays_change(checkpoints: Checkpoints, mesh: Mesh) -> None:
    model = tiny_model(hidden_size=40, intermediate_size=72, vocab_size=56)  # shapes of its own: nothing of them is compiled yet
    state = new_state(model, mesh)
    change = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0).lower(state).compile()
    expected = jax.tree.map(np.array, state)
    with no_compilation():
        checkpoints.save(state, RUN, OFFSETS)
        change(state)  # reuses the memory while files are being written
    checkpoints.wait()
    restored, _, _ = checkpoints.restore(abstract(model, mesh))
    assert_equal(restored, expected)


def test_the_newest_are_kept(checkpoints: Checkpoints, state: TrainState, tmp_path: Path) -> None:
    for step in (1, 2, 5):
        checkpoints.save(state, RunState(step=step), OFFSETS)
    checkpoints.wait()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_2", "step_5"}
    assert checkpoints.latest_step() == 5


def test_leaving_waits_for_the_save_under_way(tmp_path: Path, state: TrainState) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(state, RUN, OFFSETS)
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


def test_a_half_written_checkpoint_does_not_count(tmp_path: Path, state: TrainState, mesh: Mesh) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(state, RUN, OFFSETS)
    (tmp_path / "step_9.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step() == 3
        assert checkpoints.restore(abstract(tiny_model(), mesh))[1] == RUN


def test_without_a_checkpoint_there_is_a_clear_error(checkpoints: Checkpoints, mesh: Mesh, tmp_path: Path) -> None:
    assert checkpoints.latest_step() is None
    with pytest.raises(CheckpointError, match=f"{tmp_path}/checkpoints holds no checkpoint"):
        checkpoints.restore(abstract(tiny_model(), mesh))


def test_another_schema_is_refused(checkpoints: Checkpoints, state: TrainState, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.save(state, RUN, OFFSETS)
    checkpoints.wait()
    monkeypatch.setattr(checkpoint, "SCHEMA", checkpoint.SCHEMA + 1)
    with pytest.raises(CheckpointError, match=f"step 3 has schema {checkpoint.SCHEMA - 1}, this version reads {checkpoint.SCHEMA}"):
        checkpoints.restore(abstract(tiny_model(), mesh))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax drops the other arrays' coroutines
@pytest.mark.parametrize("changes", [{"hidden_size": 48}, {"num_hidden_layers": 3}, {"vocab_size": 64}])
def test_a_checkpoint_of_another_model_is_refused(checkpoints: Checkpoints, state: TrainState, mesh: Mesh, changes: dict[str, int]) -> None:
    checkpoints.save(state, RUN, OFFSETS)
    checkpoints.wait()
    with pytest.raises(CheckpointError, match=r"checkpoint step 3 in .* cannot be restored"):
        checkpoints.restore(abstract(tiny_model(**changes), mesh))


def test_a_checkpoint_moves_to_another_sharding(checkpoints: Checkpoints, state: TrainState) -> None:
    checkpoints.save(state, RUN, OFFSETS)
    checkpoints.wait()
    mesh = make_mesh("fsdp")
    restored, _, _ = checkpoints.restore(abstract(tiny_model(), mesh, "fsdp"))
    assert_equal(restored, state)
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(restored.params))
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(restored.opt_state))


ON_ONE_DEVICE = """
import sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 1)
sys.path.insert(0, "tests")
import test_checkpoint as t
mesh = t.make_mesh("dp")
assert mesh.size == 1
with t.Checkpoints(sys.argv[1], keep=2) as checkpoints:
    restored, run, _ = checkpoints.restore(t.abstract(t.tiny_model(), mesh))
assert run == t.RUN
t.assert_equal(restored, t.new_state(t.tiny_model(), mesh))
"""


def test_a_checkpoint_moves_to_another_number_of_devices(tmp_path: Path) -> None:
    mesh = make_mesh("fsdp")
    assert mesh.size == 2
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(new_state(tiny_model(), mesh, "fsdp"), RUN, OFFSETS)
    done = subprocess.run([sys.executable, "-c", ON_ONE_DEVICE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
