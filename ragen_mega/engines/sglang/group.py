"""Weights for an engine that the user has started, by SGLang's own protocol: this rank and all
ranks of the engine form a process group, and full Hugging Face tensors are broadcast in buckets,
each of which the engine's ranks cut by themselves.

Read in SGLang 0.5.17: model_executor/model_runner_components/weight_updater.py. The calls are, in
this order, `/init_weights_update_group` once, `/update_weights_from_distributed` for each bucket,
`/update_weight_version`, and after an error `/destroy_weights_update_group`. To SGLang rank 0 of a
group is always the sender, so every rank that sends has another group.
"""

import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.data.parcels import Parcel
from ragen_mega.engines.sglang.http_json import ConnectionLost, JSONClient, RequestRefused
from ragen_mega.engines.sglang.weights import BUCKET_BYTES, post, update_of
from ragen_mega.models.layout import complete, expected_tensors, group_by_size
from ragen_mega.models.shape import ModelShape
from ragen_mega.ranks import groups
from ragen_mega.ranks.collectives import device
from ragen_mega.ranks.waits import here
from ragen_mega.system.addresses import address_towards, is_local

_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_SECONDS_TO_LEAVE = 5.0
"""Time in which an engine must answer that it leaves a group; one that hangs does not."""


class Together:
    """Calls that need each other, each in a thread: the engine takes what this rank sends."""

    def __init__(self, what: str, *calls: Callable[[], None]) -> None:
        self._what, self._num_calls = what, len(calls)
        self._device = device()  # which a thread does not inherit
        self._ends: SimpleQueue[Exception | None] = SimpleQueue()
        for call in calls:  # a thread that hangs must not keep the process from ending
            threading.Thread(target=self._run, args=(call,), daemon=True, name="group").start()

    def _run(self, call: Callable[[], None]) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_device(self._device)
        try:
            call()
        except (RuntimeError, ValueError, OSError) as error:
            self._ends.put(error)
        else:
            self._ends.put(None)

    def wait(self, seconds: float) -> None:
        """Return when all have returned. Raises the first error of one, and ConnectionLost after so
        many seconds without an end of any: the others may then still hang.
        """
        with here.requesting(self._what):
            for _ in range(self._num_calls):
                try:
                    error = self._ends.get(timeout=seconds)
                except Empty:
                    raise ConnectionLost(f"{self._what}: not done within {seconds:.0f} s") from None
                if isinstance(error, RequestRefused | ConnectionLost):
                    raise error
                if error is not None:
                    said = " ".join(str(error).split())[:300]
                    raise ConnectionLost(f"{self._what}: {said}") from error


