"""What a place is that is no model folder, or no whole one, and what would be right. Nothing here touches JAX.

The place may have a name that no file system takes: `os.path` tells that it is not there, where `Path` raises.
"""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from shlex import quote

from jaxprorl.errors import ModelError

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
EXTRA_HEADS = re.compile(r"(^|\.)(score|v_head|value_head|classifier|reward_head|regression_head|summary)\.")
ADAPTER_KEYS = re.compile(r"lora_|base_model\.model\.|modules_to_save")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")
SHOWN = 3


def looked_through(folder: Path) -> None:
    """Refuses a place that is no model folder by what it is instead; passes over those that may be one.

    Raises:
        ModelError: says which folder or command is right.
    """
    if not os.path.isfile(folder / "config.json") and (remark := what_it_is(folder)):
        raise ModelError(f"{folder}: {remark}")
    if is_lfs_pointer(folder / "config.json"):
        raise ModelError(lfs_remedy(folder / "config.json"))
    if (folder / "checkpoints").is_dir() and (folder / "events.jsonl").is_file():
        raise ModelError(f"{folder}: {_of_a_run(folder)}")
    if adapters := [name for name in ADAPTERS if (folder / name).is_file()]:
        raise ModelError(f"{folder}: {adapter_remedy(', '.join(adapters))}")


def what_it_is(folder: Path) -> str:
    """What a place without config.json is instead, with the remedy; empty if nothing is known of it."""
    text = str(folder)
    if not os.path.exists(folder):
        return _not_there(text)
    if folder.is_file():
        return "is a file; name the folder that holds config.json, *.safetensors and tokenizer.json"
    if snapshots := _snapshots(folder):
        return f"is the cache of a model hub; name the snapshot in it: {_named(snapshots)}"
    if cached := [path for path in sorted(folder.glob("models--*")) + sorted(folder.glob("hub/models--*")) if _snapshots(path)]:
        return f"is the cache of a model hub; name a snapshot in it: {_named(_snapshots(path)[0] for path in cached)}"
    if (folder / "checkpoints").is_dir():
        return _of_a_run(folder)
    if adapters := [name for name in ADAPTERS if (folder / name).is_file()]:
        return adapter_remedy(", ".join(adapters))
    if files := sorted(path.name for path in folder.glob("*.gguf")):
        return f"holds {_named(files)}: GGUF files are not read; take the model's Hugging Face folder (config.json, *.safetensors)"
    inside = [path for path in sorted(folder.glob("*")) if (path / "config.json").is_file()]
    if inside and not (folder / "config.json").is_file():
        return f"holds no config.json; name a folder in it that does: {_named(inside)}"
    return ""


def is_lfs_pointer(file: Path) -> bool:
    """True if git left a pointer in the place of a large file."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


def lfs_remedy(file: Path) -> str:
    """What to do about such a pointer."""
    return f"{file} is a git-lfs pointer, not the file itself; get it with: git -C {quote(str(file.parent))} lfs pull"


def adapter_remedy(what: str) -> str:
    """What to do about the weights of an adapter."""
    return (
        f"holds an adapter ({what}), which would not be applied; merge it into its base model with peft: "
        "AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(OUTPUT), and take OUTPUT"
    )


def about_tensors(left_over: Sequence[str]) -> str:
    """What tensors that the architecture lacks tell, with the remedy; empty if nothing is known of them."""
    if adapters := [key for key in left_over if ADAPTER_KEYS.search(key)]:
        return f". The model {adapter_remedy(adapters[0])}"
    if heads := [key for key in left_over if EXTRA_HEADS.search(key)]:
        return (
            f". {_named(heads)} belongs to an extra head, of a classifier, reward or value model; save the language model alone "
            "(AutoModelForCausalLM), or remove these tensors from the files"
        )
    return ""


def is_of_macos(file: Path) -> bool:
    """True for the companion (`._NAME`) that macOS leaves beside a file on foreign disks and in archives; it holds none of its content."""
    return file.name.startswith("._")


def _not_there(text: str) -> str:
    if HUB_ID.fullmatch(text) and not text.startswith(("models/", "runs/")) and not os.path.isdir(Path(text).parent):
        target = f"models/{text.split('/')[1]}"
        return (
            f"no such folder. It looks like a model's name on a hub, and nothing is downloaded here: "
            f"`hf download {quote(text)} --local-dir {quote(target)}`, then name {quote(target)}"
        )
    return "no such folder"


def _of_a_run(folder: Path) -> str:
    run = quote(str(folder))
    finished = f"its model is in {quote(str(folder / 'model'))}; or " if (folder / "model/config.json").is_file() else ""
    return f"is the folder of a run; {finished}export one: launch/export_hf.py --run {run} --output FOLDER, and name FOLDER"


def _snapshots(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("snapshots/*")) if path.is_dir()]


def _named(things: Iterable[Path | str]) -> str:
    names = [quote(str(thing)) if isinstance(thing, Path) else thing for thing in things]
    return f"{', '.join(names[:SHOWN])}{f', … {len(names)} in all' if len(names) > SHOWN else ''}"
