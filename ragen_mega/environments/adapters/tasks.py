"""Tasks from a file, e.g. `tasks:my_data.jsonl`: a row holds a prompt and the reference that the
answer is compared with.

The columns that are looked for are those of verl's and TRL's data sets.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from ragen_mega.data.registry import Registry
from ragen_mega.environments.actions import same_word, split_response
from ragen_mega.environments.adapters.mcp import MAX_RESULT, McpTools
from ragen_mega.environments.adapters.packages import required
from ragen_mega.environments.calls import ROLES
from ragen_mega.environments.messages import RequestError, as_texts, read_messages
from ragen_mega.environments.protocol import (
    Observation,
    StepResult,
    check_seed,
    text_of,
    text_seed,
)
from ragen_mega.environments.random_player import random_call, words_of
from ragen_mega.environments.tool_calls import CALL_FORMAT, OPEN, tool_calls

PROMPTS = ("prompt", "question")
ANSWERS = ("answer", "ground_truth", "reward_model.ground_truth")
"""Columns that are looked for, the first that a row has; a dot leads into an object."""
SCORES = Registry("task score", "--score", {"exact": f"{__name__}:exact"})
_NUMBER = re.compile(r"[-+]?(?=\.?\d)(?:\d{1,3}(?:,\d{3})+|\d*)(?:\.\d*)?(?:e[-+]?\d{1,3})?")
_LONGEST_DRAWN = 64
"""Characters of a reference that a random player may answer."""

Split = Literal["train", "validation"]
Score = Callable[[str, Any, Mapping[str, Any]], float]
_File = tuple[str, int, int]
"""Path, time of the last change in nanoseconds, bytes: the cache key of a file."""


@dataclass(frozen=True, slots=True)
class _Columns:
    prompt: str | None
    answer: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class _Task:
    prompt: Observation
    reference: Any
    row: Mapping[str, Any]


class FileTasks:
    """One row of a file, chosen by the seed: a prompt, one answer, a score from 0 to 1 as reward.

    A score of 1 is success. The answer is the text between the answer tags, or what follows the
    last `answer_after` on its line. With the tools of MCP servers, turns with calls come before it.
    """

    splits = ("train", "validation")
    max_turns: int

    def __init__(
        self,
        path: str,
        /,
        *,
        split: Split = "train",
        validation: str | None = None,
        validation_share: float = 0.1,
        prompt_column: str | None = None,
        answer_column: str | None = None,
        answer_after: str | None = None,
        score: str = "exact",
        instruction: str | None = None,
        mcp: str | list[str] | None = None,
        mcp_tools: Sequence[str] = (),
        mcp_timeout: float = 20.0,
        mcp_shared: bool = False,
        mcp_max_result: int = MAX_RESULT,
    ) -> None:
        """`validation`: another file, for the evaluation; without one, `validation_share` of the
        prompts of `path` are kept for it. `answer_after`: text before the answer, such as ####, or
        an empty text if the whole answer counts; references are cut in the same way. `score`:
        import path of a function `score(answer, reference, row)`. `mcp`: commands or URLs of
        servers; the other options about them are those of `McpTools`.

        Raises ValueError for a file without usable rows, and for a score of the first row's
        reference that is no number from 0 to 1.
        """
        columns = _Columns(prompt_column, answer_column, answer_after)
        if validation is None:
            parts = _parts(_file(path), columns, validation_share)
        else:
            parts = [_tasks(_file(path), columns), _tasks(_file(validation), columns)]
        self._tasks, self._trained = parts[self.splits.index(split)], parts[0]
        self._score = _checked_score(score, _file(path), columns)
        self.instruction = instruction
        self._after = answer_after
        self._server = None
        if answer_after is not None:
            self.parse = self._parse
            self.answer_format = f"{answer_after} [your answer]".strip()
        if mcp is None:
            self.max_turns = self.max_actions_per_turn = 1
        else:
            self._server = McpTools(
                *([mcp] if isinstance(mcp, str) else mcp),
                only=mcp_tools,
                timeout=mcp_timeout,
                is_shared=mcp_shared,
                max_result=mcp_max_result,
            )
            self.tools = self._server.tools
            self.parse = self._parse
            answer = getattr(self, "answer_format", "<answer> [your answer] </answer>")
            self.answer_format = f"{CALL_FORMAT} or {answer}"
        if _is_short(_file(path), columns):
            self.random_answer = self._random_answer

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    def reset(self, seed: int) -> Observation:
        self._task = self._tasks[check_seed(seed) % len(self._tasks)]
        self.close()
        return self._task.prompt

    def step(self, action: str | dict[str, Any]) -> StepResult:
        if isinstance(action, dict):
            return self._server.step(action)
        score = _number(self._score(action, self._task.reference, self._task.row))
        verdict = "Correct." if score == 1 else f"Wrong: this scores {score:.3g} of 1."
        return StepResult(verdict, score, terminated=True, info={"success": score == 1})

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _parse(self, text: str) -> str | list[dict[str, Any]]:
        if self._server is not None and OPEN in text:
            return tool_calls(text, self.tools)
        if self._after is None:
            _, answer = split_response(text, think=False) or ("", "")
        else:
            answer = _cut(text, self._after)
        if not answer:
            asked = f"follow {self._after!r}" if self._after else "stand in its tags"
            call = "" if self._server is None else "call a tool, or answer: "
            raise ValueError(f"{call}an answer must {asked}")
        return answer

    def _random_answer(self, draw: random.Random) -> str | dict[str, Any]:
        """Draw the reference of any row to train on: an answer made without the question. With
        tools, half of the answers are calls.
        """
        if self._server is not None and draw.random() < 0.5:
            return random_call(self.tools, words_of(self._task.prompt), draw)
        answer = str(_listed(draw.choice(self._trained).reference)[0])
        if self._after is None and self._server is not None:
            return f"<answer> {answer} </answer>"
        return f"{self._after} {answer}" if self._after else answer


def exact(answer: str, reference: Any, row: Mapping[str, Any]) -> float:
    """1 if the answer is the reference, or one of a list of references, else 0. Numbers are
    compared as numbers, other texts without letter case, kinds of spaces and a last full stop.
    """
    if isinstance(reference, Mapping):
        raise ValueError(
            f"a reference must be a text, a number or a list of them, not {reference!r:.60}; name"
            " its part by the option answer_column, such as reward_model.ground_truth"
        )
    given = _normal(answer)
    return float(any(given == _normal(str(accepted)) for accepted in _listed(reference)))


def read_rows(path: str) -> tuple[dict[str, Any], ...]:
    """Return the rows of a file: JSON objects, one a line, or a table in parquet (`.parquet`). They
    are kept in memory until the file changes, and shared: do not write into them.

    Raises ValueError, in one line, for a file that cannot be read or has no rows.
    """
    return _rows(_file(path))


def _file(path: str) -> _File:
    try:
        found = Path(path).stat()
    except OSError as error:
        raise ValueError(_unreadable(path, error)) from None
    return path, found.st_mtime_ns, found.st_size


def _unreadable(path: str, error: OSError) -> str:
    return (
        f"tasks:{path} must name a file of rows that can be read ({error.strerror or error}); mend"
        " the path, and rename a module of yours that is called tasks"
    )


@lru_cache(maxsize=16)
def _rows(file: _File) -> tuple[dict[str, Any], ...]:
    path = file[0]
    try:
        rows = tuple(_parquet_rows(path) if path.endswith(".parquet") else _json_rows(path))
    except OSError as error:
        raise ValueError(_unreadable(path, error)) from None
    if not rows:
        raise ValueError(f"{path} must hold rows and has none; write one JSON object a line")
    return rows


def _json_rows(path: str) -> Iterator[dict[str, Any]]:
    lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row, problem = json.loads(line), ""
        except (ValueError, RecursionError) as error:
            row, problem = None, f" ({error})"
        if not isinstance(row, dict):
            raise ValueError(
                f"{path}, line {number} must be a JSON object, not"
                f" {line[:40].decode(errors='replace')!r}{problem}; write one object a line"
            )
        yield row


def _parquet_rows(path: str) -> list[dict[str, Any]]:
    parquet = required("pyarrow.parquet", "parquet", purpose="files in parquet")
    try:
        return parquet.read_table(path).to_pylist()
    except ValueError as error:
        raise ValueError(
            f"{path} must be a table in parquet ({str(error).splitlines()[0]}); write it anew, or"
            " as JSON, one object a line, in a file that ends in .jsonl"
        ) from None


@lru_cache(maxsize=16)
def _tasks(file: _File, columns: _Columns) -> tuple[_Task, ...]:
    tasks = []
    for number, row in enumerate(_rows(file), start=1):
        place = f"row {number} of {file[0]}"
        prompt = _column(place, row, "prompt_column", columns.prompt, PROMPTS)
        reference = _column(place, row, "answer_column", columns.answer, ANSWERS)
        if columns.after and isinstance(reference, str):
            reference = _cut(reference, columns.after) or reference
        tasks.append(_Task(_observation(place, prompt), reference, row))
    return tuple(tasks)


@lru_cache(maxsize=16)
def _parts(file: _File, columns: _Columns, share: float) -> list[tuple[_Task, ...]]:
    """Return the tasks to train on, and those to evaluate: this share of the prompts, drawn by
    their text, so that the order of rows decides nothing and no prompt is in both.
    """
    tasks = _tasks(file, columns)
    held = held_out(file[0], (text_of(task.prompt) for task in tasks), share)
    return [
        tuple(task for task in tasks if (text_of(task.prompt) in held) == is_held_out)
        for is_held_out in (False, True)
    ]


def held_out(name: str, prompts: Iterable[str], share: float) -> set[str]:
    """Return this share of different prompts, drawn by their text. Raises ValueError for a single
    prompt of `name`, or a share that is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"validation_share must be between 0 and 1, not {share}; write e.g. 0.1")
    ordered = sorted(set(prompts), key=text_seed)
    if len(ordered) < 2:
        raise ValueError(
            f"{name} must hold two prompts, one to train on and one to evaluate, and has one;"
            " add rows, or name others by the option validation"
        )
    return set(ordered[: min(max(1, round(share * len(ordered))), len(ordered) - 1)])


