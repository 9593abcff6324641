"""Chat messages as token deltas: every token is appended once and never re-tokenised.

The deltas are cut out of the tokenizer's own chat template, so that the policy sees the markers
that the model was trained with. Cuts are at special tokens, across which tokenisation cannot
merge.
"""

import json
import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ragen_mega.environments.episode import quote
from ragen_mega.environments.protocol import CUT, TAG, Message
from ragen_mega.environments.tool_calls import (
    CALL_FORMAT,
    HERMES,
    OPEN,
    CallForm,
    function_tool,
    is_deep,
)
from ragen_mega.models.huggingface import load_config, load_tokenizer, stop_tokens
from ragen_mega.rollout.template_cost import check_cost

_THINK = "<think>"
_BEGUN = re.compile(r"<think>\s*(?:</think>\s*)?$")
"""Thought that a template begins before an answer, perhaps an empty one."""
_BRACKETED = re.compile(r"<[^<>\s]+>")
_BYTES_OF_TOKEN = 40  # in a list, with its integer
_ANSWER = "ANSWER-OF-THE-ASSISTANT"
_DAY = "26 Jul 2024"
"""Today in the templates of Llama 3.1 and later, which would state another day in a run that goes
on tomorrow. They take this one where they have no clock.
"""
_PROBES = (Message("user", "first"), Message("user", "second"), Message("user", "third\n"))
_COSTS: tuple[tuple[Any, ...], ...] = (
    (_PROBES[:1],),
    ((Message("system", "rule"), *_PROBES[:1]),),
    ((_PROBES[0], Message("assistant", ""), _PROBES[1]),),
    (_PROBES[:1], [function_tool("look", "look around", {"type": "object", "properties": {}})]),
)
"""Messages, and tools, by which a template's cost is told."""
_CALLED = ("CALLED-TOOL", "ANOTHER-TOOL")
_CALL_ID = "call0000"  # Mistral's have nine characters
_TAKEN = {"PARAMETER": ["VALUE", 1, {}]}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _CALLED[0],
        "description": "",
        "parameters": {"type": "object", "properties": {"PARAMETER": {"type": "array"}}},
    },
}


class _Remembered:
    """A function of messages with its latest answers, as many as fit into `most_bytes`."""

    def __init__(self, function: Callable[..., list[int]], most_bytes: int = 1 << 24) -> None:
        self._function, self._room = function, most_bytes
        self._answers: OrderedDict[tuple[Any, ...], tuple[list[int], int]] = OrderedDict()

    def __call__(self, *arguments: Any) -> list[int]:
        if arguments in self._answers:
            self._answers.move_to_end(arguments)
            return self._answers[arguments][0]
        answer = self._function(*arguments)
        size = _BYTES_OF_TOKEN * len(answer) + sum(len(m.content) for m in arguments[0])
        self._answers[arguments] = answer, size
        self._room -= size
        while self._room < 0:
            _, (_, freed) = self._answers.popitem(last=False)
            self._room += freed
        return answer


