"""Orbax checkpoints: the training state, sharded and written in the background, and the host's bookkeeping as JSON beside it.

Orbax writes the arrays; `commit` says which checkpoints exist, proves their bytes, and decides which are kept.
"""

import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from jaxprorl import commit, storage
from jaxprorl.errors import CheckpointError
from jaxprorl.models.qwen2 import Params
from jaxprorl.state import RunState, TrainState
from jaxprorl.units import size_text

SCHEMA = 6  # raise it when the content of a checkpoint changes meaning
TO_GO_ON = "go on from the checkpoint before it with --config.checkpoint.on_damage=previous (launch/checkpoints.py verify shows them all)"
SPARE_BYTES = 64 << 20  # left free on the disk beside what a checkpoint needs


@dataclasses.dataclass(frozen=True)
class Host:
    """The part of a checkpoint that is not arrays; JSON types only.

    Attributes:
        run: the bookkeeping.
        offsets: bytes of `metrics` and `events` that belong to the steps done; the rest is cut off on resume.
        identity: digests of what the run's numbers depend on beside the config: data, tokenizer, reward.
        surplus: groups that the next step trains on first, as `rollout.surplus.encode` makes them.
        watch: what reset triggers and alarms remember, and the reset that comes next, as `watch.to_json` makes it.
        surplus_temperature: at which `surplus` was sampled; None = the checkpoint does not tell, as older ones do not.
    """

    run: RunState
    offsets: Mapping[str, int]
    identity: Mapping[str, str]
    surplus: Sequence[Mapping[str, Any]] = ()
    watch: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    surplus_temperature: float | None = None


