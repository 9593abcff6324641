"""Adapters alone through the endpoints of a real SGLang server on a CPU, beside a base that is sent
once: the log-probabilities equal the merged weights' ones.

SGLang 0.5.17 pins memory for its adapters on every device, which a CPU refuses. The server's Python
is started with a module that leaves this out, and nothing else.
"""

from pathlib import Path

import pytest

from ragen_mega.config import LoraConfig
from ragen_mega.engines.sglang.engine import SGLangEngine
from ragen_mega.engines.sglang.http_json import RequestRefused
from ragen_mega.models.shape import ModelShape
from tests.support.sglang_server import (
    CONFIG,
    PYTHON,
    build_model,
    check_logprobs,
    converse_all,
    needs_sglang,
    settings,
    shards,
)
from tools.parity import merge, random_adapter

pytestmark = [*needs_sglang, pytest.mark.slow]
LORA = LoraConfig(lora_rank=3, lora_alpha=6.0)
WITHOUT_PINNING = """
import torch

def unpinned(make):
    return lambda *arguments, pin_memory=False, **named: make(*arguments, **named)

for name in ("tensor", "empty", "zeros", "ones"):
    setattr(torch, name, unpinned(getattr(torch, name)))
torch.Tensor.pin_memory = lambda tensor, *_: tensor
"""


def python_without_pinning(directory: Path) -> Path:
    (directory / "sitecustomize.py").write_text(WITHOUT_PINNING)
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={directory} exec {PYTHON} "$@"\n')
    python.chmod(0o700)
    return python


def test_adapters_beside_a_base_that_is_sent_once(tmp_path: Path) -> None:
    shape, base = ModelShape.of(CONFIG), build_model(1)
    python = python_without_pinning(tmp_path)
    engine = SGLangEngine(CONFIG, settings(tmp_path / "server", lora=LORA, python=python))
    try:
        for version in (1, 2, 3):
            adapter = random_adapter(shape, LORA, seed=version)
            merged = merge(base, adapter, LORA.scale)
            with engine.awake():
                assert engine.has_base == (version > 1)
                if version == 1:
                    engine.load_weights(shards(base))
                engine.load_adapter(adapter.items(), again=version == 1)
                engine.start()
                assert engine.weight_version == version
                if version == 3:
                    engine.server.stop()  # as if it had died: base and adapter come back
                for turns in converse_all(engine):
                    for prompt, answer in turns:
                        check_logprobs(merged, prompt, answer, 1.0)
            with pytest.raises(AssertionError):
                check_logprobs(base, prompt, answer, 1.0)
        body = {"input_ids": [5, 6, 7], "lora_path": "policy-1"}
        with engine.awake(), pytest.raises(RequestRefused):
            engine.server.client.call("POST", "/generate", body)  # an older one is not found
    finally:
        engine.shutdown()
