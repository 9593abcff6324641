"""Tasks from a file, e.g. `tasks:my_data.jsonl`: a row holds a prompt and the reference that the
answer is compared with.

The columns that are looked for are the columns of verl's and TRL's data sets.
"""

import base64
import copy
import csv
import datetime
import inspect
import itertools
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import UUID

import numpy as np

from ragen_mega.environments.actions import same_word, split_response
from ragen_mega.environments.adapters.mcp import MAX_RESULT, McpTools
from ragen_mega.environments.adapters.packages import required
from ragen_mega.environments.calls import MAX_REWARD, ROLES
from ragen_mega.environments.messages import RequestError, as_texts, read_messages
from ragen_mega.environments.protocol import (
    OUTCOME,
    Observation,
    StepResult,
    check_seed,
    text_of,
    text_seed,
)
from ragen_mega.environments.random_player import random_call, words_of
from ragen_mega.environments.tool_calls import CALL_FORMAT, OPEN, tool_calls
from ragen_mega.extensions.registry import Registry, takes
from ragen_mega.extensions.scalars import as_number
from ragen_mega.system.json_lines import json_lines
from ragen_mega.system.paths import expanded, path_in

PROMPTS = ("prompt", "question")
ANSWERS = ("answer", "ground_truth", "reward_model.ground_truth")
"""Columns that are looked for, the first that a row has; a dot leads into an object."""
SCORES = Registry(
    "task score",
    "--score",
    {"exact": f"{__name__}:exact"},
    remedy="change its parameters (docs/adapters.md, tasks from a file)",
)
_NUMBER = re.compile(
    r"([-+]?)[$\u20ac\u00a3\u00a5]?([-+]?)"  # $, euro, pound, yen
    r"((?=\.?\d)(?:\d{1,3}(?:,\d{3})+|\d*)(?:\.\d*)?(?:e[-+]?\d{1,3})?)(?: ?/ ?(\d+))? ?(%?)"
)
_LONGEST_NUMBER = 4000
"""Characters of a number; Python's integers read at most 4300 digits."""
_DIGITS = Context(prec=15)
"""Decimal digits that every float64 holds."""
_SIGNS = str.maketrans("\u2010\u2011\u2012\u2013\u2212\u2044\u2215", "-----//")
"""Hyphens, minus signs and fraction bars of Unicode."""
_RAISED = re.compile(r"(?<=\d)(?=[\u00b2\u00b3\u00b9\u2070-\u2079])")
_FRACTION = re.compile(r"(?<=\d)(?=[\u00bc-\u00be\u2150-\u215e])")
"""Places between a digit and a raised digit, or a fraction in one character, which are no further
digits of its number.
"""
_LONGEST_DRAWN = 64
"""Characters of a reference that a random player may answer."""
_LONGEST_SHOWN = 1000
"""Characters of a reference that is kept with a turn."""
_LISTED = "completions"
"""Parameter by which a reward function of TRL is known, which judges lists."""
_NUM_JUDGED, _SECONDS_TO_JUDGE = 16, 10.0
"""Rows whose references a start has judged, at most, and the time after which it stops."""

T = TypeVar("T")
Split = Literal["train", "validation"]
Score = Callable[..., Any]
_File = tuple[str, int, int]
"""Path, time of the last change in nanoseconds, bytes: the cache key of a file."""


@dataclass(frozen=True, slots=True)
class _Columns:
    prompt: str | None
    answer: str | None
    after: str | None
    is_compared: bool = True
    """Whether the score needs a reference."""


@dataclass(frozen=True, slots=True)
class _Task:
    prompt: Observation
    reference: Any
    row: Mapping[str, Any]
    place: str

    @property
    def shown(self) -> Any:
        """The reference, or the beginning of the text of a long one."""
        text = str(self.reference)
        return self.reference if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]} ..."