class Checkpoints:
    """The checkpoints of one run, which this process alone writes. A context manager; leaving it waits for the save under way.

    Args:
        folder: made if needed; debris of a crash is removed.
        config: `config.checkpoint` says what is kept.

    Attributes:
        debris: names of what a crash had left half written or half deleted.

    Raises:
        CheckpointError: the folder cannot be written.
    """

    def __init__(self, folder: Path, config: ConfigDict):
        self.folder, self._config = folder.absolute(), config
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.debris = commit.remove_debris(self.folder, commit.committed_steps(self.folder))
        except OSError as error:
            raise CheckpointError(storage.problem(self.folder, 0, error)) from error
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(_without_tracebacks())
        handler = ocp.CompositeCheckpointHandler(state=_state_handler(), host=ocp.JsonCheckpointHandler())
        self._checkpointer = ocp.AsyncCheckpointer(handler)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._saving: tuple[int, int, Future[None]] | None = None  # step, bytes and outcome of the save that has not been waited for
        self._last: Future[None] | None = None

    def save(
        self,
        state: TrainState,
        host: Host,
        validation_solve_rate: float | None = None,
        reset_boundary: bool = False,
        validation_ungraded: int = 0,
    ) -> None:
        """Copies the arrays to the host and returns; files are written and committed in the background.

        Raises:
            CheckpointError: the disk is too full, or the save before this one failed.
        """
        self.wait()
        step = host.run.step
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        require_space(self.folder, needed)
        content = {"schema": SCHEMA} | dataclasses.asdict(host)
        arguments = ocp.args.Composite(state=ocp.args.PyTreeSave(state), host=ocp.args.JsonSave(content))
        try:
            commit.remove(self.folder, step)  # a run that was extended after its last step writes that step again
            self._checkpointer.save(commit.step_folder(self.folder, step), args=arguments)
        except OSError as error:
            raise CheckpointError(storage.problem(commit.step_folder(self.folder, step), needed, error)) from error
        self._last = self._thread.submit(self._commit, step, validation_solve_rate, reset_boundary, validation_ungraded)
        self._saving = step, needed, self._last

    def saving(self) -> bool:
        """Whether a save is not yet committed. May be called in any thread."""
        return self._last is not None and not self._last.done()

    def _commit(self, step: int, validation_solve_rate: float | None, reset_boundary: bool, validation_ungraded: int) -> None:
        """Beside the loop, once Orbax's files are in place: digests, the commit record, and then retention."""
        self._checkpointer.wait_until_finished()
        commit.write_record(self.folder, step, SCHEMA, validation_solve_rate, reset_boundary, validation_ungraded)
        records = commit.readable_records(self.folder)  # a damaged one is not ours to judge: it stays, and does not count
        kept = commit.to_keep(
            records,
            newest=self._config.checkpoint.keep,
            every_steps=self._config.checkpoint.keep_every_steps,
            best=self._config.checkpoint.keep_best,
            reset_boundaries=self._config.checkpoint.keep_resets,
        )
        for record in records:
            if record.step not in kept:
                commit.remove(self.folder, record.step)

    def forget_after(self, step: int) -> None:
        """Removes later checkpoints: damaged ones of a future that the run, going on from `step`, will write anew."""
        for later in commit.committed_steps(self.folder):
            if later > step:
                commit.remove(self.folder, later)

    def wait(self) -> None:
        """Blocks until the save under way is committed.

        Raises:
            CheckpointError: it failed, e.g. because the disk is full. What was committed before is untouched.
        """
        if self._saving is None:
            return
        (step, needed, outcome), self._saving = self._saving, None
        try:
            outcome.result()
        except Exception as error:  # whatever Orbax's threads met: its errors have no common type
            reason = error if isinstance(error, OSError) else str(error)
            raise CheckpointError(storage.problem(commit.step_folder(self.folder, step), needed, reason)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.wait()
        except CheckpointError:
            if error is None:  # else that is what ends the run, and says why
                raise
        finally:
            self._thread.shutdown()
            self._checkpointer.close()
            self._quiet.close()


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keeps the threads of Orbax and tensorstore from printing what goes wrong in a save: it is raised too, by `Checkpoints.wait`."""

    def is_no_error_of_orbax(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or "orbax" not in Path(record.pathname).parts

    def unraisable(found: Any) -> None:
        if str(found.exc_value) != "Event loop is closed":  # tensorstore's, for each file of a save that Orbax had given up
            previous(found)

    logger, previous = logging.getLogger("absl"), sys.unraisablehook
    logger.addFilter(is_no_error_of_orbax)
    sys.unraisablehook = unraisable
    try:
        yield
    finally:
        sys.unraisablehook = previous
        logger.removeFilter(is_no_error_of_orbax)


def newest_sound_step(folder: Path, on_damage: str, remedy: str = TO_GO_ON) -> tuple[int | None, list[str]]:
    """The checkpoint to go on from: the newest one, every byte checked.

    Args:
        on_damage: "stop", or "previous" to take the newest undamaged one instead.
        remedy: what the error advises beside restoring the file; that of a run that goes on, unless another purpose has its own.

    Returns:
        Its step (None if nothing was ever committed), and what was found damaged on the way.

    Raises:
        CheckpointError: it is damaged and `on_damage` is "stop", or all of them are damaged.
    """
    found: list[str] = []
    for step in reversed(commit.committed_steps(folder)):
        problem = commit.damage(folder, step)
        if problem is None:
            return step, found
        if on_damage == "stop":
            raise CheckpointError(f"checkpoint step {step} is damaged: {problem}. Restore the file, or {remedy}")
        found.append(f"checkpoint step {step} is damaged: {problem}")
    if found:
        raise CheckpointError(f"no undamaged checkpoint in {folder}: {'; '.join(found)}")
    return None, []


def read_host(folder: Path, step: int) -> Host:
    """The bookkeeping of a committed checkpoint.

    Raises:
        CheckpointError: there is none, it cannot be read, or a newer or older version of this package wrote it.
    """
    _require_schema(folder, step)
    try:
        # Written by Orbax's JSON handler; read directly, so that looking at checkpoints does not take JAX.
        content = json.loads((commit.step_folder(folder, step) / "host" / "metadata").read_text(encoding="utf-8"))
        run, temperature = RunState(**content["run"]), content.get("surplus_temperature")
        return Host(run, content["offsets"], content["identity"], content["surplus"], content["watch"], temperature)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint step {step} in {folder} cannot be read: {error}") from error


def restore_state(folder: Path, step: int, abstract: TrainState) -> TrainState:
    """The arrays of a checkpoint, placed into the shardings of `abstract` whatever they were saved under.

    Raises:
        CheckpointError: there is none, it does not fit the model, or another version of this package wrote it.
    """
    state: TrainState = _restore(folder, step, abstract, partial=False)
    return state


def restore_params(folder: Path, step: int, abstract: Any) -> Params:
    """The policy alone: a third of the memory or less. Raises as `restore_state` does."""
    params: Params = _restore(folder, step, {"params": abstract}, partial=True)["params"]
    return params


def restore_arrays(folder: Path, step: int) -> Any:
    """All arrays as they were saved, in host memory; needs no model and no mesh. Raises as `restore_state` does."""
    commit.read_record(folder, step)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            path = commit.step_folder(folder.absolute(), step) / "state"
            tree = _stored_tree(path)
            restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            return checkpointer.restore(path, args=ocp.args.PyTreeRestore(tree, restore_args=restore_args))
    except Exception as error:  # Orbax raises many types for unreadable files
        raise CheckpointError(f"checkpoint step {step} in {folder} cannot be read: {error}") from error


def _require_schema(folder: Path, step: int) -> None:
    record = commit.read_record(folder, step)
    if record.schema != SCHEMA:
        raise CheckpointError(f"checkpoint step {step} in {folder} has schema {record.schema}, this version of jaxprorl reads {SCHEMA}")


def _restore(folder: Path, step: int, abstract: Any, partial: bool) -> Any:
    _require_schema(folder, step)
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    arguments = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=partial)
    path = commit.step_folder(folder.absolute(), step) / "state"
    try:
        stored, wanted = _shapes(_stored_tree(path)), _shapes(abstract)
        names = wanted if partial else stored | wanted
        misfits = [name for name in names if stored.get(name) != wanted.get(name)]
        if not misfits:
            with ocp.Checkpointer(_state_handler()) as checkpointer:
                return checkpointer.restore(path, args=arguments)
    except Exception as error:  # Orbax raises many types
        raise CheckpointError(f"checkpoint step {step} in {folder} cannot be read: {error}") from error
    name = misfits[0]
    raise CheckpointError(
        f"checkpoint step {step} in {folder} does not fit this model and optimizer: {name} has shape {stored.get(name, 'none')} there, "
        f"{wanted.get(name, 'none')} here ({len(misfits)} arrays differ)"
    )


def _stored_tree(path: Path) -> Any:
    """The tree of what is stored; leaves know shape and dtype."""
    return ocp.PyTreeCheckpointHandler().metadata(path).tree


def _shapes(tree: Any) -> dict[str, list[int]]:
    # Orbax gives back dicts and lists for classes: names without punctuation are the same for both.
    return {jax.tree_util.keystr(path, simple=True, separator="."): list(leaf.shape) for path, leaf in jax.tree.leaves_with_path(tree)}


def require_space(folder: Path, needed_bytes: int) -> None:
    """Checks that a checkpoint of `needed_bytes` fits on the disk.

    Raises:
        CheckpointError: it does not; names what is needed and what is free.
    """
    free = storage.free_bytes(folder)
    if free is not None and free < needed_bytes + SPARE_BYTES:
        raise CheckpointError(
            f"{folder}: a checkpoint needs {size_text(needed_bytes)} and {size_text(SPARE_BYTES)} to spare, "
            f"{size_text(free)} are free; make room, lower checkpoint.keep, or set runs_dir to another disk"
        )


def _state_handler() -> ocp.PyTreeCheckpointHandler:
    # Replica-parallel saving slices replicated arrays on the devices, and so compiles inside the loop.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
