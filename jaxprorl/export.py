"""The policy of a run as an ordinary model folder, with a card that says where it comes from."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxprorl import commit, storage
from jaxprorl.checkpoint import newest_sound_step, read_host, restore_params
from jaxprorl.config import to_json
from jaxprorl.data.tokenizer import Tokenizer, load_tokenizer
from jaxprorl.errors import CheckpointError, ModelError
from jaxprorl.evaluation.statistics import gain_rows
from jaxprorl.files import contents
from jaxprorl.models import hf
from jaxprorl.models.hf.writer import SHARD_BYTES
from jaxprorl.models.qwen2 import Qwen2Config, parameter_count
from jaxprorl.resets.optimizer import what_is_reset
from jaxprorl.run_folder import FREE_FIELDS, RunFolder
from jaxprorl.sharding.mesh import make_mesh, param_shardings
from jaxprorl.start import abstract_params
from jaxprorl.state import RunState

Dtype = Literal["float32", "bfloat16"]
# What a run with model.path does not read: the shape and the making of a start model of its own.
OF_WARM_START = ("warmstart.", *(f"model.{field.name}" for field in dataclasses.fields(Qwen2Config)))


@dataclass(frozen=True)
class Exported:
    """What was written: of which step, and which newer checkpoints were passed over because they are damaged."""

    step: int
    damaged: list[str]


class StoredParams(Mapping[str, jax.Array]):
    """The parameters of a checkpoint, each read from the disk when it is asked for and not kept.

    Raises:
        CheckpointError: from the look-up; the checkpoint cannot be read, or holds values that are not finite.
    """

    def __init__(self, checkpoints: Path, step: int, c: Qwen2Config):
        self._checkpoints, self._step = checkpoints, step
        shardings = param_shardings(c, make_mesh("dp", jax.devices()[:1]), "dp")
        self._abstract = abstract_params(c, shardings)

    def __getitem__(self, name: str) -> jax.Array:
        array = restore_params(self._checkpoints, self._step, {name: self._abstract[name]})[name]
        # A sum is finite only if all of its terms are, and takes no memory; one that overflows is looked at value by value.
        if not jnp.isfinite(array.sum()) and not jnp.isfinite(array).all():
            raise CheckpointError(f"checkpoint step {self._step} in {self._checkpoints}: {name} holds values that are not finite")
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._abstract)

    def __len__(self) -> int:
        return len(self._abstract)


def export(run: Path, step: int | None, output: Path, dtype: Dtype, shard_bytes: int = SHARD_BYTES) -> Exported:
    """Writes a checkpoint's policy to `output`, a folder that transformers and vLLM load as it is.

    Args:
        step: of the checkpoint; None = the newest undamaged one.
        shard_bytes: size that no file exceeds, unless a single tensor does.

    Raises:
        CheckpointError: no such run or checkpoint, or it is damaged.
        ModelError: `output` holds something, or cannot be written.
    """
    folder = RunFolder(run)
    if not os.path.isfile(folder.config) or not folder.checkpoints.is_dir():
        raise CheckpointError(f"--run {run}: no run there, or nothing saved yet (config.json and checkpoints/ are needed)")
    if output.resolve() == Path.cwd():
        raise ModelError(f"--output {output} is the folder you are in, which would be replaced; give a new one")
    if contents(output.resolve()):
        raise ModelError(f"--output {output} is there already and not empty; give another folder, or remove it")
    if reason := storage.unwritable(output):
        raise ModelError(f"--output {output} cannot be written: {reason}; allow writing there, or give another folder")
    damaged: list[str] = []
    if step is None:
        step, damaged = newest_sound_step(folder.checkpoints, "previous")
        if step is None:
            raise CheckpointError(f"--run {run}: no checkpoint yet; the first is written after checkpoint.every_steps steps")
    elif problem := commit.damage(folder.checkpoints, step):
        there = ", ".join(map(str, commit.committed_steps(folder.checkpoints)))
        raise CheckpointError(f"--step {step}: {problem} (checkpoints: {there or 'none'})")
    config = ConfigDict(json.loads(folder.config.read_text(encoding="utf-8")))
    model_config, tokenizer = hf.read_config(folder.base_model), load_tokenizer(folder.base_model)
    params = StoredParams(folder.checkpoints, step, model_config)
    state = read_host(folder.checkpoints, step).run
    scores = _scores(folder, step)
    write_model(output, folder, config, model_config, params, tokenizer, state, scores, dtype, shard_bytes, replace=False)
    return Exported(step, damaged)


def write_model(
    output: Path,
    folder: RunFolder,
    config: ConfigDict,
    model_config: Qwen2Config,
    params: Mapping[str, Any],
    tokenizer: Tokenizer,
    state: RunState,
    scores: Mapping[str, Any],
    dtype: Dtype = "float32",
    shard_bytes: int = SHARD_BYTES,
    replace: bool = True,
) -> None:
    """Writes a model folder of a run's policy, with its card. Raises as `hf.write_folder` does.

    Args:
        folder: of the run; tokenizer and generation config are copied from its base model.
        state: steps and resets behind these parameters.
        scores: see `model_card`.
        replace: an older folder is replaced; else `output` must be missing or empty.
    """
    card = model_card(config, parameter_count(model_config), state, scores, dtype)
    hf.write_folder(
        output, model_config, params, folder.base_model, tokenizer.stop_ids, tokenizer.pad_id, tokenizer.bos_id,
        dtype=dtype, shard_bytes=shard_bytes, texts={"README.md": card} | _generation_config(folder.base_model, tokenizer),
        replace=replace,
    )  # fmt: skip


def _generation_config(base_model: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """The start model's file where it names no stop token, with the run's: transformers looks nowhere else, and would never stop."""
    path = base_model / "generation_config.json"
    if not path.is_file():
        return {}  # transformers makes one from config.json
    fields = json.loads(path.read_text(encoding="utf-8"))
    if fields.get("eos_token_id") is not None:
        return {}
    return {path.name: json.dumps(fields | {"eos_token_id": list(tokenizer.stop_ids)}, indent=2) + "\n"}


def model_card(config: ConfigDict, parameters: int, state: RunState, scores: Mapping[str, Any], dtype: Dtype) -> str:
    """README.md of an exported model: base, steps, resets, scores before and after with intervals, and the config.

    Args:
        parameters: their number.
        scores: results of `solve_summary` (or these parts of summary.json) under "before" and "after"; empty if this policy has none.
    """
    # What stages reset at their starts is in the config below.
    resets = "resets" if config.stages else f"resets of {what_is_reset(config.resets.reference, config.resets.optimizer)}"
    base = f"`{config.model.path}`" if config.model.path else "the run's own warm-start model"
    lines = [
        "---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- jaxprorl", "- reinforcement-learning", "---", "",
        f"# {config.run_name}, step {state.step}", "",
        "Trained with jaxprorl by prolonged reinforcement learning ([ProRL](https://arxiv.org/abs/2507.12507)).", "",
        "| | |", "| --- | --- |",
        f"| base model | {base} |",
        f"| RL steps | {state.step:,} |",
        f"| {resets} | {state.resets:,} |",
        f"| sampled tokens | {state.completion_tokens:,} |",
        f"| parameters | {parameters:,} |",
        f"| tensors | {dtype} |",
        f"| seed | {config.seed} |",
        "", "## Held-out items solved", "",
    ]  # fmt: skip
    if scores:
        how = f"One sample each at temperature {config.evaluation.temperature:g}, 95 % Wilson intervals"
        lines += [
            f"{how}, scored by `{config.evaluation.reward or config.reward}`.", "",
            "| task | items | before RL | after |", "| --- | --- | --- | --- |",
            *(
                f"| {row.task} | {row.n:,} | {_rate(row.before, row.before_ci95, row.ungraded[0])} "
                f"| {_rate(row.after, row.after_ci95, row.ungraded[1])} |"
                for row in gain_rows(scores["before"], scores["after"])
            ),
        ]  # fmt: skip
    else:
        lines.append("Not measured for this step.")
    left_out = FREE_FIELDS + (OF_WARM_START if config.model.path else ())
    fields = [f"{name} = {json.dumps(value)}" for name, value in _flat(json.loads(to_json(config))) if not name.startswith(left_out)]
    lines += ["", "## Config", "", "<details><summary>the fields that the result depends on</summary>", "", "```", *fields, "```", ""]
    return "\n".join([*lines, "</details>", ""])


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _rate(rate: float | None, interval: tuple[float, float] | None, ungraded: int) -> str:
    told = "none" if rate is None or interval is None else f"{rate:.1%} [{interval[0]:.1%}, {interval[1]:.1%}]"
    return f"{told}, {ungraded} ungraded" if ungraded else told


def _scores(folder: RunFolder, step: int) -> dict[str, Any]:
    """Before and after of a finished run, if `step` is the policy that was measured."""
    summary = json.loads(folder.summary.read_text(encoding="utf-8")) if folder.summary.is_file() else {}
    return {name: summary[name] for name in ("before", "after")} if summary.get("steps") == step else {}
