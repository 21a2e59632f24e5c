"""The Qwen2 decoder: one declaration per parameter, one block shared by training and decoding.

Layers are stacked on a leading axis and scanned, so that compile time does not grow with depth. Every matmul runs on
activations flattened to two axes, unless both are split: XLA:CPU sends three-axis dots down a path that is about half as fast.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxprorl.models.attention import packed_attention
from jaxprorl.models.compute import Compute
from jaxprorl.models.dense import multiply_plainly
from jaxprorl.models.remat import remat
from jaxprorl.sharding.strategies import CONTEXT_AXIS

Params = dict[str, jax.Array]
ONE_HOT_MAX_VOCAB = 2048  # below it the embedding is a one-hot matmul when differentiated: scatter gradients are slow on CPU
UNROLL_MAX_LAYERS = 4  # up to here unrolled, where that gains most and costs least to compile (docs/performance.md)


@dataclasses.dataclass(frozen=True)
class Qwen2Config:
    """Shape of a Qwen2 model, by the names of its Hugging Face config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True


@dataclasses.dataclass(frozen=True)
class Declaration:
    """One parameter: everything that initialisation, sharding, conversion and size estimates need.

    Attributes:
        shape: stacked over layers where `axes[0] == "layers"`.
        axes: logical axis of each dimension, mapped to mesh axes by `sharding.strategies`.
        init: initial value.
        hf_name: Hugging Face key; `{layer}` marks the stacked axis.
        transposed: Hugging Face stores the last two axes the other way round.
        dtype: of the parameter itself; the model computes in `config.model.dtype`.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Literal["normal", "zeros", "ones"]
    hf_name: str
    transposed: bool = False
    dtype: str = "float32"


def declarations(c: Qwen2Config) -> dict[str, Declaration]:
    """All parameters of the model, by name."""
    layers, d, f, v = c.num_hidden_layers, c.hidden_size, c.intermediate_size, c.vocab_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim

    def kernel(rows: int, columns: int, axes: tuple[str, str], name: str) -> Declaration:
        return Declaration((layers, rows, columns), ("layers", *axes), "normal", f"model.layers.{{layer}}.{name}.weight", True)

    def vector(size: int, axis: str | None, init: Literal["zeros", "ones"], name: str) -> Declaration:
        return Declaration((layers, size), ("layers", axis), init, f"model.layers.{{layer}}.{name}")

    table = {
        "embed": Declaration((v, d), ("vocab", "embed"), "normal", "model.embed_tokens.weight"),
        "attention_norm": vector(d, None, "ones", "input_layernorm.weight"),
        "q_kernel": kernel(d, q, ("embed", "heads"), "self_attn.q_proj"),
        "q_bias": vector(q, "heads", "zeros", "self_attn.q_proj.bias"),
        "k_kernel": kernel(d, kv, ("embed", "kv_heads"), "self_attn.k_proj"),
        "k_bias": vector(kv, "kv_heads", "zeros", "self_attn.k_proj.bias"),
        "v_kernel": kernel(d, kv, ("embed", "kv_heads"), "self_attn.v_proj"),
        "v_bias": vector(kv, "kv_heads", "zeros", "self_attn.v_proj.bias"),
        "o_kernel": kernel(q, d, ("heads", "embed"), "self_attn.o_proj"),
        "mlp_norm": vector(d, None, "ones", "post_attention_layernorm.weight"),
        "gate_kernel": kernel(d, f, ("embed", "mlp"), "mlp.gate_proj"),
        "up_kernel": kernel(d, f, ("embed", "mlp"), "mlp.up_proj"),
        "down_kernel": kernel(f, d, ("mlp", "embed"), "mlp.down_proj"),
        "final_norm": Declaration((d,), (None,), "ones", "model.norm.weight"),
    }
    if not c.tie_word_embeddings:
        table["lm_head"] = Declaration((v, d), ("vocab", "embed"), "normal", "lm_head.weight")
    return table


def parameter_count(c: Qwen2Config) -> int:
    """Number of scalars in the model; a tied head counts once."""
    return sum(math.prod(declaration.shape) for declaration in declarations(c).values())


def parameter_bytes(c: Qwen2Config) -> int:
    """Size of the parameters in memory."""
    return sum(math.prod(declaration.shape) * jnp.dtype(declaration.dtype).itemsize for declaration in declarations(c).values())


# attend(q_BSHK, k_BSGK, v_BSGK, layer index, caches) -> (context_BSHK, caches)
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


class Qwen2(nnx.Module):
    """The model. Split once into a graph definition and a plain dict of arrays; see `build`."""

    embed: nnx.Param
    final_norm: nnx.Param
    lm_head: nnx.Param

    def __init__(self, config: Qwen2Config, compute: Compute, rngs: nnx.Rngs):
        self.config = config
        self.compute = compute
        for name, declaration in declarations(config).items():
            setattr(self, name, nnx.Param(_initial(declaration, rngs)))

    def __call__(
        self, tokens_BS: jax.Array, positions_BS: jax.Array, segment_ids_BS: jax.Array, context_ids_BS: jax.Array | None = None
    ) -> jax.Array:
        """Final hidden states of packed rows.

        Args:
            tokens_BS: int32 token ids.
            positions_BS: int32, counted from 0 inside every sequence.
            segment_ids_BS: int32, 0 = padding; tokens see earlier tokens of their own segment.
            context_ids_BS: another segment that they see, a prompt that several share (see `packing.pack`); None = there are none.

        Returns:
            hidden_BSD after the final norm, in the compute dtype.
        """
        attend = packed_attention(self.compute, segment_ids_BS, context_ids_BS)
        return self.run_layers(self.embed_tokens(tokens_BS), positions_BS, lambda q, k, v, layer, _: (attend(q, k, v), None))[0]

    def embed_tokens(self, tokens_BS: jax.Array) -> jax.Array:
        """Embeddings of token ids, [..., D], in the compute dtype."""
        embed_VD = self.embed[...].astype(self.compute.dtype)
        if self.config.vocab_size <= ONE_HOT_MAX_VOCAB:
            one_hot = jax.nn.one_hot(tokens_BS.reshape(-1), self.config.vocab_size, dtype=embed_VD.dtype)
            flat_ND = jnp.dot(one_hot, embed_VD, precision="highest")  # a table look-up must stay exact
            return flat_ND.reshape(*tokens_BS.shape, -1)
        return jnp.take(embed_VD, tokens_BS, axis=0)

    def run_layers(self, x_BSD: jax.Array, positions_BS: jax.Array, attend: Attend, caches: Any = None) -> tuple[jax.Array, Any]:
        """The stack of blocks and the final norm. `caches` is carried through, so that `attend` can update it in place.

        `compute.remat` matters only where this is differentiated, so never to prefill and decoding.
        """
        c = self.config
        cos, sin = rope_tables(positions_BS, c.head_dim, c.rope_theta)
        stacked = {n: getattr(self, n)[...].astype(self.compute.dtype) for n, d in declarations(c).items() if d.axes[0] == "layers"}

        def body(carry: tuple[jax.Array, Any], layer: tuple[Mapping[str, jax.Array], jax.Array]) -> tuple[tuple[jax.Array, Any], None]:
            (x, caches), (weights, index) = carry, layer
            return block(c, weights, x, cos, sin, lambda q, k, v: attend(q, k, v, index, caches), not cut, multiply), None

        # Rows and tokens that are both split cannot become one axis without a gather.
        cut = self.compute.row_mesh is not None and self.compute.row_mesh.shape[CONTEXT_AXIS] > 1
        multiply = multiply_plainly if self.compute.copies_for_gradients else jnp.matmul
        unroll = c.num_hidden_layers if c.num_hidden_layers <= UNROLL_MAX_LAYERS else 1
        body = remat(body, self.compute.remat, unrolled=unroll > 1)
        (x_BSD, caches), _ = jax.lax.scan(body, (x_BSD, caches), (stacked, jnp.arange(c.num_hidden_layers)), unroll=unroll)
        return rms_norm(x_BSD, self.final_norm[...], c.rms_norm_eps), caches

    def layer_weights(self) -> list[dict[str, jax.Array]]:
        """The weights of each layer in the compute dtype, cut out of the stack: what `run_layers_apart` takes. Call it outside of loops."""
        stacked = {
            n: getattr(self, n)[...].astype(self.compute.dtype) for n, d in declarations(self.config).items() if d.axes[0] == "layers"
        }
        return [{name: value[layer] for name, value in stacked.items()} for layer in range(self.config.num_hidden_layers)]

    def run_layers_apart(
        self,
        weights: Sequence[Mapping[str, jax.Array]],
        x_BSD: jax.Array,
        positions_BS: jax.Array,
        attend: Callable[..., tuple[jax.Array, Any]],
        caches: Sequence[Any],
    ) -> tuple[jax.Array, list[Any]]:
        """`run_layers` for decoding: every layer has arrays of its own, so that its cache is read and written in place.

        Args:
            weights: of `layer_weights`.
            attend: (q_BSHK, k_BSGK, v_BSGK, cache=the layer's) -> (context_BSHK, the cache).
            caches: one per layer.
        """
        c, after = self.config, []
        cos, sin = rope_tables(positions_BS, c.head_dim, c.rope_theta)
        for layer, cache in zip(weights, caches, strict=True):
            x_BSD, cache = block(c, layer, x_BSD, cos, sin, partial(attend, cache=cache))
            after.append(cache)
        return rms_norm(x_BSD, self.final_norm[...], c.rms_norm_eps), after

    def head(self) -> jax.Array:
        """The output matrix head_VD in the compute dtype; the embedding itself when tied."""
        return (self.embed if self.config.tie_word_embeddings else self.lm_head)[...].astype(self.compute.dtype)


def block(
    c: Qwen2Config,
    w: Mapping[str, jax.Array],
    x_BSD: jax.Array,
    cos_BSK: jax.Array,
    sin_BSK: jax.Array,
    attend: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]],
    flat: bool = True,
    multiply: Callable[[jax.Array, jax.Array], jax.Array] = jnp.matmul,
) -> tuple[jax.Array, Any]:
    """One pre-norm decoder block: attention with q/k/v biases and rotary positions, then SwiGLU. `flat`: rows and tokens as one axis N."""
    rows = x_BSD.shape[:2]
    tokens = (-1,) if flat else rows
    y_ND = rms_norm(x_BSD, w["attention_norm"], c.rms_norm_eps).reshape(*tokens, c.hidden_size)
    q_BSHK = add_bias(multiply(y_ND, w["q_kernel"]), w["q_bias"]).reshape(*rows, c.num_attention_heads, c.head_dim)
    k_BSGK = add_bias(multiply(y_ND, w["k_kernel"]), w["k_bias"]).reshape(*rows, c.num_key_value_heads, c.head_dim)
    v_BSGK = add_bias(multiply(y_ND, w["v_kernel"]), w["v_bias"]).reshape(*rows, c.num_key_value_heads, c.head_dim)
    context_BSHK, cache = attend(rotate(q_BSHK, cos_BSK, sin_BSK), rotate(k_BSGK, cos_BSK, sin_BSK), v_BSGK)
    x_BSD = x_BSD + multiply(context_BSHK.reshape(*tokens, w["o_kernel"].shape[0]), w["o_kernel"]).reshape(x_BSD.shape)
    y_ND = rms_norm(x_BSD, w["mlp_norm"], c.rms_norm_eps).reshape(*tokens, c.hidden_size)
    y_NF = swiglu(multiply(y_ND, w["gate_kernel"]), multiply(y_ND, w["up_kernel"]))
    return x_BSD + multiply(y_NF, w["down_kernel"]).reshape(x_BSD.shape), cache


def rms_norm(x: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in x's dtype."""
    x32 = widened(x)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps) * widened(scale_D.astype(x.dtype))).astype(x.dtype)


