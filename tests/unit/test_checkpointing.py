"""Checkpoints are whole or not there, damage is seen, the right ones are kept, and one process
works in a run at a time.
"""

import errno
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from ragen_mega.config import parse
from ragen_mega.environments.reference_players import Baselines
from ragen_mega.megatron import checkpoint
from ragen_mega.ranks import collectives
from ragen_mega.ranks.collectives import on_main
from ragen_mega.run.build import (
    check_beginning,
    fit_context_once,
    known_references,
    with_models,
)
from ragen_mega.run.checkpoints import RunCheckpoints
from ragen_mega.run.evaluation import KnownBaselines
from ragen_mega.run.guards import CollapseGuard
from ragen_mega.run.timers import Timers
from ragen_mega.storage import integrity
from ragen_mega.storage.checkpoints import (
    FORMAT,
    STATE,
    Checkpoint,
    CheckpointWriter,
    check_config,
    find_latest,
    lock_run,
    read_checkpoint,
)
from ragen_mega.storage.integrity import MANIFEST, describe_file, write_manifest
from ragen_mega.storage.shard_files import Piece, PieceReader, file_name, write_pieces
from tests.support.forked_ranks import on_ranks

CONFIG = {"model": {"hidden_size": 8}, "train": {"lr": 0.1}}


def stage_bytes(content: bytes):
    """A stage as the trainers' is: two files, one of them written by the returned function."""

    def stage(directory: Path):
        (directory / "steps.json").write_text(json.dumps(len(content)))

        def write() -> list[Path]:
            path = directory / "rank_00000.safetensors"
            path.write_bytes(content)
            return [path]

        return write

    return stage


def make_writer(
    directory: Path, *, keep_last: int = 0, keep_best: bool = False
) -> CheckpointWriter:
    return CheckpointWriter(directory, CONFIG, keep_last=keep_last, keep_best=keep_best)


def save_steps(
    directory: Path, *steps: int, scores: dict[int, float] | None = None, **keep
) -> None:
    writer = make_writer(directory, **keep)
    for step in steps:
        writer.save(
            step,
            stage_bytes(b"%d" % step * 100),
            {"of": step, "low": math.inf},
            (scores or {}).get(step),
        )
    writer.wait()


def checkpoints_of(directory: Path, *flags: str) -> RunCheckpoints:
    """The checkpoints of a run without trainers that keeps the best one."""
    config = parse(["--keep-best", "--eval-interval", "1", "--save-interval", "0", *flags])
    return RunCheckpoints(
        directory,
        config,
        {},
        models={},
        trainers={},
        samplers=None,
        guard=CollapseGuard(config.guard),
        timers=Timers(),
    )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_was_saved_is_found(tmp_path: Path) -> None:
    save_steps(tmp_path / "c", 3, 12, scores={12: 0.25})
    found = find_latest(tmp_path / "c", pytest.fail)
    assert (found.step, found.score, found.config) == (12, 0.25, CONFIG)
    assert found.state == {"of": 12, "low": math.inf}
    assert (found.directory / "rank_00000.safetensors").read_bytes() == b"12" * 100
    manifest = json.loads((found.directory / MANIFEST).read_text())
    assert set(manifest["versions"]) == {"torch", "megatron-core", "transformers", "ragen_mega"}
    assert set(manifest["files"]) == {"steps.json", "rank_00000.safetensors", STATE}


