"""The tensors of a Hugging Face folder, streamed into sharded parameters.

Every device's shard is filled chunk by chunk from the part of the file that belongs to it: beside the parameters, the host holds at most
the shards of one (stacked) parameter and one chunk. Pages of the mapped file are the kernel's cache, which it takes back when it needs to.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxprorl.errors import ModelError
from jaxprorl.model_sources import about_tensors, is_lfs_pointer, is_of_macos, lfs_remedy, looked_through, what_it_is
from jaxprorl.models.hf.names import HEAD_KEY, hf_keys, hf_shape, is_stacked
from jaxprorl.models.qwen2 import Declaration, Params, Qwen2Config, declarations

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # each fits into float32 without rounding
CHUNK_BYTES = 4 << 20  # of one read; larger ones are slower, because they leave the processor's cache
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SHOWN = 8  # names in one message


@dataclass(frozen=True)
class Tensor:
    """One tensor as it lies in a file; `view[rows, columns]` reads a part of it."""

    key: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    view: Any


def read_params(folder: str | Path, c: Qwen2Config, shardings: Mapping[str, Any]) -> Params:
    """Reads *.safetensors into parameters, each placed in its sharding. Every key is used exactly once.

    Raises:
        ModelError: no file or an unreadable one, an index that disagrees with the files; missing, left-over, doubled, wrongly shaped,
            quantised or not finite tensors, by name.
    """
    params = {}
    with ExitStack() as stack:
        tensors = _find_tensors(Path(folder), c, stack)
        for name, declaration in declarations(c).items():
            parts = [tensors[key] for key in hf_keys(declaration)]
            array = jax.make_array_from_callback(declaration.shape, shardings[name], partial(_shard, declaration, parts))
            params[name] = jax.block_until_ready(array)  # else the next one's shards are filled while these are still being copied
    return params


def check_tensors(folder: str | Path, c: Qwen2Config) -> dict[str, int]:
    """Reads every value once, keeping none. Returns dtype -> number of scalars. Raises as `read_params` does."""
    counts: dict[str, int] = {}
    with ExitStack() as stack:
        tensors = _find_tensors(Path(folder), c, stack)
        for declaration in declarations(c).values():
            for tensor in (tensors[key] for key in hf_keys(declaration)):
                for _, chunk_32 in _chunks(tensor, [range(size) for size in tensor.shape]):
                    counts[DTYPES[tensor.dtype]] = counts.get(DTYPES[tensor.dtype], 0) + chunk_32.size
    return counts


def check_headers(folder: str | Path, c: Qwen2Config) -> None:
    """Looks at the names, dtypes and shapes of the tensors, and at no value. Raises as `read_params` does."""
    with ExitStack() as stack:
        _find_tensors(Path(folder), c, stack)


def _shard(declaration: Declaration, parts: Sequence[Tensor], index: tuple[slice, ...]) -> np.ndarray:
    """The part of a parameter that one device holds."""
    ranges = [range(*part.indices(size)) for part, size in zip(index, declaration.shape, strict=True)]
    out = _aligned_empty([len(part) for part in ranges], declaration.dtype)
    if is_stacked(declaration):
        for row, layer in zip(out, ranges[0], strict=True):
            _fill(row, parts[layer], ranges[1:], declaration.transposed)
    else:
        _fill(out, parts[0], ranges, declaration.transposed)
    return out


def _aligned_empty(shape: Sequence[int], dtype: str) -> np.ndarray:
    """Memory that JAX on CPU takes as it is, where it would copy an array that starts elsewhere than at a multiple of 64 bytes."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _fill(out: np.ndarray, tensor: Tensor, ranges: list[range], transposed: bool) -> None:
    if transposed:
        out, ranges = out.T, ranges[::-1]
    for start, chunk_32 in _chunks(tensor, ranges):
        out[start : start + len(chunk_32)] = chunk_32


def _chunks(tensor: Tensor, ranges: Sequence[range]) -> Iterator[tuple[int, np.ndarray]]:
    """The window `ranges` of a tensor in float32: (first row within the window, rows)."""
    for window in _windows(ranges):
        chunk_32 = _read(tensor, window).astype(np.float32)
        finite = np.isfinite(chunk_32)
        if not finite.all():
            first = np.argwhere(~finite)[0]
            index = ", ".join(str(int(at) + part.start) for at, part in zip(first, window, strict=True))
            raise ModelError(
                f"{tensor.file}: {tensor.key} holds values that are not finite, the first at [{index}]: {chunk_32[tuple(first)]}; such a "
                "model is broken, get its files anew"
            )
        yield window[0].start - ranges[0].start, chunk_32


def _windows(ranges: Sequence[range]) -> Iterator[tuple[slice, ...]]:
    """`ranges`, cut along the first of them into windows that take at most CHUNK_BYTES in float32, or one row."""
    rows, *columns = ranges
    step = max(1, CHUNK_BYTES // max(1, 4 * math.prod(map(len, columns))))
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(start + step, rows.stop)), *(slice(part.start, part.stop) for part in columns)


def _read(tensor: Tensor, window: tuple[slice, ...]) -> np.ndarray:
    try:
        part: np.ndarray = tensor.view[window]
        return part
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{tensor.file}: {tensor.key} cannot be read: {error}") from None


