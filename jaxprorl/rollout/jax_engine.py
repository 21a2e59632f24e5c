"""The embedded engine: prefill once per prompt, then decode all slots together, a fixed number of steps per dispatch.

Prompts are padded on the left, so all rows write the same cache column. Slots are split over the mesh like batch rows;
no step needs a collective. Everything is compiled ahead for fixed shapes.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxprorl.models import attention
from jaxprorl.models.compute import Compute
from jaxprorl.models.qwen2 import Params, Qwen2Config, build
from jaxprorl.rollout.engine import Sampling
from jaxprorl.sharding.mesh import batch_sharding, replicated
from jaxprorl.types import Completion, Prompt

Slots = dict[str, jax.Array]


class JaxEngine:
    """Batched sampling under jit. Weights are shared with the trainer, a swap copies nothing."""

    def __init__(self, config: ConfigDict, model_config: Qwen2Config, mesh: Mesh, stop_ids: Sequence[int]):
        self.config = config
        self.mesh = mesh
        self.stop_ids = tuple(stop_ids)
        self._graphdef = build(model_config, Compute(config.model.dtype))
        self._params: Params | None = None
        self._version = -1
        self._prefill: dict[int, Any] = {}  # executable by samples per prompt
        self._decode: Any = None

    def compile(self, params: Params, samples: Sequence[int]) -> None:
        """Compiles prefilling for each group size, and decoding. `params` may be shapes with shardings."""
        rows, whole = batch_sharding(self.mesh), replicated(self.mesh)
        width = self.config.rollout.max_prompt_tokens

        def shape(*dimensions: int, sharding: Any = rows, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(dimensions, dtype, sharding=sharding)

        number = shape(sharding=whole, dtype=jnp.uint32)
        for n in samples:
            prompts = self.config.rollout.slots // n
            start = jax.jit(partial(start_slots, self._graphdef, self.config, n), out_shardings=slot_shardings(self.mesh))
            self._prefill[n] = start.lower(params, shape(prompts, width), shape(prompts), shape(prompts), number, number).compile()
        shapes = jax.eval_shape(start, params, shape(prompts, width), shape(prompts), shape(prompts), number, number)
        slots = jax.tree.map(lambda x, s: shape(*x.shape, sharding=s, dtype=x.dtype), shapes, slot_shardings(self.mesh))
        decode = jax.jit(
            partial(decode_chunk, self._graphdef, self.config, self.stop_ids),
            donate_argnums=1,
            out_shardings=(slot_shardings(self.mesh), rows),
        )
        self._decode = decode.lower(params, slots, shape(sharding=whole, dtype=jnp.float32)).compile()

    def set_weights(self, params: Params, version: int) -> dict[str, float]:
        """Swaps the policy; the arrays are shared, not copied."""
        self._params, self._version = params, version
        return {}

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Completion]:
        """See `Engine.generate`. Prompts beyond the slots wait for the next round."""
        per_round = self.config.rollout.slots // sampling.samples
        rounds = [list(prompts[i : i + per_round]) for i in range(0, len(prompts), per_round)]
        return self._stream(rounds, self._start(rounds[0], sampling), sampling) if rounds else iter(())

    def _start(self, prompts: Sequence[Prompt], sampling: Sampling) -> tuple[Slots, Any]:
        """Dispatches prefill and the first decode chunk of one round."""
        count, width = self.config.rollout.slots // sampling.samples, self.config.rollout.max_prompt_tokens
        tokens_PL, length_P, id_P = np.zeros((count, width), np.int32), np.zeros(count, np.int32), np.zeros(count, np.int32)
        for row, prompt in enumerate(prompts):
            tokens_PL[row, width - len(prompt.token_ids) :] = prompt.token_ids
            length_P[row], id_P[row] = len(prompt.token_ids), prompt.prompt_id
        arguments = jax.device_put((tokens_PL, length_P, id_P), batch_sharding(self.mesh))
        numbers = jax.device_put((np.uint32(sampling.seed), np.uint32(sampling.step)), replicated(self.mesh))
        slots = self._prefill[sampling.samples](self._params, *arguments, *numbers)
        return self._advance(slots, sampling)

    def _advance(self, slots: Slots, sampling: Sampling) -> tuple[Slots, Any]:
        temperature = jax.device_put(np.float32(sampling.temperature), replicated(self.mesh))
        return self._decode(self._params, slots, temperature)

    def _stream(self, rounds: list[list[Prompt]], started: tuple[Slots, Any], sampling: Sampling) -> Iterator[Completion]:
        n, limit = sampling.samples, self.config.rollout.max_response_tokens
        for index, prompts in enumerate(rounds):
            pieces: list[tuple[np.ndarray, np.ndarray]] = []
            waiting = list(range(len(prompts) * n))
            while waiting:
                slots, view = started
                tokens_BC, logprobs_BC, response_tokens_B, stopped_B = jax.device_get(view)
                pieces.append((tokens_BC, logprobs_BC))
                made = len(pieces) * tokens_BC.shape[1]
                ended = [row for row in waiting if stopped_B[row] or made >= limit]
                waiting = [row for row in waiting if not (stopped_B[row] or made >= limit)]
                # The devices go on before the host hands anything out.
                if waiting:
                    started = self._advance(slots, sampling)
                elif index + 1 < len(rounds):
                    started = self._start(rounds[index + 1], sampling)
                tokens_BT = np.concatenate([tokens for tokens, _ in pieces], axis=1)
                logprobs_BT = np.concatenate([logprobs for _, logprobs in pieces], axis=1)
                for row in ended:
                    size = min(int(response_tokens_B[row]), limit)
                    yield Completion(
                        prompt_id=prompts[row // n].prompt_id,
                        sample=row % n,
                        token_ids=tokens_BT[row, :size].copy(),
                        logprobs=logprobs_BT[row, :size].copy(),
                        finish_reason="stop" if tokens_BT[row, size - 1] in self.stop_ids else "length",
                        version_spans=((self._version, 0, size),),
                    )

    def close(self) -> None:
        """Nothing to free."""


def slot_shardings(mesh: Mesh) -> dict[str, Any]:
    """Shardings of the slots: rows over the data axes."""
    rows, cache = batch_sharding(mesh), batch_sharding(mesh, leading=1)
    names = ("token", "prompt_tokens", "response_tokens", "stopped", "key")
    return dict.fromkeys(names, rows) | {"k": cache, "v": cache, "made": replicated(mesh)}


def start_slots(
    graphdef: nnx.GraphDef,
    config: ConfigDict,
    samples: int,
    params: Params,
    tokens_PL: jax.Array,
    length_P: jax.Array,
    id_P: jax.Array,
    seed: jax.Array,
    step: jax.Array,
) -> Slots:
    """Prefills left-padded prompts and gives every sample a slot. A prompt of length 0 leaves its slots idle.

    The last prompt token is left to the first decode step, which then is like all others.

    Returns:
        Slots with B = P * samples rows: `k`, `v` [L, B, W, G, K] caches; `token` (fed next), `prompt_tokens`,
        `response_tokens`, `stopped`, `key` [B]; `made`, decode steps done.
    """
    model: Any = nnx.merge(graphdef, params)
    c = model.config
    prompts, width = tokens_PL.shape
    column_L = jnp.arange(width)
    real_PL = column_L[None] >= width - length_P[:, None]
    positions_PL = jnp.maximum(column_L[None] - (width - length_P[:, None]), 0)
    mask_P1LL = attention.packed_causal_mask(real_PL.astype(jnp.int32))
    empty = jnp.zeros((c.num_hidden_layers, prompts, width, c.num_key_value_heads, c.head_dim), model.compute.dtype)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, caches: Any) -> tuple[jax.Array, Any]:
        return attention.attend(q, k, v, mask_P1LL), (caches[0].at[layer].set(k), caches[1].at[layer].set(v))

    _, caches = model.run_layers(model.embed_tokens(tokens_PL), positions_PL, attend, (empty, empty))
    more = config.rollout.max_response_tokens - 1  # the last prompt column is written again by the first decode step
    k, v = (jnp.pad(jnp.repeat(x, samples, axis=1), ((0, 0), (0, 0), (0, more), (0, 0), (0, 0))) for x in caches)
    sample_B = jnp.tile(jnp.arange(samples), prompts)
    step_key = jax.random.fold_in(jax.random.key(seed), step)
    key_B = jax.vmap(lambda i, s: jax.random.fold_in(jax.random.fold_in(step_key, i), s))(jnp.repeat(id_P, samples), sample_B)
    length_B = jnp.repeat(length_P, samples)
    return {
        "k": k,
        "v": v,
        "token": jnp.repeat(tokens_PL[:, -1], samples),
        "prompt_tokens": length_B,
        "response_tokens": jnp.zeros_like(length_B),
        "stopped": length_B == 0,
        "key": key_B,
        "made": jnp.zeros((), jnp.int32),
    }


def decode_chunk(
    graphdef: nnx.GraphDef, config: ConfigDict, stop_ids: tuple[int, ...], params: Params, slots: Slots, temperature: jax.Array
) -> tuple[Slots, tuple[jax.Array, ...]]:
    """`config.rollout.decode_chunk_tokens` decode steps of all slots.

    Returns:
        The slots, and what the host reads: tokens_BC and logprobs_BC of this chunk, response_tokens_B and stopped_B so far.
    """
    model: Any = nnx.merge(graphdef, params)
    chunk, rows = config.rollout.decode_chunk_tokens, slots["token"].shape[0]
    scale = jnp.where(temperature > 0, temperature, 1.0)
    head_DV = model.head().T

    def step(i: jax.Array, carry: tuple[Slots, jax.Array, jax.Array]) -> tuple[Slots, jax.Array, jax.Array]:
        slots, tokens_BC, logprobs_BC = carry
        column = config.rollout.max_prompt_tokens - 1 + slots["made"]
        position_B1 = (slots["prompt_tokens"] - 1 + slots["made"])[:, None]
        column_W = jnp.arange(slots["k"].shape[2])[None]
        first_B1 = config.rollout.max_prompt_tokens - slots["prompt_tokens"][:, None]
        mask_B11W = ((column_W >= first_B1) & (column_W <= column))[:, None, None]

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, caches: Any) -> tuple[jax.Array, Any]:
            start = tuple(jnp.asarray(x, jnp.int32) for x in (layer, 0, column, 0, 0))
            caches = tuple(jax.lax.dynamic_update_slice(cache, new[None], start) for cache, new in zip(caches, (k, v), strict=True))
            return attention.attend(q, caches[0][layer], caches[1][layer], mask_B11W), caches

        x_B1D = model.embed_tokens(slots["token"][:, None])
        hidden_B1D, (k, v) = model.run_layers(x_B1D, position_B1, attend, (slots["k"], slots["v"]))
        logits_BV = jnp.dot(hidden_B1D[:, 0], head_DV, preferred_element_type=jnp.float32) / scale
        token_B = draw(logits_BV, slots["key"], slots["made"], temperature)
        hit_BV = jnp.arange(logits_BV.shape[1])[None] == token_B[:, None]
        logprob_B = jnp.sum(jnp.where(hit_BV, jax.nn.log_softmax(logits_BV), 0.0), axis=1)
        running_B = ~slots["stopped"]
        is_stop_B = jnp.isin(token_B, jnp.array(stop_ids))
        slots = slots | {
            "k": k,
            "v": v,
            "token": token_B,
            "response_tokens": slots["response_tokens"] + running_B,
            "stopped": slots["stopped"] | is_stop_B,
            "made": slots["made"] + 1,
        }
        return slots, tokens_BC.at[:, i].set(token_B), logprobs_BC.at[:, i].set(logprob_B)

    start = slots, jnp.zeros((rows, chunk), jnp.int32), jnp.zeros((rows, chunk), jnp.float32)
    slots, tokens_BC, logprobs_BC = jax.lax.fori_loop(0, chunk, step, start)
    return slots, (tokens_BC, logprobs_BC, slots["response_tokens"], slots["stopped"])


def draw(logits_BV: jax.Array, key_B: jax.Array, position: jax.Array, temperature: jax.Array) -> jax.Array:
    """One token per row by the Gumbel-max trick, or the most likely one at temperature 0.

    Row b's noise depends on its own key and the position alone, never on its neighbours.
    """
    noise_BV = jax.vmap(lambda key: jax.random.gumbel(jax.random.fold_in(key, position), logits_BV.shape[1:]))(key_B)
    return jnp.argmax(logits_BV + jnp.where(temperature > 0, noise_BV, 0.0), axis=-1).astype(jnp.int32)
