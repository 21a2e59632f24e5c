"""A tokenizer from an ordinary Hugging Face folder, without transformers."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from jaxprorl.errors import DataError
from jaxprorl.model_sources import is_lfs_pointer, lfs_remedy


@dataclass(frozen=True, eq=False)  # one tokenizer equals itself alone, so that what is made from it can be kept beside it
class Tokenizer:
    """Text to ids and back, plus what sampling and rendering need to know of the folder.

    Attributes:
        path: the folder it was read from.
        backend: the `tokenizers` object itself.
        pad_id: fills rows; never a mask (masks come from lengths), so it may equal a stop id.
        stop_ids: every id that ends a completion.
        bos_id: beginning of sequence, None if the tokenizer has none.
        adds_bos: the folder's tokenizer puts one before plain text, so the model has seen no text without it.
        vocab_size: highest id + 1; a model may hold more rows.
        chat_template: Jinja source, empty if the folder has none.
        special_tokens: name -> text, the variables `bos_token`, `eos_token`, ... that chat templates may use.
    """

    path: Path
    backend: tokenizers.Tokenizer
    pad_id: int
    stop_ids: tuple[int, ...]
    bos_id: int | None
    adds_bos: bool
    vocab_size: int
    chat_template: str
    special_tokens: Mapping[str, str]

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as it stands: nothing is added in front or behind, special tokens in it are recognised."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`; `skip_special` leaves out tokens marked special (tags such as `<think>` are not)."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads `tokenizer.json`, `tokenizer_config.json`, `generation_config.json` and `chat_template.jinja` of a folder.

    Raises:
        DataError: a needed file is missing or broken, no stop token can be found, or a special token is not in the vocabulary.
    """
    folder = Path(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"{file}: not found. {_remedy(folder)}")
    if is_lfs_pointer(file):
        raise DataError(lfs_remedy(file))
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception on a broken file
        raise DataError(f"{file}: not a tokenizer file ({error})") from error
    backend.no_padding()
    backend.no_truncation()
    config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    special_tokens = _special_tokens(config)
    stop_ids = _stop_ids(folder, backend, special_tokens, generation)
    bos = special_tokens.get("bos_token")
    bos_id = None if bos is None else _token_id(backend, bos, folder, "bos_token")
    return Tokenizer(
        path=folder,
        backend=backend,
        pad_id=_pad_id(folder, backend, special_tokens, generation, stop_ids[0]),
        stop_ids=stop_ids,
        bos_id=bos_id,
        adds_bos=bos_id is not None and _adds_bos(backend, bos_id, config),
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values()) + 1,
        chat_template=_chat_template(folder, config),
        special_tokens=special_tokens,
    )


def _remedy(folder: Path) -> str:
    save = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return f"The folder holds a slow tokenizer (vocab.json and merges.txt): {save}, run once with transformers, converts it."
    return f"The folder needs a fast tokenizer: {save}, run once with transformers, converts one of another form."


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{file}: must hold one JSON object")
    return content


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = tokenizer_config.get(name)  # of tokenizer_config.json, a file of the model: it may lack the entry
        if isinstance(value, dict):  # an AddedToken written out
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _token_id(backend: tokenizers.Tokenizer, token: str, folder: Path, name: str) -> int:
    token_id = backend.token_to_id(token)
    if token_id is None:
        raise DataError(f"{folder / 'tokenizer_config.json'}: {name} is {token!r}, which tokenizer.json does not hold")
    return token_id


def _is_id(backend: tokenizers.Tokenizer, given: object) -> bool:
    return type(given) is int and 0 <= given < 2**32 and backend.id_to_token(given) is not None  # the library takes no other numbers


def _adds_bos(backend: tokenizers.Tokenizer, bos_id: int, tokenizer_config: Mapping[str, Any]) -> bool:
    """What the config says; where it is silent, what the post-processor of tokenizer.json does (transformers 5 saves only that)."""
    stated = tokenizer_config.get("add_bos_token")  # the model's file need not state it
    return bos_id in backend.encode("").ids if stated is None else stated is True


def _pad_id(
    folder: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], generation: Mapping[str, Any], default: int
) -> int:
    if "pad_token" in special_tokens:
        return _token_id(backend, special_tokens["pad_token"], folder, "pad_token")
    given = generation.get("pad_token_id", default)
    if given is None:
        return default
    if not _is_id(backend, given):
        raise DataError(f"{folder / 'generation_config.json'}: pad_token_id is {given!r}; give an id that tokenizer.json holds")
    return given


def _stop_ids(
    folder: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], generation: Mapping[str, Any]
) -> tuple[int, ...]:
    given = generation.get("eos_token_id")
    if given is None:
        if "eos_token" not in special_tokens:
            raise DataError(
                f"{folder}: no stop token. Give eos_token_id (a number or a list) in generation_config.json, "
                "or eos_token in tokenizer_config.json."
            )
        given = _token_id(backend, special_tokens["eos_token"], folder, "eos_token")
    ids = given if isinstance(given, list) else [given]
    if not ids or not all(_is_id(backend, i) for i in ids):
        raise DataError(f"{folder / 'generation_config.json'}: eos_token_id is {given!r}; give ids that tokenizer.json holds")
    return tuple(dict.fromkeys(ids))


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: not UTF-8 ({error})") from error
    template = tokenizer_config.get("chat_template")  # newer models have it in a file of its own
    if isinstance(template, list):  # several named templates
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}.get("default")
    return template if isinstance(template, str) else ""
