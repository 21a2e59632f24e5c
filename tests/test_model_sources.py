"""Places that are no model folder, and folders that hold more or less than one: each message names what would be right."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_run
from factories import random_params, tiny_model
from model_folders import edit_tensors

from jaxprorl.config import validate
from jaxprorl.errors import ConfigError, UserError
from jaxprorl.model_folder import check_folder
from jaxprorl.models.hf import write_folder
from jaxprorl.warmstart.tokenizer import build_tokenizer

POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
C = tiny_model(vocab_size=320)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A sound folder whose path a shell would take apart."""
    tokenizer = build_tokenizer([], tmp_path / "tokenizer")
    write_folder(tmp_path / "my model", C, random_params(C), tokenizer.path, tokenizer.stop_ids, tokenizer.pad_id)
    return tmp_path / "my model"


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        check_folder(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_told_with_the_command_that_gets_the_file(name: str, model: Path) -> None:
    (model / name).write_text(POINTER)
    assert refusal(model) == f"{model / name} is a git-lfs pointer, not the file itself; get it with: git -C '{model}' lfs pull"


def test_companions_that_macos_leaves_are_passed_over(model: Path) -> None:
    (model / "._model.safetensors").write_bytes(b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X")
    (model / "._pytorch_model.bin").write_bytes(b"\x00\x05\x16\x07")
    check_folder(model)
    (model / "model.safetensors").unlink()
    assert "holds no *.safetensors file" in refusal(model)


def snapshot(cache: Path, model: Path) -> Path:
    target = cache / "models--Qwen--Qwen2.5-1.5B/snapshots/8faed7"
    target.parent.mkdir(parents=True)
    return Path(shutil.copytree(model, target))


@pytest.mark.parametrize("named", ["", "hub", "hub/models--Qwen--Qwen2.5-1.5B", "hub/models--Qwen--Qwen2.5-1.5B/snapshots"])
def test_a_hubs_cache_is_refused_and_the_snapshot_named(named: str, model: Path, tmp_path: Path) -> None:
    right = snapshot(tmp_path / "huggingface/hub", model)
    check_folder(right)
    assert str(right) in refusal(tmp_path / "huggingface" / named)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-1.5B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "unsloth/Qwen2.5-0.5B"])
def test_a_name_on_a_hub_is_answered_by_a_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = f"`hf download {name} --local-dir models/{name.split('/')[1]}`"
    assert command in refusal(Path(name))
    config = tiny_run.get_config()
    config.model.path = name
    with pytest.raises(ConfigError, match=r"^model\.path = ") as caught:
        validate(config)
    assert command in str(caught.value)


def test_the_folder_of_a_run_is_answered_by_the_command_that_exports_it(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "my run"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("config.json", "events.jsonl"):
        (run / name).write_text("{}")
    assert f"is the folder of a run; export one: launch/export_hf.py --run '{run}' --output FOLDER" in refusal(run)
    shutil.copytree(model, run / "model")
    assert f"its model is in '{run / 'model'}'; or export one" in refusal(run)
    check_folder(run / "model")


def spoil(folder: Path, name: str) -> None:
    if name == "adapter beside":
        (folder / "adapter_config.json").write_text("{}")
    elif name == "adapter alone":
        (folder / "config.json").unlink()
        (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    elif name == "adapter inside":
        edit_tensors(folder, {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.ones((2, 2), "f4")})
    elif name == "gguf":
        for path in ("config.json", "model.safetensors"):
            (folder / path).unlink()
        (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    elif name == "pt":
        (folder / "model.safetensors").rename(folder / "consolidated.00.pth")
    else:
        edit_tensors(folder, {name: np.ones((1, 32), "f4")})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adapter beside", "holds an adapter (adapter_config.json), which would not be applied; merge it"),
        ("adapter alone", "holds an adapter (adapter_model.safetensors), which would not be applied; merge it"),
        ("adapter inside", "lora_A.weight), which would not be applied; merge it"),
        ("score.weight", "score.weight belongs to an extra head"),
        ("v_head.summary.weight", "v_head.summary.weight belongs to an extra head"),
        ("classifier.weight", "classifier.weight belongs to an extra head"),
        ("gguf", "holds model-Q4_K_M.gguf: GGUF files are not read; take the model's Hugging Face folder"),
        ("pt", "Pickles can run code and are not read; convert them"),
    ],
)
def test_adapters_heads_and_other_formats_are_named_with_the_remedy(name: str, words: str, model: Path) -> None:
    spoil(model, name)
    assert words in refusal(model)


def test_a_folder_of_folders_and_a_file_are_refused_by_what_is_meant(model: Path, tmp_path: Path) -> None:
    assert f"holds no config.json; name a folder in it that does: '{model}'" in refusal(tmp_path)
    assert "is a file; name the folder that holds config.json" in refusal(model / "model.safetensors")
    for name in ("nowhere", "q" * 300, f"hub/{'q' * 300}/deep", "a\0b"):
        assert "no such folder" in refusal(tmp_path / name)
    assert "no such folder" in refusal(Path("q" * 300))


def test_the_path_in_the_suggested_command_is_quoted(model: Path, import_command: Callable[[Path], tuple[int, str, str]]) -> None:
    status, out, _ = import_command(model)
    assert status == 0 and out.endswith(f"sound; train on it with '--config.model.path={model}'\n")
