import json
from pathlib import Path
from typing import Any

import pytest
from factories import tiny_model
from model_folders import edit_json, written

from jaxprorl.errors import ModelError
from jaxprorl.models.hf.config import IGNORED, KNOWN, READ, REFUSED, REQUIRED, read_config
from jaxprorl.models.qwen2 import Qwen2Config, parameter_bytes, parameter_count

# config.json of the models that this package is made for, as published (transformers 4).
SHARED = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu",
    "initializer_range": 0.02, "model_type": "qwen2", "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "use_cache": True,
    "use_sliding_window": False,
}  # fmt: skip
WIDE_1P5B = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2,
    "vocab_size": 151936,
}  # fmt: skip
R1_DISTILL_1P5B = SHARED | WIDE_1P5B | {
    "max_position_embeddings": 131072, "max_window_layers": 21, "rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": False,
    "transformers_version": "4.44.0", "use_mrope": False,
}  # fmt: skip
QWEN_1P5B = SHARED | WIDE_1P5B | {
    "max_position_embeddings": 131072, "max_window_layers": 28, "rope_theta": 1000000.0, "sliding_window": 131072,
    "tie_word_embeddings": True, "transformers_version": "4.40.1", "use_mrope": False,
}  # fmt: skip
QWEN_1P5B_INSTRUCT = SHARED | WIDE_1P5B | {
    "eos_token_id": 151645, "max_position_embeddings": 32768, "max_window_layers": 21, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "transformers_version": "4.43.1",
}  # fmt: skip
QWEN_MATH_1P5B = SHARED | WIDE_1P5B | {
    "max_position_embeddings": 4096, "max_window_layers": 21, "rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": True,
    "transformers_version": "4.44.0", "use_mrope": False,
}  # fmt: skip
QWEN_0P5B = SHARED | {
    "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
    "vocab_size": 151936, "max_position_embeddings": 32768, "max_window_layers": 24, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "transformers_version": "4.40.1", "use_mrope": False,
}  # fmt: skip
QWEN_7B = SHARED | {
    "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "vocab_size": 152064, "max_position_embeddings": 131072, "max_window_layers": 28, "rope_theta": 1000000.0, "sliding_window": 131072,
    "tie_word_embeddings": False, "transformers_version": "4.40.1", "use_mrope": False,
}  # fmt: skip
# Saved again by transformers 4 (nulls and where it came from), and by transformers 5 (new names, layer_types).
RESAVED_BY_4 = QWEN_1P5B_INSTRUCT | {
    "_name_or_path": "models/instruct", "rope_scaling": None, "sliding_window": None, "pad_token_id": 151643,
    "transformers_version": "4.50.0.dev0", "_attn_implementation_autoset": True,
}  # fmt: skip
RESAVED_BY_5 = {name: value for name, value in QWEN_1P5B_INSTRUCT.items() if name not in ("rope_theta", "torch_dtype")} | {
    "dtype": "bfloat16", "layer_types": ["full_attention"] * 28, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "sliding_window": None, "pad_token_id": None, "transformers_version": "5.7.0",
}  # fmt: skip

SHAPE_1P5B = Qwen2Config(151936, 1536, 8960, 28, 12, 2, 128, 1e6, 32768, 1e-6, True)
# name -> (fields, the model they mean, its number of parameters)
PUBLISHED = {
    "DeepSeek-R1-Distill-Qwen-1.5B": (
        R1_DISTILL_1P5B, Qwen2Config(151936, 1536, 8960, 28, 12, 2, 128, 1e4, 131072, 1e-6, False), 1_777_088_000
    ),
    "Qwen2.5-1.5B": (QWEN_1P5B, Qwen2Config(151936, 1536, 8960, 28, 12, 2, 128, 1e6, 131072, 1e-6, True), 1_543_714_304),
    "Qwen2.5-1.5B-Instruct": (QWEN_1P5B_INSTRUCT, SHAPE_1P5B, 1_543_714_304),
    "Qwen2.5-Math-1.5B": (QWEN_MATH_1P5B, Qwen2Config(151936, 1536, 8960, 28, 12, 2, 128, 1e4, 4096, 1e-6, True), 1_543_714_304),
    "Qwen2.5-0.5B": (QWEN_0P5B, Qwen2Config(151936, 896, 4864, 24, 14, 2, 64, 1e6, 32768, 1e-6, True), 494_032_768),
    "Qwen2.5-7B": (QWEN_7B, Qwen2Config(152064, 3584, 18944, 28, 28, 4, 128, 1e6, 131072, 1e-6, False), 7_615_616_512),
    "saved again by transformers 4": (RESAVED_BY_4, SHAPE_1P5B, 1_543_714_304),
    "saved again by transformers 5": (RESAVED_BY_5, SHAPE_1P5B, 1_543_714_304),
}  # fmt: skip


