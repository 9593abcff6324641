"""Training with a real SGLang server that the user has started, on a CPU, in both placements: its
weights come through a process group over gloo.

Needs an environment with SGLang: bash tools/setup_sglang_cpu.sh, then
RAGEN_SGLANG_PYTHON=.venv-sglang/bin/python.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Qwen2Config

from ragen_mega.config import parse
from ragen_mega.models.huggingface import load_tokenizer, random_weights
from ragen_mega.storage.model_writers import save_huggingface
from ragen_mega.storage.rollouts import RolloutStore
from ragen_mega.warm_start.small_model import write_small_model
from tests.support.runs import launch
from tests.support.sglang_server import PYTHON, needs_sglang, users_server
from tests.support.training import read_metrics

pytestmark = [*needs_sglang, pytest.mark.forks, pytest.mark.slow]
FLAGS = """
    --environments bandit --max-turns 1 --max-actions-per-turn 1 --max-actions 1
    --prompt-style compact --max-response-length 24 --max-context-length 128 --eval-prompts 2
    --eval-samples 1 --eval-interval 0 --num-groups 2 --group-size 4 --minibatch-size 4
    --filter-strategy none --advantage-estimator grpo --num-steps 3 --lr 1e-2 --keep-rollouts 0
    --rollout-engine sglang --sglang-start-timeout 600
""".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights, and the end token of a real one."""
    directory = tmp_path_factory.mktemp("model")
    write_small_model(parse(FLAGS), directory / "small")
    tokenizer = load_tokenizer(str(directory / "small"))
    hf = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 16) * 16, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, tie_word_embeddings=True, dtype="float32",
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    weights = random_weights(hf, seed=0)
    save_huggingface(directory / "model", hf, tokenizer, weights.items(), is_writer=True)
    return directory / "model"


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    with users_server(model, folder, "--dtype", "float32") as (address, _):
        yield address


SEPARATE = "--placement separate --rollout-ranks 1 --max-staleness 1 --importance-cap 2"


@pytest.mark.parametrize(
    ("name", "num_ranks", "flags"),
    [
        ("together", 1, ""),
        ("shared", 2, "--tensor-model-parallel-size 2"),
        ("apart", 2, f"{SEPARATE} --sglang-python {PYTHON}"),
    ],
)
def test_the_users_engine_follows_the_trainer(
    name: str, num_ranks: int, flags: str, engine: str, model: Path, tmp_path: Path
) -> None:
    """Every step's log-probabilities are the trainer's under the weights that were due, also where
    two ranks share the engine.
    """
    others = ("--load", str(model), "--engine-addresses", engine, *flags.split())
    run = launch(tmp_path, name, num_ranks, *FLAGS, *others)
    rows = read_metrics(run)
    assert len(rows) == 3 and all(row["engine/restarts"] == 0 for row in rows)
    behind = [row.get("rollout/staleness", 0) for row in rows]
    assert behind == ([0, 1, 1] if name == "apart" else [0, 0, 0])
    differences = [row["mismatch/logprob_max_abs_diff"] for row in rows]
    assert all(
        (difference < 1e-4) == (steps == 0)
        for difference, steps in zip(differences, behind, strict=True)
    ), differences
    store = RolloutStore(run / "rollouts")
    for step in range(3):
        versions = {
            one.weight_version for group in store.read(step).groups for one in group.trajectories
        }
        assert len(versions) == 1
    assert (run / "sglang").exists() == (name == "apart")  # for its evaluation
