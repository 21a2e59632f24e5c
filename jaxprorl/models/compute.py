"""How a model is computed: dtype, attention and remat by name, checked against devices and shapes. Nothing here touches JAX."""

import dataclasses
from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from jaxprorl.errors import ConfigError
from jaxprorl.sharding.strategies import BATCH_AXES, CONTEXT_AXIS, STRATEGIES, Table

if TYPE_CHECKING:
    from jax.sharding import Mesh

ATTENTION = ("naive", "chunked", "triton", "splash", "cudnn")
REMAT = ("none", "dots", "attention", "full")  # from most to least memory; see models/remat.py
PLATFORM = {"triton": "gpu", "splash": "tpu", "cudnn": "gpu"}  # the others run anywhere
NAIVE_CPU_TOKENS = 256  # longest rows that `naive` computes as fast as `chunked` on CPUs, of whatever sequences (docs/attention.md)
SHARED_CPU_TOKENS = 640  # the same, of rows with long prompts that samples share: `chunked` would compute those again and again
KERNEL_BLOCK_TOKENS = 128  # rows of `triton` and `splash` are cut into blocks of this length


@dataclasses.dataclass(frozen=True)
class Compute:
    """How the forward and backward pass over packed rows is carried out. Decoding uses `dtype` alone, prefill attention too.

    Attributes:
        dtype: of activations and of the weights in matmuls.
        attention: one of `ATTENTION`.
        attention_chunk_tokens: queries and keys that `chunked` handles at a time.
        remat: one of `REMAT`.
        mesh: what the rows are split over. None = nothing, on a CPU.
        strategy: how parameters are split over it.
        own_rows: inside a shard_map over the mesh already, with whole parameters: the rows are one device's own.
        shared_prompts: rows hold a group's prompt once for all of its samples there.
    """

    dtype: str = "float32"
    attention: str = "naive"
    attention_chunk_tokens: int = 128
    remat: str = "none"
    mesh: "Mesh | None" = None
    strategy: str = "dp"
    own_rows: bool = False
    shared_prompts: bool = False

    @property
    def row_mesh(self) -> "Mesh | None":
        """What the rows at hand are still to be split over; None = nothing."""
        return None if self.own_rows else self.mesh

    @property
    def table(self) -> Table:
        """Logical axis of a parameter -> mesh axis."""
        return STRATEGIES[self.strategy].params

    @property
    def copies_for_gradients(self) -> bool:
        """Whether gradients from copies pay: bfloat16 arrays that are whole, on a CPU. (Only sampling has no mesh on other devices.)"""
        return self.dtype == "bfloat16" and self.platform == "cpu" and (self.own_rows or self.mesh is None or self.mesh.size == 1)

    @property
    def platform(self) -> str:
        """One of "cpu" (also without a mesh), "gpu" and "tpu"."""
        name = "cpu" if self.mesh is None else str(self.mesh.devices.flat[0].platform)
        return "gpu" if name in ("cuda", "rocm") else name


def choose_compute(config: ConfigDict, head_dim: int, mesh: "Mesh") -> Compute:
    """How the RL update computes: what `config.model` asks for, with "auto" made a name.

    Raises:
        ConfigError: these devices or shapes cannot serve it; says what would.
    """
    model, batch = config.model, config.batch
    shards = mesh.shape[BATCH_AXES[0]] * mesh.shape[BATCH_AXES[1]]
    if batch.micro_batch_rows % shards:
        raise ConfigError(f"batch.micro_batch_rows = {batch.micro_batch_rows}: must divide by the {shards} devices that share the rows")
    if model.attention == "auto":
        compute = automatic_compute(config, head_dim, "batch", mesh)
    else:
        compute = Compute(model.dtype, model.attention, model.attention_chunk_tokens, model.remat, mesh, config.mesh.strategy)
        problem = unfit(compute, head_dim, batch.row_tokens, batch.packing)
        if problem:
            raise ConfigError(f"model.attention = {model.attention!r}: {problem}. 'auto' chooses what fits, 'chunked' runs anywhere")
    return dataclasses.replace(compute, shared_prompts=compute.attention == "naive" and _shares_prompts(config))


