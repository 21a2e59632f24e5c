"""Logits against transformers' Qwen2ForCausalLM, on checkpoints that transformers made. docs/parity.md holds the numbers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import QUICK_COMPILE, tiny_model
from flax import nnx
from reference_models import REFERENCE_START, Rows, as_dtype, graphdef, place_rows, read_checkpoint, report, transformers_models

from jaxprorl.models import qwen2
from jaxprorl.models.qwen2 import Params, Qwen2Config, rope_tables

MODELS = {
    "tied, 4 heads in 2 groups": tiny_model(),
    "untied": tiny_model(tie_word_embeddings=False),
    "1 group": tiny_model(num_key_value_heads=1, rope_theta=1e6),
    "4 groups": tiny_model(num_key_value_heads=4, rope_theta=5e5, tie_word_embeddings=False),
    "6 heads in 2 groups, hidden size 24": tiny_model(num_attention_heads=6, hidden_size=24),
    "head_dim 32": tiny_model(head_dim=32, rope_theta=1e6, rms_norm_eps=1e-3),
    "scanned layers": tiny_model(num_hidden_layers=qwen2.UNROLL_MAX_LAYERS + 1),
}
SEQUENCES = [np.random.RandomState(seed).randint(0, 48, size) for seed, size in enumerate((7, 1, 9, 12, 12, 5, 6, 2, 11))]
SHAPE = 9, 24  # packed: three full-length rows, six of padding
LAYOUTS = {
    "padded on the right": place_rows(SEQUENCES, [(row, 0) for row in range(9)], SHAPE),
    "padded on the left": place_rows(SEQUENCES, [(row, 24 - len(ids)) for row, ids in enumerate(SEQUENCES)], SHAPE),
    "packed": place_rows(SEQUENCES, [(0, 0), (0, 7), (0, 8), (1, 0), (1, 12), (2, 0), (2, 5), (2, 11), (2, 13)], SHAPE),
}

# transformers is asked in five ways: each sequence by itself; padded on the right or left, with a mask and positions; packed, with a
# block-diagonal mask; packed, with positions alone, from which it finds the borders by itself.
REFERENCE_LOGITS = """
def attention_masks(dtype):
    yield "padded on the right", ids(inputs["padded on the right.segments"] > 0)
    yield "padded on the left", ids(inputs["padded on the left.segments"] > 0)
    segments = inputs["packed.segments"]
    causal = np.tril(np.ones((segments.shape[1],) * 2, bool))
    seen = (segments[:, :, None] == segments[:, None, :]) & causal
    yield "packed", torch.zeros(seen.shape, dtype=dtype).masked_fill(torch.from_numpy(~seen), torch.finfo(dtype).min)[:, None]
    yield "packed, by positions", None