def test_a_best_success_whose_checkpoint_is_not_there_is_surpassed_by_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --keep-best, however early or late the write fails; an earlier best one stays."""
    monkeypatch.setattr(checkpoint, "stage", lambda place, trainers: stage_bytes(b"1")(place))
    saved = checkpoints_of(tmp_path)

    def evaluate(step: int, success: float, fails_in: str = "") -> bool:
        if is_due := saved.is_due(step, success):
            with monkeypatch.context() as patch:
                if fails_in:
                    patch.setattr(saved, fails_in, Mock(side_effect=OSError("full")))
                saved.save_run(step, success)
                saved._thread and saved._thread.join()
        return is_due

    assert evaluate(1, 0.3)
    for step, fails_in in ((2, "_publish"), (3, "_prepare")):
        assert evaluate(step, 0.9, fails_in)
    assert not evaluate(4, 0.2) and evaluate(5, 0.6) and not evaluate(6, 0.5)
    saved.require()
    assert saved.steps() == [5, 1] and saved.best_success == 0.6


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        ("", 0.6),
        ("--eval-interval 3 --eval-samples 2 --lr 1e-4 --environment-processes 1", 0.6),
        ("--eval-prompts 9", None),
        ("--eval-temperature 0.1", None),
        ("--environments bandit", None),
    ],
)
def test_the_best_success_is_of_this_evaluation_and_of_a_checkpoint_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, best: float | None
) -> None:
    """Without --keep-best the checkpoint of 0.9 was deleted."""
    monkeypatch.setattr(checkpoint, "stage", lambda place, trainers: stage_bytes(b"1")(place))
    monkeypatch.setattr(checkpoint, "load", lambda place, trainers: None)
    before = checkpoints_of(tmp_path, "--no-keep-best", "--keep-last", "2")
    for step, success in ((1, 0.9), (2, 0.6), (3, None)):
        before.save_run(step, success)
    before.require()
    resumed = checkpoints_of(tmp_path, "--keep-last", "1", *flags.split())
    resumed.restore(find_latest(resumed.directory, pytest.fail))
    assert resumed.best_success == best and resumed.is_due(4, 0.4) == (best is None)
    for step, success in ((4, 0.4), (5, None)):
        resumed.save_run(step, success)
    resumed.require()
    assert resumed.steps() == [5, 4 if best is None else 2]


def test_nothing_to_find(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "absent", pytest.fail) is None


@pytest.mark.parametrize("file", ["steps.json", "rank_00000.safetensors", STATE, MANIFEST])
def test_every_damage_is_seen_and_the_one_before_is_used(tmp_path: Path, file: str) -> None:
    save_steps(tmp_path, 1, 2)
    path = tmp_path / "step_00000002" / file
    intact = path.read_bytes()
    damaged = [
        intact[:-1],
        intact[: len(intact) // 2],
        b"",
        intact + b"\n" if file != MANIFEST else intact + b"}",
    ]
    for position in range(0, len(intact), max(1, len(intact) // 40)):
        flipped = bytearray(intact)
        flipped[position] ^= 1 << (position % 8)
        if file != MANIFEST or json_differs(intact, bytes(flipped)):
            damaged.append(bytes(flipped))
    if file == MANIFEST:
        damaged.remove(intact[:-1])  # the last newline carries nothing
    for content in damaged:
        path.write_bytes(content)
        reports: list[str] = []
        assert find_latest(tmp_path, reports.append).step == 1
        assert (
            len(reports) == 1
            and "step_00000002 is skipped" in reports[0]
            and "\n" not in reports[0]
        )
        assert file in reports[0]
    path.write_bytes(intact)
    assert find_latest(tmp_path, pytest.fail).step == 2


def json_differs(one: bytes, other: bytes) -> bool:
    try:
        return json.loads(one) != json.loads(other)
    except ValueError:
        return True


@pytest.mark.forks
@pytest.mark.parametrize("damage", ["changed", "missing", "unreadable"])
def test_ranks_share_the_files_to_verify_and_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """Of ten files each of three ranks reads three or four; one sees what only it has read."""
    directories = [tmp_path / f"step_0000000{step}" for step in (1, 2)]
    for step, directory in enumerate(directories, start=1):
        directory.mkdir()
        for index in range(9):
            (directory / file_name(index)).write_bytes(b"%d" % index)
        (directory / STATE).write_text(json.dumps({"of": step}))
        files = {path.name: describe_file(path) for path in sorted(directory.iterdir())}
        facts = {"format": FORMAT, "step": step, "score": None, "config": {}, "models": {}}
        write_manifest(directory, facts, files)
    bad = directories[1] / file_name(4)  # of the second rank
    if damage == "missing":
        bad.unlink()
    if damage == "changed":
        bad.write_bytes(b"x")
    read: list[Path] = []

    def counting(path: Path) -> dict:
        read.append(path)
        if path == bad and damage == "unreadable":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return describe_file(path)

    def work() -> None:
        collectives.start()
        rank, skipped = collectives.rank(), []
        names = sorted(path.name for path in directories[0].iterdir() if path.name != MANIFEST)
        if damage == "unreadable":  # the checkpoint may be intact
            with pytest.raises(OSError, match=bad.name):
                find_latest(tmp_path, skipped.append)
        else:
            found = find_latest(tmp_path, skipped.append)
            assert (found.step, found.state, len(skipped)) == (1, {"of": 1}, rank == 0)
            assert all("step_00000002" in line and bad.name in line for line in skipped)
            assert [path.name for path in read if path.parent == directories[0]] == names[rank::3]
        assert (bad in read) == (rank == 1 and damage != "missing")

    monkeypatch.setattr(integrity, "describe_file", counting)
    on_ranks(work, 3)


def test_missing_and_foreign_files_are_damage(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / "step_00000001" / "rank_00001.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="rank_00001.safetensors .* manifest"):
        read_checkpoint(tmp_path / "step_00000001")
    (tmp_path / "step_00000001" / "rank_00001.safetensors").unlink()
    (tmp_path / "step_00000001" / "steps.json").unlink()
    with pytest.raises(ValueError, match="steps.json is missing"):
        read_checkpoint(tmp_path / "step_00000001")


def test_a_reader_never_sees_half_and_training_does_not_wait(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    may_write = threading.Event()

    def stage(directory: Path):
        write = stage_bytes(b"new")(directory)
        return lambda: (may_write.wait(30), write())[1]

    writer = make_writer(tmp_path)
    writer.save(2, stage, {}, None)  # returns although nothing can be written yet
    assert find_latest(tmp_path, pytest.fail).step == 1
    may_write.set()
    writer.wait()
    assert find_latest(tmp_path, pytest.fail).step == 2


def test_what_a_killed_process_left_is_never_read_and_goes_away(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    for leftover in (".step_00000002.0a1b2c3d.tmp", ".step_00000000.old"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "rank_00000.safetensors").write_bytes(b"half")
    assert find_latest(tmp_path, pytest.fail).step == 1
    save_steps(tmp_path, 2)
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for number in ("step_00000002", "step_00000002-2"):
        (tmp_path / "step_00000002" / STATE).write_bytes(b"")
        save_steps(tmp_path, 2)
        assert find_latest(tmp_path, pytest.fail).step == 2
        assert names(tmp_path) == ["set_aside", "step_00000001", "step_00000002"]
        assert (tmp_path / "set_aside" / number / "rank_00000.safetensors").read_bytes()


def test_damaged_checkpoints_take_no_place_of_those_that_are_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 5, 10, 20, keep_last=0)
    (tmp_path / "step_00000010" / "manifest.json").write_text('{"format": 99}')  # a newer format
    (tmp_path / "step_00000020" / STATE).write_bytes(b"")
    save_steps(tmp_path, 15, keep_last=2)
    assert find_latest(tmp_path, pytest.fail).step == 15
    assert names(tmp_path) == ["set_aside", "step_00000005", "step_00000015"]
    assert names(tmp_path / "set_aside") == ["step_00000010", "step_00000020"]


def test_a_checkpoint_that_a_run_went_back_behind_is_deleted(tmp_path: Path) -> None:
    """It is intact, whether this process wrote it or an earlier one."""
    save_steps(tmp_path, 10, 20)
    save_steps(tmp_path, 5, 30, 15)
    assert names(tmp_path) == ["step_00000005", "step_00000015"]


FAILING_READS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
static int fails(const char *path, int flags) {
    const char *part = getenv("UNREADABLE");
    if (!part || !strstr(path, part) || (flags & O_ACCMODE) != O_RDONLY || flags & O_DIRECTORY)
        return 0;
    errno = atoi(getenv("READ_ERROR"));
    return 1;
}
#define OPENS(name) \\
    int name(const char *path, int flags, ...) { \\
        if (fails(path, flags)) return -1; \\
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \\
        return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name))(path, flags, mode); \\
    }
OPENS(open) OPENS(open64)
"""
"""A library that lets reading of files fail whose path contains $UNREADABLE, below Python."""


