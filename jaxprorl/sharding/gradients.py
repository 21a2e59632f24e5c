"""The gradients of a mini-batch summed over its micro-batches and over devices: with whole parameters, devices meet once per update.

Left to itself, the compiler reduces the gradients of every micro-batch, and those of a tied matrix in float32.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprorl.sharding.strategies import BATCH_AXES

Arrays = dict[str, jax.Array]
# (params, rows [M, B, S], micro-batches in use) -> gradients, sums over tokens, per-token arrays [M, B, S]
Accumulate = Callable[[Arrays, Arrays, jax.Array], tuple[Arrays, Arrays, Arrays]]


def mesh_of_whole(shardings: Mapping[str, NamedSharding] | None) -> Mesh | None:
    """The mesh over which nothing but rows is split, if there is one of several devices: every parameter whole, every row too."""
    if not shardings or not all(sharding.is_fully_replicated for sharding in shardings.values()):
        return None
    mesh = next(iter(shardings.values())).mesh
    assert isinstance(mesh, Mesh)  # arrays are placed on devices
    rows_only = all(size == 1 for axis, size in mesh.shape.items() if axis not in BATCH_AXES)
    return mesh if rows_only and mesh.size > 1 else None


def reduced_once(accumulate: Accumulate, mesh: Mesh, shardings: Mapping[str, NamedSharding], dtype: str) -> Accumulate:
    """Every device runs `accumulate` on its own rows, with whole parameters; then one reduction, of arrays of `dtype` on the wire.

    Args:
        accumulate: sees this device's rows only, so it must not use collectives.
        mesh: rows are split over its batch axes, nothing is over the others.
        shardings: where each gradient is summed up to; a dimension split over a batch axis is scattered.
        dtype: of gradients on the wire. Each device sums its micro-batches in the gradients' own, and so are the totals returned.
    """
    axes = tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1)

    def reduced(gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
        total = gradient.astype(dtype)
        for dimension, axis in enumerate(spec):
            if axis in axes:
                total = jax.lax.psum_scatter(total, axis, scatter_dimension=dimension, tiled=True)
        total = jax.lax.psum(total, tuple(axis for axis in axes if axis not in spec))
        return total.astype(gradient.dtype)

    def here(params: Arrays, rows: Arrays, used: jax.Array) -> tuple[Arrays, Arrays, Arrays]:
        gradients, sums, tokens = accumulate(params, rows, used)
        return {name: reduced(gradients[name], shardings[name].spec) for name in gradients}, jax.lax.psum(sums, axes), tokens

    specs, rows_spec = {name: sharding.spec for name, sharding in shardings.items()}, PartitionSpec(None, BATCH_AXES)
    whole: Any = PartitionSpec()
    # What kernels return does not say over which mesh axes it varies, so that goes unchecked.
    return jax.shard_map(here, mesh=mesh, in_specs=(whole, rows_spec, whole), out_specs=(specs, whole, rows_spec), check_vma=False)
