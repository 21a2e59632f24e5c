"""The full shape of DeepSeek-R1-Distill-Qwen-1.5B: a random checkpoint made by transformers, read by us, compared on 64 tokens."""

import multiprocessing
import resource
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reference_models import REFERENCE_START, graphdef, read_checkpoint, report, transformers_models

from jaxprorl.models.qwen2 import Params, Qwen2Config

MODEL = Qwen2Config(151936, 1536, 8960, 28, 12, 2, 128, 10000.0, 131072, 1e-6, tie_word_embeddings=False)
TOKENS = np.random.RandomState(0).randint(0, MODEL.vocab_size, 64)

# Weights as transformers initialises them, norms and biases random, all stored in bfloat16. Asked twice: in float32, as it is, to compare;
# and in float64, for the truth, with each part widened only while it is at work.
REFERENCE = """
import resource
import time

started_s = time.perf_counter()
torch.manual_seed(0)
config = transformers.Qwen2Config(**models["1.5B"])
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2 if "norm" in name else 0.1)
model.save_pretrained(folder, max_shard_size="1GB")
del model
made_s = time.perf_counter()

def answer(model):
    with torch.no_grad():
        return torch.log_softmax(model(ids(inputs["tokens"])[None]).logits[0], dim=-1).numpy()

outputs["float32"] = answer(load(folder, torch.float32))
single_s = time.perf_counter()
widen()
model = load(folder, torch.bfloat16)
assert model.model.rotary_emb.inv_freq.dtype == torch.float64
model.model.embed_tokens.register_forward_hook(lambda module, arguments, embedded: embedded.double())
for part in (*model.model.layers, model.model.norm, model.lm_head):
    part.register_forward_pre_hook(lambda module, arguments: (module.double(), None)[1])
    part.register_forward_hook(lambda module, arguments, output: (module.bfloat16(), None)[1])
outputs["float64"] = answer(model)
peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
outputs["cost"] = np.array([made_s - started_s, single_s - made_s, time.perf_counter() - single_s, peak_gb])
"""


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_log_probs_at_full_size_equal_those_of_transformers(
    require_room: Callable[[float, float], None], run_reference: Callable[..., dict[str, np.ndarray]], tmp_path: Path
) -> None:
    require_room(14, 8)
    folder = tmp_path / "checkpoint"
    try:
        reference = run_reference(
            REFERENCE_START + REFERENCE, timeout_s=1800, folder=str(folder), models=transformers_models({"1.5B": MODEL}), tokens=TOKENS
        )
        shards = [file.stat().st_size / 1e9 for file in folder.glob("*.safetensors")]
        assert len(shards) > 2
        # A process of its own: its peak is that of reading and computing alone, and it ends with the memory given back.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            logp_SV, read_s, read_gb, compute_s, compute_gb = pool.submit(log_probs, folder).result()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    exact_SV = reference["float64"]
    assert exact_SV.dtype == np.float64 and logp_SV.shape == exact_SV.shape == (64, MODEL.vocab_size)
    best_S = exact_SV.argmax(axis=1)
    assert exact_SV.std() > 0.5 and len(set(best_S)) > 32  # predictions are neither flat nor all alike
    print(f"checkpoint: {sum(shards):.2f} GB in {len(shards)} files")
    print("transformers: made in {:.0f} s, float32 in {:.0f} s, float64 in {:.0f} s, peak memory {:.2f} GB".format(*reference["cost"]))
    print(f"ours: read in {read_s:.0f} s, peak memory {read_gb:.2f} GB; computed in {compute_s:.0f} s, peak memory {compute_gb:.2f} GB")
    print(f"log-probs: {exact_SV.min():.1f} to {exact_SV.max():.1f}, {len(set(best_S))} different best tokens")
    report("log-probs, float32, 1.5B", float(np.abs(logp_SV - exact_SV).max()), 1e-4)
    report("log-probs, float32, 1.5B, between both", float(np.abs(logp_SV - reference["float32"].astype(np.float64)).max()), 1e-4)
    print(f"log-probs, float32, 1.5B: transformers' {np.abs(reference['float32'] - exact_SV).max():.1e}")


def log_probs(folder: Path) -> tuple[np.ndarray, float, float, float, float]:
    """Log-probs [S, V]; seconds and peak memory in GB, first of reading, then of computing (the peak of both)."""
    started_s = time.perf_counter()
    c, params = read_checkpoint(folder)
    assert c == MODEL
    jax.block_until_ready(params)
    read_s, read_gb = time.perf_counter() - started_s, peak_gb()
    logp_SV = np.asarray(_log_probs(graphdef(c), params, jnp.asarray(TOKENS, jnp.int32)[None]))
    return logp_SV, read_s, read_gb, time.perf_counter() - started_s - read_s, peak_gb()


def _log_probs(graphdef: nnx.GraphDef, params: Params, tokens_BS: jax.Array) -> jax.Array:
    @jax.jit
    def compute(params: Params) -> jax.Array:
        model = nnx.merge(graphdef, params)
        hidden_BSD = model(tokens_BS, jnp.arange(tokens_BS.shape[1])[None], jnp.ones_like(tokens_BS))
        return jax.nn.log_softmax(hidden_BSD[0] @ model.head().T)

    return compute(params)


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # KiB on Linux
