"""The embedded engine's prefill and cached decoding against transformers: its full forward pass, token by token, and its generate."""

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
import scipy.special
from factories import make_prompt, tiny_config, tiny_model
from reference_models import REFERENCE_START, as_dtype, read_checkpoint, report, transformers_models

from jaxprorl.models.qwen2 import UNROLL_MAX_LAYERS
from jaxprorl.rollout.engine import Sampling
from jaxprorl.rollout.jax_engine import JaxEngine
from jaxprorl.sharding.mesh import make_mesh, replicated
from jaxprorl.types import Completion

CONTEXT = 128  # the longest prompt and the longest response fill it
MODELS = {
    "tied, 4 heads in 2 groups": tiny_model(max_position_embeddings=CONTEXT),
    "untied, 1 group, theta 1e6": tiny_model(
        tie_word_embeddings=False, num_key_value_heads=1, rope_theta=1e6, head_dim=16, max_position_embeddings=CONTEXT
    ),
    "tied, 4 groups, 5 layers, scanned": tiny_model(
        num_key_value_heads=4, num_hidden_layers=UNROLL_MAX_LAYERS + 1, max_position_embeddings=CONTEXT
    ),
}
STOP_IDS = (0,)
LIMITS = {"rollout__max_prompt_tokens": 96, "rollout__max_response_tokens": 32, "rollout__decode_chunk_tokens": 8}  # four chunks
PROMPTS = [make_prompt(i, np.random.RandomState(i).randint(1, 48, size)) for i, size in enumerate((1, 2, 17, 50, 95, 96, 96, 96))]
# With float64 weights and caches the engine still sums its logits and log-probs in float32; rounding alone stays far below 1e-5. In float32
# everything is rounded, and the error grows with the logits, which reach 6 to 9 here.
RUNS = {
    "float64": Sampling(samples=4, temperature=1.0, seed=3, step=5),  # two rounds
    "float32": Sampling(samples=1, temperature=0.0, seed=3, step=5),
}
TOLERANCE = 1e-5
CLEAR = 1e-3  # float32 cannot mistake the best of two logits that differ by more

REFERENCE_MAKE = """
for seed, (name, config) in enumerate(models.items()):
    make(f"{folder}/{name}", config, seed)
"""

# Prompts in one left-padded batch to `generate`; the engine's own sequences one by one through the full forward pass, in float64.
REFERENCE_GENERATE = """
for name in models:
    model = load(f"{folder}/{name}", torch.float32)
    out = model.generate(
        ids(inputs["prompts"]), attention_mask=ids(inputs["prompts"] > 0), do_sample=False, max_new_tokens=int(inputs["limit"]),
        eos_token_id=inputs["stop_ids"].tolist(), pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )
    outputs[f"{name}|tokens"] = out.sequences[:, inputs["prompts"].shape[1]:].numpy()
    top = torch.stack(out.logits, dim=1).topk(2).values
    outputs[f"{name}|margin"] = (top[..., 0] - top[..., 1]).numpy()
widen()
for name in models:
    model = load(f"{folder}/{name}", torch.float64)
    with torch.no_grad():
        for number, tokens in enumerate(np.split(inputs[f"{name}|tokens"], inputs[f"{name}|ends"][:-1])):
            outputs[f"{name}|logits {number}"] = model(ids(tokens)[None]).logits[0].numpy()
"""


@pytest.mark.slow
def test_cached_decoding_equals_transformers(run_reference: Callable[..., dict[str, np.ndarray]], tmp_path: Path) -> None:
    run_reference(REFERENCE_START + REFERENCE_MAKE, folder=str(tmp_path), models=transformers_models(MODELS))
    by_id = {prompt.prompt_id: prompt.token_ids for prompt in PROMPTS}
    prompts_PL = np.zeros((len(PROMPTS), 96), int)  # no prompt holds token 0
    for row, prompt in enumerate(PROMPTS):
        prompts_PL[row, 96 - len(prompt.token_ids) :] = prompt.token_ids
    arrays = {"prompts": prompts_PL, "stop_ids": np.array(STOP_IDS), "limit": LIMITS["rollout__max_response_tokens"]}
    completions = {name: engine_completions(tmp_path / name) for name in MODELS}
    for name, by_dtype in completions.items():
        sequences = [np.concatenate([by_id[c.prompt_id], c.token_ids]) for dtype in RUNS for c in by_dtype[dtype]]
        arrays |= {f"{name}|tokens": np.concatenate(sequences), f"{name}|ends": np.cumsum([len(ids) for ids in sequences])}
    reference = run_reference(REFERENCE_START + REFERENCE_GENERATE, folder=str(tmp_path), models=transformers_models(MODELS), **arrays)
    for name, by_dtype in completions.items():
        everything = [c for dtype in RUNS for c in by_dtype[dtype]]
        assert max(len(by_id[c.prompt_id]) + len(c.token_ids) for c in everything) == CONTEXT
        assert {c.finish_reason for c in everything} == {"stop", "length"}
        numbers = iter(range(len(everything)))
        for dtype in RUNS:
            logits = [reference[f"{name}|logits {next(numbers)}"][len(by_id[c.prompt_id]) - 1 : -1] for c in by_dtype[dtype]]
            worst = max(largest_difference(c, logits_TV) for c, logits_TV in zip(by_dtype[dtype], logits, strict=True))
            scale = max(np.abs(logits_TV).max() for logits_TV in logits)
            if dtype == "float64":
                report(f"log-probs of sampled tokens, float64, {name}", worst, TOLERANCE)
            else:
                report(f"log-probs of greedy tokens / scale of the logits, float32, {name}", worst / scale, TOLERANCE)
        compare_greedy(name, by_dtype["float32"], reference[f"{name}|tokens"], reference[f"{name}|margin"])


def largest_difference(completion: Completion, logits_TV: np.ndarray) -> float:
    """Between the engine's log-probs and those of transformers."""
    logp_TV = scipy.special.log_softmax(logits_TV, axis=1)
    return float(np.abs(completion.logprobs - logp_TV[np.arange(len(logp_TV)), completion.token_ids]).max())


def compare_greedy(name: str, completions: list[Completion], tokens_PT: np.ndarray, margin_PT: np.ndarray) -> None:
    """All tokens up to the first one that two logits contend for; after it the texts may part."""
    compared = total = 0
    for completion, tokens, margin in zip(completions, tokens_PT, margin_PT, strict=True):
        size = min([len(completion.token_ids), *np.flatnonzero(margin <= CLEAR)[:1]])
        np.testing.assert_array_equal(completion.token_ids[:size], tokens[:size], err_msg=f"{name}, prompt {completion.prompt_id}")
        compared, total = compared + size, total + len(completion.token_ids)
    print(f"greedy tokens, float32, {name}: {compared} of {total} compared with generate's, all equal")
    assert compared > total / 2


def engine_completions(folder: Path) -> dict[str, list[Completion]]:
    """By dtype, in the order of prompts and samples."""
    c, params = read_checkpoint(folder)
    mesh, found = make_mesh("dp"), {}
    for dtype, sampling in RUNS.items():
        with jax.enable_x64(dtype == "float64"):
            placed = jax.device_put(as_dtype(params, dtype), replicated(mesh))
            engine = JaxEngine(tiny_config(**LIMITS, model__dtype=dtype), c, mesh, STOP_IDS)
            engine.compile(placed, [sampling.samples])
            engine.set_weights(placed, 0)
            found[dtype] = sorted(engine.generate(PROMPTS, sampling), key=lambda c: (c.prompt_id, c.sample))
    return found
