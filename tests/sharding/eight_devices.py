"""On eight CPU devices: initialisation, log-probs, one training step, reset and restores under every strategy, and some engines.

Run by test_strategies.py in a process of its own: `python tests/sharding/eight_devices.py FOLDER` writes FOLDER/NAME.npz for every entry
of CASES, and FOLDER/engine_NAME.npz for those of ENGINES.
"""

# ruff: noqa: E402 -- devices are counted before anything of ours is imported

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import jax
import numpy as np
import optax
from factories import QUICK_COMPILE, make_prompt, random_groups, random_params, tiny_config, tiny_model

from jaxprorl import update
from jaxprorl.batch import batch_advantages, device_batch
from jaxprorl.checkpoint import Checkpoints, Host, restore_state
from jaxprorl.models.compute import Compute
from jaxprorl.models.qwen2 import build, init_params
from jaxprorl.resets.optimizer import reset
from jaxprorl.rollout.engine import Sampling
from jaxprorl.rollout.jax_engine import JaxEngine
from jaxprorl.sharding.collectives import read_collectives
from jaxprorl.sharding.mesh import make_mesh, moment_shardings, param_shardings, replicated
from jaxprorl.sharding.strategies import AXES, BATCH_AXES, FSDP, STRATEGIES, WHOLE, Strategy
from jaxprorl.state import RunState, TrainState, state_shardings

# Eight key-value heads, so that they split over a tensor axis; more query heads than that.
MODEL = tiny_model(num_attention_heads=16, num_key_value_heads=8, head_dim=4, hidden_size=32, intermediate_size=64, vocab_size=48)
FEW_HEADS = tiny_model(num_attention_heads=8, num_key_value_heads=2, head_dim=4)  # fewer key-value heads than a tensor axis of 4

OWN = Strategy(params={**WHOLE, "mlp": "fsdp"}, moments=FSDP, fills="fsdp")  # that of docs/sharding.md, "A strategy of your own"

# name -> strategy, mesh sizes, attention, model, devices
CASES: dict[str, tuple[str, dict[str, int], str, Any, int]] = {
    "one": ("dp", {}, "naive", MODEL, 1),
    "dp": ("dp", {}, "naive", MODEL, 8),
    "fsdp": ("fsdp", {}, "chunked", MODEL, 8),
    "fsdp_in_dp": ("fsdp", {"data": 2}, "naive", MODEL, 8),
    "zero1": ("zero1", {}, "chunked", MODEL, 8),
    "zero1_in_dp": ("zero1", {"data": 2}, "naive", MODEL, 8),
    "own": ("own", {}, "naive", MODEL, 8),
    "tp": ("tp", {}, "naive", MODEL, 8),
    "fsdp_tp": ("fsdp_tp", {"tensor": 2}, "chunked", MODEL, 8),
    "fsdp_cp": ("fsdp_cp", {"context": 4}, "chunked", MODEL, 8),
    "fsdp_cp_naive": ("fsdp_cp", {"context": 2}, "naive", MODEL, 8),
    "few_heads_one": ("dp", {}, "naive", FEW_HEADS, 1),
    "few_heads_tp": ("fsdp_tp", {"tensor": 4}, "chunked", FEW_HEADS, 8),
    "few_heads_tp_naive": ("fsdp_tp", {"tensor": 4}, "naive", FEW_HEADS, 8),
    "one_shared": ("dp", {}, "naive, prompts shared", MODEL, 1),
    "zero1_shared": ("zero1", {}, "naive, prompts shared", MODEL, 8),
    "tp_shared": ("tp", {}, "naive, prompts shared", MODEL, 8),
    "fsdp_cp_shared": ("fsdp_cp", {"context": 2}, "naive, prompts shared", MODEL, 8),
}
ENGINES = ("one", "dp", "fsdp", "zero1", "own", "tp", "fsdp_tp", "fsdp_cp", "few_heads_one", "few_heads_tp")

