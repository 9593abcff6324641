"""A model that went through Megatron's format and back is served by the real SGLang as transformers
computes it.

Needs an environment with SGLang: bash tools/setup_sglang_cpu.sh, then
RAGEN_SGLANG_PYTHON=.venv-sglang/bin/python.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ragen_mega.engines.sglang.server import ServerSettings, SGLangServer
from ragen_mega.models.huggingface import load_config, load_tokenizer
from tests.support.converted_models import convert, write_start
from tests.support.sglang_server import (
    DEVICE,
    DTYPE,
    PYTHON,
    START_TIMEOUT,
    check_close,
    needs_sglang,
)

pytestmark = needs_sglang
TEXT = "<|im_start|>user\nWhich arm?<|im_end|>\n"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen2_tied", "qwen3_untied"])
def test_sglang_serves_a_converted_model(architecture: str, tmp_path: Path) -> None:
    start = write_start(tmp_path, architecture)
    cut = convert(start, tmp_path / "megatron", "megatron", tp=2, pp=2)
    export = convert(cut, tmp_path / "export", "huggingface")
    options = {"model-path": export, "load-format": "auto", "skip-tokenizer-init": False}
    settings = ServerSettings(
        python=Path(PYTHON),
        directory=tmp_path / "server",
        max_context=100,
        max_running_requests=2,
        kv_cache_tokens=1024,
        device=DEVICE,
        dtype=str(DTYPE).removeprefix("torch."),
        start_timeout=START_TIMEOUT,
        hang_timeout=120.0,
        options=options,
    )
    server = SGLangServer(settings, load_config(str(export)), weights=tmp_path / "none")
    client = server.start()
    try:
        sampling = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}
        body = {"text": TEXT, "return_logprob": True, "sampling_params": sampling}
        answer = client.call("POST", "/generate", body, timeout=300.0)
    finally:
        server.stop()

    prompt = load_tokenizer(str(start)).encode(TEXT)
    assert answer["meta_info"]["prompt_tokens"] == len(prompt)
    logprobs, tokens = zip(*(entry[:2] for entry in answer["meta_info"]["output_token_logprobs"]))
    model = (
        AutoModelForCausalLM.from_pretrained(start).to(DTYPE).float().eval()
    )  # rounded as the server's weights are
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert len(tokens) == 8
    check_close(torch.tensor(logprobs), expected)
