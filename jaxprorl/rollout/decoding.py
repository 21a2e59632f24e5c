"""What the embedded engine runs on the devices: prompts into the cache, and a number of decode steps of all slots.

Both run on every shard by itself, its rows of everything and the whole model; only the tensor axis is left to the compiler. No step needs
a collective beyond those of tensor parallelism, within a shard: shards end their steps apart, and none may wait for another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from ml_collections import ConfigDict

from jaxprorl.models.attention import packed_attention
from jaxprorl.models.cached_attention import Partial, finish, merge, nothing, partial_attention, readable
from jaxprorl.models.qwen2 import Params
from jaxprorl.rollout.cache import Cache, Layout
from jaxprorl.rollout.draws import draw, sample_keys, truncate

Slots = dict[str, jax.Array]
Numbers = dict[str, jax.Array]

# Columns of what the host says of each slot before a dispatch.
STARTS, ENTRY, PROMPT_ID, SAMPLE, TOKEN, PROMPT_TOKENS, LIMIT = range(7)
ORDER_COLUMNS = 7


@dataclass(frozen=True)
class Rules:
    """What never changes in a run.

    Attributes:
        chunk_tokens: decode steps per dispatch.
        min_tokens: stop ids are not drawn before so many tokens.
        stop_ids: a completion ends with the first of them.
    """

    chunk_tokens: int
    min_tokens: int
    stop_ids: tuple[int, ...]


def make_rules(config: ConfigDict, stop_ids: Sequence[int]) -> Rules:
    """The rules of `config.rollout`."""
    return Rules(config.rollout.decode_chunk_tokens, config.rollout.min_response_tokens, tuple(stop_ids))


def empty_slots(slots: int) -> Slots:
    """Idle slots, [B] arrays. `made` counts response tokens; `token` is fed next."""
    numbers = {name: jnp.zeros(slots, jnp.int32) for name in ("token", "made", "entry", "sample", "prompt_tokens", "limit")}
    key = jax.random.split(jax.random.key(0), slots)
    return numbers | {"running": jnp.zeros(slots, bool), "key": key}


def prefill(
    graphdef: nnx.GraphDef, layout: Layout, params: Params, cache: Cache, tokens_PS: jax.Array, length_P: jax.Array, entry_P: jax.Array
) -> Cache:
    """Writes the keys and values of prompts into entries of the cache.

    Args:
        tokens_PS: prompts, padded on the right to the end of one of the cache's prompt segments.
        length_P: their lengths.
        entry_P: where to; `layout.entries` = nowhere, the row is padding.
    """
    model: Any = nnx.merge(graphdef, params)
    column_S = jnp.arange(tokens_PS.shape[1])
    attend = packed_attention(model.compute, (column_S < length_P[:, None]).astype(jnp.int32))
    positions_PS = jnp.broadcast_to(column_S, tokens_PS.shape)
    kept: list[Any] = [None] * model.config.num_hidden_layers
    x_PSD = model.embed_tokens(tokens_PS)
    _, kept = model.run_layers_apart(model.layer_weights(), x_PSD, positions_PS, lambda q, k, v, cache: (attend(q, k, v), (k, v)), kept)
    row_P = [entry_P - bank * layout.bank_entries for bank in range(layout.banks)]
    row_P = [jnp.where((row >= 0) & (row < layout.bank_entries), row, layout.bank_entries) for row in row_P]  # the last is dropped
    layers = []
    for pair, layer in zip(kept, cache["layers"], strict=True):
        k_PSGK, v_PSGK = readable(*pair)
        k_PGKS, v_PGSK = jnp.transpose(k_PSGK, (0, 2, 3, 1)), jnp.transpose(v_PSGK, (0, 2, 1, 3))
        banks = []
        for row, bank in zip(row_P, layer["prompt"], strict=True):
            start, segments = 0, []
            for k, v in bank:
                end = start + v.shape[2]
                if end <= tokens_PS.shape[1]:
                    k = k.at[row].set(k_PGKS[..., start:end], mode="drop")
                    v = v.at[row].set(v_PGSK[:, :, start:end], mode="drop")
                segments.append((k, v))
                start = end
            banks.append(segments)
        layers.append({"prompt": banks, "response": layer["response"]})
    lengths = [old.at[row].set(length_P, mode="drop") for old, row in zip(cache["prompt_tokens"], row_P, strict=True)]
    return {"layers": layers, "prompt_tokens": lengths}


def decode(
    graphdef: nnx.GraphDef,
    layout: Layout,
    rules: Rules,
    truncated: bool,
    params: Params,
    cache: Cache,
    slots: Slots,
    order_BN: jax.Array,
    reach_1N: jax.Array,
    numbers: Numbers,
) -> tuple[Cache, Slots, dict[str, jax.Array]]:
    """At most `rules.chunk_tokens` decode steps of all slots; fewer when none of this shard is left running.

    The last prompt token is fed by the first step, which then is like all others; the prompt's own column for it is not read.

    Args:
        truncated: compile top-k and top-p in.
        order_BN: samples that start in their slots; columns STARTS to LIMIT.
        reach_1N: columns in use, of each bank of prompts, and of responses at the end of these steps: what lies beyond is not read.
        numbers: `seed` and `step` uint32, `temperature`, `top_k`, `top_p`.

    Returns:
        Cache, slots, and what the host reads: `tokens_BC` and `logprobs_BC` of these steps, `made_B`, `running_B`, and `steps_1` done.
    """
    model: Any = nnx.merge(graphdef, params)
    weights, head_DV = model.layer_weights(), model.head().T
    slots = start_samples(slots, order_BN, numbers)
    scale = jnp.where(numbers["temperature"] > 0, numbers["temperature"], 1.0)
    is_stop_V = jnp.zeros(head_DV.shape[1], bool).at[jnp.array(rules.stop_ids, jnp.int32)].set(True)
    rows = layout.slots

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        i, layers, slots, tokens_BC, logprobs_BC = carry
        running_B, made_B = slots["running"], slots["made"]
        attend = cached_attention(layout, cache["prompt_tokens"], slots, reach_1N[0])
        position_B1 = (slots["prompt_tokens"] - 1 + made_B)[:, None]
        hidden_B1D, layers = model.run_layers_apart(weights, model.embed_tokens(slots["token"][:, None]), position_B1, attend, layers)
        logits_BV = jnp.dot(hidden_B1D[:, 0], head_DV, preferred_element_type=jnp.float32) / scale
        # Whole on each device: to sort a split vocabulary, or to cut it into the blocks of `draw`, would permute it over all shards.
        logits_BV = jax.lax.with_sharding_constraint(logits_BV, PartitionSpec())
        drawn_from_BV = logits_BV
        if rules.min_tokens:
            drawn_from_BV = jnp.where(is_stop_V & (made_B < rules.min_tokens)[:, None], -jnp.inf, drawn_from_BV)
        if truncated:
            drawn_from_BV = logits_BV = truncate(drawn_from_BV, numbers["top_k"], numbers["top_p"])
        token_B = draw(drawn_from_BV, slots["key"], made_B, numbers["temperature"])
        hit_BV = jnp.arange(logits_BV.shape[1]) == token_B[:, None]
        logprob_B = jnp.sum(jnp.where(hit_BV, logits_BV, 0.0), axis=1) - jax.nn.logsumexp(logits_BV, axis=1)
        made_B = made_B + running_B
        ended_B = is_stop_V[token_B] | (made_B >= slots["limit"])
        slots = slots | {"token": jnp.where(running_B, token_B, slots["token"]), "made": made_B, "running": running_B & ~ended_B}
        return i + 1, layers, slots, tokens_BC.at[:, i].set(token_B), logprobs_BC.at[:, i].set(logprob_B)

    def goes_on(carry: tuple[Any, ...]) -> jax.Array:
        return (carry[0] < rules.chunk_tokens) & jnp.any(carry[2]["running"])

    shape = rows, rules.chunk_tokens
    start = jnp.zeros((), jnp.int32), cache["layers"], slots, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    steps, layers, slots, tokens_BC, logprobs_BC = jax.lax.while_loop(goes_on, step, start)
    view = {
        "tokens_BC": tokens_BC, "logprobs_BC": logprobs_BC, "made_B": slots["made"], "running_B": slots["running"], "steps_1": steps[None],
    }  # fmt: skip
    return {"layers": layers, "prompt_tokens": cache["prompt_tokens"]}, slots, view


def start_samples(slots: Slots, order_BN: jax.Array, numbers: Numbers) -> Slots:
    """Slots in which the host starts a sample begin it, the others stay."""
    starts_B = order_BN[:, STARTS] > 0
    key_B = sample_keys(numbers["seed"], numbers["step"], order_BN[:, PROMPT_ID], order_BN[:, SAMPLE])
    columns = {"token": TOKEN, "entry": ENTRY, "sample": SAMPLE, "prompt_tokens": PROMPT_TOKENS, "limit": LIMIT}
    fresh = {name: order_BN[:, column] for name, column in columns.items()}
    fresh |= {"made": jnp.zeros_like(slots["made"]), "running": starts_B, "key": key_B}
    return {name: jnp.where(starts_B, fresh[name], slots[name]) for name in slots}


def cached_attention(layout: Layout, prompt_tokens: Sequence[jax.Array], slots: Slots, reach_N: jax.Array) -> Any:
    """`attend` of one decode step: (q_B1HK, k_B1GK, v_B1GK, a layer's cache) -> (context_B1HK, the cache with the new column)."""
    made_B, running_B, entry_B, sample_B = slots["made"], slots["running"], slots["entry"], slots["sample"]

    def prompts(q_BGRK: jax.Array, bank: int, segments: Any) -> Partial:
        """Each entry's samples together over the entry's columns."""
        entries, n = layout.bank_entries, layout.samples
        groups, queries, width = q_BGRK.shape[1:]
        row_B = entry_B - bank * entries
        here_B = running_B & (row_B >= 0) & (row_B < entries)  # an ended sample's place may be another's by now
        row_B = jnp.where(here_B, row_B, entries)
        q_ENGRK = jnp.zeros((entries, n, groups, queries, width), q_BGRK.dtype).at[row_B, sample_B].set(q_BGRK, mode="drop")
        q_EGQK = q_ENGRK.transpose(0, 2, 1, 3, 4).reshape(entries, groups, n * queries, width)
        found, start = nothing(q_EGQK), 0
        for k, v in segments:
            mask_EW = start + jnp.arange(v.shape[2]) < prompt_tokens[bank][:, None] - 1
            found = _if_reached(start < reach_N[bank], found, q_EGQK, k, v, mask_EW)
            start += v.shape[2]

        def of_slots(x_EGQK: jax.Array) -> jax.Array:
            x_ENGRK = x_EGQK.reshape(entries, groups, n, queries, -1).transpose(0, 2, 1, 3, 4)
            return x_ENGRK.at[row_B, sample_B].get(mode="clip")

        mine = Partial(*map(of_slots, found))
        return Partial(*(jnp.where(here_B[:, None, None, None], a, b) for a, b in zip(mine, nothing(q_BGRK), strict=True)))

    def attend(q_B1HK: jax.Array, k_B1GK: jax.Array, v_B1GK: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        groups = k_B1GK.shape[2]
        q_BGRK = q_B1HK.reshape(q_B1HK.shape[0], groups, -1, q_B1HK.shape[-1])
        found = nothing(q_BGRK)
        for bank, segments in enumerate(cache["prompt"]):
            found = jax.lax.cond(
                reach_N[bank] > 0,
                lambda q, segments=segments, bank=bank, found=found: merge(found, prompts(q, bank, segments)),
                lambda q, found=found: found,
                q_BGRK,
            )
        response, start = [], 0
        row_B = jnp.arange(q_BGRK.shape[0])
        new_k_BGK, new_v_BGK = readable(k_B1GK[:, 0], v_B1GK[:, 0])
        for k, v in cache["response"]:
            width = v.shape[2]
            column_B = made_B - start
            column_B = jnp.where((column_B >= 0) & (column_B < width), column_B, width)
            k = k.at[row_B, :, :, column_B].set(new_k_BGK, mode="drop")
            v = v.at[row_B, :, column_B].set(new_v_BGK, mode="drop")
            mask_BW = start + jnp.arange(width) <= made_B[:, None]
            found = _if_reached(start < reach_N[-1], found, q_BGRK, k, v, mask_BW)
            response.append((k, v))
            start += width
        return finish(found, q_B1HK.dtype).reshape(q_B1HK.shape), {"prompt": cache["prompt"], "response": response}

    return attend


def _if_reached(reached: jax.Array, found: Partial, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> Partial:
    """`found` merged with a segment that some row has reached."""
    return jax.lax.cond(reached, lambda found, q: merge(found, partial_attention(q, k, v, mask)), lambda found, q: found, found, q)
