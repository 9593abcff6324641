"""Generated malformed inputs: flags, boards, models and model outputs. Each is refused in one
line or handled as data.

A case is damage done to a good input by a seeded generator, so that nobody has chosen what is easy.
"""

import dataclasses
import json
import random
import shutil
import typing
from pathlib import Path

import pytest
import torch

from ragen_mega.config import StarPOConfig, parse
from ragen_mega.environments.boards import load_boards
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.registry import make
from ragen_mega.models.huggingface import load_tokenizer
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.train import main
from ragen_mega.warm_start.small_model import write_small_model

BAD_NUMBERS = (
    "abc",
    "",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "--",
    "0x10",
    "1,5",
    "None?",
    "true",
    "[1]",
    "9" * 400,
    "\u0661\u0662x",
)
BAD_TEXTS = (
    "",
    " ",
    "nonsense",
    "{",
    "[1, 2]",
    '{"sokoban": 3}',
    "null",
    "\x00",
    "sokoban:-1",
    "a:b:c",
    "NaN",
    "../..",
    "{}x",
)
FRAGMENTS = (
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    " || ",
    "||",
    "UP",
    "1e999",
    "<|im_start|>",
    "<|im_end|>",
    "\x00",
    "\ud800",
    "\U0001f600" * 50,
    "\n" * 100,
    "<answer>" * 40,
    "|" * 3000,
)
PACKAGED = Path(__file__).parents[2] / "ragen_mega/environments/worlds"
FLAGS = """
    --environments bandit --max-turns 1 --max-actions-per-turn 1 --max-actions 1
    --prompt-style compact --max-response-length 8 --max-context-length 96 --eval-prompts 2
    --eval-interval 0 --hidden-size 16 --ffn-hidden-size 32 --num-layers 1 --num-groups 2
    --group-size 2 --minibatch-size 4 --filter-strategy none --num-steps 1 --save-interval 0
""".split()


def one_line(text: str) -> bool:
    return bool(text.strip()) and "\n" not in text.strip()


def bad_flags() -> list[tuple[str, str]]:
    """Every numeric or textual flag with values that its type or meaning forbids; those that happen
    to be legal stay in.
    """
    cases = []
    for section in dataclasses.fields(StarPOConfig):
        hints = typing.get_type_hints(section.default_factory)
        for item in dataclasses.fields(section.default_factory):
            is_number = any(kind in str(hints[item.name]) for kind in ("int", "float"))
            flag = "--" + item.name.replace("_", "-")
            cases += [(flag, value) for value in (BAD_NUMBERS if is_number else BAD_TEXTS)]
    return random.Random(0).sample(cases, 60)


@pytest.mark.parametrize(("flag", "value"), bad_flags())
def test_flags(flag: str, value: str) -> None:
    try:
        config = parse([flag, value])
    except ValueError as error:
        assert one_line(str(error))
        assert len(str(error)) < 2000
    else:
        numbers = [
            v
            for section in dataclasses.asdict(config).values()
            for v in section.values()
            if isinstance(v, float)
        ]
        assert all(abs(number) < float("inf") for number in numbers), (
            f"{flag} {value} was taken as a number"
        )


@pytest.mark.parametrize("seed", range(50))
def test_boards(seed: int, tmp_path: Path) -> None:
    generator = random.Random(seed)
    name = generator.choice(["sokoban", "frozen_lake"])
    text = next(PACKAGED.glob(f"*/boards/{name}*.jsonl")).read_text(encoding="utf-8")
    path = tmp_path / "boards.jsonl"
    path.write_bytes(broken(text.splitlines(keepends=True), generator))
    try:
        boards = load_boards(path, name)
    except ValueError as error:
        assert one_line(str(error)) and str(path) in str(error)
    else:  # damage that leaves well-formed boards
        environment = make(name)
        for board in boards[:3]:
            environment.reset(board.seed, board=board.rows)


