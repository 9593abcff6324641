"""Mixtures of experts in real SGLang on a CPU: what its own loader leaves on each rank, and
training with a server, whose experts go to other ranks than the trainer's.

Needs an environment with SGLang: bash tools/setup_sglang_cpu.sh, then
RAGEN_SGLANG_PYTHON=.venv-sglang/bin/python.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from ragen_mega.config import parse
from ragen_mega.models.huggingface import load_tokenizer
from ragen_mega.models.layout import split_experts
from ragen_mega.models.server_cut import cut_stream
from ragen_mega.models.shape import ModelShape
from ragen_mega.warm_start.small_model import write_small_model
from tests.support.sglang_server import PYTHON, needs_sglang, settings
from tests.support.training import FLAGS, launch, read_metrics
from tools.chaos import write_mixture

pytestmark = [*needs_sglang, pytest.mark.slow]
SCRIPT = Path(__file__).parents[1] / "support" / "sglang_loaded.py"
CONFIG = Qwen3MoeConfig(
    vocab_size=400, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=6,
    num_experts_per_tok=3, norm_topk_prob=True, max_position_embeddings=512,
    initializer_range=0.2, tie_word_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize(("size", "ep"), [(1, 1), (2, 1), (2, 2)])
def test_a_server_holds_what_its_own_loader_would_give_it(
    size: int, ep: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, directory = AutoModelForCausalLM.from_config(CONFIG), tmp_path / "model"
    model.save_pretrained(directory)
    own = {"load-format": "auto"}  # the server's own loader
    server = settings(tmp_path, tensor_parallel_size=size, expert_parallel_size=ep, options=own)
    command = server.arguments(directory, 1)
    ranks = [
        subprocess.Popen(
            [server.python, SCRIPT, str(rank), tmp_path / str(rank), *command],
            env=server.environment(tmp_path / "rendezvous"),
            cwd=tmp_path,
        )
        for rank in range(size)
    ]
    assert [rank.wait(1200) for rank in ranks] == [0] * size
    weights = split_experts(model.state_dict(), ModelShape.of(CONFIG))
    for rank in range(size):
        truth = torch.load(tmp_path / str(rank))
        ours = dict(cut_stream(weights.items(), CONFIG, rank, size, ep))
        assert ours.keys() == truth.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in truth.items())


@pytest.mark.forks
@pytest.mark.parametrize("trained", ["", "--lora-rank 4"], ids=["all", "adapters"])
def test_the_server_follows_a_trainer_that_shares_experts(trained: str, tmp_path: Path) -> None:
    """Each of two ranks has half of the trainer's experts, and half of every expert of the server,
    which computes them by torch operations. Adapters of experts reach it merged.
    """
    write_small_model(parse(FLAGS), tmp_path / "small")
    write_mixture(tmp_path / "mixture", load_tokenizer(str(tmp_path / "small")))
    flags = f"""
        --load {tmp_path / "mixture"} --sft-steps 10 --expert-model-parallel-size 2
        --rollout-tensor-parallel-size 2 --rollout-engine sglang --sglang-python {PYTHON}
        --sglang-start-timeout 1200 --num-steps 2 --num-groups 2 --eval-interval 0
        --eval-prompts 2 --eval-samples 1 {trained}
    """.split()
    rows = read_metrics(launch(tmp_path, 2, *flags))
    assert len(rows) == 2  # the second from weights that have changed
    for row in rows:
        assert row["mismatch/logprob_max_abs_diff"] < 1e-4
        assert row["time/sync_gbytes_expert"] > 0 == row["time/sync_gbytes_tensor"]
        assert row["actor/grad_norm"] > 0 and row["engine/restarts"] == 0
