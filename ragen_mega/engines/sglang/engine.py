"""A rollout engine over a real SGLang server (Zheng et al., arXiv:2312.07104), of its own or the
user's: tokens in, tokens out. The ranks that share a server have one engine and followers.

Every completion is its own request, so that each trajectory advances at its own pace; SGLang
batches what is there and its radix cache keeps earlier turns and common prompts. A server that dies
or hangs is replaced and its open requests are sent again.
"""

import enum
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.data.types import Completion, SamplingParams
from ragen_mega.engines.sglang.adapter import ServedAdapter
from ragen_mega.engines.sglang.given import GivenServer
from ragen_mega.engines.sglang.group import GroupTransfer
from ragen_mega.engines.sglang.http_json import ConnectionLost, RequestRefused
from ragen_mega.engines.sglang.requests import Requests, is_aborted, read_completion, request_body
from ragen_mega.engines.sglang.routes import with_routes
from ragen_mega.engines.sglang.server import ServerFailed, ServerSettings, SGLangServer
from ragen_mega.engines.sglang.weights import (
    BUCKET_BYTES,
    TRANSFERS,
    WeightTransfer,
)
from ragen_mega.models.shape import ModelShape
from ragen_mega.ranks import collectives
from ragen_mega.rollout.engine import (
    EngineCounts,
    EngineError,
    EngineShard,
    Interrupted,
    RolloutEngine,
    WeightsLost,
)

_MAX_RESTARTS = 3
"""Consecutive restarts, with no completion in between."""
_MEMORY = ("kv_cache", "weights", "cuda_graph")
_FLUSH_SECONDS = 600


class _Stage(enum.IntEnum):
    """Contents of the device memory of the server."""

    ASLEEP = 0
    AWAKE = 1  # room for weights
    LOADED = 2  # weights
    STARTED = 3  # weights and key-value cache


