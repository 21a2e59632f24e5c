"""From a rollout batch to the arrays of the training step."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxprorl.algorithms.advantages import group_relative
from jaxprorl.packing import Sample, assign_rows, pack
from jaxprorl.rollout.collect import rewards
from jaxprorl.sharding.mesh import batch_sharding, replicated
from jaxprorl.types import Group
from jaxprorl.update import PER_TOKEN, Batch

INT_NAMES = ("tokens", "targets", "positions", "segment_ids")
FLOAT_NAMES = ("mask", *PER_TOKEN)


def micro_batches_per_update(config: ConfigDict) -> int:
    """M: enough micro-batches for the largest mini-batch when every sequence needs a row of its own."""
    groups = -(-config.batch.prompts // config.batch.updates)
    return -(-groups * config.rollout.samples_per_prompt // config.batch.micro_batch_rows)


def batch_shapes(config: ConfigDict, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of a batch, for compilation: [U, M, B, S] arrays and `micro_batches` [U]."""
    shape = (config.batch.updates, micro_batches_per_update(config), config.batch.micro_batch_rows, config.batch.row_tokens)
    rows = batch_sharding(mesh, leading=2)
    arrays = {name: jax.ShapeDtypeStruct(shape, "int32", sharding=rows) for name in INT_NAMES}
    arrays |= {name: jax.ShapeDtypeStruct(shape, "float32", sharding=rows) for name in FLOAT_NAMES}
    return arrays | {"micro_batches": jax.ShapeDtypeStruct(shape[:1], "int32", sharding=replicated(mesh))}


def host_batch(config: ConfigDict, groups: Sequence[Group], advantage_PN: np.ndarray) -> dict[str, np.ndarray]:
    """Packs groups into mini-batches of nearly equal numbers of groups, in prompt order; see `batch_shapes`.

    Args:
        groups: at most `batch.prompts`; with fewer than `batch.updates`, some updates stay empty.
        advantage_PN: one row per group; samples without a score are left out of the batch.
    """
    updates, rows, row_tokens = config.batch.updates, config.batch.micro_batch_rows, config.batch.row_tokens
    capacity = micro_batches_per_update(config)
    mini_batches, used = [], []
    for chosen in np.array_split(np.arange(len(groups)), updates):
        samples = [sample for index in chosen for sample in _samples(groups[int(index)], advantage_PN[index])]
        layout = assign_rows([sample.tokens for sample in samples], row_tokens, config.batch.packing)
        packed = pack(samples, layout, capacity * rows, row_tokens, PER_TOKEN)
        mini_batches.append({name: value.reshape(capacity, rows, row_tokens) for name, value in packed.items()})
        used.append(-(-len(layout) // rows))
    arrays = {name: np.stack([batch[name] for batch in mini_batches]) for name in (*INT_NAMES, *FLOAT_NAMES)}
    return arrays | {"micro_batches": np.array(used, np.int32)}


def device_batch(config: ConfigDict, groups: Sequence[Group], mesh: Mesh) -> tuple[Batch, np.ndarray]:
    """The batch on the devices, and advantage_PN of its groups."""
    samples = config.rollout.samples_per_prompt
    advantage_PN = group_relative(*rewards(list(groups))) if groups else np.zeros((0, samples), np.float32)
    shardings = {name: shape.sharding for name, shape in batch_shapes(config, mesh).items()}
    return jax.device_put(host_batch(config, groups, advantage_PN), shardings), advantage_PN


def _samples(group: Group, advantage_N: np.ndarray) -> list[Sample]:
    samples = []
    for completion, score, advantage in zip(group.completions, group.scores, advantage_N, strict=True):
        if score.outcome == "scored":
            per_token = {"advantage": np.full(len(completion.token_ids), advantage), "engine_logp": completion.logprobs}
            samples.append(Sample(group.prompt.token_ids, completion.token_ids, per_token))
    return samples
