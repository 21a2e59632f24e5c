"""Sampling alone on the workload's model: the engine of `train`, with as many slots as completions.

.venv/bin/python benchmarks/generation.py [--batch 128] [--config.model.dtype=bfloat16 --config.FIELD=VALUE ...]

Prints one line of JSON, comparable with those of peers/run_transformers.py and peers/run_vllm.py, unless its `overrides` name fields
that are not as step.py's config and --batch have them.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax

from benchmarks.step import get_config, overrides, prepare
from benchmarks.workload import WORK, prompts, report_generation, require
from jaxprorl.data.prompts import Item, build_prompt
from jaxprorl.data.tokenizer import load_tokenizer
from jaxprorl.errors import UserError
from jaxprorl.evaluation.summary import peak_memory_bytes
from jaxprorl.models import hf
from jaxprorl.rollout.engine import Sampling
from jaxprorl.rollout.jax_engine import JaxEngine
from jaxprorl.sharding.mesh import param_shardings
from jaxprorl.start import prepare_devices


def main(argv: list[str]) -> None:
    """Makes the model in a temporary folder, samples, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128, help="completions at a time; a multiple of samples_per_prompt")
    arguments, fields = parser.parse_known_args(argv)
    samples = WORK["samples_per_prompt"]
    if arguments.batch < samples or arguments.batch % samples:
        parser.error(f"--batch {arguments.batch}: must be a multiple of {samples}, the samples of a prompt")
    with tempfile.TemporaryDirectory() as folder:
        config = prepare(Path(folder), [f"--config.rollout.slots={arguments.batch}", *fields])
        default = get_config()
        default.rollout.slots = arguments.batch
        changed = overrides(config, default)
        mesh = prepare_devices(config)
        tokenizer, model_config = load_tokenizer(config.model.path), hf.read_config(config.model.path)
        params = hf.read_params(config.model.path, model_config, param_shardings(model_config, mesh, config.mesh.strategy))
    items = [Item("jsonl", "jsonl", ({"role": "user", "content": text},), "", "") for text in prompts(arguments.batch // samples)]
    drawn = [build_prompt(tokenizer, item, number) for number, item in enumerate(items)]
    engine = JaxEngine(config, model_config, mesh, tokenizer.stop_ids)
    engine.compile(params, [samples])
    seconds = []
    for step in range(1 + WORK["steps"]):
        engine.set_weights(params, step)
        started_s = time.perf_counter()
        completions = list(engine.generate(drawn, Sampling(samples, config.rollout.temperature, config.seed, step)))
        seconds.append(time.perf_counter() - started_s)
        require("tokens of the completions", [len(c.token_ids) for c in completions], [WORK["response_tokens"]] * arguments.batch)
    report_generation(
        "jaxprorl", config.model.dtype, arguments.batch, seconds[1:], ("jax", "jaxlib"), peak_memory_bytes=peak_memory_bytes(),
        devices=len(jax.devices()), overrides=changed,
    )  # fmt: skip


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