@pytest.fixture(scope="module")
def failing_reads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("gcc compiles the library that lets reads fail")
    folder = tmp_path_factory.mktemp("library")
    (folder / "reads.c").write_text(FAILING_READS)
    command = ["gcc", "-shared", "-fPIC", "-o", folder / "reads.so", folder / "reads.c", "-ldl"]
    subprocess.run(command, check=True)
    return folder / "reads.so"


@pytest.mark.slow
def test_a_reading_error_is_no_damage(failing_reads: Path, tmp_path: Path) -> None:
    """Neither a start nor the writing of later checkpoints deletes what cannot be read for now."""
    cases = list(
        itertools.product(
            ("20/manifest", "20/rank", "20/state"), (errno.EIO, errno.EACCES, errno.ESTALE)
        )
    )
    for index in range(len(cases)):
        save_steps(tmp_path / str(index), 10, 20)
    program = f"""
        import os
        from pathlib import Path
        from tests.unit.test_checkpointing import find_latest, make_writer, stage_bytes
        for index, (part, number) in enumerate({cases}):
            directory = Path({str(tmp_path)!r}) / str(index)
            os.environ["UNREADABLE"] = f"{{index}}/step_000000{{part}}"
            os.environ["READ_ERROR"] = str(number)
            try:
                find_latest(directory, print)
            except OSError as error:
                print(error.errno)
            writer = make_writer(directory, keep_last=1)
            writer.save(15, stage_bytes(b"x"), {{}}, None)
            writer.wait()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | {"LD_PRELOAD": str(failing_reads)},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.isdigit()]
    assert said == [str(number) for _, number in cases]
    for index, case in enumerate(cases):
        assert names(tmp_path / str(index)) == ["set_aside", "step_00000015"], case
        assert read_checkpoint(tmp_path / str(index) / "set_aside" / "step_00000020").step == 20


def test_any_error_of_the_writing_thread_is_told(tmp_path: Path) -> None:
    def stage(directory: Path):
        def write() -> list[Path]:
            raise MemoryError("no room for a copy")

        return write

    writer = make_writer(tmp_path)
    writer.save(1, stage_bytes(b"x"), {}, None)
    writer.save(2, stage, {}, None)
    with pytest.raises(OSError, match="MemoryError"):
        writer.require()
    assert writer.saved_step == 1 and names(tmp_path)[-1] == "step_00000001"
    assert "step_00000001: --resume" in writer.last("more")


def test_a_damaged_checkpoint_is_not_said_to_be_good(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    (tmp_path / "step_00000020" / STATE).write_bytes(b"")
    writer = make_writer(tmp_path)
    assert writer.last("more").startswith("there is no checkpoint yet")
    writer.saved_step = 10  # as a run that has resumed
    assert "step_00000010: --resume" in writer.last("more")
    writer.save(15, stage_bytes(b"x"), {}, None)
    assert "step_00000015: --resume" in writer.last("more")


def test_keep_last_and_keep_best(tmp_path: Path) -> None:
    scores = {1: 0.1, 2: 0.9, 3: 0.9, 4: 0.5}
    save_steps(tmp_path / "all", 1, 2, 3, 4, 5)
    assert len(names(tmp_path / "all")) == 5
    save_steps(tmp_path / "two", 1, 2, 3, 4, 5, scores=scores, keep_last=2)
    assert names(tmp_path / "two") == ["step_00000004", "step_00000005"]
    save_steps(tmp_path / "best", 1, 2, 3, 4, 5, 6, scores=scores, keep_last=2, keep_best=True)
    assert names(tmp_path / "best") == ["step_00000003", "step_00000005", "step_00000006"]
    for folder, is_chosen in (("best", True), ("two", False)):
        manifest = next((tmp_path / folder).glob("step_*/manifest.json")).read_text()
        assert ("so that it flatters: evaluate that checkpoint on other" in manifest) == is_chosen
    save_steps(tmp_path / "none", 1, 2, 3, keep_last=1, keep_best=True)  # no evaluation, no best
    assert names(tmp_path / "none") == ["step_00000003"]


def test_what_a_kept_checkpoint_has_pinned_stays(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, keep_last=1)
    left = {}
    for step, pinned in ((1, [1]), (2, [1]), (3, [1]), (4, [4]), (5, [4]), (6, [])):
        writer.save(step, stage_bytes(b"x"), {}, None, pinned)
        writer.wait()
        left[step] = sorted(writer.steps())
    assert left == {1: [1], 2: [1, 2], 3: [1, 3], 4: [4], 5: [4, 5], 6: [6]}


def test_a_failed_write_is_told_at_once_and_costs_one_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    save_steps(tmp_path, 1)

    def stage(directory: Path):
        def write() -> list[Path]:
            (directory / "half").write_bytes(b"x" * 100)
            raise OSError(28, "No space left on device")

        return write

    writer = make_writer(tmp_path)
    writer.save(2, stage, {}, None)
    writer.wait()
    said = capsys.readouterr().out
    assert "checkpoint of step 2" in said and "free space" in said and "tries again" in said
    assert names(tmp_path) == ["step_00000001"]  # its remains would hold the disk that lacks room
    with pytest.raises(OSError, match="step 2.*No space left.*free space"):
        writer.require()
    assert find_latest(tmp_path, pytest.fail).step == 1
    writer.save(3, stage_bytes(b"x"), {}, None)
    writer.require()
    assert find_latest(tmp_path, pytest.fail).step == writer.saved_step == 3


def test_a_failed_write_that_cannot_be_told_is_none_the_less_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is on the same full disk."""
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("sys.stdout", SimpleNamespace(write=full, flush=full))
    writer = make_writer(tmp_path)
    writer.save(1, lambda directory: full, {}, None)
    with pytest.raises(OSError, match="step 1.*No space left"):
        writer.require()
    assert writer.saved_step is None and not names(tmp_path)


