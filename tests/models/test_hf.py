import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from factories import random_params, tiny_model
from safetensors.numpy import load_file, save_file

from jaxprorl.models import hf
from jaxprorl.models.hf import ModelError, read_config, read_params, write_folder
from jaxprorl.models.qwen2 import Qwen2Config, declarations
from jaxprorl.sharding.mesh import make_mesh, param_shardings

MODELS = {"tied": tiny_model(), "untied": tiny_model(tie_word_embeddings=False, rope_theta=1e6, rms_norm_eps=1e-5, head_dim=16)}


def shardings(c: Qwen2Config, strategy: str = "dp") -> dict[str, Any]:
    return param_shardings(c, make_mesh(strategy), strategy)


def written(folder: Path, c: Qwen2Config) -> Path:
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(exist_ok=True)
    (tokenizer / "tokenizer.json").write_text("{}")
    write_folder(folder / "model", c, random_params(c), tokenizer, stop_ids=(2, 1), pad_id=0)
    return folder / "model"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return written(tmp_path, tiny_model())


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets fields of config.json; a value of None removes the field."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))


def edit_tensors(folder: Path, **changes: np.ndarray | None) -> None:
    """Sets tensors of model.safetensors (`__` stands for the dot); None removes the tensor."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)


@pytest.mark.parametrize("c", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_a_written_folder_reads_back_bit_for_bit(c: Qwen2Config, strategy: str, tmp_path: Path) -> None:
    folder = written(tmp_path, c)
    assert read_config(folder) == c
    places = shardings(c, strategy)
    params = read_params(folder, c, places)
    for name, value in random_params(c).items():
        np.testing.assert_array_equal(params[name], value, err_msg=name)
        assert params[name].dtype == "float32"
        assert params[name].sharding == places[name]
    write_folder(tmp_path / "again", c, params, folder, stop_ids=(2, 1), pad_id=0)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "again/config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert (tmp_path / "again/tokenizer.json").read_text() == "{}"


def test_writing_replaces_an_older_folder_whole(model: Path) -> None:
    (model / "model-00002-of-00002.safetensors").write_text("left over from an older model")
    write_folder(model, tiny_model(), random_params(tiny_model(), seed=5), model, stop_ids=(1,), pad_id=0)
    assert sorted(path.name for path in model.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    params = read_params(model, tiny_model(), shardings(tiny_model()))
    np.testing.assert_array_equal(params["embed"], random_params(tiny_model(), seed=5)["embed"])
    assert sorted(path.name for path in model.parent.iterdir()) == ["model", "tokenizer"]


@pytest.mark.slow
def test_transformers_loads_ours_and_we_load_what_it_saves(run_reference: Callable[..., dict[str, np.ndarray]], tmp_path: Path) -> None:
    script = """
        import torch
        from transformers import AutoModelForCausalLM
        for name in ("tied", "untied"):
            model, report = AutoModelForCausalLM.from_pretrained(
                f"{inputs['folder']}/{name}/model", dtype=torch.float32, output_loading_info=True)
            outputs[name + ".problems"] = np.array([len(value) for value in report.values()])
            outputs[name + ".eos"] = np.array(model.generation_config.eos_token_id)
            for key, value in model.state_dict().items():
                outputs[name + "/" + key] = value.numpy()
            model.save_pretrained(f"{inputs['folder']}/{name}/float32")
            model.to(torch.bfloat16).save_pretrained(f"{inputs['folder']}/{name}/bfloat16")
        """
    for name, c in MODELS.items():
        (tmp_path / name).mkdir()
        written(tmp_path / name, c)
    reference = run_reference(script, folder=str(tmp_path))
    for name, c in MODELS.items():
        assert not reference[f"{name}.problems"].any()  # no missing, unexpected or mismatched keys
        np.testing.assert_array_equal(reference[f"{name}.eos"], [2, 1])
        params = random_params(c)
        np.testing.assert_array_equal(reference[f"{name}/model.embed_tokens.weight"], params["embed"])
        np.testing.assert_array_equal(reference[f"{name}/model.layers.1.mlp.down_proj.weight"], params["down_kernel"][1].T)
        np.testing.assert_array_equal(reference[f"{name}/model.layers.0.self_attn.k_proj.bias"], params["k_bias"][0])
        for dtype in ("float32", "bfloat16"):
            folder = tmp_path / name / dtype
            assert read_config(folder) == c
            for key, value in read_params(folder, c, shardings(c)).items():
                np.testing.assert_array_equal(value, params[key].astype(jnp.dtype(dtype)).astype("f4"), err_msg=f"{dtype} {key}")


@pytest.mark.parametrize(
    "form",
    [
        {"rope_theta": 5e5, "rope_parameters": None},  # transformers 4
        {"rope_theta": 5e5, "rope_parameters": None, "rope_scaling": {"type": "default"}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},  # transformers 5
    ],
)
def test_config_of_transformers_before_and_after_version_5(model: Path, form: dict[str, Any]) -> None:
    edit_config(model, **form, head_dim=None)
    assert read_config(model) == tiny_model(rope_theta=5e5)  # 32 / 4 heads = the width of 8 that was left out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ["architectures", "LlamaForCausalLM", "Qwen2ForCausalLM"]),
        ({"architectures": None}, ["architectures", "Qwen2ForCausalLM"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ["rope", "yarn"]),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope", "linear"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"vocab_size": None}, ["vocab_size"]),
        ({"rope_theta": None, "rope_parameters": None}, ["rope_theta"]),
    ],
)
def test_a_config_we_cannot_honour_is_refused_by_file_and_field(model: Path, changes: dict[str, Any], words: list[str]) -> None:
    edit_config(model, **changes)
    with pytest.raises(ModelError) as caught:
        read_config(model)
    for word in (str(model / "config.json"), *words):
        assert word in str(caught.value)


def test_null_architectures_are_refused_like_missing_ones(model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": None}))
    with pytest.raises(ModelError, match="architectures"):
        read_config(model)


def test_a_folder_without_config_or_with_a_broken_one_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere/config\.json does not exist"):
        read_config(tmp_path / "nowhere")
    for text in ("{", "[]"):
        (model / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json is not"):
            read_config(model)


NORM = "model__layers__1__input_layernorm__weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({NORM: None}, ["missing", "model.layers.1.input_layernorm.weight"]),
        ({"model__layers__2__input_layernorm__weight": np.ones(32, "f4")}, ["unknown", "model.layers.2.input_layernorm.weight"]),
        ({"lm_head__weight": np.ones((48, 32), "f4")}, ["unknown", "lm_head.weight", "tie_word_embeddings = True"]),
        ({NORM: np.ones(31, "f4")}, ["model.safetensors", "model.layers.1.input_layernorm.weight", "(31,)", "(32,)"]),
        ({NORM: np.full(32, np.nan, "f4")}, ["model.safetensors", "model.layers.1.input_layernorm.weight", "not finite"]),
        ({NORM: np.full(32, np.inf, "f4")}, ["model.safetensors", "model.layers.1.input_layernorm.weight", "not finite"]),
    ],
    ids=["missing", "too_many_layers", "a_head_of_its_own", "shape", "nan", "inf"],
)
def test_tensors_that_do_not_fit_are_refused_by_name(model: Path, changes: dict[str, np.ndarray | None], words: list[str]) -> None:
    edit_tensors(model, **changes)
    with pytest.raises(ModelError) as caught:
        read_params(model, tiny_model(), shardings(tiny_model()))
    for word in (str(model), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("kept_bytes", [0, 4, 100, -1])
def test_a_truncated_file_is_refused_by_name(model: Path, kept_bytes: int) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        read_params(model, tiny_model(), shardings(tiny_model()))


def test_a_folder_without_weights_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no \*\.safetensors"):
        read_params(model, tiny_model(), shardings(tiny_model()))


def test_weights_in_several_files_are_read_and_a_tensor_in_two_is_refused(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:5]}, model / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[5:]}, model / "model-00002-of-00002.safetensors")
    params = read_params(model, tiny_model(), shardings(tiny_model()))
    for name, value in random_params(tiny_model()).items():
        np.testing.assert_array_equal(params[name], value, err_msg=name)
    save_file({names[7]: tensors[names[7]]}, model / "old.safetensors")
    with pytest.raises(ModelError, match=names[7]):
        read_params(model, tiny_model(), shardings(tiny_model()))


def test_every_layer_has_its_own_keys() -> None:
    table = declarations(tiny_model())
    assert hf.hf_keys(table["q_bias"]) == ["model.layers.0.self_attn.q_proj.bias", "model.layers.1.self_attn.q_proj.bias"]
    assert hf.hf_keys(table["embed"]) == ["model.embed_tokens.weight"]
