"""Programs whose HLO is read: two small ones that are recorded, and the training step itself. Nothing here computes; shapes suffice."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from configs import base
from jaxprorl.batch import batch_shapes, per_sample_shape
from jaxprorl.models.compute import Compute
from jaxprorl.models.qwen2 import Qwen2Config, build, declarations
from jaxprorl.sharding.mesh import make_mesh, moment_shardings, replicated
from jaxprorl.state import abstract_state, state_shardings
from jaxprorl.update import make_log_probs, make_train_step

Program = tuple[Any, tuple[Any, ...]]  # a jitted function and its abstract arguments
QWEN_1P5B = Qwen2Config(151936, 1536, 8960, 28, 12, 2, 128, 1e6, 131072)


@dataclass(frozen=True)
class Workload:
    """A model and the micro-batch that it is trained on."""

    model: Qwen2Config
    rows: int
    row_tokens: int
    dtype: str


WORKLOADS = {
    "1.5b": Workload(QWEN_1P5B, 8, 2048, "bfloat16"),
    # Too many layers to unroll, too many tokens to look up by one-hot products, and float32, as CPU sends no bfloat16.
    "small": Workload(Qwen2Config(4096, 256, 1024, 6, 8, 8, 32, 1e6, 1024), 8, 256, "float32"),
    "untied": Workload(Qwen2Config(4096, 256, 1024, 6, 8, 8, 32, 1e6, 1024, tie_word_embeddings=False), 8, 256, "float32"),
}


def kinds(devices: list[jax.Device]) -> Program:
    """Six kinds of collectives, some in loops of 3 x 5 turns, some in one of 6 that counts 2, 5, .. 17; groups of 4, 2 and 8 devices."""
    mesh = Mesh(np.array(devices).reshape(2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    ring = [(i, (i + 1) % 4) for i in range(4)]

    def layer(x_BD: jax.Array, w_DD: jax.Array) -> tuple[jax.Array, None]:
        w_DD = jax.lax.all_gather(w_DD, "fsdp", axis=0, tiled=True)
        return jnp.tanh(x_BD @ w_DD), None

    def micro_batch(x_BD: jax.Array, _: None, weights_LDD: jax.Array) -> tuple[jax.Array, None]:
        x_BD, _ = jax.lax.scan(layer, x_BD, weights_LDD)
        return jax.lax.psum(x_BD, "data"), None

    def turn(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return carry[0] + 3, jnp.sin(jax.lax.ppermute(carry[1], "fsdp", ring))

    def program(weights_LDD: jax.Array, x_BD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        x_BD, _ = jax.lax.scan(partial(micro_batch, weights_LDD=weights_LDD), x_BD, None, length=3)
        _, x_BD = jax.lax.while_loop(lambda carry: carry[0] < 20, turn, (jnp.int32(2), x_BD))
        swapped = jax.lax.all_to_all(x_BD, "fsdp", split_axis=1, concat_axis=0, tiled=True)
        total = jax.lax.cond(x_BD[0, 0] > 0, lambda x: jax.lax.psum(x, ("data", "fsdp")), lambda x: x, x_BD[:1])
        return jax.lax.psum_scatter(x_BD * 2, "fsdp", scatter_dimension=1, tiled=True), swapped, total

    rows, spec = PartitionSpec(("data", "fsdp")), PartitionSpec(None, "fsdp")
    mapped = jax.shard_map(program, mesh=mesh, in_specs=(spec, rows), out_specs=(rows, rows, rows), check_vma=False)
    weights = jax.ShapeDtypeStruct((5, 128, 128), "float32", sharding=NamedSharding(mesh, spec))
    return jax.jit(mapped), (weights, jax.ShapeDtypeStruct((64, 128), "float32", sharding=NamedSharding(mesh, rows)))


def layers(devices: list[jax.Device]) -> Program:
    """Gradients of five layers over two micro-batches, all loops: weights [5, 256, 512] and [5, 512, 256] split over eight devices."""
    mesh = Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))

    def layer(x_BD: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        return x_BD + jnp.tanh(x_BD @ w["up_DF"]) @ w["down_FD"], None

    def loss(weights: dict[str, jax.Array], x_BD: jax.Array) -> jax.Array:
        body = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
        return jnp.sum(jax.lax.scan(body, x_BD, weights)[0] ** 2)

    def step(weights: dict[str, jax.Array], x_MBD: jax.Array) -> dict[str, jax.Array]:
        def micro_batch(gradients: dict[str, jax.Array], x_BD: jax.Array) -> tuple[dict[str, jax.Array], None]:
            return jax.tree.map(jnp.add, gradients, jax.grad(loss)(weights, x_BD)), None

        return jax.lax.scan(micro_batch, jax.tree.map(jnp.zeros_like, weights), x_MBD)[0]

    shardings = {
        "up_DF": NamedSharding(mesh, PartitionSpec(None, "fsdp", None)),
        "down_FD": NamedSharding(mesh, PartitionSpec(None, None, "fsdp")),
    }
    weights = {
        "up_DF": jax.ShapeDtypeStruct((5, 256, 512), "float32", sharding=shardings["up_DF"]),
        "down_FD": jax.ShapeDtypeStruct((5, 512, 256), "float32", sharding=shardings["down_FD"]),
    }
    rows = jax.ShapeDtypeStruct((2, 512, 256), "float32", sharding=NamedSharding(mesh, PartitionSpec(None, "fsdp")))
    return jax.jit(step, out_shardings=shardings), (weights, rows)


def training(
    devices: list[jax.Device],
    part: str,
    strategy: str,
    sizes: str = "",
    attention: str = "chunked",
    remat: str = "full",
    model: str = "1.5b",
) -> Program:
    """`part` ("train_step" or "log_probs") of an update of two micro-batches, on a mesh of `sizes` like "tensor=2,data=2"."""
    workload = WORKLOADS[model]
    config = base.get_config()
    config.mesh.strategy, config.model.dtype = strategy, workload.dtype
    config.batch.prompts, config.batch.updates, config.rollout.samples_per_prompt = 1, 1, 2 * workload.rows
    config.batch.micro_batch_rows, config.batch.row_tokens = workload.rows, workload.row_tokens
    config.rollout.max_response_tokens = workload.row_tokens - config.rollout.max_prompt_tokens  # each may need a row: two micro-batches
    mesh = make_mesh(strategy, devices, mesh_axes(sizes))
    graphdef = build(workload.model, Compute(workload.dtype, attention, remat=remat, mesh=mesh, strategy=strategy))
    shardings = state_shardings(config, workload.model, mesh)
    declared = declarations(workload.model)
    params = {name: jax.ShapeDtypeStruct(d.shape, d.dtype, sharding=shardings.params[name]) for name, d in declared.items()}
    state, batch = abstract_state(config, params, shardings), batch_shapes(config, mesh, shared=False)
    log_probs = make_log_probs(graphdef, config)
    names = jax.eval_shape(log_probs, state.params, state.reference, batch)[0]
    whole = replicated(mesh)
    if part == "log_probs":
        rows = dict.fromkeys(names, batch["mask"].sharding)
        return jax.jit(log_probs, out_shardings=(rows, whole)), (state.params, state.reference, batch)
    train_step = make_train_step(graphdef, config, shardings.params, moment_shardings(workload.model, mesh, strategy))
    step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, whole))
    return step, (state, batch, dict.fromkeys(names, batch["mask"]), per_sample_shape(config, mesh))


def mesh_axes(sizes: str) -> dict[str, int]:
    """The mesh sizes that "tensor=2,data=2" names."""
    return {axis: int(size) for axis, size in (pair.split("=") for pair in sizes.split(",") if pair)}