@pytest.mark.forks
def test_a_folder_that_cannot_be_made_costs_one_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """As on a disk without room for another name; no rank stays behind."""
    (tmp_path / "c").touch()

    def work() -> None:
        collectives.start()
        writer = make_writer(tmp_path / "c")
        path = Path(file_name(collectives.rank()))

        def stage(directory: Path):
            return lambda: ((directory / path).write_bytes(b"x"), [directory / path])[1]

        writer.save(1, stage, {}, None)
        assert not writer.has(1)
        with pytest.raises(OSError, match=f"checkpoint of step 1 to {tmp_path}/c: .*File exists"):
            writer.require()
        collectives.on_main((tmp_path / "c").unlink)
        writer.save(2, stage, {}, None)
        writer.require()

    on_ranks(work, 2)
    assert capfd.readouterr().out.count("of step 1 to") == 1
    assert find_latest(tmp_path / "c", pytest.fail).step == 2


def test_the_failed_write_of_another_rank_is_told_at_once(tmp_path: Path) -> None:
    def work() -> None:
        def stage(directory: Path):
            def write() -> list[Path]:
                if collectives.rank() == 1:
                    raise OSError(28, "No space left on device")
                (directory / "rank_00000.safetensors").write_bytes(b"0")
                return [directory / "rank_00000.safetensors"]

            return write

        collectives.start()
        writer = make_writer(tmp_path)
        writer.save(2, stage, {}, None)
        with pytest.raises(OSError, match="No space left.*free space"):
            writer.require()  # within the time that ranks have here, not ten minutes

    on_ranks(work, 2)
    assert find_latest(tmp_path, pytest.fail) is None


