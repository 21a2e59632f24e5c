"""Hugging Face folders in and out: config.json and safetensors, mapped through the declaration table."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxprorl.errors import ModelError
from jaxprorl.models.qwen2 import Declaration, Params, Qwen2Config, declarations

ARCHITECTURE = "Qwen2ForCausalLM"


def read_config(folder: str | Path) -> Qwen2Config:
    """The model's shape from config.json, in transformers' form before or after version 5.

    Raises:
        ModelError: no such file, another architecture or activation, rope scaling, sliding windows or a missing field.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelError(f"{path} does not exist; a Hugging Face model folder holds config.json, *.safetensors and tokenizer.json")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} is not a JSON object")
    if ARCHITECTURE not in (raw.get("architectures") or []):
        raise ModelError(f"{path}: architectures = {raw.get('architectures')}, only {ARCHITECTURE} is supported")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ModelError(f"{path}: rope scaling {rope} is not supported, only plain rotary embeddings are")
    if raw.get("use_sliding_window", False):
        raise ModelError(f"{path}: use_sliding_window = true is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: hidden_act = {raw['hidden_act']!r} is not supported, only 'silu' is")
    try:
        return Qwen2Config(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=raw["num_attention_heads"],
            num_key_value_heads=raw["num_key_value_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            rope_theta=float(raw["rope_theta"] if "rope_theta" in raw else rope["rope_theta"]),
            max_position_embeddings=raw["max_position_embeddings"],
            rms_norm_eps=raw["rms_norm_eps"],
            tie_word_embeddings=raw["tie_word_embeddings"],
        )
    except KeyError as error:
        raise ModelError(f"{path} has no field {error}") from None


def config_json(c: Qwen2Config, stop_ids: tuple[int, ...], pad_id: int) -> dict[str, Any]:
    """The content of config.json, readable by transformers 4 and 5 and by vLLM."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen2",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "rope_theta": c.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "max_position_embeddings": c.max_position_embeddings,
        "rms_norm_eps": c.rms_norm_eps,
        "tie_word_embeddings": c.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": list(stop_ids),
        "pad_token_id": pad_id,
    }


def read_params(folder: str | Path, c: Qwen2Config, shardings: Mapping[str, Any]) -> Params:
    """Reads *.safetensors into float32 parameters, each placed in its sharding. Every key is used exactly once.

    Raises:
        ModelError: unreadable file; missing, left-over, doubled, wrongly shaped or not finite tensors, by name.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors file")
    where: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                keys = list(tensors.keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from None
        twice = sorted(where.keys() & set(keys))
        if twice:
            raise ModelError(f"{file}: {twice[0]} is in {where[twice[0]]} too; remove the file that does not belong to the model")
        where |= dict.fromkeys(keys, file)
    table = declarations(c)
    wanted = {key for declaration in table.values() for key in hf_keys(declaration)}
    missing, left_over = sorted(wanted - set(where)), sorted(set(where) - wanted)
    if missing or left_over:
        raise ModelError(
            f"{folder}: missing tensors {missing[:8]}, unknown tensors {left_over[:8]} (tie_word_embeddings = {c.tie_word_embeddings})"
        )
    params = {}
    for name, declaration in table.items():
        parts = []
        for key in hf_keys(declaration):
            with safe_open(where[key], framework="numpy") as tensors:
                value = np.asarray(tensors.get_tensor(key), np.float32)
            value = value.T if declaration.transposed else value
            expected = declaration.shape[1:] if is_stacked(declaration) else declaration.shape
            if value.shape != expected:
                raise ModelError(f"{where[key]}: {key} has shape {value.shape}, config.json implies {expected}")
            if not np.isfinite(value).all():
                raise ModelError(f"{where[key]}: {key} holds values that are not finite")
            parts.append(value)
        params[name] = jax.device_put(np.stack(parts) if is_stacked(declaration) else parts[0], shardings[name])
    return params


def write_folder(
    folder: str | Path, c: Qwen2Config, params: Params, tokenizer_folder: str | Path, stop_ids: tuple[int, ...], pad_id: int
) -> None:
    """Writes an ordinary model folder (float32): written beside the target, then renamed into place."""
    target = Path(folder)
    aside = target.with_name(f"{target.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for file in sorted(Path(tokenizer_folder).iterdir()):
        if file.is_file() and not re.fullmatch(r"config\.json|.*\.safetensors(\.index\.json)?", file.name):
            shutil.copy(file, aside / file.name)
    tensors = {}
    for name, declaration in declarations(c).items():
        value = np.asarray(jax.device_get(params[name]), np.float32)
        for key, part in zip(hf_keys(declaration), value if is_stacked(declaration) else [value], strict=True):
            tensors[key] = np.ascontiguousarray(part.T if declaration.transposed else part)
    save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
    (aside / "config.json").write_text(json.dumps(config_json(c, stop_ids, pad_id), indent=2) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)


def is_stacked(declaration: Declaration) -> bool:
    """True when the parameter stacks one Hugging Face tensor per layer."""
    return declaration.axes[0] == "layers"


def hf_keys(declaration: Declaration) -> list[str]:
    """Hugging Face keys of a parameter, in layer order."""
    layers = declaration.shape[0] if is_stacked(declaration) else 1
    return [declaration.hf_name.format(layer=layer) for layer in range(layers)]
