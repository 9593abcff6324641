"""The small run that tools/chaos.py torments: how it is started, watched, found among all
processes, and compared.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from ragen_mega.storage.rollouts import ROLLOUTS, RolloutStore, StoredRollout

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "examples" / "pretrain_starpo.sh"
NUM_STEPS = 12
FLAGS = f"""
    --recipe none --environments bandit --max-turns 1 --max-actions-per-turn 1 --max-actions 1 --prompt-style compact
    --max-response-length 24 --max-context-length 128 --eval-prompts 16 --eval-interval 4
    --hidden-size 32 --ffn-hidden-size 64 --num-layers 2 --num-groups 8 --group-size 4 --minibatch-size 8
    --filter-strategy none --lr 1e-3 --critic-lr 1e-3 --num-steps {NUM_STEPS} --save-interval 2 --keep-last 3
    --warm-start-first-turn-steps 20 --warm-start-steps 10 --warm-start-trajectories 100
""".split()
MARKER = "RAGEN_CHAOS"
"""Environment variable of every process of a run, by which stragglers are found."""
RESUMED = re.compile(r"resumed from .*: (\d+) steps are done")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a run is spread over processes."""

    name: str
    flags: tuple[str, ...]
    num_ranks: int = 2
    has_servers: bool = False
    """Whether SGLang servers sample, whose samples on a CPU no seed repeats."""


LAYOUTS = (
    Layout("dp2_distributed_optimizer", ("--use-distributed-optimizer",)),
    Layout("tp2", ("--tensor-model-parallel-size", "2")),
    Layout("pp2", ("--pipeline-model-parallel-size", "2")),
)


def sglang_layouts(python: Path) -> tuple[Layout, ...]:
    """Ranks that roll out with SGLang servers of another environment and keep every rollout on the
    disk.

    One replaces a lost server from its copy of the weights; of two pipeline stages both have to
    send theirs again.
    """
    flags = ("--rollout-engine", "sglang", "--sglang-python", str(python), "--keep-rollouts", "0")
    stages = ("--pipeline-model-parallel-size", "2", "--weight-transfer", "ipc")
    return (
        Layout("sglang", (*flags, "--weight-transfer", "file"), num_ranks=1, has_servers=True),
        Layout("sglang_pp2_ipc", (*flags, *stages), has_servers=True),
    )


def identity(checkpoint: Path) -> tuple[str, int]:
    """What a checkpoint written anew under the same name does not share: renaming the directory
    sets its change time.
    """
    return checkpoint.name, checkpoint.stat().st_ctime_ns


class Victim:
    """A run that is started, watched, killed and damaged."""

    def __init__(self, output: Path, name: str, layout: Layout) -> None:
        self.output, self.name, self.layout = output, name, layout
        self.directory = output.resolve() / name
        self.mark = uuid.uuid4().hex

    def start(self) -> subprocess.Popen[bytes]:
        """Launch the ranks; they go on where the run has got to."""
        command = [
            sys.executable,
            str(REPOSITORY / "tools" / "launch.py"),
            "--nproc-per-node",
            str(self.layout.num_ranks),
        ]
        command += [
            str(SCRIPT),
            *FLAGS,
            *self.layout.flags,
            "--output",
            str(self.output),
            "--name",
            self.name,
            "--resume",
        ]
        paths = [str(REPOSITORY), str(REPOSITORY / "kernels"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            MARKER: self.mark,
        }
        with self.log.open("ab") as log:
            log.write(b"\n--- start ---\n")
            log.flush()
            self._log_start = log.tell()
            return subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    @property
    def log(self) -> Path:
        """What all processes of all rounds have said."""
        return self.output / f"{self.name}.log"

    def said(self) -> str:
        """What was said since the last start."""
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")

    def phase(self) -> str:
        """What the run is doing, by the files that are there."""
        if not re.search(r"^step \d+ bandit: ", self.said(), re.MULTILINE) and not RESUMED.search(
            self.said()
        ):
            return "setup"
        if any((self.directory / "checkpoints").glob(".step_*.tmp")):
            return "checkpoint"
        num_logged = len(self.rows())
        if num_logged >= NUM_STEPS:
            return "finish"
        return (
            "update"
            if (self.directory / ROLLOUTS / f"step_{num_logged:08d}.safetensors").exists()
            else "rollout"
        )

    def rows(self) -> list[dict[str, Any]]:
        """Logged metrics, complete lines only, without what depends on the clock."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        rows = [json.loads(line) for line in lines]
        return [{key: value for key, value in row.items() if not _is_timing(key)} for row in rows]

    def parameters(self) -> dict[str, torch.Tensor]:
        """Every tensor of the last checkpoint: weights and moments of both models, as the ranks
        wrote them.
        """
        last = self.directory / "checkpoints" / f"step_{NUM_STEPS:08d}"
        return {
            f"{path.name}/{key}": value
            for path in last.glob("*.safetensors")
            for key, value in load_file(path).items()
        }

    def sound(self, tainted: set[tuple[str, int]]) -> list[Path]:
        """Published checkpoints that nobody has damaged, newest first."""
        published = sorted((self.directory / "checkpoints").glob("step_*"), reverse=True)
        return [path for path in published if identity(path) not in tainted]

    def trained(self) -> list[StoredRollout]:
        """Every rollout that is on the disk, in the order of the steps."""
        store = RolloutStore(self.directory / ROLLOUTS)
        return [store.read(step) for step in store.steps()]

    def processes(self) -> list[psutil.Process]:
        """Every live process of this run: those that carry its mark, and its servers, whose
        environment is scrubbed.
        """
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get(MARKER) == self.mark or self._works_for_server(
                    process
                )
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # ended while we looked, or not ours
        return found

    def servers(self) -> list[psutil.Process]:
        """The processes of SGLang servers, with those that supervise them."""
        return [process for process in self.processes() if self._works_for_server(process)]

    def _works_for_server(self, process: psutil.Process) -> bool:
        try:
            return Path(process.cwd()).is_relative_to(self.directory / "sglang")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    def ranks(self, launcher: int) -> list[psutil.Process]:
        """The processes that train."""
        trains = [
            process
            for process in self.processes()
            if any(SCRIPT.name in word for word in _command(process))
        ]
        return [process for process in trains if process.pid != launcher]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def _is_timing(key: str) -> bool:
    return key.startswith(("time/", "memory/", "engine/")) or "per_second" in key
