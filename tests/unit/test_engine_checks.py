"""What an engine could not serve here is said before anything is built."""

import pytest
from transformers import Qwen2Config

from ragen_mega.config import parse
from ragen_mega.run.build import check_engine


@pytest.mark.parametrize(
    ("flags", "ffn_size", "message"),
    [
        (
            "--rollout-tensor-parallel-size 2",
            128,
            r"must divide the ranks of a node \(1\) and of the job \(1\)",
        ),
        (
            "",
            48,
            (
                r"SGLang on a CPU adds .* rows of the feed-forward layer \(48\) up to one of 32"
                r" times it"
            ),
        ),
        ("--rollout-fp8", 128, "rollout_fp8 needs a GPU .* here is none; drop --rollout-fp8"),
    ],
)
def test_one_line_before_training(flags: str, ffn_size: int, message: str) -> None:
    config = parse(["--rollout-engine", "sglang", *flags.split()])
    hf = Qwen2Config(
        hidden_size=64, intermediate_size=ffn_size, num_attention_heads=4, num_key_value_heads=2
    )
    with pytest.raises(ValueError, match=message) as caught:
        check_engine(config, hf)
    assert "\n" not in str(caught.value)
    check_engine(parse([]), hf)  # the embedded engine takes them all