class ChatRenderer:
    """Renders the turns of an episode for one tokenizer; with `think`, every assistant turn begins
    with `<think>`, and without it as the chat template begins an answer without thoughts.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, think: bool, stops: Iterable[int] = ()
    ) -> None:
        """`stops`: tokens that end an answer, besides those that the tokenizer names. Raises
        ValueError if the chat template is not append-only or does not go with `think`.
        """
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat_template; use an instruct model's tokenizer or set"
                " ChatML"
            )
        self.tokenizer = tokenizer
        self._think = think
        added = tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special} | {*tokenizer.all_special_tokens}
        controls = special | {*filter(_BRACKETED.fullmatch, map(str, added))}
        controls = {name for name in controls if name and not TAG.fullmatch(name)}
        self._special = special & controls
        self._hidden = frozenset(map(tokenizer.convert_tokens_to_ids, self._special))
        longest_first = sorted({*controls, _ANSWER}, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)))
        check_cost(str(tokenizer.chat_template), [partial(self._parts, *probe) for probe in _COSTS])
        history, _ = self._parts(_answered(_PROBES[1]))
        # With which the template itself begins an answer, and which a history lacks.
        beginning = self._text(_PROBES[:1])
        self._opened = beginning.partition(history)[2]
        opens_thought = beginning.rstrip().endswith(_THINK)
        if opens_thought and not think:
            raise ValueError(
                "the chat template begins every answer with <think>, and --no-think asks for"
                " answers without thoughts; leave out --no-think, or load a model whose template"
                " heeds enable_thinking"
            )
        self._forced = _THINK if think and not opens_thought else ""
        self.opens_thought = think
        """Whether every answer begins inside a thought."""
        self._between = _Remembered(
            lambda messages: self._encode(self._delta(*messages) + self._forced)
        )
        self._beginning = _Remembered(  # members of a group begin alike
            lambda messages, tools: self._encode(
                self._beginning_text(messages, tools) + self._forced
            )
        )
        marker = self._encode(self._delta(_PROBES[1]))[0]
        self.end_of_turn = marker
        """Token that ends an assistant turn (`<|im_end|>`)."""
        self._check_template()
        end_ids = {marker, tokenizer.eos_token_id, *stops} - {None}
        self.stop_token_ids = tuple(sorted(end_ids))
        """Tokens that end a completion when they are sampled."""
        if self.stop_token_ids[-1] >= len(tokenizer):
            raise ValueError(
                f"the tokens that end an answer are {self.stop_token_ids}, and the tokenizer has"
                f" {len(tokenizer)} tokens; correct eos_token_id in generation_config.json"
            )

    def start(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """Return the first messages and all up to the first sampling position; `tools` are JSON
        schemas. Raises ValueError if the chat template has no place for them.
        """
        if is_deep(tools):
            raise ValueError("schemas of tools are nested too deeply for a chat template")
        schemas = json.dumps(tools, ensure_ascii=False) if tools else None
        return list(self._beginning(tuple(messages), schemas))

    def observe(self, messages: Sequence[Message], finished_cleanly: bool) -> list[int]:
        """Return the tokens between the last sampled token of a turn and the first of the next.

        `finished_cleanly`: the model sampled `end_of_turn` itself; otherwise it is supplied here.
        Raises ValueError if the chat template does not take the messages.
        """
        between = self._between(tuple(messages))
        return list(between[1:] if finished_cleanly else between)

    def encode_answer(self, text: str) -> list[int]:
        """Return what a policy that gives this answer samples: without the `<think>` that the
        prompt ends with, and with the end of the turn.
        """
        if self._opened or self.opens_thought:
            text = text.removeprefix(self._opened).removeprefix(_THINK)
        text = self.call_form.from_hermes(text)
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.end_of_turn]

    def decode_action(self, tokens: Sequence[int]) -> str:
        """Return the text of one sampled turn without special tokens; tags of answers are text."""
        shown = [token for token in tokens if token not in self._hidden]
        return str(self.tokenizer.decode(shown, clean_up_tokenization_spaces=False))

    @cached_property
    def call_form(self) -> CallForm:
        """Form of calls of tools, as the chat template writes them in a history; the form of Qwen's
        template where it writes none. Raises ValueError for a form that is no JSON object.
        """
        base, *called = (self._called(count) for count in range(3))
        if base is not None and called[0] == base.replace(_ANSWER, ""):
            return HERMES
        before, behind = (base or _ANSWER).split(_ANSWER)
        blocks = [
            text[len(before) : len(text) - len(behind)]
            for text in called
            if text is not None and text.startswith(before) and text.endswith(behind)
        ]
        form = _form_of(blocks) if blocks else None
        around = "" if form is None else f"{form.open}{form.between}{form.close}"
        if form is None or any(name in around for name in (*self._special, _CALL_ID)):
            writes = f"it writes {blocks[0][:120]!r}" if blocks else "it takes no such message"
            raise ValueError(
                "the chat template must write calls of tools as JSON objects with a name and"
                f" arguments alone, in text without special tokens, and {writes}; use a model"
                " whose template does, or no tools"
            )
        return form

    def _called(self, count: int) -> str | None:
        """Return the template's text of a history with so many calls of tools in an answer, which
        is a text where there are none; None if it does not take this.
        """
        calls = [
            {
                "id": f"{_CALL_ID}{number}",
                "type": "function",
                "function": {"name": name, "arguments": _TAKEN},
            }
            for number, name in enumerate(_CALLED[:count])
        ]
        said = {"content": "", "tool_calls": calls} if calls else {"content": _ANSWER}
        user = {"role": "user", "content": _PROBES[0].content}
        chat: list[dict[str, Any]] = [user, {"role": "assistant", **said}, user]
        try:
            return self._rendered(chat, [_PROBE_TOOL])
        except ValueError:
            return None

    def read_answer(self, tokens: Sequence[int], tools: object) -> str:
        """Return the text of one sampled turn, with calls of `tools` as environments read them."""
        text = self.decode_action(tokens)
        return self.call_form.to_hermes(text) if tools else text

    def thought_length(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens of a sampled turn up to its thought's end; all if none."""
        return 1 + bisect_left(
            range(1, len(tokens)),
            True,
            key=lambda size: "</think>" in self.decode_action(tokens[:size]),
        )

    def _beginning_text(self, messages: Sequence[Message], tools: str | None) -> str:
        if tools is None:
            return self._text(messages)
        text = self._text(messages, json.loads(self._cut(quote(tools))))
        if text == self._text(messages):
            raise ValueError(
                "the chat template leaves out tools; use a model whose template takes them, or"
                " describe them in the instruction"
            )
        _ = self.call_form  # raises for a template whose calls could not be read
        return text

    def _delta(self, *messages: Message) -> str:
        """Return the text from the end of an assistant's answer, over `messages`, to the next."""
        _, *parts = self._parts(_answered(*messages))
        return self._joined(parts, messages)

    def _check_template(self) -> None:
        special = set(self.tokenizer.all_special_ids)
        if self.end_of_turn not in special:
            raise ValueError(
                "the chat template must put a special token right behind an answer, not"
                f" {self.tokenizer.convert_ids_to_tokens(self.end_of_turn)!r}, or answers could not"
                " be told from their end; remove what stands between them from the template, or"
                " mark this token as special in the tokenizer"
            )
        first, second, third = _PROBES
        earlier = (self._text([first]), self._delta(second))
        appended = [*(part.removesuffix(self._opened) for part in earlier), self._delta(third)]
        whole = self._parts(_answered(second, Message("assistant", ""), third))
        if appended != whole or not all(map(self._is_apart, appended, appended[1:])):
            raise ValueError(
                "the chat template is not prefix-stable: a conversation differs from its turns"
                " appended one by one; use one that only appends"
                " (docs/environments.md#chat-templates)\n  appended"
                f" {_ANSWER.join(appended)!r}\n  whole    {_ANSWER.join(whole)!r}"
            )

    def _is_apart(self, before: str, after: str) -> bool:
        """Check that no token belongs to an answer and to the text before or after it."""
        begun, ended = self._encode(before), self._encode(after)
        tokens = self._encode(f"{before}{_ANSWER}{after}")
        return tokens[: len(begun)] == begun and tokens[-len(ended) :] == ended

    def _text(self, messages: Sequence[Message], tools: list[Any] | None = None) -> str:
        """Return the text of the messages and of the beginning of the next answer."""
        return self._joined(self._parts(messages, tools), messages)

    def _joined(self, parts: Sequence[str], messages: Sequence[Message]) -> str:
        parts = list(parts)
        answers = []
        for number, message in enumerate(filter(_is_answer, messages)):
            answer = self._cut(message.text)
            if OPEN in answer:
                answer = self.call_form.from_hermes(answer)
            if answer.lstrip().startswith(_THINK) and (begun := _BEGUN.search(parts[number])):
                parts[number] = parts[number][: begun.start()]
            answers.append(answer)
        return "".join(chain.from_iterable(zip_longest(parts, answers, fillvalue="")))

    def _parts(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[str]:
        """Return the template's text before, between and behind the answers among the messages. The
        template does not see the answers, so it cannot strip their thoughts.
        """
        conversation = [
            {
                "role": message.role,
                "content": _ANSWER if _is_answer(message) else self._told(message.content),
            }
            | ({"name": self._cut(message.name)} if message.name else {})
            for message in messages
        ]
        text = self._rendered(conversation, tools)
        parts: list[str] = text.split(_ANSWER)
        if len(parts) != 1 + sum(map(_is_answer, messages)):
            raise ValueError(
                "the chat template drops or rewrites assistant messages; turns cannot be appended"
                " to it"
            )
        return parts

    def _rendered(self, conversation: list[dict[str, Any]], tools: list[Any] | None) -> str:
        """Return the template's text. Raises ValueError if it fails, which is a program."""
        try:
            text = self.tokenizer.apply_chat_template(
                conversation,
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=self._think,
                date_string=_DAY,
            )
            return str(text)
        except MemoryError:
            raise
        except Exception as error:
            roles = ", ".join(message["role"] for message in conversation)
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise ValueError(
                f"the chat template does not take messages with the roles {roles}: {kind}{error}"
            ) from error

    def _told(self, content: str) -> str:
        """Return a content, cut, in which a format of calls is the template's."""
        if CALL_FORMAT in content:
            content = content.replace(CALL_FORMAT, self.call_form.described)
        return self._cut(content)

    def _cut(self, content: str) -> str:
        """Return the content with a CUT in every control token, which only the template may write:
        a tool could otherwise open a turn of the system. Halves of characters become question
        marks.
        """
        content = content.encode("utf-8", "replace").decode() if not content.isascii() else content
        return self._control.sub(lambda found: f"{found[0][:1]}{CUT}{found[0][1:]}", content)

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        for piece in text.split(CUT):
            tokens += self.tokenizer.encode(piece, add_special_tokens=False)
        return tokens


def load_renderer(directory: str, *, think: bool) -> ChatRenderer:
    """Return the renderer of a model's directory. Raises ValueError as `ChatRenderer` does, for a
    file that cannot be read, and for a token for which the model has no row.
    """
    tokenizer, config = load_tokenizer(directory), Path(directory, "config.json")
    last = max(tokenizer.get_vocab().values())
    if config.exists() and last >= (rows := load_config(directory).vocab_size):
        raise ValueError(
            f"the tokenizer of {directory} has the id {last}"
            f" ({tokenizer.convert_ids_to_tokens(last)}), and the embedding {rows} rows"
            " (vocab_size in config.json); copy the tokenizer that belongs to the model"
        )
    return ChatRenderer(tokenizer, think=think, stops=stop_tokens(directory))


def _form_of(blocks: Sequence[str]) -> CallForm | None:
    """Return the form of calls that a template writes as these texts, of the first call of the
    probe and perhaps of both; None for any other than JSON objects.
    """
    found = [_object_with(blocks[0], _CALLED[0])]
    found += [_object_with(blocks[1], name) for name in _CALLED] if len(blocks) > 1 else []
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return None
    (start, end, call), *both = known
    names = [key for key, value in call.items() if value == _CALLED[0]]
    keys = [key for key, value in call.items() if value == _TAKEN]
    before, _, rest = blocks[0][start:end].partition(_CALLED[0])
    taken = _object_with(rest, next(iter(_TAKEN)))
    if len(names) != 1 or len(keys) != 1 or len(call) != 2 or taken is None:
        return None
    pieces = (before, rest[: taken[0]], rest[taken[1] :])
    form = CallForm(blocks[0][:start], blocks[0][end:], None, pieces, names[0], keys[0])
    if both:
        form = replace(form, between=blocks[1][both[0][1] : both[1][0]])
    arguments = rest[taken[0] : taken[1]]
    for count, block in enumerate(blocks, start=1):
        if form.write(*chain(*((name, arguments) for name in _CALLED[:count]))) != block:
            return None
    return form


def _object_with(text: str, word: str) -> tuple[int, int, dict[str, Any]] | None:
    """Return the start and end of the innermost JSON object around a word, and the object."""
    start = at = text.find(word)
    while (start := text.rfind("{", 0, max(start, 0))) >= 0:
        with suppress(ValueError):
            found, end = json.JSONDecoder().raw_decode(text, start)
            if end > at:
                return start, end, found
    return None


def _is_answer(message: Message) -> bool:
    return message.role == "assistant"


def _answered(*messages: Message) -> list[Message]:
    return [_PROBES[0], Message("assistant", ""), *messages]
