"""Which directory a run has: numbers behind the default name, what is refused or has finished."""

import json
from pathlib import Path

import gymnasium
import pytest

from ragen_mega.commands import replay
from ragen_mega.config import StarPOConfig, parse
from ragen_mega.config.cli import with_recorded
from ragen_mega.report.provenance import read_settings
from ragen_mega.run.check import check
from ragen_mega.run.evaluation import evaluate
from ragen_mega.storage import run_directory
from ragen_mega.storage.checkpoints import DirectoryInUse, lock_named, lock_run
from ragen_mega.storage.run_directory import (
    BASE,
    WARM_START,
    WARM_START_CRITIC,
    Finished,
    check_directory,
    check_finished,
    claim,
    with_name,
)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def settings(output: Path, *flags: str) -> StarPOConfig:
    return parse(["--output", str(output), *flags])


def begin(config: StarPOConfig, *files: str) -> Path:
    """What a start leaves, and further files."""
    directory = config.run_directory
    claim(directory, resume=config.checkpoint.resume, overwrite=config.logging.overwrite)
    (directory / "config.json").write_text(json.dumps(config.to_dict(), indent=2))
    for file in files:
        (directory / file).write_text('{"steps": 200}')
    return directory


def test_a_second_start_of_the_default_command_has_a_number(output: Path) -> None:
    for name in ("frozen_lake-gae-seed0", "frozen_lake-gae-seed0-2", "frozen_lake-gae-seed0-3"):
        config, said = with_name(settings(output))
        assert config.logging.name == name
        assert (said is None) == (name[-2] != "-")
        begin(config, "metrics.jsonl")
    assert "frozen_lake-gae-seed0-3 is there already" in with_name(settings(output))[1]
    resumed, said = with_name(settings(output, "--resume"))
    assert resumed.logging.name == "frozen_lake-gae-seed0-3" and "newest of 3 runs" in said
    other, said = with_name(settings(output, "--seed", "1", "--resume"))
    assert (other.logging.name, said) == ("frozen_lake-gae-seed1", None)
    assert with_name(settings(output, "--name", "mine")) == (
        settings(output, "--name", "mine"),
        None,
    )
    again, said = with_name(settings(output, "--overwrite"))
    assert (again.run_directory.name, said) == ("frozen_lake-gae-seed0", None)


def test_a_name_that_no_run_gets_by_default_is_not_resumed(output: Path) -> None:
    for number in ("", "-1", "-01", "-02"):
        begin(settings(output, "--name", f"frozen_lake-gae-seed0{number}"), "metrics.jsonl")
    resumed, said = with_name(settings(output, "--resume"))
    assert (resumed.logging.name, said) == ("frozen_lake-gae-seed0", None)
    assert with_name(settings(output))[0].logging.name == "frozen_lake-gae-seed0-2"


def test_starts_at_the_same_time_have_numbers_of_their_own(output: Path) -> None:
    """Nobody has written anything yet."""
    started = [lock_named(settings(output)) for _ in range(3)]
    names = ["frozen_lake-gae-seed0", "frozen_lake-gae-seed0-2", "frozen_lake-gae-seed0-3"]
    assert [config.logging.name for config, _, _ in started] == names
    assert (output / f".{names[0]}.lock").stat().st_mode & 0o077 == 0
    for flags in (("--resume",), ("--overwrite",), ("--name", names[0])):
        with pytest.raises(DirectoryInUse, match=names[0]):
            lock_named(settings(output, *flags))


def test_a_run_directory_may_be_a_link(output: Path, tmp_path: Path) -> None:
    """Its target is on another disk, say; what it holds is set aside beside that target."""
    target = tmp_path / "disk" / "mine"
    target.mkdir(parents=True)
    output.mkdir()
    (output / "mine").symlink_to(target)
    flags = ("--name", "mine", "--overwrite")
    for _ in range(2):  # empty, then with a run
        config = settings(output, *flags)
        directory = begin(config, "metrics.jsonl")
        run_directory.begin(directory)
        assert (target / "metrics.jsonl").exists() and directory.is_symlink()
    assert [path.name for path in target.parent.glob("*mine*")] == ["mine"]
    with lock_run(directory), pytest.raises(DirectoryInUse):
        lock_run(target)


