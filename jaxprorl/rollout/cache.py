"""The decoding cache: its layout, known before anything is allocated, and the arrays.

Responses have a row per slot. Prompts have a row per entry, which all samples of a prompt read; entries come in banks, so that a step
reads only those in use. Both are cut along their tokens into segments, and a step reads only as many as the longest sequence needs.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jaxprorl.models.qwen2 import Qwen2Config
from jaxprorl.sharding.mesh import batch_sharding
from jaxprorl.sharding.strategies import BATCH_AXES, STRATEGIES

Cache = dict[str, Any]

# Prompts whose samples are not all started or not all ended hold an entry: with skewed lengths about three times as many as the slots
# could hold whole groups of: a prompt lives as long as its longest sample, about three times the mean.
MAX_BANKS = 4
SHORTEST_SEGMENT_TOKENS = 64


@dataclass(frozen=True)
class Layout:
    """Sizes of the cache of one shard, the devices that hold the same rows.

    Attributes:
        shards: how many there are.
        slots: completions decoded together.
        samples: n, completions of a prompt.
        banks: of prompt entries.
        bank_entries: entries of a bank; one bank holds as many groups as the slots can.
        prompt_segments: columns of each segment of a prompt.
        response_segments: and of a response.
    """

    shards: int
    slots: int
    samples: int
    banks: int
    bank_entries: int
    prompt_segments: tuple[int, ...]
    response_segments: tuple[int, ...]

    @property
    def entries(self) -> int:
        """Prompts that can be held at a time."""
        return self.banks * self.bank_entries


def make_layout(config: ConfigDict, samples: int, mesh: Mesh) -> Layout:
    """The layout for groups of `samples`."""
    rollout, shards = config.rollout, mesh.shape[BATCH_AXES[0]] * mesh.shape[BATCH_AXES[1]]
    slots = rollout.slots // shards
    bank_entries = -(-slots // samples)
    banks = min(MAX_BANKS, -(-slots // bank_entries))
    prompt, response = segments(rollout.max_prompt_tokens), segments(rollout.max_response_tokens)
    return Layout(shards, slots, samples, banks, bank_entries, prompt, response)


def segments(tokens: int) -> tuple[int, ...]:
    """Columns of the segments that make up `tokens`: each as long as all before it, so that at most half of what is read is not needed."""
    sizes: list[int] = []
    while sum(sizes) < tokens:
        sizes.append(min(max(SHORTEST_SEGMENT_TOKENS, sum(sizes)), tokens - sum(sizes)))
    return tuple(sizes)


def cache_bytes(layout: Layout, c: Qwen2Config, dtype: str) -> int:
    """Memory of the cache over all shards."""
    columns = layout.slots * sum(layout.response_segments) + layout.entries * sum(layout.prompt_segments)
    return 2 * layout.shards * columns * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * jnp.dtype(dtype).itemsize


def empty_cache(layout: Layout, c: Qwen2Config, dtype: str) -> Cache:
    """Arrays of all shards, rows of one shard together.

    Returns:
        `layers`, per layer: `prompt` [banks][segments] and `response` [segments] of pairs k [rows, G, K, W], v [rows, G, W, K];
        `prompt_tokens` [banks] of the lengths of the entries.
    """

    def pair(rows: int, width: int) -> tuple[jax.Array, jax.Array]:
        shape = layout.shards * rows, c.num_key_value_heads
        return jnp.zeros((*shape, c.head_dim, width), dtype), jnp.zeros((*shape, width, c.head_dim), dtype)

    def layer() -> dict[str, Any]:
        return {
            "prompt": [[pair(layout.bank_entries, width) for width in layout.prompt_segments] for _ in range(layout.banks)],
            "response": [pair(layout.slots, width) for width in layout.response_segments],
        }

    lengths = [jnp.zeros(layout.shards * layout.bank_entries, jnp.int32) for _ in range(layout.banks)]
    return {"layers": [layer() for _ in range(c.num_hidden_layers)], "prompt_tokens": lengths}


def cache_shardings(layout: Layout, c: Qwen2Config, mesh: Mesh, strategy: str) -> Cache:
    """Rows over the data axes; heads as the strategy splits key-value heads."""
    axis = STRATEGIES[strategy].params["kv_heads"]
    if axis is not None and c.num_key_value_heads % mesh.shape[axis]:
        axis = None
    heads, rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES, axis)), batch_sharding(mesh)
    shapes = jax.eval_shape(lambda: empty_cache(layout, c, "float32"))
    return {"layers": jax.tree.map(lambda _: heads, shapes["layers"]), "prompt_tokens": [rows] * layout.banks}
