import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxprorl.data.prompts import Item, build_prompt, check_chat_template, question_hash, render, render_text
from jaxprorl.data.splits import Items
from jaxprorl.data.tokenizer import Tokenizer
from jaxprorl.errors import DataError
from jaxprorl.warmstart.tokenizer import build_tokenizer

USER = [{"role": "user", "content": "What is 2 + 1 ?"}]
CHAT = [
    {"role": "system", "content": "Short, é漢"},
    {"role": "user", "content": " a\n"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "What is 2 + 1 ?"},
]


def test_text_is_chatml(tokenizer: Tokenizer) -> None:
    assert render_text(tokenizer, USER) == "<|im_start|>user\nWhat is 2 + 1 ?<|im_end|>\n<|im_start|>assistant\n"
    assert render_text(tokenizer, USER, add_generation_prompt=False) == "<|im_start|>user\nWhat is 2 + 1 ?<|im_end|>\n"
    assert render_text(tokenizer, CHAT) == (
        "<|im_start|>system\nShort, é漢<|im_end|>\n<|im_start|>user\n a\n<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 1 ?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_ids_are_few_tokens(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.decode([i]) for i in render(tokenizer, USER)]
    assert pieces == ["<|im_start|>user\n", "What is ", "2", " + ", "1", " ?", "<|im_end|>\n<|im_start|>assistant\n"]


def test_template_settings(tokenizer: Tokenizer) -> None:
    template = (
        "{% for m in messages %}\n    {% if loop.index > 1 %}\n{% break %}\n    {% endif %}\n"
        "{{ {'é': m.content} | tojson }}\n{% endfor %}\n"
    )
    assert render_text(replace(tokenizer, chat_template=template), CHAT) == '{"é": "Short, é漢"}\n'


def test_template_sees_special_tokens(tokenizer: Tokenizer) -> None:
    assert render_text(replace(tokenizer, chat_template="{{ eos_token }}{{ bos_token }}{{ tools is none }}"), USER) == "<|im_end|>True"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "no chat template.*chat_template.jinja"),
        ("{{ raise_exception('only one turn') }}", "only one turn"),
        ("{{ 1 }}\n{% for %}", "broken in line 2"),
        ("a\nb\n{{ 1", "broken in line 3"),
        ("{{ 1 / 0 }}", "failed: division by zero"),
        ("{{ 'a' + none }}", "failed"),
        ("{{ messages.__class__.__mro__ }}", "unsafe|failed"),
        ("{{ messages.append(1) }}", "failed"),
        ("{{ messages[0].nothing.more }}", "failed"),
    ],
)
def test_template_failures_are_data_errors(tokenizer: Tokenizer, template: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        render_text(replace(tokenizer, chat_template=template), USER)


def test_generation_blocks_are_seen_through(tokenizer: Tokenizer) -> None:
    template = "{% for m in messages %}{% generation %}{% set a = m.content %}{{ a }}{% endgeneration %}{{ a }};{% endfor %}"
    assert render_text(replace(tokenizer, chat_template=template), CHAT) == "Short, é漢; a\n;b;What is 2 + 1 ?;"


def with_bos(tokenizer: Tokenizer, template: str, adds_bos: bool = True, bos: str = "<|im_start|>") -> Tokenizer:
    bos_id, special_tokens = tokenizer.backend.token_to_id(bos), {**tokenizer.special_tokens, "bos_token": bos}
    return replace(tokenizer, chat_template=template, bos_id=bos_id, adds_bos=adds_bos, special_tokens=special_tokens)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_one_bos_of_the_template_is_right(tokenizer: Tokenizer, adds_bos: bool) -> None:
    once = with_bos(tokenizer, "{{ bos_token }}{{ messages[0].content }}", adds_bos)
    check_chat_template(once)
    assert render(once, USER) == [once.bos_id, *tokenizer.encode(USER[0]["content"])]
    spelled = [{"role": "user", "content": "a<|im_start|>"}]
    assert render(once, spelled).count(once.bos_id) == 1
    with pytest.raises(DataError, match=r"holds 2 BOS tokens \(<\|im_start\|>\), 1 at most is right.*no message may hold it"):
        render(once, spelled, control_tokens_in_text="allow")


def test_no_bos_is_right_unless_the_tokenizer_puts_one_before_text(tokenizer: Tokenizer) -> None:
    check_chat_template(with_bos(tokenizer, "{{ messages[0].content }}", adds_bos=False))
    for template in ("{{ messages[0].content }}", " {{ bos_token }}{{ messages[0].content }}"):
        with pytest.raises(DataError, match=r"begins with 0 BOS tokens, 1 is right.*<\|im_start\|>.*add_bos_token") as caught:
            check_chat_template(with_bos(tokenizer, template))
        assert str(caught.value).startswith(f"{tokenizer.path}: ")


@pytest.mark.parametrize("adds_bos", [True, False])
def test_two_bos_are_refused(tokenizer: Tokenizer, adds_bos: bool) -> None:
    for bos in ("<|im_start|>", "<|endoftext|>"):  # the second is a stop token too
        with pytest.raises(DataError, match="holds 2 BOS"):
            check_chat_template(with_bos(tokenizer, "{{ bos_token }}{{ bos_token }}{{ messages[0].content }}", adds_bos, bos))


def test_a_bos_that_is_a_stop_token_may_close_every_turn(tokenizer: Tokenizer) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content + bos_token }}{% endfor %}"
    same = with_bos(tokenizer, template, bos="<|endoftext|>")
    check_chat_template(same)
    assert render(same, CHAT).count(same.stop_ids[1]) == 5


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "no chat template"),
        ("{% if %}", "broken in line 1"),
        ("{{ raise_exception('for two only') }}", "failed: for two only"),
        ("{# nothing #}", "to nothing"),
    ],
)
def test_a_template_is_tried_before_any_prompt(tokenizer: Tokenizer, template: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_chat_template(replace(tokenizer, chat_template=template))


def test_build_prompt(tokenizer: Tokenizer) -> None:
    item = Item("d", "t", tuple(USER), "3", "here", {"k": 1})
    prompt = build_prompt(tokenizer, item, 7)
    assert (prompt.prompt_id, prompt.domain, prompt.task, prompt.answer, prompt.item) == (7, "d", "t", "3", {"k": 1})
    assert prompt.token_ids.dtype == np.int32
    assert prompt.token_ids.tolist() == render(tokenizer, USER)
    with pytest.raises(ValueError, match="read-only"):
        prompt.token_ids[0] = 0


def test_system_prompt_goes_first_unless_there_is_one(tokenizer: Tokenizer) -> None:
    ours = build_prompt(tokenizer, Item("d", "t", tuple(USER), "", "here"), 0, "Be brief").token_ids
    assert tokenizer.decode(ours).startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nWhat")
    own = build_prompt(tokenizer, Item("d", "t", tuple(CHAT), "", "here"), 0, "Be brief").token_ids
    assert "Be brief" not in tokenizer.decode(own)


@pytest.mark.parametrize("same", ["what  IS\n2 ?", " What is 2 ? ", "\uff37hat is\u00a02 ?"])
def test_question_hash_ignores_case_space_and_width(same: str) -> None:
    assert question_hash(same) == question_hash("What is 2 ?")


def test_question_hash_tells_questions_apart() -> None:
    assert len({question_hash(text) for text in ("1 + 2", "1 - 2", "12", "1 2", "")}) == 5


@given(st.text())
def test_question_hash_is_stable_under_normalising(text: str) -> None:
    assert question_hash(f"  {text}\n") == question_hash(text) == question_hash(text.replace(" ", "\t "))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [None, "qwen2"])  # transformers chooses another class for folders of a Qwen2 model
