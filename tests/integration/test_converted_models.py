"""A run's model, exported, is in transformers what it is in the trainer; one in megatron format is
loaded by all that load.
"""

import json
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ragen_mega import evaluate
from ragen_mega.config import parse
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, TokenBatch, Trajectory
from ragen_mega.megatron import checkpoint
from ragen_mega.ranks import collectives
from ragen_mega.run.build import build
from ragen_mega.run.run import Run
from ragen_mega.train import starpo
from tests.support.converted_models import FLAGS, convert, write_start
from tests.support.forked_ranks import on_ranks
from tests.support.rounding import float32_bound

TP2 = ("--tensor-model-parallel-size", "2")
pytestmark = pytest.mark.forks


def on_two_ranks(work) -> None:
    """Run `work()` on two forked ranks; they leave together."""

    def rank() -> None:
        work()
        collectives.barrier()

    on_ranks(rank, 2)


def some_batch(vocab_size: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    trajectories = []
    for index in range(4):
        trajectory = Trajectory(group_id=index)
        trajectory.append_observation(
            torch.randint(0, vocab_size, (5,), generator=generator).tolist()
        )
        tokens = torch.randint(0, vocab_size, (7 + index,), generator=generator).tolist()
        trajectory.append_action(Completion(tokens, [0.0] * len(tokens), "stop"))
        trajectories.append(trajectory)
    return pack(trajectories)


def record(run: Run, path: Path) -> None:
    """Save what the policy computes and what it is made of."""
    weights = {name: value.clone() for name, value in run.policy.export_weights()}
    logprobs = run.policy.logprobs(some_batch(run.policy.hf.vocab_size))
    if collectives.is_main():
        torch.save({"logprobs": logprobs, "weights": weights}, path)


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """The actor's pieces in the files of all ranks."""
    pieces = {}
    for path in directory.glob("rank_*.safetensors"):
        with safe_open(path, "pt") as file:
            for name, piece in json.loads(file.metadata()["pieces"]).items():
                if piece["key"].startswith("actor.") and not piece["key"].startswith(
                    "actor.optimizer."
                ):
                    pieces[f"{path.name} {json.dumps(piece, sort_keys=True)}"] = file.get_tensor(
                        name
                    )
    return pieces


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@torch.no_grad()
def logprobs_in_transformers(directory: Path, dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    batch, rows = some_batch(model.config.vocab_size), []
    offsets = batch.cu_seqlens.tolist()
    for start, end in zip(offsets[:-1], offsets[1:]):
        logits = model(batch.tokens[None, start:end]).logits[0]
        rows.append(logits.log_softmax(-1).gather(-1, batch.labels[start:end, None])[:, 0])
    return torch.cat(rows) * batch.loss_mask


@pytest.mark.parametrize(
    "architecture", ["qwen2_tied", pytest.param("qwen3_untied", marks=pytest.mark.slow)]
)
def test_a_run_exported_and_loaded_again(tmp_path: Path, architecture: str) -> None:
    start = write_start(tmp_path, architecture)

    def train_a_step() -> None:
        run = build(
            parse([*FLAGS, *TP2, "--load", str(start), "--output", str(tmp_path), "--name", "run"])
        )
        starpo(run)
        record(run, tmp_path / "trained.pt")
        run.shutdown()

    on_two_ranks(train_a_step)
    trained = torch.load(tmp_path / "trained.pt")
    steps = tmp_path / "run" / "checkpoints" / "step_00000001"

    # Export: transformers computes what the trainer computed.
    exported = convert(tmp_path / "run", tmp_path / "exported", "huggingface")
    assert_equal(load_file(exported / "model.safetensors"), trained["weights"])
    assert not torch.equal(
        trained["weights"]["model.norm.weight"], torch.ones(32)
    )  # training did something
    assert trained["logprobs"].count_nonzero() > 20
    exact, in_float32 = (
        logprobs_in_transformers(exported, dtype) for dtype in (torch.float64, torch.float32)
    )
    bound = float32_bound(exact, in_float32)
    torch.testing.assert_close(trained["logprobs"].double(), exact, atol=bound, rtol=0)
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        assert (exported / name).read_bytes() == (start / name).read_bytes()

    # Megatron format: what the ranks of the run wrote, and under another layout it can be loaded
    # all the same.
    same = convert(steps, tmp_path / "same", "megatron", tensor_model_parallel_size=2)
    assert_equal(stored(same), stored(steps))
    model = convert(exported, tmp_path / "megatron", "megatron", pipeline_model_parallel_size=2)

    def load_on_two_ranks() -> None:
        run = build(
            parse(
                [*FLAGS, *TP2, "--load", str(model), "--output", str(tmp_path), "--name", "again"]
            )
        )
        record(run, tmp_path / "loaded.pt")
        run.shutdown()
        # megatron-core's own loader finds every key, shape and piece.
        state = checkpoint._sharded_parameters(run.policy.trainer)
        expected = {name: part.data.clone() for name, part in state.items()}
        add_prefix_for_sharding(state, "actor.")
        assert_equal(
            dist_checkpointing.load(state, str(model), sharded_strategy=checkpoint._Read()),
            expected,
        )

    on_two_ranks(load_on_two_ranks)
    loaded = torch.load(tmp_path / "loaded.pt")
    assert_equal(loaded["weights"], trained["weights"])
    assert torch.equal(loaded["logprobs"], trained["logprobs"])

    def compare_evaluations() -> None:
        results = [
            evaluate(path, "bandit", num_prompts=4, samples_per_prompt=1)
            for path in (model, exported)
        ]
        assert results[0] == results[1]

    on_two_ranks(compare_evaluations)
