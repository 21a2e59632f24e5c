"""vLLM as a rollout engine: requests to worker processes, completions back, and weight swaps that are proven (docs/rollouts.md).

Everything happens in the caller's thread: `_pump` moves records, watches deadlines and drives each worker's state machine. Prompts are
dealt to workers in turn, so who answers what depends on no clock; a lost worker's requests are asked again of its successor.
"""

import dataclasses
import hashlib
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxprorl.errors import EngineError
from jaxprorl.interrupts import safe_point
from jaxprorl.models.qwen2 import Params, Qwen2Config
from jaxprorl.rollout import ring, segments, weights_segment
from jaxprorl.rollout.engine import Sampling
from jaxprorl.rollout.preflight import RESPONSE_TOKENS, cache_bytes, context_tokens
from jaxprorl.rollout.probe import Probe, tolerance
from jaxprorl.rollout.records import Abort, Aborted, Failed, Finished, Go, Ready, Record, Request, Swap, Swapped
from jaxprorl.rollout.swap import Event, Stage, WorkerState, advance, overdue
from jaxprorl.rollout.weights import WeightChannel, channel_bytes
from jaxprorl.rollout.worker import Settings
from jaxprorl.rollout.worker_process import Launch, WorkerProcess, ring_segment_bytes
from jaxprorl.types import Completion, Prompt

POLL_S = 0.001


@dataclass
class Asked:
    """A request that has not been answered. `sent`: the present worker process has it."""

    request: Request
    answers: deque[Completion]
    sent: bool = False


@dataclass
class Worker:
    """One worker and what it owes.

    Attributes:
        asked: by request number, in their order.
        probing: number of each probe request without an answer -> index of its prompt; probed: answers, by that index.
        heard_s: when it last answered a request, or was given one while it had none.
        served: this worker, or one before it in its place, has served.
        versions: of its Python and packages; empty before it is ready.
    """

    process: WorkerProcess
    state: WorkerState
    asked: dict[int, Asked] = field(default_factory=dict)
    probing: dict[int, int] = field(default_factory=dict)
    probed: dict[int, Completion] = field(default_factory=dict)
    heard_s: float = 0.0
    served: bool = False
    versions: str = ""

    def busy(self) -> bool:
        """Whether the process has requests."""
        return bool(self.probing) or any(asked.sent for asked in self.asked.values())