def test_a_name_with_a_slash_is_one_folder_and_has_numbers(output: Path) -> None:
    lake = "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv"
    gymnasium.register("mine/Lake-v0", entry_point=lake)
    for number in ("", "-2", "-3"):
        config, _ = with_name(settings(output, "--environments", "gymnasium:mine/Lake-v0"))
        assert config.run_directory == output / f"gymnasiummine.Lake-v0-gae-seed0{number}"
        begin(config, "metrics.jsonl")


def test_a_start_that_was_refused_is_in_nobodys_way(output: Path) -> None:
    directory = begin(settings(output))
    (directory / "base").mkdir()
    (directory / "base" / "old").touch()
    config, said = with_name(settings(output))
    assert (config.run_directory, said) == (directory, None)
    check_directory(directory, resume=False, overwrite=False)
    claim(directory, resume=False, overwrite=False)
    assert list(directory.iterdir()) == [], "a smaller model might have been asked for"


@pytest.mark.parametrize("content", ['{"model_type": "qwen2"}', "notes"])
def test_what_is_not_ours_stays(output: Path, content: str) -> None:
    (output / "mine").mkdir(parents=True)
    (output / "mine" / "config.json").write_text(content)
    with pytest.raises(ValueError, match="choose another --name"):
        claim(output / "mine", resume=False, overwrite=False)
    assert (output / "mine" / "config.json").read_text() == content


@pytest.mark.parametrize("flag", ["resume", "overwrite"])
def test_a_model_is_no_run(output: Path, flag: str) -> None:
    """Its config.json and weights stay, and it is not named as a run beside others."""
    model = output / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    begin(settings(output, "--name", "a"))
    with pytest.raises(ValueError, match="holds files that are no run"):
        claim(model, **({"resume": False, "overwrite": False} | {flag: True}))
    with pytest.raises(ValueError, match="model holds no run .* in .* are a$"):
        with_recorded(model, [])
    with pytest.raises(ValueError, match="nothing does not exist; .* in .* are a$"):
        with_recorded(output / "nothing", [])


def test_a_finished_run_says_what_to_do(output: Path) -> None:
    directory = begin(settings(output, "--name", "a"), "summary.json")
    before = (directory / "config.json").read_bytes()
    with pytest.raises(Finished, match="200 steps.*raise --num-steps"):
        check_finished(settings(output, "--name", "a", "--resume", "--keep-last", "3"))
    with pytest.raises(ValueError, match="lr would change nothing") as refused:
        check_finished(settings(output, "--name", "a", "--resume", "--lr", "1"))
    assert not isinstance(refused.value, Finished)
    check_finished(settings(output, "--name", "a", "--resume", "--num-steps", "201"))
    (directory / "summary.json").unlink()
    check_finished(settings(output, "--name", "a", "--resume"))
    assert (directory / "config.json").read_bytes() == before


def test_a_finished_run_of_an_older_version_has_finished(output: Path) -> None:
    """Its settings lack a flag and a section that are newer."""
    directory = begin(settings(output, "--name", "a"), "summary.json")
    recorded = json.loads((directory / "config.json").read_text())
    del recorded["lora"], recorded["train"]["shared_prefixes"]
    (directory / "config.json").write_text(json.dumps(recorded))
    with pytest.raises(Finished, match="raise --num-steps"):
        check_finished(settings(output, "--name", "a", "--resume"))
    with pytest.raises(ValueError, match="another --name; lora_rank would change nothing"):
        check_finished(settings(output, "--name", "a", "--resume", "--lora-rank", "8"))


