"""A few steps of a tiny run under torchrun, as a person starts it."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLAGS = """
    --environments bandit:1,frozen_lake:1
    --environment-options {"frozen_lake":{"observation":"cells"}} --prompt-style compact
    --max-response-length 48 --max-context-length 400 --eval-prompts 16 --eval-interval 2
    --hidden-size 32 --ffn-hidden-size 64 --warm-start-first-turn-steps 60 --warm-start-steps 30
    --warm-start-trajectories 100 --num-groups 4 --group-size 4 --minibatch-size 4
    --filter-strategy none --num-steps 3 --lr 1e-3 --critic-lr 1e-3
""".split()


def launch(directory: Path, num_ranks: int, *flags: str, timeout: float = 280) -> Path:
    """Train under torchrun; returns the run directory."""
    command = [
        sys.executable,
        "-m",
        "ragen_mega.commands.launch",
        "--nproc-per-node",
        str(num_ranks),
        str(ROOT / "examples" / "pretrain_starpo.sh"),
        "--recipe",
        "none",
        *FLAGS,
        "--output",
        str(directory),
        "--name",
        "run",
        *flags,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return directory / "run"


def read_metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
