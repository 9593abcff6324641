"""A mixture is trained on the routes that its engine recorded: they equal the trainer's at the same
weights, and a run that goes on, or is replayed, has them from its files.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig

from ragen_mega.commands import replayed_step
from ragen_mega.config import parse
from ragen_mega.data.fields import ROUTES, TOKEN_FIELDS, add_routes
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.worlds.frozen_lake.world import FrozenLake
from ragen_mega.models.huggingface import load_config, random_weights
from ragen_mega.run.build import build, check_engine
from ragen_mega.storage.model_writers import save_huggingface
from ragen_mega.storage.rollouts import RolloutStore
from tests.support.runs import finish, launch, metrics, state
from tests.support.small_policy import lake_tokenizer

FLAGS = """
    --environments frozen_lake --prompt-style compact --max-turns 3 --max-response-length 8
    --max-context-length 300 --num-groups 2 --group-size 3 --minibatch-size 3 --num-steps 2
    --filter-strategy none --advantage-estimator grpo --lr 1e-3 --eval-prompts 2 --eval-interval 0
    --eval-samples 1 --save-interval 1 --keep-last 0 --keep-rollouts 0 --routing-replay engine
    --context-window 2
""".split()


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOKEN_FIELDS, ROUTES, None)  # there is none afterwards
    del TOKEN_FIELDS[ROUTES]


def write_model(directory: Path) -> None:
    tokenizer = lake_tokenizer(lambda: Episode(FrozenLake(), EpisodeConfig(prompt_style="compact")))
    hf = Qwen3MoeConfig(
        vocab_size=-(-len(tokenizer) // 8) * 8, hidden_size=32, moe_intermediate_size=24,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=5, num_experts_per_tok=3, norm_topk_prob=True, max_position_embeddings=512,
        initializer_range=0.2, tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, dtype="float32",
    )  # fmt: skip
    save_huggingface(directory, hf, tokenizer, random_weights(hf, 0).items(), is_writer=True)


def train(output: Path, name: str, num_ranks: int, *flags: str) -> Path:
    flags = (*FLAGS, "--load", str(output / "model"), *flags)
    if num_ranks > 1:
        return launch(output, name, num_ranks, *flags)
    return finish(build(parse([*flags, "--output", str(output), "--name", name])))


@pytest.mark.forks
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_routes_are_recorded_stored_and_replayed(
    num_ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "model")
    straight = train(tmp_path, "straight", num_ranks)
    first, second = metrics(straight)
    # the first minibatch of two is trained at the weights that sampled, in the same precision
    assert first["actor/routing_overlap"] > 0.98
    stopped = shutil.copytree(straight, tmp_path / "stopped")
    (stopped / "summary.json").unlink()
    shutil.rmtree(stopped / "checkpoints" / "step_00000002")
    capfd.readouterr()
    train(tmp_path, "stopped", num_ranks, "--resume")
    assert "step 1: repeated from the rollout" in capfd.readouterr().out
    assert metrics(stopped) == [first, second]
    torch.testing.assert_close(state(stopped, 2), state(straight, 2), rtol=0, atol=0)

    add_routes(2, 3, 5)
    stored = RolloutStore(straight / "rollouts").read(1).groups
    routes = [np.asarray(t.further_fields[ROUTES]) for g in stored for t in g.trajectories]
    assert {row.shape[1:] for row in routes} == {(2, 3)} and max(map(np.max, routes)) == 4
    TOKEN_FIELDS.pop(ROUTES)  # which the command adds by itself
    layout, tolerance = dict.fromkeys(replayed_step.LAYOUT), 0.0 if num_ranks == 1 else 1e-4
    arguments = argparse.Namespace(
        run=straight, step=1, tolerance=tolerance, num_ranks=1, json=None, **layout
    )
    replayed = replayed_step.replay(arguments)
    assert replayed["equal"], replayed["keys"]
    # ranks compute equal beginnings each, and routes are counted over what is computed
    assert ("actor/routing_overlap" in replayed["keys"]) == (num_ranks == 1)


def test_what_no_run_can_replay(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    hf, runs = load_config(str(tmp_path / "model")), tmp_path / "runs"
    on_server = parse([*FLAGS, "--rollout-engine", "sglang"])
    for start, said in (
        (lambda: check_engine(on_server, hf), "engine .* sglang"),
        (lambda: parse([*FLAGS, "--routing-replay", "policy"]), "old_logprobs auto"),
        (lambda: build(parse([*FLAGS, "--output", str(runs)])), "engine .* qwen2"),
    ):
        with pytest.raises(ValueError, match=f"routing_replay .*{said}") as caught:
            start()
        assert "\n" not in str(caught.value)
    assert not runs.exists()


@pytest.mark.slow
def test_adapters_of_a_mixture_train_on_recorded_routes_and_go_on(tmp_path: Path) -> None:
    """Adapters of experts too, sent alone; what goes on from them samples as the merged model."""
    write_model(tmp_path / "model")
    lora = "--lora-rank 2 --lora-lr-factor 1 --lora-sync adapter".split()
    run = train(tmp_path, "run", 1, *lora)
    rows = metrics(run)
    assert len(rows) == 2 and all(row["actor/grad_norm"] > 0 for row in rows)
    assert max(row["mismatch/logprob_max_abs_diff"] for row in rows) < 1e-4
    assert rows[0]["actor/routing_overlap"] > 0.98
    more = train(tmp_path, "more", 1, *lora, "--lora-load", str(run / "adapter"))
    merged = train(tmp_path, "merged", 1, "--load", str(run / "huggingface"))
    of_first_steps = (
        [
            one
            for group in RolloutStore(each / "rollouts").read(0).groups
            for one in group.trajectories
        ]
        for each in (more, merged)
    )
    for ours, theirs in zip(*of_first_steps, strict=True):
        assert ours.tokens == theirs.tokens
        difference = np.subtract(ours.rollout_logprobs, theirs.rollout_logprobs)
        assert np.abs(difference).max() < 1e-4
    last = dict(load_file(run / "adapter/adapter_model.safetensors"))
    assert any(bool(tensor.any()) for name, tensor in last.items() if "lora_B" in name)
    with pytest.raises(ValueError, match="has lora_rank 2; set --lora-rank 2"):
        train(tmp_path, "other", 1, "--lora-rank", "3", "--lora-load", str(run / "adapter"))