class SGLangEngine(RolloutEngine):
    """Runs one server. It starts when the engine first wakes and stays, asleep, between rollouts.

    Where several ranks share the server, this is the first of `group`, which they form; the others
    have an `SGLangFollower`. Sessions are not released: the radix cache forgets what is not used.
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
        self.counts = EngineCounts()
        self.num_slots = min(
            settings.max_running_requests, settings.kv_cache_tokens // settings.max_context
        )
        self._settings = settings
        self._shape = ModelShape.of(model_config)
        dtype, size = getattr(torch, settings.dtype), settings.tensor_parallel_size
        self._transfer: WeightTransfer | GroupTransfer
        self.server: SGLangServer | GivenServer
        if settings.address is not None:
            self.shard = None
            self._transfer = GroupTransfer(
                model_config,
                dtype,
                num_engine_ranks=size,
                address=settings.address,
                bucket_bytes=bucket_bytes,
                patience=settings.hang_timeout,
                group=group,
            )
            self.server = GivenServer(settings, model_config)
        else:
            self.shard = EngineShard(0, size, settings.expert_parallel_size)
            served = TRANSFERS[transfer](
                model_config,
                self.shard,
                dtype,
                fp8=settings.fp8,
                group=group,
                bucket_bytes=bucket_bytes,
            )
            self._transfer = served
            self.server = SGLangServer(settings, model_config, weights=served.directory)
        self._stage = _Stage.ASLEEP
        self._released: set[str] = set()  # device memory that the server has given back
        self._must_free = False  # whether the server has to show that it gives memory back
        self._base_of: int | None = None  # the start of the server that was sent weights
        self._adapter: ServedAdapter | None = None
        self._served: str | None = None  # the name of the adapter that the server has
        self._why_lost: str | None = None  # the reason since which the server has no weights
        self._active: set[int] = set()  # sessions that wait for a completion
        self._restarts_in_a_row = 0
        self._num_pauses = 0  # each aborts what the server works on
        self._requests = Requests(settings.is_healthy, hang_timeout=settings.hang_timeout)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Give the server device memory for the block: at first only for the weights that
        `load_weights` sends.
        """
        if self._stage is not _Stage.ASLEEP:
            raise RuntimeError(
                "the engine is awake already; leave the first `with engine.awake()` before the next"
            )
        with _among(self._transfer):
            self._wake()
            self._stage, is_interrupted = _Stage.AWAKE, False
            try:
                yield
            except Interrupted:
                is_interrupted = True
                raise
            finally:
                self._stage = _Stage.ASLEEP
                try:
                    self._sleep()
                except EngineError:
                    if not is_interrupted:
                        raise
                    self.server.stop()  # its memory is for the checkpoint, which comes next

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, again: bool = False) -> None:
        """Send a full set of weights to the server, in buckets of bounded size, and check by
        checksums that it holds them.

        It then waits for `start`. `again`: the same weights once more after a `pause`, because an
        engine has lost them. The stream is consumed to its end even when the server or the transfer
        fails, because other ranks take part in it. Raises ValueError unless exactly the expected
        names and shapes arrive, and EngineError if the server refuses them or shared memory has no
        room for them.
        """
        self._require(_Stage.AWAKE)
        if self._active and not again:
            raise RuntimeError(
                f"{len(self._active)} sessions still generate under the old weights; await them"
                " first"
            )
        self._stage = _Stage.AWAKE
        self.weight_version += not again
        buckets: Iterator[Any] = self._transfer.receive(weights)  # starts at the first bucket
        try:
            if again:
                self._wake()
            self._transfer.deliver(self.server.client, buckets, self.weight_version)
            self._why_lost = None
        except EngineError as error:
            for _ in buckets:
                continue
            if not isinstance(error, ConnectionLost):
                raise
            # Without a copy of the weights the next caller of `generate` finds none.
            self._replace(str(error))
        self._stage = _Stage.LOADED
        self._base_of = self.server.num_starts

    @property
    def has_base(self) -> bool:
        return self._base_of == self.server.num_starts and self.server.is_running

    def load_adapter(self, tensors: Iterable[tuple[str, Tensor]], *, again: bool = False) -> None:
        """Send an adapter to the server, which holds its base; requests ask for it by name."""
        self._require(_Stage.AWAKE)
        assert self._settings.lora is not None  # or nobody has an adapter
        self.weight_version += not again
        self._adapter = ServedAdapter.of(
            tensors,
            self._settings.lora,
            version=self.weight_version,
            size=self._settings.tensor_parallel_size,
        )
        try:
            self._send_adapter()
        except ConnectionLost as error:
            self._replace(str(error))
        self._stage = _Stage.LOADED

    def _send_adapter(self) -> None:
        if self._adapter is not None:
            self._adapter.send(self.server.client, self._served, self.weight_version)
            self._served = self._adapter.name

    def start(self) -> None:
        """Let the server take memory for its key-value cache and generate. Safe to call again."""
        self._require(_Stage.LOADED)
        self._transfer.wait_for_all_ranks()
        try:
            self._resume("kv_cache", "cuda_graph")
        except ConnectionLost as error:
            self._replace(str(error))
        self._stage = _Stage.STARTED

    def pause(self) -> None:
        """Take the server's memory back, in the middle of a rollout. Its running requests are
        aborted, and sent again after `start`.
        """
        self._require(_Stage.AWAKE)
        self._num_pauses += 1
        self._stage = _Stage.AWAKE
        try:
            self._sleep()
        finally:  # where it fails, too, the others wait
            self._transfer.wait_for_all_ranks()

    async def generate(
        self, tokens: list[int], sampling: SamplingParams, *, session: int
    ) -> Completion:
        """Sample what follows `tokens`. A context that fills up gives finish_reason "length", with
        no token if it was full already.

        Log-probabilities are after temperature, before top_p. Samples of a server that is not
        `deterministic` depend on the batch that they were drawn in and not on `sampling.seed`.
        Raises WeightsLost if a lost server cannot be replaced.
        """
        self._require(_Stage.STARTED)
        sampling.check(tokens, vocab=self._shape.vocab_size)
        if session in self._active:
            raise ValueError(
                f"session {session} already generates; await one completion before asking for the"
                " next"
            )
        room = self._settings.max_context - len(tokens)
        if room <= 0:
            return Completion([], [], "length")
        records = self._settings.returns_routes
        max_tokens = min(sampling.max_tokens, room)
        body = request_body(
            tokens,
            sampling,
            max_tokens=max_tokens,
            asks_routes=records,
            adapter=self._adapter.name if self._adapter else None,
        )
        self._active.add(session)
        try:
            while True:
                num_starts, num_pauses = self.server.num_starts, self._num_pauses
                try:
                    answer = await self._requests.ask(self.server.client, body)
                    if num_pauses == self._num_pauses or not is_aborted(answer):
                        break
                    self.counts.reissued += 1
                except RequestRefused:  # SGLang aborts a request that it has not queued yet
                    if num_pauses == self._num_pauses:
                        raise
                    self.counts.reissued += 1
                except ConnectionLost as error:
                    self.counts.reissued += 1
                    # The first to notice restarts it; the others find a new server.
                    if num_starts == self.server.num_starts and not self._replace(str(error)):
                        raise WeightsLost(
                            f"the SGLang server was lost ({self._why_lost}), and no copy of its"
                            " weights is kept (--weight-transfer ipc, --engine-addresses)"
                        ) from error
        finally:
            self._active.discard(session)
        completion = read_completion(
            answer, sampling, version=self.weight_version, log=self.server.log
        )
        if records:
            num_unknown = len(tokens) - sampling.num_recorded
            about = answer["meta_info"]
            completion = with_routes(completion, about, self._shape, num_unknown=num_unknown)
        self.counts.prompt_tokens += len(tokens)
        self.counts.cached_tokens += answer["meta_info"]["cached_tokens"]
        self._restarts_in_a_row = 0
        return completion

    def shutdown(self) -> None:
        """Stop the server and give back the memory of the weights."""
        self._stage = _Stage.ASLEEP
        self.server.stop()
        self._transfer.close()

    def _require(self, stage: _Stage) -> None:
        if self._stage < stage:
            raise RuntimeError(
                f"the engine is {self._stage.name.lower()} and must be {stage.name.lower()}; call"
                " load_weights, then start, then generate inside `with engine.awake()`"
            )

    def _wake(self) -> None:
        if not self.server.num_starts:
            self._start()  # once: a server that fails its first start is set up wrongly
            return
        try:
            self._resume("weights")
        except ConnectionLost as error:
            self._restart(str(error), [])

    def _replace(self, why: str) -> bool:
        """Return another server with the weights of the lost one, if there is a copy of the
        weights.
        """
        weights = self._transfer.again()
        if weights is None:
            self._why_lost = self._why_lost or why
            self.server.stop()
            return False
        self._restart(why, weights)
        return True

    def _restart(self, why: str, weights: list[Any]) -> None:
        """Start a new server with these weights, or with none where `load_weights` comes next.
        Blocks, since nobody can go on without it.
        """
        while True:
            self._restarts_in_a_row += 1
            if self._restarts_in_a_row > _MAX_RESTARTS:
                raise self.server.failure(
                    f"the SGLang server was lost {_MAX_RESTARTS} times without a completion ({why})"
                )
            self.counts.restarts += 1
            try:
                self._start()
                self._transfer.deliver(self.server.client, weights, self.weight_version)
                self._send_adapter()
                if weights:
                    self._base_of = self.server.num_starts
                return
            except (ConnectionLost, ServerFailed) as error:
                why = str(error).partition("\n")[0]

    def _sleep(self) -> None:
        """Release the device memory; a server that cannot is stopped, and the next rollout starts
        another.
        """
        try:
            client = self.server.client
            client.call("POST", "/abort_request", {"abort_all": True})
            # Waits until cancelled requests have ended: SGLang asserts that it is idle when it
            # releases memory.
            client.call("POST", f"/flush_cache?timeout={_FLUSH_SECONDS}", {})
            # SGLang cannot release a part twice, and takes an empty list to mean all parts.
            kept = {"weights"} if self._settings.lora else set()  # the base of adapters
            if self._settings.address is not None:  # the memory is not this job's
                kept = {*_MEMORY}
            if held := [part for part in _MEMORY if part not in {*self._released, *kept}]:
                with self._freed("weights" in held):
                    client.call("POST", "/release_memory_occupation", {"tags": held})
                self._released |= {*held}
        except ConnectionLost:
            self.server.stop()

    @contextmanager
    def _freed(self, with_weights: bool) -> Iterator[None]:
        """Raises EngineError unless the device has more free memory afterwards, by at least half of
        the weights that the server held: others may take some meanwhile. A server has to show it
        once after its start, so that another program on the device cannot end a long run, and
        never where ranks share a device, on which another server may start meanwhile.
        """
        if not (with_weights and self._must_free):
            yield
            return
        before, least = torch.cuda.mem_get_info()[0], self._transfer.num_bytes // 2
        yield
        if (risen := torch.cuda.mem_get_info()[0] - before) < least:
            raise EngineError(
                f"asleep the SGLang server must give its memory back, at least {least} bytes of its"
                f" weights, and {risen} more are free; does its log {self.server.log} say that"
                " torch_memory_saver could not be preloaded, or does another program take memory of"
                " this device?"
            )
        self._must_free = False  # it has shown it

    def _start(self) -> None:
        self._released, self._served = set(), None
        about = self.server.start().call("GET", "/server_info")
        # the server's starter may leave it out, as tools/gpu_check.sh does in the last resort
        has_saver = about.get("enable_memory_saver", True)
        has_device = collectives.ranks_per_device() == 1
        self._must_free = has_saver and has_device and self._settings.has_memory_saver
        check_cache(
            about.get("max_total_num_tokens", self._settings.kv_cache_tokens), self._settings
        )

    def _resume(self, *parts: str) -> None:
        """Take back memory that was released; SGLang cannot resume a part that was not. Raises
        ConnectionLost, even where there is nothing to take.
        """
        client = self.server.client
        if tags := self._released & {*parts}:
            client.call("POST", "/resume_memory_occupation", {"tags": sorted(tags)})
            self._released -= tags


