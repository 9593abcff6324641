"""Find out with which settings SGLang serves on this GPU: with all CUDA graphs or none, weights by
IPC or files, able to sleep.

    python tools/sglang_probe.py --python PYTHON --json probe.json

A small model is served as in training, twice: weights sent, two turns sampled and compared with
transformers, asleep. A failed setting is tried again with less, and every attempt is reported with
its reason and the end of the server's log. Standard output is two lines for tools/gpu_check.sh, the
weight transfer and the server flags to add; exit code 1 if nothing works.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from ragen_mega.commands.command_line import JSON, command, flag
from ragen_mega.data.types import SamplingParams
from ragen_mega.engines.sglang.engine import SGLangEngine
from ragen_mega.engines.sglang.server import ServerFailed, ServerSettings
from ragen_mega.models.server_cut import cut_stream
from ragen_mega.report.metrics import write_json
from ragen_mega.rollout.engine import EngineShard

OPTIONS: dict[str, dict[str, bool]] = {
    "": {},
    "--disable-prefill-cuda-graph": {"disable-prefill-cuda-graph": True},
    "--disable-cuda-graph": {"disable-cuda-graph": True},
    # asleep it then keeps its memory
    "without --enable-memory-saver": {"enable-memory-saver": False},
}
"""Description -> further server options."""
Transfer = Literal["ipc", "file"]
TRANSFERS: tuple[Transfer, ...] = ("ipc", "file")
MAX_CONTEXT, TURN = 256, 32
CONFIG = Qwen2Config(  # heads as in Qwen2.5-0.5B, so that its kernels are compiled here
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    initializer_range=0.1,
    max_position_embeddings=512,
)
LARGEST_MEAN = 0.15
"""Bound of the mean difference of log-probabilities in bfloat16; other weights give above 0.5."""


class Failed(RuntimeError):
    """The server does not serve, or gives wrong numbers."""


class NotStarted(Failed):
    """The server does not start."""


def first_that_works(
    attempt: Callable[[Transfer, str], dict[str, Any]], report: Callable[[dict[str, Any]], None]
) -> tuple[Transfer, str] | None:
    """Return the first (way of the weights, key of OPTIONS) for which `attempt` does not raise
    Failed.

    Options under which the server has not started are not tried again with another way of the
    weights.
    """
    for options in OPTIONS:
        for transfer in TRANSFERS:
            about = {"weight_transfer": transfer, "options": options}
            try:
                report(about | {"error": None} | attempt(transfer, options))
                return transfer, options
            except Failed as error:
                report(about | {"error": str(error)})
                if isinstance(error, NotStarted):
                    break
    return None


def serve(settings: ServerSettings, transfer: Transfer) -> dict[str, Any]:
    """Return two rollouts, and their cost. Raises Failed, with the end of the server's log."""
    engine = SGLangEngine(CONFIG, settings, transfer=transfer, bucket_bytes=256 * 1024)
    rollouts, is_started = [], False
    try:
        for seed in (1, 2):
            model, times = build_model(seed, getattr(torch, settings.dtype)), [time.monotonic()]
            with engine.awake():
                is_started = True
                times.append(time.monotonic())
                engine.load_weights(cut_stream(model.state_dict().items(), CONFIG, *EngineShard()))
                engine.start()
                times.append(time.monotonic())
                mean = asyncio.run(mean_difference(engine, model))
                times.append(time.monotonic())
                memory = {"awake_free_gib": free_gib()}
            times.append(time.monotonic())
            memory["asleep_free_gib"] = free_gib()
            names = ("start_or_wake", "send", "generate", "sleep")
            seconds = {
                f"{name}_seconds": end - start
                for name, start, end in zip(names, times, times[1:], strict=False)
            }
            rollouts.append(seconds | memory | {"logprob_mean_abs_diff": mean})
            if mean > LARGEST_MEAN:
                raise RuntimeError(
                    f"log-probabilities differ from transformers' by {mean:.3f} in the mean"
                )
        if engine.server.num_starts > 1:
            raise RuntimeError("the server was lost and replaced")
    except (RuntimeError, ArithmeticError) as error:
        message = (
            error
            if isinstance(error, ServerFailed)
            else engine.server.failure(f"{type(error).__name__}: {error}")
        )
        raise (Failed if is_started else NotStarted)(str(message)) from error
    finally:
        engine.shutdown()
    return {"rollouts": rollouts}


def build_model(seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """Build a float32 model with weights that `dtype` holds exactly."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(CONFIG).type(dtype).float().eval()


async def mean_difference(engine: SGLangEngine, model: PreTrainedModel) -> float:
    """Measure the mean difference between the log-probabilities of the engine and of `model`, over
    eight conversations of two turns.
    """

    async def converse(session: int) -> list[torch.Tensor]:
        tokens, found = [(7 * session + 3 * i) % CONFIG.vocab_size for i in range(40 + session)], []
        for turn in range(2):  # the second finds the first in the radix cache
            prompt = list(tokens)
            answer = await engine.generate(
                prompt, SamplingParams(TURN, seed=2 * session + turn), session=session
            )
            tokens += answer.tokens + [session] * 5
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + answer.tokens])).logits[
                    0, len(prompt) - 1 : -1
                ]
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
            found.append((torch.tensor(answer.logprobs) - expected).abs())
        return found

    parts = await asyncio.gather(*map(converse, range(8)))
    return float(torch.cat([difference for part in parts for difference in part]).mean())


def free_gib() -> float:
    """Return the free memory of the whole device, in GiB; 0 without one."""
    return torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0.0


@command(
    __doc__,
    flag("--python", "of an environment with SGLang", type=Path, required=True),
    flag("--directory", "for the servers", Path("sglang_probe")),
    flag("--start-timeout", "seconds; kernels are compiled in the first start", 240.0),
    JSON,
)
def main(arguments: argparse.Namespace) -> int:
    on_gpu, attempts = torch.cuda.is_available(), list[dict[str, Any]]()

    def attempt(transfer: Transfer, options: str) -> dict[str, Any]:
        settings = ServerSettings(
            python=arguments.python,
            directory=arguments.directory / f"probe_{len(attempts)}",
            max_context=MAX_CONTEXT,
            max_running_requests=16,
            kv_cache_tokens=2**20 if on_gpu else 4096,
            start_timeout=arguments.start_timeout,
            device="cuda" if on_gpu else "cpu",
            dtype="bfloat16" if on_gpu else "float32",
            options=OPTIONS[options],
        )
        return serve(settings, transfer)

    def report(about: dict[str, Any]) -> None:
        attempts.append(about)
        print(json.dumps(about, indent=1), file=sys.stderr, flush=True)
        if arguments.json:
            write_json(arguments.json, {"attempts": attempts})

    works = first_that_works(attempt, report)
    if works is None:
        print("error: SGLang serves with none of these settings", file=sys.stderr)
        return 1
    if len(attempts) > 1:
        print(
            f"what works is {' '.join(works)}; the parts that use SGLang go on with that",
            file=sys.stderr,
        )
    print(*works, sep="\n")
    return 0


if __name__ == "__main__":
    main()
