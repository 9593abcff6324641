"""The FP8 report: its statistics against their definitions, its measurements
with local layers.
"""

import json
import math
import random

import pytest
import torch
from transformers import Qwen2Config

from ragen_mega.config import ParallelConfig
from ragen_mega.megatron.initialize import initialize, shutdown
from ragen_mega.megatron.precision import Device
from ragen_mega.models.huggingface import random_weights
from ragen_mega.ranks import collectives
from tests.support.refusals import refused
from tools.benchmarks import fp8_report
from tools.benchmarks.fp8_report import (
    BF16,
    drift,
    tables,
)

HF = Qwen2Config(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    initializer_range=0.2,
)


def test_drift_against_its_definition() -> None:
    generator = random.Random(0)
    reference = [-generator.expovariate(0.5) for _ in range(1000)]
    other = [value + generator.gauss(0.01, 0.1) for value in reference]
    differences = [b - a for a, b in zip(reference, other)]
    result = drift(
        torch.tensor(reference, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
    )
    assert result["mean"] == pytest.approx(sum(differences) / 1000)
    assert result["mean_abs"] == pytest.approx(sum(map(abs, differences)) / 1000)
    assert result["p99_abs"] == pytest.approx(sorted(map(abs, differences))[989])
    assert result["max_abs"] == pytest.approx(max(map(abs, differences)))
    assert result["kl"] == pytest.approx(sum(math.exp(d) - 1 - d for d in differences) / 1000)
    assert drift(torch.zeros(1), torch.zeros(1)) == dict.fromkeys(result, 0.0)
    with pytest.raises(ValueError, match=r"same tokens, .*\[2\] and \[3\]"):
        drift(torch.zeros(2), torch.zeros(3))


def test_kl_of_sampled_tokens_is_the_exact_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (
        torch.randn(20, dtype=torch.float64, generator=generator).mul(0.5).log_softmax(0)
        for _ in range(2)
    )
    tokens = torch.multinomial(p.exp(), 400_000, replacement=True, generator=generator)
    exact = float((p.exp() * (p - q)).sum())
    assert drift(p[tokens], q[tokens])["kl"] == pytest.approx(exact, rel=0.02)


def test_a_report_becomes_tables() -> None:
    report = {
        "hardware": "a GPU",
        "versions": {"torch": "2.11.0", "transformer-engine": "2.11.0"},
        "commit": "abc",
        "weights": "random",
        "fp8": "hybrid",
        "recipes": ["tensorwise", "blockwise"],
        "alignment": {"tensorwise": 16, "blockwise": 16},
        "drift_tokens": 8,
        "drift": {"tensorwise": drift(torch.zeros(4), torch.full((4,), 0.25))},
    }
    text = tables(json.loads(json.dumps(report)))
    assert text.splitlines()[2].startswith(
        "a GPU; torch 2.11.0, transformer-engine 2.11.0; commit abc"
    )
    assert "| tensorwise | 2.50e-01 | 2.50e-01 | 2.50e-01 | 2.50e-01 | 3.40e-02 |" in text
    assert "multiples: tensorwise 16, blockwise 16" in text


def test_the_measurements_run_with_local_layers() -> None:
    """The same code as on a GPU, on layers that exist here: bfloat16 drifts from float32, float32
    does not from itself.
    """
    groups = initialize(ParallelConfig())
    try:
        variants = {
            BF16: ParallelConfig(),
            "again": ParallelConfig(recompute="full"),
            "rounded": ParallelConfig(bf16=True),
        }
        batch = fp8_report.random_batch(300, 64, HF.vocab_size, seed=0)
        assert batch.lengths.tolist() == [64, 64, 64, 64, 44] and batch.loss_mask.all()
        rows = fp8_report.measure_drift(
            HF, random_weights(HF, 0).get, batch, variants, groups, max_tokens=128
        )
        assert rows["again"]["max_abs"] < 1e-6 and 1e-4 < rows["rounded"]["max_abs"] < 1
    finally:
        shutdown()


def test_labels_come_from_the_policy_itself() -> None:
    """The mean log-probability of sampled labels is minus the entropy; of random ones it is far
    lower.
    """
    groups = initialize(ParallelConfig())
    try:
        policy = fp8_report.MegatronPolicy(
            HF,
            groups,
            ParallelConfig(),
            fp8_report.TrainConfig(),
            fp8_report.LossConfig(),
            temperature=1.0,
        )
        policy.load_weights(random_weights(HF, 0).get)
        batch = fp8_report.random_batch(4096, 128, HF.vocab_size, seed=0)
        sampled = fp8_report.sample_labels(policy, batch)
        assert torch.equal(sampled.tokens, batch.tokens) and sampled.labels.dtype == torch.int64

        def entropy(micro, output):
            logits = policy.head.head_input(output) @ policy.head.head_weight().t()
            logprobs = logits.double().log_softmax(-1)
            return -(logprobs.exp() * logprobs).sum(-1)

        expected = -float(policy.trainer.per_token(batch, entropy).mean())
        assert float(policy.logprobs(sampled).mean()) == pytest.approx(expected, abs=0.1)
        assert float(policy.logprobs(batch).mean()) < expected - 0.5
    finally:
        shutdown()


@pytest.mark.parametrize(
    ("machine", "asked", "message"),
    [
        (
            Device(None, None, None),
            None,
            "CUDA GPU and Transformer Engine; .*pip install",
        ),
        (Device((9, 0), (13, 0), None), None, "CUDA GPU and Transformer Engine"),
        (
            Device((9, 0), (13, 0), "2.11.0"),
            ["mxfp8"],
            "mxfp8 needs compute capability 10.0",
        ),
        (
            Device((8, 0), (13, 0), "2.11.0"),
            None,
            "8.9, not 8.0 for any",
        ),
    ],
)
def test_machines_that_cannot(machine: Device, asked: list[str] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fp8_report.choose_recipes(asked, machine)
    assert fp8_report.choose_recipes(None, Device((9, 0), (13, 0), "2.11.0")) == [
        "delayed",
        "tensorwise",
        "blockwise",
    ]


def test_every_variant_is_a_valid_configuration() -> None:
    variants = fp8_report.layouts(["tensorwise", "mxfp8"], "e4m3")
    assert list(variants)[0] == BF16 and variants[BF16].fp8 == "none"
    assert (variants["mxfp8"].fp8, variants["mxfp8"].recipe, variants["mxfp8"].bf16) == (
        "e4m3",
        "mxfp8",
        True,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, fp8_report.main, []).startswith("error: the FP8 report needs")
    assert collectives.rank() == 0