@lru_cache(maxsize=16)
def _is_short(file: _File, columns: _Columns) -> bool:
    return all(
        not isinstance(answer, Mapping) and len(str(answer)) <= _LONGEST_DRAWN
        for task in _tasks(file, columns)
        for answer in _listed(task.reference)[:1]
    )


@lru_cache(maxsize=16)
def _checked_score(name: str, file: _File, columns: _Columns) -> Score:
    """Return the function of that name, after it has judged the reference of the first row."""
    score, first = SCORES.get(name), _tasks(file, columns)[0]
    SCORES.check_call(name, score, "answer", "reference", "row")
    _number(score(str(_listed(first.reference)[0]), first.reference, first.row))
    return score


def _number(score: Any) -> float:
    if not (isinstance(score, Real) and 0 <= score <= 1):  # nan included
        raise ValueError(
            f"a score of tasks must be a number from 0 to 1, not {score!r:.60}; change the function"
        )
    return float(score)


def _column(
    place: str, row: Mapping[str, Any], option: str, name: str | None, known: Sequence[str]
) -> Any:
    """Return the first of these columns that the row has."""
    names = [name] if name else known
    for path in names:
        value: Any = row
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value != []:
            return value
    raise ValueError(
        f"{place} must have {' or '.join(names)}, and its columns are {', '.join(_paths(row))};"
        f" name yours by the option {option}"
    )


def _paths(row: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _paths(value, f"{before}{name}.")
        else:
            yield f"{before}{name}"


def _observation(place: str, prompt: Any) -> Observation:
    """Return a text, or messages; a single message of the user is a text too."""
    if isinstance(prompt, str):
        return prompt
    try:
        messages = tuple(as_texts(read_messages("prompt", prompt)))
    except RequestError as error:
        raise ValueError(
            f"{place}: a prompt must be a text, or a list of messages with a role (one of"
            f" {', '.join(ROLES)}) and a text as content: {error}"
        ) from None
    if len(messages) == 1 and messages[0].role == "user":
        return messages[0].content
    return messages


def _listed(reference: Any) -> list[Any]:
    return reference if isinstance(reference, list) else [reference]


def _cut(text: str, after: str | None) -> str:
    """Return the text behind the last `after`, up to the end of its line; the whole text if `after`
    is empty.
    """
    if not after:
        return text.strip()
    _, found, rest = text.rpartition(after)
    return rest.strip().partition("\n")[0].strip() if found else ""


def _normal(text: str) -> str | Decimal:
    word = same_word(text).rstrip(". ")
    number = word.removeprefix("$")
    return Decimal(number.replace(",", "")) if _NUMBER.fullmatch(number) else word
