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

from jaxprorl.interrupts import safe_point
from jaxprorl.models.compute import Compute
from jaxprorl.models.qwen2 import Params, Qwen2Config, build
from jaxprorl.rollout.cache import Cache, Layout, cache_bytes, cache_shardings, empty_cache, make_layout
from jaxprorl.rollout.decoding import ORDER_COLUMNS, Slots, decode, empty_slots, make_rules, prefill
from jaxprorl.rollout.engine import Sampling, exam_sampling
from jaxprorl.rollout.schedule import Prefill, Running, Schedule
from jaxprorl.sharding.mesh import batch_sharding, replicated
from jaxprorl.sharding.strategies import AXES, BATCH_AXES
from jaxprorl.types import Completion, FinishReason, Prompt

# Prompts of a shard that are prefilled together, always: in bfloat16 on CPU a product's bits depend on the number of its rows.
PREFILL_PROMPTS = 16
MOST_PREFILL_TOKENS = 16_384  # and no more tokens than these, which bounds the memory of activations
NAIVE_MAX_TOKENS = 256  # longer prompts are prefilled by chunked attention, whose memory does not grow with their square


@dataclass
class _Executables:
    """For groups of one size. `decode` is by whether top-k and top-p are compiled in."""

    layout: Layout
    empty: Any
    prefill: dict[int, Any]  # by columns of a prompt
    decode: dict[bool, Any]


