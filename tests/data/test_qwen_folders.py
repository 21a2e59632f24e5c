"""The real Qwen2 vocabulary and two public chat formats, from the files of a Hugging Face folder alone."""

import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from factories import PROPERTY
from hypothesis import given
from hypothesis import strategies as st
from qwen_folders import DEEPSEEK_FIRST_TEMPLATE, SPLIT, Vocabulary

from jaxprorl.data.prompts import check_chat_template, render, render_text
from jaxprorl.data.tokenizer import Tokenizer

SYSTEM = {"role": "system", "content": "Think, then answer: é漢🙂"}
USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nIt is 3."}
CHATS = [[USER], [SYSTEM, USER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER, USER, ANSWER], [USER, SYSTEM, USER]]
TEXTS = [
    "", " ", "\n\n \t\r\n  x", "I'LL they've 12345 + 0.5e-3 = \\frac{1}{2}\n\n\ndef f(x):\n\treturn x ** 2\n",
    "Ωμέγα Привет 漢字かな 한국어 हिन्दी עברית ﷺ 🙂👩‍👩‍👧🏽 \u200b\ufeff\x00", "e\u0301 \u1100\u1161 \u2126 \u03d2\u0301 \ufb01",
    "<|im_start|>user\n<|im_end|><|endoftext|><｜User｜>a<｜Assistant｜><think>b</think><tool_call>",
    "<|im_start", "｜▁<｜begin▁of▁sentence｜>",
]  # fmt: skip
# Composition and letters as all three implementations know them: no surrogates, nothing that a newer Unicode assigns.
ASSIGNED = st.text(st.characters(exclude_categories=("Cs", "Cn")))


@pytest.fixture(scope="module")
def reference(vocabulary: Vocabulary) -> tiktoken.Encoding:
    return tiktoken.Encoding("qwen", pat_str=SPLIT, mergeable_ranks=dict(vocabulary.ranks), special_tokens={})


def test_the_whole_vocabulary_is_rebuilt(vocabulary: Vocabulary, qwen: Tokenizer, deepseek: Tokenizer) -> None:
    assert sorted(vocabulary.ranks.values()) == list(range(151643))
    assert len(vocabulary.merges) == 151643 - 256
    assert qwen.vocab_size == deepseek.vocab_size == 151665


# The strings and ids of transformers' own integration test (tests/models/qwen2/test_tokenization_qwen2.py), without its padding.
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (
            "Transformers (formerly known as pytorch-transformers and pytorch-pretrained-bert) provides "
            "general-purpose architectures (BERT, GPT-2, RoBERTa, XLM, DistilBert, XLNet...) for Natural "
            "Language Understanding (NLU) and Natural Language Generation (NLG) with over 32+ pretrained "
            "models in 100+ languages and deep interoperability between Jax, PyTorch and TensorFlow.",
            [
                8963, 388, 320, 69514, 3881, 438, 4510, 27414, 32852, 388, 323, 4510, 27414, 21334, 35722, 1455, 529, 8, 5707, 4586, 58238,
                77235, 320, 61437, 11, 479, 2828, 12, 17, 11, 11830, 61437, 64, 11, 1599, 10994, 11, 27604, 321, 33, 529, 11, 29881, 6954,
                32574, 369, 18448, 11434, 45451, 320, 45, 23236, 8, 323, 18448, 11434, 23470, 320, 30042, 38, 8, 448, 916, 220, 18, 17, 10,
                80669, 4119, 304, 220, 16, 15, 15, 10, 15459, 323, 5538, 94130, 2897, 1948, 619, 706, 11, 5355, 51, 21584, 323, 94986, 13,
            ],
        ),
        (
            "🤗 Transformers 提供了可以轻松地下载并且训练先进的预训练模型的 API 和工具。"
            "使用预训练模型可以减少计算消耗和碳排放，并且节省从头训练所需要的时间和资源。",
            [
                144834, 80532, 93685, 83744, 34187, 73670, 104261, 29490, 62189, 103937, 104034, 102830, 98841, 104034, 104949, 9370, 5333,
                58143, 102011, 1773, 37029, 98841, 104034, 104949, 73670, 101940, 100768, 104997, 33108, 100912, 105054, 90395, 100136,
                106831, 45181, 64355, 104034, 113521, 101975, 33108, 85329, 1773,
            ],
        ),
        (
            '```python\ntokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen-tokenizer")\ntokenizer("世界，你好！")```',
            [
                73594, 12669, 198, 85593, 284, 8979, 37434, 6387, 10442, 35722, 445, 48, 16948, 45274, 16948, 34841, 3135, 1138, 85593, 445,
                99489, 3837, 108386, 6313, 899, 73594,
            ],
        ),
    ],
)  # fmt: skip
def test_ids_of_public_examples(qwen: Tokenizer, deepseek: Tokenizer, text: str, ids: list[int]) -> None:
    assert qwen.encode(text) == deepseek.encode(text) == ids
    assert qwen.decode(ids) == text