def test_config_of_a_resumed_run() -> None:
    saved = Checkpoint(
        Path("c"),
        1,
        None,
        {
            "model": {"hidden_size": 8, "load": "/old"},
            "train": {"lr": 0.1},
            "logging": {"name": "a"},
        },
        {"load": "content"},
        {},
    )
    assert check_config(saved, saved.config, saved.models) == []
    changed = saved.config | {
        "train": {"lr": 0.2},
        "logging": {"name": "b"},
        "parallel": {"bf16": False},
    }
    assert check_config(saved, changed, {}) == ["train.lr was 0.1 and is 0.2 now"]
    moved = saved.config | {"model": {"hidden_size": 8, "load": "/new"}}
    assert check_config(saved, moved, saved.models) == ["model.load was /old and is /new now"]
    started = {"warm_start": {"sft_steps": 9}, "lora": {"lora_load": "a"}}
    assert check_config(saved, saved.config | started, saved.models) == [
        f"{key} now, which changes nothing after the start"
        for key in ("lora.lora_load was None and is a", "warm_start.sft_steps was 0 and is 9")
    ]
    with pytest.raises(ValueError, match="model.load was /old"):
        check_config(saved, moved, {"load": "other content"})
    with pytest.raises(ValueError, match="model.hidden_size was 8 .* is 9"):
        check_config(saved, {"model": {"hidden_size": 9, "load": "/new"}}, saved.models)


