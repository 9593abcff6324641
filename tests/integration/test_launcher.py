"""The launch scripts as a person starts them: two languages in one file, recipes, threads, exit
codes, signals.
"""

import ast
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed.run

from ragen_mega.commands import launch, train
from ragen_mega.config import StarPOConfig, parse, read_flags, with_recipe
from ragen_mega.run.check import check_flags, flags_without_effect, warmup_note
from tests.support.refusals import refused
from tests.support.sockets import is_loopback, listening

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples/pretrain_starpo.sh"
RECIPES = ROOT / "ragen_mega/config/recipes"
LAUNCH = (sys.executable, "-P", "-m", "ragen_mega.commands.launch")
PATHS = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}


def environment(**changes: str) -> dict[str, str]:
    """This environment with the tests' interpreter first on PATH, as after activation, and no trace
    of a torchrun.
    """
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("TORCHELASTIC", "OMP_", "NPROC_"))
    }
    return (
        kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"} | changes
    )


def execute(
    *command: object, timeout: float = 240, **changes: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(**changes),
    )


MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 512,
}
LACKING = {
    "no_config": ("config.json",),
    "no_weights": ("model.safetensors",),
    "no_tokenizer": ("tokenizer.json",),
    "no_template": ("chat_template.jinja",),
}
"""Copies of a model directory, and what is deleted there."""
MISTAKES = [
    # values
    ("--lr x", "--lr & 'x'"),
    ("--lr -1", "lr must be positive, not -1"),
    ("--lr nan", "lr must be a finite number, not nan"),
    ("--num-steps 1.5", "--num-steps & '1.5'"),
    ("--num-groups 0", "num_groups must be at least 1, not 0; set --num-groups"),
    ("--gamma 2", "gamma must be from 0 to 1, not 2.0; set --gamma"),
    ("--temperature 0", "temperature must be positive, not 0.0; set --temperature"),
    ("--eval-temperature -1", "eval_temperature must be at least 0, not -1"),
    ("--keep-rollouts all", "--keep-rollouts & 'all'"),
    ("--seed -1", "seed must be a whole number from 0 to 2**63 - 1, not -1; set --seed"),
    ("--max-turns 0", "max_turns must be at least 1, not 0"),
    ("--format-penalty 1", "format_penalty must be at most 0, not 1.0; set --format-penalty"),
    ("--rollout-engine vllm", "--rollout-engine & vllm & embedded & sglang"),
    # flags
    ("--learning-rat 1", "--learning-rat & --help"),
    ("--lr", "--lr"),
    ("lr=3", "lr=3"),
    ("--bf16 yes", "yes"),
    ("--recipe sea", "--recipe & frozen_lake & 'sea'"),
    # combinations
    ("--resume --overwrite", "drop --resume or --overwrite"),
    ("--group-size 1", "group_size is 1; raise --group-size or set --filter-strategy none"),
    ("--minibatch-size 7", "(7) must divide the 512 trajectories & set --minibatch-size 4"),
    ("--max-response-length 512", "(512) must be below max_context_length (512)"),
    ("--kl-coef 0.1", "kl_kind (none) and kl_coef (0.1) need each other; set both or none"),
    ("--hidden-size 97", "hidden_size (97) & set --hidden-size 96"),
    ("--keep-best --eval-interval 0", "drop it or set --eval-interval"),
    ("--fp8 hybrid", "add --bf16 or drop --fp8"),
    ("--sglang-python x", "drop --sglang-python or set --rollout-engine sglang"),
    ("--sequence-parallel", "drop --sequence-parallel or set --tensor-model-parallel-size 2"),
    # names
    ("--environments frozenlake", "'frozenlake' & did you mean frozen_lake?"),
    ("--environments nothing:World", "cannot import nothing:World & working directory"),
    ("--environment-options '{bad'", "'{bad' & write it in single quotes, e.g."),
    ('--environment-options \'{"frozen_lake": {"slip": 1}}\'', "slip; its options are size"),
    ("--advantage-estimator ppo", "'ppo' & gae"),
    ("--filter-strategy best", "'best'; choose one of min_p"),
    ("--reward environment+form", "'form' & did you mean format?"),
    # layout
    ("--tensor-model-parallel-size 3", "(3) & must divide the world size (2); start torchrun"),
    (
        "--rollout-engine sglang --rollout-tensor-parallel-size 4",
        "(4) must divide the ranks of a node (2) & set --rollout-tensor-parallel-size 1",
    ),
    ("--pipeline-model-parallel-size 2 --num-layers 1", "(2) must be at most & layers (1); lower"),
    (
        "--virtual-pipeline-model-parallel-size 2",
        "does nothing & or set --pipeline-model-parallel-size",
    ),
    # files
    ("--boards none.jsonl", "none.jsonl & check the path"),
    ("--load ./none", "./none does not exist & give the directory of a model"),
    ("--load none.gguf", "none.gguf does not exist & give the directory of a model"),
    ("--load runs/taken", "runs/taken is a run, not a model; give & runs/taken/huggingface"),
    ("--load mixtral", "mixtral & one of qwen2, qwen3, qwen3_moe, llama, mistral, not 'mixtral'"),
    ("--warm-start-from runs/none", "runs/none lacks base, warm_start"),
    ("--warm-start-from runs/none --load Qwen/Qwen3-8B", "warm_start_from and load & drop one"),
    (
        "--recipe none --warm-start-from start --hidden-size 64",
        "start was made with hidden_size 96 & has 64 & choose another run",
    ),
    ("--recipe none --warm-start-from start --no-think", "made with think True & has False"),
    (
        "--recipe none --warm-start-from start --warm-start-critic-steps 9",
        "start lacks warm_start_critic",
    ),
    ("--load no_config", "no_config holds no config.json; give the directory"),
    ("--load no_weights", "no_weights holds no weights (model.safetensors"),
    ("--load no_tokenizer", "no_tokenizer holds no tokenizer (tokenizer.json"),
    ("--load no_template", "tokenizer without chat template; load an Instruct model"),
    ("--critic-load ./none", "--critic-load ./none does not exist"),
    ("--rollout-engine sglang --sglang-python /none", "/none cannot be run & setup_sglang_cpu.sh"),
    # the run
    ("--name taken", "already holds an unfinished run; add --overwrite & --resume & --name"),
    ("--name thesis --overwrite", "holds files that are no run & choose another --name"),
    ("--name a/b", "name must be that of one directory, not 'a/b'; set --output"),
    ("--output mixtral/config.json", "mixtral/config.json is a file; choose another"),
]
"""Flags of a person in a hurry, and parts of what is said."""


