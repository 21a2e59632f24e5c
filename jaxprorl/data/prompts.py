"""From a question to token ids: the one place where a prompt is rendered."""

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxprorl.data.control_tokens import MARKED_CONTENT, ControlTokens, unmark
from jaxprorl.data.tokenizer import Tokenizer
from jaxprorl.errors import DataError
from jaxprorl.types import Prompt

Messages = Sequence[Mapping[str, str]]
PROBE = ({"role": "user", "content": "1 + 1"},)
QUESTIONS = (("What is 1 + 1?", "What is 1 + 3?"), ("Name a cat.", "Sing of dogs."))


@dataclass(frozen=True)
class Item:
    """A question before rendering.

    Attributes:
        domain, task, answer, item: as in `Prompt`.
        messages: chat messages, each {"role", "content"}, without the configured system message.
        place: where it came from, for error messages (task, seed and index; or file and line).
    """

    domain: str
    task: str
    messages: Messages
    answer: str
    place: str
    item: Mapping[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """The text of all messages."""
        return "\n".join(message["content"] for message in self.messages)


def question_hash(text: str) -> str:
    """Hex sha256 of the normalised question: NFKC, case folded, white space collapsed. Questions with the same one look alike."""
    normalised = " ".join(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).split())
    return hashlib.sha256(normalised.encode("utf-8", "surrogatepass")).hexdigest()


def render_text(tokenizer: Tokenizer, messages: Messages, add_generation_prompt: bool = True) -> str:
    """The chat template's text for `messages`.

    Raises:
        DataError: the folder has no chat template, its syntax is wrong (names the line), or it refuses these messages.
    """
    if not tokenizer.chat_template:
        raise DataError(f"{tokenizer.path}: no chat template. Add chat_template.jinja to the folder.")
    try:
        return _compile(tokenizer.chat_template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            **tokenizer.special_tokens,
        )
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"{tokenizer.path}: the chat template is broken in line {error.lineno}: {error.message}") from error
    except Exception as error:  # a template can fail in every way that Python knows
        raise DataError(f"{tokenizer.path}: the chat template failed: {error}") from error


