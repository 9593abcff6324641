"""Tasks from a file: rows of the shapes that verl's and TRL's data sets have, splits that share no
prompt, and scores that are compared with hand-made ones.
"""

import csv
import datetime
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Sequence
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragen_mega.algorithm.rewards import shape_trajectory
from ragen_mega.config import EnvironmentConfig, parse
from ragen_mega.data.types import Completion, Trajectory
from ragen_mega.environments import calls
from ragen_mega.environments.adapters.tasks import exact, read_rows
from ragen_mega.environments.boards import held_out_seeds
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.processes import builder, end_hosts
from ragen_mega.environments.reference_players import baselines
from ragen_mega.environments.registry import make
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.rollout.held_out import reference_players
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import (
    check_first_prompts,
    episode_config,
    episode_maker,
    evaluation_prompts,
    evaluation_tasks,
    reference_notes,
)
from ragen_mega.run.check import check_environments, task_notes
from tests.support.prompts import first_seeds

SUMS = [{"question": f"What is {n} + {n}?", "answer": 2 * n} for n in range(40)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(rows: Sequence[Any], path: str = "my_data.jsonl") -> str:
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return f"tasks:{path}"


def prompts(name: str, **options: Any) -> list[str]:
    world = make(name, **options)
    return [calls.reset(world, seed) for seed in range(world.num_tasks)]


def test_every_row_is_in_one_split_whatever_their_order(here: Path) -> None:
    name = write(SUMS)
    trained, held_out = prompts(name), prompts(name, split="validation")
    assert len(held_out) == 4 and len(trained) == 36
    assert {*trained, *held_out} == {row["question"] for row in SUMS}
    assert {*prompts(write(SUMS[::-1]), split="validation")} == {*held_out}
    assert len(prompts(name, split="validation", validation_share=0.5)) == 20
    repeated = write(SUMS * 2, "my_twice.jsonl")
    assert not {*prompts(repeated)} & {*prompts(repeated, split="validation")}


def test_evaluation_plays_the_rows_that_training_never_sees(here: Path) -> None:
    name = write(SUMS)
    world = make(name, split="validation")
    config = parse(["--environments", name]).environment
    played = [
        calls.reset(group[0].make_episode().environment, group[0].seed)
        for group in evaluation_tasks(config, name, evaluation_prompts(config, name, 256))
    ]
    assert played == prompts(name, split="validation") and len(played) == 4
    assert not {*played} & {*prompts(name)}
    assert list(held_out_seeds(name, world, 256)) == [0, 1, 2, 3]
    assert calls.reset(world, 5) == calls.reset(world, 1), "larger seeds wrap around"


def test_a_file_of_its_own_for_the_evaluation(here: Path) -> None:
    name, other = write(SUMS[:9]), write(SUMS[9:], "my_test.jsonl")
    assert len(prompts(name, validation="my_test.jsonl")) == 9
    held_out = prompts(name, validation="my_test.jsonl", split="validation")
    assert held_out == [row["question"] for row in SUMS[9:]] and other


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("42", 42, 1),
        (" 42. ", "42", 1),
        ("$1,234.50", 1234.5, 1),
        ("4.2e1", "42", 1),
        ("-0.0", "0", 1),
        ("42 apples", "42", 0),
        ("1e999", "1", 0),
        ("nan", "nan", 1),
        ("the  PARIS.", "The Paris", 1),
        ("\N{FULLWIDTH DIGIT FOUR}2", "42", 1),
        ("true", True, 1),
        ("b", ["a", "b"], 1),
        ("c", ["a", "b"], 0),
        ("", "0", 0),
        (".", "0", 0),
        ("1,23", "123", 0),
        ("0.2", 0.20000000298023224, 1),  # a float32, as parquet gives it
        ("0.20000000298023224", 0.20000000298023224, 1),
        ("0.2000001", 0.20000000298023224, 0),
        ("0.2", np.float32(0.2), 1),
        ("3.1415927", np.float32(np.pi), 1),
        ("3.141593", np.float32(np.pi), 0),
        ("0.3", 0.1 + 0.2, 1),
        ("0.3000001", 0.3, 0),
        ("0.20", "0.2", 1),
        ("1e3", 1000, 1),
        ("1/2", 0.5, 1),
        ("-3 / 4", "-0.75", 1),
        ("1/3", 1 / 3, 1),
        ("0.333", "1/3", 0),
        ("1/0", "1/0", 1),
        ("1/0", "0", 0),
        ("\N{VULGAR FRACTION ONE HALF}", "0.5", 1),
        ("2\N{VULGAR FRACTION ONE HALF}", "10.5", 0),
        ("10\N{SUPERSCRIPT TWO}", "102", 0),
        ("10\N{SUPERSCRIPT TWO}", "10^2", 1),
        ("50%", 0.5, 1),
        ("50 %.", "50%", 1),
        ("50%", 50, 0),
        ("\N{MINUS SIGN}5", -5, 1),
        ("-$5", "$-5", 1),
        ("+-5", "-5", 0),
        ("\N{ARABIC-INDIC DIGIT FOUR}2", 42, 1),
        (" 7.\n", np.int64(7), 1),
        ("True.", np.bool_(True), 1),
        ("1", True, 0),
        ("123456789012345678901234567890", 123456789012345678901234567890, 1),
        ("123456789012345678901234567891", 123456789012345678901234567890, 0),
        ("9" * 5000, "9" * 5000, 1),
        ("1e999", "1e998", 0),
        ("inf", math.inf, 1),
        ("b", ("a", "b"), 1),
        ("2.50", np.array([1.5, 2.5]), 1),
        ("0.5", Decimal("0.50"), 1),
        ("3", [], 0),
    ],
)
def test_an_answer_is_compared_with_the_reference(answer: str, reference: Any, score: int) -> None:
    assert exact(answer, reference, {}) == score


