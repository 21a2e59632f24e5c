"""Log-probs and update of several configs on one workload, interleaved in one process: ratios, whatever the machine's speed does meanwhile.

.venv/bin/python benchmarks/variants.py [--config.FIELD=VALUE ...] [--rounds 5] [--profile] --vary NAME:FIELD=VALUE,... [--vary ...]

--config.FIELD=VALUE holds for all variants, the rest is step.py's config; the first variant is what the others are compared with.
Beside fields of the config, `unroll_max_layers` is that of jaxprorl/models/qwen2.py. Host devices are one choice for all:
--config.mesh.cpu_devices. Prints per variant the shape of its batch, compile time, the compiler's temporary memory, median seconds
and medians of the paired ratios; with --profile, also what the first variant's log-probs and update spend on each kind of operation.
"""

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax
import numpy as np
from ml_collections import ConfigDict

from benchmarks import step
from benchmarks.step import prepare
from benchmarks.workload import PAD_ID
from jaxprorl import config as config_module
from jaxprorl.batch import batch_advantages, device_batch
from jaxprorl.errors import UserError
from jaxprorl.executables import Plan, step_parts
from jaxprorl.models import hf, qwen2
from jaxprorl.models.compute import choose_compute
from jaxprorl.sizes import with_cpu_devices, with_micro_batch_rows
from jaxprorl.start import prepare_devices
from jaxprorl.state import TrainState, start_state, state_shardings
from jaxprorl.types import Completion, Group, Prompt, Score
from jaxprorl.update import Batch


@dataclass
class Variant:
    """A config's executables, its state and batch, and the seconds that they took."""

    name: str
    config: ConfigDict
    groups: list[Group]
    log_probs: jax.stages.Compiled
    train_step: jax.stages.Compiled
    state: TrainState
    batch: Batch
    log_probs_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)


def random_groups(config: ConfigDict) -> list[Group]:
    """A batch of the longest prompts and answers, of random tokens and scores: the same for the same sizes."""
    random, rollout = np.random.RandomState(0), config.rollout
    groups = []
    for number in range(config.batch.prompts):
        completions, scores = [], []
        for sample in range(rollout.samples_per_prompt):
            ids = random.randint(0, PAD_ID, size=rollout.max_response_tokens).astype(np.int32)
            logp = (-5.5 + 0.1 * random.standard_normal(len(ids))).astype(np.float32)
            completions.append(Completion(number, sample, ids, logp, "length", ((0, 0, len(ids)),)))
            scores.append(Score(float(random.uniform()), False, "scored", "random", "0", 0.0))
        prompt = Prompt(number, "", random.randint(0, PAD_ID, size=rollout.max_prompt_tokens).astype(np.int32), "", "")
        groups.append(Group(prompt, tuple(completions), tuple(scores)))
    return groups


def make_variant(name: str, argv: list[str], unroll_max_layers: int) -> Variant:
    """Compiles a variant and says what it took."""
    qwen2.UNROLL_MAX_LAYERS = unroll_max_layers
    with tempfile.TemporaryDirectory() as folder:
        config = prepare(Path(folder), argv)
        mesh = prepare_devices(config)
        model_config = hf.read_config(Path(config.model.path))
        shardings = state_shardings(config, model_config, mesh)
        state = start_state(config, hf.read_params(Path(config.model.path), model_config, shardings.params), shardings)
    compute = choose_compute(config, model_config.head_dim, mesh)
    config, groups = with_micro_batch_rows(config, compute), random_groups(config)
    started_s = time.perf_counter()
    log_probs, train_step = (part() for part in step_parts(Plan("", config, compute, ()), model_config, mesh, state, shardings))
    compile_s, batch = time.perf_counter() - started_s, device_batch(config, groups, mesh, compute.shared_prompts)
    shape = " x ".join(map(str, batch["mask"].shape[1:]))
    temporary = train_step.memory_analysis().temp_size_in_bytes / 2**20
    print(f"{name}: {shape} tokens, {compute.attention}, compiled in {compile_s:.1f} s, {temporary:.0f} MiB temporary", flush=True)
    return Variant(name, config, groups, log_probs, train_step, state, batch)