def render(tokenizer: Tokenizer, messages: Messages, add_generation_prompt: bool = True, control_tokens_in_text: str = "text") -> list[int]:
    """Token ids of a conversation. Nothing else in the package turns a prompt into ids, so no prompt gets a second BOS.

    Only the template writes a BOS: whatever the tokenizer puts before plain text is left out, as in transformers' `apply_chat_template`.

    Args:
        control_tokens_in_text: what a message spells becomes: "text" = letters, so that only the template writes control tokens;
            "allow" = the token, as in transformers.

    Raises:
        DataError: see `render_text`; the template changes text that spells a control token; or the ids hold more than one BOS.
    """
    text, controls = render_text(tokenizer, messages, add_generation_prompt), _control_tokens(tokenizer)
    if control_tokens_in_text == "allow" or not any(controls.are_spelled(message["content"]) for message in messages):
        ids = tokenizer.encode(text)
    else:
        marked, marks = controls.mark(messages, tokenizer.chat_template)
        marked_text = render_text(tokenizer, marked, add_generation_prompt)
        if unmark(marked_text, marks) != text:
            raise DataError(
                f"{tokenizer.path}: the chat template treats {' and '.join(map(repr, marks.values()))} in a message in a way of its "
                "own, so it is not known which control tokens are the message's. Take it out of the message, or, if it is meant as a "
                "token, set data.control_tokens_in_text = 'allow'"
            )
        ids = controls.encode(marked_text, marks)
    bos = tokenizer.bos_id
    # A BOS that is also a stop token may close every turn; elsewhere a second one is a fault.
    seen = ids[:2] if bos in tokenizer.stop_ids else ids
    if bos is not None and seen.count(bos) > 1:
        raise DataError(
            f"{tokenizer.path}: the rendered prompt holds {seen.count(bos)} BOS tokens ({tokenizer.special_tokens['bos_token']}), "
            "1 at most is right: the chat template must write it once, and no message may hold it"
        )
    return ids


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of text that is no conversation, with control tokens that it spells as letters."""
    controls = _control_tokens(tokenizer)
    marked, marks = controls.mark([{"content": text}], "")
    return controls.encode(marked[0]["content"], marks) if marks else tokenizer.encode(text)


def check_chat_template(tokenizer: Tokenizer) -> None:
    """Renders a short conversation, so that a folder which would make wrong prompts is refused before any long work.

    Raises:
        DataError: see `render`; or the prompt is empty, or does not begin with the BOS that the tokenizer puts before every text.
    """
    ids = render(tokenizer, PROBE)
    if not ids:
        raise DataError(f"{tokenizer.path}: the chat template renders {list(PROBE)} to nothing")
    if tokenizer.adds_bos and ids[0] != tokenizer.bos_id:
        raise DataError(
            f"{tokenizer.path}: the rendered prompt begins with 0 BOS tokens, 1 is right: the tokenizer puts "
            f"{tokenizer.special_tokens['bos_token']} before every text (add_bos_token in tokenizer_config.json, or the post-processor "
            "of tokenizer.json). Begin the chat template with {{ bos_token }}; if the model knows prompts without it, set add_bos_token to "
            "false"
        )
    check_questions_show(tokenizer, [PROBE])


def check_questions_show(tokenizer: Tokenizer, conversations: Iterable[Messages]) -> None:
    """Renders each conversation with other last questions, so that a template which drops them is refused.

    Args:
        conversations: their last messages are a user's; those of the same roles are rendered once.

    Raises:
        DataError: two different questions become the same prompt; or see `render`.
    """
    for messages in {tuple(message["role"] for message in messages): messages for messages in conversations}.values():
        for pair in QUESTIONS:
            one, other = (render(tokenizer, [*messages[:-1], {"role": "user", "content": text}]) for text in pair)
            if one == other:
                roles = ", ".join(message["role"] for message in messages)
                raise DataError(
                    f"{tokenizer.path}: the chat template drops the question: {pair[0]!r} and {pair[1]!r} (messages: {roles}) become the "
                    f"same prompt, {tokenizer.decode(one)[:200]!r}. It must write the content of every message whose role is 'user'"
                )


def build_prompt(tokenizer: Tokenizer, item: Item, prompt_id: int, system_prompt: str = "", control_tokens_in_text: str = "text") -> Prompt:
    """Renders an item. `system_prompt` goes first unless it is empty or the item brings its own system message.

    Raises:
        DataError: see `render`; names the item's place.
    """
    try:
        ids = render(tokenizer, with_system(item.messages, system_prompt), control_tokens_in_text=control_tokens_in_text)
    except DataError as error:
        raise DataError(f"{item.place}: {error}") from error
    token_ids = np.asarray(ids, dtype=np.int32)
    token_ids.flags.writeable = False
    return Prompt(prompt_id=prompt_id, domain=item.domain, token_ids=token_ids, task=item.task, answer=item.answer, item=item.item)


def with_system(messages: Messages, system_prompt: str) -> Messages:
    """The conversation with the configured system message, unless that is empty or it has one of its own."""
    if system_prompt and messages[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return messages


@lru_cache(maxsize=8)
def _control_tokens(tokenizer: Tokenizer) -> ControlTokens:
    return ControlTokens(tokenizer, _written_by_template(tokenizer))


def _written_by_template(tokenizer: Tokenizer) -> str:
    """What the chat template writes around the messages of a conversation that all roles have a part in, or of one question."""
    for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user"), ("user",)):
        try:
            return render_text(tokenizer, [{"role": role, "content": MARKED_CONTENT} for role in roles], add_generation_prompt=False)
        except DataError:  # some templates refuse a system message; a broken one is told of where a prompt is rendered
            continue
    return ""


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    # The settings transformers compiles templates with. Its `strftime_now` is left out on purpose: prompts must not change
    # with the day, and templates that know it test whether it is defined.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(template)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks what an assistant wrote for those who mask by it; rendered as if it were not there."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own form)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
