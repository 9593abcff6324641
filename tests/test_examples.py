"""Examples of README and docs are run as they stand.

Elsewhere: worlds and files of tasks (test_scripted_rehearsal, test_own_environments,
test_tasks_from_files), the tutorial's world (test_tutorial), functions of one's own
(test_plug_ins), the API (test_api), a client of a server (test_renderer, test_exports_in_sglang).
Commands of training are parsed by test_documentation; a whole training takes too long, and
commands with GPUs, vLLM, a model hub or a second node need what a test has not.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ragen_mega.config import parse
from ragen_mega.studies.definitions import find
from tests.test_documentation import PAGES, ROOT, commands, name_of, tokens

ELSEWHERE = {"docs/api.md": "trains", "docs/serving.md": "asks a server"}
"""Pages whose Python is run by a separate test."""
QUICK = {
    "ragen-mega --help": (),
    "ragen-mega baselines": ("--environment frozen_lake --json",),
    "ragen-mega make-boards": ("--environment",),
    "ragen-mega plan": ("--model Qwen2.5-7B", "--model Qwen2.5-14B", "--recipe"),
    "ragen-mega study": ("--list", "--slurm"),
}
"""Commands that need no run and no model: their flags contain one of these.
"""


def blocks(kind: str) -> list[tuple[str, str]]:
    """Pages and blocks of a language, those that a shell writes into a file (<<'KIND') too."""
    found = []
    for page in PAGES:
        for token in tokens(page):
            if token.type != "fence":
                continue
            if token.info == kind:
                found.append((name_of(page), token.content))
            _, *written = token.content.split(f"<<'{kind.upper()}'\n")
            found += [(name_of(page), text.partition(f"\n{kind.upper()}\n")[0]) for text in written]
    return found


def execute(*command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    paths = (directory, ROOT, ROOT / "kernels")
    return subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, id=f"{page}-{index}")
        for index, (page, source) in enumerate(blocks("python"))
        if page not in ELSEWHERE
    ],
)
def test_python_can_be_executed(source: str, tmp_path: Path) -> None:
    for package in ("gymnasium", "mcp", "verifiers"):
        if f"import {package}" in source or f"from {package}" in source:
            pytest.importorskip(package)
    (tmp_path / "my_verl_reward.py").write_text("def compute_score(*row):\n    return 1.0\n")
    done = execute("-c", source, directory=tmp_path)
    assert done.returncode == 0, done.stderr


def test_pages_with_python_run_elsewhere_have_some() -> None:
    assert set(ELSEWHERE) <= {page for page, _ in blocks("python")}


def test_the_lookup_agent_pays_for_each_new_piece_and_for_the_code() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    import lookup_agent

    def played(seed: int, answer: Callable[[list], str]) -> tuple[dict, list]:
        asked: list = []

        def create(model: str, messages: list) -> SimpleNamespace:
            asked.append(messages)
            message = SimpleNamespace(content=answer(messages))
            return SimpleNamespace(
                id=f"call-{len(asked)}", choices=[SimpleNamespace(message=message)]
            )

        chat = SimpleNamespace(completions=SimpleNamespace(create=create))
        return lookup_agent.run({"seed": seed}, SimpleNamespace(chat=chat)), asked

    lengths, turns = set(), set()
    for seed in range(100):
        result, asked = played(seed, lambda messages: lookup_agent.ideal(messages, []))
        assert result["reward"] == 1 and result["success"]
        pieces = len(result["calls"])
        assert len(asked) - pieces in (1, 2)  # the code, and the stranger in half of the episodes
        lengths.add(pieces)
        turns.add(len(asked) - pieces)
        # Who asks the first person again and again gets one piece, unless it is the stranger.
        result, asked = played(seed, lambda messages: "ask " + messages[5]["content"].split()[4])
        assert not result["success"] and len(result["calls"]) <= 1 and len(asked) == pieces + 3
    assert lengths == {1, 2, 3, 4} and turns == {1, 2}


def test_studies_are_definitions_whose_flags_are_known(tmp_path: Path) -> None:
    studies = [source for _, source in blocks("toml") if "[small]" in source]
    assert len(studies) == 2
    for index, source in enumerate(studies):
        path = tmp_path / f"study_{index}.toml"
        path.write_text(source)
        study = find(str(path), None)
        assert len(study.arms) == 2
    for _, source in blocks("toml"):
        for arm in tomllib.loads(source).get("arms", ()):
            parse(shlex.split(arm["flags"]))


def quick_commands() -> list[str]:
    shown = {
        f"{command.script.removeprefix('ragen-mega ')} {shlex.join(command.words)}"
        for command in commands()
        if command.place.endswith(".md") and "NAME" not in command.words
        for flags in [shlex.join(command.words)]
        if command.script in QUICK
        and (not QUICK[command.script] or any(part in flags for part in QUICK[command.script]))
    }
    return sorted(shown)


SLOW_WORDS = ("--model", "--search", "paper")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            command, marks=[pytest.mark.slow] * any(word in command for word in SLOW_WORDS)
        )
        for command in quick_commands()
    ],
)
def test_commands_that_need_no_run_end_well(command: str, tmp_path: Path) -> None:
    words = ["-m", "ragen_mega.commands.program", *shlex.split(command)]
    done = execute(*words, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout and not done.stderr.startswith("error")


def test_the_answers_of_task_files_are_right(tmp_path: Path) -> None:
    """Each answer is computed again from the text of its question, and the examples are right and
    are asked nowhere.
    """

    def follow(text: str, start: str) -> str:
        for _ in range(3):
            (start,) = re.findall(rf"\b{start} > (\w+)", text)
        return start

    solutions = {
        "arrows": (r"(.*)\. Follow three arrows from (\w+)", follow),
        "largest": (r".*largest: (.*)", lambda text: max(text.split(", "), key=int)),
        "second_smallest": (r".*: (.*)", lambda text: sorted(text.split(", "), key=int)[1]),
        "third_from_end": (r".*: (.*)", lambda text: text.split()[-3]),
        "occurrences": (r".*does (\w+) stand here: (.*)", lambda w, text: text.split().count(w)),
        "digits": (r"What is (.*)", lambda text: sum(map(int, text.split(" + ")))),
    }
    assert execute(str(ROOT / "examples/task_files.py"), directory=tmp_path).returncode == 0
    folder = tmp_path / "task_files"

    def rows(name: str) -> list[dict]:
        return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]

    for name, (form, solve) in solutions.items():
        tasks = {row["question"]: row["answer"] for row in rows(name)}
        assert len(tasks) == 2000 and len(set(tasks.values())) > 3
        examples = {}
        for kind in ("thought", "plain"):
            for row in rows(f"{name}_{kind}"):
                question, reply = (message["content"] for message in row["messages"])
                thought, answer = re.fullmatch(
                    "(?:<think>(.+)</think>)?<answer>(.+)</answer>", reply
                ).groups()
                assert (thought is not None) == (kind == "thought")
                examples[question] = answer
        assert len(examples) == 2 and not examples.keys() & tasks.keys()
        for question, answer in (tasks | examples).items():
            assert str(solve(*re.fullmatch(form, question).groups())) == answer
