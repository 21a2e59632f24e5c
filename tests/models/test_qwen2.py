from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import QUICK_COMPILE, random_params, tiny_model
from flax import nnx

from jaxprorl.models import hf, qwen2
from jaxprorl.models.compute import Compute
from jaxprorl.models.qwen2 import Qwen2Config, build, declarations, init_params, parameter_count

VARIANTS = {
    "tied": tiny_model(),
    "untied": tiny_model(tie_word_embeddings=False),
    "three_heads_one_group": tiny_model(num_attention_heads=3, num_key_value_heads=1, hidden_size=24),
    "other_theta_and_eps": tiny_model(rope_theta=1e6, rms_norm_eps=1e-3),
    "wide_heads": tiny_model(head_dim=32, num_key_value_heads=1),
    "deep_and_scanned": tiny_model(num_hidden_layers=qwen2.UNROLL_MAX_LAYERS + 1),
}

# transformers computes norms, angles and softmax in float32 whatever the model's dtype. Widening these casts, and nothing else, makes its
# result precise enough to tell a wrong formula from rounding.
REFERENCE = """
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen2 import modeling_qwen2

class Widened:
    float = float32 = torch.float64
    def __getattr__(self, name):
        return getattr(torch, name)

modeling_qwen2.torch = Widened()
torch.Tensor.float = torch.Tensor.double
for name in str(inputs["names"]).split(","):
    model = AutoModelForCausalLM.from_pretrained(f"{inputs['folder']}/{name}", dtype=torch.float64, attn_implementation="eager").eval()
    with torch.no_grad():
        outputs[name] = model(torch.from_numpy(inputs["tokens"]).long()).logits.numpy()
    outputs[name + ".parameters"] = np.array(sum(p.numel() for p in model.parameters()))
"""


def logits(c: Qwen2Config, params: dict[str, np.ndarray], tokens: np.ndarray, dtype: str, positions=None, segments=None) -> np.ndarray:
    """Logits of rows; without segments every row is one sequence."""
    shape = np.shape(tokens)
    positions = np.broadcast_to(np.arange(shape[1]), shape) if positions is None else positions
    segments = np.ones(shape, int) if segments is None else segments
    with jax.enable_x64(dtype == "float64"):
        ids = [jnp.asarray(x, jnp.int32) for x in (tokens, positions, segments)]
        return np.asarray(_logits(build(c, Compute(dtype)), {name: jnp.asarray(value, dtype) for name, value in params.items()}, *ids))


@partial(jax.jit, static_argnums=0, compiler_options=QUICK_COMPILE)
def _logits(graphdef: nnx.GraphDef, params: qwen2.Params, *ids: jax.Array) -> jax.Array:
    model = nnx.merge(graphdef, params)
    return model(*ids) @ model.head().T


@pytest.mark.slow
def test_logits_equal_those_of_transformers(run_reference: Callable[..., dict[str, np.ndarray]], tmp_path: Path) -> None:
    tokens = np.random.RandomState(3).randint(0, 48, (2, 17))
    empty = tmp_path / "tokenizer"
    empty.mkdir()
    params = {name: random_params(c, seed) for seed, (name, c) in enumerate(VARIANTS.items())}
    for name, c in VARIANTS.items():
        hf.write_folder(tmp_path / "models" / name, c, params[name], empty, stop_ids=(0,), pad_id=0)
    reference = run_reference(REFERENCE, names=",".join(VARIANTS), folder=str(tmp_path / "models"), tokens=tokens)
    for name, c in VARIANTS.items():
        assert parameter_count(c) == reference[f"{name}.parameters"], name
        scale = np.abs(reference[name]).max()
        assert scale > 1
        np.testing.assert_allclose(logits(c, params[name], tokens, "float64"), reference[name], rtol=0, atol=1e-10, err_msg=name)
        np.testing.assert_allclose(logits(c, params[name], tokens, "float32"), reference[name], rtol=0, atol=2e-5 * scale, err_msg=name)


def test_rows_of_several_sequences_equal_each_sequence_alone() -> None:
    c = tiny_model()
    params = random_params(c)
    sequences = [np.random.RandomState(seed).randint(0, 48, size) for seed, size in enumerate((6, 1, 6, 6))]
    tokens = np.zeros((2, 14), int)
    positions, segments = np.zeros_like(tokens), np.zeros_like(tokens)
    places = [(0, 0), (0, 6), (0, 7), (1, 0)]  # row, first token; row 0 ends with one token of padding, row 1 with eight
    for segment, ((row, start), ids) in enumerate(zip(places, sequences, strict=True), start=1):
        here = row, slice(start, start + len(ids))
        tokens[here], positions[here], segments[here] = ids, np.arange(len(ids)), segment
    packed = logits(c, params, tokens, "float64", positions, segments)
    for (row, start), ids in zip(places, sequences, strict=True):
        alone = logits(c, params, ids[None], "float64")
        np.testing.assert_allclose(packed[row, start : start + len(ids)], alone[0], rtol=0, atol=1e-12)
    # What stands in the padding is of no consequence, not even for rounding.
    tokens[segments == 0], positions[segments == 0] = 9, 3
    np.testing.assert_array_equal(logits(c, params, tokens, "float64", positions, segments)[segments > 0], packed[segments > 0])


