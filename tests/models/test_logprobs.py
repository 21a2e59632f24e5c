import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from factories import QUICK_COMPILE

from jaxprorl.models import logprobs
from jaxprorl.models.logprobs import token_log_probs

TEMPERATURES = (1.0, 0.7, 1.2)


@pytest.fixture(params=[512, 4, 5], ids=["one_chunk", "chunks", "chunks_and_a_rest"])
def chunk_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", request.param)
    return request.param


def arrays(scale: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.RandomState(0)
    return scale * random.standard_normal((2, 8, 6)), random.standard_normal((11, 6)), random.randint(0, 11, (2, 8))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_values_equal_scipys(chunk_tokens: int, temperature: float) -> None:
    hidden, head, targets = arrays()
    with jax.enable_x64(True):
        logp_BS, entropy_BS = token_log_probs(jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(targets), temperature)
        assert logp_BS.dtype == entropy_BS.dtype == "float64"
    expected_BSV = scipy.special.log_softmax(hidden @ head.T / temperature, axis=-1)
    np.testing.assert_allclose(logp_BS, np.take_along_axis(expected_BSV, targets[..., None], -1)[..., 0], rtol=0, atol=1e-13)
    np.testing.assert_allclose(entropy_BS, scipy.stats.entropy(np.exp(expected_BSV), axis=-1), rtol=0, atol=1e-13)


def test_gradients_equal_those_of_a_plain_gather(chunk_tokens: int) -> None:
    with jax.enable_x64(True):
        hidden, head, targets = map(jnp.asarray, arrays())
        weight_BS = jnp.asarray(np.random.RandomState(1).standard_normal((2, 2, 8)))

        def ours(hidden: jax.Array, head: jax.Array) -> jax.Array:
            logp_BS, entropy_BS = token_log_probs(hidden, head, targets, 0.7)
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
        logp_BS, entropy_BS = token_log_probs(hidden, head, jnp.asarray(targets), 0.5)
        return jnp.sum(logp_BS) + jnp.sum(entropy_BS)

    value, gradients = jax.value_and_grad(total, (0, 1))(jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32))
    assert value < -1e4 and np.isfinite(value)
    assert all(np.isfinite(g).all() for g in gradients)
    _, entropy_BS = token_log_probs(jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32), jnp.asarray(targets), 0.5)
    assert (np.asarray(entropy_BS) >= 0).all()


def test_bfloat16_hidden_states_give_float32_results() -> None:
    hidden, head, targets = arrays()
    logp_BS, entropy_BS = token_log_probs(jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16), jnp.asarray(targets), 1.0)
    assert logp_BS.dtype == entropy_BS.dtype == "float32"
    exact_BSV = scipy.special.log_softmax(hidden @ head.T, axis=-1)
    np.testing.assert_allclose(logp_BS, np.take_along_axis(exact_BSV, targets[..., None], -1)[..., 0], atol=0.1)


def test_logits_of_a_whole_row_exist_in_neither_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", 16)
    hidden = jax.ShapeDtypeStruct((1, 1024, 4), jnp.float32)
    head, targets = jax.ShapeDtypeStruct((512, 4), jnp.float32), jax.ShapeDtypeStruct((1, 1024), jnp.int32)

    def total(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
        return token_log_probs(hidden, head, targets, 1.0)[0].sum()

    compiled = jax.jit(jax.grad(total, (0, 1))).lower(hidden, head, targets).compile()
    all_logits_bytes = 1024 * 512 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < all_logits_bytes / 4