def model_directory(parent: Path) -> str:
    """What looks like a model as long as nobody reads its weights."""
    directory = parent / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL))
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (directory / name).touch()
    return str(directory)


def program(directory: Path, source: str) -> Path:
    path = directory / "program.py"
    path.write_text(textwrap.dedent(source))
    return path


class TestPolyglot:
    def test_is_python(self):
        ast.parse(SCRIPT.read_text())

    def test_is_bash_up_to_the_closing_quotes(self):
        bash_half = SCRIPT.read_text().split('":"""')[0]
        process = subprocess.run(["bash", "-n"], input=bash_half, capture_output=True, text=True)
        assert (process.returncode, process.stderr) == (0, "")
        assert bash_half.rstrip().splitlines()[-1].startswith("exec "), (
            "signals must reach torchrun, not a shell"
        )

    @pytest.mark.slow
    def test_help_of_ranks_of_torchrun(self):
        process = execute("torchrun", "--nproc-per-node", "2", SCRIPT, "--help")
        assert process.returncode == 0, process.stderr
        assert process.stdout.count("usage:") == 1, "one rank prints the help"

    @pytest.mark.parametrize("rank", [0, 1])
    def test_one_rank_prints_the_help(self, rank, monkeypatch, capsys):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit) as left:
            parse(["--help"])
        assert left.value.code == 0
        assert capsys.readouterr().out.count("usage:") == (rank == 0)

    def test_another_shell_starts_bash_and_no_file_of_its_folder_stands_in_for_a_module(
        self, tmp_path
    ):
        """`sh` is not Bash everywhere. Python looks in the working directory first, and setting up
        asks several modules what is installed.
        """
        for name in ("csv", "zipfile", "email", "json", "packaging", "venv", "argparse", "torch"):
            (tmp_path / f"{name}.py").write_text("open('executed', 'w')")
        done = subprocess.run(
            ["sh", SCRIPT, "--help"],
            cwd=tmp_path,
            env=environment(NPROC_PER_NODE="1"),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("usage:") == 1 and not (tmp_path / "executed").exists()
        assert "--recipe NAME" in done.stdout and "--tensor-model-parallel-size" in done.stdout

    def test_is_importable_without_training(self):
        # Checkpoint writers start processes that run the main file under another name.
        program = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__mp_main__')"
        process = execute(sys.executable, "-c", program)
        assert (process.returncode, process.stdout, process.stderr) == (0, "", "")

    def test_unknown_flag_is_one_line_of_two_ranks_and_a_failure(self):
        process = execute("bash", SCRIPT, "--learning-rat", "1", NPROC_PER_NODE="2")
        assert process.returncode == 2
        assert len(process.stderr.splitlines()) == 1, process.stderr
        assert "--learning-rat" in process.stderr


class TestCheck:
    """What the script does before ranks start: flags are refused before anything heavy is there."""

    def test_neither_torch_nor_transformers_is_imported(self, tmp_path):
        """By the help, an error, and a start; one after the other in one process."""
        load = ["--load", model_directory(tmp_path)]
        flags = (["--help"], [*load, "--boards", "/none"], [*load, "--max-turns", "2"])
        source = f"""
            import os, sys

            from ragen_mega.commands.train import main

            def start(program, words):
                print(*words)
                sys.exit(100)

            os.execv = start
            for flags in {flags!r}:
                try:
                    main(flags)
                except SystemExit as error:
                    print("code", error.code)
            assert not {{"torch", "transformers", "megatron"}} & set(sys.modules)
            """
        process = execute(sys.executable, program(tmp_path, source), NPROC_PER_NODE="2")
        assert process.returncode == 0, process.stderr
        told, _, start = process.stdout.partition("code 0\ncode 2\n")
        assert "--tensor-model-parallel-size" in told
        assert "--nproc-per-node 2" in start and start.endswith("code 100\n"), start
        (said,) = process.stderr.splitlines()
        assert "/none" in said

    @pytest.mark.parametrize(("flags", "said"), MISTAKES)
    def test_a_mistake_is_one_line_with_rule_value_and_remedy(
        self, tmp_path, monkeypatch, capsys, flags, said
    ):
        """Nothing is written for a start that is refused."""
        monkeypatch.chdir(tmp_path)
        model = model_directory(tmp_path)
        for name in LACKING:
            shutil.copytree(model, tmp_path / name)
            for file in LACKING[name]:
                (tmp_path / name / file).unlink()
        for part in ("base", "warm_start"):
            shutil.copytree(model, tmp_path / "start" / part)
            (tmp_path / "start" / part / "model.safetensors").touch()
        (tmp_path / "start" / "config.json").write_text(json.dumps(StarPOConfig().to_dict()))
        (tmp_path / "mixtral").mkdir()
        (tmp_path / "mixtral" / "config.json").write_text('{"model_type": "mixtral"}')
        for name, files in (("taken", ("config.json", "metrics.jsonl")), ("thesis", ("a.tex",))):
            for file in files:
                path = tmp_path / "runs" / name / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text('{"warm_start": {}}')
        before = sorted(tmp_path.rglob("*"))
        err = refused(capsys, check_flags, shlex.split(flags), 2, 2)
        assert all(part in err for part in said.split(" & ")), err
        assert sorted(tmp_path.rglob("*")) == before

    def test_sizes_that_load_overrules_are_named(self):
        sizes = ["--hidden-size", "64", "--num-layers", "3"]
        assert flags_without_effect(parse(sizes)) == []
        load = ["--load", "Qwen/Qwen3-8B"]
        (note,) = flags_without_effect(parse([*sizes, *load]))
        assert "--hidden-size, --num-layers do nothing" in note and "Qwen/Qwen3-8B" in note
        assert flags_without_effect(parse(load)) == []
        frozen = ["--lora-rank", "2", "--decoupled-lr", "1e-3"]
        rate, sizes_too = flags_without_effect(parse([*sizes, *load, *frozen]))
        assert "--decoupled-lr does nothing" in rate and sizes_too == note

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            ("--num-steps 8", None),
            ("--num-steps 0", None),
            ("--num-steps 2", "the 2 steps that update the policy, so the last one has 0.25 of"),
            ("--num-steps 8 --critic-warmup 2", "the 6 steps that update the policy, so the last"),
        ],
    )
    def test_a_warmup_that_outlasts_the_run_is_named_with_the_rate_it_reaches(self, flags, said):
        train = parse(["--lr-warmup", "8", "--lr", "4e-3", *flags.split()]).train
        note = warmup_note(train)
        assert (note is None) == (said is None)
        if said:
            assert said in note and "--lr 0.004" in note and "\n" not in note
            assert f"{train.shares(train.num_steps - 1)['lr']:.3g} of --lr" in note

    @pytest.mark.slow
    def test_an_interpreter_that_aborts_at_its_end_changes_no_exit_code(self, tmp_path):
        """As gloo's threads make it abort at times, after an error that all ranks share."""
        (tmp_path / "aborting.py").write_text(
            "import atexit, os\n"
            "from ragen_mega.environments.worlds.bandit.world import Bandit\n"
            "if 'RANK' in os.environ:\n"
            "    atexit.register(os.abort)\n"
        )
        flags = "--environments aborting:Bandit --prompt-style compact --max-context-length 13"
        program = (sys.executable, "-m", "ragen_mega.commands.program", "train", *flags.split())
        small = (
            "--max-response-length 12 --hidden-size 16 --ffn-hidden-size 32 --num-layers 1"
            " --warm-start-trajectories 8"
        )
        out = ("--output", tmp_path / "runs", "--environment-options", "{}", "--no-fit-context")
        path = os.pathsep.join((str(tmp_path), str(ROOT), str(ROOT / "kernels")))
        process = execute(*program, *small.split(), *out, NPROC_PER_NODE="2", PYTHONPATH=path)
        assert process.returncode == 2, process.stderr
        (line,) = process.stderr.splitlines()
        assert "max_context_length is 13" in line

    @pytest.mark.parametrize("number", ["all", "0", "-1"])
    def test_a_number_of_ranks_that_is_none(self, number, monkeypatch, capsys):
        monkeypatch.setenv("NPROC_PER_NODE", number)
        monkeypatch.setattr(train.signal, "signal", lambda number, handler: None)
        said = refused(capsys, train.main, [])
        assert f"NPROC_PER_NODE must be a number of ranks, at least 1, not '{number}'" in said


