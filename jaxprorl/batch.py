"""From a rollout batch to the arrays of the training step."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxprorl.algorithms.advantages import advantages
from jaxprorl.algorithms.kl import in_reward_kl
from jaxprorl.algorithms.losses import aggregation_weights
from jaxprorl.packing import Sample, assign_rows, assign_shared_rows, pack
from jaxprorl.rollout.groups import graded, response_tokens, shaped
from jaxprorl.sharding.mesh import replicated, token_sharding
from jaxprorl.sizes import rows_per_update
from jaxprorl.types import Group
from jaxprorl.update import Batch

INT_NAMES = ("tokens", "targets", "positions", "segment_ids", "sequence")
FLOAT_NAMES = ("mask", "engine_logp")


def int_names(shared: bool) -> tuple[str, ...]:
    """The integer arrays of a batch, [U, M, B, S]."""
    return (*INT_NAMES, "context_ids") if shared else INT_NAMES


def micro_batches_per_update(config: ConfigDict, shared: bool) -> int:
    """M: enough micro-batches for the largest mini-batch of the longest sequences."""
    return -(-rows_per_update(config, shared) // config.batch.micro_batch_rows)


def batch_shapes(config: ConfigDict, mesh: Mesh, shared: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of a batch, for compilation; see `host_batch`."""
    updates, whole = config.batch.updates, replicated(mesh)
    shape = (updates, micro_batches_per_update(config, shared), config.batch.micro_batch_rows, config.batch.row_tokens)
    rows = token_sharding(mesh, leading=2)
    arrays = {name: jax.ShapeDtypeStruct(shape, "int32", sharding=rows) for name in int_names(shared)}
    arrays |= {name: jax.ShapeDtypeStruct(shape, "float32", sharding=rows) for name in FLOAT_NAMES}
    return arrays | {
        "micro_batches": jax.ShapeDtypeStruct((updates,), "int32", sharding=whole),
        "denominator": jax.ShapeDtypeStruct((updates,), "float32", sharding=whole),
        "weight_PN": per_sample_shape(config, mesh),
    }


def per_sample_shape(config: ConfigDict, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Shape and sharding of one number per sample, [P, N]."""
    return jax.ShapeDtypeStruct((config.batch.prompts, config.rollout.samples_per_prompt), "float32", sharding=replicated(mesh))


def host_batch(config: ConfigDict, groups: Sequence[Group], shared: bool) -> dict[str, np.ndarray]:
    """Packs groups into mini-batches of nearly equal numbers of groups, in prompt order. Samples that do not count are left out.

    Args:
        groups: at most `batch.prompts`; with fewer than `batch.updates`, some updates stay empty.
        shared: a row holds a group's prompt once (`Compute.shared_prompts`).

    Returns:
        [U, M, B, S] arrays of U updates, M micro-batches of B rows: `int_names`, where `sequence` is a response token's sample as
        p * N + n, and FLOAT_NAMES; `micro_batches` [U], how many of the M are in use; `weight_PN`, of each response token of a sample in
        the loss, and `denominator` [U], what the weighted sum is divided by.
    """
    updates, rows, row_tokens = config.batch.updates, config.batch.micro_batch_rows, config.batch.row_tokens
    capacity, n = micro_batches_per_update(config, shared), config.rollout.samples_per_prompt
    length_PN = np.zeros((config.batch.prompts, n), np.int64)  # 0 = not trained on
    if groups:
        length_PN[: len(groups)] = response_tokens(groups) * (graded(groups)[1] > 0)
    weight_PN, denominators = np.zeros(length_PN.shape), []
    mini_batches, used = [], []
    for chosen in np.array_split(np.arange(len(groups)), updates):
        numbers = [int(p) * n + sample for p in chosen for sample in range(n) if length_PN[p, sample]]
        samples = [_sample(groups[number // n], number % n, number) for number in numbers]
        if shared:
            layout = assign_shared_rows(samples, row_tokens)
        else:
            layout = assign_rows([sample.tokens for sample in samples], row_tokens, config.batch.packing)
        packed = pack(samples, layout, capacity * rows, row_tokens, ("engine_logp", "sequence"), shared)
        packed["sequence"] = packed["sequence"].astype(np.int32)  # exact: there are fewer than 2^24 samples
        mini_batches.append({name: value.reshape(capacity, rows, row_tokens) for name, value in packed.items()})
        used.append(-(-len(layout) // rows))
        limit = config.rollout.max_response_tokens
        weight_PN[chosen], count_PN = aggregation_weights(config.algorithm.aggregation, length_PN[chosen], limit)
        denominators.append(count_PN.sum())
    arrays = {name: np.stack([batch[name] for batch in mini_batches]) for name in (*int_names(shared), *FLOAT_NAMES)}
    return arrays | {
        "micro_batches": np.array(used, np.int32),
        "denominator": np.array(denominators, np.float32),
        "weight_PN": weight_PN.astype(np.float32),
    }


def device_batch(config: ConfigDict, groups: Sequence[Group], mesh: Mesh, shared: bool) -> Batch:
    """The batch on the devices."""
    return placed(config, host_batch(config, groups, shared), mesh, shared)


def placed(config: ConfigDict, arrays: Mapping[str, np.ndarray], mesh: Mesh, shared: bool) -> Batch:
    """What `host_batch` made, on the devices."""
    return jax.device_put(dict(arrays), {name: shape.sharding for name, shape in batch_shapes(config, mesh, shared).items()})


def packing_metrics(arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
    """How full the rows are that `host_batch` made, by the names of `monitoring.metrics`; nothing of a batch without tokens."""
    _, _, rows, row_tokens = arrays["segment_ids"].shape
    positions = int(arrays["micro_batches"].sum()) * rows * row_tokens  # what updates compute: rows are filled up to whole micro-batches
    held = int(np.count_nonzero(arrays["segment_ids"]))
    return {"tokens.padding_share": 1.0 - held / positions} if positions else {}


def batch_advantages(config: ConfigDict, groups: Sequence[Group], step: int, kl_sum_PN: jax.Array) -> np.ndarray:
    """advantage_PN of a rollout batch, float32 with `batch.prompts` rows; rows beyond the groups are 0.

    Args:
        groups: the groups of the batch.
        step: RL step, which decides what of `config.shaping` is on.
        kl_sum_PN: sums of k1 against the reference over each sample; read (and waited for) only with `algorithm.kl_placement` = "reward".
    """
    advantage_PN = np.zeros((config.batch.prompts, config.rollout.samples_per_prompt), np.float32)
    if groups:
        reward_PN, mask_PN = shaped(config, groups, step)
        if config.algorithm.kl_placement == "reward":
            reward_PN = in_reward_kl(reward_PN, np.asarray(kl_sum_PN, np.float64)[: len(groups)], config.algorithm.kl_coefficient)
        advantage_PN[: len(groups)] = advantages(config.algorithm.advantage, reward_PN, mask_PN, response_tokens(groups))
    return advantage_PN


def _sample(group: Group, sample: int, number: int) -> Sample:
    completion = group.completions[sample]
    tokens = {"engine_logp": completion.logprobs, "sequence": np.full(len(completion.token_ids), number)}
    return Sample(group.prompt.token_ids, completion.token_ids, tokens, group.prompt.prompt_id)