def test_reference_players_are_known_as_long_as_the_rules_of_play_are_the_same() -> None:
    flags = ["--environments", "bandit"]
    lake = Baselines("bandit", 9, 0.5, 0.4, 0.6, 1.0, 1.0, True)
    state = {"references": {"bandit": asdict(lake)}}
    config = json.loads(json.dumps(parse(flags).to_dict()))
    saved = Checkpoint(Path("c"), 1, None, config, {}, state)
    assert known_references(parse(flags), None) == {}
    assert known_references(parse([*flags, "--lr", "1e-4"]), saved) == {"bandit": lake}
    for change in ("--max-turns 3", "--eval-prompts 9", "--environments frozen_lake"):
        assert known_references(parse([*flags, *change.split()]), saved) == {}, change


def test_references_found_under_other_rules_are_not_those_of_the_checkpoint() -> None:
    one, other = (Baselines("bandit", 9, rate, 0.4, 0.6, 1.0, 1.0, True) for rate in (0.5, 0.4))
    state = json.loads(json.dumps(KnownBaselines({"bandit": one}).state_dict()))
    for before, after in ((KnownBaselines(), one), (KnownBaselines({"bandit": other}), other)):
        before.load_state_dict(state)
        assert before == {"bandit": after}


def test_errors_of_rank_0_reach_the_caller() -> None:
    assert on_main(lambda: 3) == 3
    with pytest.raises(OSError, match="disk"):
        on_main(lambda: (_ for _ in ()).throw(OSError("disk")))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_storage_without_locks_is_named(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ValueError, match=f"{tmp_path}/run must .* can lock files .*--output"):
        lock_run(tmp_path / "run")