def _shares_prompts(config: ConfigDict) -> bool:
    return bool(config.batch.share_prompts and config.batch.packing and config.rollout.samples_per_prompt > 1)


def automatic_compute(config: ConfigDict, head_dim: int, section: str, mesh: "Mesh") -> Compute:
    """How to compute rows of any packing, those of `section` ("batch" or "warmstart"): the platform's kernel if shapes fit, else by length.

    A row of one chunk costs `chunked` as much memory as the whole row of scores costs `naive`; a longer one less, and on CPUs time too from
    some length on (docs/attention.md). `naive` also takes parts of rows that chunks do not divide.

    Raises:
        ConfigError: no attention takes rows of this length on this mesh.
    """
    row_tokens, chunk_tokens = config[section].row_tokens, config.model.attention_chunk_tokens
    compute = Compute(config.model.dtype, "chunked", chunk_tokens, config.model.remat, mesh, config.mesh.strategy)
    limits_tokens = [chunk_tokens]
    if compute.platform == "cpu":
        limits_tokens.append(NAIVE_CPU_TOKENS)
        longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
        if section == "batch" and _shares_prompts(config) and 3 * config.rollout.max_prompt_tokens >= longest:
            limits_tokens.append(min(SHARED_CPU_TOKENS, 3 * longest))
    short = row_tokens <= max(limits_tokens)
    for name in ("triton", "splash", *(("naive",) if short else ("chunked", "naive"))):
        chosen = dataclasses.replace(compute, attention=name)
        problem = unfit(chosen, head_dim, row_tokens, packing=True, section=section)
        if not problem:
            return chosen
    raise ConfigError(f"model.attention = 'auto': {problem}")


def unfit(compute: Compute, head_dim: int, row_tokens: int, packing: bool, section: str = "batch") -> str:
    """Why an attention cannot be used for the rows of `section` and what would help; empty if it can."""
    name, devices = compute.attention, compute.platform
    needs = PLATFORM.get(name, devices)
    if needs != devices:
        return f"it runs on {needs.upper()}s only, these devices are {devices.upper()}s"
    cut = 1 if compute.mesh is None else compute.mesh.shape[CONTEXT_AXIS]
    if name in PLATFORM and cut > 1:
        return f"it needs whole rows, and mesh.context = {cut} cuts them; 'chunked' and 'naive' take parts"
    if row_tokens % cut:
        return f"{section}.row_tokens = {row_tokens} does not divide by mesh.context = {cut}; {-(-row_tokens // cut) * cut} does"
    part, chunk = row_tokens // cut, compute.attention_chunk_tokens
    if name == "chunked" and cut > 1 and part % min(chunk, part):
        return f"model.attention_chunk_tokens = {chunk} must divide the {part} tokens of a row that each device has"
    if name == "cudnn" and packing:
        return "it knows no segments, and batch.packing = True puts several sequences into a row; set batch.packing = False"
    if name == "cudnn" and compute.dtype != "bfloat16":
        return f"it needs model.dtype = 'bfloat16', not {compute.dtype!r}"
    if name == "cudnn" and (head_dim % 8 or head_dim > 128):
        return f"it needs heads of a multiple of 8, 128 at most; the model's head_dim is {head_dim}"
    if name == "triton" and head_dim not in (16, 32, 64, 128):
        return f"it needs heads of 16, 32, 64 or 128; the model's head_dim is {head_dim}"
    if name == "splash" and head_dim not in (64, 128, 256):
        return f"it needs heads of 64, 128 or 256; the model's head_dim is {head_dim}"
    if name in ("triton", "splash") and row_tokens % KERNEL_BLOCK_TOKENS:
        rounded = -(-row_tokens // KERNEL_BLOCK_TOKENS) * KERNEL_BLOCK_TOKENS
        return f"{section}.row_tokens = {row_tokens} is no multiple of {KERNEL_BLOCK_TOKENS}, its block; {rounded} is"
    return ""
