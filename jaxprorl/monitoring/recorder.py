"""Everything that a run writes down: metrics, events, samples, TensorBoard and the progress view, behind one object."""

import sys
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
from ml_collections import ConfigDict

from jaxprorl import storage, streams
from jaxprorl.data.tokenizer import Tokenizer
from jaxprorl.errors import CheckpointError
from jaxprorl.monitoring import events, metrics, samples
from jaxprorl.monitoring.progress import Progress
from jaxprorl.monitoring.tensorboard import TensorBoardMirror
from jaxprorl.monitoring.views import T, warning
from jaxprorl.rollout.collect import RolloutBatch
from jaxprorl.run_folder import RunFolder

BOARD = "TensorBoard"
NO_LINES = {"metrics": 0, "events": 0}


class Recorder:
    """Opens the logs cut back to `offsets`, so that what a killed run wrote after its last checkpoint is written again.

    Metrics, events and samples are what a run is known by: where they cannot be written, it stops. TensorBoard and progress are views of
    them: where one fails, that is an event, and the run goes on.

    Args:
        step: the first step that will be recorded.
        offsets: bytes of each log that belong to the steps before it.

    Raises:
        CheckpointError: a log holds less than that.
        StorageError: a log or the samples cannot be written; also from every method.
    """

    def __init__(
        self,
        config: ConfigDict,
        folder: RunFolder,
        progress: Progress,
        tasks: Collection[str],
        domains: Collection[str],
        step: int,
        offsets: Mapping[str, int],
    ):
        for module, path, name in ((metrics, folder.metrics, "metrics"), (events, folder.events, "events")):
            try:
                with storage.writing(path, 0):
                    module.truncate(path, offsets[name])
            except ValueError as error:  # lines that belong to the checkpoint are gone
                raise CheckpointError(f"{error}. Restore the file, or start over with --config.on_existing=replace") from None
        with storage.writing(folder.samples, 0):
            samples.remove_after(folder.samples, step - 1)
        self._folder = folder
        self._metrics = metrics.MetricsLog(folder.metrics, tasks, domains)
        self._events = events.EventLog(folder.events)
        self.progress, self._views = progress, progress.views
        self._board: TensorBoardMirror | None = None
        if config.monitoring.tensorboard:
            self._board = self._views.show(BOARD, TensorBoardMirror, folder.tensorboard, purge_step=step if step else None)

    def event(self, step: int, kind: str, **fields: Any) -> None:
        """One line of events.jsonl."""
        self._events.append(step, kind, **fields)
        if self._board:
            self._views.show(BOARD, self._board.add_event, {"step": step, "kind": kind, **fields})
        self._tell_failures(step)

    def view(self, step: int, name: str, act: Callable[..., T], *args: object) -> T | None:
        """What `act(*args)` returns, which makes something derived from the run; None where that fails, which is then told."""
        made = self._views.show(name, act, *args)
        self._tell_failures(step)
        return made

    def _tell_failures(self, step: int) -> None:
        """Once for each view: an event, and a note wherever one can still be read."""
        for view, why in self._views.news().items():
            self._events.append(step, "view_failed", view=view, error=why)
            self.progress.note(warning(view, why))
            if view in ("progress", *streams.NAMES.values()):
                self._views.show("standard error", print, warning(view, why), file=sys.stderr, flush=True)

    def rollout(self, step: int, batch: RolloutBatch, advantage_PN: np.ndarray, tokenizer: Tokenizer) -> None:
        """Events of one rollout batch, and its samples as a Parquet file. advantage_PN begins with the rows of `batch.trained`."""
        dropped = [g.prompt.prompt_id for g, signal in zip(batch.groups, batch.has_signal, strict=True) if not signal]
        if dropped:
            self.event(step, "drop", prompt_ids=dropped)
        for number, prompts in enumerate(batch.refills, start=1):
            self.event(step, "refill", round=number, prompts=prompts)
        advantages = iter(advantage_PN)
        rows = []
        for group, kept in [(group, True) for group in batch.carried] + list(zip(batch.groups, batch.kept, strict=True)):
            texts = [tokenizer.decode(completion.token_ids) for completion in group.completions]
            rows += samples.group_rows(group, tokenizer.decode(group.prompt.token_ids), texts, kept, next(advantages) if kept else None)
        samples.write_samples(self._folder.samples, step, rows)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of a finished step, to the log, TensorBoard and the progress view."""
        self._metrics.append(step, values)
        if self._board:
            self._views.show(BOARD, self._board.add_metrics, {"step": step, **values})
        self.progress.step(step + 1, values)
        self._tell_failures(step)

    def offsets(self) -> dict[str, int]:
        """Bytes written so far to each log, on disk."""
        self._metrics.sync()
        self._events.sync()
        return {"metrics": self._metrics.offset(), "events": self._events.offset()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._board:
            self._views.close(BOARD, self._board.close)
        self._metrics.close()
        self._events.close()