HOLDER = """
import sys
from pathlib import Path
from ragen_mega.storage.checkpoints import lock_run
lock = lock_run(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_the_second_process_refuses_until_the_first_is_gone(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "name"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match="another process .*name; wait"):
            lock_run(run)
        os.kill(holder.pid, signal.SIGKILL)
    lock_run(run).close()
    lock_run(run).close()


def cut(whole: torch.Tensor, rows: list[int], columns: list[int]) -> list[Piece]:
    """Pieces of a matrix between the given borders."""
    return [
        Piece("w", (top, left), tuple(whole.shape), whole[top:bottom, left:right].contiguous())
        for top, bottom in zip(rows, rows[1:])
        for left, right in zip(columns, columns[1:])
    ]


def test_any_box_is_read_back_from_any_cut(tmp_path: Path) -> None:
    whole = torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10)
    pieces = cut(whole, [0, 3, 4, 7], [0, 5, 10])
    write_pieces(tmp_path / file_name(0), pieces[:2])
    write_pieces(tmp_path / file_name(1), pieces[2:])
    write_pieces(tmp_path / file_name(2), [])
    reader = PieceReader(tmp_path)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        top, left = (int(torch.randint(0, size, (), generator=generator)) for size in whole.shape)
        height, width = (
            int(torch.randint(1, size - start + 1, (), generator=generator))
            for size, start in zip(whole.shape, (top, left))
        )
        box = reader.read(
            "w", (top, left), (height, width), dtype=torch.float32, global_shape=(7, 10)
        )
        assert torch.equal(box, whole[top : top + height, left : left + width])
    padded = reader.read(
        "w", (6, 0), (2, 10), dtype=torch.float32, global_shape=(8, 10), allow_padding=True
    )
    assert torch.equal(padded, torch.cat([whole[6:], torch.zeros(1, 10)]))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    whole = torch.zeros(4, 4)
    write_pieces(tmp_path / file_name(0), cut(whole, [0, 2, 4], [0, 4])[:1])
    reader = PieceReader(tmp_path)
    asked = dict(offset=(0, 0), shape=(4, 4), dtype=torch.float32, global_shape=(4, 4))
    for key, changes, message in (
        ("v", {}, "lacks v"),
        ("w", {}, "8 of 16 elements .* w"),
        (
            "w",
            {"global_shape": (4, 5)},
            r"w has shape \[4, 4\] .* \[4, 5\]",
        ),
        (
            "w",
            {"shape": (2, 4), "dtype": torch.bfloat16},
            "w is torch.float32 .* torch.bfloat16",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            reader.read(key, **asked | changes)


def test_a_file_without_our_header_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / file_name(0))
    with pytest.raises(ValueError, match="cannot read .*rank_00000.safetensors"):
        PieceReader(tmp_path)


def test_a_run_without_a_checkpoint_begins_with_the_model_that_it_began_with(
    tmp_path: Path,
) -> None:
    run = ["--output", str(tmp_path), "--name", "a", "--warm-start-steps", "9"]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(json.dumps(parse(run).to_dict()))
    check_beginning(parse([*run, "--warm-start-steps", "8"]), [])  # it has made no model yet
    (tmp_path / "a" / "base").mkdir()
    for same in ("--lr 1", "--eval-environments bandit", "--warm-start-from b", "--critic-load b"):
        check_beginning(parse([*run, *same.split()]), [])
    for flags, key in (
        ("--warm-start-steps 8", "warm_start.warm_start_steps was 9"),
        ("--seed 3", "warm_start.warm_start_seed was 0"),
        ("--hidden-size 32", "model.hidden_size was 96"),
        ("--load b --sft-steps 2", "model.load was None"),
        ("--environments bandit", "environment.environments was frozen_lake"),
    ):
        with pytest.raises(ValueError, match=f"{key} .*; give what it was, or .* --overwrite"):
            check_beginning(parse([*run, *flags.split()]), [])


def test_checkpoints_of_another_format_are_no_reason_to_delete_a_run(tmp_path: Path) -> None:
    config = parse(["--output", str(tmp_path), "--name", "a", "--resume"])
    checkpoint = config.run_directory / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    (config.run_directory / "config.json").write_text(json.dumps(config.to_dict()))
    write_manifest(checkpoint, {"format": 1}, {})
    unread: list[str] = []
    assert find_latest(checkpoint.parent, unread.append) is None
    with pytest.raises(ValueError, match="the version that wrote .* --load .*/a/hug") as refused:
        check_beginning(config, unread)
    assert "--overwrite" not in str(refused.value) and "mount" not in str(refused.value)
    with pytest.raises(ValueError, match="; mount or restore that folder"):
        check_beginning(config, [*unread, "checkpoint x is skipped: manifest.json is damaged"])


def test_a_fitted_context_that_stays_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--output", str(tmp_path), "--name", "a", "--fit-context", "--max-context-length"]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(json.dumps(parse([*words, "700"]).to_dict()))
    for length, said in (("700", ""), ("900", "fit_context keeps the 700 of the run")):
        config = fit_context_once(parse([*words, length, "--resume"]))
        assert config.rollout.max_context_length == 700
        printed = capsys.readouterr().out
        assert said in printed and printed.count("\n") == bool(said)


def test_paths_are_absolute_and_a_hub_name_is_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cache of the hub, as huggingface_hub lays it out, without a network."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = tmp_path / "hub" / "models--owner--model"
    (model / "snapshots" / commit).mkdir(parents=True)
    (model / "snapshots" / commit / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "critic").mkdir()
    flags = "--load owner/model --critic-load critic --boards b.jsonl --rollout-engine sglang"
    config = parse([*flags.split(), "--sglang-python", "venv/bin/python"]).located()
    config = with_models(config)
    assert config.model.load == str(model / "snapshots" / commit)
    assert config.model.critic_load == str(tmp_path / "critic")
    assert config.evaluation.boards == str(tmp_path / "b.jsonl")
    assert config.rollout.sglang_python == str(tmp_path / "venv/bin/python")
    with pytest.raises(ValueError, match="--load owner/other is no directory here"):
        with_models(parse(["--load", "owner/other"]).located())
    said = "--load owner/other: there is no such directory, so the hub is asked for it"
    assert capsys.readouterr().err.count(said) == 1
