import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jaxprorl.rollout.draws import _first_above, draw, sample_keys, truncate

draw_compiled = jax.jit(draw)  # once per shape; where the uniform number is replaced, draw itself


def keys(count: int, step: int = 0) -> jax.Array:
    return sample_keys(jnp.uint32(1), jnp.uint32(step), jnp.arange(count), jnp.zeros(count, jnp.int32))


@pytest.mark.parametrize("uniform", [0.0, 0.3, 1 - 2**-23])
def test_a_token_without_weight_is_never_drawn(uniform: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.random, "uniform", lambda key: jnp.float32(uniform))
    random = np.random.RandomState(0)
    logits_BV = random.standard_normal((64, 1000)).astype(np.float32)
    logits_BV[:, random.uniform(size=1000) < 0.9] = -np.inf
    logits_BV[:, [0, -1]] = -np.inf  # where a sum that is off by a rounding would end up
    token_B = np.asarray(draw(logits_BV, keys(64), jnp.zeros(64, jnp.int32), jnp.float32(1.0)))
    allowed = np.flatnonzero(logits_BV[0] > -np.inf)
    assert np.isin(token_B, allowed).all()
    if uniform in (0.0, 1 - 2**-23):
        assert (token_B == (allowed[0] if uniform == 0.0 else allowed[-1])).all()


@pytest.mark.parametrize("target", [-1e-7, 0.0, 3.0, 4.0])
def test_whatever_rounding_makes_of_the_target_a_weight_is_found(target: float) -> None:
    index_B, _ = _first_above(jnp.array([[0.0, 1.0, 0.0, 2.0, 0.0]]), jnp.array([target]))
    assert index_B.tolist() == [1 if target <= 0 else 3]


@pytest.mark.parametrize("vocabulary", [100, 128, 300])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_still_give_a_token_of_the_vocabulary(vocabulary: int, temperature: float) -> None:
    logits_BV = jnp.full((2, vocabulary), jnp.nan)
    token_B = draw_compiled(logits_BV, keys(2), jnp.zeros(2, jnp.int32), jnp.float32(temperature))
    assert ((token_B >= 0) & (token_B < vocabulary)).all()


def test_draws_invert_the_cumulative_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    probabilities = np.array([0.1, 0.0, 0.4, 0.5])
    for uniform, token in ((0.05, 0), (0.1001, 2), (0.4999, 2), (0.5001, 3), (0.9999, 3)):
        monkeypatch.setattr(jax.random, "uniform", lambda key, uniform=uniform: jnp.float32(uniform))
        with np.errstate(divide="ignore"):
            logits_1V = np.log(probabilities, dtype=np.float32)[None] + 7  # a constant changes nothing
        assert int(draw(logits_1V, keys(1), jnp.zeros(1, jnp.int32), jnp.float32(1.0))[0]) == token


@pytest.mark.parametrize("vocabulary", [5, 128, 129, 20_000])
def test_draws_of_any_vocabulary_agree_with_float64(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits_BV = 3 * np.random.RandomState(0).standard_normal((50, vocabulary)).astype(np.float32)
    after_BV = np.cumsum(scipy.special.softmax(logits_BV.astype(np.float64), axis=1), axis=1)
    rounding = 2e-5  # of float32 sums over the 157 blocks of the largest, and 128 tokens of one: at most 285 x 2^-24
    for uniform in (0.0, 0.2, 0.7, 0.999):
        monkeypatch.setattr(jax.random, "uniform", lambda key, uniform=uniform: jnp.float32(uniform))
        token_B = np.asarray(draw(logits_BV, keys(50), jnp.zeros(50, jnp.int32), jnp.float32(1.0)))
        after_B = after_BV[np.arange(50), token_B]
        before_B = np.where(token_B > 0, after_BV[np.arange(50), token_B - 1], 0.0)
        assert (before_B <= uniform + rounding).all() and (uniform <= after_B + rounding).all()


def test_temperature_0_takes_the_likeliest_and_reads_no_randomness() -> None:
    logits_BV = np.random.RandomState(0).standard_normal((20, 50)).astype(np.float32)
    for step in range(3):
        token_B = draw_compiled(logits_BV, keys(20, step), jnp.full(20, step), jnp.float32(0.0))
        np.testing.assert_array_equal(token_B, logits_BV.argmax(axis=1))


def test_every_part_of_the_key_and_the_position_change_the_draw() -> None:
    logits_BV = jnp.zeros((1, 10_000))

    def token(seed: int = 1, step: int = 2, prompt: int = 3, sample: int = 4, position: int = 5) -> int:
        key_B = sample_keys(jnp.uint32(seed), jnp.uint32(step), jnp.array([prompt]), jnp.array([sample]))
        return int(draw_compiled(logits_BV, key_B, jnp.array([position]), jnp.float32(1.0))[0])

    found = [token(), token(seed=2), token(step=1), token(prompt=4), token(sample=3), token(position=4)]
    assert token() == found[0] and len(set(found)) == 6


def reference_truncation(logits: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """Tokens that stay, one by one, in float64."""
    order = sorted(range(len(logits)), key=lambda v: -logits[v])[: top_k or len(logits)]
    share = scipy.special.softmax(logits[order].astype(np.float64))
    kept, mass = set(), 0.0
    for token, p in zip(order, share, strict=True):
        if mass >= top_p and kept:
            break
        kept.add(token)
        mass += p
    return kept


@pytest.mark.parametrize("top_k", [0, 1, 5, 60])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-6])
def test_truncation_keeps_what_the_definition_says(top_k: int, top_p: float) -> None:
    logits_BV = 2 * np.random.RandomState(1).standard_normal((30, 60)).astype(np.float32)
    result_BV = np.asarray(truncate(jnp.array(logits_BV), jnp.int32(top_k), jnp.float32(top_p)))
    for logits, result in zip(logits_BV, result_BV, strict=True):
        kept = set(np.flatnonzero(result > -np.inf).tolist())
        if top_p == 1.0:  # a share of 1 that rounding leaves at 0.9999999 may add the last ones
            assert kept == set(reference_truncation(logits, top_k, 2.0))
        else:
            assert kept == reference_truncation(logits, top_k, top_p)
        np.testing.assert_array_equal(result[list(kept)], logits[list(kept)])


def test_equal_logits_at_the_edge_stay_together() -> None:
    logits_1V = jnp.array([[3.0, 1.0, 1.0, 0.0]])
    np.testing.assert_array_equal(np.isfinite(truncate(logits_1V, jnp.int32(2), jnp.float32(1.0))), [[True, True, True, False]])
