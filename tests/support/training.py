"""A few steps of a tiny run on two environments."""

import json
from pathlib import Path

from tests.support import runs

FLAGS = """
    --environments bandit:1,frozen_lake:1
    --environment-options {"frozen_lake":{"observation":"cells"}} --prompt-style compact
    --max-response-length 48 --max-context-length 400 --eval-prompts 16 --eval-interval 2
    --hidden-size 32 --ffn-hidden-size 64 --warm-start-first-turn-steps 60 --warm-start-steps 30
    --warm-start-trajectories 100 --num-groups 4 --group-size 4 --minibatch-size 4
    --filter-strategy none --num-steps 3 --lr 1e-3 --critic-lr 1e-3
""".split()


def launch(directory: Path, num_ranks: int, *flags: str) -> Path:
    """Train on forked ranks; returns the run directory."""
    return runs.launch(directory, "run", num_ranks, *FLAGS, *flags)


def read_metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