class SGLangFollower(RolloutEngine):
    """Accompanies the `SGLangEngine` of the first rank of `group`, which starts and stops the
    server and takes and frees the memory of all shards: the others meet it before and after.
    """

    num_slots = 0

    def __init__(
        self,
        model_config: PretrainedConfig,
        shard: EngineShard | None,
        dtype: torch.dtype,
        *,
        group: dist.ProcessGroup,
        transfer: Literal["file", "ipc"] = "file",
        fp8: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        keeps_base: bool = False,
    ) -> None:
        """`shard` is None beside a server of the user, to which the first rank sends whole weights.
        `keeps_base`: only the first weights are sent, and adapters beside them later.
        """
        self.shard, self._keeps_base, self._has_base = shard, keeps_base, False
        self.counts = EngineCounts()
        self._transfer: WeightTransfer | GroupTransfer
        if shard is None:
            self._transfer = GroupTransfer(model_config, dtype, group=group)
        else:
            self._transfer = TRANSFERS[transfer](
                model_config, shard, dtype, fp8=fp8, group=group, bucket_bytes=bucket_bytes
            )

    def awake(self) -> AbstractContextManager[None]:
        """Wait until the first rank has woken the server, once this rank has made room, and at the
        end until it has put the server to sleep.
        """
        return _among(self._transfer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, again: bool = False) -> None:
        """Hand this rank's shards over. Raises ValueError unless exactly the expected names and
        shapes arrive, and EngineError if shared memory has no room for the weights of any rank.
        """
        for _ in self._transfer.receive(weights):
            continue
        self.weight_version += not again
        self._has_base = self._keeps_base

    @property
    def has_base(self) -> bool:
        return self._has_base

    def load_adapter(self, tensors: Iterable[tuple[str, Tensor]], *, again: bool = False) -> None:
        """Take part in the stream, which the first rank hands over whole."""
        for _ in tensors:
            continue
        self.weight_version += not again

    def start(self) -> None:
        """Let the first rank take memory on this rank's device."""
        self._transfer.wait_for_all_ranks()

    def pause(self) -> None:
        """Wait until the first rank has given it back."""
        self._transfer.wait_for_all_ranks()


@contextmanager
def _among(transfer: WeightTransfer | GroupTransfer) -> Iterator[None]:
    """A time in which a server holds memory on the devices of all its ranks: it begins once all are
    there and has ended when they go on.

    A rank that fails leaves alone; an interruption reaches all ranks.
    """
    transfer.wait_for_all_ranks()
    try:
        yield
    except Interrupted:
        transfer.wait_for_all_ranks()
        raise
    transfer.wait_for_all_ranks()


def check_cache(tokens: int, settings: ServerSettings) -> None:
    """Warn if the key-value cache holds fewer tokens than were asked for: SGLang takes what memory
    it finds when it starts.

    Raises EngineError if it does not hold one trajectory.
    """
    if tokens >= settings.kv_cache_tokens:
        return
    text = (
        f"SGLang found memory for {tokens} tokens of key-value cache and was asked for"
        f" {settings.kv_cache_tokens}; lower --kv-cache-tokens, or leave it more memory with"
        " --offload rollout"
    )
    if tokens < settings.max_context:
        raise EngineError(f"{text}: a trajectory has up to {settings.max_context}")
    warnings.warn(f"{text}, else fewer trajectories advance at a time", stacklevel=2)
