"""Our pieces, put together, against the loss and gradient of TRL's GRPOTrainer, recorded by make_trl_values.py."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import QUICK_COMPILE

from jaxprorl.algorithms.kl import k3
from jaxprorl.algorithms.losses import (
    aggregation_weights,
    clipped_high,
    clipped_loss,
    clipped_low,
    log_ratio,
    sequence_log_ratio,
)
from jaxprorl.algorithms.sequences import masked

RECORDED = json.loads(Path(__file__).with_name("trl_values.json").read_text())
LENGTHS = RECORDED["lengths"]
AGGREGATION = {"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "dr_grpo"}
ROW_TOKENS, PROMPT_TOKENS = 20, 2
# Two rows of several answers each: (row, first response token) of every answer.
PLACES = [(0, 1), (0, 10), (1, 1), (0, 13), (1, 7), (1, 12)]


def packed(values: list[list[float]]) -> np.ndarray:
    """Per-token numbers of the answers in two packed rows; nan wherever there is no response token."""
    rows = np.full((2, ROW_TOKENS), np.nan)
    for (row, start), answer, length in zip(PLACES, values, LENGTHS, strict=True):
        rows[row, start : start + length] = answer[:length]
    return rows


def per_token(per_answer: list[float]) -> np.ndarray:
    return packed([[value] * max(LENGTHS) for value in per_answer])


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK_COMPILE)
@functools.partial(jax.value_and_grad, argnums=1, has_aux=True)
def objective(level: str, logp: jax.Array, rows: dict[str, jax.Array], beta: float, low: float, high: float) -> Any:
    mask, ids = rows["mask"], rows["segment_ids"]
    logp, old, reference, advantage = (masked(x, mask) for x in (logp, rows["old_logp"], rows["reference_logp"], rows["advantage"]))
    ratio = log_ratio(logp, old)
    if level == "sequence":
        ratio = sequence_log_ratio(ratio, ids, mask)
    loss = clipped_loss(ratio, advantage, low, high) + beta * k3(logp, reference)
    flags = clipped_low(jnp.exp(ratio), advantage, low), clipped_high(jnp.exp(ratio), advantage, high)
    return jnp.sum(masked(rows["weight"] * loss, mask)) / rows["count"], (*flags, k3(logp, reference))


def test_the_answers_lie_where_the_rows_say() -> None:
    taken = np.zeros((2, ROW_TOKENS))
    for (row, start), length in zip(PLACES, LENGTHS, strict=True):
        taken[row, start - 1 : start + length] += 1  # one place of the prompt before each answer
    assert taken.max() == 1


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda c: f"{c['loss_type']}-{c['importance_sampling_level']}-{c['beta']}")
def test_loss_gradient_and_clipped_shares_are_trls(case: dict[str, Any]) -> None:
    weight, count = aggregation_weights(AGGREGATION[case["loss_type"]], np.array(LENGTHS), RECORDED["max_response_tokens"])
    rows = {name: packed(RECORDED["inputs"][name]) for name in ("old_logp", "reference_logp")}
    mask = ~np.isnan(rows["old_logp"])
    rows |= {
        "advantage": per_token(RECORDED["inputs"]["advantage"]),
        "weight": per_token(list(weight)),
        "mask": mask,
        "segment_ids": np.nan_to_num(per_token([1, 2, 1, 3, 2, 3])).astype(int),
        "count": count.sum(),
    }
    bounds = case["beta"], case["epsilon"], case["epsilon_high"]
    with jax.enable_x64(True):
        (loss, aux), gradient = objective(case["importance_sampling_level"], packed(RECORDED["inputs"]["logp"]), rows, *bounds)
    low, high, kl = (np.asarray(x)[mask] for x in aux)
    # Both are float64; 1 / length travels as float32, off by 2^-24 of itself at most.
    tolerance = 2**-23 if case["loss_type"] == "grpo" else 1e-12
    sizes = np.abs(packed(case["gradient"])[mask])
    assert loss == pytest.approx(case["loss"], abs=tolerance * sizes.sum() + 1e-12)
    np.testing.assert_allclose(np.asarray(gradient)[mask], packed(case["gradient"])[mask], rtol=tolerance, atol=1e-14)
    assert (np.asarray(gradient)[~mask] == 0).all()
    # TRL logs shares of tokens, or of answers when the ratio is the answer's; as float32.
    of_answers = case["importance_sampling_level"] == "sequence"
    shares = 1 / (per_token(LENGTHS)[mask] * len(LENGTHS)) if of_answers else np.full(mask.sum(), 1 / mask.sum())
    assert (low * shares).sum() == pytest.approx(case["clipped_low"], rel=1e-6, abs=1e-12)
    assert (high * shares).sum() == pytest.approx(case["clipped_high"], rel=1e-6, abs=1e-12)
    if case["beta"]:
        assert kl.mean() == pytest.approx(case["kl"], rel=1e-6)


def test_the_recorded_values_take_every_branch() -> None:
    assert {(case["loss_type"], case["importance_sampling_level"]) for case in RECORDED["cases"]} == {
        (loss_type, level) for loss_type in AGGREGATION for level in ("token", "sequence")
    }
    assert all(
        case["clipped_low"] > 0 and case["clipped_high"] > 0 for case in RECORDED["cases"] if case["importance_sampling_level"] == "token"
    )
    assert any(case["clipped_low"] or case["clipped_high"] for case in RECORDED["cases"] if case["importance_sampling_level"] == "sequence")