class FileTasks:
    """One row of a file, chosen by the seed: a prompt, one answer, its score as reward.

    A score of `solved_at` or more is success. The answer is the text between the answer tags, or
    what follows the last `answer_after` on its line. With the tools of MCP servers, turns with
    calls come before it.
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
        solved_at: float = 1.0,
        terms: Sequence[str] = (),
        instruction: str | None = None,
        mcp: str | list[str] | None = None,
        mcp_tools: Sequence[str] = (),
        mcp_timeout: float = 20.0,
        mcp_shared: bool | None = None,
        mcp_max_result: int = MAX_RESULT,
        directory: str = "",
    ) -> None:
        """`validation`: another file, for the evaluation; without one, `validation_share` of the
        prompts of `path` are kept for it. `answer_after`: text before the answer, such as ####, or
        an empty text if the whole answer counts; references are cut in the same way. `score`:
        import path of a function `score(answer, reference, row)`, which gets the whole text of the
        answer too if it has a parameter `completion`, or of a reward function of TRL, which has a
        parameter `completions`; `solved_at`: least score of a success; `terms`: further functions
        of TRL, whose scores `--reward` weighs. `mcp`: commands or URLs of
        servers; the other options about servers are options of `McpTools`. `directory`: folder that
        relative paths begin in, and that servers start in; a run sets its working directory.

        Raises ValueError for a file without usable rows, and for a score of the first row's
        reference that is no finite number.
        """
        is_compared = score == "exact" or answer_column is not None
        columns = _Columns(prompt_column, answer_column, answer_after, is_compared)
        file = _file(path_in(directory, path))
        files = [file]
        if validation is None:
            parts = _parts(file, columns, validation_share)
        else:
            files.append(_file(path_in(directory, validation)))
            parts = [_tasks(each, columns) for each in files]
        self._tasks, self._trained = parts[self.splits.index(split)], parts[0]
        self.num_tasks = len(self._tasks)
        self._parts = parts
        self._score, self._solved_at = _checked_score(score, file, columns), solved_at
        self._terms = {name: _checked_score(name, file, columns) for name in terms}
        if instruction is not None and not all(_are_texts(each, columns) for each in files):
            raise ValueError(
                f"instruction stands before prompts that are texts, and prompts of {path} are"
                " messages, which are read as they are; write it into them, or give --system-prompt"
            )
        self.instruction = instruction
        self._after = answer_after
        self._completion: str | None = None
        self._server = None
        judges = (self._score, *self._terms.values())
        listens = any(takes(each, name) for each in judges for name in ("completion", _LISTED))
        if answer_after is not None or listens:
            self.parse = self._parse
            self.answer_format = self._written("[your answer]")
        if mcp is None:
            self.max_turns = self.max_actions_per_turn = 1
        else:
            self._server = McpTools(
                *([mcp] if isinstance(mcp, str) else mcp),
                only=mcp_tools,
                timeout=mcp_timeout,
                is_shared=mcp_shared,
                max_result=mcp_max_result,
                directory=directory,
            )
            self.tools = self._server.tools
            self.parse = self._parse
            answer = getattr(self, "answer_format", "<answer> [your answer] </answer>")
            self.answer_format = f"{CALL_FORMAT} or {answer}"
        if _is_short(file, columns):
            self.random_answer = self._random_answer

    @property
    def split_note(self) -> str | None:
        """See `overlap_note`; of equal prompts also how many have different references."""
        note = overlap_note(*([*map(_prompt_text, part)] for part in self._parts))
        references: dict[str, set[int]] = {}
        for task in itertools.chain(*self._parts) if note else ():
            references.setdefault(_prompt_text(task), set()).add(hash(str(task.reference)))
        if num_apart := sum(len(found) > 1 for found in references.values()):
            return (
                f"{note}. {num_apart} prompts have several references, of which an answer can meet"
                " one alone; write those that are right as one list"
            )
        return note

    @property
    def form_note(self) -> str | None:
        """A note on prompts that hide how an answer is read; None if there are none."""
        prompts = [task.prompt for part in self._parts for task in part]
        num_silent = sum(not isinstance(p, str) and "<answer>" not in text_of(p) for p in prompts)
        if self._after is not None or self._server is not None or not num_silent:
            return None
        return (
            f"{num_silent} of {len(prompts)} prompts are messages that do not mention <answer>, and"
            " only what stands in <answer> </answer> counts as an answer; set the option"
            ' answer_after, "" if the whole text is the answer'
        )

    @property
    def longest(self) -> tuple[int, str]:
        """Seed of the task with the longest prompt, and the place of its row."""
        seed = max(range(self.num_tasks), key=lambda at: len(_prompt_text(self._tasks[at])))
        return seed, self._tasks[seed].place

    def reset(self, seed: int) -> Observation:
        self._task = self._tasks[check_seed(seed) % len(self._tasks)]
        self._completion = None
        self.close()
        return self._task.prompt

    def step(self, action: str | dict[str, Any]) -> StepResult:
        if isinstance(action, dict):
            assert self._server is not None  # only its tools are called
            return self._server.step(action)
        said = self._written(action) if self._completion is None else self._completion
        judges = {"score": self._score, **self._terms}
        scores = {name: _judged(it, action, self._task, said) for name, it in judges.items()}
        score = scores["score"]
        is_solved = score >= self._solved_at
        verdict = "Correct." if is_solved else f"Wrong: this scores {score:.3g}."
        info = {"success": is_solved, OUTCOME: {"reference": self._task.shown, **scores}}
        return StepResult(verdict, score, terminated=True, info=info)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def judge_references(self) -> str | None:
        """Return a line if references are no success as answers, for a sample of the rows; None if
        they do, or are no answers.
        """
        wrong, num_judged, deadline = [], 0, time.monotonic() + _SECONDS_TO_JUDGE
        for task in self._tasks[:: -(-len(self._tasks) // _NUM_JUDGED)]:
            references = _listed(task.reference)
            is_answer = references and not isinstance(references[0], Mapping | None)
            if not is_answer or time.monotonic() > deadline:
                continue
            num_judged += 1
            try:
                said = self._written(references[0])
                answer = self._parse(said)
                score: float | str = (
                    _judged(self._score, answer, task, said)
                    if isinstance(answer, str)
                    else "it is read as a call of tools"
                )
            except ValueError as error:
                score = str(error)
            if isinstance(score, str) or score < self._solved_at:
                wrong.append((task, references[0], score))
        if not wrong:
            return None
        task, reference, score = wrong[0]
        return (
            f"{len(wrong)} of {num_judged} references do not score {self._solved_at:g} when they"
            f" are the answer, the first {reference!r:.60}"
            f" ({score if isinstance(score, str) else f'{score:.3g}'}) of the prompt"
            f" {text_of(task.prompt)!r:.60}: if references are answers, no policy succeeds there;"
            " mend the score or the reference, or set the option solved_at. A score that bounds its"
            " time by signal.alarm needs --environment-processes"
        )

    def _parse(self, text: str) -> str | list[dict[str, Any]]:
        self._completion = text
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
        answer = _listed(draw.choice(self._trained).reference)[0]
        is_bare = not hasattr(self, "parse")  # the tags are added
        return str(answer) if is_bare else self._written(answer)

    def _written(self, answer: Any) -> str:
        """Return an answer in the form that the prompt asks for."""
        if self._after is None:
            return f"<answer> {answer} </answer>"
        return f"{self._after} {answer}".strip()


def exact(answer: str, reference: Any, row: Mapping[str, Any]) -> float:
    """1 if the answer is the reference, or one of a list of references, else 0. Numbers are
    compared by their values, other texts without letter case, kinds of spaces and a last full stop.

    1,000, 1e3, $1000 and 2000/2 are one number, 50% is 0.5. A reference that is a float counts to
    15 digits, and as the shortest number that has its float32, where it is one.
    """
    if isinstance(reference, Mapping):
        raise ValueError(
            f"a reference must be a text, a number or a list of them, not {reference!r:.60}; name"
            " its part by the option answer_column, such as reward_model.ground_truth"
        )
    given = _normal(answer)
    return float(any(_agrees(given, accepted) for accepted in _listed(reference)))


def read_rows(path: str) -> Sequence[dict[str, Any]]:
    """Return the rows of a file: JSON objects, one a line, or a table in parquet (`.parquet`) or
    CSV (`.csv`). They are kept in memory until the file changes; a row that is looked up is a copy.
    Values are of JSON's types, see `_as_json`.

    Raises ValueError, in one line, for a file that cannot be read or has no rows.
    """
    return _Copies(_rows(_file(path)))


def read_parts(
    path: str, validation: str | None, share: float
) -> Sequence[Sequence[Mapping[str, Any]]]:
    """Return the rows to train on, and those to evaluate: all of the file `validation`, or
    this share of the different rows of `path`. Raises ValueError as `read_rows` and `held_out` do.
    """
    if validation is not None:
        return [_rows(_file(path)), _rows(_file(validation))]
    return _row_parts(_file(path), share)


@lru_cache(maxsize=16)
def _row_parts(file: _File, share: float) -> list[tuple[Mapping[str, Any], ...]]:
    return divided(file[0], _rows(file), row_text, share)


def row_text(row: Mapping[str, Any]) -> str:
    """Return the text by which rows are equal."""
    return json.dumps(row, sort_keys=True, default=str)


class _Copies(Sequence[dict[str, Any]]):
    """Rows that many hold: each look-up gives a copy."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return copy.deepcopy(self._rows[index])


