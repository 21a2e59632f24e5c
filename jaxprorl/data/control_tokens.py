"""Control tokens: what only a chat template may write. Where a message spells one, its letters are encoded, not the token.

The control tokens of a folder are those of its added tokens that are marked special, are named in `tokenizer_config.json` (BOS, EOS,
padding), end a completion, have the form `<|...|>`, or stand around messages in what the chat template writes. Tags such as `<think>`
or `<tool_call>` are none: they mark a part of a text, the model writes them too, and a message may explain them.
"""

import json
import re
from collections.abc import Mapping, Sequence

import tokenizers

from jaxprorl.data.tokenizer import Tokenizer
from jaxprorl.errors import DataError

Messages = Sequence[Mapping[str, str]]

_BARS = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_BRACKETS = re.compile(r"[<\[{].*[>\]}]", re.DOTALL)  # what a template writes may also hold an ordinary word that is an added token
_MARKS = range(0xF0000, 0xFFFFE)  # private characters: each stands for a text that must not become a token while a template is rendered
_NAMES = range(0x100000, 0x10FFFE)  # private characters: the names of control tokens in `_renamed`
MARKED_CONTENT = chr(_MARKS[0])  # of a message whose rendering shows what the template itself writes


class ControlTokens:
    """The control tokens of one tokenizer, and how to encode text that spells them.

    Args:
        written: what the chat template writes around messages.
    """

    def __init__(self, tokenizer: Tokenizer, written: str):
        self._tokenizer = tokenizer
        self.ids = _find(tokenizer, written)  # text -> id
        longest_first = sorted(self.ids, key=lambda text: (-len(text), text))
        self._longest = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._shortest = re.compile("|".join(map(re.escape, reversed(longest_first))) or r"(?!)")
        # A message that ends in the beginning of a control token, and the next one in its rest, would spell it together.
        self._beginnings = tuple({text[:end] for text in self.ids for end in range(1, len(text)) if text[:end].strip()})
        self._renamed: tokenizers.Tokenizer | None = None  # made when first needed: a large vocabulary takes half a second
        self._old_ids: dict[int, int] = {}

    def are_spelled(self, text: str) -> bool:
        """True if `text` spells a control token, or ends as one begins."""
        return bool(self._longest.search(text)) or text.endswith(self._beginnings)

    def mark(self, messages: Messages, template: str) -> tuple[list[dict[str, str]], dict[str, str]]:
        """`messages` with a private character for each text in them that is or begins a control token; and that text by character."""
        used = set(template).union(*(message["content"] for message in messages))
        free = (chr(code) for code in _MARKS if chr(code) not in used)
        marks: dict[str, str] = {}  # text -> its character

        def mark_of(text: str) -> str:
            return marks[text] if text in marks else marks.setdefault(text, next(free))

        marked = []
        for message in messages:
            content = self._shortest.sub(lambda found: mark_of(found[0]), message["content"])
            endings = [beginning for beginning in self._beginnings if content.endswith(beginning)]
            if endings:
                ending = max(endings, key=len)
                content = content.removesuffix(ending) + mark_of(ending)
            marked.append({**message, "content": content})
        return marked, {character: text for text, character in marks.items()}

    def encode(self, text: str, marks: Mapping[str, str]) -> list[int]:
        """Ids of a rendered text: control tokens that stand in it are tokens, the texts behind `marks` are letters.

        Raises:
            DataError: the text holds a character that stands for a control token here, or the tokenizer makes control tokens of letters.
        """
        names = {token: chr(code) for token, code in zip(self.ids, _NAMES, strict=False)}
        found = set(text) & set(names.values())
        if found:
            raise DataError(f"the text spells a control token and holds the private character U+{ord(min(found)):06X}: remove one of them")
        if self._renamed is None:
            self._renamed, self._old_ids = self._rename(names)
        written = len(self._longest.findall(text))
        renamed = self._longest.sub(lambda found: names[found[0]], text)
        ids = [self._old_ids.get(i, i) for i in self._renamed.encode(unmark(renamed, marks), add_special_tokens=False).ids]
        control_ids = set(self.ids.values())
        if sum(i in control_ids for i in ids) != written:
            raise DataError(f"{self._tokenizer.path}: this tokenizer makes control tokens of the letters that spell them")
        return ids

    def _rename(self, names: Mapping[str, str]) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The same tokenizer with control tokens that no text spells; and its ids of added tokens -> the ids that they have."""
        content = json.loads(self._tokenizer.backend.to_str())
        content["post_processor"] = None
        ids: dict[str, int] = {}
        for token in content["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
            ids[token["content"]] = token["id"]
        renamed = tokenizers.Tokenizer.from_str(json.dumps(content))
        old_ids = {i: ids[name] for name in ids if (i := renamed.token_to_id(name)) is not None}
        moved = {i for i, old in old_ids.items() if i != old}
        if moved and moved & set(renamed.get_vocab(with_added_tokens=False).values()):
            raise DataError(f"{self._tokenizer.path}: tokenizer.json gives an id twice; text that spells control tokens cannot be encoded")
        return renamed, old_ids


def unmark(text: str, marks: Mapping[str, str]) -> str:
    """`text` with what its private characters stand for."""
    return "".join(marks.get(character, character) for character in text)


def _find(tokenizer: Tokenizer, written: str) -> dict[str, int]:
    added = tokenizer.backend.get_added_tokens_decoder()
    named = set(tokenizer.special_tokens.values())
    return {
        token.content: token_id
        for token_id, token in added.items()
        if token.content
        and (
            token.special
            or token.content in named
            or token_id in tokenizer.stop_ids
            or _BARS.fullmatch(token.content)
            or (_BRACKETS.fullmatch(token.content) and token.content in written)
        )
    }