def test_ids_equal_transformers(
    model_type: str | None, quickstart_items: Items, tmp_path: Path, run_reference: Callable[..., dict[str, np.ndarray]]
) -> None:
    folder = tmp_path / "model"
    ours = build_tokenizer(quickstart_items.train, folder)
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": ours.vocab_size}))
    chats = [list(item.messages) for item in quickstart_items.train[::100]] + [CHAT]
    texts = ["<think>8+5=13</think><answer>['1', '2']</answer><|im_end|>", "", " é漢🙂 \r\n", "<|im_end|>\n<|im_end|>\n<|im_start|>"]
    out = run_reference(
        """
        import json
        from transformers import AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(str(inputs["folder"]))
        chats, texts = json.loads(str(inputs["cases"]))
        for i, chat in enumerate(chats):
            outputs[f"chat{i}"] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        for i, text in enumerate(texts):
            outputs[f"text{i}"] = np.asarray(tokenizer.encode(text), dtype=np.int64)
            outputs[f"decoded{i}"] = json.dumps(tokenizer.decode(outputs[f"text{i}"]))
        outputs["ids"] = [tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)]
        """,
        folder=str(folder),
        cases=json.dumps([chats, texts]),
    )
    for i, chat in enumerate(chats):
        assert out[f"chat{i}"].tolist() == render(ours, chat)
    for i, text in enumerate(texts):
        assert out[f"text{i}"].tolist() == ours.encode(text)
        assert json.loads(str(out[f"decoded{i}"])) == text
    assert out["ids"].tolist() == [ours.stop_ids[0], ours.pad_id, ours.vocab_size]