class TestRecipes:
    def test_command_line_comes_last(self, tmp_path):
        flags = "# why\n--lr 1e-3  # because\n--environment-options '{\"a\": 1}'\n\n--bf16\n"
        (tmp_path / "lake.flags").write_text(flags)
        expected = ["--lr=1e-3", '--environment-options={"a": 1}', "--bf16", "--lr=2"]
        for argv in (
            ["--lr", "2"],
            ["--lr", "2", "--recipe", "lake"],
            ["--recipe=lake", "--lr", "2"],
        ):
            assert with_recipe(argv, directory=tmp_path, default="lake") == expected
        assert with_recipe(
            ["--recipe", "none", "--lr", "2"], directory=tmp_path, default="lake"
        ) == ["--lr=2"]

    def test_a_file_of_ones_own_stands_alone_or_changes_a_recipe(self, tmp_path, monkeypatch):
        recipes, own = tmp_path / "recipes", tmp_path / "my.flags"
        recipes.mkdir()
        (recipes / "lake.flags").write_text("--lr 1e-3 --bf16")
        own.write_text("# mine\n--lr 5e-4")
        monkeypatch.chdir(tmp_path)
        for name in ("my.flags", "./my.flags", str(own)):
            words = ["--recipe", name, "--seed", "7"]
            flags = with_recipe(words, directory=recipes, default="lake")
            assert flags == ["--lr=5e-4", "--seed=7"]
            assert parse(words, recipe="sokoban").logging.recipe == name
        own.write_text("--recipe lake --lr 5e-4")
        flags = with_recipe(["--recipe", "my.flags"], directory=recipes, default="none")
        assert flags == ["--lr=1e-3", "--bf16", "--lr=5e-4"]

    def test_a_file_about_an_own_world_changes_the_recipe_own(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        words = "--environments my_world:MyWorld --num-steps 3".split()
        (tmp_path / "my.flags").write_text(" ".join(words))
        own, shipped = parse(["--recipe", "my.flags"]), parse([*words, "--recipe", "own"])
        assert own.train == shipped.train and own.rollout == shipped.rollout

    def test_tasks_in_a_file_of_ones_own(self, tmp_path, monkeypatch):
        (tmp_path / "my.flags").write_text("--tasks q.jsonl --score grade:near --lr 5e-4")
        monkeypatch.chdir(tmp_path)
        words = "--recipe own --tasks q.jsonl --score grade:near --lr 5e-4".split()
        assert parse(["--recipe", "my.flags"]).environment == parse(words).environment

    def test_the_file_of_the_documentation(self, tmp_path, monkeypatch):
        page = (ROOT / "docs/commands.md").read_text()
        text = page.partition("cat > my.flags <<'FLAGS'\n")[2].partition("FLAGS\n")[0]
        (tmp_path / "my.flags").write_text(text)
        monkeypatch.chdir(tmp_path)
        own, shipped = parse(["--recipe", "my.flags"]), parse(["--recipe", "sokoban"])
        assert own.environment == shipped.environment
        assert (own.train.num_steps, shipped.train.num_steps) == (80, 40)

    @pytest.mark.parametrize(
        ("name", "text", "words"),
        [
            ("../lake", None, "../lake"),
            ("recipes/", None, "recipes"),
            ("my.flags", "--recipe my.flags", "my.flags"),
            ("my.flags", "--recipe sea", "sea"),
            ("my.flags", "--lr 'open", "my.flags"),
        ],
    )
    def test_a_file_that_is_no_recipe(self, tmp_path, monkeypatch, name, text, words):
        (tmp_path / "recipes").mkdir()
        (tmp_path / "recipes" / "lake.flags").write_text("")
        if text is not None:
            (tmp_path / "my.flags").write_text(text)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ValueError, match=words) as caught:
            with_recipe(["--recipe", name], directory=tmp_path / "recipes", default="none")
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("argv", [["--recipe", "sea"], ["--recipe"]])
    def test_unknown(self, tmp_path, argv):
        (tmp_path / "lake.flags").write_text("")
        with pytest.raises(ValueError, match="must name one of lake, none"):
            with_recipe(argv, directory=tmp_path, default="lake")

    @pytest.mark.parametrize("path", sorted(RECIPES.glob("*.flags")), ids=lambda path: path.stem)
    def test_shipped_recipes_are_valid_and_the_command_line_wins(self, path):
        load = ["--load", "models/smollm2"] if path.stem.startswith("smollm2") else []
        assert parse([*read_flags(path), "--seed", "7", *load]).train.seed == 7


