from factories import tiny_model
from model_folders import MODELS

from jaxprorl.models.hf.names import hf_keys, hf_shape
from jaxprorl.models.qwen2 import declarations


def test_every_layer_has_its_own_keys() -> None:
    table = declarations(tiny_model())
    assert hf_keys(table["q_bias"]) == ["model.layers.0.self_attn.q_proj.bias", "model.layers.1.self_attn.q_proj.bias"]
    assert hf_keys(table["embed"]) == ["model.embed_tokens.weight"]


def test_shapes_are_those_of_one_layer_as_torch_stores_them() -> None:
    table = declarations(MODELS["untied"])
    shapes = {name: hf_shape(table[name]) for name in ("embed", "lm_head", "final_norm", "q_kernel", "q_bias", "k_kernel", "down_kernel")}
    assert shapes == {
        "embed": (48, 32),
        "lm_head": (48, 32),
        "final_norm": (32,),
        "q_kernel": (64, 32),  # out x in: 4 heads of 16
        "q_bias": (64,),
        "k_kernel": (32, 32),
        "down_kernel": (32, 64),
    }


def test_the_published_models_have_the_published_numbers_of_tensors() -> None:
    """2 and 12 per layer, one more with a head of its own: 290 in Qwen2.5-0.5B, 338 in 1.5B, 339 in 7B."""

    def count(layers: int, tied: bool) -> int:
        c = tiny_model(num_hidden_layers=layers, tie_word_embeddings=tied)
        return len({key for declaration in declarations(c).values() for key in hf_keys(declaration)})

    assert (count(24, True), count(28, True), count(28, False)) == (290, 338, 339)