def measure(variant: Variant) -> None:
    """One pass for log-probs and one update."""
    started_s = time.perf_counter()
    fixed, kl_sum_PN = jax.block_until_ready(variant.log_probs(variant.state.params, variant.state.reference, variant.batch))
    variant.log_probs_s.append(time.perf_counter() - started_s)
    advantage_PN = jax.device_put(batch_advantages(variant.config, variant.groups, 0, kl_sum_PN), kl_sum_PN.sharding)
    started_s = time.perf_counter()
    variant.state, _ = jax.block_until_ready(variant.train_step(variant.state, variant.batch, fixed, advantage_PN))
    variant.update_s.append(time.perf_counter() - started_s)


def compared(seconds: list[float], others: list[float]) -> str:
    """Median seconds, and the median ratio to what the first variant took in the same round."""
    ratio = statistics.median(own / other for own, other in zip(seconds, others, strict=True))
    return f"{statistics.median(seconds):.3f} s ({ratio:.2f})"


def operations(run: Callable[[], object]) -> list[tuple[str, float]]:
    """Seconds per device of each kind of operation, the longest first: by the compiler's names, those that only hold others left out."""
    options, kinds_ns = jax.profiler.ProfileOptions(), Counter[str]()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        jax.block_until_ready(run())
        jax.profiler.stop_trace()
        (trace,) = Path(folder).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(trace)).planes)
    for event in (event for plane in planes for line in plane.lines for event in line.events):
        kind = re.sub(r"[.\d]+$", "", event.name)
        if any(name == "hlo_module" for name, _ in event.stats) and kind not in ("while", "call", "conditional"):
            kinds_ns[kind] += round(event.duration_ns)
    return [(kind, ns / 1e9 / len(jax.devices())) for kind, ns in kinds_ns.most_common()]


def show_profile(variant: Variant) -> None:
    """Kinds of operations that take a hundredth or more of the time."""
    state, batch = variant.state, variant.batch
    fixed, kl_sum_PN = variant.log_probs(state.params, state.reference, batch)
    advantage_PN = jax.device_put(batch_advantages(variant.config, variant.groups, 0, kl_sum_PN), kl_sum_PN.sharding)
    for name, run in (
        ("log-probs", lambda: variant.log_probs(state.params, state.reference, batch)),
        ("update", lambda: variant.train_step(state, batch, fixed, advantage_PN)),  # takes the state: last
    ):
        found = operations(run)
        total_s = sum(seconds for _, seconds in found)
        parts = ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in found if seconds > 0.01 * total_s)
        print(f"{variant.name}, seconds of {name} per device: {total_s:.3f}, of these {parts}", flush=True)


def main(argv: list[str]) -> None:
    """Compiles all variants, runs them in turn, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one of warm-up")
    parser.add_argument("--profile", action="store_true", help="of the first variant")
    parser.add_argument("--vary", action="append", required=True, metavar="NAME:FIELD=VALUE,...")
    arguments, shared = parser.parse_known_args(argv)
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: must be 1 or more")
    step_file = f"--config={Path(step.__file__)}"
    devices = with_cpu_devices(config_module.load([step_file, *shared], step.SCHEMA)).mesh.cpu_devices  # once: they cannot change any more
    shared.append(f"--config.mesh.cpu_devices={devices}")
    default, variants = qwen2.UNROLL_MAX_LAYERS, []
    for text in arguments.vary:
        name, _, changes = text.partition(":")
        own = [change for change in changes.split(",") if change]
        unroll = [int(change.partition("=")[2]) for change in own if change.startswith("unroll_max_layers=")]
        own = [f"--config.{change}" for change in own if not change.startswith("unroll_max_layers=")]
        variants.append(make_variant(name, [*shared, *own], unroll[0] if unroll else default))
    for _ in range(1 + arguments.rounds):
        for variant in variants:
            measure(variant)
    first = variants[0]
    for variant in variants:
        log_probs = compared(variant.log_probs_s[1:], first.log_probs_s[1:])
        update = compared(variant.update_s[1:], first.update_s[1:])
        print(f"{variant.name}: log-probs {log_probs}, update {update}", flush=True)
    if arguments.profile:
        show_profile(first)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