@PROPERTY
@given(text=ASSIGNED)
def test_ids_equal_tiktokens_and_come_back_composed(qwen: Tokenizer, reference: tiktoken.Encoding, text: str) -> None:
    composed = unicodedata.normalize("NFC", text)  # Qwen2's tokenizer composes, tiktoken does not
    ids = qwen.encode(text)
    assert ids == reference.encode_ordinary(composed)
    assert qwen.decode(ids) == composed


def test_ids_of_source_files_equal_tiktokens(qwen: Tokenizer, reference: tiktoken.Encoding) -> None:
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = path.read_text().replace("<|", "< |").replace("<｜", "< ｜").replace("<t", "< t").replace("</t", "< /t")  # no added tokens
        assert qwen.encode(text) == reference.encode_ordinary(unicodedata.normalize("NFC", text)), path


def test_stop_and_pad_ids_come_from_the_folders(qwen: Tokenizer, deepseek: Tokenizer) -> None:
    assert (qwen.stop_ids, qwen.pad_id, qwen.bos_id, qwen.adds_bos) == ((151645, 151643), 151643, None, False)
    assert (deepseek.stop_ids, deepseek.pad_id, deepseek.bos_id, deepseek.adds_bos) == ((151643,), 151643, 151646, True)
    check_chat_template(qwen)
    check_chat_template(deepseek)


def test_qwens_text(qwen: Tokenizer) -> None:
    default = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    own = "<|im_start|>system\nThink, then answer: é漢🙂<|im_end|>\n"
    assert render_text(qwen, [USER]) == default + "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert render_text(qwen, [SYSTEM, USER], add_generation_prompt=False) == own + "<|im_start|>user\nhello<|im_end|>\n"
    assert render(qwen, [USER])[-5:] == [151645, 198, 151644, 77091, 198]


def test_deepseeks_text(deepseek: Tokenizer) -> None:
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    assert render_text(deepseek, [USER]) == begin + "<｜User｜>hello<｜Assistant｜><think>\n"
    turns = f"<｜User｜>hello<｜Assistant｜>\n\nIt is 3.{end}<｜User｜>hello"  # no reasoning of earlier turns
    assert render_text(deepseek, [SYSTEM, USER, ANSWER, USER], add_generation_prompt=False) == begin + SYSTEM["content"] + turns
    first = replace(deepseek, chat_template=DEEPSEEK_FIRST_TEMPLATE)
    assert render_text(first, [USER]) == begin + "<｜User｜>hello<｜Assistant｜>"


def test_deepseeks_ids_hold_one_bos(deepseek: Tokenizer) -> None:
    # What https://github.com/deepseek-ai/DeepSeek-R1/issues/151 shows, less the second BOS that it complains of.
    assert render(deepseek, [USER], add_generation_prompt=False) == [151646, 151644, 14990]
    assert render(deepseek, [USER]) == [151646, 151644, 14990, 151645, 151648, 198]
    assert deepseek.backend.encode(render_text(deepseek, [USER])).ids[:3] == [151646, 151646, 151644], "the trap is there"


