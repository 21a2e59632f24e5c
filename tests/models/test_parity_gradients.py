"""Gradients through the trainer's log-probs against torch autograd through transformers' Qwen2ForCausalLM."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import QUICK_COMPILE, tiny_model
from flax import nnx
from reference_models import REFERENCE_START, as_dtype, graphdef, in_our_form, place_rows, read_checkpoint, report, transformers_models

from jaxprorl.models import qwen2
from jaxprorl.models.qwen2 import Params
from jaxprorl.update import batch_log_probs

MODELS = {
    "tied": tiny_model(),
    "untied": tiny_model(tie_word_embeddings=False),
    "untied, 1 group, head_dim 16, theta 1e6": tiny_model(tie_word_embeddings=False, num_key_value_heads=1, head_dim=16, rope_theta=1e6),
    "tied, 4 groups, scanned layers": tiny_model(num_key_value_heads=4, num_hidden_layers=qwen2.UNROLL_MAX_LAYERS + 1),
}
TEMPERATURE = 0.7
ROW_TOKENS = 600  # a chunk of logits, 512 tokens, and a part of the next
SIZES = (120, 2, 300, 77, 101, 3, 400, 150)
PLACES = [(0, 0), (0, 120), (0, 122), (0, 422), (0, 499), (1, 0), (1, 3), (1, 403)]  # row 1 ends with 47 tokens of padding
SEQUENCES = [np.random.RandomState(seed).randint(0, 48, size) for seed, size in enumerate(SIZES)]
# A weight for the log-prob and one for the entropy of each token's prediction, in a third of the places nothing.
WEIGHTS = [np.random.RandomState(10 + i).standard_normal((2, n - 1)) * (np.arange(n - 1) % 3 > 0) for i, n in enumerate(SIZES)]

# Every sequence by itself, so that nothing depends on how transformers packs.
REFERENCE_GRADIENTS = """
widen()
for seed, (name, config) in enumerate(models.items()):
    make(f"{folder}/{name}", config, seed)
    model = load(f"{folder}/{name}", torch.float64)
    total = 0.0
    for tokens, weights in zip(np.split(inputs["tokens"], inputs["ends"][:-1]), np.split(inputs["weights"], inputs["ends"][:-1], axis=1)):
        row = ids(tokens)
        logits = model(row[None], use_cache=False).logits[0, :-1] / float(inputs["temperature"])
        logp = torch.log_softmax(logits, dim=-1)
        token_logp = logp.gather(1, row[1:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        weights = torch.from_numpy(weights[:, :-1])
        loss = (weights[0] * token_logp + weights[1] * entropy).sum()
        loss.backward()
        total += loss.item()
    outputs[f"{name}|loss"] = np.array(total)
    for key, parameter in model.named_parameters():
        outputs[f"{name}|{key}"] = parameter.grad.numpy()
"""


@partial(jax.jit, static_argnums=0, compiler_options=QUICK_COMPILE)
@partial(jax.value_and_grad, argnums=1)
def loss(graphdef: nnx.GraphDef, params: Params, rows: dict[str, jax.Array], weights_2BS: jax.Array) -> jax.Array:
    wanted = {"mask": jnp.any(weights_2BS != 0, axis=0)}
    logp_BS, entropy_BS = batch_log_probs(graphdef, params, rows | wanted, TEMPERATURE)
    return jnp.sum(jnp.where(weights_2BS != 0, weights_2BS * jnp.stack([logp_BS, entropy_BS]), 0.0))


@pytest.mark.slow
def test_gradients_of_every_parameter_equal_those_of_torch(run_reference: Callable[..., dict[str, np.ndarray]], tmp_path: Path) -> None:
    rows = place_rows(SEQUENCES, PLACES, (2, ROW_TOKENS))
    weights_2BS = np.zeros((2, 2, ROW_TOKENS))
    for (row, start), weights in zip(PLACES, WEIGHTS, strict=True):
        weights_2BS[:, row, start : start + weights.shape[1]] = weights
    reference = run_reference(
        REFERENCE_START + REFERENCE_GRADIENTS,
        folder=str(tmp_path),
        models=transformers_models(MODELS),
        temperature=TEMPERATURE,
        tokens=np.concatenate(SEQUENCES),
        ends=np.cumsum(SIZES),
        weights=np.concatenate([np.pad(weights, ((0, 0), (0, 1))) for weights in WEIGHTS], axis=1),
    )
    for name, c in MODELS.items():
        _, params = read_checkpoint(tmp_path / name)
        theirs = {key.removeprefix(f"{name}|"): value for key, value in reference.items() if key.startswith(f"{name}|")}
        their_loss = float(theirs.pop("loss"))
        theirs = in_our_form(c, theirs)
        arrays = {"tokens": rows.tokens, "positions": rows.positions, "segment_ids": rows.segments, "targets": np.roll(rows.tokens, -1, 1)}
        for dtype in ("float64", "float32"):
            with jax.enable_x64(dtype == "float64"):
                batch = {key: jnp.asarray(value, jnp.int32) for key, value in arrays.items()}
                our_loss, ours = loss(graphdef(c, dtype), as_dtype(params, dtype), batch, jnp.asarray(weights_2BS, dtype))
                ours = {key: np.asarray(gradient) for key, gradient in ours.items()}
            assert ours.keys() == theirs.keys()
            worst = {key: float(np.abs(ours[key] - theirs[key]).max() / np.abs(theirs[key]).max()) for key in theirs}
            if dtype == "float32":
                print(f"gradient / its largest entry, float32, {name}: {max(worst.values()):.1e}")
                continue
            report(f"loss, float64, {name}", abs(float(our_loss) / their_loss - 1), 1e-10)
            for key, difference in worst.items():
                report(f"gradient / its largest entry, float64, {name}, {key}", difference, 1e-10)