def _file(path: str) -> _File:
    try:
        path = expanded(path)
        found = Path(path).stat()
    except OSError as error:
        raise ValueError(_unreadable(path, error)) from None
    return path, found.st_mtime_ns, found.st_size


def _unreadable(path: str, error: OSError) -> str:
    remedy = "mend the path"
    if not Path(path).suffix:
        remedy = (
            "fetch the files of a data set on the hub by `hf download`, or rename a module of yours"
            " that is called tasks"
        )
    return (
        f"tasks:{path} must name a file of rows that can be read ({error.strerror or error});"
        f" {remedy}"
    )


def _rows(file: _File) -> tuple[dict[str, Any], ...]:
    return tuple(_placed_rows(file).values())


@lru_cache(maxsize=16)
def _placed_rows(file: _File) -> dict[str, dict[str, Any]]:
    """Return place in the file, for people -> row."""
    path = file[0]
    found: Iterator[tuple[int, dict[str, Any]]]
    try:
        if path.endswith(".parquet"):
            word, found = "row", enumerate(_parquet_rows(path), start=1)
        else:
            word, found = "line", _csv_rows(path) if path.endswith(".csv") else json_lines(path)
        rows = {}
        for number, row in found:
            place = f"{word} {number} of {path}"
            rows[place] = {name: _value(place, name, value) for name, value in row.items()}
    except OSError as error:
        raise ValueError(_unreadable(path, error)) from None
    if not rows:
        raise ValueError(f"{path} must hold rows and has none; write one JSON object a line")
    return rows