def broken(lines: list[str], generator: random.Random) -> bytes:
    """A boards file with one of its first lines damaged as JSON, as a record, as a board, or as
    bytes.
    """
    number = generator.randrange(3)
    record = json.loads(lines[number])
    kind = generator.choice(["bytes", "cut", "drop", "type", "symbol", "ragged", "swap", "size"])
    if kind == "drop":
        del record[generator.choice(["set", "seed", "board"])]
    elif kind == "type":
        wrong = generator.choice([None, 1.5, -1, [], {}, [[]], [""], "", True, [1]])
        record[generator.choice(["set", "seed", "board"])] = wrong
    elif kind in ("symbol", "ragged", "swap", "size"):
        rows = record["board"]
        index = generator.randrange(len(rows))
        if kind == "symbol":
            column = generator.randrange(len(rows[index]))
            rows[index] = (
                rows[index][:column]
                + generator.choice("?\x00zPXOSGH#_ \U0001f600")
                + rows[index][column + 1 :]
            )
        elif kind == "ragged":
            rows[index] += generator.choice(["#", "F", "", "##"])
        elif kind == "swap":
            rows[index] = "".join(generator.sample(rows[index], len(rows[index])))
        else:
            del rows[index]
    data = bytearray((json.dumps(record) + "\n").encode())
    if kind == "bytes":
        for _ in range(generator.randint(1, 5)):
            data[generator.randrange(len(data))] = generator.randrange(256)
    elif kind == "cut":
        del data[generator.randrange(len(data)) :]
    before, after = "".join(lines[:number]), "".join(lines[number + 1 : 6])
    return before.encode() + bytes(data) + after.encode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "good"
    write_small_model(parse(FLAGS), directory)
    return directory


def damage_json(path: Path, generator: random.Random) -> None:
    """Drop, retype or rescale one entry."""
    values = json.loads(path.read_text())
    key = generator.choice(sorted(values))
    if generator.random() < 0.4:
        del values[key]
    else:
        values[key] = generator.choice([None, -1, 0, "x", [], {}, 3.7, 10**12, True])
    path.write_text(json.dumps(values))


def damage_bytes(path: Path, generator: random.Random, first: int | None = None) -> None:
    """Cut the file short, or flip some of its bytes (of the `first` if given)."""
    data = bytearray(path.read_bytes())
    if generator.random() < 0.5:
        del data[generator.randrange(len(data)) :]
    else:
        for _ in range(generator.randint(1, 8)):
            data[generator.randrange(min(first or len(data), len(data)))] ^= generator.randint(
                1, 255
            )
    path.write_bytes(data)


@pytest.mark.parametrize("seed", range(30))
def test_pretrained_checkpoints(
    seed: int, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = random.Random(seed)
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    kind = generator.choice(["config", "config", "tokenizer", "weights", "header", "missing"])
    if kind == "config":
        damage_json(directory / "config.json", generator)
    elif kind == "missing":
        generator.choice(
            [path for path in sorted(directory.iterdir()) if path.name != "generation_config.json"]
        ).unlink()
    elif kind == "tokenizer":
        damage_bytes(
            directory / generator.choice(["tokenizer.json", "tokenizer_config.json"]), generator
        )
    else:
        damage_bytes(
            directory / "model.safetensors", generator, first=400 if kind == "header" else None
        )
    try:
        main([*FLAGS, "--load", str(directory), "--output", str(tmp_path), "--name", "run"])
    except SystemExit as error:
        assert error.code == 2
        message = capsys.readouterr().err.strip().splitlines()[-1]
        assert message.startswith("error: "), message
    else:  # what was changed says nothing about how to train, or is a weight as good as any
        assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("seed", range(50))
def test_model_outputs(seed: int, model: Path) -> None:
    """Any tokens are an answer: the episode goes on or ends, and the next prompt is well-formed."""
    generator = random.Random(seed)
    name = generator.choice(["bandit", "frozen_lake", "sokoban"])
    renderer = ChatRenderer(load_tokenizer(str(model)), think=generator.random() < 0.5)
    episode = Episode(make(name), EpisodeConfig(max_turns=3, think=generator.random() < 0.5))
    renderer.start(episode.start(seed, outcome_seed=seed))
    for _ in range(3):
        if generator.random() < 0.5:
            tokens = [
                generator.randrange(len(renderer.tokenizer))
                for _ in range(generator.randint(0, 200))
            ]
            text = renderer.decode_action(tokens)
        else:
            parts = [*episode.environment.actions, *FRAGMENTS]
            text = "".join(generator.choice(parts) for _ in range(generator.randint(0, 30)))
        result = episode.respond(text)
        assert torch.isfinite(torch.tensor(result.reward)) and result.info["num_actions"] <= 10
        if episode.done:
            assert not result.messages
            return
        assert renderer.observe(result.messages, finished_cleanly=generator.random() < 0.5)