def test_the_shapes_of_other_data_sets(here: Path) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    verl = {"data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "4"}}
    for rows in (
        [verl | {"prompt": said}] * 1,
        [{"prompt": said, "ground_truth": "4"}],
        [{"task": said, "key": {"value": 4}}],
    ):
        write(rows, "my_test.jsonl")
        is_own = "task" in rows[0]
        options = {"prompt_column": "task", "answer_column": "key.value"} if is_own else {}
        world = make(write(rows), validation="my_test.jsonl", **options)
        assert [(m.role, m.content) for m in calls.reset(world, 0)] == [
            (m["role"], m["content"]) for m in said
        ]
        result = calls.step(world, "4")
        assert (result.reward, result.terminated, result.info["success"]) == (1.0, True, True)
    write([verl | {"prompt": said[1:]}] * 2, "my_test.jsonl")
    alone = make("tasks:my_test.jsonl", validation="my_test.jsonl")
    (only,) = Episode(alone, EpisodeConfig()).start(0)
    assert (only.role, only.content) == ("user", "2 + 2?"), "as a list it is read as it is"


def test_an_episode_is_one_answer_in_the_form_that_the_prompt_says(here: Path) -> None:
    gsm8k = [
        {"question": f"{n} + {n}?", "answer": f"It is twice {n}.\n#### {2 * n}"} for n in range(9)
    ]
    name = write(gsm8k)
    for options, right, form in (
        ({"answer_after": "####"}, "sum</think>Not #### 5\n#### {}\nDone", "#### [your answer]"),
        ({"answer_after": "", "answer_column": "n"}, "sum</think>{}", "[your answer]"),
        ({"answer_column": "n"}, "sum</think><answer>{}</answer>", "<answer> [your answer]"),
    ):
        if "answer_column" in options:
            write([row | {"n": 2 * n} for n, row in enumerate(gsm8k)])
        episode = Episode(make(name, **options), EpisodeConfig())
        first = episode.start(0)[-1].content
        assert f"Always output: <think> [Your thoughts] </think> {form}" in first
        number = int(first.partition("State:\n")[2].split()[0])
        result = episode.respond(right.format(2 * number))
        assert result.terminated and result.info["success"] and result.reward == 1.0
        episode.start(0)
        wrong = episode.respond(right.format(2 * number + 1))
        assert wrong.terminated and not wrong.info["success"] and wrong.reward == 0.0
        assert baselines(name, first_seeds(8), EpisodeConfig(), options).random < 0.5
    told = Episode(make(name, instruction="Solve."), EpisodeConfig())
    assert "Solve." in told.start(0)[1].content
    chat = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": n} for n in range(9)]
    with pytest.raises(ValueError, match="instruction .* messages"):
        make(write(chat, "my_chat.jsonl"), instruction="Solve.")
    unread = Episode(make(name, answer_after="####"), EpisodeConfig())
    unread.start(0)
    assert not unread.respond("sum</think>12").info["is_format_valid"]


def test_a_score_of_ones_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(here)
    (here / "my_scores.py").write_text(
        "def close(answer, reference, row):\n"
        "    return 1 / (1 + abs(int(answer) - reference) * row['weight'])\n\n\n"
        "def none(answer, reference, row):\n    return None\n\n\n"
        "def broken(answer, reference, row):\n    return row['missing']\n\n\n"
        "def short(answer, reference):\n    return 1\n\n\n"
        "def words(answer, reference, row):\n    return int('no')\n\n\n"
        "def nan(answer, reference, row):\n    return float('nan')\n"
    )
    name = write([row | {"weight": 3} for row in SUMS])
    world = make(name, score="my_scores:close")
    question = calls.reset(world, 7)
    twice = 2 * int(question.split()[2])
    result = calls.step(world, str(twice + 1))
    assert result.reward == 0.25 and not result.info["success"]
    for score, words in (
        ("none", "score none must be a finite number, not None"),
        ("nan", "score nan must be a finite number, not nan"),
        ("broken", r"tasks:.* KeyError: 'missing' \(in broken, .*my_scores.py:10\)"),
        ("words", r"tasks:.* ValueError: .*'no' \(in words, .*my_scores.py:18\)"),
        ("absent", "cannot"),
        ("short", r"called with \(answer, reference, row\).*docs/adapters.md"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            make(name, score=f"my_scores:{score}")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "rows"),
        ('{"question": "?", "answer": 1}\n{"question":\n', "line 2"),
        ("question,answer\n", "line 1"),
        ("[]\n", "line 1"),
        ('{"question": "?", "solution": {"value": 1}}\n' * 2, "solution.value"),
        ('{"text": "?", "answer": 1}\n' * 2, "prompt or question"),
        ('{"question": [{"role": "user"}], "answer": 1}\n', "content"),
        ('{"question": [{"role": "assistant", "content": "So"}], "answer": 1}\n', "assistant's"),
        ('{"question": "?", "answer": 1}\n' * 3, "validation"),
        (
            '{"question": "?", "answer": {"a": 1}}\n{"question": "!", "answer": {"a": 1}}\n',
            "answer_column",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(here: Path, text: str, words: str) -> None:
    (here / "my_data.jsonl").write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        make("tasks:my_data.jsonl")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_may_be_a_module(here: Path) -> None:
    module = "module of yours that is called tasks"
    for path, remedy in (("my_data.jsonl", "mend the path"), ("MyWorld", module), (".", module)):
        with pytest.raises(ValueError, match=f"{remedy}$"):
            make(f"tasks:{path}")


def test_rows_for_a_world_of_ones_own_follow_the_file(here: Path) -> None:
    write(SUMS)
    assert [*read_rows("my_data.jsonl")] == SUMS
    write(SUMS[:3])
    assert len(read_rows("my_data.jsonl")) == 3


def test_the_longest_row_is_tried_at_the_start(here: Path) -> None:
    """A row that leaves no room for a whole answer shortened it, or failed when it was drawn."""
    rows = [{"question": f"{n}?", "answer": n} for n in range(9)]
    name = write([*rows, {"question": "word " * 100, "answer": 9}])
    renderer = ChatRenderer(train_tokenizer(["system user assistant word ? "] * 9), think=False)

    def tried(room: int, *flags: str) -> list[str]:
        limits = ["--max-response-length", "8", "--max-context-length", str(room), "--no-think"]
        config = parse([*flags, "--environments", name, "--prompt-style", "compact", *limits])
        return check_first_prompts(config, {name: [(0, None)]}, renderer)

    config = parse(["--environments", name, "--prompt-style", "compact", "--no-think"])
    world = make(name, split="train")
    if "word" not in calls.reset(world, world.longest[0]):
        world = make(name, split="validation")
    episode = Episode(world, episode_config(config.environment))
    length = len(renderer.start(episode.start(world.longest[0])))
    assert world.longest[1].startswith("line 10 of")
    assert tried(length + 8, "--load", "my-model") == tried(length + 1) == []
    (note,) = tried(length + 7, "--load", "my-model")
    assert note.startswith("line 10 of") and f"leave 7 of --max-context-length {length + 7}" in note
    assert f"raise it to {length + 8} " in note
    with pytest.raises(ValueError, match=rf"line 10 of .* has {length} tokens"):
        tried(length)


def test_equal_prompts_with_several_references_are_told(here: Path) -> None:
    said = {}
    for answers in ("11", "12"):
        rows = [{"question": "?", "answer": answer} for answer in answers]
        said[answers] = make(write([*SUMS, *rows], f"my_{answers}.jsonl")).split_note
    assert "1 of 42 tasks repeat" in said["11"] and "several references" not in said["11"]
    assert "1 of 42 tasks repeat" in said["12"] and "1 prompts have several" in said["12"]


def test_csv_holds_the_same_rows(here: Path) -> None:
    """Cells are texts, which `exact` compares as numbers; spreadsheets write a byte order mark."""
    with open("my_data.csv", "w", encoding="utf-8-sig", newline="") as file:
        table = csv.DictWriter(file, ["question", "answer", "more"])
        table.writeheader()
        table.writerows(row | {"question": row["question"] + ' "so",\nhe said'} for row in SUMS)
    rows = read_rows("my_data.csv")
    assert [row["answer"] for row in rows] == [str(row["answer"]) for row in SUMS]
    assert rows[0] == {"question": 'What is 0 + 0? "so",\nhe said', "answer": "0", "more": None}
    world = make("tasks:my_data.csv")
    twice = 2 * int(calls.reset(world, 3).split()[2])
    assert calls.step(world, str(twice)).info["success"]
    for text, words in (
        ("question,answer\n?,1\n!,2,3\n", "line 3 must be CSV .*more cells than the header"),
        ('question,answer\n?,1\n"!"x,2\n', "line 3 must be CSV"),
        ("question,answer\n?,1\n\n!,\n", "line 4 of .* must have a value in answer"),
    ):
        (here / "my_data.csv").write_text(text)
        with pytest.raises(ValueError, match=words) as caught:
            make("tasks:my_data.csv")
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(find_spec("pyarrow") is not None, reason="the extra parquet is installed")
def test_parquet_needs_an_extra(here: Path) -> None:
    (here / "my_data.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"parquet .*'ragen-mega\[parquet\]'"):
        make("tasks:my_data.parquet")


def test_parquet_holds_the_same_rows(here: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    (here / "my_data.parquet").write_bytes(b"no table")
    with pytest.raises(ValueError, match="my_data.parquet must be"):
        make("tasks:my_data.parquet")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(SUMS), "my_data.parquet")
    assert [*read_rows("my_data.parquet")] == SUMS
    assert prompts("tasks:my_data.parquet") == prompts(write(SUMS))


def test_rows_have_the_values_of_json(here: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    from pyarrow import parquet

    noon = datetime.datetime(2024, 5, 6, 12, 30)
    row = {
        "question": "?",
        "answer": 0.2,
        "day": noon.date(),
        "at": noon,
        "clock": noon.time(),
        "span": datetime.timedelta(minutes=2),
        "price": Decimal("1.50"),
        "text": b"caf\xc3\xa9",
        "image": {"bytes": b"\xff\xd8", "path": None},
        "missing": math.nan,
        "many": [math.inf, 1.0],
        "map": [("a", 1)],
    }
    single, pairs = pyarrow.float32(), pyarrow.map_(pyarrow.string(), pyarrow.int64())
    types = {
        name: pyarrow.infer_type([value])
        for name, value in row.items()
        if name not in ("answer", "map")
    }
    schema = pyarrow.schema({name: types.get(name, single) for name in row} | {"map": pairs})
    parquet.write_table(pyarrow.Table.from_pylist([row] * 2, schema), "my_data.parquet")
    (first, _) = read_rows("my_data.parquet")
    assert json.loads(json.dumps(first, allow_nan=False)) == first
    assert first == {
        "question": "?",
        "answer": pytest.approx(0.2, abs=1e-8),
        "day": "2024-05-06",
        "at": "2024-05-06T12:30:00",
        "clock": "12:30:00",
        "span": 120.0,
        "price": "1.50",
        "text": "caf\N{LATIN SMALL LETTER E WITH ACUTE}",
        "image": {"bytes": "/9g=", "path": None},
        "missing": None,
        "many": [None, 1.0],
        "map": [["a", 1]],
    }
    assert exact("0.2", first["answer"], first) == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ('"\\ud83d"', "line 4 .*column answer: .*surrogates"),
        ("NaN", "line 4 .*must have a value in answer"),
        ("-Infinity", "line 4 .*must have a value in answer"),
        ("1e999", "line 4 .*must have a value in answer"),
    ],
)
def test_a_value_that_json_does_not_know_is_named(here: Path, answer: str, words: str) -> None:
    row = '{"question": "?", "answer": %s}\n'
    (here / "my_data.jsonl").write_text(row % 1 + "\n\n" + row % answer)
    with pytest.raises(ValueError, match=words) as caught:
        make("tasks:my_data.jsonl")
    assert "\n" not in str(caught.value)


def test_rows_are_copies(here: Path) -> None:
    name = write(SUMS)
    for row in read_rows("my_data.jsonl"):
        row.clear()
    read_rows("my_data.jsonl")[0].clear()
    assert [*read_rows("my_data.jsonl")] == SUMS and len(prompts(name)) == 36


def test_a_score_may_write_into_its_row(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(here)
    (here / "my_pops.py").write_text(
        "def pops(answer, reference, row):\n"
        "    row['answer'].clear()\n"
        "    return reference.pop() == answer\n"
    )
    name = write([{"question": f"{n}?", "answer": ["right"]} for n in range(2)])
    world = make(name, score="my_pops:pops", validation="my_data.jsonl")
    earned = []
    for _ in range(4):
        calls.reset(world, 0)
        earned.append(calls.step(world, "right").reward)
    assert earned == [1.0] * 4


def test_the_start_says_that_references_do_not_score(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A score that bounds its time by a signal fails in a thread, and takes that for a wrong
    answer.
    """
    monkeypatch.syspath_prepend(here)
    (here / "my_alarm.py").write_text(
        "import signal\n\n\n"
        "def judge(answer, reference, row):\n"
        "    signal.signal(signal.SIGALRM, signal.SIG_DFL)\n"
        "    signal.alarm(5)\n"
        "    signal.alarm(0)\n"
        "    return float(answer == str(reference))\n\n\n"
        "def quiet(answer, reference, row):\n"
        "    try:\n        return judge(answer, reference, row)\n"
        "    except Exception:\n        return 0.0\n\n\n"
        "def of_parts(answer, reference, row):\n    return 0.0\n"
    )
    end_hosts()  # of other tests, which have another path
    name = write(SUMS)

    def start(score: str, *flags: str) -> EnvironmentConfig:
        options = json.dumps({name: {"score": f"my_alarm:{score}"}})
        return parse(["--environments", name, "--environment-options", options, *flags]).environment

    (said,) = reference_notes(start("quiet"))
    assert "12 of 12 references do not score 1" in said and "What is" in said
    assert "needs --environment-processes" in said
    for score in ("quiet", "judge"):
        config = start(score, "--environment-processes", "1")
        check_environments(config)
        assert reference_notes(config) == []
        assert reference_players(config, name, [(0, None)]).errors_say is None
    with pytest.raises(ValueError, match="give --environment-processes 1 or more"):
        check_environments(start("judge"))
    assert reference_notes(parse(["--environments", name]).environment) == []
    write([{"question": f"{n}?", "answer": {"tests": n}} for n in range(9)])
    assert reference_notes(start("of_parts")) == [], "such a reference is no answer"
    write([{"question": f"{n}?", "answer": "</answer>"} for n in range(9)])
    (said,) = reference_notes(parse(["--environments", name]).environment)
    assert "8 of 8" in said, "no answer can be this reference"


def test_paths_outlast_a_change_of_the_directory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write(SUMS)
    Path("more.jsonl").write_text(Path("my_data.jsonl").read_text())
    config = parse(["--tasks", "my_data.jsonl"]).environment.located()
    assert config.located() == config and config.options(name) == {"directory": str(here)}
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert config.located() == config, "as a run that goes on from another directory"
    assert len(prompts(name, **config.options(name))) == 36
    assert len(prompts(name, **config.options(name), validation="more.jsonl")) == 40
    with pytest.raises(ValueError, match="mend the path"):
        make(name)


DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "adapters.md").read_text()
COMING_FROM = (DOCS / "coming_from.md").read_text()


def test_the_examples_of_the_documentation_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = PAGE.partition("```bash\ncat > my_data.jsonl")[2].partition("\nbash ")[0]
    subprocess.run(["bash", "-ec", f"cat > my_data.jsonl{block}"], check=True)
    monkeypatch.syspath_prepend(here)
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    world = make("tasks:my_data.jsonl", score="my_module:score")
    calls.reset(world, 0)
    right = {row["question"]: row["answer"] for row in read_rows("my_data.jsonl")}
    assert calls.step(world, right[calls.reset(world, 0)]).info["success"]
    assert calls.step(world, "far away").reward == 0.0
    source = PAGE.partition("```python\n# my_quiz.py\n")[2].partition("```")[0]
    (here / "my_quiz.py").write_text(source)
    quiz = Episode(make("my_quiz:Quiz"), EpisodeConfig(think=False))
    assert "eggs" in quiz.start(0)[-1].content
    assert "Try again." in quiz.respond("<answer>41</answer>").messages[0].content
    assert quiz.respond("<answer> 42 </answer>").reward == 0.5


def test_tasks_stand_for_an_environment(here: Path) -> None:
    name = write(SUMS)
    Path("scored_by.py").write_text("def score(answer, reference, row):\n    return 1.0\n")
    config = parse(["--tasks", "my_data.jsonl", "--score", "scored_by:score", "--seed", "3"])
    assert config.environment.environments == name and config.train.seed == 3
    assert config.environment.options(name) == {"score": "scored_by:score"}
    for beside in ("--environments bandit", "--environments=bandit", "--environment_options={}"):
        with pytest.raises(ValueError, match="beside --environment.*; drop one"):
            parse(["--tasks", "my_data.jsonl", *beside.split()])
    with pytest.raises(ValueError, match="--score does nothing without --tasks"):
        parse(["--score", "scored_by:score"])


def test_a_row_needs_no_reference_beside_a_score_of_ones_own(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(here)
    (here / "my_length.py").write_text(
        "def score(answer, reference, row):\n    return len(answer) if reference is None else -1\n"
    )
    name = write([{"question": f"{n}?"} for n in range(9)])
    world = make(name, score="my_length:score")
    calls.reset(world, 0)
    assert calls.step(world, "four").reward == 4
    assert world.judge_references() is None and not hasattr(world, "random_answer")
    for options in ({}, {"score": "my_length:score", "answer_column": "key"}):
        with pytest.raises(ValueError, match="must have (answer|key)"):
            make(name, **options)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_turn_keeps_reference_and_score(here: Path, processes: int) -> None:
    rows = [{"question": "?", "answer": "7"}, {"question": "!", "answer": "x" * 5000}]
    name = write(rows)
    config = EnvironmentConfig(name, environment_processes=processes)
    end_hosts()  # of other tests, which have another path
    found = {}
    for seed in (0, 1):
        options = {"validation": "my_data.jsonl"}
        episode = Episode(builder(config, name, options)(), EpisodeConfig(think=False))
        episode.start(seed)
        found[seed] = episode.respond("<answer>7</answer>").info["outcome"]
    assert found[0] == {"reference": "7", "score": 1.0}
    assert found[1] == {"reference": "x" * 1000 + " ...", "score": 0.0}


class Odd:
    """A world whose `outcome` is no JSON, as other libraries may have it."""

    def reset(self, seed: int) -> str:
        return "?"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, True, False, {"outcome": {"board": object()}}


def test_an_outcome_that_is_no_json_is_left_out() -> None:
    episode = Episode(Odd(), EpisodeConfig(think=False))
    episode.start(0)
    assert "outcome" not in episode.respond("<answer>7</answer>").info


@pytest.mark.parametrize("after", ["####", "", None])
def test_a_score_may_see_the_whole_completion(
    here: Path, monkeypatch: pytest.MonkeyPatch, after: str | None
) -> None:
    monkeypatch.syspath_prepend(here)
    (here / "my_form.py").write_text(
        "def score(answer, reference, row, completion):\n"
        "    return len(completion) + len(answer) / 100\n"
    )
    world = make(write(SUMS), score="my_form:score", answer_after=after)
    episode = Episode(world, EpisodeConfig(think=False))
    text = {"####": "So\n#### 42", "": "So 42", None: "So <answer>42</answer>"}[after]
    answer = text if after == "" else "42"
    assert "[your answer]" in episode.start(0)[-1].content
    assert episode.respond(text).reward == len(text) + len(answer) / 100
    calls.reset(world, 0)
    written = {"####": "#### 7", "": "7", None: "<answer> 7 </answer>"}[after]
    assert calls.step(world, "7").reward == len(written) + 1 / 100, "a player that writes no text"


def test_a_score_is_any_finite_number(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A score below 0 was an error, which another attempt replaced: the worst answers were lost."""
    monkeypatch.syspath_prepend(here)
    (here / "my_range.py").write_text(
        "def score(answer, reference, row):\n    return 2 - abs(int(answer) - reference)\n"
    )
    world = make(write(SUMS), score="my_range:score", solved_at=1.5)
    right = 2 * int(calls.reset(world, 0).split()[2])
    for off, is_solved in ((0, True), (1, False), (9, False)):
        calls.reset(world, 0)
        result = calls.step(world, str(right + off))
        assert (result.reward, result.info["success"]) == (2 - off, is_solved)
    assert world.judge_references() is None
    note = make(write(SUMS), score="my_range:score", solved_at=3).judge_references()
    assert "references do not score 3" in note and "solved_at" in note


def test_the_start_says_that_messages_hide_how_an_answer_is_read(here: Path) -> None:
    """TRL's chat data, of which an answer without tags would be invalid."""

    def said(rows: list[dict[str, str]], *flags: str, **options: Any) -> list[str]:
        name = write(
            [
                {"prompt": [*rows, {"role": "user", "content": f"{n}?"}], "answer": n}
                for n in range(9)
            ]
        )
        given = ["--environments", name, "--environment-options", json.dumps({name: options})]
        return task_notes(parse([*given, *flags]).environment)

    silent, telling = ([{"role": "system", "content": text}] for text in ("Be brief.", "<answer>"))
    (note,) = said(silent)
    assert (
        "9 of 9 prompts are messages that do not mention <answer>" in note
        and "answer_after" in note
    )
    assert not said(telling) and not said(silent, answer_after="")
    assert not said(silent, "--system-prompt", "Write <answer> and </answer>.")
    assert not said(silent, "--prompt-examples", "2")
    write(SUMS)
    assert not task_notes(parse(["--tasks", "my_data.jsonl"]).environment)


@pytest.mark.parametrize("processes", ["0", "1"])
def test_the_documented_example_of_trl_pays_as_trl_does(
    here: Path, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    """Reward functions of TRL, called by hand as `GRPOTrainer` does, and by the documented command
    for plain answers to chat data.
    """
    block = COMING_FROM.partition("\n## TRL\n")[2].partition("```bash\n")[2].partition("```")[0]
    files, _, command = block.partition("\nbash ")
    subprocess.run(["bash", "-ec", files], check=True)
    monkeypatch.syspath_prepend(here)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    end_hosts()  # of other tests, which have another path
    words = shlex.split(command.replace("\\\n", " "))[1:]
    config = parse([*words, "--environment-processes", processes]).located()
    assert config.located() == config
    name, world = "tasks:my_chat.jsonl", config.environment
    check_environments(world)
    assert not task_notes(world) and not reference_notes(world)
    episode = episode_maker(world, name)()
    rows = {row["prompt"][0]["content"]: row for row in read_rows("my_chat.jsonl")}
    from my_rewards import correctness, form

    for said in ("It is {}.", "It is #### {}", "####", "one"):
        row = rows[episode.start(0)[-1].content]
        text = said.format(row["solution"])
        completions = [[{"role": "assistant", "content": text}]]
        columns = {"prompts": [row["prompt"]], "solution": [row["solution"]]}
        right, formed = (f(completions=completions, **columns)[0] for f in (correctness, form))
        result = episode.respond(text)
        assert (result.reward, result.info["success"]) == (right, right == 1.0)
        trajectory = Trajectory(0, environment=name)
        turn = trajectory.append_action(Completion([1], [0.0], "stop"))
        turn.reward, turn.info = result.reward, result.info
        shaped = shape_trajectory(trajectory, config.advantage.reward_terms)
        assert shaped.total_reward == pytest.approx(right + 0.2 * formed)


def test_a_reward_function_of_trl_as_a_score(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(here)
    (here / "my_trl.py").write_text(
        "def text(prompts, completions, answer):\n"
        "    assert completions[0] == str(answer[0]) and prompts[0].startswith('What')\n"
        "    return [2]\n\n\n"
        "def skips(completions, **kwargs):\n    return [None]\n\n\n"
        "def none(completions, **kwargs):\n    return None\n\n\n"
        "def two(completions, **kwargs):\n    return [1, 2]\n\n\n"
        "def other(completions, solution, **kwargs):\n    return [1]\n\n\n"
        "async def later(completions, **kwargs):\n    return [1]\n"
    )
    name = write(SUMS)
    for score, reward in (("text", 2.0), ("skips", 0.0)):
        world = make(name, score=f"my_trl:{score}", answer_after="")
        episode = Episode(world, EpisodeConfig(think=False))
        number = 2 * int(episode.start(0)[-1].content.partition("What is ")[2].split()[0])
        assert episode.respond(str(number)).reward == reward
    for score, words in (
        ("none", "must be a finite number, not None"),
        ("two", r"must be a finite number, not \[1, 2\]"),
        ("other", "missing a required argument: 'solution'"),
        ("later", "coroutine"),
    ):
        with pytest.raises(ValueError, match=words):
            make(name, score=f"my_trl:{score}")
    with pytest.raises(ValueError, match="my_trl:skips .*judges tasks of a file.* bandit"):
        parse(["--environments", "bandit", "--reward", "environment + 0.1*my_trl:skips"])