class VllmEngine:
    """See `engine.Engine`. Workers start, in the background, when it is made.

    Raises:
        SharedMemoryError: too little shared memory and disk.
    """

    def __init__(
        self,
        config: ConfigDict,
        model_config: Qwen2Config,
        mesh: Mesh,
        stop_ids: Sequence[int],
        run_folder: Path,
        note: Callable[[str], None],
    ):
        """`run_folder/base_model` holds config.json. `note` tells the user something."""
        self._config, self._note = config, note
        self._stop_ids = np.array(stop_ids, np.int32)
        self._probe, self._tolerance = Probe(config, model_config, mesh), tolerance(config)
        self._params: Params | None = None
        self._version = -1
        self._next_request = 0
        self._restarts = self._restarts_told = 0
        self._facts: dict[str, float] = {}
        for path in segments.reap(run_folder):
            note(f"removed {path}, left by a process of this run that was killed")
        c = config.rollout.vllm
        ring_bytes = int(c.ring_mb * 1e6)
        needed_bytes = channel_bytes(model_config, c.dtype) + c.workers * ring_segment_bytes(ring_bytes)
        folder, remark = segments.choose_folder(run_folder, needed_bytes)
        if remark:
            note(remark)
        d = c.deadlines
        self._limits_s = {Stage.STARTING: d.start_s, Stage.DRAINING: d.drain_s, Stage.LOADING: d.load_s, Stage.PROBING: d.probe_s}
        self._workers: list[Worker] = []
        self._channel = WeightChannel(model_config, mesh, c.dtype, folder, run_folder)
        try:
            self._launches = self._plan(folder, run_folder, ring_bytes, model_config)
            for launch in self._launches:
                self._workers.append(Worker(WorkerProcess(launch), WorkerState(Stage.STARTING, time.monotonic())))
        except BaseException:  # also KeyboardInterrupt: nobody has this engine yet, and its processes and segments would stay
            self.close()
            raise

    def _plan(self, folder: Path, run_folder: Path, ring_bytes: int, model_config: Qwen2Config) -> list[Launch]:
        """How each worker is started."""
        config, c = self._config, self._config.rollout.vllm
        settings = worker_settings(config, model_config, run_folder / "base_model", self._channel.path)
        return [
            Launch(
                python=c.python,
                number=number,
                segments_folder=folder,
                run_folder=run_folder,
                ring_bytes=ring_bytes,
                threads=c.threads,
                devices=c.devices[number] if c.devices else "",
                cache_folder=Path(config.cache_dir) / "vllm",
                settings=settings,
            )
            for number in range(c.workers)
        ]

    def compile(self, params: Params, samples: Sequence[int]) -> dict[str, Any]:
        """Compiles what a swap needs; sampling is the workers' own business. `params` may be shapes with shardings."""
        self._channel.compile(params)
        self._probe.compile(params)
        return {}

    def set_weights(self, params: Params, version: int) -> dict[str, float]:
        """Swaps the policy on all workers and proves it; unanswered requests end before or start again after, as `rollout.vllm.swap` says.

        Returns:
            `time_swap_s`, from the call on (waiting for the update that makes `params` included), `time_load_s` of the slowest worker,
            `bytes` per worker, `probe_nats` and `probe_mean_nats`: difference of log-probs (largest and mean) of the worst worker,
            `lost_workers` since the swap before.

        Raises:
            EngineError: a probe differs, or workers are lost too often.
        """
        started_s = time.perf_counter()
        if version <= self._version:
            raise ValueError(f"weights of version {version} after version {self._version}: each swap needs a higher one")
        self._channel.write(params, version)
        self._params, self._version = params, version
        self._facts = {"bytes": self._channel.size_bytes, "time_load_s": 0.0, "probe_nats": 0.0, "probe_mean_nats": 0.0}
        for worker in self._workers:
            if worker.state.stage not in (Stage.STARTING, Stage.LOADING):  # these come to it by themselves
                self._begin_swap(worker)
        self._until(lambda: all(w.state.stage is Stage.SERVING and w.state.version == version for w in self._workers))
        lost, self._restarts_told = self._restarts - self._restarts_told, self._restarts
        return self._facts | {"lost_workers": lost, "time_swap_s": time.perf_counter() - started_s}

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Completion]:
        """See `Engine.generate`: the workers that serve have everything when this returns, the others as soon as they do."""
        answers: deque[Completion] = deque()
        count = 0
        for index, prompt in enumerate(prompts):
            worker = self._workers[index % len(self._workers)]
            for sample in range(sampling.samples):
                request = self._request(prompt.prompt_id, sample, prompt.token_ids, sampling)
                worker.asked[request.request] = Asked(request, answers)
                count += 1
        for worker in self._workers:
            if worker.state.stage is Stage.SERVING:
                self._send_asked(worker)
        self._until(lambda: not any(w.state.stage is Stage.SERVING and w.process.unsent() for w in self._workers))
        return self._answers(answers, count)

    def _answers(self, answers: deque[Completion], count: int) -> Iterator[Completion]:
        for _ in range(count):
            self._until(lambda: bool(answers))
            yield answers.popleft()

    def statistics(self) -> dict[str, float]:
        """Nothing: vLLM's scheduler has no slots."""
        return {}

    def close(self) -> None:
        """Ends the workers and frees the shared memory, all of it even if one of them raises."""
        with ExitStack() as stack:
            stack.callback(self._channel.close)
            for worker in self._workers:
                stack.callback(worker.process.stop)

    def _request(self, prompt_id: int, sample: int, token_ids: np.ndarray, sampling: Sampling) -> Request:
        self._next_request += 1
        return Request(
            request=self._next_request,
            attempt=0,
            prompt_id=prompt_id,
            sample=sample,
            token_ids=np.asarray(token_ids, np.int32),
            temperature=float(sampling.temperature),
            top_k=sampling.top_k,
            top_p=float(sampling.top_p),
            seed=draw_seed(sampling, prompt_id, sample),
            max_tokens=self._config.rollout.max_response_tokens,
            stop_ids=self._stop_ids,
        )

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            safe_point()
            if not self._pump():
                time.sleep(POLL_S)

    def _pump(self) -> bool:
        """Moves records both ways and looks after every worker. Whether anything came."""
        came = False
        for number, worker in enumerate(self._workers):
            dead = worker.process.exit_code() is not None  # asked first: what it committed before it died is read below
            for record in worker.process.exchange():
                came = True
                self._take(number, worker, record)
            trouble = f"ended with exit code {worker.process.exit_code()}" if dead else self._trouble(worker)
            if trouble:
                self._replace(number, trouble)
            elif worker.state.stage is Stage.EMPTY and self._version >= 0:
                self._begin_swap(worker)
            elif worker.state.stage is Stage.DRAINING and not worker.busy():
                self._advance(worker, Event.DRAINED)
                worker.process.send(Swap(worker.state.version))
        return came

    def _take(self, number: int, worker: Worker, record: Record) -> None:
        match record:
            case Ready():
                check_layouts(number, record)
                worker.versions = ", ".join(record.versions.splitlines())
                worker.process.attached()
                self._advance(worker, Event.READY)
            case Finished():
                worker.heard_s = time.monotonic()
                if record.request in worker.probing:
                    worker.probed[worker.probing.pop(record.request)] = record.completion()
                    if not worker.probing and worker.state.stage is Stage.PROBING:
                        self._judge(number, worker)
                else:
                    worker.asked[record.request].answers.append(record.completion())
                    del worker.asked[record.request]
            case Aborted():
                for request in record.requests.tolist():
                    if request in worker.asked:
                        self._ask_again(worker.asked[request])
                    else:
                        del worker.probing[request]
            case Swapped():
                self._facts["time_load_s"] = max(self._facts["time_load_s"], record.seconds)
                self._advance(worker, Event.LOADED)
                if record.version == self._version:
                    self._send_probe(worker)
                else:  # it was given up for lost when the swap to the present version came
                    self._begin_swap(worker)
            case Failed():
                self._note(f"rollout worker {number}: {record.text.strip().splitlines()[-1]}")
            case _:
                raise EngineError(f"rollout worker {number} sent a {type(record).__name__} record, which is a command")

    def _advance(self, worker: Worker, event: Event, version: int | None = None) -> None:
        worker.state = advance(worker.state, event, time.monotonic(), version)

    def _begin_swap(self, worker: Worker) -> None:
        self._advance(worker, Event.SWAP, self._version)
        if worker.busy():
            worker.process.send(Abort(running=int(self._config.rollout.vllm.swap == "abort")))

    def _send_asked(self, worker: Worker) -> None:
        """Gives a worker the requests that it does not have."""
        if not worker.busy():
            worker.heard_s = time.monotonic()
        for asked in worker.asked.values():
            if not asked.sent:
                worker.process.send(asked.request)
                asked.sent = True
        worker.process.send(Go())

    def _ask_again(self, asked: Asked) -> None:
        """Its next attempt draws the same random numbers."""
        asked.request = dataclasses.replace(asked.request, attempt=asked.request.attempt + 1)
        asked.sent = False

    def _send_probe(self, worker: Worker) -> None:
        worker.heard_s = time.monotonic()
        sampling = Sampling(1, self._probe.temperature, seed=0, step=0)
        for index, token_ids in enumerate(self._probe.prompts):
            request = self._request(-1, index, token_ids, sampling)
            request = dataclasses.replace(request, max_tokens=RESPONSE_TOKENS, stop_ids=np.zeros(0, np.int32))
            worker.probing[request.request] = index
            worker.process.send(request)
        worker.process.send(Go())

    def _judge(self, number: int, worker: Worker) -> None:
        """All answers to the probe are there: the swap has succeeded or failed."""
        assert self._params is not None
        found = self._probe.difference(self._params, [worker.probed[i] for i in range(len(self._probe.prompts))])
        self._facts["probe_nats"] = max(self._facts["probe_nats"], found.largest)
        self._facts["probe_mean_nats"] = max(self._facts["probe_mean_nats"], found.mean)
        if not found.within(self._tolerance):
            raise EngineError(
                f"the swap to weights {worker.state.version} failed: log-probs of rollout worker {number} are up to {found.largest:.3g} "
                f"nats from the trainer's, {found.mean:.3g} on average; allowed are {self._tolerance.largest:g} and "
                f"{self._tolerance.mean:g} (rollout.vllm.probe_tolerance_nats). The worker does not compute with the weights that it was "
                "given, or vLLM and the trainer compute differently"
            )
        self._advance(worker, Event.AGREED)
        worker.served = True
        self._send_asked(worker)

    def _trouble(self, worker: Worker) -> str:
        """Why a worker that lives must be replaced; empty if it need not."""
        d, now_s = self._config.rollout.vllm.deadlines, time.monotonic()
        if late := overdue(worker.state, self._limits_s, now_s):
            return late
        if worker.busy():
            if (age_s := worker.process.beat_age_s()) > d.beat_s:
                return f"made no engine step for {age_s:.0f} s"
            if (age_s := now_s - worker.heard_s) > d.answer_s:
                return f"finished no request for {age_s:.0f} s"
        return ""

    def _replace(self, number: int, trouble: str) -> None:
        """A new process for a lost worker; it is asked again for what the old one owed.

        Raises:
            EngineError: it never served, or workers were lost more often than `rollout.vllm.max_restarts`.
        """
        lost = self._workers[number]
        who = f"rollout worker {number} (process {lost.process.pid})"
        ran = f"; it ran {lost.versions}" if lost.versions else ""
        story = f"{who} {trouble} while {lost.state.stage}{ran}; {lost.process.ring_story()}; {lost.process.log_tail()}"
        limit = self._config.rollout.vllm.max_restarts
        if lost.state.stage is Stage.STARTING and not lost.served:  # the next one would fare no better
            raise EngineError(story)
        self._restarts += 1
        if self._restarts > limit:
            raise EngineError(f"{story}\nWorkers were lost {self._restarts} times, rollout.vllm.max_restarts = {limit}")
        self._note(f"WARNING: {story}\nit is started again ({self._restarts} of {limit} times)")
        lost.process.close()
        for asked in lost.asked.values():
            self._ask_again(asked)
        state = advance(lost.state, Event.LOST, time.monotonic())
        self._workers[number] = Worker(WorkerProcess(self._launches[number]), state, lost.asked, served=lost.served)


