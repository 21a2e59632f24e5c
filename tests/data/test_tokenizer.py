import json
import shutil
from pathlib import Path

import pytest

from jaxprorl.data.tokenizer import Tokenizer, load_tokenizer
from jaxprorl.errors import DataError


@pytest.fixture
def folder(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tokenizer.path, tmp_path / "copy"))


def _edit(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def test_reads_ids_and_template(tokenizer: Tokenizer) -> None:
    assert tokenizer.stop_ids == (tokenizer.backend.token_to_id("<|im_end|>"), tokenizer.backend.token_to_id("<|endoftext|>"))
    assert tokenizer.pad_id == tokenizer.backend.token_to_id("<|endoftext|>")
    assert tokenizer.bos_id is None
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert "im_start" in tokenizer.chat_template


def test_encode_adds_nothing(folder: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    plain = load_tokenizer(folder)
    end = plain.stop_ids[0]
    plain.backend.post_processor = TemplateProcessing(single="<|im_end|> $A", special_tokens=[("<|im_end|>", end)])
    plain.backend.enable_truncation(3)
    plain.backend.enable_padding(length=50)
    plain.backend.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).encode("hello") == [plain.backend.token_to_id(letter) for letter in "hello"]


def test_skip_special_keeps_tags(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\n<think>a</think><|im_end|>")
    assert tokenizer.decode(ids) == "<|im_start|>user\n<think>a</think><|im_end|>"
    assert tokenizer.decode(ids, skip_special=True) == "<think>a</think>"


def test_one_stop_id_and_no_pad(folder: Path) -> None:
    _edit(folder / "generation_config.json", eos_token_id=258, pad_token_id=None)
    _edit(folder / "tokenizer_config.json", pad_token=None)
    assert (load_tokenizer(folder).stop_ids, load_tokenizer(folder).pad_id) == ((258,), 258)


def test_pad_from_generation_config(folder: Path) -> None:
    _edit(folder / "tokenizer_config.json", pad_token=None)
    assert load_tokenizer(folder).pad_id == 256


def test_falls_back_to_the_tokenizers_eos(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    _edit(folder / "tokenizer_config.json", eos_token={"content": "<|im_end|>", "special": True})
    assert load_tokenizer(folder).stop_ids == (258,)


def test_bos_is_read(folder: Path) -> None:
    _edit(folder / "tokenizer_config.json", bos_token="<|im_start|>")
    assert load_tokenizer(folder).bos_id == 257


def test_template_in_tokenizer_config(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    assert load_tokenizer(folder).chat_template == ""
    _edit(folder / "tokenizer_config.json", chat_template="one")
    assert load_tokenizer(folder).chat_template == "one"
    _edit(folder / "tokenizer_config.json", chat_template=[{"name": "tool", "template": "a"}, {"name": "default", "template": "b"}])
    assert load_tokenizer(folder).chat_template == "b"


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing.tokenizer\.json: not found.*save_pretrained"):
        load_tokenizer(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_broken_files(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(DataError, match=name):
        load_tokenizer(folder)


def test_no_stop_token(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    _edit(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(DataError, match=r"no stop token.*eos_token_id"):
        load_tokenizer(folder)


@pytest.mark.parametrize("ids", [[], [99999], ["258"], [True], 2.5])
def test_wrong_stop_ids(folder: Path, ids: object) -> None:
    _edit(folder / "generation_config.json", eos_token_id=ids)
    with pytest.raises(DataError, match="eos_token_id is"):
        load_tokenizer(folder)


def test_unknown_pad_token(folder: Path) -> None:
    _edit(folder / "tokenizer_config.json", pad_token="<pad>")
    with pytest.raises(DataError, match="pad_token is '<pad>'"):
        load_tokenizer(folder)
