"""transformers' generate on the workload's model. Any environment with torch and transformers: requirements-trl.txt's, or .venv-vllm.

python benchmarks/peers/run_transformers.py [--dtype bfloat16] [--batch 128]
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.peers.measuring import peak_memory_bytes
from benchmarks.peers.qwen2 import load_tokenizer, new_model
from benchmarks.workload import STOP_ID, WORK, prompts, report_generation, require


def main() -> None:
    """Generates, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=int, default=128, help="completions at a time; a multiple of samples_per_prompt")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(Path(folder))
    model, samples = new_model(arguments.dtype), WORK["samples_per_prompt"]
    texts = [text for text in prompts(arguments.batch // samples) for _ in range(samples)]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    limit = WORK["response_tokens"]
    seconds = []
    for _ in range(1 + WORK["steps"]):
        started_s = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                **inputs, do_sample=True, temperature=WORK["temperature"], top_k=0, top_p=1.0, min_new_tokens=limit, max_new_tokens=limit
            )
        seconds.append(time.perf_counter() - started_s)
        require("tokens", tuple(output.shape), (arguments.batch, WORK["prompt_tokens"] + limit))
        require("stop ids before the last token", int((output[:, :-1] == STOP_ID).sum()), 0)
    report_generation(
        "transformers", arguments.dtype, arguments.batch, seconds[1:], ("transformers", "torch"), peak_memory_bytes=peak_memory_bytes()
    )


if __name__ == "__main__":
    main()
