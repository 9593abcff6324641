"""Each family in the trainer against transformers: log-probabilities in float32, and an export of
every bit that was loaded. Qwen2 and Qwen3 in every layout: tools/parity.py.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ragen_mega.config import LossConfig, ParallelConfig, TrainConfig
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.models.families import FAMILIES
from ragen_mega.models.huggingface import load_config, random_weights
from ragen_mega.models.layout import split_experts
from ragen_mega.models.rotary import rotary_frequencies
from ragen_mega.models.shape import ModelShape
from ragen_mega.storage.model_readers import open_model
from tests.support.positions import LLAMA3
from tools import parity

WIDE = {"head_dim": 20, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}
CASES = {
    "llama untied": ("llama", {"tie_word_embeddings": False} | WIDE),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3, "head_dim": 20}),
    "mistral": ("mistral", {"sliding_window": None} | WIDE),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 5, "num_key_value_heads": 1, "norm_topk_prob": False} | WIDE,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logprobs_are_those_of_transformers_and_the_export_has_every_bit(
    case: str, tmp_path: Path
) -> None:
    model_type, changes = CASES[case]
    model = parity.random_model(model_type, **changes)
    model.save_pretrained(tmp_path)
    batch, parallel, train = parity.make_batch(model), ParallelConfig(), TrainConfig(lr=1e-3)
    policy = MegatronPolicy(
        load_config(str(tmp_path)), initialize(parallel), parallel, train, LossConfig(),
        temperature=parity.TEMPERATURE,
    )  # fmt: skip
    policy.load_weights(open_model(tmp_path))
    expected = parity.transformers_logprobs(model, batch)
    assert float((policy.logprobs(batch) - expected).abs().max()) < 1e-5 < float(-expected.min())
    stored = open_model(tmp_path)
    exported = dict(policy.export_weights())
    assert exported.keys() == set(stored.names())
    assert all(torch.equal(tensor, stored(name)) for name, tensor in exported.items())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rotary_frequencies_of_llama_3_are_those_of_transformers(
    head_dim: int, factor: float
) -> None:
    """With the numbers of Llama 3.1 and 3.2."""
    further = {"factor": factor, "original_max_position_embeddings": 8192, "rope_theta": 5e5}
    hf = AutoConfig.for_model("llama", head_dim=head_dim, rope_parameters=LLAMA3 | further)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](hf, "cpu")
    found = rotary_frequencies(ModelShape.of(hf))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", ["qwen2", *CASES])
def test_random_weights_are_distributed_as_those_of_transformers(case: str) -> None:
    model_type, changes = CASES.get(case, (case, {}))
    hf = parity.random_model(model_type, **changes).config
    drawn = random_weights(hf, seed=5)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf)
    expected = split_experts(model.state_dict(), ModelShape.of(hf))
    if hf.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert {name: x.shape for name, x in drawn.items()} == {n: x.shape for n, x in expected.items()}
    for name, tensor in drawn.items():
        if tensor.dim() == 1:
            assert torch.equal(tensor, expected[name])
            continue
        for numbers in (tensor, expected[name]):  # five standard errors
            few = 5 * numbers.numel() ** -0.5
            assert abs(float(numbers.mean())) < few * hf.initializer_range
            assert abs(float(numbers.std()) / hf.initializer_range - 1) < few / 2**0.5
    assert all(torch.equal(x, drawn[name]) for name, x in random_weights(hf, seed=5).items())
    matrix = "model.embed_tokens.weight"
    assert not torch.equal(random_weights(hf, seed=6)[matrix], drawn[matrix])


def test_every_family_is_compared_with_transformers() -> None:
    compared = {model_type for model_type, _ in CASES.values()} | parity.ARCHITECTURES.keys()
    assert compared == FAMILIES.keys()
