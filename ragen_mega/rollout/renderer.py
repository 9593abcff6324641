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
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ragen_mega.environments.episode import quote
from ragen_mega.environments.protocol import CUT, TAG, Message
from ragen_mega.environments.tool_calls import function_tool
from ragen_mega.models.huggingface import load_config, load_tokenizer, stop_tokens
from ragen_mega.rollout.template_cost import check_cost

_THINK = "<think>"
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
        self._hidden = frozenset(tokenizer.convert_tokens_to_ids(sorted(special & controls)))
        longest_first = sorted({*controls, _ANSWER}, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)))
        check_cost(str(tokenizer.chat_template), [partial(self._parts, *probe) for probe in _COSTS])
        history, _ = self._parts(_answered(_PROBES[1]))
        # With which the template itself begins an answer, and which a history lacks.
        self._opened = self._text(_PROBES[:1]).partition(history)[2]
        opens_thought = self._opened.rstrip().endswith(_THINK)
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
        if begun := self._opened or self._forced:
            text = text.removeprefix(begun).removeprefix(_THINK)
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.end_of_turn]

    def decode_action(self, tokens: Sequence[int]) -> str:
        """Return the text of one sampled turn without special tokens; tags of answers are text."""
        return self.tokenizer.decode(
            [token for token in tokens if token not in self._hidden],
            clean_up_tokenization_spaces=False,
        )

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
        answers = [self._cut(message.content) for message in messages if _is_answer(message)]
        return "".join(chain.from_iterable(zip_longest(parts, answers, fillvalue="")))

    def _parts(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[str]:
        """Return the template's text before, between and behind the answers among the messages. The
        template does not see the answers, so it cannot strip their thoughts.
        """
        conversation = [
            {
                "role": message.role,
                "content": _ANSWER if _is_answer(message) else self._cut(message.content),
            }
            for message in messages
        ]
        try:
            text = self.tokenizer.apply_chat_template(
                conversation,
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=self._think,
                date_string=_DAY,
            )
        except MemoryError:
            raise
        except Exception as error:
            roles = ", ".join(message.role for message in messages)
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise ValueError(
                f"the chat template does not take messages with the roles {roles}: {kind}{error}"
            ) from error
        parts: list[str] = text.split(_ANSWER)
        if len(parts) != 1 + sum(map(_is_answer, messages)):
            raise ValueError(
                "the chat template drops or rewrites assistant messages; turns cannot be appended"
                " to it"
            )
        return parts

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


def _is_answer(message: Message) -> bool:
    return message.role == "assistant"


def _answered(*messages: Message) -> list[Message]:
    return [_PROBES[0], Message("assistant", ""), *messages]
