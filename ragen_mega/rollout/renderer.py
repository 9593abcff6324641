"""Chat messages as token deltas: every token is appended once and never re-tokenised.

The deltas are cut out of the tokenizer's own chat template, so that the policy sees the markers
that the model was trained with. Cuts are at special tokens, across which tokenisation cannot
merge.
"""

import json
import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ragen_mega.environments.protocol import CUT, Message

_THINK = "<think>"
_BYTES_OF_TOKEN = 40  # in a list, with its integer
_ANSWER = "ANSWER-OF-THE-ASSISTANT"
_PROBES = (Message("user", "first"), Message("user", "second"), Message("user", "third\n"))


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
    with `<think>`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, think: bool) -> None:
        """Raises ValueError if the chat template is not append-only."""
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat_template; use an instruct model's tokenizer or set"
                " ChatML"
            )
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        controls = {str(token) for token in added if token.special}
        controls |= {*tokenizer.all_special_tokens}
        longest_first = sorted(filter(None, controls), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        beginning = self._template([_PROBES[0]])
        self._opened = ""  # with which the template itself begins an answer
        if beginning.rstrip().endswith(_THINK):
            self._opened = beginning[beginning.rindex(_THINK) :]
        self._forced = forced = _THINK if think and not self._opened else ""
        self._between = _Remembered(lambda messages: self._encode(self._delta(*messages) + forced))
        self._beginning = _Remembered(  # members of a group begin alike
            lambda messages, tools: self._encode(self._beginning_text(messages, tools) + forced)
        )
        marker = self._encode(self._delta(_PROBES[1]))[0]
        self.end_of_turn = marker
        """Token that ends an assistant turn (`<|im_end|>`)."""
        self._check_template()
        end_ids = {marker} if tokenizer.eos_token_id is None else {marker, tokenizer.eos_token_id}
        self.stop_token_ids = tuple(sorted(end_ids))
        """Tokens that end a completion when they are sampled."""

    def start(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """Return the first messages and all up to the first sampling position; `tools` are JSON
        schemas. Raises ValueError if the chat template has no place for them.
        """
        return list(self._beginning(tuple(messages), json.dumps(tools) if tools else None))

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
        """Return the text of one sampled turn, special tokens left out."""
        return self.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
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
            return self._template(messages)
        text = self._template(messages, tools=json.loads(self._cut(tools)))
        if text == self._template(messages):
            raise ValueError(
                "the chat template leaves out the environment's tools; use a model whose template"
                " takes them, or describe them in the environment's instruction"
            )
        return text

    def _delta(self, *messages: Message) -> str:
        """Return the text from the end of an assistant's answer, over `messages`, to the next."""
        conversation = [_PROBES[0], Message("assistant", _ANSWER), *messages]
        return self._template(conversation).partition(_ANSWER)[2]

    def _check_template(self) -> None:
        special = set(self.tokenizer.all_special_ids)
        if self.end_of_turn not in special:
            raise ValueError(
                "the chat template must end an assistant turn with a special token, not"
                f" {self.tokenizer.convert_ids_to_tokens(self.end_of_turn)!r}; mark it as special"
                " in the tokenizer, or completions could not be told from their end"
            )
        first, second, third = _PROBES
        earlier = (self._template([first]), self._delta(second))  # histories lack what is opened
        history = "".join(part.removesuffix(self._opened) + _ANSWER for part in earlier)
        appended = history + self._delta(third)
        answer = Message("assistant", _ANSWER)
        whole = self._template([first, answer, second, answer, third])
        if appended != whole or self._encode(appended) != self._encode_pieces(appended):
            raise ValueError(
                "the chat template is not prefix-stable: a conversation differs from its turns"
                " appended one by one, as where it strips earlier thoughts; use one that only"
                " appends (docs/environments.md#chat-templates)\n  appended"
                f" {appended!r}\n  whole    {whole!r}"
            )

    def _encode_pieces(self, text: str) -> list[int]:
        """Return the tokens of the text cut like turns: before and after every assistant answer."""
        first, *rest = text.split(_ANSWER)
        tokens = self._encode(first)
        for piece in rest:
            tokens += self._encode(_ANSWER) + self._encode(piece)
        return tokens

    def _template(self, messages: Sequence[Message], tools: list[Any] | None = None) -> str:
        """Return the messages as the template writes them, but answers as they are: it may strip
        the thoughts of earlier ones, and a policy sees its own.
        """
        mark = _ANSWER
        while any(mark in message.content for message in messages):
            mark += "-"
        contents = [self._cut(message.content) for message in messages]
        answers = [m.role == "assistant" for m in messages]
        conversation = [
            {"role": message.role, "content": mark if is_answer else content}
            for message, content, is_answer in zip(messages, contents, answers, strict=True)
        ]
        try:
            text = self.tokenizer.apply_chat_template(
                conversation, tools=tools, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            raise ValueError(
                f"the chat template does not take messages with the roles {roles}: {error}"
            ) from error
        pieces = text.split(mark)
        if len(pieces) != 1 + sum(answers):
            raise ValueError(
                "the chat template drops or rewrites assistant messages; turns cannot be appended"
                " to it"
            )
        own = (content for content, is_answer in zip(contents, answers, strict=True) if is_answer)
        return pieces[0] + "".join(map("".join, zip(own, pieces[1:], strict=True)))

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