def _csv_rows(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a table with a header, and the lines in which they end; an empty cell is
    null.
    """
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        table = reader.reader  # which knows the line of an error
        try:
            for row in reader:
                if None in row:
                    raise ValueError(f"it has more cells than the header: {row[None]!r:.60}")
                yield table.line_num, {name: value or None for name, value in row.items()}
        except (csv.Error, ValueError) as error:
            raise ValueError(f"{path}, line {table.line_num} must be CSV ({error})") from None


def _parquet_rows(path: str) -> Iterator[dict[str, Any]]:
    parquet = required("pyarrow.parquet:read_table", "parquet", purpose="files in parquet")
    remedy = "write it anew, or as JSON, one object a line, in a file that ends in .jsonl"
    try:
        table = parquet.read_table(path)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} must be a table in parquet ({reason}); {remedy}") from None
    columns: dict[str, list[Any]] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            columns[name] = column.to_pylist()
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ValueError(
                f"column {name} of {path} cannot be read ({str(error).splitlines()[0]}); {remedy}"
            ) from None
    return (dict(zip(columns, values)) for values in zip(*columns.values()))


def _value(place: str, column: str, value: Any) -> Any:
    try:
        return _as_json(value)
    except ValueError as error:
        raise ValueError(f"{place}, column {column}: {error}; write it as a text") from None


def _as_json(value: Any) -> Any:
    """Return a value of a row as JSON has it: dates and times as ISO texts, spans of time in
    seconds, decimals as texts, bytes as UTF-8 or else base64, numbers that are not finite as null.
    Raises ValueError for any other value that JSON does not know.
    """
    match value:
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case str():
            value.encode()  # raises for a lone surrogate, which no tokenizer takes
            return value
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return base64.b64encode(value).decode()
        case datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
        case Decimal() | UUID():
            return str(value)
        case list() | tuple():
            return [_as_json(item) for item in value]
        case dict():
            return {str(name): _as_json(item) for name, item in value.items()}
    raise ValueError(f"JSON knows no {type(value).__name__} such as {value!r:.60}")


@lru_cache(maxsize=16)
def _tasks(file: _File, columns: _Columns) -> tuple[_Task, ...]:
    tasks = []
    for place, row in _placed_rows(file).items():
        prompt = _column(place, row, "prompt_column", columns.prompt, PROMPTS)
        reference = _column(
            place, row, "answer_column", columns.answer, ANSWERS, is_needed=columns.is_compared
        )
        if columns.after and isinstance(reference, str):
            reference = _cut(reference, columns.after) or reference
        tasks.append(_Task(_observation(place, prompt), reference, row, place))
    return tuple(tasks)


@lru_cache(maxsize=16)
def _parts(file: _File, columns: _Columns, share: float) -> list[tuple[_Task, ...]]:
    """Return the tasks to train on, and those to evaluate: this share of the prompts."""
    return divided(file[0], _tasks(file, columns), _prompt_text, share)


def divided(
    name: str, rows: Sequence[T], text: Callable[[T], str], share: float
) -> list[tuple[T, ...]]:
    """Return the rows of `name` to train on, and those to evaluate: this share of the different
    texts, drawn by themselves, so that the order of rows decides nothing and no text is in both.
    Raises ValueError as `held_out` does.
    """
    held = held_out(name, map(text, rows), share)
    return [
        tuple(row for row in rows if (text(row) in held) == is_held_out)
        for is_held_out in (False, True)
    ]


def overlap_note(trained: Sequence[str], evaluated: Sequence[str]) -> str | None:
    """Return a note on tasks, given by their texts, that are trained on and evaluated or that are
    repeated; None if there are none.
    """
    known = set(trained)
    if num_both := sum(text in known for text in evaluated):
        return (
            f"{num_both} of {len(evaluated)} tasks of the evaluation are trained on as well, so"
            " that its success is no held-out one; take them out of one of the two files"
        )
    num_rows = len(trained) + len(evaluated)
    if not (num_equal := num_rows - len({*trained, *evaluated})):
        return None
    return (
        f"{num_equal} of {num_rows} tasks repeat others; equal tasks are all trained on or all"
        " evaluated"
    )


def _prompt_text(task: _Task) -> str:
    return text_of(task.prompt)


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
def _are_texts(file: _File, columns: _Columns) -> bool:
    return all(isinstance(task.prompt, str) for task in _tasks(file, columns))


@lru_cache(maxsize=16)
def _is_short(file: _File, columns: _Columns) -> bool:
    return all(
        not isinstance(answer, Mapping | None) and len(str(answer)) <= _LONGEST_DRAWN
        for task in _tasks(file, columns)
        for answer in _listed(task.reference)[:1]
    )


@lru_cache(maxsize=16)
def _checked_score(name: str, file: _File, columns: _Columns) -> Score:
    """Return the function of that name, after it has judged the reference of the first row."""
    score, first = SCORES.get(name), _tasks(file, columns)[0]
    answer = "" if first.reference is None else str(_listed(first.reference)[0])
    if takes(score, _LISTED):
        SCORES.check_call(name, score, **_of_lists(score, first, answer))
    else:
        whole = {"completion": ...} if takes(score, "completion") else {}
        SCORES.check_call(name, score, "answer", "reference", "row", **whole)
    _judged(score, answer, first, answer)
    return score


def _of_lists(judge: Score, task: _Task, completion: str) -> dict[str, list[Any]]:
    """Return what a reward function of TRL gets of one completion, as TRL gives it: lists of one,
    and a list of each column, of which a function without **kwargs gets what it names.
    """
    prompt: Any = task.prompt
    said: Any = completion
    if not isinstance(prompt, str):
        prompt = [{"role": message.role, "content": message.text} for message in prompt]
        said = [{"role": "assistant", "content": completion}]
    columns = {
        key: [value] for key, value in task.row.items() if key not in ("prompt", "completion")
    }
    given = columns | {"prompts": [task.row.get("prompt", prompt)], _LISTED: [said]}
    known = inspect.signature(judge).parameters
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):
        return given
    return {name: value for name, value in given.items() if name in known}


def _judged(judge: Score, answer: str, task: _Task, completion: str) -> float:
    """Return the score of an answer, which stands in a completion. The function gets copies, for
    the next answer to the task is judged by the same row.
    """
    if takes(judge, _LISTED):
        score = judge(**copy.deepcopy(_of_lists(judge, task, completion)))
        if isinstance(score, Sequence) and len(score) == 1:
            score = score[0] or 0.0  # None is TRL's "not applicable"
    else:
        whole = {"completion": completion} if takes(judge, "completion") else {}
        score = judge(answer, copy.deepcopy(task.reference), copy.deepcopy(task.row), **whole)
    number = as_number(score)
    if number is None or not abs(number) <= MAX_REWARD:  # nan included
        raise ValueError(
            f"the score {getattr(judge, '__qualname__', judge)} must be a finite number, not"
            f" {score!r:.60}; change the function"
        )
    return number


def _column(
    place: str,
    row: Mapping[str, Any],
    option: str,
    name: str | None,
    known: Sequence[str],
    *,
    is_needed: bool = True,
) -> Any:
    """Return the first of these columns that the row has, else None if none is needed."""
    names, columns = [name] if name else known, [*_paths(row)]
    for path in names:
        value: Any = row
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value != []:
            return value
    if not is_needed:
        return None
    if empty := [path for path in names if path in columns]:
        raise ValueError(
            f"{place} must have a value in {empty[0]}, which is null, NaN or an empty list; drop"
            f" the row, or name another column by the option {option}"
        )
    raise ValueError(
        f"{place} must have {' or '.join(names)}, and its columns are {', '.join(columns)};"
        f" name yours by the option {option}, or drop the row"
    )


def _paths(row: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _paths(value, f"{before}{name}.")
        else:
            yield f"{before}{name}"


def _observation(place: str, prompt: Any) -> Observation:
    """Return a text, which our prompt wraps, or messages, which the policy sees as they are."""
    if isinstance(prompt, str):
        return prompt
    try:
        messages = tuple(as_texts(read_messages("prompt", prompt)))
    except RequestError as error:
        raise ValueError(
            f"{place}: a prompt must be a text, or a list of messages with a role (one of"
            f" {', '.join(ROLES)}) and a text as content: {error}"
        ) from None
    if messages and messages[-1].role == "assistant":
        raise ValueError(
            f"{place}: the last message of a prompt must not be the assistant's, for the chat"
            " template ends it and the policy would begin another; drop it, or say it in a message"
            " of the user"
        )
    return messages


def _listed(reference: Any) -> list[Any]:
    """Return the accepted answers of a reference: one, or a list's, tuple's, set's or array's."""
    if isinstance(reference, np.ndarray):
        reference = reference.tolist()
    return [*reference] if isinstance(reference, (list, tuple, set, frozenset)) else [reference]


def _cut(text: str, after: str | None) -> str:
    """Return the text behind the last `after`, up to the end of its line; the whole text if `after`
    is empty.
    """
    if not after:
        return text.strip()
    _, found, rest = text.rpartition(after)
    return rest.strip().partition("\n")[0].strip() if found else ""


def _agrees(given: str | Fraction, reference: Any) -> bool:
    """Return whether a normal answer is the reference."""
    if isinstance(reference, (float, np.floating)) and isinstance(given, Fraction):
        value = float(reference)
        is_single = abs(value) <= np.finfo(np.float32).max and float(np.float32(value)) == value
        if is_single and given == Fraction(str(np.float32(value))):
            return True
        return math.isfinite(value) and _rounded(given) == _rounded(Fraction(value))
    return given == _normal(str(reference))


def _rounded(value: Fraction) -> Decimal:
    return _DIGITS.divide(Decimal(value.numerator), Decimal(value.denominator))


def _normal(text: str) -> str | Fraction:
    """Return the value of a number, else the text in one of its spellings."""
    text = _FRACTION.sub(" ", _RAISED.sub("^", text))
    word = same_word(text).translate(_SIGNS).rstrip(". ")
    found = _NUMBER.fullmatch(word) if len(word) <= _LONGEST_NUMBER else None
    if found is None or found[1] and found[2] or int(found[4] or 1) == 0:
        return word
    value = Fraction(f"{found[1] or found[2]}{found[3].replace(',', '')}") / int(found[4] or 1)
    return value / 100 if found[5] else value
