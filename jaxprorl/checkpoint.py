"""Orbax checkpoints: the training state, sharded and saved in the background, and the host's bookkeeping as JSON beside it.

A checkpoint exists whole or not at all: Orbax writes into a temporary folder and renames it last.
"""

import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from jaxprorl.models.qwen2 import Params
from jaxprorl.state import RunState, TrainState

SCHEMA = 1  # raise it when the content of a checkpoint changes meaning


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used."""


class Checkpoints:
    """The checkpoints of one run. A context manager; leaving it waits for the save under way.

    Args:
        folder: made if needed.
        keep: how many of the newest are kept.
    """

    def __init__(self, folder: str | Path, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True, step_prefix="step")
        # Replica-parallel saving slices replicated arrays on the devices, and so compiles inside the loop.
        arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        handlers = {"state": ocp.PyTreeCheckpointHandler(type_handler_registry=registry), "host": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(Path(folder).absolute(), options=options, item_handlers=handlers)

    def save(self, state: TrainState, run: RunState, offsets: dict[str, int]) -> None:
        """Copies the arrays to the host and returns; files are written in the background.

        Args:
            offsets: bytes of `metrics` and `events` that belong to the steps done, so that a resume can cut the rest off.
        """
        host = {"schema": SCHEMA, "run": dataclasses.asdict(run), "offsets": offsets}
        self._manager.save(run.step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state), host=ocp.args.JsonSave(host)))

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, None without one."""
        return self._manager.latest_step()

    def restore(self, abstract: TrainState) -> tuple[TrainState, RunState, dict[str, int]]:
        """The newest checkpoint, placed into the shardings of `abstract` whatever it was saved under.

        Raises:
            CheckpointError: there is none, it is of another schema, or it does not fit the model.
        """
        state, run, offsets = self._restore(abstract, partial=False)
        return state, run, offsets

    def restore_params(self, abstract: Any) -> tuple[Params, RunState]:
        """The policy alone of the newest checkpoint: a third of the memory or less. Raises as `restore` does."""
        state, run, _ = self._restore({"params": abstract}, partial=True)
        return state["params"], run

    def _restore(self, abstract: Any, partial: bool) -> tuple[Any, RunState, dict[str, int]]:
        step = self.latest_step()
        if step is None:
            raise CheckpointError(f"{self._manager.directory} holds no checkpoint")
        host: Any = self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore())).host
        if host["schema"] != SCHEMA:
            raise CheckpointError(f"checkpoint step {step} has schema {host['schema']}, this version reads {SCHEMA}")
        restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
        target = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=partial)
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(state=target))
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise CheckpointError(f"checkpoint step {step} in {self._manager.directory} cannot be restored: {error}") from error
        return restored.state, RunState(**host["run"]), host["offsets"]

    def wait(self) -> None:
        """Blocks until the save under way is on disk."""
        self._manager.wait_until_finished()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._manager.wait_until_finished()
        self._manager.close()
