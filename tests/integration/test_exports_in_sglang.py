"""A model that went through Megatron's format and back is served by the real SGLang as transformers
computes it, and the page on serving is followed word for word.

Needs an environment with SGLang: bash tools/setup_sglang_cpu.sh, then
RAGEN_SGLANG_PYTHON=.venv-sglang/bin/python.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from transformers import AutoModelForCausalLM

from ragen_mega.config import parse
from ragen_mega.engines.sglang.server import ServerSettings, SGLangServer
from ragen_mega.models.huggingface import load_config, load_tokenizer
from tests.support.converted_models import FLAGS, convert, write_start
from tests.support.serving_page import CLIENT, command
from tests.support.sglang_server import (
    DEVICE,
    DTYPE,
    IS_CUDA,
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
    sizes = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    cut = convert(start, tmp_path / "megatron", "megatron", **sizes)
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


@pytest.mark.slow
@pytest.mark.skipif(IS_CUDA, reason="the command of the page is for CPUs")
def test_the_examples_of_the_page_serve_and_play(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "NAME"
    run.mkdir(parents=True)
    write_start(tmp_path, "qwen2_tied").rename(run / "huggingface")
    (run / "config.json").write_text(json.dumps(parse(FLAGS).to_dict()))
    (tmp_path / ".venv-sglang").symlink_to(Path(PYTHON).parents[1])
    (tmp_path / "my_client.py").write_text(CLIENT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"no_proxy": "127.0.0.1"}

    def follow(words: list[str]) -> str:
        return subprocess.run(
            words, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        ).stdout

    with open(tmp_path / "log", "w") as log:
        serve = ["bash", "-c", command("SGLANG_USE_CPU_ENGINE=1 ", port)]
        server = subprocess.Popen(
            serve, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            assert server.poll() is None and time.monotonic() < deadline, (
                tmp_path / "log"
            ).read_text()[-2000:]
            try:
                urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            except (URLError, ConnectionError):
                time.sleep(1)
        answer = json.loads(follow(["bash", "-c", command("curl ", port)]))
        assert answer["model"] == "my-agent" and answer["choices"][0]["message"]["content"]
        address = f"http://127.0.0.1:{port}"
        played = follow([sys.executable, "my_client.py", "runs/NAME", address])
        assert played.splitlines()[-1].endswith(("True", "False")), "turn, reward and success"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
