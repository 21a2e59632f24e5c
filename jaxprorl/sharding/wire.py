"""The least that an update of the policy must send between devices, as a formula: shapes, dtypes and mesh sizes in, bytes out.

docs/sharding.md derives every term. What is left out is below a thousandth of the rest: token ids, one number per token, metrics.
"""

import math
from collections import defaultdict

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxprorl.models.qwen2 import Qwen2Config, declarations
from jaxprorl.sharding.collectives import RING_COST
from jaxprorl.sharding.mesh import moment_shardings, param_shardings
from jaxprorl.sharding.strategies import BATCH_AXES, CONTEXT_AXIS

# Times that a layer's backward pass needs what travelled in its forward pass once more, because it was not kept; by remat.
# Of the two sums over a tensor axis only that behind attention comes back: nothing in the layer reads its output.
SUMS_AGAIN = {"none": 0, "dots": 0, "attention": 1, "full": 1}
KEYS_AGAIN = {"none": 0, "dots": 1, "attention": 1, "full": 1}


def least_wire_bytes(
    model: Qwen2Config, mesh: Mesh | AbstractMesh, strategy: str, tokens: int, micro_batches: int, dtype: str, remat: str
) -> dict[str, float]:
    """Bytes that each device sends per update, by what they carry, on rings (`collectives.RING_COST`).

    Args:
        mesh: only its sizes count.
        strategy: a key of `STRATEGIES`; its tables say what is gathered and where gradients are summed up.
        tokens: of one micro-batch, all rows of all devices together.
        micro_batches: of the update.
        dtype: of activations, of weights in matmuls and of gradients on the wire; new parameters travel in their own.
        remat: one of `compute.REMAT`.

    Raises:
        ValueError: as `param_shardings` does.
    """
    parts = _parameter_bytes(model, mesh, strategy, micro_batches, dtype)
    parts |= _activation_bytes(model, mesh, strategy, tokens, micro_batches, dtype, remat)
    return {name: size for name, size in parts.items() if size}


def _parameter_bytes(model: Qwen2Config, mesh: Mesh | AbstractMesh, strategy: str, micro_batches: int, dtype: str) -> dict[str, float]:
    params, moments = param_shardings(model, mesh, strategy), moment_shardings(model, mesh, strategy)
    width, parts = jnp.dtype(dtype).itemsize, defaultdict[str, float](float)
    heads_axis = params["q_kernel"].spec[2]

    def devices(axes: set[str]) -> int:
        return math.prod(mesh.shape[axis] for axis in axes)

    for name, declaration in declarations(model).items():
        held, summed = ({axis for axis in shardings[name].spec if axis} for shardings in (params, moments))
        gathered, scattered = held & set(BATCH_AXES), summed - held  # rows differ along the first, so that whole weights must come
        size = math.prod(declaration.shape) / devices(held - gathered)
        # A table that is only read sends rows of it instead, see the activations.
        only_read = name == "embed" and not model.tie_word_embeddings
        times = 0 if only_read else 2 if "layers" in declaration.axes else 1
        all_gather, reduce_scatter = RING_COST["all-gather"](devices(gathered)), RING_COST["reduce-scatter"](devices(gathered))
        parts["weights"] += micro_batches * times * all_gather * size * width
        parts["gradients"] += micro_batches * (not only_read) * reduce_scatter * size * width
        size /= devices(gathered)
        parts["gradients"] += RING_COST["reduce-scatter"](devices(scattered)) * size * width
        parts["new parameters"] += RING_COST["all-gather"](devices(scattered)) * size * jnp.dtype(declaration.dtype).itemsize
        size /= devices(scattered)
        elsewhere = {*BATCH_AXES, CONTEXT_AXIS} - held - summed  # other tokens
        if "kv_heads" in declaration.axes and heads_axis and heads_axis not in held:
            elsewhere |= {heads_axis}  # whole, but each device's query heads give a part of the gradient
        parts["gradients"] += RING_COST["all-reduce"](devices(elsewhere)) * size * width
    return parts


def _activation_bytes(
    model: Qwen2Config, mesh: Mesh | AbstractMesh, strategy: str, tokens: int, micro_batches: int, dtype: str, remat: str
) -> dict[str, float]:
    c, width, params = model, jnp.dtype(dtype).itemsize, param_shardings(model, mesh, strategy)
    tokens_here = tokens / math.prod(mesh.shape[axis] for axis in (*BATCH_AXES, CONTEXT_AXIS))
    hidden = micro_batches * tokens_here * c.hidden_size * width  # bytes of one device's hidden states, of all micro-batches

    def size(axis: str | None, wanted: bool) -> int:
        return mesh.shape[axis] if axis and wanted else 1

    vocab_axis, embed_axis = params["embed"].spec
    heads_axis, mlp_axis, kv_axis = (params[name].spec[2] for name in ("q_kernel", "gate_kernel", "k_kernel"))
    sums = {heads_axis: 2 + SUMS_AGAIN[remat], mlp_axis: 2}  # per layer, forward and backward
    if heads_axis == mlp_axis:
        sums = {heads_axis: 4 + SUMS_AGAIN[remat]}
    parts = defaultdict[str, float](float)
    for axis, times in sums.items():
        parts["sums of layers"] += c.num_hidden_layers * times * RING_COST["all-reduce"](size(axis, axis not in BATCH_AXES)) * hidden
    # Looked up by all who hold a part of the vocabulary; and the gradient of what the output matrix multiplies.
    parts["sums of embeddings and output"] += 2 * RING_COST["all-reduce"](size(vocab_axis, vocab_axis not in BATCH_AXES)) * hidden
    parts["columns of embeddings"] += 2 * RING_COST["all-to-all"](size(embed_axis, embed_axis in BATCH_AXES)) * hidden
    context = mesh.shape[CONTEXT_AXIS]
    groups = c.num_key_value_heads / size(kv_axis, kv_axis not in BATCH_AXES)
    keys_and_values = context * micro_batches * tokens_here * 2 * groups * c.head_dim * width  # of whole rows
    times = c.num_hidden_layers * (2 + KEYS_AGAIN[remat])
    parts["keys and values"] += times * RING_COST["all-gather"](context) * keys_and_values
    return parts