def test_recorded_values_that_are_refused_now_are_replaced_by_flags(output: Path) -> None:
    directory = begin(settings(output, "--name", "a"))
    recorded = json.loads((directory / "config.json").read_text())
    recorded["loss"] |= {"kl_kind": "gone", "kl_coef": 0.5}
    recorded["advantage"]["advantage_estimator"] = "gone"
    (directory / "config.json").write_text(json.dumps(recorded))
    words = ["--resume", str(directory)]
    with pytest.raises(ValueError, match=f"kl-kind must be .* recorded in {directory}; a flag"):
        parse(words)
    with pytest.raises(ValueError, match="unknown flag --nosuch; --help lists all$"):
        parse([*words, "--nosuch", "1"])
    config = parse([*words, "--kl-kind", "k3", "--advantage-estimator", "grpo"])
    assert (config.loss.kl_kind, config.loss.kl_coef) == ("k3", 0.5)


def test_the_warm_start_of_an_older_run_is_taken(output: Path) -> None:
    """Its settings lack flags that are newer, which had their defaults."""
    source = begin(settings(output, "--name", "a"))
    recorded = json.loads((source / "config.json").read_text())
    del recorded["model"]["hidden_size"], recorded["environment"]["think"]
    (source / "config.json").write_text(json.dumps(recorded))
    for name in (BASE, WARM_START, WARM_START_CRITIC):
        (source / name).mkdir()
        (source / name / "model.safetensors").touch()
    words = ("--name", "b", "--warm-start-from", str(source))
    check(settings(output, *words), 1, 1)
    with pytest.raises(ValueError, match="made with hidden_size 96, and this run has 64"):
        check(settings(output, *words, "--hidden-size", "64"), 1, 1)


def test_a_run_that_has_reached_its_goal_has_finished(output: Path) -> None:
    goal = ("--eval-interval", "5", "--stop-at-success")
    directory = begin(settings(output, "--name", "a", *goal, "0.9"))
    (directory / "summary.json").write_text('{"steps": 5, "reached": 0.95}')
    with pytest.raises(Finished, match="reached --stop-at-success 0.9 after 5 steps; raise it"):
        check_finished(settings(output, "--name", "a", "--resume", *goal, "0.9"))
    for further in ((*goal, "0.96"), ()):
        check_finished(settings(output, "--name", "a", "--resume", *further))


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_damaged_config_is_named(output: Path, content: str) -> None:
    directory = begin(settings(output, "--name", "a"), "summary.json")
    (directory / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=f"{directory}/config.json .*; restore it"):
        check_finished(settings(output, "--name", "a", "--resume", "--lr", "1"))
    check_directory(directory, resume=False, overwrite=True)
    with pytest.raises(ValueError, match=f"{directory}/config.json .*; restore it"):
        read_settings(directory)
    (directory / "huggingface").mkdir()
    with pytest.raises(ValueError, match=f"{directory}/config.json .*; restore it"):
        evaluate(directory, "bandit")


def test_a_place_that_makes_its_directories_itself() -> None:
    with pytest.raises(ValueError, match="/proc/x cannot be made .*--output"):
        lock_run(Path("/proc/x/run"))


def test_a_place_that_cannot_be_written_to(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output.mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: False)  # as for root on a read-only disk
    with pytest.raises(ValueError, match=f"{output} cannot be written .*--output"):
        check_directory(output / "a" / "b", resume=False, overwrite=False)


def test_a_step_that_was_not_logged_is_refused_before_replay_starts_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(parse([]).to_dict()))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    monkeypatch.setattr("os.execv", lambda *words: pytest.fail(f"ranks begin: {words}"))
    with pytest.raises(SystemExit):
        replay.main(["--run", str(tmp_path), "--step", "77", "--num-ranks", "2"])
    said, error = capsys.readouterr().err.splitlines()
    assert "step 77 of" in said and "has steps 0 to 1; replay one of these" in error
