"""Grader processes that can be killed: text that hangs, crashes or breaks a reward costs one sample, never the run.

Threads and signals cannot stop a reward that is stuck in C code or swallows exceptions; only killing its process can. A round trip
per completion would cost more than most rewards, so completions travel in batches. When a batch times out or its process dies, its
members are graded again one by one: only the culprit gets `grader_error`. Which completion finished first never matters.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, TimeoutError, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from multiprocessing import popen_spawn_posix, resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from pebble import ProcessExpired, ProcessPool

from jaxprorl.errors import GraderError
from jaxprorl.interrupts import safe_point
from jaxprorl.rewards import registry, worker
from jaxprorl.types import Completion, Prompt, Score

Key = tuple[int, int]  # (prompt_id, sample)

_BATCH = 32  # completions per round trip, at most; falls by itself when rewards are slow
_RECYCLE_BATCHES = 4096  # a worker is replaced after so many, which bounds the memory that a reward leaks
_POLL_S = 1.0  # how often a quiet pool's health is looked at
_STALL_S = 600.0  # nothing finished for so long (beside the timeout): the pool itself is stuck and is replaced
_BLAME_AFTER = 3  # pools lost in a row before the oldest completion counts as the culprit
_GIVE_UP_AFTER = 10  # pools lost in a row before the run stops


class GraderPoolError(GraderError):
    """The graders cannot work at all: they do not start, or die whatever they are given."""


@dataclass(frozen=True)
class _Job:
    key: Key
    prompt: Prompt
    response: np.ndarray | str  # token ids, or text
    drop_last: bool


class GraderPool:
    """Scores completions in `workers` processes. A context manager; leaving it leaves no process behind.

    Use: `submit` each completion as it ends (never blocks), then `collect` once per rollout.

    Args:
        spec: the reward, "module:function" or a weighted sum of such names (see registry).
        tokenizer_path: folder with `tokenizer.json`; the processes decode, with special tokens kept and the drawn stop id dropped. None:
            only texts are graded.
        workers: number of processes.
        timeout_s: seconds per completion; over it the process is killed and replaced and the completion is a `grader_error`.
        solved_from: a completion is solved from this reward on, unless the reward itself says whether it is (see `graded`).

    Raises:
        RewardError: the reward cannot be used; raised here in the parent, before a process starts.
        FileNotFoundError: there is no tokenizer.json.
        ValueError: `workers` < 1 or `timeout_s` <= 0.
    """

    def __init__(
        self,
        spec: str,
        tokenizer_path: str | os.PathLike[str] | None,
        workers: int = 1,
        timeout_s: float = 5.0,
        solved_from: float = 1.0,
    ) -> None:
        if workers < 1:
            raise ValueError(f"grading.workers = {workers}: at least one grader process is needed")
        if not timeout_s > 0:
            raise ValueError(f"grading.timeout_s = {timeout_s}: must be over 0 seconds")
        registry.load_parts(spec)
        tokenizer_file = None if tokenizer_path is None else Path(tokenizer_path) / "tokenizer.json"
        if tokenizer_file is not None and not tokenizer_file.is_file():
            raise FileNotFoundError(f"no tokenizer for the graders: {tokenizer_file} does not exist")
        self._spec, self._version, self._solved_from = spec, registry.reward_version(spec), solved_from
        self._tokenizer_file, self._workers, self._timeout_s = str(tokenizer_file or ""), workers, timeout_s
        self._batch = _BATCH
        self._waiting: list[_Job] = []
        self._running: dict[Future, list[_Job]] = {}
        self._scores: dict[Key, Score] = {}
        self._keys: set[Key] = set()
        self._lost_pools = 0  # in a row, without one result between
        self._proven = False  # has ever given a result
        self._pool: ProcessPool | None = None
        try:
            self._pool = self._new_pool()
        except BaseException:  # also KeyboardInterrupt: nobody has this one yet, and its processes would stay
            self.close()
            raise

    def submit(self, prompt: Prompt, completions: Sequence[Completion]) -> None:
        """Queues completions of one prompt. Completions that were aborted or failed become `grader_error` without being graded.

        Raises:
            ValueError: a completion of another prompt, or the same (prompt_id, sample) twice since the last `collect`.
            GraderPoolError: the graders cannot work.
        """
        self._live_pool()
        for completion in completions:
            key = (completion.prompt_id, completion.sample)
            if completion.prompt_id != prompt.prompt_id:
                raise ValueError(f"completion {key} submitted with prompt {prompt.prompt_id}")
            if key in self._keys:
                raise ValueError(f"completion (prompt_id, sample) = {key} submitted twice")
            self._keys.add(key)
            if completion.finish_reason in ("aborted", "error"):
                self._set_error(key, f"not finished: {completion.finish_reason}", 0.0)
            else:
                self._waiting.append(_Job(key, prompt, completion.token_ids, completion.finish_reason == "stop"))
        self._send_full_batches()

    def submit_text(self, prompt: Prompt, sample: int, text: str) -> None:
        """Queues a completion that is there as text only. Errors as `submit`."""
        self._live_pool()
        key = (prompt.prompt_id, sample)
        if key in self._keys:
            raise ValueError(f"completion (prompt_id, sample) = {key} submitted twice")
        self._keys.add(key)
        self._waiting.append(_Job(key, prompt, text, False))
        self._send_full_batches()

    def collect(self) -> dict[Key, Score]:
        """Blocks until everything submitted since the last `collect` is scored.

        Returns:
            {(prompt_id, sample): Score}, in the order of the keys, one for each completion submitted.

        Raises:
            GraderPoolError: the graders cannot work.
        """
        self._live_pool()
        self._send_all(self._waiting)
        self._waiting = []
        quiet_s = 0.0
        while self._running:
            quiet_s = self._take_results(quiet_s)
        scores = {key: self._scores[key] for key in sorted(self._keys)}
        self._scores, self._keys = {}, set()
        return scores

    def _take_results(self, quiet_s: float) -> float:
        """Waits at most _POLL_S for results and takes those that came. Takes and returns for how long none has."""
        safe_point()
        done, _ = wait(list(self._running), timeout=_POLL_S, return_when=FIRST_COMPLETED)
        quiet_s = 0.0 if done else quiet_s + _POLL_S
        # A pool that breaks forgets batches which it has not handed out: no result, no error.
        if not done and (not self._live_pool().active or quiet_s > _STALL_S + self._timeout_s):
            self._replace_pool()
            quiet_s = 0.0
        for future in done:
            jobs = self._running.pop(future, None)
            if jobs is not None:  # else replaced together with its pool
                self._settle(future, jobs)
        return quiet_s

    def close(self) -> None:
        """Ends every process, also busy ones. May be called twice."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()
        self._running, self._waiting = {}, []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _new_pool(self) -> ProcessPool:
        # Spawned, since forking a process with JAX's threads can deadlock.
        # The kernel ties a worker to the thread that started it, so a pool is to be made in a thread that outlives it.
        initargs = (self._spec, self._solved_from, self._tokenizer_file, os.getpid())
        with _held_signals():
            _start_resource_tracker()
            pool = ProcessPool(self._workers, _RECYCLE_BATCHES, worker.start, initargs, _Context())
            active = pool.active  # reading it starts the processes now rather than at the first completion
        if not active:
            raise GraderPoolError("the grader processes did not start")
        return pool

    def _live_pool(self) -> ProcessPool:
        if self._pool is None:
            raise RuntimeError("the grader pool is closed")
        return self._pool

    def _send_full_batches(self) -> None:
        while len(self._waiting) >= self._batch:
            self._send(self._waiting[: self._batch])
            del self._waiting[: self._batch]

    def _send_all(self, jobs: Sequence[_Job]) -> None:
        """Sends jobs in batches of like size, so that every worker has some."""
        if not jobs:
            return
        batch = max(1, min(self._batch, -(-len(jobs) // self._workers)))
        for first in range(0, len(jobs), batch):
            self._send(jobs[first : first + batch])

    def _send(self, jobs: Sequence[_Job]) -> None:
        prompts = {job.prompt.prompt_id: job.prompt for job in jobs}
        rows = [worker.Row(job.prompt.prompt_id, job.response, job.drop_last) for job in jobs]
        # A batch hands back what it has after half the timeout; slow but lawful rewards thus never look like hanging ones.
        args = (prompts, rows, self._timeout_s / 2)
        try:
            future = self._live_pool().schedule(worker.grade, args=args, timeout=self._timeout_s)
        except RuntimeError:  # the pool broke while idle, e.g. someone killed its worker
            self._replace_pool()
            future = self._live_pool().schedule(worker.grade, args=args, timeout=self._timeout_s)
        self._running[future] = list(jobs)

    def _settle(self, future: Future, jobs: list[_Job]) -> None:
        """Takes the result of one batch: scores, or what to do about its failure."""
        error = future.exception()
        if isinstance(error, BrokenProcessPool):
            self._running[future] = jobs
            self._replace_pool()
        elif error is not None and len(jobs) > 1:
            for job in jobs:
                self._send([job])
        elif error is not None:
            self._progress()
            self._set_error(jobs[0].key, _explain(error, self._timeout_s), self._timeout_s)
        else:
            grades = future.result()
            if isinstance(grades, str):
                raise GraderPoolError(f"the grader process for reward = {self._spec!r} cannot start: {grades}")
            self._progress()
            for job, grade in zip(jobs, grades, strict=False):
                self._scores[job.key] = Score(
                    grade.value, grade.solved, grade.outcome, self._spec, self._version, grade.seconds, grade.detail
                )  # fmt: skip
            if len(grades) < len(jobs):
                self._batch = len(grades)
                self._send_all(jobs[len(grades) :])

    def _replace_pool(self) -> None:
        """Starts a new pool for a broken one and sends all that was running again, one by one, since the culprit is unknown."""
        self._lost_pools += 1
        self._live_pool().stop()
        self._live_pool().join()
        lost, self._running = self._running, {}
        jobs = []
        for future, batch in lost.items():
            if future.done() and future.exception() is None:
                self._running[future] = batch  # finished in time: `collect` takes it
            else:
                jobs += batch
        if self._lost_pools >= _BLAME_AFTER:
            if not self._proven or self._lost_pools >= _GIVE_UP_AFTER:
                raise GraderPoolError(f"the grader processes for reward = {self._spec!r} died {self._lost_pools} times in a row")
            if jobs:
                self._set_error(jobs.pop(0).key, "grader process died again and again", 0.0)
        self._pool = self._new_pool()
        for job in jobs:
            self._send([job])

    def _progress(self) -> None:
        self._proven, self._lost_pools = True, 0

    def _set_error(self, key: Key, detail: str, seconds: float) -> None:
        self._scores[key] = Score(0.0, False, "grader_error", self._spec, self._version, seconds, detail)


def error_share(scores: Iterable[Score]) -> float:
    """Share of `grader_error` among the scores, in [0, 1]; 0 for none."""
    outcomes = [score.outcome for score in scores]
    return outcomes.count("grader_error") / len(outcomes) if outcomes else 0.0


def require_graded(where: str, scores: Sequence[Score], max_error_share: float) -> None:
    """Refuses to go on when too many samples have no score. `where` begins the message.

    Raises:
        GraderError: their share is over the limit; names the share and the first error.
    """
    failed = [score for score in scores if score.outcome == "grader_error"]
    share = error_share(scores)
    if share > max_error_share:
        raise GraderError(
            f"{where}: {len(failed)} of {len(scores)} samples could not be graded (first: {failed[0].detail}), a share of {share:.3g} and "
            f"more than grading.max_error_share = {max_error_share}; mend the reward, or raise the field"
        )


def _explain(error: BaseException, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no result within {timeout_s} s, process killed"
    if isinstance(error, ProcessExpired):
        return f"grader process died with exit code {error.exitcode}"
    return f"{type(error).__name__}: {error}"[: worker.MAX_DETAIL_CHARS]


@contextmanager
def _held_signals() -> Iterator[None]:
    """Processes started meanwhile are born with these signals blocked, as is this thread.

    They reach the whole process group, and until `worker.start` they would end a grader or make it print a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *worker.PREEMPTION})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_resource_tracker() -> None:
    """Multiprocessing's process that removes the semaphores of one that was killed or interrupted: told not to warn of them."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [before, "ignore:resource_tracker"]))
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


class _Process(SpawnProcess):
    """A spawned process that does not run the parent's script again (it may import JAX, or lack a __main__ guard)."""

    def start(self) -> None:
        with _held_signals(), _hidden_main():
            super().start()

    @staticmethod
    def _Popen(process_obj: Any) -> "_Popen":
        return _Popen(process_obj)


class _Popen(popen_spawn_posix.Popen):
    def terminate(self) -> None:
        self.kill()  # pebble and multiprocessing stop processes by SIGTERM, which graders outlive


class _Context(SpawnContext):
    Process = _Process


_main_lock = threading.Lock()


@contextmanager
def _hidden_main() -> Iterator[None]:
    """While it lasts, spawning sees a main module that needs no import: one whose spec is called `__main__`."""
    main = sys.modules["__main__"]
    with _main_lock:
        spec = main.__spec__
        main.__spec__ = ModuleSpec("__main__", None)
        try:
            yield
        finally:
            main.__spec__ = spec
