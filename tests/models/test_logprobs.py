import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from factories import QUICK_COMPILE
from jax.sharding import NamedSharding, PartitionSpec

from jaxprorl.models import logprobs
from jaxprorl.models.logprobs import token_log_probs
from jaxprorl.sharding.mesh import batch_sharding, make_mesh
from jaxprorl.sharding.strategies import STRATEGIES

TEMPERATURES = (1.0, 0.7, 1.2)
ALL_BS = np.ones((2, 8), np.float32)


@pytest.fixture(params=[512, 4, 5], ids=["one_chunk", "chunks", "chunks_and_a_rest"])
def chunk_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", request.param)
    return request.param


def arrays(scale: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.RandomState(0)
    return scale * random.standard_normal((2, 8, 6)), random.standard_normal((12, 6)), random.randint(0, 12, (2, 8))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_values_equal_scipys(chunk_tokens: int, temperature: float) -> None:
    hidden, head, targets = arrays()
    with jax.enable_x64(True):
        logp_BS, entropy_BS = token_log_probs(jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(targets), temperature, ALL_BS)
        assert logp_BS.dtype == entropy_BS.dtype == "float64"
    expected_BSV = scipy.special.log_softmax(hidden @ head.T / temperature, axis=-1)
    np.testing.assert_allclose(logp_BS, np.take_along_axis(expected_BSV, targets[..., None], -1)[..., 0], rtol=0, atol=1e-13)
    np.testing.assert_allclose(entropy_BS, scipy.stats.entropy(np.exp(expected_BSV), axis=-1), rtol=0, atol=1e-13)


def test_gradients_equal_those_of_a_plain_gather(chunk_tokens: int) -> None:
    with jax.enable_x64(True):
        hidden, head, targets = map(jnp.asarray, arrays())
        weight_BS = jnp.asarray(np.random.RandomState(1).standard_normal((2, 2, 8)))

        def ours(hidden: jax.Array, head: jax.Array) -> jax.Array:
            logp_BS, entropy_BS = token_log_probs(hidden, head, targets, 0.7, ALL_BS)
            return jnp.sum(weight_BS[0] * logp_BS + weight_BS[1] * entropy_BS)

        def plain(hidden: jax.Array, head: jax.Array) -> jax.Array:
            p_BSV = jax.nn.softmax(hidden @ head.T / 0.7)
            logp_BS = jnp.log(jnp.take_along_axis(p_BSV, targets[..., None], -1)[..., 0])
            return jnp.sum(weight_BS[0] * logp_BS - weight_BS[1] * jnp.sum(p_BSV * jnp.log(p_BSV), axis=-1))

        for got, expected in zip(
            *(jax.jit(jax.grad(f, (0, 1)), compiler_options=QUICK_COMPILE)(hidden, head) for f in (ours, plain)), strict=True
        ):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_extreme_logits_stay_finite_with_finite_gradients(chunk_tokens: int) -> None:
    hidden, head, targets = arrays(scale=1e4)

    def total(hidden: jax.Array, head: jax.Array) -> jax.Array:
        logp_BS, entropy_BS = token_log_probs(hidden, head, jnp.asarray(targets), 0.5, ALL_BS)
        return jnp.sum(logp_BS) + jnp.sum(entropy_BS)

    value, gradients = jax.value_and_grad(total, (0, 1))(jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32))
    assert value < -1e4 and np.isfinite(value)
    assert all(np.isfinite(g).all() for g in gradients)
    _, entropy_BS = token_log_probs(jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32), jnp.asarray(targets), 0.5, ALL_BS)
    assert (np.asarray(entropy_BS) >= 0).all()


def test_bfloat16_hidden_states_give_float32_results() -> None:
    hidden, head, targets = arrays()
    logp_BS, entropy_BS = token_log_probs(
        jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16), jnp.asarray(targets), 1.0, ALL_BS
    )
    assert logp_BS.dtype == entropy_BS.dtype == "float32"
    exact_BSV = scipy.special.log_softmax(hidden @ head.T, axis=-1)
    np.testing.assert_allclose(logp_BS, np.take_along_axis(exact_BSV, targets[..., None], -1)[..., 0], atol=0.1)


# --- tokens that do not count ----------------------------------------------------------------------------------------------------------

