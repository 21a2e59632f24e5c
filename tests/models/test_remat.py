from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import QUICK_COMPILE, random_params, tiny_model
from flax import nnx

from jaxprorl.models import qwen2
from jaxprorl.models.attention import packed_attention
from jaxprorl.models.compute import REMAT, Compute
from jaxprorl.models.qwen2 import Params, Qwen2Config, build
from jaxprorl.models.remat import POLICIES, remat
from jaxprorl.sharding.mesh import make_mesh

DEEP = tiny_model(num_hidden_layers=8)
SHALLOW = tiny_model(num_hidden_layers=qwen2.UNROLL_MAX_LAYERS)


def rows(batch: int, size: int) -> tuple[np.ndarray, ...]:
    """Tokens, positions and segment ids of rows that hold two sequences and padding."""
    lengths = [size // 2, size // 3]
    segments, positions = np.zeros((batch, size), np.int32), np.zeros((batch, size), np.int32)
    segments[:, : sum(lengths)] = np.repeat([1, 2], lengths)
    positions[:, : sum(lengths)] = np.concatenate([np.arange(length) for length in lengths])
    return np.random.RandomState(1).randint(0, 48, (batch, size)).astype(np.int32), positions, segments


def loss(c: Qwen2Config, compute: Compute, params: Params, *ids: jax.Array) -> jax.Array:
    model: Any = nnx.merge(build(c, compute), params)
    return jnp.sum(jnp.where(ids[2][:, :, None] > 0, jnp.sin(model(*ids)), 0.0))


@cache
def gradient(c: Qwen2Config, compute: Compute) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    with jax.enable_x64(True):
        params = {name: jnp.asarray(value, "float64") for name, value in random_params(c).items()}
        compiled = jax.jit(jax.value_and_grad(partial(loss, c, compute)), compiler_options=QUICK_COMPILE)
        return jax.tree.map(np.asarray, compiled(params, *map(jnp.asarray, rows(2, 24))))


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("c", "attention"), [(DEEP, "naive"), (DEEP, "chunked"), (SHALLOW, "naive")], ids=["naive", "chunked", "unrolled"])
def test_value_and_gradient_are_those_of_keeping_everything(c: Qwen2Config, attention: str, name: str) -> None:
    value, gradients = gradient(c, Compute("float64", attention, 8))
    again, others = gradient(c, Compute("float64", attention, 8, name))
    np.testing.assert_allclose(again, value, rtol=1e-13)
    for parameter, expected in gradients.items():
        np.testing.assert_allclose(others[parameter], expected, rtol=0, atol=1e-12 * np.abs(expected).max(), err_msg=parameter)


def temporary_bytes(c: Qwen2Config, compute: Compute, batch: int, size: int) -> int:
    params = {name: jax.ShapeDtypeStruct(value.shape, "float32") for name, value in random_params(c).items()}
    shapes = [jax.ShapeDtypeStruct((batch, size), "int32")] * 3
    compiled = jax.jit(jax.grad(partial(loss, c, compute)), compiler_options=QUICK_COMPILE).lower(params, *shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_falls_from_policy_to_policy() -> None:
    found = {name: temporary_bytes(DEEP, Compute("float32", "chunked", 32, name), 4, 256) for name in REMAT}
    assert list(found) == ["none", "dots", "attention", "full"]
    assert found["none"] > found["dots"] > found["attention"] > found["full"], found
    # One layer more keeps, per token: its input of 32 (full); also the context of 32 and 4 sums (attention); also q 32, k and v 16 each,
    # o 32, gate, up 64 and down 32 (dots, which leaves the context out). The rest of the compiled program does not depend on depth.
    tokens, deeper = 4 * 256, tiny_model(num_hidden_layers=16)
    for name, kept in {"full": 32, "attention": 32 + 32 + 4, "dots": 32 + 32 + 16 + 16 + 32 + 64 + 64 + 32}.items():
        more = temporary_bytes(deeper, Compute("float32", "chunked", 32, name), 4, 256) - found[name]
        weights = 4 * sum(value[0].size for value in random_params(DEEP).values() if value.shape[0] == 8)
        assert more <= 8 * (4 * kept * tokens + 2 * weights), name
        assert more >= 8 * 4 * kept * tokens * 0.8, name


@pytest.mark.slow
def test_shallow_stacks_compute_again_too() -> None:
    # They are unrolled; without a barrier the compiler would find both computations and keep the first one's results.
    found = [temporary_bytes(SHALLOW, Compute("float32", "naive", 32, name), 4, 128) for name in ("none", "full")]
    assert found[1] < 0.5 * found[0]


def kernels_in(jaxpr: Any) -> list[str]:
    """Names of all kernels in a program, those of its loops and calls included."""
    names = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            names.append(equation.params["name"])
        for value in equation.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                names += kernels_in(inner) if hasattr(inner, "eqns") else []
    return names


@pytest.mark.parametrize("attention", ["triton", "splash"])
def test_a_kernel_whose_results_are_kept_runs_forward_once(attention: str) -> None:
    compute = Compute("float32", attention, mesh=make_mesh("dp"))
    q, ids = jax.ShapeDtypeStruct((2, 128, 1, 64), "float32"), jnp.ones((2, 128), jnp.int32)
    # JAX 0.10 (Python 3.11) keeps Splash's results too, and yet leaves its forward kernel in the backward pass.
    once = 2 if attention == "splash" and jax.__version_info__ < (0, 12) else 1
    for name, expected in (("attention", once), ("full", 2)):
        layer = remat(lambda q: jnp.sin(packed_attention(compute, ids)(q, q, q)), name, unrolled=False)
        names = kernels_in(jax.make_jaxpr(jax.grad(lambda q, layer=layer: layer(q).sum()))(q).jaxpr)
        assert len([kernel for kernel in names if "forward" in kernel or "fwd" in kernel]) == expected, names
