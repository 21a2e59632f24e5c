import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from factories import tiny_config, tiny_model
from jax.sharding import Mesh
from saved_states import CONFIG, HOST, abstract, assert_equal, committed, flip_a_bit, host_of, largest_file, names, new_state

from jaxprorl import checkpoint, commit
from jaxprorl.checkpoint import Checkpoints, newest_sound_step, read_host, require_space, restore_params, restore_state
from jaxprorl.compilation import no_compilation
from jaxprorl.errors import CheckpointError
from jaxprorl.sharding.mesh import make_mesh, param_shardings
from jaxprorl.start import abstract_params
from jaxprorl.state import TrainState

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh("dp")


@pytest.fixture(scope="module")
def state(mesh: Mesh) -> TrainState:
    return new_state(tiny_model(), mesh)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def checkpoints(folder: Path) -> Iterator[Checkpoints]:
    with Checkpoints(folder, CONFIG) as checkpoints:
        yield checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, state: TrainState) -> Path:
    """A folder with the state at step 3. Tests only read it."""
    folder = tmp_path_factory.mktemp("saved")
    with Checkpoints(folder, CONFIG) as checkpoints:
        checkpoints.save(state, HOST)
    return folder


def test_what_was_saved_comes_back_to_the_bit_with_the_optimizer_state(saved: Path, state: TrainState, mesh: Mesh) -> None:
    restored = restore_state(saved, 3, abstract(tiny_model(), mesh))
    assert_equal(restored, state)
    assert read_host(saved, 3) == HOST
    assert all(x.sharding == y.sharding for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True))
    assert commit.damage(saved, 3) is None


def test_an_older_checkpoint_does_not_tell_at_which_temperature_surplus_was_sampled(saved: Path, folder: Path) -> None:
    shutil.copytree(saved, folder)
    path = commit.step_folder(folder, 3) / "host" / "metadata"
    content = json.loads(path.read_text())
    del content["surplus_temperature"]
    path.write_text(json.dumps(content))
    assert read_host(folder, 3) == dataclasses.replace(HOST, surplus_temperature=None)


def test_the_policy_alone_can_be_restored(saved: Path, state: TrainState, mesh: Mesh) -> None:
    params = restore_params(saved, 3, abstract_params(tiny_model(), param_shardings(tiny_model(), mesh, "dp")))
    assert_equal(params, state.params)


def test_a_reference_in_bfloat16_comes_back_in_bfloat16(checkpoints: Checkpoints, folder: Path, mesh: Mesh) -> None:
    state = new_state(tiny_model(), mesh, model__reference_dtype="bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.reference)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    checkpoints.save(state, HOST)
    checkpoints.wait()
    assert_equal(restore_state(folder, 3, abstract(tiny_model(), mesh, model__reference_dtype="bfloat16")), state)


def test_saving_compiles_nothing_and_stores_the_state_at_the_call_while_donated_updates_go_on(
    checkpoints: Checkpoints, folder: Path, mesh: Mesh
) -> None:
    model = tiny_model(hidden_size=200, intermediate_size=304, vocab_size=56)  # shapes of its own: nothing of them is compiled yet
    state = new_state(model, mesh)
    change = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0).lower(state).compile()
    expected = jax.tree.map(np.array, state)
    with no_compilation():
        checkpoints.save(state, HOST)
        for _ in range(20):
            state = change(state)  # reuses the memory while files are being written
        jax.block_until_ready(state)
    checkpoints.wait()
    assert_equal(restore_state(folder, 3, abstract(model, mesh)), expected)


