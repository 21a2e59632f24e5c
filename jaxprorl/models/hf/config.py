"""config.json: every field is read, required to have one value, or ignored by name; any other field is an error.

A default taken instead of a field that was there makes a model that runs, and is subtly wrong. So nothing is passed over in silence.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxprorl.errors import ModelError
from jaxprorl.model_sources import looked_through
from jaxprorl.models.qwen2 import Qwen2Config

ARCHITECTURE = "Qwen2ForCausalLM"
DTYPES = ("float32", "bfloat16", "float16")

# Fields that make the shape, with their types.
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
READ = {
    *SIZES, "architectures", "rms_norm_eps", "tie_word_embeddings", "head_dim", "layer_types",
    "rope_theta", "rope_scaling",  # transformers 4
    "rope_parameters",  # transformers 5
    "torch_dtype",  # transformers 4
    "dtype",  # transformers 5
}  # fmt: skip

# Fields that change what the model computes, with the only value that this code computes. Left out, they have that value.
REQUIRED: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "attention_dropout": 0,
    "attention_bias": True,  # q, k and v have biases in every Qwen2
    "mlp_bias": False,
    "use_sliding_window": False,
    "use_mrope": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "pretraining_tp": 1,
    "pruned_heads": {},
    "partial_rotary_factor": 1,  # a share of each head's width
}
# Fields that say that the tensors or the code are something else than they seem.
REFUSED = {
    "quantization_config": "quantised tensors are not supported; use the model's float16, bfloat16 or float32 folder",
    "compression_config": "compressed tensors are not supported; use the model's float16, bfloat16 or float32 folder",
    "auto_map": f"code from the folder is never run; if the model is a plain {ARCHITECTURE}, remove the field",
    "per_layer_config": "all layers are alike here",
}
# Fields that change nothing here, by reason.
IGNORED: dict[str, tuple[str, ...]] = {
    "attention windows, which use_sliding_window = false and layer_types switch off": ("sliding_window", "max_window_layers"),
    "where the file comes from": ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version"),
    "which tool wrote the file": ("unsloth_version", "unsloth_fixed"),
    "initial values of a model that is trained from nothing": ("initializer_range",),
    "how transformers runs the model, not what it computes": (
        "use_cache", "output_attentions", "output_hidden_states", "output_scores", "return_dict", "return_dict_in_generate", "torchscript",
        "use_bfloat16", "tf_legacy_loss", "gradient_checkpointing", "_attn_implementation", "_attn_implementation_autoset",
        "attn_implementation", "is_decoder", "tie_last_hidden_states",
    ),
    "ids, which are read from generation_config.json and the tokenizer's files": (
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "forced_bos_token_id",
        "forced_eos_token_id", "tokenizer_class", "prefix",
    ),
    "sampling, which the config of a run sets (rollout, evaluation)": (
        "do_sample", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "diversity_penalty",
        "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "max_length", "min_length", "num_beams", "num_beam_groups",
        "num_return_sequences", "early_stopping", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
        "remove_invalid_values", "exponential_decay_length_penalty",
    ),
    "heads for classification, which the architecture does not have": (
        "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "cross_attention_hidden_size",
    ),
}  # fmt: skip
KNOWN = READ | REQUIRED.keys() | REFUSED.keys() | {name for names in IGNORED.values() for name in names}
# Of rope_parameters and rope_scaling, beside rope_theta, with the only value that leaves the embedding plain.
PLAIN_ROPE = {"rope_type": "default", "type": "default", "factor": 1, "partial_rotary_factor": 1, "attention_factor": 1, "mscale": 1}


def read_config(folder: str | Path) -> Qwen2Config:
    """The model's shape from config.json, in the form that transformers 4 or 5 writes. null counts as left out, as it does there.

    Raises:
        ModelError: no such file, an unknown field, a missing one, a value that this code does not compute, or a contradiction.
    """
    path = Path(folder) / "config.json"
    fields = {name: value for name, value in _read_json(path).items() if value is not None}
    if fields.get("architectures") != [ARCHITECTURE]:
        family = f"architectures = {fields.get('architectures')}, model_type = {json.dumps(fields.get('model_type'))}"
        raise ModelError(
            f"{path}: {family}: this family is not supported. Only {ARCHITECTURE} is: Qwen2, Qwen2.5, and what others trained from them, "
            "e.g. DeepSeek-R1-Distill-Qwen"
        )
    unknown = sorted(fields.keys() - KNOWN)
    if unknown:
        raise ModelError(
            f"{path}: unknown fields [{', '.join(unknown[:8])}]. They may change what the model computes; if you know that they do not, "
            "remove them from the file"
        )
    for name, reason in REFUSED.items():
        if name in fields:
            raise ModelError(f"{path}: {name} is set; {reason}")
    for name, only in REQUIRED.items():
        if name in fields and (fields[name] != only or isinstance(fields[name], bool) != isinstance(only, bool)):
            raise ModelError(f"{path}: {name} = {json.dumps(fields[name])} is not supported, only {json.dumps(only)} is")
    _check_dtype(path, fields)
    sizes = {name: _number(path, fields, name, int) for name in SIZES}
    _check_layer_types(path, fields, sizes["num_hidden_layers"])
    return Qwen2Config(
        **sizes,
        head_dim=_head_dim(path, fields, sizes),
        rope_theta=_rope_theta(path, fields),
        rms_norm_eps=_number(path, fields, "rms_norm_eps", float),
        tie_word_embeddings=_tied(path, fields),
    )


def config_json(c: Qwen2Config, dtype: str, stop_ids: tuple[int, ...], pad_id: int, bos_id: int | None) -> dict[str, Any]:
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
        "sliding_window": None,  # its default is a number, of which transformers 4 warns
        "torch_dtype": dtype,
        "dtype": dtype,
        "bos_token_id": bos_id,
        "eos_token_id": list(stop_ids),
        "pad_token_id": pad_id,
    }


def _read_json(path: Path) -> dict[str, Any]:
    looked_through(path.parent)
    if not path.is_file():
        raise ModelError(f"{path} does not exist; a Hugging Face model folder holds config.json, *.safetensors and tokenizer.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} is not a JSON object")
    return raw


def _number(path: Path, fields: Mapping[str, Any], name: str, kind: type[int] | type[float]) -> Any:
    if name not in fields:
        raise ModelError(f"{path} has no field {name!r}")
    value = fields[name]
    ok = type(value) is int if kind is int else type(value) in (int, float)
    if not ok or not 0 < value <= sys.float_info.max:
        raise ModelError(f"{path}: {name} = {json.dumps(value)} must be a positive {'whole ' if kind is int else ''}number")
    return kind(value)


def _tied(path: Path, fields: Mapping[str, Any]) -> bool:
    tied = fields.get("tie_word_embeddings")
    if not isinstance(tied, bool):
        raise ModelError(
            f"{path}: tie_word_embeddings = {json.dumps(tied)}: must be true (the embedding is the output matrix too) or false (the files "
            "hold lm_head.weight)"
        )
    return tied


def _head_dim(path: Path, fields: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    heads, groups, hidden = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["hidden_size"]
    if heads % groups:
        raise ModelError(f"{path}: num_key_value_heads = {groups} must divide num_attention_heads = {heads}")
    if "head_dim" not in fields and hidden % heads:
        raise ModelError(f"{path}: num_attention_heads = {heads} must divide hidden_size = {hidden} where head_dim is left out")
    head_dim: int = _number(path, fields, "head_dim", int) if "head_dim" in fields else hidden // heads
    if head_dim % 2:
        raise ModelError(f"{path}: head_dim = {head_dim} is odd; rotary embeddings need an even width")
    return head_dim


def _rope_theta(path: Path, fields: Mapping[str, Any]) -> float:
    found = {"rope_theta": _number(path, fields, "rope_theta", float)} if "rope_theta" in fields else {}
    for place in ("rope_parameters", "rope_scaling"):
        rope = fields.get(place, {})
        rope = {name: value for name, value in rope.items() if value is not None} if isinstance(rope, dict) else rope
        plain = isinstance(rope, dict) and rope.keys() <= PLAIN_ROPE.keys() | {"rope_theta"}
        if not plain or any(value != PLAIN_ROPE[name] or isinstance(value, bool) for name, value in rope.items() if name in PLAIN_ROPE):
            raise ModelError(f"{path}: {place} = {json.dumps(rope)} is not supported, only plain rotary embeddings (type 'default') are")
        if "rope_theta" in rope:
            found[f"{place}.rope_theta"] = _number(path, rope, "rope_theta", float)
    if not found:
        raise ModelError(f"{path} has no field 'rope_theta', neither by itself nor in rope_parameters")
    if len(set(found.values())) > 1:
        raise ModelError(f"{path} contradicts itself: {', '.join(f'{name} = {value:g}' for name, value in found.items())}")
    return next(iter(found.values()))


def _check_layer_types(path: Path, fields: Mapping[str, Any], layers: int) -> None:
    types = fields.get("layer_types")
    if types is not None and not (isinstance(types, list) and len(types) == layers and all(kind == "full_attention" for kind in types)):
        raise ModelError(
            f"{path}: layer_types = {json.dumps(types)} is not supported, only 'full_attention' for each of num_hidden_layers = {layers} is"
        )


def _check_dtype(path: Path, fields: Mapping[str, Any]) -> None:
    """The tensors themselves say what they are; the field must only not be something else altogether."""
    given = {name: fields[name] for name in ("torch_dtype", "dtype") if fields.get(name, "auto") != "auto"}  # "auto" = as they are
    for name, value in given.items():
        if value not in DTYPES:
            raise ModelError(f"{path}: {name} = {json.dumps(value)} is not supported, only {', '.join(DTYPES)} are")
    if len(set(given.values())) > 1:
        raise ModelError(f"{path} contradicts itself: torch_dtype = {given['torch_dtype']}, dtype = {given['dtype']}")