# A checkpoint of each strategy is restored under the next, the last one's under the first, with these sizes.
RING = {"dp": {}, "fsdp": {}, "zero1": {}, "tp": {}, "fsdp_cp": {"context": 4}, "fsdp_tp": {"tensor": 2}, "own": {}}


def config_of(strategy: str) -> Any:
    """Two updates, each of two packed micro-batches of unequal lengths; run with `sgd`."""
    changes = {"batch__prompts": 12, "batch__micro_batch_rows": 8, "batch__row_tokens": 32, "rollout__slots": 32}
    return tiny_config(mesh__strategy=strategy, algorithm__kl_coefficient=0.1, **changes)


def sgd(_: Any) -> optax.GradientTransformation:
    """Instead of Adam, whose first steps would compare the gradients' signs."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9), optax.scale_by_schedule(lambda count: -0.05))


def place(model: Any, strategy: str, mesh: Any) -> tuple[TrainState, TrainState]:
    """The start state in its shardings, and the shardings; the reference is not the policy."""
    config = config_of(strategy)
    shardings = state_shardings(config, model, mesh)
    params = random_params(model)
    reference = params | {"o_kernel": 0.9 * params["o_kernel"]}
    state = TrainState(params, reference, sgd(config).init(jax.tree.map(np.asarray, params)))
    return jax.device_put(state, shardings), shardings


def run(name: str, folder: Path) -> dict[str, np.ndarray]:
    """Everything that must not depend on the strategy."""
    strategy, sizes, attention, model, count = CASES[name]
    config, mesh = config_of(strategy), make_mesh(strategy, jax.devices()[:count], sizes)
    state, shardings = place(model, strategy, mesh)
    attention, _, shared = attention.partition(", ")
    compute = Compute("float32", attention, 8, "none", mesh, strategy, shared_prompts=bool(shared))
    graphdef, groups = build(model, compute), random_groups(config.batch.prompts)
    batch = device_batch(config, groups, mesh, bool(shared))
    jit = partial(jax.jit, compiler_options=QUICK_COMPILE)
    fixed, kl_sum_PN = jit(update.make_log_probs(graphdef, config))(state.params, state.reference, batch)
    step = update.make_train_step(graphdef, config, param_shardings(model, mesh, strategy), moment_shardings(model, mesh, strategy))
    advantage_PN = batch_advantages(config, groups, 0, kl_sum_PN)
    state, metrics = jit(step, out_shardings=(shardings, replicated(mesh)))(state, batch, fixed, advantage_PN)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), name
    found = {f"metrics.{key}": value for key, value in metrics.items()} | {f"params.{key}": value for key, value in state.params.items()}
    found |= {f"fixed.{key}": value for key, value in fixed.items()} | {"kl_sum_PN": kl_sum_PN, "micro_batches": batch["micro_batches"]}
    found |= {f"moments.{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree.leaves_with_path(state.opt_state)}

    fresh = jit(lambda state: reset(state, config), out_shardings=shardings)(state)
    found |= {f"reset.{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree.leaves_with_path(fresh)}
    fresh_params = jit(partial(init_params, model, 3), out_shardings=shardings.params)()
    for key, value in fresh_params.items():
        assert value.sharding.is_equivalent_to(shardings.params[key], value.ndim), (name, key)
    found |= {f"init.{key}": value for key, value in fresh_params.items()}
    if count == 8 and not shared:  # saved, restored under another strategy, saved again, restored on four devices, on one, and as it was
        after = [*RING, *RING][list(RING).index(strategy) + 1]
        others = ((after, 8, RING[after]), ("fsdp", 4, {}), ("dp", 1, {}), (strategy, 8, sizes))
        for number, (s, devices, axes) in enumerate(others):
            target = state_shardings(config_of(s), model, make_mesh(s, jax.devices()[:devices], axes))
            place_ = folder / f"{name}_{number}"
            with Checkpoints(place_, config) as checkpoints:
                checkpoints.save(state, Host(RunState(step=1), {"metrics": 0, "events": 0}, {}))
            shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, target)
            again = restore_state(place_, 1, shapes)
            for old, new, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(again), jax.tree.leaves(target), strict=True):
                np.testing.assert_array_equal(old, new, err_msg=name)
                assert len(new.sharding.device_set) == devices
                assert new.sharding.is_equivalent_to(sharding, new.ndim), name
            state = again
    return {key: np.asarray(value) for key, value in found.items()}


def sample(name: str) -> dict[str, np.ndarray]:
    """What the embedded engine samples with weights laid out by the strategy, before and after a swap, by prompt and sample."""
    strategy, sizes, _, model, count = CASES[name]
    config, mesh = config_of(strategy), make_mesh(strategy, jax.devices()[:count], sizes)
    weights = [jax.device_put(random_params(model, seed), param_shardings(model, mesh, strategy)) for seed in (0, 1)]
    config.evaluation.temperature, config.evaluation.top_k = 0.7, 5
    engine, found = JaxEngine(config, model, mesh, (9,)), {}
    engine.compile(weights[0], [4, 1] if name == "fsdp_tp" else [4])
    wait_for_nobody_else(engine)
    for version, params in enumerate(weights):
        held = sum(array.nbytes for array in jax.live_arrays())
        engine.set_weights(params, version)
        assert sum(array.nbytes for array in jax.live_arrays()) <= held, name  # shared: a swap makes no array
        # One prompt's samples lie in one shard, the others have nothing to do: whoever waits for them waits for ever.
        lone = engine.generate([make_prompt(5, range(1, 7))], Sampling(samples=4, temperature=1.0, seed=3, step=5))
        apart = {c.sample: c for c in lone}
        prompts = [make_prompt(i, range(1, 2 + i)) for i in range(6)]
        for c in engine.generate(prompts, Sampling(samples=4, temperature=1.0, seed=3, step=5)):
            assert c.version_spans == ((version, 0, len(c.token_ids)),)
            place = f"{version}.{c.prompt_id}.{c.sample}"
            if c.prompt_id == 5:
                np.testing.assert_array_equal(c.token_ids, apart[c.sample].token_ids)
            found |= {f"tokens.{place}": c.token_ids, f"logprobs.{place}": c.logprobs}
        for array, before in zip(jax.tree.leaves(params), jax.tree.leaves(random_params(model, version)), strict=True):
            np.testing.assert_array_equal(array, before)  # nor is one taken over
    return found


def wait_for_nobody_else(engine: JaxEngine) -> None:
    """Shards end their decode steps apart: no collective of these may reach beyond one, as a permutation does for XLA on CPUs."""
    sizes = engine.mesh.shape
    devices = np.arange(engine.mesh.size).reshape([sizes[axis] for axis in AXES])
    devices = np.moveaxis(devices, [AXES.index(axis) for axis in BATCH_AXES], [0, 1]).reshape(sizes["data"] * sizes["fsdp"], -1)
    shard_of = {int(device): shard for shard, row in enumerate(devices) for device in row}
    for executables in engine._executables.values():
        for executable in executables.decode.values():
            for collective in read_collectives(executable.as_text(), unknown_trips=1):
                apart = all(len({shard_of[device] for device in group}) == 1 for group in collective.groups)
                inside = any("while" in loop.op_name for loop in collective.loops)
                assert not inside or (apart and collective.kind in ("all-reduce", "all-gather", "reduce-scatter")), collective


def main(folder: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    update.make_optimizer = sgd  # type: ignore[assignment]
    import jaxprorl.resets.optimizer
    import jaxprorl.state

    jaxprorl.state.make_optimizer = jaxprorl.resets.optimizer.make_optimizer = sgd  # type: ignore[assignment]
    STRATEGIES["own"] = OWN
    for name in CASES:
        np.savez(folder / f"{name}.npz", **run(name, folder))
    for name in ENGINES:
        np.savez(folder / f"engine_{name}.npz", **sample(name))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