class TestLaunch:
    def test_cores_are_shared_among_ranks_unless_said_otherwise(self, tmp_path):
        script = program(
            tmp_path,
            """
            import os
            line = f"{os.environ['OMP_NUM_THREADS']} {os.environ['WORLD_SIZE']}\\n"
            os.write(1, line.encode())  # at once: ranks run unbuffered, and their lines would mix
            """,
        )
        expected = f"{max(1, len(os.sched_getaffinity(0)) // 2)} 2"
        process = execute(*LAUNCH, "--nproc-per-node", 2, script)
        assert process.stdout.splitlines() == [expected] * 2
        assert process.stderr == ""

    def test_the_exit_code_is_that_of_the_rank_that_failed(self, tmp_path):
        script = program(
            tmp_path,
            """
            import os, sys, time
            if os.environ["RANK"] == "1":
                sys.exit("error: the reason")
            time.sleep(600)  # longer than the test may take
            """,
        )
        process = execute(*LAUNCH, "--nproc-per-node", 2, script)
        assert (process.returncode, process.stderr) == (1, "error: the reason\n")

    def test_a_killed_rank_is_reported(self, tmp_path):
        """It has the number of threads that its user has set."""
        script = program(
            tmp_path,
            """
            import os, signal
            print(os.environ["OMP_NUM_THREADS"], os.environ["WORLD_SIZE"], flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
            """,
        )
        process = execute(*LAUNCH, script, OMP_NUM_THREADS="3")
        assert (process.returncode, process.stdout) == (128 + signal.SIGKILL, "3 1\n")
        assert process.stderr.startswith("error: rank 0 was killed by SIGKILL")

    def test_an_end_that_a_rank_has_not_explained_is_reported(self, tmp_path):
        script = program(tmp_path, "import os; os._exit(3)")
        process = execute(*LAUNCH, script)
        assert process.returncode == 3
        assert process.stderr.startswith("error: rank 0 ended with exit code 3 and without")

    def test_every_signal_reaches_every_rank_once_and_their_time_is_their_own(self, tmp_path):
        """A scheduler's warning, and Ctrl-C in a terminal, twice: no signal waits for the one
        before.
        """
        script = program(
            tmp_path,
            """
            import os, signal, time
            def receive(number, frame):
                os.write(1, f"{number}\\n".encode())
                count.append(number)
                if len(count) == 4:
                    os._exit(130)
            count = []
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, receive)
            os.write(1, b"up\\n")
            while True:
                time.sleep(1)
            """,
        )
        process = subprocess.Popen(
            [*LAUNCH, "--nproc-per-node", "2", str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            os.killpg(process.pid, number)
            assert [process.stdout.readline() for _ in range(2)] == [f"{number:d}\n"] * 2
            time.sleep(0.3)  # a person is slower than a program that sends each twice
        said, wait = process.communicate()
        # where other work takes the processors, the launcher says for whom it waits
        assert said == "" and (wait == "" or "have not ended" in wait)
        assert process.returncode == 128 + signal.SIGINT

    @pytest.mark.parametrize(
        "command",
        [
            pytest.param(LAUNCH, id="launch"),
            pytest.param(("torchrun",), id="torchrun", marks=pytest.mark.slow),
        ],
    )
    def test_nobody_else_reaches_the_ranks_of_one_machine(self, tmp_path, command):
        """Whatever a platform has left in the environment. torchrun itself listens."""
        script = program(
            tmp_path,
            """
            import os, sys
            from ragen_mega.ranks import collectives
            collectives.start()
            assert collectives.gather_objects(os.environ["RANK"]) == ["0", "1"]
            os.write(1, b"up\\n")
            sys.stdin.read()
            collectives.stop()
            """,
        )
        (tmp_path / "temporary").mkdir()
        platform = {"GLOO_SOCKET_IFNAME": "nowhere", "RANK": "3", "WORLD_SIZE": "8"}
        platform["PET_STANDALONE"] = "1"  # torchrun's --standalone
        process = subprocess.Popen(
            [*command, "--nproc-per-node", "2", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**PATHS, TMPDIR=str(tmp_path / "temporary"), **platform),
        )
        assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        launcher = psutil.Process(process.pid)
        for root in [launcher] if command == LAUNCH else launcher.children():
            addresses = listening(root)
            assert addresses and all(map(is_loopback, addresses)), addresses
        assert process.communicate("")[1] == "" or command != LAUNCH
        assert process.returncode == 0
        assert not [*(tmp_path / "temporary").iterdir()] or command != LAUNCH

    @pytest.mark.slow
    def test_a_second_signal_ends_a_job_that_hangs(self, tmp_path):
        """A rank that is frozen, with a process that it has started; the other one has ended."""
        script = program(
            tmp_path,
            """
            import os, signal, subprocess, sys
            if os.environ["RANK"] == "1":
                child = subprocess.Popen(["sleep", "600"], start_new_session=True)
                os.write(1, f"{child.pid}\\n".encode())
                os.kill(os.getpid(), signal.SIGSTOP)
            signal.pause()
            """,
        )
        process = subprocess.Popen(
            [*LAUNCH, "--nproc-per-node", "2", str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        child = psutil.Process(int(process.stdout.readline()))
        family = [child, *psutil.Process(process.pid).children()]
        while family[-1].status() != psutil.STATUS_STOPPED != family[-2].status():
            time.sleep(0.05)
        start = time.monotonic()
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
            time.sleep(2.0)  # as a person who loses patience, who must not have to wait longer
        (line,) = process.communicate(timeout=60)[1].splitlines()
        assert 8.0 < time.monotonic() - start < 24.0
        assert "killed in 9 s" in line and process.returncode > 128
        _, alive = psutil.wait_procs(family, 0.0)  # nobody may have reaped the child
        assert all(member.status() == psutil.STATUS_ZOMBIE for member in alive)

    @pytest.mark.slow
    def test_a_supervisor_that_asks_once_waits(self, tmp_path):
        """Also one that warns by SIGUSR1 twice, as of launcher and ranks."""
        script = program(
            tmp_path,
            """
            import os, signal, sys, time
            def receive(number, frame):
                time.sleep(15)
                sys.exit(0)
            signal.signal(signal.SIGUSR1, lambda number, frame: None)
            signal.signal(signal.SIGTERM, receive)
            os.write(1, b"up\\n")
            while True:
                time.sleep(0.05)
            """,
        )
        for numbers in ([signal.SIGTERM], [signal.SIGTERM, signal.SIGUSR1]):
            process = subprocess.Popen(
                [*LAUNCH, str(script)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(),
            )
            assert process.stdout.readline() == "up\n"
            start = time.monotonic()
            for number in numbers:
                process.send_signal(number)
                time.sleep(0.5)
            assert process.communicate() == ("", "") and time.monotonic() - start > 14.0

    def test_a_job_that_nohup_started_outlives_its_terminal(self, tmp_path):
        script = program(
            tmp_path,
            """
            import os, signal, sys, time
            from ragen_mega.run.stop import StopSignal, exit_on_signal
            exit_on_signal()
            stop = StopSignal()
            stop.listen()
            os.kill(os.getpid(), signal.SIGHUP)
            os.write(1, b"up\\n")
            while not stop.received:
                time.sleep(0.1)
            sys.exit(stop.exit_code)
            """,
        )
        process = subprocess.Popen(
            ["nohup", *LAUNCH, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**PATHS),
        )
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate()
        assert process.returncode == 128 + signal.SIGTERM and "SIGHUP" not in stderr, stderr

    def test_the_end_of_the_terminal_stops_every_rank(self, tmp_path):
        script = program(
            tmp_path,
            """
            import os, sys, time
            # at once: ranks run unbuffered, and their lines would mix
            os.write(1, f"{os.getpid()}\\n".encode())
            time.sleep(600)
            """,
        )
        process = subprocess.Popen(
            [*LAUNCH, "--nproc-per-node", "2", str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            # The tests may themselves have been started by nohup.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGHUP)
        _, stderr = process.communicate()
        assert process.returncode == 128 + signal.SIGHUP
        assert "torch/distributed" not in stderr
        for rank in ranks:
            with pytest.raises(ProcessLookupError):
                os.kill(rank, 0)


class TestSetup:
    """A copy of the scripts whose environment holds a pip that fails as told, and an interpreter
    that only says so.
    """

    @pytest.fixture
    def copy(self, tmp_path):
        copy = tmp_path / "clone"
        shutil.copytree(
            ROOT / "tools",
            copy / "tools",
            ignore=shutil.ignore_patterns("__pycache__", "sglang_cpu"),
        )
        (copy / "examples").mkdir()
        for name in (
            "setup.py",
            "pyproject.toml",
            "constraints.txt",
            "examples/pretrain_starpo.sh",
        ):
            shutil.copy(ROOT / name, copy / name)
        python = copy / ".venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(
            textwrap.dedent(f"""\
                #!/usr/bin/env bash
                case "$*" in
                *"pip --version"*) ;;
                *"pip install"*)
                    if [ -e {copy}/fail-pip ]; then echo "ERROR: no route" >&2; exit 1; fi
                    if [ -e {copy}/full-disk ]; then cat /dev/zero >/dev/full; exit; fi
                    if [ -e {copy}/interrupted ]; then kill -TERM $$; sleep 60; fi ;;
                "- "*) if [ -e {copy}/lacks ]; then echo numpy; exit 3; fi ;;
                *) echo "started" ;;
                esac
                """)
        )
        python.chmod(0o755)
        return copy

    def start(self, copy, path="/usr/local/bin:/usr/bin:/bin"):
        inactive = {"VIRTUAL_ENV": "", "CONDA_PREFIX": ""}
        return execute("bash", copy / "examples/pretrain_starpo.sh", PATH=path, **inactive)

    @pytest.mark.parametrize("fault", ["fail-pip", "full-disk", "interrupted", "lacks"])
    def test_a_failed_installation_is_not_complete_and_the_same_command_repairs_it(
        self, copy, fault
    ):
        (copy / fault).touch()
        for _ in range(2):
            process = self.start(copy)
            assert process.returncode == 1
            *_, last = process.stderr.splitlines()
            assert last.startswith("error: ") and "un the command again" in last, process.stderr
            assert "started" not in process.stdout
            assert not list((copy / ".venv").glob(".installed*"))
        (copy / fault).unlink()
        process = self.start(copy)
        assert (process.returncode, process.stdout) == (0, "started\n"), process.stderr
        assert (copy / ".venv/.installed").read_text()
        assert "setup: installing" not in self.start(copy).stderr, "it is installed once"

    def test_without_a_python_that_is_new_enough_one_line_says_so(self, copy, tmp_path):
        shutil.rmtree(copy / ".venv")
        tools = tmp_path / "bin"
        tools.mkdir()
        for name in ("bash", "cat", "cksum", "dirname", "env", "flock", "grep", "mkdir", "nproc"):
            (tools / name).symlink_to(shutil.which(name))
        process = self.start(copy, path=str(tools))
        assert process.returncode == 1
        (said,) = process.stderr.splitlines()
        assert said.startswith("error: Python 3.11, 3.12 or 3.13") and "PATH offers" in said


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_fresh_copy_installs_itself(tmp_path):
    """What a newcomer has: a clone, Python, and no environment."""
    copy = tmp_path / "clone"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "runs", "build", "__pycache__")
    )
    base = tmp_path / "bin"
    base.mkdir()
    (base / "python3.11").symlink_to(
        Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    )
    bare = environment(PATH=f"{base}:/usr/local/bin:/usr/bin:/bin")
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH"):
        bare.pop(name, None)
    for attempt, expected in enumerate((1, 0)):  # only the first command installs
        command = ["bash", "examples/pretrain_starpo.sh", "--help"]
        process = subprocess.run(command, cwd=copy, env=bare, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        assert process.stderr.count("setup: installing") == expected, (
            f"command {attempt + 1}: {process.stderr}"
        )


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 8),
        ("0,1", 2),
        ("5", 1),
        ("GPU-8932f937, GPU-2b1f4a", 2),
        ("1,-1,2", 1),
        ("1,8,2", 1),
        ("", None),
        ("-1", None),
    ],
)
def test_a_rank_for_each_gpu_that_is_visible(
    visible: str | None, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-smi lists all GPUs of the machine, CUDA_VISIBLE_DEVICES says which ranks can use."""
    program = tmp_path / "nvidia-smi"
    lines = "".join(f"echo 'GPU {i}: NVIDIA H100 (UUID: GPU-{i})'\n" for i in range(8))
    program.write_text(f"#!/bin/sh\n{lines}")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    on_cpu = min(2, len(os.sched_getaffinity(0)))
    assert train.default_ranks() == (on_cpu if expected is None else expected)


@pytest.mark.parametrize(
    ("can_bind", "flags", "bound"),
    [(True, (), "node"), (True, ("--numa-binding", "socket"), "socket"), (False, (), None)],
)
def test_ranks_are_bound_to_the_cpus_beside_their_gpu(
    monkeypatch: pytest.MonkeyPatch, can_bind: bool, flags: tuple[str, ...], bound: str | None
) -> None:
    started = []
    monkeypatch.setattr(launch, "can_bind", lambda: can_bind)
    monkeypatch.setattr(torch.distributed.run, "run", started.append)
    monkeypatch.setattr(launch.logging, "disable", lambda level: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert launch.main(["--nproc-per-node", "2", *flags, __file__]) == 0
    assert [one.numa_binding for one in started] == [bound]


@pytest.mark.parametrize("lacking", [None, "a second node", "a place", "numactl", "a GPU"])
def test_ranks_are_bound_only_where_torchrun_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacking: str | None
) -> None:
    """It ends a job that it cannot bind, and most images have no numactl."""
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1A, pci_device_id=3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0 if lacking == "a GPU" else 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    for node in ("node0", "node0" if lacking == "a second node" else "node1"):
        (tmp_path / "devices/system/node" / node).mkdir(parents=True, exist_ok=True)
    place = tmp_path / "bus/pci/devices/0000:1a:03.0"
    place.mkdir(parents=True)
    if lacking != "a place":
        (place / "numa_node").write_text("1")
    program = tmp_path / "numactl"
    program.touch(mode=0o600 if lacking == "numactl" else 0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch.can_bind(tmp_path) == (lacking is None)
