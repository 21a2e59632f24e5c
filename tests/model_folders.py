"""Small model folders on disk, and ways to spoil them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from factories import random_params, tiny_model
from safetensors.numpy import load_file, save_file

from jaxprorl.models import hf
from jaxprorl.models.qwen2 import Qwen2Config
from jaxprorl.sharding.mesh import make_mesh, param_shardings

MODELS = {"tied": tiny_model(), "untied": tiny_model(tie_word_embeddings=False, rope_theta=1e6, rms_norm_eps=1e-5, head_dim=16)}


def shardings(c: Qwen2Config, strategy: str = "dp") -> dict[str, Any]:
    return param_shardings(c, make_mesh(strategy), strategy)


def written(folder: Path, c: Qwen2Config, **options: Any) -> Path:
    """`folder`/model, with random parameters and a file that stands for a tokenizer."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(exist_ok=True)
    (tokenizer / "tokenizer.json").write_text("{}")
    hf.write_folder(folder / "model", c, random_params(c), tokenizer, stop_ids=(2, 1), pad_id=0, **options)
    return folder / "model"


def edit_json(path: Path, **changes: Any) -> None:
    """Sets fields of a JSON object; a value of None removes the field."""
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))


def edit_tensors(folder: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Sets tensors of model.safetensors; None removes the tensor."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, path)


def split_in_two(folder: Path, first: int = 5) -> list[str]:
    """Replaces model.safetensors by two files, without an index; returns the keys, of which the first file has the first ones."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    keys = sorted(tensors)
    save_file({key: tensors[key] for key in keys[:first]}, folder / "model-00001-of-00002.safetensors")
    save_file({key: tensors[key] for key in keys[first:]}, folder / "model-00002-of-00002.safetensors")
    return keys


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
