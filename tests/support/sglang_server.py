"""A tiny model for the real SGLang server, conversations with it, and the log-probabilities that
transformers expects.

Needs an environment with SGLang: bash tools/setup_sglang_cpu.sh, then
RAGEN_SGLANG_PYTHON=.venv-sglang/bin/python.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from ragen_mega.data.types import Completion, SamplingParams
from ragen_mega.engines.sglang.engine import SGLangEngine
from ragen_mega.engines.sglang.server import ServerSettings
from ragen_mega.engines.sglang.supervisor import kill_descendants
from ragen_mega.models.server_cut import cut_stream
from ragen_mega.rollout.engine import EngineShard
from tests.support.positions import LLAMA3

PYTHON = os.environ.get("RAGEN_SGLANG_PYTHON") and os.path.abspath(
    os.environ["RAGEN_SGLANG_PYTHON"]
)
needs_sglang = [
    pytest.mark.skipif(
        not PYTHON,
        reason=(
            "RAGEN_SGLANG_PYTHON names no Python with SGLang; build one: bash"
            " tools/setup_sglang_cpu.sh"
        ),
    ),
    pytest.mark.timeout(1500),
]
IS_CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if IS_CUDA else ("cpu", torch.float32)
TOLERANCE, MEAN_TOLERANCE = (1.0, 0.15) if IS_CUDA else (1e-4, 1e-4)
"""Of one log-probability and of the mean of a completion's. The expected ones are computed in
float32 from the weights as the server holds them. In bfloat16 these models, whose weights are
large, are that far off in transformers too: over 6400 sampled tokens at temperature 0.7 by 0.54 at
most and 0.045 in the mean. Under other weights the mean would be above 1.
"""
START_TIMEOUT = 120.0 if IS_CUDA else 1200.0
VOCAB = 400
MAX_CONTEXT = 400
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
}
CONFIG = Qwen2Config(**SIZES, tie_word_embeddings=True)
OTHER_FAMILIES = {
    "llama": LlamaConfig(**SIZES, head_dim=32, tie_word_embeddings=True),
    "llama3_untied": LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=False),
    "mistral": MistralConfig(**SIZES, sliding_window=None, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
}


def build_model(seed: int, config: PreTrainedConfig = CONFIG) -> PreTrainedModel:
    """In float32, with weights that the server's type holds exactly."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():  # biases start at 0 and norms at 1, which would hide a mistake
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            parameter.copy_(parameter.to(DTYPE))
    return model


def shards(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    return cut_stream(model.state_dict().items(), model.config, *EngineShard())


def settings(directory: Path, **changes: object) -> ServerSettings:
    values = {
        "python": Path(PYTHON),
        "directory": directory,
        "max_context": MAX_CONTEXT,
        "max_running_requests": 16,
        "kv_cache_tokens": 8192,
        "device": DEVICE,
        "dtype": str(DTYPE).removeprefix("torch."),
        "start_timeout": START_TIMEOUT,
        "hang_timeout": 120.0,
    }
    return ServerSettings(**(values | changes))


def random_tokens(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(VOCAB) for _ in range(count)]


def check_logprobs(
    model: PreTrainedModel, prompt: list[int], answer: Completion, temperature: float
) -> None:
    with torch.inference_mode():
        logits = (
            model(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
            / temperature
        )
    expected = torch.log_softmax(logits, dim=-1).gather(-1, torch.tensor(answer.tokens)[:, None])[
        :, 0
    ]
    check_close(torch.tensor(answer.logprobs), expected)


def check_close(logprobs: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logprobs, expected, atol=TOLERANCE, rtol=0.0)
    assert float((logprobs - expected).abs().sum()) <= MEAN_TOLERANCE * len(expected)


async def converse(
    engine: SGLangEngine, session: int, *, temperature: float
) -> list[tuple[list[int], Completion]]:
    """Three turns with random observations: (prompt, answer) of each."""
    generator = random.Random(session)
    tokens, turns = random_tokens(random.Random(0), 30) + random_tokens(generator, 5), []
    for turn in range(3):
        sampling = SamplingParams(
            12, temperature=temperature, stop_token_ids=(7, 8), seed=10 * session + turn
        )
        answer = await engine.generate(list(tokens), sampling, session=session)
        turns.append((list(tokens), answer))
        tokens += answer.tokens + random_tokens(generator, 3)
    engine.release(session)
    return turns


def converse_all(
    engine: SGLangEngine, *, temperature: float = 1.0
) -> list[list[tuple[list[int], Completion]]]:
    async def everything() -> list[list[tuple[list[int], Completion]]]:
        return await asyncio.gather(
            *(converse(engine, session, temperature=temperature) for session in range(6))
        )

    return asyncio.run(everything())


@contextmanager
def users_server(model: Path, directory: Path, *flags: str) -> Iterator[tuple[str, Path]]:
    """Give the address of a server as a user starts it, and the file of its log, for the block: it
    has no weight loader of ours, no key and no memory saver.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    kind = str(DTYPE).removeprefix("torch.")
    own = "--mem-fraction-static 0.3" if IS_CUDA else "--attention-backend torch_native"
    arguments = f"""
        --model-path {model} --device {DEVICE} --dtype {kind} --host 127.0.0.1 --port {port} {own}
        --sampling-backend pytorch --grammar-backend none --skip-server-warmup --sleep-on-idle
        --skip-tokenizer-init --max-total-tokens 8192 --max-running-requests 16
        --context-length {MAX_CONTEXT + 16} --log-level warning --disable-cuda-graph
    """
    log = directory / "server.log"
    environment = settings(directory).environment(directory / "rendezvous")
    del environment["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(PYTHON), "-m", "sglang.launch_server", *arguments.split(), *flags],
            stdout=file,
            stderr=file,
            env=environment,
            cwd=directory,
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            try:
                url = f"http://127.0.0.1:{port}/health_generate"
                with urllib.request.urlopen(url, timeout=60.0) as answer:
                    if answer.status == 200:
                        break
            except OSError:
                time.sleep(0.5)
        yield f"127.0.0.1:{port}", log
    finally:
        kill_descendants(process.pid)
        process.kill()
        process.wait()
