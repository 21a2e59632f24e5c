import string
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from configs.quickstart import get_config
from jaxprorl.data.prompts import Item
from jaxprorl.data.splits import SPLITS, Items, load_splits
from jaxprorl.data.tokenizer import Tokenizer
from jaxprorl.warmstart.solutions import demonstration
from jaxprorl.warmstart.tokenizer import SPECIAL_TOKENS, TAG_TOKENS, TEMPLATE_PHRASES, build_tokenizer, common_phrases, find_phrases

FILES = ["chat_template.jinja", "generation_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]


def _items(task: str, pairs: list[tuple[str, str]]) -> list[Item]:
    return [Item("d", task, ({"role": "user", "content": question},), answer, "here") for question, answer in pairs]


def test_size_and_files(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == tokenizer.backend.get_vocab_size() == 320
    assert sorted(file.name for file in tokenizer.path.iterdir()) == FILES
    assert all(tokenizer.decode([i]) for i in range(320))


def test_one_token_each(tokenizer: Tokenizer) -> None:
    for text in (*SPECIAL_TOKENS, *TAG_TOKENS, *TEMPLATE_PHRASES, *string.digits, *string.ascii_letters, "['", "', '", "']"):
        assert len(tokenizer.encode(text)) == 1, text
    for text in ("1234567890", string.ascii_letters, "answer", "Keep", "this"):
        assert len(tokenizer.encode(text)) == len(text)


def test_no_phrase_holds_a_digit(items: Items) -> None:
    phrases = find_phrases(items.train)
    assert 10 < len(phrases) < 40
    assert not any(character.isdigit() for phrase in phrases for character in phrase)
    assert "Spell this word backward (example: sun -> nus): " in phrases


def test_quickstart_prompts_are_short_and_keep_their_payload(tokenizer: Tokenizer, items: Items) -> None:
    splits = load_splits(get_config(), tokenizer, items)
    for name in SPLITS:
        for prompt in getattr(splits, name):
            assert 7 <= len(prompt.token_ids) <= 34
            pieces = [tokenizer.decode([i]) for i in prompt.token_ids]
            question = prompt.item["entry"]["question"]
            assert "".join(pieces) == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            digits = [piece for piece in pieces if any(character.isdigit() for character in piece)]
            assert digits == [character for character in question if character.isdigit()]
            if prompt.task == "spell_backward":
                assert "".join(pieces[2:-1]) == prompt.item["entry"]["metadata"]["word"]
                assert all(len(piece) == 1 for piece in pieces[2:-1])


def test_work_is_one_token_a_character(tokenizer: Tokenizer, items: Items) -> None:
    for item in items.train[::20]:
        text = demonstration(item.task, item.item["entry"])
        work = text.removeprefix("<think>").split("</think>")[0]
        assert len(tokenizer.encode(work)) == len(work)
        assert tokenizer.decode(tokenizer.encode(text)) == text


_TEXTS = st.lists(
    st.one_of(st.text(), st.sampled_from([*SPECIAL_TOKENS, *TAG_TOKENS, *TEMPLATE_PHRASES, "', '", " + ", "e\u0301", "<|im_"]))
)


@given(_TEXTS.map("".join))
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_round_trip_of_every_byte_sequence_and_code_point(tokenizer: Tokenizer) -> None:
    for start in range(0, 0x110000, 0x1000):
        text = "".join(chr(i) for i in range(start, start + 0x1000) if not 0xD800 <= i < 0xE000)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_files_are_the_same_every_time(tokenizer: Tokenizer, items: Items, tmp_path: Path) -> None:
    build_tokenizer(items.train, tmp_path)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (tokenizer.path / name).read_bytes()


def test_phrases_by_hand() -> None:
    texts = [f"How many {animal} are in {n} boxes of {n}?" for n in range(10) for animal in ("cats", "dogs")]
    # "How many cats are in " would be longer, and half of the texts hold it: both are fixed text.
    assert common_phrases(texts) == ["How many cats are in ", "How many dogs are in ", " boxes of "]


def test_phrases_stop_where_payload_starts() -> None:
    words = ["alpha", "also", "alpine", "beta", "bet", "better", "alter", "alto", "altar", "alpaca", "best", "belt"] * 3
    texts = [f"Say: {word}{i}!" for i, word in enumerate(words * 3)]
    assert common_phrases(texts) == ["Say: "]


def test_answer_words_stay_payload() -> None:
    pairs = [(f"Is {n} odd? Answer yes or no.", "yes" if n % 2 else "no") for n in range(40)]
    phrases = find_phrases(_items("odd", pairs))
    assert phrases == (" odd? Answer ", " or ", "Is ")


def test_choice_letters_stay_payload() -> None:
    pairs = [(f"Pick one of (A) {n} or (B) {n + 1}: ", "AB"[n % 2]) for n in range(40)]
    assert not any(set("AB") & set(phrase) for phrase in find_phrases(_items("choice", pairs)))


def test_letters_alone_are_no_phrase() -> None:
    assert common_phrases(["word", "word", "word"]) == []
    assert common_phrases([]) == []


def test_rare_text_is_no_phrase() -> None:
    assert common_phrases([f"{chr(97 + i) * 3} ?! {i}" for i in range(20)]) == [" ?! "]


def test_system_prompt_is_fixed_text(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(_items("t", [("q", "a")]), tmp_path, system_prompt="Use 2 steps.")
    assert [tokenizer.decode([i]) for i in tokenizer.encode("Use 2 steps.")] == ["Use ", "2", " steps."]


def test_phrases_that_would_not_come_back_stay_bytes(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(_items("t", [(f"{n}×é{n}", "") for n in range(20)]), tmp_path)
    assert tokenizer.decode(tokenizer.encode("3×é3")) == "3×é3"
    assert tokenizer.vocab_size % 64 == 0
