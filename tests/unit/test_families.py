"""Each family in the trainer against transformers: log-probabilities in float32, and an export of
every bit that was loaded. Qwen2 and Qwen3 in every layout: tools/parity.py.
"""

from pathlib import Path

import pytest
import torch

from ragen_mega.config import LossConfig, ParallelConfig, TrainConfig
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.models.families import FAMILIES
from ragen_mega.models.huggingface import load_config
from ragen_mega.storage.model_readers import open_model
from tools import parity

SCALED = {"head_dim": 20, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}
CASES = {
    "llama untied": ("llama", {"tie_word_embeddings": False} | SCALED),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None} | SCALED),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 5, "num_key_value_heads": 1, "norm_topk_prob": False} | SCALED,
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


def test_every_family_is_compared_with_transformers() -> None:
    compared = {model_type for model_type, _ in CASES.values()} | parity.ARCHITECTURES.keys()
    assert compared == FAMILIES.keys()