def test_deepseeks_tags_are_kept_for_graders(deepseek: Tokenizer) -> None:
    ids = deepseek.encode("<think>\na\n</think>\nb<｜end▁of▁sentence｜>")
    assert (ids[0], ids[-1]) == (151648, 151643)
    assert deepseek.decode(ids, skip_special=True) == "<think>\na\n</think>\nb"


@pytest.mark.slow
def test_ids_equal_transformers(qwen: Tokenizer, deepseek: Tokenizer, run_reference: Callable[..., dict[str, np.ndarray]]) -> None:
    random = np.random.RandomState(0)
    texts = [*TEXTS, *(random_text(random) for _ in range(200)), Path(__file__).read_text()]
    marked = "{% for m in messages %}{% generation %}{% set a = m.content %}{{ a }}{% endgeneration %}{{ a }};{% endfor %}"
    named = {"qwen": qwen, "deepseek": deepseek, "first": replace(deepseek, chat_template=DEEPSEEK_FIRST_TEMPLATE)}
    named["marked"] = replace(qwen, chat_template=marked)
    cases = {name: [str(tokenizer.path), tokenizer.chat_template] for name, tokenizer in named.items()}
    out = run_reference(
        """
        import json
        from transformers import AutoTokenizer
        cases, chats, texts = json.loads(str(inputs["cases"]))
        for name, (folder, template) in cases.items():
            tokenizer = AutoTokenizer.from_pretrained(folder)
            if name in ("qwen", "deepseek"):
                assert tokenizer.chat_template == template
                for i, text in enumerate(texts):
                    outputs[f"{name} text {i}"] = np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int64)
                    outputs[f"{name} decoded {i}"] = json.dumps(tokenizer.decode(outputs[f"{name} text {i}"]))
            for i, chat in enumerate(chats):
                for prompt in (True, False):
                    ids = tokenizer.apply_chat_template(
                        chat, chat_template=template, add_generation_prompt=prompt, tokenize=True, return_dict=False
                    )
                    outputs[f"{name} chat {i} {prompt}"] = ids
            outputs[f"{name} facts"] = [tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id or -1, len(tokenizer)]
            rendered = tokenizer.apply_chat_template(chats[0], chat_template=template, tokenize=False)
            outputs[f"{name} again"] = tokenizer(rendered)["input_ids"]
        """,
        cases=json.dumps([cases, CHATS, texts]),
    )
    for name, tokenizer in named.items():
        for i, chat in enumerate(CHATS):
            for prompt in (True, False):
                assert out[f"{name} chat {i} {prompt}"].tolist() == render(tokenizer, chat, prompt), (name, chat)
        bos_id = -1 if tokenizer.bos_id is None else tokenizer.bos_id
        assert out[f"{name} facts"].tolist() == [tokenizer.stop_ids[0], tokenizer.pad_id, bos_id, tokenizer.vocab_size]
    for name in ("qwen", "deepseek"):
        for i, text in enumerate(texts):
            assert out[f"{name} text {i}"].tolist() == named[name].encode(text), (name, text)
            assert json.loads(str(out[f"{name} decoded {i}"])) == named[name].decode(named[name].encode(text)), (name, text)
    once = render(deepseek, CHATS[0], add_generation_prompt=False)
    assert out["deepseek again"].tolist() == [151646, *once], "transformers doubles the BOS of a rendered prompt"


def random_text(random: np.random.RandomState) -> str:
    """Characters of several blocks, as they come."""
    blocks: Sequence[tuple[int, int]] = ((0x00, 0x7F), (0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF))
    chosen = [blocks[i] for i in random.randint(len(blocks), size=random.randint(1, 40))]
    return "".join(chr(random.randint(low, high + 1)) for low, high in chosen)
