"""Weights on their way to workers: sharded parameters into host shared memory, one tensor of one layer at a time, in layer order.

A tensor is cut out of its stack, turned and cast on the devices, so that the host receives what a worker loads and no device
holds more than one layer's tensor beside the parameters.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxprorl.models.hf.names import hf_keys, hf_shape, is_stacked
from jaxprorl.models.qwen2 import Params, Qwen2Config, declarations
from jaxprorl.rollout import segments
from jaxprorl.rollout.weights_segment import TensorSpec, WeightWriter, lay_out, segment_bytes
from jaxprorl.sharding.mesh import replicated


@dataclass(frozen=True)
class Piece:
    """One Hugging Face tensor: which parameter holds it, in which layer (0 if it is not stacked), and whether it is turned."""

    hf_name: str
    shape: tuple[int, ...]
    parameter: str
    layer: int
    stacked: bool
    transposed: bool


def pieces(c: Qwen2Config) -> list[Piece]:
    """All tensors: what comes before the layers, layer after layer, then the rest. A tied head is not among them."""
    table = declarations(c)
    first_stacked = next(index for index, declaration in enumerate(table.values()) if is_stacked(declaration))
    placed = []
    for index, (name, d) in enumerate(table.items()):
        for layer, key in enumerate(hf_keys(d)):
            place = layer if is_stacked(d) else -1 if index < first_stacked else c.num_hidden_layers
            placed.append((place, index, Piece(key, hf_shape(d), name, layer, is_stacked(d), d.transposed)))
    return [piece for _, _, piece in sorted(placed, key=lambda entry: entry[:2])]


def layout(c: Qwen2Config, dtype: str) -> tuple[TensorSpec, ...]:
    """Places of all tensors in a buffer of the weight segment."""
    return lay_out([(piece.hf_name, piece.shape, dtype) for piece in pieces(c)])


def channel_bytes(c: Qwen2Config, dtype: str) -> int:
    """Shared memory that a `WeightChannel` takes: two buffers."""
    return segment_bytes(layout(c, dtype))


class WeightChannel:
    """The weight segment, from the trainer's side.

    Raises:
        SharedMemoryError: it cannot be reserved.
    """

    def __init__(self, c: Qwen2Config, mesh: Mesh, dtype: str, folder: Path, run_folder: Path):
        """`folder` is where segments go, see `segments.choose_folder`."""
        specs = layout(c, dtype)
        self._pieces, self._mesh, self._dtype = pieces(c), mesh, dtype
        self._segment = segments.create(folder, run_folder, "weights", 0, segment_bytes(specs))
        try:
            self._writer = WeightWriter(self._segment.buffer, specs)
        except BaseException:  # also KeyboardInterrupt: nobody has this channel yet, and its segment would stay
            self._segment.close()
            raise
        self._take: dict[Any, Any] = {}  # executable by what it was compiled for
        self.size_bytes = sum(spec.size_bytes for spec in specs)

    @property
    def path(self) -> Path:
        """What workers attach to."""
        return self._segment.path

    def compile(self, params: Params) -> None:
        """Compiles what cuts the tensors out; parameters that are alike share it. `params` may be shapes with shardings."""
        whole = replicated(self._mesh)
        layer = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
        for piece in self._pieces:
            key = self._key(piece, params)
            if key not in self._take:
                take = partial(cut_out, stacked=piece.stacked, transposed=piece.transposed, dtype=self._dtype)
                self._take[key] = jax.jit(take, out_shardings=whole).lower(params[piece.parameter], layer).compile()

    def write(self, params: Params, version: int) -> None:
        """Fills the buffer that does not hold the newest version. No worker may be reading an older one than that."""
        self._writer.begin(version)
        for piece, array in self._arrays(params):
            self._writer.put(piece.hf_name, np.asarray(array))
        self._writer.finish()

    def _arrays(self, params: Params) -> Iterator[tuple[Piece, jax.Array]]:
        """Tensors on the devices, each asked for before the one before it is handed out."""
        last: tuple[Piece, jax.Array] | None = None
        for piece in self._pieces:
            layer = jax.device_put(np.int32(piece.layer), replicated(self._mesh))
            following = piece, self._take[self._key(piece, params)](params[piece.parameter], layer)
            if last:
                yield last
            last = following
        if last:
            yield last

    def _key(self, piece: Piece, params: Params) -> Any:
        array = params[piece.parameter]
        return array.shape, array.sharding, piece.stacked, piece.transposed

    def close(self) -> None:
        """Removes the segment."""
        self._writer.close()
        self._segment.close()


def cut_out(array: jax.Array, layer: jax.Array, *, stacked: bool, transposed: bool, dtype: str) -> jax.Array:
    """One tensor as Hugging Face stores it. Casting float32 to bfloat16 rounds to nearest, ties to even."""
    part = jax.lax.dynamic_index_in_dim(array, layer, keepdims=False) if stacked else array
    return (part.T if transposed else part).astype(dtype)
