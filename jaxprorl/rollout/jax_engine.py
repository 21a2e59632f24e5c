"""The embedded engine: continuous batching over a fixed number of slots, a number of decode steps per dispatch.

`schedule` decides on the host what runs where, `decoding` does it on the devices, `cache` says in how much memory. Everything is compiled
ahead for fixed shapes. Tokens depend on weights, prompts and `Sampling` alone: bit for bit with the same slots and limits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from ml_collections import ConfigDict

from jaxprorl.models.compute import Compute
from jaxprorl.models.qwen2 import Params, Qwen2Config, build
from jaxprorl.rollout.cache import Cache, Layout, cache_bytes, cache_shardings, empty_cache, make_layout
from jaxprorl.rollout.decoding import ORDER_COLUMNS, Slots, decode, empty_slots, make_rules, prefill
from jaxprorl.rollout.engine import Sampling, exam_sampling
from jaxprorl.rollout.schedule import Prefill, Running, Schedule
from jaxprorl.sharding.mesh import batch_sharding, replicated
from jaxprorl.sharding.strategies import AXES, BATCH_AXES
from jaxprorl.types import Completion, FinishReason, Prompt

FEW_PROMPTS = 16  # prefilled in one piece however few there are; with more, there is a second executable for an eighth of them
NAIVE_MAX_TOKENS = 256  # longer prompts are prefilled by chunked attention, whose memory does not grow with their square


@dataclass
class _Executables:
    """For groups of one size. `decode` is by whether top-k and top-p are compiled in."""

    layout: Layout
    empty: Any
    prefill: dict[int, Any]  # by prompts per shard
    decode: dict[bool, Any]


class JaxEngine:
    """Batched sampling under jit. Weights are shared with the trainer, a swap copies nothing."""

    def __init__(self, config: ConfigDict, model_config: Qwen2Config, mesh: Mesh, stop_ids: Sequence[int]):
        self.config, self.model_config, self.mesh = config, model_config, mesh
        self.rules = make_rules(config, stop_ids)
        self._params: Params | None = None
        self._version = -1
        self._executables: dict[int, _Executables] = {}  # by samples per prompt
        self._held: tuple[int, Cache, Slots] | None = None  # the cache is kept between calls for groups of the same size
        self._slot_steps = self._tokens = 0

    def compile(self, params: Params, samples: Sequence[int]) -> None:
        """Compiles prefilling and decoding for each group size. `params` may be shapes with shardings.

        Single samples, which evaluation takes, may also be drawn with top-k and top-p if `config.evaluation` does so.
        """
        truncates = exam_sampling(self.config).truncated
        for n in dict.fromkeys(samples):
            layout = make_layout(self.config, n, self.mesh)
            self._executables[n] = self._compile(params, layout, (False, True) if truncates and n == 1 else (False,))

    def _compile(self, params: Params, layout: Layout, truncations: Sequence[bool]) -> _Executables:
        c, dtype, mesh = self.model_config, self.config.model.dtype, self.mesh
        width = sum(layout.prompt_segments)
        attention = "naive" if width <= NAIVE_MAX_TOKENS else "chunked"
        graphdef = build(c, Compute(dtype, attention, self.config.model.attention_chunk_tokens))
        rows, whole = batch_sharding(mesh), replicated(mesh)
        cache_at = cache_shardings(layout, c, mesh, self.config.mesh.strategy)
        make = partial(_empty, layout, c, dtype)
        slots_at = dict.fromkeys(jax.eval_shape(make)[1], rows)
        cache, slots = jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), jax.eval_shape(make), (cache_at, slots_at)
        )

        def shape(*dimensions: int, sharding: Any = rows, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(dimensions, dtype, sharding=sharding)

        def compile_prefill(size: int) -> Any:
            prompts = layout.shards * size
            run = self._on_shards(partial(prefill, graphdef, layout), "prrrr", "r")
            jitted = jax.jit(run, donate_argnums=1, out_shardings=cache_at)
            return jitted.lower(params, cache, shape(prompts, width), shape(prompts), shape(prompts)).compile()

        def compile_decode(truncated: bool) -> Any:
            run = self._on_shards(partial(decode, graphdef, layout, self.rules, truncated), "prrrrp", "rrr")
            jitted = jax.jit(run, donate_argnums=(1, 2), out_shardings=(cache_at, slots_at, rows))
            order = shape(layout.shards * layout.slots, ORDER_COLUMNS)
            numbers = {name: shape(sharding=whole, dtype=x.dtype) for name, x in _numbers(Sampling(1, 1.0, 0, 0)).items()}
            return jitted.lower(params, cache, slots, order, shape(layout.shards, layout.banks + 1), numbers).compile()

        most = layout.bank_entries
        sizes = {most, most // 8} if most > FEW_PROMPTS else {most}
        return _Executables(
            layout,
            jax.jit(make, out_shardings=(cache_at, slots_at)).lower().compile(),
            {size: compile_prefill(size) for size in sorted(sizes)},
            {truncated: compile_decode(truncated) for truncated in truncations},
        )

    def _on_shards(self, run: Callable[..., Any], arguments: str, results: str) -> Callable[..., Any]:
        """`run` on every shard by itself; r = rows are split over the shards, p = every shard has all of it."""
        specs = {"r": PartitionSpec(BATCH_AXES), "p": PartitionSpec()}
        others = [axis for axis in AXES if axis not in BATCH_AXES and self.mesh.shape[axis] > 1]
        return jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=tuple(specs[letter] for letter in arguments),
            out_specs=specs[results] if len(results) == 1 else tuple(specs[letter] for letter in results),
            axis_names=set(BATCH_AXES) if others else set(AXES),
            check_vma=False,
        )

    def cache_bytes(self, samples: int) -> int:
        """Memory that decoding groups of this size takes beside weights and activations, over all devices."""
        return cache_bytes(self._executables[samples].layout, self.model_config, self.config.model.dtype)

    def set_weights(self, params: Params, version: int) -> dict[str, float]:
        """Swaps the policy; the arrays are shared, not copied."""
        self._params, self._version = params, version
        return {}

    def statistics(self) -> dict[str, float]:
        """`slot_use`: share of the slots' decode steps that made a token of a completion."""
        share = self._tokens / self._slot_steps if self._slot_steps else 1.0
        self._slot_steps = self._tokens = 0
        return {"slot_use": share}

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, limit: Callable[[int, int], int] | None = None
    ) -> Iterator[Completion]:
        """See `Engine.generate`. `limit(prompt_id, sample)` is the most tokens of a sample, if less than `rollout.max_response_tokens`."""
        if not prompts:
            return iter(())
        executables, most = self._executables[sampling.samples], self.config.rollout.max_response_tokens
        schedule = Schedule(executables.layout, prompts, limit or (lambda prompt_id, sample: most))
        return self._stream(schedule, self._advance(schedule, sampling), sampling)

    def _advance(self, schedule: Schedule, sampling: Sampling) -> dict[str, jax.Array]:
        """Fills free slots and dispatches the next decode steps."""
        executables = self._executables[sampling.samples]
        held, self._held = self._held, None
        cache, slots = held[1:] if held and held[0] == sampling.samples else executables.empty()
        del held
        prefills, started = schedule.admit()
        cache = self._prefill(executables, cache, prefills)
        layout = executables.layout
        order_BN = np.zeros((layout.shards * layout.slots, ORDER_COLUMNS), np.int32)
        for slot in started:
            running = schedule.running[slot]
            ids = running.prompt.token_ids
            order_BN[slot] = 1, running.entry, running.prompt.prompt_id, running.sample, ids[-1], len(ids), running.limit
        reach = schedule.reach(self.rules.chunk_tokens)
        order, reached = jax.device_put((order_BN, reach), batch_sharding(self.mesh))
        numbers = jax.device_put(_numbers(sampling), replicated(self.mesh))
        cache, slots, view = executables.decode[sampling.truncated](self._params, cache, slots, order, reached, numbers)
        self._held = sampling.samples, cache, slots
        return view

    def _prefill(self, executables: _Executables, cache: Cache, prefills: Sequence[Prefill]) -> Cache:
        layout = executables.layout
        queues = [[new for new in prefills if new.shard == shard] for shard in range(layout.shards)]
        while any(queues):
            longest = max(map(len, queues))
            size = next((size for size in executables.prefill if size >= longest), max(executables.prefill))
            tokens_PS = np.zeros((layout.shards * size, sum(layout.prompt_segments)), np.int32)
            length_P, entry_P = np.zeros(len(tokens_PS), np.int32), np.full(len(tokens_PS), layout.entries, np.int32)
            for shard, queue in enumerate(queues):
                for row, new in enumerate(queue[:size], start=shard * size):
                    ids = new.prompt.token_ids
                    tokens_PS[row, : len(ids)], length_P[row], entry_P[row] = ids, len(ids), new.entry
                del queue[:size]
            arguments = jax.device_put((tokens_PS, length_P, entry_P), batch_sharding(self.mesh))
            cache = executables.prefill[size](self._params, cache, *arguments)
        return cache

    def _stream(self, schedule: Schedule, view: dict[str, jax.Array], sampling: Sampling) -> Iterator[Completion]:
        layout, version = schedule.layout, self._version
        while schedule.unfinished:
            seen = jax.device_get(view)
            ended = []
            self._slot_steps += int(seen["steps_1"].sum()) * layout.slots
            for slot, running in list(schedule.running.items()):
                new = int(seen["made_B"][slot]) - running.made
                running.token_ids.append(seen["tokens_BC"][slot, :new])
                running.logprobs.append(seen["logprobs_BC"][slot, :new])
                running.made += new
                self._tokens += new
                if not seen["running_B"][slot]:
                    ended.append(schedule.end(slot))
            if schedule.unfinished:
                view = self._advance(schedule, sampling)  # the devices go on before the host hands anything out
            for running in ended:
                yield self._completion(running, version)

    def _completion(self, running: Running, version: int) -> Completion:
        token_ids, logprobs = np.concatenate(running.token_ids), np.concatenate(running.logprobs)
        reason: FinishReason = "stop" if token_ids[-1] in self.rules.stop_ids else "length"
        return Completion(running.prompt.prompt_id, running.sample, token_ids, logprobs, reason, ((version, 0, len(token_ids)),))

    def close(self) -> None:
        """Nothing to free."""


def _empty(layout: Layout, c: Qwen2Config, dtype: str) -> tuple[Cache, Slots]:
    return empty_cache(layout, c, dtype), empty_slots(layout.shards * layout.slots)


def _numbers(sampling: Sampling) -> dict[str, Any]:
    return {
        "seed": np.uint32(sampling.seed), "step": np.uint32(sampling.step), "temperature": np.float32(sampling.temperature),
        "top_k": np.int32(sampling.top_k), "top_p": np.float32(sampling.top_p),
    }  # fmt: skip
