"""Parameters as a Hugging Face folder: safetensors files of bounded size, written tensor by tensor."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxprorl.errors import ModelError
from jaxprorl.files import new_folder
from jaxprorl.models.hf.config import config_json
from jaxprorl.models.hf.names import hf_keys, hf_shape, is_stacked
from jaxprorl.models.qwen2 import Qwen2Config, declarations
from jaxprorl.units import size_text

DTYPES = {"float32": "F32", "bfloat16": "BF16"}
CHECKED_VALUES = 1 << 20  # looked at together for overflow
SHARD_BYTES = 5_000_000_000  # per file, the size that model hubs recommend
# What goes along with the tokenizer's folder; anything else there is not the model's.
COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor to be written."""

    key: str
    shape: tuple[int, ...]
    bytes: int


def write_folder(
    folder: str | Path,
    c: Qwen2Config,
    params: Mapping[str, Any],
    tokenizer_folder: str | Path,
    stop_ids: tuple[int, ...],
    pad_id: int,
    bos_id: int | None = None,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    shard_bytes: int = SHARD_BYTES,
    texts: Mapping[str, str] | None = None,
    replace: bool = True,
) -> None:
    """Writes an ordinary model folder, which is there whole or not at all.

    Args:
        params: asked for each parameter once, in the order of their declaration. The host holds one tensor of one layer at a time.
        tokenizer_folder: its tokenizer, chat template and generation config are copied.
        dtype: of the tensors; float32 to bfloat16 rounds to nearest, ties to even.
        shard_bytes: a file grows no larger, unless a single tensor is.
        texts: further files, name -> content.
        replace: an older folder is replaced; else the folder must be missing or empty, before and after the writing.

    Raises:
        ModelError: the folder cannot be written, e.g. because the disk is full or it holds something that stays. Nothing is left of it
            then; an older one stays.
    """
    target = Path(folder).resolve()  # behind a link, where the space is
    try:
        with new_folder(target, replace=replace, last="config.json") as scratch:
            write_files(scratch, c, params, tokenizer_folder, stop_ids, pad_id, bos_id, dtype=dtype, shard_bytes=shard_bytes, texts=texts)
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error}") from error


def write_files(
    folder: Path,
    c: Qwen2Config,
    params: Mapping[str, Any],
    tokenizer_folder: str | Path,
    stop_ids: tuple[int, ...],
    pad_id: int,
    bos_id: int | None = None,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    shard_bytes: int = SHARD_BYTES,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Writes the files of a model into a folder that is there, which may hold the tokenizer already. Arguments as of `write_folder`.

    Raises:
        OSError: they cannot be written.
    """
    shards = plan_shards(c, dtype, shard_bytes)
    needed, free = sum(entry.bytes for entries in shards.values() for entry in entries), shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(f"it needs {size_text(needed)}, {size_text(free)} are free")
    for name in COPIED:
        source = Path(tokenizer_folder) / name
        if source.is_file() and source.parent != folder:
            shutil.copy(source, folder / name)
    _write_tensors(folder, shards, tensors(c, params, dtype), dtype)
    everything = {"config.json": json.dumps(config_json(c, dtype, stop_ids, pad_id, bos_id), indent=2) + "\n"} | dict(texts or {})
    for name, text in everything.items():
        (folder / name).write_text(text, encoding="utf-8")


def plan_shards(c: Qwen2Config, dtype: str, shard_bytes: int) -> dict[str, list[Entry]]:
    """File name -> its tensors, in the order of the declarations, each file as full as `shard_bytes` allows."""
    shards: list[list[Entry]] = [[]]
    for declaration in declarations(c).values():
        shape = hf_shape(declaration)
        size = int(np.prod(shape, dtype=np.int64)) * jnp.dtype(dtype).itemsize
        for key in hf_keys(declaration):
            if shards[-1] and sum(entry.bytes for entry in shards[-1]) + size > shard_bytes:
                shards.append([])
            shards[-1].append(Entry(key, shape, size))
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": entries for number, entries in enumerate(shards, start=1)}


def tensors(c: Qwen2Config, params: Mapping[str, Any], dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Hugging Face key and host array of every tensor, in the order of the declarations."""
    for name, declaration in declarations(c).items():
        array = params[name]
        for layer, key in enumerate(hf_keys(declaration)):
            # Sliced or copied on its devices first: a jax.Array keeps what was once fetched from it as long as it lives.
            part = jax.device_get(array[layer] if is_stacked(declaration) else jnp.copy(array))
            value = np.ascontiguousarray(part.T if declaration.transposed else part)
            yield key, _converted(key, value, dtype)
        del array  # before the next one is asked for, which may be read from a disk only then


def _converted(key: str, value: np.ndarray, dtype: str) -> np.ndarray:
    """The tensor in another dtype.

    Raises:
        ModelError: a finite value is infinite in it, or one was not finite before.
    """
    with np.errstate(over="ignore"):
        converted = value.astype(dtype, copy=False)
    flat = converted.reshape(-1)
    parts = (flat[at : at + CHECKED_VALUES] for at in range(0, flat.size, CHECKED_VALUES))  # a whole copy would take memory
    if not all(np.isfinite(part.astype(np.float32, copy=False)).all() for part in parts):
        wrong = ~np.isfinite(converted.astype(np.float32, copy=False))
        first = tuple(int(at) for at in np.argwhere(wrong)[0])
        place = f"{int(wrong.sum()):,} of {value.size:,} values, the first at {list(first)}: {value[first]}"
        if np.isfinite(value[wrong].astype(np.float64)).all():
            largest = float(jnp.finfo(dtype).max)
            raise ModelError(f"{key}: {place}, overflow in {dtype}, whose largest number is {largest:.4g}; write float32")
        raise ModelError(f"{key}: {place}, are not finite; such a model is broken")
    return converted


def _write_tensors(folder: Path, shards: Mapping[str, list[Entry]], stream: Iterator[tuple[str, np.ndarray]], dtype: str) -> None:
    """The files, and an index if they are several.

    Written here by hand, because the safetensors library wants a whole file's tensors in memory. The format: the header's length
    (8 bytes), the header (JSON, padded), then the tensors without gaps.
    """
    for name, entries in shards.items():
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for entry in entries:
            header[entry.key] = {"dtype": DTYPES[dtype], "shape": entry.shape, "data_offsets": [start, start + entry.bytes]}
            start += entry.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the tensors start aligned
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for entry in entries:
                key, value = next(stream)
                if (key, value.shape, value.nbytes) != (entry.key, entry.shape, entry.bytes):
                    raise ValueError(f"{key} {value.shape} {value.dtype} was planned as {entry}")
                file.write(value.reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        places = {entry.key: name for name, entries in shards.items() for entry in entries}
        total = sum(entry.bytes for entries in shards.values() for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