def add_bias(x_NF: jax.Array, bias_F: jax.Array) -> jax.Array:
    """The sum, in x's dtype."""
    return (widened(x_NF) + widened(bias_F)).astype(x_NF.dtype)


@partial(jax.checkpoint, prevent_cse=False)  # a loop over layers keeps its two arguments alone for the backward pass
def swiglu(gate_NF: jax.Array, up_NF: jax.Array) -> jax.Array:
    """silu(gate) * up, in their dtype."""
    return (jax.nn.silu(widened(gate_NF)) * widened(up_NF)).astype(gate_NF.dtype)


def widened(x: jax.Array) -> jax.Array:
    """In float32 at least. What is computed element by element is, and rounded once.

    XLA:CPU rounds every operation in bfloat16, and sums of it (gradients of biases and norms) in a loop of windows: measured on one core
    for 1,284 tokens, forward and backward pass of swiglu took 9.9 ms and now 4.5, of a norm 2.5 and 1.7, of a bias 1.2 and 0.35.
    """
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rope_tables(positions_BS: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos_BSK and sin_BSK of the rotary embedding, both halves of K alike (Hugging Face's layout)."""
    float_dtype = jnp.promote_types(jnp.float32, jnp.result_type(float))
    inverse = theta ** (-jnp.arange(0, head_dim, 2, dtype=float_dtype) / head_dim)
    angles = positions_BS[..., None].astype(float_dtype) * inverse
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


@jax.custom_vjp
def rotate(x_BSHK: jax.Array, cos_BSK: jax.Array, sin_BSK: jax.Array) -> jax.Array:
    """Rotary position embedding, in the tables' dtype, returned in x's dtype. Its gradient is the rotation by the negative angle."""
    half = x_BSHK.shape[-1] // 2
    left, right = x_BSHK[..., :half], x_BSHK[..., half:]
    cos, sin = cos_BSK[:, :, None, :half], sin_BSK[:, :, None, :half]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x_BSHK.dtype)


def _rotate(x_BSHK: jax.Array, cos_BSK: jax.Array, sin_BSK: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return rotate(x_BSHK, cos_BSK, sin_BSK), (cos_BSK, sin_BSK)


def _rotate_back(saved: tuple[jax.Array, jax.Array], to_rotated_BSHK: jax.Array) -> tuple[jax.Array, None, None]:
    cos_BSK, sin_BSK = saved
    return rotate(to_rotated_BSHK, cos_BSK, -sin_BSK), None, None


rotate.defvjp(_rotate, _rotate_back)


def build(config: Qwen2Config, compute: Compute) -> nnx.GraphDef:
    """The model's static half: `nnx.merge(graphdef, params)` is the model again, for any plain dict of arrays."""
    abstract = nnx.eval_shape(lambda: Qwen2(config, compute, nnx.Rngs(0)))
    return nnx.split(abstract)[0]


def init_params(config: Qwen2Config, seed: int) -> Params:
    """Fresh float32 parameters as a plain dict. Call it inside jit with out_shardings, so that they are born sharded."""
    return nnx.to_pure_dict(nnx.split(Qwen2(config, Compute(), nnx.Rngs(seed)))[1])


def _initial(declaration: Declaration, rngs: nnx.Rngs) -> jax.Array:
    if declaration.init == "normal":
        return 0.02 * jax.random.normal(rngs.params(), declaration.shape, declaration.dtype)
    return (jnp.zeros if declaration.init == "zeros" else jnp.ones)(declaration.shape, declaration.dtype)
