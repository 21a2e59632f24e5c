"""The probe's comparison: it sees one wrong log-prob, wrong weights, a forgotten temperature, and numbers that are none."""

from collections.abc import Mapping

import jax
import numpy as np
import pytest
from factories import random_params, tiny_config, tiny_model
from full_forward import response_log_probs

from jaxprorl.rollout.preflight import PROMPTS, RESPONSE_TOKENS, probe_tokens
from jaxprorl.rollout.probe import Difference, Probe, probe_prompts, tolerance
from jaxprorl.sharding.mesh import make_mesh, param_shardings
from jaxprorl.types import Completion

MODEL = tiny_model(max_position_embeddings=128)
PARAMS = random_params(MODEL)
TEMPERATURE = 1.2


@pytest.fixture(scope="module", params=["dp", "fsdp"])
def probe(request: pytest.FixtureRequest) -> tuple[Probe, Mapping[str, jax.Array]]:
    mesh = make_mesh(request.param)
    params = jax.device_put(PARAMS, param_shardings(MODEL, mesh, request.param))
    probe = Probe(tiny_config(rollout__temperature=TEMPERATURE), MODEL, mesh)
    probe.compile(params)
    return probe, params


def answers(temperature: float = TEMPERATURE, params: Mapping[str, np.ndarray] = PARAMS) -> list[Completion]:
    """What a worker with these weights would send; any tokens will do."""
    made = []
    for sample, prompt in enumerate(probe_prompts(MODEL.vocab_size, block_tokens=32)):
        ids = np.random.RandomState(7 + sample).randint(0, MODEL.vocab_size, RESPONSE_TOKENS).astype(np.int32)
        logp = response_log_probs(MODEL, params, prompt, ids, temperature).astype(np.float32)
        made.append(Completion(-1, sample, ids, logp, "length", ((0, 0, RESPONSE_TOKENS),)))
    return made


def test_a_worker_that_computes_the_same_agrees(probe: tuple[Probe, Mapping[str, jax.Array]]) -> None:
    assert probe[0].difference(probe[1], answers()).largest < 1e-4


def test_one_wrong_log_prob_is_found(probe: tuple[Probe, Mapping[str, jax.Array]]) -> None:
    made = answers()
    made[1].logprobs[-1] += 0.25
    found = probe[0].difference(probe[1], made)
    assert found.largest == pytest.approx(0.25, abs=1e-4)
    assert found.mean == pytest.approx(0.25 / (PROMPTS * RESPONSE_TOKENS), abs=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_differs_without_bound(probe: tuple[Probe, Mapping[str, jax.Array]], value: float) -> None:
    made = answers()
    made[0].logprobs[3] = value
    found = probe[0].difference(probe[1], made)
    assert found == Difference(float("inf"), float("inf"))
    assert not found.within(Difference(0.5, 0.1))


def test_other_weights_and_another_temperature_are_found(probe: tuple[Probe, Mapping[str, jax.Array]]) -> None:
    off_by_one_tensor = PARAMS | {"final_norm": PARAMS["final_norm"] * 1.01}
    assert probe[0].difference(probe[1], answers(params=off_by_one_tensor)).largest > 1e-3
    assert probe[0].difference(probe[1], answers(temperature=1.0)).largest > 1e-3


@pytest.mark.parametrize("block_tokens", [16, 32, 128])
def test_prompts_are_longer_than_a_block_and_always_the_same(block_tokens: int) -> None:
    first, second = (probe_prompts(151_936, block_tokens) for _ in range(2))
    assert len(first) == PROMPTS
    assert all(len(prompt) > block_tokens for prompt in first)
    assert max(len(prompt) for prompt in first) + RESPONSE_TOKENS == probe_tokens(block_tokens)
    assert len({tuple(prompt[:block_tokens]) for prompt in first}) == PROMPTS, "none shares another's first block"
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("engine", "trainer", "asked", "expected"),
    [
        ("float32", "float32", 0.0, Difference(1e-3, 1e-4)),
        ("bfloat16", "float32", 0.0, Difference(0.5, 0.1)),
        ("float32", "bfloat16", 0.0, Difference(0.5, 0.1)),
        ("float32", "float32", 7.0, Difference(7.0, 0.7)),
        ("bfloat16", "float32", 1.0, Difference(1.0, 0.2)),
    ],
)
def test_the_tolerance_is_the_coarser_dtypes_unless_told(engine: str, trainer: str, asked: float, expected: Difference) -> None:
    config = tiny_config(model__dtype=trainer)
    config.rollout.vllm.update({"dtype": engine, "probe_tolerance_nats": asked})
    found = tolerance(config)
    assert (found.largest, found.mean) == (pytest.approx(expected.largest), pytest.approx(expected.mean))


def test_both_bounds_count() -> None:
    bound = Difference(0.5, 0.1)
    assert Difference(0.5, 0.1).within(bound)
    assert not Difference(0.51, 0.02).within(bound), "one token of sixteen"
    assert not Difference(0.3, 0.11).within(bound), "all tokens, each a little"
