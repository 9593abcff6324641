"""What an engine could not serve here is said before anything is built."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen3MoeConfig

from ragen_mega.config import parse
from ragen_mega.run.build import check_engine, server_settings


@pytest.mark.parametrize(
    ("flags", "ffn_size", "message"),
    [
        (
            "",
            48,
            r"CPU .* feed-forward layer \(48\) .* 32",
        ),
        ("--rollout-fp8", 128, "needs a GPU .*; drop --rollout-fp8"),
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


def test_a_server_gets_no_mixture_of_experts() -> None:
    hf = Qwen3MoeConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(ValueError, match="sglang .* mixture of experts .*; use --rollout-engine"):
        check_engine(parse(["--rollout-engine", "sglang"]), hf)
    check_engine(parse([]), hf)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            "echo usage >&2; echo 'sglang: error: unrecognized arguments: --nope' >&2; exit 2",
            "--sglang-arguments .--nope 'a b'.: .*unrecognized",
        ),
        (
            'echo \'["tp_size", "port"]\'',
            "must not change tp_size, port",
        ),
        ("echo a warning; echo '[]'", None),
    ],
)
def test_arguments_of_the_server_are_its_own_parsers_to_judge(
    answer: str, message: str | None, tmp_path: Path
) -> None:
    """tests/integration/test_sglang_engine.py asks the real one."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo "$3" > {tmp_path}/asked\n{answer}\n')
    python.chmod(0o700)
    flags = ["--rollout-engine", "sglang", "--sglang-python", str(python)]
    config = parse([*flags, "--sglang-arguments=--nope 'a b'"])
    hf = Qwen2Config(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2
    )
    if message is None:
        check_engine(config, hf)
    else:
        with pytest.raises(ValueError, match=message) as caught:
            check_engine(config, hf)
        assert "\n" not in str(caught.value)
    assert (tmp_path / "asked").read_text().count('"--nope", "a b"') == 1
    assert server_settings(config).arguments(Path("model"), 1)[-2:] == ["--nope", "a b"]


def test_how_long_a_server_may_take_to_start(tmp_path: Path) -> None:
    (tmp_path / "python").touch(0o700)
    python = ("--rollout-engine", "sglang", "--sglang-python", str(tmp_path / "python"))

    def seconds(*flags: str) -> float:
        return server_settings(parse([*python, *flags])).start_timeout

    assert seconds() == 300 and seconds("--sglang-start-timeout", "7") == 7


def test_a_server_takes_the_device_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").touch(0o700)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    flags = ("--rollout-engine", "sglang", "--sglang-python", str(tmp_path / "python"))
    command = server_settings(parse(flags)).arguments(Path("model"), 1)
    for name, value in (("--device", "cuda"), ("--base-gpu-id", "3")):
        assert command[command.index(name) + 1] == value


def test_a_quotation_without_an_end() -> None:
    with pytest.raises(ValueError, match="sglang_arguments must be .*, not"):
        check_engine(
            parse(["--rollout-engine", "sglang", "--sglang-arguments", "'a"]), Qwen2Config()
        )
