"""Mistakes of new users at the command line and in files of theirs: one line with rule, values and
remedy, exit code 2, before anything heavy is imported. Mistakes in values of flags:
tests/integration/test_launcher.py.
"""

import os
import shlex
import sys
from pathlib import Path

import pytest

from ragen_mega.commands import program
from ragen_mega.run.check import check_flags

WORLDS = """
class World:
    actions = ("a", "b")

    def reset(self, seed):
        return "say"

    def step(self, action):
        return "x", 1.0, True, False, {}


class NoStep:
    def reset(self, seed):
        return "say"


class EqualTools(World):
    tools = [{"name": "look"}, {"function": {"name": "look"}}]


class NoActions(World):
    actions = ()


class Functions(World):
    tools = [len]


class NeedsKey(World):
    def __init__(self, key):
        self.key = key


class NoSeed(World):
    def reset(self):
        return "say"


class Raises(World):
    def __init__(self):
        raise RuntimeError("no licence found")
"""
FUNCTIONS = """
number = 3


def run(task, client):
    return 1.0


def two(a, b):
    return 1.0


def nothing():
    return 1.0


def blank(answer, reference, row):
    return float("nan")


async def waits(answer, reference, row):
    return 1.0


def fails(answer, reference, row):
    return row["nothing"]
"""
ROWS = '{"prompt": "a", "answer": "b"}\n{"prompt": "c", "answer": "d"}\n'
FILES = {
    "mistaken_worlds.py": WORLDS,
    "mistaken.py": FUNCTIONS,
    "mistaken_syntax.py": "class World:\n    def reset(self, seed)\n        return 1\n",
    "mistaken_import.py": "import nothing_there\n",
    "rows.jsonl": ROWS,
    "one_row.jsonl": ROWS.partition("\n")[0],
    "empty.jsonl": "",
    "cut.jsonl": '{"prompt": "a", "answer": "b"}\n{"prompt": \n',
    "twice.jsonl": ROWS + '{"prompt": "a", "prompt": "b", "answer": "c"}\n',
    "columns.jsonl": '{"q": "a", "a": "b"}\n{"q": "c", "a": "d"}\n',
    "hole.jsonl": '{"prompt": "a", "answer": "b"}\n{"prompt": "c"}\n',
    "nulls.jsonl": '{"prompt": "a", "answer": "b"}\n{"prompt": "c", "answer": null}\n',
    "flag.flags": "--num-stepz 3\n",
    "recipe.flags": "--recipe nosuch\n",
    "cut.toml": 'title = "x"\n[[arms]\n',
    "arm.toml": 'title = "x"\nsource = "y"\n[small]\nrecipe = "bandit"\n'
    '[[arms]]\nname = "one"\nflags = "--lrr 1"\n[[arms]]\nname = "two"\nflags = ""\n',
}
MODEL = "--recipe none --load MODEL"
TRAIN = {
    "--recipie bandit": "unknown flag --recipie (did you mean --recipe?)",
    "--recipe bandit sokoban": "unexpected 'sokoban': flags begin with --",
    "--recipe bandit --bf16 true": "--bf16 is a switch and takes no value, not 'true'",
    "--recipe bandit --device cpu": "(here it is CUDA_VISIBLE_DEVICES before the command",
    "--recipe bandit --gpus 2": "--gpus (here it is NPROC_PER_NODE=N before the command)",
    "--recipe bandit --vocab big": "unknown flag --vocab; --help lists all",
    "--recipe bandit --eval-strategy steps": "--eval-strategy (here it is --eval-interval)",
    "--recipe bandit --max-tokens 8": "--max-tokens (here it is --max-response-length)",
    "--recipe bandit --data-parallel-size 2": "(here it is all ranks that the other sizes leave)",
    "--environments mistaken_worlds.py": "(a file: write mistaken_worlds:NAME, a class or function",
    "--environments ./mistaken_worlds.py:World": "write mistaken_worlds:World, a module",
    "--environments /elsewhere/worlds.py:World": "write worlds:World, a module, and add /elsewhere"
    " to PYTHONPATH",
    "--environments mistaken_worlds:EqualTools": "must have distinct names, not look, look; rename",
    "--environments mistaken_worlds:Wrld": "(did you mean World?)",
    "--environments mistaken_worlds:World:x": "a whole number behind a further colon for shares",
    "--environments mistaken_syntax:World": "(mistaken_syntax.py, line 2)); mend the module",
    "--environments mistaken_import:World": "install nothing_there, which mistaken_import imports",
    "--environments mistaken_worlds:NoStep": "has no step; an environment is a class with reset",
    "--environments mistaken_worlds:NoActions": "leave them out for free text, not ()",
    "--environments mistaken_worlds:Functions": 'JSON schemas, e.g. {"name": ..., "parameters"',
    "--environments mistaken_worlds:World --environment-options '{\"World\": {}}'": "names World,"
    " which is not trained; write mistaken_worlds:World, or add it to --environments",
    "--recipe sokoban --curriculum '{0: {}}'": """write it in single quotes, e.g. '{"0": {"sok""",
    "--recipe bandit --filter-value 25": "in (0, 1], not 25.0; set --filter-value 0.25",
    "--environments mistaken_worlds:NeedsKey": "missing a required argument: 'key'; give it by"
    " --environment-options, as '{\"mistaken_worlds:NeedsKey\": {...}}'",
    "--environments mistaken_worlds:NoSeed": "is called as reset(seed), and reset() does not take",
    "--environments mistaken_worlds:Raises": "cannot be built: RuntimeError: no licence found (in",
    "--environment sokoban": "unknown flag --environment (did you mean --environments?)",
    '--recipe sokoban --environment-options \'{"sokoban": {"dim": "7"}}\'': "must be int, not '7'",
    "--recipe none --load runs/none --environments sokoban": "--load runs/none does not exist",
    "--recipe bandit --reward 'environment +'": "must be a sum of distinct terms",
    "--recipe bandit --reward mistaken:two": "is called with (trajectory), and takes (a, b)",
    "--recipe bandit --reward mistaken:number": "must be a function or class, not 3",
    "--recipe bandit --stop-at-success 95": "stop_at_success must be from 0 to 1, not 95.0",
    "--recipe missing.flags": "mend the path, or name one of bandit",
    "--recipe flag.flags": "flag.flags: unknown flag --num-stepz (did you mean --num-steps?)",
    "--recipe recipe.flags": "--recipe 'nosuch' in recipe.flags must name one of",
    "--resume runs/none": "runs/none does not exist; give a run directory",
    f"{MODEL} --tasks missing.jsonl": "must name a file of rows that can be read (No such file",
    f"{MODEL} --tasks openai/gsm8k": "fetch the files of a data set on the hub by `hf download`",
    f"{MODEL} --tasks empty.jsonl": "must hold rows and has none; write one JSON object a line",
    f"{MODEL} --tasks cut.jsonl": "cut.jsonl, line 2 must be a JSON object",
    f"{MODEL} --tasks twice.jsonl": "(the key 'prompt' is in it twice); write one object a line",
    f"{MODEL} --tasks columns.jsonl": "its columns are q, a; name yours by the option",
    f"{MODEL} --tasks hole.jsonl": "by the option answer_column, or drop the row",
    f"{MODEL} --tasks nulls.jsonl": "nulls.jsonl must have a value in answer, which is null",
    f"{MODEL} --tasks wide.jsonl": "wide.jsonl, line 1 must be UTF-8 ('utf-8' codec can't decode",
    f"{MODEL} --tasks latin.jsonl": "latin.jsonl, line 2 must be UTF-8 ('utf-8' codec can't",
    f"{MODEL} --tasks rows.jsonl --score mistaken.py:blank": "write mistaken:blank, a module",
    f"{MODEL} --tasks one_row.jsonl": "must hold two prompts",
    f"{MODEL} --tasks rows.jsonl --score mistaken:nosuch": "has run, two, nothing, blank, waits",
    f"{MODEL} --tasks rows.jsonl --score mistaken:fails": "KeyError: 'nothing' (in fails,",
    f"{MODEL} --tasks rows.jsonl --score mistaken:waits": "write def, and call services by",
    f"{MODEL} --tasks rows.jsonl --score mistaken:blank": "must be a finite number, not nan",
    "--score mistaken:two": "--score does nothing without --tasks FILE",
    "--agent mistaken": "unknown agent 'mistaken'; give an import path",
    "--agent mistaken.py": "'mistaken.py' (a file: write mistaken:NAME, a class or function in it)",
    "--agent mistaken:nothing": "must be a function (task, client) or (task, base_url, api_key)",
    "--agent mistaken:run": "set --agent-example my_module:example, or --load a model",
    "--agent http:/here": "--agent http:/here must be an address such as http://",
    "--agent mistaken:run --agent-example mistaken:nosuch": "has run, two, nothing, blank, waits",
    f"--agent mistaken:run {MODEL} --agent-reward mistaken:two": "parameters (docs/agents.md)",
    "--recipe bandit --agent-timeout 5": "agent_timeout does nothing without an agent",
}
FOLDERS = {
    "saved/state.json": "{}",
    "several/step_00000002/state.json": "{}",
    "hub/snapshots/1a/config.json": "{}",
    "half/config.json": '{"model_type": ',
}
"""Folders that are no models."""
OTHERS = {
    "trian --recipe bandit": "no command 'trian' (did you mean train?)",
    "evaluate": "--load is needed: the model or run to evaluate",
    "evaluate --load runs/none": "--load runs/none does not exist",
    "evaluate --load MODEL": "--environment is needed where --load is no run",
    "evaluate --load MODEL --environment sokobann": "(did you mean sokoban?)",
    "evaluate --load MODEL --environment bandit --num-prompts 0": "must be at least 1, not 0",
    "evaluate --load empty --environment bandit": "holds no config.json",
    "evaluate --load saved --environment bandit": "is a checkpoint of a run; give the run's",
    "evaluate --load several --environment bandit": "holds the checkpoints of a run; give",
    "evaluate --load hub --environment bandit": "the hub's cache of a model; give hub/snapshots/1a",
    "evaluate --load half --environment bandit": "half/config.json is no JSON object",
    "baselines --environment bandit --option arm": "--option takes NAME=VALUE, not 'arm'",
    "baselines --environment bandit --option nosuch=1": "nosuch",
    "evaluate --load MODEL --lora-rank 8 --lora-load DIR --environment bandit": "merge them by"
    " ragen-mega convert",
    "view runs/none": "runs/none does not exist; give a run directory",
    "replay --run runs/none --step 1": "runs/none does not exist; give a run directory",
    "report runs/none": "runs/none does not exist; give a run directory",
    "study nosuch": "there is no study nosuch; give a .toml file or one of",
    "study cut.toml": "cut.toml is no TOML: Expected ']]'",
    "study arm.toml": "arm one of arm.toml: unknown flag --lrr (did you mean --lr?)",
    "make-boards --environment sokoban --output none/b.jsonl": "none/b.jsonl must be a file in an"
    " existing folder; make the folder first",
    "launch nothing.py": "nothing.py must be a file, the script that each rank runs, and is none;",
    "study bandit_seeds --seeds 0": "--seeds, --jobs and --ranks must be at least 1",
    "convert --from m --to n --max-shard-size huge": "'huge' is no size; write",
    "evaluate --load MODEL --environment bandit --samples-per-prompt 0": "must be at least 1",
    "evaluate --load MODEL --environment bandit --temperature -1": "temperature must be",
    "evaluate --load MODEL --environment bandit --eval-environments sokoban": "--environment stands"
    " for --environments and --eval-environments, and --eval-environments is given too",
    "evaluate --load MODEL --environment bandit --num-prompts 4 --eval_prompts 5": "--num-prompts"
    " stands for --eval-prompts",
    "evaluate --load MODEL --environment bandit --timeline": "--timeline does nothing: an",
    "study bandit_seeds --report --slurm lines.txt": "--report runs nothing, and --slurm writes",
    "study bandit_seeds --jobs 2 --slurm lines.txt": "--jobs 2 is for runs here, and --slurm runs",
    "study bandit_seeds --flags '--lr 1 --seed 7 --name=a'": "leave --name, --seed to the study",
    "view runs/none --serve --output view.html": "--output is the file that --serve writes none of",
    "view runs/none --port 80": "--port 80 does nothing without --serve; add it",
    "plan --model Qwen2.5-7B --load a/b": "--model Qwen2.5-7B and --load a/b both say which model",
    "fetch nosuch": "invalid choice: 'nosuch' (choose from 'smollm2')",
}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """A working directory with the files of a user."""
    place, before, paths = tmp_path_factory.mktemp("mistakes"), Path.cwd(), sys.path[:]
    for name, text in FILES.items():
        (place / name).write_text(text)
    (place / "wide.jsonl").write_bytes(ROWS.encode("utf-16"))
    (place / "latin.jsonl").write_bytes(ROWS.replace("c", "\u00e9").encode("latin-1"))
    (place / "empty").mkdir()
    for path, text in FOLDERS.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    model = place / "MODEL"
    model.mkdir()
    (model / "config.json").write_text(
        '{"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 32, "vocab_size": 64,'
        ' "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}'
    )
    (model / "model.safetensors").write_bytes(b"")
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("x")
    os.chdir(place)
    yield
    os.chdir(before)
    sys.path[:] = paths


def one_line(capsys: pytest.CaptureFixture[str], error: SystemExit) -> str:
    """Return the error that a command has printed, alone on its line."""
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert error.code == 2 and len(said) == 1
    return said[0]


@pytest.mark.parametrize("words", TRAIN)
def test_a_mistake_in_training_is_one_line(words, capsys):
    with pytest.raises(SystemExit) as error:
        check_flags(shlex.split(words), 2, 2)
    assert TRAIN[words] in one_line(capsys, error.value)


@pytest.mark.parametrize("words", OTHERS)
def test_a_mistake_at_another_command_is_one_line(words, capsys):
    with pytest.raises(SystemExit) as error:
        program.main(shlex.split(words))
    assert OTHERS[words] in one_line(capsys, error.value)