def write(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of our own making, whose config holds both forms."""
    return written(tmp_path, tiny_model())


@pytest.mark.parametrize(("fields", "expected", "parameters"), PUBLISHED.values(), ids=PUBLISHED)
def test_the_published_models_are_read_from_their_config_alone(
    fields: dict[str, Any], expected: Qwen2Config, parameters: int, tmp_path: Path
) -> None:
    assert read_config(write(tmp_path, fields)) == expected
    assert parameter_count(expected) == parameters
    assert parameter_bytes(expected) == 4 * parameters


def test_a_field_is_in_one_table_only_and_every_published_field_in_some() -> None:
    tables = [READ, set(REQUIRED), set(REFUSED), *(set(names) for names in IGNORED.values())]
    assert sum(len(table) for table in tables) == len(KNOWN)
    assert all(fields.keys() <= KNOWN for fields, _, _ in PUBLISHED.values())


def test_every_field_that_is_read_changes_what_is_read_or_is_refused(tmp_path: Path) -> None:
    """Nothing is listed as read and then passed over."""
    fields = RESAVED_BY_4 | {"head_dim": 128, "layer_types": ["full_attention"] * 28}
    before = read_config(write(tmp_path, fields))
    assert before == SHAPE_1P5B
    changes: dict[str, Any] = dict.fromkeys(READ, "nonsense")
    changes |= dict.fromkeys(set(fields) & READ - {"architectures", "torch_dtype", "layer_types", "tie_word_embeddings"}, 8)
    for name in READ:
        try:
            after = read_config(write(tmp_path, fields | {name: changes[name]}))
        except ModelError as error:
            assert name in str(error)
        else:
            assert after != before, name


@pytest.mark.parametrize(
    "form",
    [
        {"rope_theta": 5e5, "rope_parameters": None},  # transformers 4
        {"rope_theta": 5e5, "rope_parameters": None, "rope_scaling": {"type": "default"}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},  # transformers 5
        {"rope_theta": 500000, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},  # both, in agreement
    ],
)
def test_rope_theta_is_found_in_either_form(model: Path, form: dict[str, Any]) -> None:
    edit_json(model / "config.json", **form, head_dim=None)
    assert read_config(model) == tiny_model(rope_theta=5e5)  # 32 / 4 heads = the width of 8 that was left out


@pytest.mark.parametrize(
    "changes",
    [
        {"unsloth_version": "2025.1.5", "unsloth_fixed": True},
        {"dtype": "auto", "torch_dtype": "auto"},
        {"torch_dtype": "auto"},
        {"rope_parameters": {"rope_type": None, "rope_theta": 1e4}},
        {"rope_scaling": {"rope_type": "default", "factor": 1.0, "type": None}},
        {"partial_rotary_factor": 1.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ],
)
def test_fields_that_change_nothing_are_read_over(model: Path, changes: dict[str, Any]) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert read_config(model) == tiny_model()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5 is not supported, only 1 is"]),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, ["rope_scaling", '"factor": 2.0']),
        ({"rope_scaling": {"rope_type": None, "type": "yarn", "factor": 1.0}}, ["rope_scaling", "yarn"]),
        ({"dtype": "auto", "torch_dtype": "int8"}, ["torch_dtype", "int8"]),
        ({"architectures": ["LlamaForCausalLM"]}, ["this family is not supported. Only Qwen2ForCausalLM is: Qwen2, Qwen2.5"]),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, ["Qwen3ForCausalLM", "qwen3", "Qwen2, Qwen2.5"]),
        ({"architectures": ["LlamaForCausalLM"]}, ["architectures", "LlamaForCausalLM", "Qwen2ForCausalLM"]),
        ({"architectures": None}, ["architectures", "Qwen2ForCausalLM"]),
        ({"model_type": "qwen3"}, ["model_type", "qwen3", "qwen2"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ["rope_parameters", "yarn"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters", "full_attention"]),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling", "linear"]),
        ({"rope_scaling": {"type": "default", "rope_type": "mrope"}}, ["rope_scaling", "mrope"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling", "yarn"]),
        ({"rope_theta": 1e6}, ["contradicts", "rope_theta = 1e+06", "rope_parameters.rope_theta = 10000"]),
        ({"rope_theta": None, "rope_parameters": None}, ["rope_theta"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "num_hidden_layers = 2"]),
        ({"use_mrope": True}, ["use_mrope"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"attention_dropout": 0.1}, ["attention_dropout", "0.1"]),
        ({"attention_bias": False}, ["attention_bias", "false"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "bfloat16"]),
        ({"auto_map": {"AutoModel": "modeling.Model"}}, ["auto_map", "never run"]),
        ({"vocab_size": None}, ["vocab_size"]),
        ({"vocab_size": "48"}, ["vocab_size", '"48"', "whole"]),
        ({"num_hidden_layers": 2.5}, ["num_hidden_layers", "2.5", "whole"]),
        ({"num_attention_heads": True}, ["num_attention_heads", "true"]),
        ({"hidden_size": 0}, ["hidden_size", "0", "positive"]),
        ({"rms_norm_eps": -1e-6}, ["rms_norm_eps", "positive"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps", "positive"]),
        ({"num_hidden_layers": 10**15, "layer_types": ["full_attention"]}, ["layer_types", "num_hidden_layers = 1000000000000000"]),
        ({"layer_types": "full_attention"}, ["layer_types"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads = 3", "divide", "num_attention_heads = 4"]),
        ({"head_dim": None, "hidden_size": 34}, ["num_attention_heads = 4", "hidden_size = 34", "head_dim"]),
        ({"head_dim": 7}, ["head_dim = 7", "even"]),
        ({"tie_word_embeddings": None}, ["tie_word_embeddings", "lm_head.weight"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings", "1"]),
        ({"torch_dtype": "bfloat16"}, ["contradicts", "torch_dtype = bfloat16", "dtype = float32"]),
        ({"torch_dtype": "int8", "dtype": None}, ["torch_dtype", "int8", "bfloat16"]),
        ({"use_qk_norm": False, "qkv_bias": True}, ["unknown", "qkv_bias, use_qk_norm", "remove"]),
    ],
)  # fmt: skip
def test_a_config_we_cannot_honour_is_refused_by_file_and_field(model: Path, changes: dict[str, Any], words: list[str]) -> None:
    edit_json(model / "config.json", **changes)
    with pytest.raises(ModelError) as caught:
        read_config(model)
    for word in (str(model / "config.json"), *words):
        assert word in str(caught.value)


def test_null_means_left_out(model: Path) -> None:
    path = model / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"quantization_config": None, "rope_scaling": None, "layer_types": None, "head_dim": None}))
    assert read_config(model) == tiny_model()
    path.write_text(json.dumps(fields | {"architectures": None}))
    with pytest.raises(ModelError, match="architectures"):
        read_config(model)


def test_a_folder_without_config_or_with_a_broken_one_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere: no such folder"):
        read_config(tmp_path / "nowhere")
    for content in (b"{", b"[]", b"\xff\xfe", b"[" * 100_000):
        (model / "config.json").write_bytes(content)
        with pytest.raises(ModelError, match=r"config\.json is not"):
            read_config(model)
