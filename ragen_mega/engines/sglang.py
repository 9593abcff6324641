"""A rollout engine over a real SGLang server of its own (Zheng et al., arXiv:2312.07104): tokens in, tokens out.

Every completion is a request of its own, so that each trajectory advances at its own pace; SGLang batches what is there and
its radix cache keeps earlier turns and common prompts. A server that dies or hangs is replaced and what it owed asked again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.engines import sampling as sampler
from ragen_mega.engines.http_json import ConnectionLost, JSONClient, RequestRefused
from ragen_mega.engines.sglang_server import WEIGHT_LOADER, ServerFailed, ServerSettings, SGLangServer
from ragen_mega.engines.sglang_weights import BUCKET_BYTES, TRANSFERS, Message, WeightSender
from ragen_mega.rollout.engine import EngineShard
from ragen_mega.types import Completion, SamplingParams

_MAX_RESTARTS = 3
"""In a row, with no completion in between."""
_MAX_SEED = 2**31 - 1
_MEMORY = ("kv_cache", "weights", "cuda_graph")
_REQUEST_TIMEOUT = 600.0
"""Seconds for a request that only changes the server's state."""


@dataclass(slots=True)
class EngineCounts:
    """What happened since the engine was built."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the radix cache held."""
    completions: int = 0
    reissued: int = 0
    """Requests that were asked again because the server was lost."""
    restarts: int = 0


