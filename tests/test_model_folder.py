import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from factories import random_params, tiny_model
from model_folders import edit_json, edit_tensors

from jaxprorl.data.tokenizer import load_tokenizer
from jaxprorl.errors import DataError, ModelError, UserError
from jaxprorl.model_folder import QUESTION, check_folder, doubtful_stops
from jaxprorl.models.hf import write_folder
from jaxprorl.models.qwen2 import parameter_count
from jaxprorl.warmstart.tokenizer import build_tokenizer

C = tiny_model(vocab_size=320, rope_theta=1e6)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    tokenizer = build_tokenizer([], folder / "tokenizer")
    write_folder(folder / "model", C, random_params(C), tokenizer.path, tokenizer.stop_ids, tokenizer.pad_id, dtype="bfloat16")
    return folder / "model"


@pytest.fixture
def model(source: Path, tmp_path: Path) -> Path:
    """A copy that may be spoilt."""
    return Path(shutil.copytree(source, tmp_path / "model"))


def test_a_sound_folder_is_described(source: Path) -> None:
    found = check_folder(source)
    assert found.config == C
    assert found.scalars == {"bfloat16": parameter_count(C)}
    assert QUESTION in found.tokenizer.decode(found.prompt_ids)


def test_the_command_prints_what_the_folder_holds(source: Path, import_command: Callable[[Path], tuple[int, str, str]]) -> None:
    status, out, err = import_command(source)
    assert (status, err) == (0, "")
    tokenizer = check_folder(source).tokenizer
    for words in (
        "Qwen2ForCausalLM, 2 layers, 32 wide, 4 heads (2 key-value) of 8",
        f"parameters     {parameter_count(C):,}, {4 * parameter_count(C) / 1e3:.1f} kB in memory",
        f"stored as      bfloat16 ({parameter_count(C):,})",
        "output matrix  the embedding (tied)",
        "rope theta     1e+06",
        "context        64 tokens",
        f"vocabulary     {tokenizer.vocab_size} tokens of 320 rows",
        f"stop tokens    {tokenizer.stop_ids[0]} {tokenizer.decode([tokenizer.stop_ids[0]])!r}, {tokenizer.stop_ids[1]} ",
        "BOS token      none",
        QUESTION,
        f"sound; train on it with --config.model.path={source}",
    ):
        assert words in out, words


def test_ids_above_the_embedding_are_refused(model: Path) -> None:
    edit_json(model / "config.json", vocab_size=64)
    edit_tensors(model, {"model.embed_tokens.weight": np.ones((64, 32), "f4")})
    with pytest.raises(ModelError, match=r"tokenizer\.json has \d+ tokens, config\.json vocab_size = 64"):
        check_folder(model)


def spoil(name: str, model: Path) -> None:
    if name == "no tokenizer":
        (model / "tokenizer.json").unlink()
    elif name == "no template":
        (model / "chat_template.jinja").unlink()
    elif name == "no stop token":
        (model / "generation_config.json").unlink()
        (model / "tokenizer_config.json").write_text("{}")
    elif name == "unknown field":
        edit_json(model / "config.json", sparse_layers=3)
    elif name == "nan":
        edit_tensors(model, {"model.norm.weight": np.full(32, np.nan, "f4")})
    elif name == "truncated":
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
    elif name == "no weights":
        (model / "model.safetensors").rename(model / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("no tokenizer", DataError, "tokenizer.json: not found"),
        ("no template", DataError, "no chat template"),
        ("no stop token", DataError, "no stop token"),
        ("unknown field", ModelError, "sparse_layers"),
        ("nan", ModelError, "model.norm.weight holds values that are not finite"),
        ("truncated", ModelError, "model.safetensors cannot be read"),
        ("no weights", ModelError, "pytorch_model.bin"),
    ],
)
def test_each_fault_is_one_clear_line(
    name: str, error: type[UserError], words: str, model: Path, import_command: Callable[[Path], tuple[int, str, str]]
) -> None:
    spoil(name, model)
    with pytest.raises(error) as caught:
        check_folder(model)
    assert words in str(caught.value)
    status, out, err = import_command(model)
    assert (status, out, err) == (2, "", f"error: {caught.value}\n")


def test_the_template_must_not_emit_two_bos_tokens(model: Path) -> None:
    edit_json(model / "tokenizer_config.json", bos_token="</answer>")  # a token that the template does not use
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text("{{ bos_token }}" + template)
    assert check_folder(model).tokenizer.bos_id is not None
    (model / "chat_template.jinja").write_text("{{ bos_token }}{{ bos_token }}" + template)
    with pytest.raises(DataError, match="2 BOS tokens"):
        check_folder(model)


DROPPING = {
    "hello": "hello",
    "another role": "{% for m in messages if m.role == 'human' %}{{ m.content }}{% endfor %}Go.",
    "system only": "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}<|im_start|>assistant\n",
    "length": "{% for m in messages %}{{ m.content | length }}{% endfor %}",
    "first word": "{% for m in messages %}{{ m.content.split(' ')[0] }}{% endfor %}",
    "earlier turns": "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}<|im_start|>assistant\n",
    "another name": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.text }}<|im_end|>{% endfor %}",
}


@pytest.mark.parametrize("name", DROPPING)
def test_a_template_that_drops_the_question_is_refused(name: str, model: Path) -> None:
    (model / "chat_template.jinja").write_text(DROPPING[name])
    with pytest.raises(DataError, match="the chat template drops the question: 'What is 1"):
        check_folder(model)


def test_a_stop_id_that_is_ordinary_text_is_told(model: Path, import_command: Callable[[Path], tuple[int, str, str]]) -> None:
    tokenizer = check_folder(model).tokenizer
    assert doubtful_stops(tokenizer) == []
    for text in ("a", " ", "7"):
        stop = tokenizer.encode(text)[0]
        edit_json(model / "generation_config.json", eos_token_id=[stop, tokenizer.stop_ids[0]])
        (told,) = doubtful_stops(load_tokenizer(model))
        assert f"stop id {stop} is {text!r}, a token of ordinary text" in told
        status, out, _ = import_command(model)
        assert status == 0 and f"WARNING: {told}\n" in out
    edit_json(model / "generation_config.json", eos_token_id=tokenizer.encode("</answer>"))
    assert doubtful_stops(load_tokenizer(model)) == [], "a token that was added for the purpose"