class JaxEngine:
    """Batched sampling under jit. Weights are shared with the trainer, a swap copies nothing."""

    def __init__(self, config: ConfigDict, model_config: Qwen2Config, mesh: Mesh, stop_ids: Sequence[int]):
        self.config, self.model_config, self.mesh = config, model_config, mesh
        self.rules = make_rules(config, stop_ids)
        self._params: Params | None = None
        self._version = -1
        self._executables: dict[int, _Executables] = {}  # by samples per prompt
        self._slot_steps = self._tokens = 0

    def compile(self, params: Params, samples: Sequence[int]) -> dict[str, Any]:
        """Compiles prefilling and decoding for each group size. `params` may be shapes with shardings.

        Single samples, which evaluation takes, may also be drawn with top-k and top-p if `config.evaluation` does so.

        Returns:
            `cache_bytes` and `temporary_bytes`, by group size.
        """
        truncates = exam_sampling(self.config).truncated
        for n in dict.fromkeys(samples):
            safe_point()
            layout = make_layout(self.config, n, self.mesh)
            self._executables[n] = self._compile(params, layout, (False, True) if truncates and n == 1 else (False,))
        sizes = {"cache_bytes": self.cache_bytes, "temporary_bytes": self.temporary_bytes}
        return {name: {str(n): of(n) for n in samples} for name, of in sizes.items()}

    def _compile(self, params: Params, layout: Layout, truncations: Sequence[bool]) -> _Executables:
        c, dtype, mesh = self.model_config, self.config.model.dtype, self.mesh
        rows, whole = batch_sharding(mesh), replicated(mesh)
        cache_at = cache_shardings(layout, c, mesh, self.config.mesh.strategy)
        make = partial(_empty, layout, c, dtype)
        slots_at = dict.fromkeys(jax.eval_shape(make)[1], rows)
        cache, slots = jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), jax.eval_shape(make), (cache_at, slots_at)
        )

        def shape(*dimensions: int, sharding: Any = rows, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(dimensions, dtype, sharding=sharding)

        def model(width: int) -> Any:
            attention = "naive" if width <= NAIVE_MAX_TOKENS else "chunked"
            return build(c, Compute(dtype, attention, self.config.model.attention_chunk_tokens))

        def compile_prefill(width: int) -> Any:
            prompts = layout.shards * prefill_prompts(layout, width)
            run = self._on_shards(partial(prefill, model(width), layout), "prrrr", "r")
            jitted = jax.jit(run, donate_argnums=1, out_shardings=cache_at)
            return jitted.lower(params, cache, shape(prompts, width), shape(prompts), shape(prompts)).compile()

        def compile_decode(truncated: bool) -> Any:
            run = self._on_shards(partial(decode, model(1), layout, self.rules, truncated), "prrrrp", "rrr")
            jitted = jax.jit(run, donate_argnums=(1, 2), out_shardings=(cache_at, slots_at, rows))
            order = shape(layout.shards * layout.slots, ORDER_COLUMNS)
            numbers = {name: shape(sharding=whole, dtype=x.dtype) for name, x in _numbers(Sampling(1, 1.0, 0, 0)).items()}
            return jitted.lower(params, cache, slots, order, shape(layout.shards, layout.banks + 1), numbers).compile()

        return _Executables(
            layout,
            jax.jit(make, out_shardings=(cache_at, slots_at)).lower().compile(),
            {width: compile_prefill(width) for width in prompt_widths(layout)},
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
        """Memory of the cache while groups of this size are sampled, over all shards; between calls there is none."""
        return cache_bytes(self._executables[samples].layout, self.model_config, self.config.model.dtype)

    def temporary_bytes(self, samples: int) -> int | None:
        """The most that prefilling or decoding groups of this size takes beside cache and weights.

        The compiler's estimate per device; None where it makes none.
        """
        executables = self._executables[samples]
        made = [each.memory_analysis() for each in (*executables.prefill.values(), *executables.decode.values())]
        return None if None in made else max(int(each.temp_size_in_bytes) for each in made)

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
        """See `Engine.generate`. `limit(prompt_id, sample)` is the most tokens of a sample, within `rollout.max_response_tokens`."""
        if not prompts:
            return iter(())
        most = self.config.rollout.max_response_tokens
        executables = self._executables[sampling.samples]

        def most_of(prompt_id: int, sample: int) -> int:
            return min(max(1, limit(prompt_id, sample)), most) if limit else most

        schedule = Schedule(executables.layout, prompts, most_of)
        # The cache lives as long as this call: nothing of it takes memory during updates, or reaches the next one.
        return self._stream(schedule, self._advance(schedule, sampling, executables.empty()), sampling)

    def _advance(self, schedule: Schedule, sampling: Sampling, held: tuple[Cache, Slots]) -> tuple[Cache, Slots, dict[str, jax.Array]]:
        """Fills free slots and dispatches the next decode steps."""
        executables = self._executables[sampling.samples]
        prefills, started = schedule.admit()
        cache = self._prefill(executables, held[0], prefills)
        layout = executables.layout
        order_BN = np.zeros((layout.shards * layout.slots, ORDER_COLUMNS), np.int32)
        for slot in started:
            running = schedule.running[slot]
            ids = running.prompt.token_ids
            order_BN[slot] = 1, running.entry, running.prompt.prompt_id, running.sample, ids[-1], len(ids), running.limit
        reach = schedule.reach(self.rules.chunk_tokens)
        order, reached = jax.device_put((order_BN, reach), batch_sharding(self.mesh))
        numbers = jax.device_put(_numbers(sampling), replicated(self.mesh))
        decoded: tuple[Cache, Slots, dict[str, jax.Array]]
        decoded = executables.decode[sampling.truncated](self._params, cache, held[1], order, reached, numbers)
        return decoded

    def _prefill(self, executables: _Executables, cache: Cache, prefills: Sequence[Prefill]) -> Cache:
        """Each prompt in the executable of its own length: in which one must not depend on its neighbours."""
        layout, least = executables.layout, 0
        for width, run in executables.prefill.items():
            size = prefill_prompts(layout, width)
            chosen = [new for new in prefills if least < len(new.prompt.token_ids) <= width]
            queues = [[new for new in chosen if new.shard == shard] for shard in range(layout.shards)]
            while any(queues):
                tokens_PS = np.zeros((layout.shards * size, width), np.int32)
                length_P, entry_P = np.zeros(len(tokens_PS), np.int32), np.full(len(tokens_PS), layout.entries, np.int32)
                for shard, queue in enumerate(queues):
                    for row, new in enumerate(queue[:size], start=shard * size):
                        ids = new.prompt.token_ids
                        tokens_PS[row, : len(ids)], length_P[row], entry_P[row] = ids, len(ids), new.entry
                    del queue[:size]
                arguments = jax.device_put((tokens_PS, length_P, entry_P), batch_sharding(self.mesh))
                cache = run(self._params, cache, *arguments)
            least = width
        return cache

    def _stream(self, schedule: Schedule, decoded: tuple[Cache, Slots, dict[str, jax.Array]], sampling: Sampling) -> Iterator[Completion]:
        layout, version = schedule.layout, self._version
        while schedule.unfinished:
            safe_point()
            cache, slots, view = decoded
            seen = jax.device_get(view)
            ended = []
            self._slot_steps += int(seen["steps_1"].max()) * layout.slots * layout.shards  # all wait for the slowest
            for slot, running in list(schedule.running.items()):
                new = int(seen["made_B"][slot]) - running.made
                running.token_ids.append(seen["tokens_BC"][slot, :new])
                running.logprobs.append(seen["logprobs_BC"][slot, :new])
                running.made += new
                self._tokens += new
                if not seen["running_B"][slot]:
                    ended.append(schedule.end(slot))
            if schedule.unfinished:
                decoded = self._advance(schedule, sampling, (cache, slots))  # the devices go on before the host hands anything out
            for running in ended:
                yield self._completion(running, version)

    def _completion(self, running: Running, version: int) -> Completion:
        token_ids, logprobs = np.concatenate(running.token_ids), np.concatenate(running.logprobs)
        reason: FinishReason = "stop" if token_ids[-1] in self.rules.stop_ids else "length"
        return Completion(running.prompt.prompt_id, running.sample, token_ids, logprobs, reason, ((version, 0, len(token_ids)),))

    def close(self) -> None:
        """Nothing to free."""


def prompt_widths(layout: Layout) -> list[int]:
    """Columns that prompts are prefilled at: up to the end of each segment."""
    return np.cumsum(layout.prompt_segments).tolist()


def prefill_prompts(layout: Layout, width: int) -> int:
    """Prompts of a shard that are prefilled together; fewer are padded to as many."""
    return max(1, min(layout.bank_entries, PREFILL_PROMPTS, MOST_PREFILL_TOKENS // width))


def _empty(layout: Layout, c: Qwen2Config, dtype: str) -> tuple[Cache, Slots]:
    return empty_cache(layout, c, dtype), empty_slots(layout.shards * layout.slots)


def _numbers(sampling: Sampling) -> dict[str, Any]:
    return {
        "seed": np.uint32(sampling.seed), "step": np.uint32(sampling.step), "temperature": np.float32(sampling.temperature),
        "top_k": np.int32(sampling.top_k), "top_p": np.float32(sampling.top_p),
    }  # fmt: skip
