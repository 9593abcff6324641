"""What an engine could not serve here is said before anything is built."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen3MoeConfig

from ragen_mega.config import parse
from ragen_mega.megatron import precision
from ragen_mega.ranks import collectives
from ragen_mega.run import build
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


MIXTURE = Qwen3MoeConfig(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_experts=6,
    moe_intermediate_size=64,
)  # fmt: skip
SHARED = "--rollout-expert-parallel-size"
TWO = f"--rollout-tensor-parallel-size 2 {SHARED} 2"


@pytest.mark.parametrize(
    ("flags", "capability", "message"),
    [
        ("", None, None),
        ("--bf16", (9, 0), None),
        ("--rollout-tensor-parallel-size 2", None, None),
        (TWO, None, rf"\(2\) needs a GPU.*drop {SHARED}"),
        (f"--bf16 {TWO}", (9, 0), None),
        (f"--rollout-tensor-parallel-size 4 {SHARED} 4", (9, 0), r"\(4\) must divide .*\(6\)"),
        ("--bf16 --rollout-fp8", (9, 0), "--rollout-fp8 .* qwen3_moe .*; drop --rollout-fp8"),
    ],
)
def test_mixtures_on_a_server(
    flags: str,
    capability: tuple[int, int] | None,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = replace(precision.Device.here(), capability=capability)
    monkeypatch.setattr(precision.Device, "here", lambda: here)
    monkeypatch.setattr(collectives, "world_size", lambda: 4)
    config = parse(["--rollout-engine", "sglang", *flags.split()])
    if message is None:
        check_engine(config, MIXTURE)
        return
    with pytest.raises(ValueError, match=message) as caught:
        check_engine(config, MIXTURE)
    assert "\n" not in str(caught.value)


DENSE = Qwen2Config(
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2
)
GIVEN = "--engine-addresses elsewhere:1"
APART = "--placement separate --rollout-ranks 2 --importance-cap 2"


@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [
        ("", True),
        ("--bf16", False),
        (APART, True),
        (GIVEN, False),  # the user's: they say their type
        (f"{GIVEN} {APART}", True),  # trainers have servers of the run, for evaluations
    ],
)
def test_servers_have_no_float32_on_gpus(
    flags: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sgl-kernel 0.4.5 has `rmsnorm` for float16 and bfloat16, and FlashAttention 3 too."""
    here = replace(precision.Device.here(), capability=(9, 0))
    monkeypatch.setattr(precision.Device, "here", lambda: here)
    monkeypatch.setattr(build, "check_given_engines", lambda *about: None)
    config = parse(["--rollout-engine", "sglang", *flags.split()])
    check_engine(parse([]), DENSE)  # the embedded engine has float32 everywhere
    if not is_refused:
        check_engine(config, DENSE)
        return
    with pytest.raises(ValueError, match=r"needs bf16 on GPUs.*; add --bf16, or set") as caught:
        check_engine(config, DENSE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_fp8_servers_need_the_scales_of_ada_and_hopper(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(precision.Device.here(), capability=capability)
    monkeypatch.setattr(precision.Device, "here", lambda: here)
    config = parse("--rollout-engine sglang --bf16 --rollout-fp8".split())
    in_blocks = Qwen2Config(
        hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2
    )
    if capability in [(8, 9), (9, 0)]:
        check_engine(config, in_blocks)
        return
    said = rf"8\.9 or 9\.0 .* one of {capability[0]}\.{capability[1]}; drop --rollout-fp8$"
    with pytest.raises(ValueError, match=said):
        check_engine(config, in_blocks)


def test_a_dense_model_has_no_experts_to_share() -> None:
    config = parse(f"--rollout-engine sglang {TWO}".split())
    dense = Qwen2Config(num_attention_heads=4, num_key_value_heads=4)
    with pytest.raises(ValueError, match=r"\(2\) must divide the model's experts \(none\); drop"):
        check_engine(config, dense)
    with pytest.raises(ValueError, match=rf"\(2\) must be 1 or .* \(4\); set {SHARED} 4"):
        parse(f"--rollout-engine sglang --rollout-tensor-parallel-size 4 {SHARED} 2".split())


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
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    flags = ("--rollout-engine", "sglang", "--sglang-python", str(tmp_path / "python"))
    command = server_settings(parse(flags)).arguments(Path("model"), 1)
    for name, value in (("--device", "cuda"), ("--base-gpu-id", "3")):
        assert command[command.index(name) + 1] == value


def test_a_quotation_without_an_end() -> None:
    with pytest.raises(ValueError, match="sglang_arguments must be .*, not"):
        check_engine(
            parse(["--rollout-engine", "sglang", "--sglang-arguments", "'a"]), Qwen2Config()
        )
