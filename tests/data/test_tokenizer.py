import json
import shutil
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

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


@pytest.mark.parametrize(
    ("stated", "processor_adds", "expected"),
    [(True, False, True), (False, True, False), (None, True, True), (None, False, False), (True, True, True)],
)
def test_whether_the_tokenizer_puts_a_bos_before_text(folder: Path, stated: bool | None, processor_adds: bool, expected: bool) -> None:
    _edit(folder / "tokenizer_config.json", bos_token="<|im_start|>", add_bos_token=stated)
    if processor_adds:
        backend = load_tokenizer(folder).backend
        backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 257)])
        backend.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).adds_bos is expected


def test_no_bos_token_means_none_is_put_before_text(folder: Path) -> None:
    _edit(folder / "tokenizer_config.json", add_bos_token=True)  # as transformers reads it
    assert (load_tokenizer(folder).bos_id, load_tokenizer(folder).adds_bos) == (None, False)


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


def test_a_slow_tokenizer_says_how_to_convert_it(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("")
    with pytest.raises(
        DataError, match=r"not found.*slow tokenizer \(vocab\.json and merges\.txt\): AutoTokenizer\.from_pretrained\('.*copy'\)"
    ):
        load_tokenizer(folder)


def test_a_template_that_is_not_text(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"chat_template\.jinja: not UTF-8"):
        load_tokenizer(folder)


@pytest.mark.parametrize("templates", [[], ["a"], [{"name": "default"}], [{"template": "a"}], 3])
def test_a_template_of_another_form_is_none(folder: Path, templates: object) -> None:
    (folder / "chat_template.jinja").unlink()
    _edit(folder / "tokenizer_config.json", chat_template=templates)
    assert load_tokenizer(folder).chat_template == ""


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "", "[" * 100_000], ids=["open", "list", "empty", "deep"])
def test_broken_files(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(DataError, match=name):
        load_tokenizer(folder)


def test_no_stop_token(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    _edit(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(DataError, match=r"no stop token.*eos_token_id"):
        load_tokenizer(folder)


@pytest.mark.parametrize("ids", [[], [99999], -1, 2**40, [258, 99999], ["258"], [True], 2.5])
def test_wrong_stop_ids(folder: Path, ids: object) -> None:
    _edit(folder / "generation_config.json", eos_token_id=ids)
    with pytest.raises(DataError, match="eos_token_id is"):
        load_tokenizer(folder)


@pytest.mark.parametrize("pad_id", [99999, -1, "256", True, [256]])
def test_wrong_pad_id(folder: Path, pad_id: object) -> None:
    _edit(folder / "tokenizer_config.json", pad_token=None)
    _edit(folder / "generation_config.json", pad_token_id=pad_id)
    with pytest.raises(DataError, match=r"generation_config\.json: pad_token_id is"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["pad_token", "bos_token"])
def test_special_token_outside_the_vocabulary(folder: Path, name: str) -> None:
    _edit(folder / "tokenizer_config.json", **{name: "<none>"})
    with pytest.raises(DataError, match=f"tokenizer_config.json: {name} is '<none>', which tokenizer.json does not hold"):
        load_tokenizer(folder)