def test_a_token_sees_its_past_only_and_all_of_it() -> None:
    c = tiny_model()
    params = random_params(c)
    tokens = np.arange(1, 9)[None]
    before = logits(c, params, tokens, "float64")[0]
    for changed in range(8):
        after = logits(c, params, np.where(np.arange(8) == changed, 40, tokens), "float64")[0]
        np.testing.assert_array_equal(after[:changed], before[:changed])
        assert (np.abs(after[changed:] - before[changed:]).max(axis=1) > 1e-6).all()


def test_positions_matter_and_only_their_differences_do() -> None:
    c = tiny_model()
    params, tokens, positions = random_params(c), np.arange(1, 9)[None], np.arange(8)[None]
    start = logits(c, params, tokens, "float64", positions)
    np.testing.assert_allclose(logits(c, params, tokens, "float64", positions + 30), start, rtol=0, atol=1e-10)
    assert np.abs(logits(c, params, tokens, "float64", 2 * positions) - start).max() > 1e-2


def test_layers_unrolled_equal_layers_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    c = tiny_model()
    params, tokens = random_params(c), np.arange(1, 9)[None]
    unrolled = logits(c, params, tokens, "float64")
    monkeypatch.setattr(qwen2, "UNROLL_MAX_LAYERS", 0)
    jax.clear_caches()
    np.testing.assert_allclose(logits(c, params, tokens, "float64"), unrolled, rtol=0, atol=1e-12)


def test_both_ways_to_look_up_an_embedding_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    c = tiny_model()
    params, tokens_BS = random_params(c), np.array([[0, 47, 3], [3, 3, 1]])
    model = nnx.merge(build(c, Compute()), params)
    for limit in (c.vocab_size, c.vocab_size - 1):  # by a one-hot matmul, by an index
        monkeypatch.setattr(qwen2, "ONE_HOT_MAX_VOCAB", limit)
        np.testing.assert_array_equal(model.embed_tokens(jnp.asarray(tokens_BS)), params["embed"][tokens_BS])


@pytest.mark.slow
def test_bfloat16_stays_close_to_float32() -> None:
    c = tiny_model()
    params, tokens = random_params(c), np.arange(1, 17)[None]
    exact = logits(c, params, tokens, "float32")
    rounded = logits(c, params, tokens, "bfloat16").astype(np.float32)
    error = np.sqrt(np.mean((rounded - exact) ** 2) / np.mean(exact**2))
    assert 1e-4 < error < 0.05  # bfloat16 keeps 8 bits: each of some tens of roundings on the way costs up to 2^-9 of the value


@pytest.mark.parametrize("c", VARIANTS.values(), ids=VARIANTS)
def test_declarations_are_what_initialisation_makes(c: Qwen2Config) -> None:
    table = declarations(c)
    params = jax.eval_shape(lambda: init_params(c, 0))
    assert {name: p.shape for name, p in params.items()} == {name: d.shape for name, d in table.items()}
    assert {p.dtype for p in params.values()} == {np.dtype("float32")}
    assert all(len(d.axes) == len(d.shape) for d in table.values())
    keys = [key for d in table.values() for key in hf.hf_keys(d)]
    assert len(keys) == len(set(keys))
    assert parameter_count(c) == sum(p.size for p in params.values())
    assert ("lm_head" in table) == (not c.tie_word_embeddings)


def test_parameters_of_the_1p5b_model_are_counted_right() -> None:
    # DeepSeek-R1-Distill-Qwen-1.5B, ProRL's start model: 1.78 B with its untied head. By hand, in scalars:
    #   embed and head        2 x 151936 x 1536                                     = 466_747_392
    #   a layer: q and o      2 x 1536 x 1536            = 4_718_592
    #            k and v      2 x 1536 x 256             =   786_432
    #            q, k, v bias 1536 + 256 + 256           =     2_048
    #            mlp          3 x 1536 x 8960            = 41_287_680
    #            norms        2 x 1536                   =     3_072
    #                                                      46_797_824 x 28 layers  = 1_310_339_072
    #   final norm            1536
    c = Qwen2Config(151936, 1536, 8960, 28, 12, 2, 128, 10000.0, 131072, 1e-6, tie_word_embeddings=False)
    assert parameter_count(c) == 466_747_392 + 1_310_339_072 + 1536 == 1_777_088_000


def test_initial_values_are_as_declared() -> None:
    init = jax.jit(lambda seed: init_params(tiny_model(vocab_size=2000), seed), static_argnums=0, compiler_options=QUICK_COMPILE)
    params = init(1)
    assert np.std(params["embed"]) == pytest.approx(0.02, rel=0.02)
    assert abs(np.mean(params["embed"])) < 5e-4
    assert not np.any(params["q_bias"]) and (np.asarray(params["mlp_norm"]) == 1).all()
    assert not np.array_equal(params["gate_kernel"], params["up_kernel"])  # every parameter has draws of its own
    assert not np.array_equal(params["gate_kernel"][0], params["gate_kernel"][1])  # and so has every layer
    again, other = init(1), init(2)
    np.testing.assert_array_equal(again["embed"], params["embed"])
    assert not np.array_equal(other["embed"], params["embed"])