class SGLangEngine:
    """Runs one server. It starts when the engine first awakes and stays, asleep, between rollouts.

    Where several ranks share the server, this is the first of `group`, which they form; the others have an `SGLangFollower`.
    """

    def __init__(
        self,
        model_config: PretrainedConfig,
        settings: ServerSettings,
        *,
        group: dist.ProcessGroup | None = None,
        transfer: Literal["file", "ipc"] = "file",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.weight_version = 0
        self.shard = EngineShard(0, settings.tensor_parallel_size)
        self.counts = EngineCounts()
        self.skipped: dict[str, str] = {}
        """Requests that this server does not support -> why, e.g. memory release on a CPU."""
        self._settings = settings
        self._vocab = model_config.vocab_size
        dtype = getattr(torch, settings.dtype)
        self._transfer = TRANSFERS[transfer](
            model_config, self.shard, dtype, fp8=settings.fp8, group=group, bucket_bytes=bucket_bytes
        )
        self.server = SGLangServer(settings, model_config, weights=self._transfer.directory)
        self._is_awake = self._has_weights = False
        self._released: tuple[str, ...] = ()  # parts of the device's memory that the server has given back
        self._active: set[int] = set()  # sessions that wait for a completion
        self._restarts_in_a_row = 0
        self._last_answer = 0.0  # time.monotonic of the last sign of life
        self._probe: asyncio.Task[bool] | None = None

    @contextmanager
    def awake(self) -> Iterator[None]:
        """The server has memory of the device only inside; `load_weights` comes first."""
        if self._is_awake:
            raise RuntimeError("the engine is awake already; leave the first `with engine.awake()` before the next")
        self._has_weights = False
        if not self.server.num_starts:
            self._start()  # once: what does not start the first time is set up wrongly
        else:
            try:
                self._resume("weights")
            except ConnectionLost as error:
                self._restart(str(error), [])
        self._is_awake = True
        try:
            yield
        finally:
            self._is_awake = self._has_weights = False
            self._sleep()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send a full set of weights to the server, in buckets of bounded size, and check by checksums that it holds them.

        The stream is consumed to its end also when the server is lost, because other ranks take part in it. Raises
        ValueError unless exactly the expected names and shapes arrive, and EngineError if the server refuses them.
        """
        if not self._is_awake:
            raise RuntimeError("the engine is asleep; call load_weights inside `with engine.awake()`")
        if self._active:
            raise RuntimeError(f"{len(self._active)} sessions still generate under the old weights; await them first")
        self._has_weights = False
        self.weight_version += 1
        buckets = self._transfer.receive(weights)
        try:
            self._send(buckets)
            self._resume("kv_cache", "cuda_graph")  # only now, when the trainer needs no more room for the transfer
        except ConnectionLost as error:
            for _ in buckets:
                continue
            self._restart(str(error), self._transfer.again())
        self._has_weights = True

    async def generate(self, tokens: list[int], sampling: SamplingParams, *, session: int) -> Completion:
        """Sample what follows `tokens`. A context without room gives finish_reason "length", with no token if full.

        Log-probabilities are after temperature, before top_p. Samples of a server that is not `deterministic` depend on the
        batch that they were drawn in and not on `sampling.seed`.
        """
        self._check(tokens, sampling, session)
        room = self._settings.max_context - len(tokens)
        if room <= 0:
            return Completion([], [], "length")
        body = _request(tokens, sampling, max_tokens=min(sampling.max_tokens, room))
        self._active.add(session)
        try:
            while True:
                client = self.server.client
                try:
                    if client is None:
                        raise ConnectionLost("the server does not run")
                    answer = await self._ask(client, body)
                    break
                except ConnectionLost as error:
                    self.counts.reissued += 1
                    if client is self.server.client:  # the first to notice; the others find a new server
                        self._restart(str(error), self._transfer.again())
        finally:
            self._active.discard(session)
        return self._completion(answer, len(tokens), sampling)

    def release(self, session: int) -> None:
        """Nothing to do: the radix cache forgets what is not used."""

    def shutdown(self) -> None:
        """Stop the server and give back the memory of the weights."""
        self._is_awake = self._has_weights = False
        self.server.stop()
        self._transfer.close()

    def _check(self, tokens: list[int], sampling: SamplingParams, session: int) -> None:
        if not self._has_weights:
            raise RuntimeError("the engine has no weights; call load_weights inside `with engine.awake()` first")
        if not tokens:
            raise ValueError("generate needs at least one token to continue; render a prompt first")
        if min(tokens) < 0 or max(tokens) >= self._vocab:
            raise ValueError(
                f"token ids must lie in [0, {self._vocab}), not in [{min(tokens)}, {max(tokens)}]; "
                "check that the tokenizer belongs to the model"
            )
        sampler.check(sampling, vocab=self._vocab)
        if session in self._active:
            raise ValueError(f"session {session} already generates; await one completion before asking for the next")

    async def _ask(self, client: JSONClient, body: dict[str, Any]) -> dict[str, Any]:
        """The server's answer. Raises ConnectionLost also when the server has stopped to work."""
        request = asyncio.ensure_future(client.post("/generate", body))
        self._last_answer = time.monotonic()
        try:
            while not (await asyncio.wait({request}, timeout=self._settings.hang_timeout))[0]:
                silent = time.monotonic() - self._last_answer
                if silent >= self._settings.hang_timeout and not await self._is_alive(client):
                    raise ConnectionLost(f"the server has not answered for {silent:.0f} s")
            answer: dict[str, Any] = request.result()
            return answer
        finally:
            request.cancel()

    async def _is_alive(self, client: JSONClient) -> bool:
        """Whether the server still generates; asked once for all requests that wait."""
        loop = asyncio.get_running_loop()
        if self._probe is None or self._probe.done() or self._probe.get_loop() is not loop:
            self._probe = loop.create_task(asyncio.to_thread(self.server.is_healthy, client))
        is_alive = await asyncio.shield(self._probe)
        if is_alive:
            self._last_answer = time.monotonic()
        return is_alive

    def _completion(self, answer: dict[str, Any], prompt_length: int, sampling: SamplingParams) -> Completion:
        about = answer["meta_info"]
        reason = about["finish_reason"]
        if reason is None or reason["type"] not in ("stop", "length"):
            raise RuntimeError(f"the SGLang server gave up a request: {reason}; its log is {self.server.log}")
        if about["weight_version"] != str(self.weight_version):
            raise RuntimeError(
                f"a completion came from weight version {about['weight_version']}, the engine has {self.weight_version}"
            )
        sampled = about["output_token_logprobs"]  # (log-probability, token id, text or None) of each
        tokens, logprobs = [int(entry[1]) for entry in sampled], [entry[0] for entry in sampled]
        if tokens != list(answer["output_ids"]):
            raise RuntimeError("the SGLang server reports log-probabilities of other tokens than it sampled")
        if not all(value is not None and math.isfinite(value) for value in logprobs):
            raise FloatingPointError("the rollout engine computed non-finite logits: the weights have diverged")
        self.counts.completions += 1
        self.counts.prompt_tokens += prompt_length
        self.counts.cached_tokens += about["cached_tokens"]
        self._restarts_in_a_row = 0
        self._last_answer = time.monotonic()
        # SGLang says "length" of a stop token in the last place that was left.
        stopped = tokens[-1:] and tokens[-1] in sampling.stop_token_ids
        return Completion(tokens, logprobs, "stop" if stopped else "length")

    def _send(self, buckets: Iterable[list[Message]]) -> None:
        if self.server.client is None:
            raise ConnectionLost("the server does not run")
        sender = WeightSender(self.server.client, WEIGHT_LOADER, timeout=_REQUEST_TIMEOUT)
        sender.send(buckets, self.weight_version)

    def _restart(self, why: str, weights: list[list[Message]]) -> None:
        """A new server with these weights. Blocks: until it is there nobody can go on."""
        while True:
            self._restarts_in_a_row += 1
            if self._restarts_in_a_row > _MAX_RESTARTS:
                raise self.server.failure(f"the SGLang server was lost {_MAX_RESTARTS} times without a completion ({why})")
            self.counts.restarts += 1
            try:
                self._start()
                self._send(weights)
                return
            except (ConnectionLost, ServerFailed) as error:
                why = str(error).partition("\n")[0]

    def _sleep(self) -> None:
        """Release the device's memory; a server that cannot is stopped, and the next rollout starts another."""
        if not self.server.is_running:
            self.server.stop()
            return
        try:
            self._control("/abort_request", {"abort_all": True})
            # Waits for the end of what was cancelled: SGLang asserts that it is idle when it releases memory.
            self._control(f"/flush_cache?timeout={_REQUEST_TIMEOUT:g}", {})
            if self._control("/release_memory_occupation", {"tags": list(_MEMORY)}):
                self._released = _MEMORY
        except (ConnectionLost, ServerFailed):
            self.server.stop()

    def _start(self) -> None:
        self._released = ()
        self.server.start()

    def _resume(self, *parts: str) -> None:
        """Take memory again that was released; SGLang does not expect to be asked for other. Raises ConnectionLost."""
        if not self.server.is_running:
            raise ConnectionLost("the server does not run")
        if tags := [part for part in parts if part in self._released]:
            self._control("/resume_memory_occupation", {"tags": tags})
            self._released = tuple(part for part in self._released if part not in tags)

    def _control(self, path: str, body: dict[str, Any]) -> bool:
        """Change the server's state. What a CPU server refuses is skipped from then on, with the reason; then False."""
        if path in self.skipped:
            return False
        if self.server.client is None:
            raise ConnectionLost(f"{path}: the server does not run")
        try:
            self.server.client.call("POST", path, body, timeout=_REQUEST_TIMEOUT)
        except RequestRefused as error:
            if self._settings.device != "cpu":
                raise
            self.skipped[path] = str(error)
            return False
        return True


def _request(tokens: list[int], sampling: SamplingParams, *, max_tokens: int) -> dict[str, Any]:
    return {
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