def answer(dtype):
    for name in models:
        model = load(f"{folder}/{name}", dtype)
        with torch.no_grad():
            for number, places in enumerate(np.split(inputs["tokens"], inputs["ends"][:-1])):
                outputs[f"{name}|{dtype}|alone {number}"] = model(ids(places)[None]).logits[0].numpy()
            for way, mask in attention_masks(dtype):
                rows = way.split(", ")[0]
                row_ids, positions = ids(inputs[rows + ".tokens"]), ids(inputs[rows + ".positions"])
                logits = model(row_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
                outputs[f"{name}|{dtype}|{way}"] = logits.numpy()

for seed, (name, config) in enumerate(models.items()):
    make(f"{folder}/{name}", config, seed)
answer(torch.float32)
widen()
answer(torch.float64)
"""

# Rising positions with gaps. The last answer is that of the float64 model with our float32 tables of cosines and sines.
REFERENCE_FAR = """
tokens, positions = ids(inputs["tokens"]), ids(inputs["positions"])

def answer(name, model, way):
    with torch.no_grad():
        outputs[f"{name}|{way}"] = model(tokens, attention_mask=torch.ones_like(tokens), position_ids=positions).logits.numpy()

for seed, (name, config) in enumerate(models.items()):
    make(f"{folder}/{name}", config, seed)
    model = load(f"{folder}/{name}", torch.float32)
    answer(name, model, "float32")
    outputs[f"{name}|frequencies"] = model.model.rotary_emb.inv_freq.numpy()
    outputs[f"{name}|tables"] = torch.stack(model.model.rotary_emb(torch.zeros(1), positions)).numpy()
widen()
for name in models:
    model = load(f"{folder}/{name}", torch.float64)
    answer(name, model, "float64")
    tables = torch.from_numpy(inputs[f"{name}|tables"]).double()
    model.model.rotary_emb.forward = lambda x, position_ids: tuple(tables)
    answer(name, model, "float64, our tables")
"""


def our_logits(c: Qwen2Config, params: Params, tokens: np.ndarray, positions: np.ndarray, segments: np.ndarray, dtype: str) -> np.ndarray:
    with jax.enable_x64(dtype == "float64"):
        ids = [jnp.asarray(x, jnp.int32) for x in (tokens, positions, segments)]
        return np.asarray(_logits(graphdef(c, dtype), as_dtype(params, dtype), *ids))


@partial(jax.jit, static_argnums=0, compiler_options=QUICK_COMPILE)
def _logits(graphdef: nnx.GraphDef, params: Params, *ids: jax.Array) -> jax.Array:
    model = nnx.merge(graphdef, params)
    return model(*ids) @ model.head().T


def largest(x: np.ndarray) -> float:
    return float(np.abs(x).max())


@pytest.mark.slow
def test_logits_in_every_layout_equal_those_of_transformers(run_reference: Callable[..., dict[str, np.ndarray]], tmp_path: Path) -> None:
    arrays = {f"{way}.{field}": getattr(rows, field) for way, rows in LAYOUTS.items() for field in ("tokens", "positions", "segments")}
    arrays |= {"tokens": np.concatenate(SEQUENCES), "ends": np.cumsum([len(ids) for ids in SEQUENCES])}
    reference = run_reference(REFERENCE_START + REFERENCE_LOGITS, folder=str(tmp_path), models=transformers_models(MODELS), **arrays)

    def theirs(name: str, dtype: str) -> dict[str, np.ndarray]:
        found = {way: rows.answers(reference[f"{name}|torch.{dtype}|{way}"]) for way, rows in LAYOUTS.items()}
        found["packed, by positions"] = LAYOUTS["packed"].answers(reference[f"{name}|torch.{dtype}|packed, by positions"])
        return found | {"alone": np.concatenate([reference[f"{name}|torch.{dtype}|alone {i}"] for i in range(len(SEQUENCES))])}

    for name, c in MODELS.items():
        read, params = read_checkpoint(tmp_path / name)
        assert read == c
        exact = theirs(name, "float64")
        scale = largest(exact["alone"])
        assert scale > 1
        for way, rows in LAYOUTS.items():
            wide, single = (rows.answers(ask(c, params, rows, dtype)) for dtype in ("float64", "float32"))
            assert wide.shape == exact["alone"].shape
            report(f"logits, float64, {name}, {way}", max(largest(wide - other) for other in exact.values()), 1e-10)
            report(f"logits / scale, float32, {name}, {way}", largest(single - exact["alone"]) / scale, 2e-5)
        themselves = largest(theirs(name, "float32")["alone"] - exact["alone"]) / scale
        print(f"logits / scale, float32, {name}: transformers' {themselves:.1e}")


def ask(c: Qwen2Config, params: Params, rows: Rows, dtype: str) -> np.ndarray:
    return our_logits(c, params, rows.tokens, rows.positions, rows.segments, dtype)


# 131071 is the last position of DeepSeek-R1-Distill-Qwen-1.5B.
FAR_POSITIONS = {
    "scattered up to 8191": np.append(np.sort(np.random.RandomState(1).choice(8191, 23, replace=False)), 8191),
    "16361 to 16384": np.arange(16361, 16385),
    "131048 to 131071": np.arange(131048, 131072),
    "scattered up to 131071": np.append(np.sort(np.random.RandomState(2).choice(131071, 23, replace=False)), 131071),
}
FAR_MODELS = {
    f"theta {theta:.0e}": tiny_model(
        rope_theta=theta, head_dim=128, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=131072
    )
    for theta in (1e4, 5e5, 1e6)
}
HALF_ULP = 2.0**-24  # largest relative error of one rounding to float32


@pytest.mark.slow
def test_logits_at_far_positions(run_reference: Callable[..., dict[str, np.ndarray]], tmp_path: Path) -> None:
    positions = np.stack(list(FAR_POSITIONS.values()))
    tokens = np.random.RandomState(4).randint(0, 48, positions.shape)
    tables = {name: our_tables(c, positions) for name, c in FAR_MODELS.items()}
    arrays = {f"{name}|tables": table for name, table in tables.items()} | {"tokens": tokens, "positions": positions}
    reference = run_reference(REFERENCE_START + REFERENCE_FAR, folder=str(tmp_path), models=transformers_models(FAR_MODELS), **arrays)
    for name, c in FAR_MODELS.items():
        _, params = read_checkpoint(tmp_path / name)
        ours = {dtype: our_logits(c, params, tokens, positions, np.ones_like(tokens), dtype) for dtype in ("float64", "float32")}
        exact, exact_our_tables = reference[f"{name}|float64"], reference[f"{name}|float64, our tables"]
        frequencies = c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
        off = np.abs(reference[f"{name}|frequencies"] - frequencies) / np.spacing(frequencies.astype(np.float32))
        count = np.sum(off > 0.5)
        print(f"frequencies, float32, {name}: transformers' {count} of 64 not nearest, up to {off.max():.1f} units in the last place off")
        angles = positions[..., None] * np.tile(frequencies, 2)
        exact_tables = np.stack([np.cos(angles), np.sin(angles)])
        for row, where in enumerate(FAR_POSITIONS):
            scale = largest(exact[row])
            report(f"logits, float64, {name}, {where}", largest(ours["float64"][row] - exact[row]), 1e-10)
            report(
                f"logits / scale, float32, transformers given our cos and sin, {name}, {where}",
                largest(ours["float32"][row] - exact_our_tables[row]) / scale,
                2e-5,
            )
            # An angle is rounded when its frequency is, and once more as their product, which at position 131071 makes 0.008. transformers'
            # frequency has two roundings (of a power, good to an ulp, and of its inverse). No bound in terms of logits follows.
            for who, table, roundings in (("ours", tables[name], 2), ("transformers'", reference[f"{name}|tables"], 4)):
                error = np.abs(table[:, row] - exact_tables[:, row])
                assert (error <= (roundings * angles[row] + 2) * HALF_ULP).all()
                report(f"cos and sin, float32, {who}, {name}, {where}", largest(error), (roundings * positions[row].max() + 2) * HALF_ULP)
            shown = {"ours": ours["float32"][row] - exact[row], "transformers'": reference[f"{name}|float32"][row] - exact[row]}
            shown["between both"] = ours["float32"][row] - reference[f"{name}|float32"][row]
            print(f"logits / scale, float32, {name}, {where}:", ", ".join(f"{who} {largest(d) / scale:.1e}" for who, d in shown.items()))


def our_tables(c: Qwen2Config, positions: np.ndarray) -> np.ndarray:
    return np.stack(jax.jit(partial(rope_tables, head_dim=c.head_dim, theta=c.rope_theta))(jnp.asarray(positions, jnp.int32)))