def test_a_checkpoint_is_committed_last_and_so_exists_whole_or_not_at_all(
    checkpoints: Checkpoints, folder: Path, state: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    write_record = commit.write_record

    def look(*arguments: object) -> commit.Record:
        assert commit.step_folder(folder, 3).is_dir(), "Orbax has finished"
        seen.append(commit.committed_steps(folder))
        return write_record(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(commit, "write_record", look)
    checkpoints.save(state, HOST)
    checkpoints.wait()
    assert seen == [[]]
    assert commit.committed_steps(folder) == [3]


def test_the_newest_are_kept(checkpoints: Checkpoints, folder: Path, state: TrainState) -> None:
    for step in (1, 2, 5):
        checkpoints.save(state, host_of(step))
    checkpoints.wait()
    assert names(folder) == committed(2, 5)


def test_the_best_every_so_many_and_reset_boundaries_are_kept_too(folder: Path, state: TrainState) -> None:
    config = tiny_config(checkpoint__keep=1, checkpoint__keep_best=1, checkpoint__keep_every_steps=4, checkpoint__keep_resets=True)
    with Checkpoints(folder, config) as checkpoints:
        for step, rate, boundary in ((1, 0.2, False), (2, 0.9, False), (3, None, True), (4, 0.1, False), (5, 0.3, False), (6, None, False)):
            checkpoints.save(state, host_of(step), rate, boundary)
    assert names(folder) == committed(2, 3, 4, 6)


def test_leaving_waits_for_the_save_under_way(tmp_path: Path, state: TrainState) -> None:
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(state, HOST)
    assert names(tmp_path) == committed(3)


def test_a_step_can_be_saved_again(checkpoints: Checkpoints, folder: Path, state: TrainState, mesh: Mesh) -> None:
    checkpoints.save(jax.tree.map(lambda x: x + 1, state), HOST)
    checkpoints.save(state, HOST)
    checkpoints.wait()
    assert_equal(restore_state(folder, 3, abstract(tiny_model(), mesh)), state)
    assert commit.damage(folder, 3) is None


def test_a_half_written_checkpoint_does_not_count_and_is_removed(tmp_path: Path, state: TrainState) -> None:
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(state, HOST)
    (tmp_path / "step_9.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "step_7/state").mkdir(parents=True)
    assert newest_sound_step(tmp_path, "stop") == (3, [])
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        assert checkpoints.debris == ["step_7", "step_9.orbax-checkpoint-tmp"]
    assert names(tmp_path) == committed(3)


def test_without_a_checkpoint_there_is_a_clear_error(checkpoints: Checkpoints, folder: Path, mesh: Mesh) -> None:
    assert newest_sound_step(folder, "stop") == newest_sound_step(folder, "previous") == (None, [])
    for read in (lambda: restore_state(folder, 3, abstract(tiny_model(), mesh)), lambda: read_host(folder, 3)):
        with pytest.raises(CheckpointError, match=f"{folder} holds no committed checkpoint of step 3"):
            read()


def test_another_schema_is_refused(saved: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SCHEMA", checkpoint.SCHEMA + 1)
    words = f"step 3 in .* has schema {checkpoint.SCHEMA - 1}, this version of jaxprorl reads {checkpoint.SCHEMA}"
    params = abstract_params(tiny_model(), param_shardings(tiny_model(), mesh, "dp"))
    for read in (
        lambda: read_host(saved, 3),
        lambda: restore_state(saved, 3, abstract(tiny_model(), mesh)),
        lambda: restore_params(saved, 3, params),
    ):
        with pytest.raises(CheckpointError, match=words):
            read()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 48}, r"attention_norm has shape \[2, 32\] there, \[2, 48\] here"),
        ({"num_hidden_layers": 3}, r"attention_norm has shape \[2, 32\] there, \[3, 32\] here"),
        ({"vocab_size": 64}, r"embed has shape \[48, 32\] there, \[64, 32\] here \(4 arrays differ\)"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_told_apart(saved: Path, mesh: Mesh, changes: dict[str, int], words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"checkpoint step 3 in .* does not fit this model and optimizer: .*{words}"):
        restore_state(saved, 3, abstract(tiny_model(**changes), mesh))


def test_a_checkpoint_of_another_optimizer_is_refused(saved: Path, mesh: Mesh) -> None:
    target = abstract(tiny_model(), mesh)
    with pytest.raises(CheckpointError, match=r"opt_state.* has shape \[.*\] there, none here"):
        restore_state(saved, 3, dataclasses.replace(target, opt_state=()))


@pytest.fixture
def three(folder: Path, state: TrainState) -> Path:
    """Checkpoints of steps 1, 2 and 3."""
    with Checkpoints(folder, tiny_config(checkpoint__keep=3, checkpoint__keep_best=0)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(state, host_of(step))
    return folder


def test_the_newest_is_damaged_and_the_run_stops_or_goes_on_from_the_previous_one(three: Path) -> None:
    assert newest_sound_step(three, "stop") == (3, [])
    flip_a_bit(largest_file(three, 3))
    with pytest.raises(CheckpointError, match=r"checkpoint step 3 is damaged: .* has changed .*--config.checkpoint.on_damage=previous"):
        newest_sound_step(three, "stop")
    step, found = newest_sound_step(three, "previous")
    assert step == 2
    assert len(found) == 1 and found[0].startswith("checkpoint step 3 is damaged")


@pytest.mark.parametrize("on_damage", ["stop", "previous"])
def test_all_are_damaged_and_that_is_an_error(three: Path, on_damage: str) -> None:
    for step in (1, 2, 3):
        largest_file(three, step).unlink()
    with pytest.raises(CheckpointError, match="damaged"):
        newest_sound_step(three, on_damage)


def test_a_damaged_older_record_stops_no_save_and_is_left_alone(three: Path, state: TrainState) -> None:
    flip_a_bit(commit.record_path(three, 2))
    with Checkpoints(three, CONFIG) as checkpoints:
        checkpoints.save(state, host_of(4))
    assert names(three) == committed(2, 3, 4)


def test_going_on_from_an_earlier_one_the_damaged_future_is_forgotten(three: Path, state: TrainState) -> None:
    config = tiny_config(checkpoint__keep=1, checkpoint__keep_best=0)
    flip_a_bit(largest_file(three, 3))
    with Checkpoints(three, config) as checkpoints:
        checkpoints.forget_after(1)
        checkpoints.save(state, host_of(2))
    assert names(three) == committed(2), "the damaged one does not push the new one out"


def test_a_full_disk_is_told_before_anything_is_written(folder: Path, state: TrainState, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoints(folder, CONFIG) as checkpoints:
        checkpoints.save(state, host_of(1))
        checkpoints.wait()
        monkeypatch.setattr(checkpoint, "SPARE_BYTES", 1 << 60)
        with pytest.raises(CheckpointError, match=r"checkpoints: a checkpoint needs .* to spare, .* are free; make room"):
            checkpoints.save(state, host_of(2))
    assert names(folder) == committed(1)
    with pytest.raises(CheckpointError):
        require_space(folder, 0)


# A limit on the size of files stands for a disk that fills up while a checkpoint is being written.
FULL_WHILE_SAVING = """
import resource, signal, sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 2)
sys.path.insert(0, "tests")
import test_checkpoint as t
folder = Path(sys.argv[1])
mesh = t.make_mesh("dp")
state = t.new_state(t.tiny_model(hidden_size=256, intermediate_size=512), mesh)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    with t.Checkpoints(folder, t.CONFIG) as checkpoints:
        checkpoints.save(state, t.host_of(1))
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        checkpoints.save(state, t.host_of(2))
        checkpoints.wait()
except t.CheckpointError as error:
    print("refused:", error)
print(t.commit.committed_steps(folder), t.newest_sound_step(folder, "stop"))
"""


def test_a_write_that_fails_while_saving_is_a_clear_error_and_earlier_checkpoints_stay(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL_WHILE_SAVING, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"refused: {folder}/step_2 cannot be written (" in done.stdout
    assert " needed, " in done.stdout and " free there; " in done.stdout
    assert len(done.stdout.splitlines()) == 2, "a line for the refusal, one for what stays"
    assert done.stdout.splitlines()[-1] == "[1] (1, [])"
    with Checkpoints(folder, CONFIG) as checkpoints:
        assert all(name.startswith("step_2") for name in checkpoints.debris)
    assert names(folder) == committed(1)


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="checkpoints cannot be written"):
        Checkpoints(tmp_path / "checkpoints", CONFIG)


def test_a_checkpoint_moves_to_another_sharding(saved: Path, state: TrainState) -> None:
    mesh = make_mesh("fsdp")
    restored = restore_state(saved, 3, abstract(tiny_model(), mesh, "fsdp"))
    assert_equal(restored, state)
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(restored.params))
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(restored.opt_state))


ON_ONE_DEVICE = """
import sys
from pathlib import Path
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 1)
sys.path.insert(0, "tests")
import test_checkpoint as t
mesh = t.make_mesh("dp")
assert mesh.size == 1
folder = Path(sys.argv[1])
assert t.read_host(folder, 3) == t.HOST
t.assert_equal(t.restore_state(folder, 3, t.abstract(t.tiny_model(), mesh)), t.new_state(t.tiny_model(), mesh))
"""


@pytest.mark.slow
def test_a_checkpoint_moves_to_another_number_of_devices(tmp_path: Path) -> None:
    mesh = make_mesh("fsdp")
    assert mesh.size == 2
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(new_state(tiny_model(), mesh, "fsdp"), HOST)
    done = subprocess.run([sys.executable, "-c", ON_ONE_DEVICE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