class GroupTransfer:
    """Sends full weights to the engine of this rank. Ranks that share the engine, each with its own
    transfer, form `group`; the first of them sends, and the others only pass the stream on.
    """

    def __init__(
        self,
        model_config: PretrainedConfig,
        dtype: torch.dtype,
        *,
        num_engine_ranks: int = 0,
        address: str = "",
        bucket_bytes: int = BUCKET_BYTES,
        patience: float = 60.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`num_engine_ranks` is 0 on a rank that does not send. `address` is the engine's;
        `patience` are the seconds in which it must take a bucket, or join the group.
        """
        shape = ModelShape.of(model_config)
        self._expected, self._is_tied = expected_tensors(shape), shape.is_tied
        self.num_bytes = 0  # of this rank's device that the engine takes
        self._dtype, self._num_engine_ranks = dtype, num_engine_ranks
        self._bucket_bytes, self._patience, self._group = bucket_bytes, patience, group
        # NCCL refuses two ranks on one device, where this rank and an engine of its machine may be
        is_on_gpus = torch.cuda.is_available() and (
            torch.cuda.device_count() > 1 or not is_local(f"http://{address}")
        )
        self._backend = "nccl" if is_on_gpus else "gloo"
        self._device = device() if is_on_gpus else torch.device("cpu")
        self._joined: tuple[str, dist.ProcessGroup, dist.Store] | None = None

    def receive(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Parcel]:
        """Stream of (Hugging Face name, full tensor) -> buckets. Raises ValueError, with `weights`
        consumed to its end, unless exactly the expected names and shapes arrive.
        """
        weights = iter(weights)
        named = (
            (name, tensor)
            for name, tensor in weights
            if not (self._is_tied and name == "lm_head.weight")
        )
        try:
            for tensors in group_by_size(
                complete(named, self._expected), lambda one: one[1].nbytes, self._bucket_bytes
            ):
                if self._num_engine_ranks:
                    yield Parcel.packed(tensors, self._device, self._dtype)
        except ValueError:
            for _ in weights:
                continue
            raise
        self.wait_for_all_ranks()

    def deliver(self, client: JSONClient, buckets: Iterable[Parcel], version: int) -> None:
        """Have the engine take one full set of weights, each bucket while the next one is made.

        Raises RequestRefused when it does not take a bucket, and ConnectionLost when it is lost or
        hangs. The group is then left, and the next delivery forms another.
        """
        taken: Together | None = None
        try:
            with update_of(client, version):
                for bucket in buckets:
                    if taken is not None:
                        taken.wait(self._patience)
                    taken = self._take(client, bucket)
                if taken is not None:
                    taken.wait(self._patience)
        except (RequestRefused, ConnectionLost) as error:
            self._leave(client)
            if isinstance(error, ConnectionLost):
                raise
            raise RequestRefused(
                f"the engine at {client.address} does not take the weights of the model that --load"
                f" names: {' '.join(str(error).split())[:400]}"
            ) from None

    def again(self) -> None:
        """Return None: nothing is kept."""

    def wait_for_all_ranks(self) -> None:
        """Wait for all ranks that share the engine."""
        if self._group is not None:
            with here.waiting("ranks", "the ranks of an engine"):
                dist.barrier(group=self._group)

    def close(self) -> None:
        """Leave the group; the engine closes its end with the connection. Safe to call again."""
        self._leave(None)

    def _take(self, client: JSONClient, bucket: Parcel) -> Together:
        """Begin to send a bucket."""
        name, group = self._join(client)
        memory = bucket.memory
        assert memory is not None  # it was packed here
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": name,
            "load_format": "flattened_bucket",
            "flush_cache": True,
            # Requests of callers that were cancelled may still run; nobody waits for them.
            "abort_all_requests": True,
        }
        return Together(
            f"/update_weights_from_distributed to {client.address}",
            lambda: post(client, "/update_weights_from_distributed", body),
            lambda: dist.broadcast(memory, src=0, group=group),
        )

    def _join(self, client: JSONClient) -> tuple[str, dist.ProcessGroup]:
        """Return the name of the group and the group, which is formed if there is none."""
        if self._joined is None:
            name, size = f"ragen-{secrets.token_hex(4)}", 1 + self._num_engine_ranks
            host = address_towards(client.host)
            is_ipv6, timeout = ":" in host, timedelta(seconds=self._patience)
            listener = socket.create_server(
                (host, 0), family=socket.AF_INET6 if is_ipv6 else socket.AF_INET
            )
            port = listener.getsockname()[1]
            # A listener of our own, because a store by itself would listen on every interface.
            store = dist.TCPStore(
                host, port, size, is_master=True, timeout=timeout, wait_for_workers=False,
                master_listen_fd=listener.detach(), use_libuv=True,
            )  # fmt: skip
            body = {
                "master_address": host,
                "master_port": port,
                "rank_offset": 1,
                "world_size": size,
                "group_name": name,
                "backend": self._backend,
            }
            formed: list[dist.ProcessGroup] = []
            Together(
                f"/init_weights_update_group of {client.address} with {host}:{port}",
                lambda: post(client, "/init_weights_update_group", body),
                lambda: formed.append(
                    groups.form(self._backend, store, name, 0, size, self._patience)
                ),
            ).wait(self._patience)
            self._joined = name, formed[0], store
            self._check_depth(client)
        return self._joined[:2]

    def _check_depth(self, client: JSONClient) -> None:
        """Raise RequestRefused unless the engine's model has the layers of the run's. SGLang passes
        over names that it does not know, and refuses a wrong size of those that it knows.
        """
        norms = {
            (int(match[1]), name): size
            for name, size in self._expected.items()
            if name.endswith("norm.weight") and (match := _IN_LAYER.match(name))
        }
        (last, known), (size,) = max(norms.items())
        beyond = known.replace(f".{last}.", f".{last + 1}.", 1)
        for name, is_there in ((known, True), (beyond, False)):
            wrong = [(name, torch.zeros(size + 1))]
            try:
                bucket = Parcel.packed(wrong, self._device, self._dtype)
                self._take(client, bucket).wait(self._patience)
                is_refused = False
            except RequestRefused:
                is_refused = True
            if is_refused != is_there:
                count = "fewer" if is_there else "more"
                raise RequestRefused(f"it has {count} layers than the {last + 1} of the model")

    def _leave(self, client: JSONClient | None) -> None:
        if self._joined is None:
            return
        (name, group, _), self._joined = self._joined, None
        groups.leave(group, self._backend)
        if client is not None:
            with suppress(RequestRefused, ConnectionLost):
                body = {"group_name": name}
                client.call(
                    "POST", "/destroy_weights_update_group", body, timeout=_SECONDS_TO_LEAVE
                )
