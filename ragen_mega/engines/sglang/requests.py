"""Completions of an SGLang server: the request, the conditions on its answer, and the end of
waiting for one.
"""

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ragen_mega.data.types import Completion, SamplingParams
from ragen_mega.engines.sglang.http_json import ConnectionLost, JSONClient
from ragen_mega.ranks.waits import here

_MAX_SEED = 2**31 - 1


def request_body(
    tokens: list[int],
    sampling: SamplingParams,
    *,
    max_tokens: int,
    asks_routes: bool = False,
    adapter: str | None = None,
) -> dict[str, Any]:
    """Return the body of a request to `/generate`."""
    routes = {"return_routed_experts": True, "routed_experts_start_len": sampling.num_recorded}
    return {
        **(routes if asks_routes else {}),
        **({} if adapter is None else {"lora_path": adapter}),
        "input_ids": tokens,
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1,
            "stop_token_ids": list(sampling.stop_token_ids),
            "skip_special_tokens": False,
            "sampling_seed": sampling.seed % _MAX_SEED,
        },
    }


def is_aborted(answer: dict[str, Any]) -> bool:
    """Return whether the server was asked to end this request early."""
    reason = answer["meta_info"]["finish_reason"]
    return reason is not None and reason["type"] == "abort"


def read_completion(
    answer: dict[str, Any], sampling: SamplingParams, *, version: int, log: Path | str
) -> Completion:
    """Return the completion that `/generate` answered with.

    Raises RuntimeError if it is not a completion, or comes from other weights than `version`, and
    FloatingPointError for non-finite numbers.
    """
    about = answer["meta_info"]
    reason = about["finish_reason"]
    if reason is None or reason["type"] not in ("stop", "length"):
        raise RuntimeError(f"the SGLang server gave up a request: {reason}; its log is {log}")
    if about["weight_version"] != str(version):
        raise RuntimeError(
            f"a completion came from weight version {about['weight_version']}, the engine has"
            f" {version}"
        )
    sampled = about["output_token_logprobs"]  # (log-probability, token id, text or None) of each
    tokens, logprobs = [int(entry[1]) for entry in sampled], [entry[0] for entry in sampled]
    if tokens != list(answer["output_ids"]):
        raise RuntimeError(
            "the SGLang server reports log-probabilities of other tokens than it sampled"
        )
    if not all(value is not None and math.isfinite(value) for value in logprobs):
        raise FloatingPointError(
            "the rollout engine computed non-finite logits: the weights have diverged"
        )
    # SGLang says "length" for a stop token in the last place that was left.
    stopped = tokens[-1:] and tokens[-1] in sampling.stop_token_ids
    return Completion(tokens, logprobs, "stop" if stopped else "length")


class Requests:
    """Requests to a server that may hang instead of ending."""

    def __init__(self, is_healthy: Callable[[JSONClient], bool], *, hang_timeout: float) -> None:
        """A server from which nothing has come for `hang_timeout` seconds must be `is_healthy`,
        which blocks.
        """
        self._is_healthy = is_healthy
        self._hang_timeout = hang_timeout
        self._last_answer = 0.0  # time.monotonic of the last sign of life
        self._probe: asyncio.Task[bool] | None = None

    async def ask(self, client: JSONClient, body: dict[str, Any]) -> dict[str, Any]:
        """Return the server's answer. Raises ConnectionLost also when the server hangs."""
        request = asyncio.ensure_future(client.post("/generate", body))
        self._last_answer = time.monotonic()
        with here.requesting(f"/generate to {client.address}"):
            try:
                while not (await asyncio.wait({request}, timeout=self._hang_timeout))[0]:
                    silent = time.monotonic() - self._last_answer
                    if silent >= self._hang_timeout and not await self._is_alive(client):
                        raise ConnectionLost(f"the server has not answered for {silent:.0f} s")
                answer: dict[str, Any] = request.result()
            finally:
                request.cancel()
        self._last_answer = time.monotonic()
        return answer

    async def _is_alive(self, client: JSONClient) -> bool:
        """Return whether the server still generates; asked once for all requests that wait."""
        loop = asyncio.get_running_loop()
        if self._probe is None or self._probe.done() or self._probe.get_loop() is not loop:
            self._probe = loop.create_task(asyncio.to_thread(self._is_healthy, client))
        is_alive = await asyncio.shield(self._probe)
        if is_alive:
            self._last_answer = time.monotonic()
        return is_alive