def _find_tensors(folder: Path, c: Qwen2Config, stack: ExitStack) -> dict[str, Tensor]:
    """The model's tensors by key, checked by their headers; files stay open until `stack` closes."""
    files = [file for file in sorted(folder.glob("*.safetensors")) if not is_of_macos(file)]
    looked_through(folder)
    index = _read_index(folder, files)
    if not files:
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern) if not is_of_macos(path))
        if pickles:
            raise ModelError(
                f"{folder} holds {_shown(pickles)} and no *.safetensors file. Pickles can run code and are not read; convert them "
                "with torch: transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype='auto').save_pretrained(OUTPUT)"
            )
        if remark := what_it_is(folder):
            raise ModelError(f"{folder}: {remark}")
        raise ModelError(f"{folder} holds no *.safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        for tensor in _open(file, stack):
            if tensor.key in tensors:
                raise ModelError(
                    f"{file}: {tensor.key} is in {tensors[tensor.key].file} too; remove the file that does not belong to the model"
                )
            tensors[tensor.key] = tensor
    _check_index(folder, index, tensors)
    if c.tie_word_embeddings and HEAD_KEY in tensors:
        _check_tied_head(tensors)
        del tensors[HEAD_KEY]
    _check_headers(folder, c, tensors)
    return tensors


def _open(file: Path, stack: ExitStack) -> list[Tensor]:
    if is_lfs_pointer(file):
        raise ModelError(lfs_remedy(file))
    try:
        opened = stack.enter_context(safe_open(file, framework="numpy"))
        views = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 -- not a dict
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
    return [Tensor(key, file, view.get_dtype(), tuple(view.get_shape()), view) for key, view in views.items()]


def _check_headers(folder: Path, c: Qwen2Config, tensors: Mapping[str, Tensor]) -> None:
    if c.num_hidden_layers > len(tensors):  # before keys are listed, of which a wrong number could fill the memory
        raise ModelError(f"{folder}: config.json says num_hidden_layers = {c.num_hidden_layers}, the files hold {len(tensors)} tensors")
    shapes = {key: hf_shape(declaration) for declaration in declarations(c).values() for key in hf_keys(declaration)}
    missing, left_over = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or left_over:
        raise ModelError(
            f"{folder}: missing tensors {_shown(missing)}, unknown tensors {_shown(left_over)} (config.json: tie_word_embeddings = "
            f"{json.dumps(c.tie_word_embeddings)}, num_hidden_layers = {c.num_hidden_layers}){about_tensors(left_over)}"
        )
    for key, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ModelError(f"{tensor.file}: {key} is {tensor.dtype}; only {', '.join(DTYPES)} are read")
        if tensor.shape != shapes[key]:
            raise ModelError(f"{tensor.file}: {key} has shape {tensor.shape}, config.json implies {shapes[key]}")


def _check_tied_head(tensors: Mapping[str, Tensor]) -> None:
    """Some tied models are published with the head beside the embedding. The flag in config.json decides; a head of its own contradicts it.

    Raises:
        ModelError: the two are not equal bit for bit.
    """
    head, embed = tensors[HEAD_KEY], tensors.get("model.embed_tokens.weight")
    if embed is None:
        return  # reported as missing
    same = (head.dtype, head.shape) == (embed.dtype, embed.shape)
    windows = _windows([range(size) for size in head.shape])
    if not same or any(_read(head, window).tobytes() != _read(embed, window).tobytes() for window in windows):
        raise ModelError(
            f"{head.file}: {HEAD_KEY} differs from {embed.key}, yet config.json has tie_word_embeddings = true. Set that to false if the "
            "model was trained with a head of its own; else remove the tensor"
        )


def _read_index(folder: Path, files: Sequence[Path]) -> dict[str, str] | None:
    """Key -> file name from the index file; None if there is none.

    Raises:
        ModelError: it is not an index, or it names files that are not there.
    """
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return None
    try:
        index: dict[str, str] = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        if not all(isinstance(name, str) for name in index.values()):
            raise TypeError("weight_map holds something else than file names")
        missing = sorted(set(index.values()) - {file.name for file in files})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} is not an index of safetensors files: {error!r}") from None
    if missing:
        raise ModelError(f"{path} names files that are not there: {_shown(missing)}; get them, or all files of the model anew")
    return index


def _check_index(folder: Path, index: Mapping[str, str] | None, tensors: Mapping[str, Tensor]) -> None:
    if index is None:
        return
    real = {key: tensor.file.name for key, tensor in tensors.items()}
    wrong = sorted(key for key in index.keys() | real.keys() if index.get(key) != real.get(key))
    if wrong:
        details = ", ".join(f"{key} (index: {index.get(key, 'nowhere')}, found in: {real.get(key, 'no file')})" for key in wrong[:SHOWN])
        raise ModelError(f"{folder}: model.safetensors.index.json and the files disagree on {len(wrong)} tensors: {details}")


def _shown(names: Sequence[str]) -> str:
    return f"[{', '.join(names[:SHOWN])}{f', … {len(names)} in all' if len(names) > SHOWN else ''}]"