def check_layouts(number: int, ready: Ready) -> None:
    """The handshake: both sides must lay out rings and weights alike. (Records of other layouts do not get this far.)

    Raises:
        EngineError: names the layout that differs.
    """
    for what, theirs, ours in (("ring", ready.ring_schema, ring.SCHEMA), ("weight segment", ready.weights_schema, weights_segment.SCHEMA)):
        if theirs != ours:
            raise EngineError(
                f"rollout worker {number} lays out the {what} by schema {theirs}, the trainer by {ours}: both must run the same jaxprorl"
            )


def worker_settings(config: ConfigDict, c: Qwen2Config, model: Path, weights: Path) -> Settings:
    """What all workers are told; each process fills in its own rings."""
    rollout, v = config.rollout, config.rollout.vllm
    slots = rollout.slots // v.workers
    return Settings(
        parent_pid=0,
        commands="",
        results="",
        weights=str(weights),
        model=str(model.resolve()),
        dtype=v.dtype,
        context_tokens=context_tokens(config),
        slots=slots,
        block_tokens=v.block_tokens,
        cache_bytes=int(v.cache_mb * 1e6) or cache_bytes(config, c, slots),
        eager=v.eager,
    )


def draw_seed(sampling: Sampling, prompt_id: int, sample: int) -> int:
    """Seed of one sample's draws, in [0, 2^63): equal for equal (seed, step, prompt, sample), unrelated otherwise."""
    numbers = struct.pack("<4q", sampling.seed, sampling.step, prompt_id, sample)
    return int.from_bytes(hashlib.blake2b(numbers, digest_size=8).digest(), "little") >> 1