MASKS = {
    "none": np.zeros((2, 8)),
    "one": np.eye(2, 8, 5),
    "scattered": np.random.RandomState(3).randint(0, 2, (2, 8)),
    "second_row": np.repeat([[0], [1]], 8, axis=1),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_unwanted_tokens_are_zero_and_move_nothing(chunk_tokens: int, mask: np.ndarray) -> None:
    with jax.enable_x64(True):
        hidden, head, targets = map(jnp.asarray, arrays())

        def total(hidden: jax.Array, head: jax.Array, mask: np.ndarray, weight: np.ndarray) -> tuple[jax.Array, Any]:
            logp_BS, entropy_BS = token_log_probs(hidden, head, targets, 0.7, mask)
            return jnp.sum(weight * (logp_BS + 2 * entropy_BS)), (logp_BS, entropy_BS)

        value_and_grad = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True), compiler_options=QUICK_COMPILE)
        (_, results), gradients = value_and_grad(hidden, head, mask, np.ones((2, 8)))  # a sum over all of them, wanted or not
        (_, whole_results), whole_gradients = value_and_grad(hidden, head, ALL_BS, mask)
        for got, expected in zip(results, whole_results, strict=True):
            np.testing.assert_allclose(got, expected * mask, rtol=0, atol=1e-13)
            assert not np.asarray(got)[mask == 0].any()
        for got, expected in zip(gradients, whole_gradients, strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
        assert not np.asarray(gradients[0])[mask == 0].any()


@pytest.mark.parametrize(("wanted", "chunks"), [(0, 0), (1, 1), (4, 1), (5, 2), (16, 4)])
def test_the_vocabulary_is_multiplied_only_for_chunks_that_hold_wanted_tokens(
    monkeypatch: pytest.MonkeyPatch, wanted: int, chunks: int
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", 4)
    multiplied: list[int] = []

    def counted(hidden_CD: jax.Array, head_VD: jax.Array, temperature: float) -> jax.Array:
        jax.debug.callback(lambda: multiplied.append(1))
        return hidden_CD @ head_VD.T / temperature

    monkeypatch.setattr(logprobs, "_logits", counted)
    hidden, head, targets = map(jnp.asarray, arrays())
    mask = np.random.RandomState(4).permutation(np.arange(16) < wanted).reshape(2, 8)
    _, pullback = jax.vjp(lambda h: token_log_probs(h, head, targets, 1.0, mask), hidden)
    jax.effects_barrier()
    assert len(multiplied) == chunks
    jax.block_until_ready(pullback((jnp.ones((2, 8)), jnp.ones((2, 8)))))
    jax.effects_barrier()
    assert len(multiplied) == 2 * chunks


@pytest.mark.parametrize("strategy", ["dp", "fsdp", "tp"])
def test_devices_work_through_tokens_of_their_own(chunk_tokens: int, strategy: str) -> None:
    mesh = make_mesh(strategy)
    assert mesh.size == 2
    mask = MASKS["scattered"]
    with jax.enable_x64(True):
        hidden, head, targets = map(jnp.asarray, arrays())

        def total(hidden: jax.Array, head: jax.Array, mesh: Any) -> tuple[jax.Array, Any]:
            results = token_log_probs(hidden, head, targets, 0.7, mask, mesh, STRATEGIES[strategy].params)
            return jnp.sum(results[0]) + jnp.sum(results[1]), results

        value_and_grad = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True), static_argnums=2, compiler_options=QUICK_COMPILE)
        alone = value_and_grad(hidden, head, None)
        rows = jax.device_put(hidden, batch_sharding(mesh))
        table = STRATEGIES[strategy].params
        columns = jax.device_put(head, NamedSharding(mesh, PartitionSpec(table["vocab"], table["embed"])))
        for got, expected in zip(jax.tree.leaves(value_and_grad(rows, columns, mesh)), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
        # Neither tokens nor logits travel: all that crosses is the output matrix, its gradient and the printed sum.
        text = value_and_grad.lower(rows, columns, mesh).compile().as_text()
        assert not re.findall(r"all-to-all|collective-permute", text)


# --- memory ----------------------------------------------------------------------------------------------------------------------------


def gradient_memory_bytes(tokens: int, vocab: int, width: int) -> int:
    """Temporary memory of value and gradients, compiled and not run."""
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((1, tokens, width), (vocab, width), (1, tokens))]

    def total(hidden: jax.Array, head: jax.Array, mask: jax.Array, targets: jax.Array) -> jax.Array:
        return sum(x.sum() for x in token_log_probs(hidden, head, targets, 1.0, mask))

    compiled = jax.jit(jax.grad(total, (0, 1))).lower(*shapes, jax.ShapeDtypeStruct((1, tokens), "int32")).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_logits_of_a_whole_row_exist_in_neither_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", 16)
    assert gradient_memory_bytes(tokens=1024, vocab=512, width=4) < 1024 * 512 * 4 / 4


@pytest.mark.slow
def test_memory_at_16k_tokens_and_the_real_vocabulary_does_not_grow_with_their_product() -> None:
    vocab, width = 151_936, 64
    memory = {tokens: gradient_memory_bytes(tokens, vocab, width) for tokens in (2048, 16_384)}
    chunk = logprobs.CHUNK_TOKENS * vocab * 4
    assert memory[16_384] < 5 * chunk < 16_384 * vocab * 4 / 6  # all logits would take ten gigabytes
    # Eight times the tokens: only what is kept per token grows (hidden states, their gradient, indices), not logits.
    assert memory[16_384] - memory[2048] < (16_384 - 2048) * (4 * width + 64) * 4
