"""The connection between the two parts of a job of which one trains and the other samples: messages
between their first ranks.

It is a plain socket, since the parts are separate worlds of torch.distributed (docs/decisions.md).
A frame is eight bytes of length and a pickled message; an empty one says that its sender lives.
"""

import hmac
import os
import pickle
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

TRAINERS, SAMPLERS = "the ranks that train", "the ranks that sample"
_LENGTH = struct.Struct("<q")
_KEY, _ALARM = "link", "alarm"
_SECONDS_TO_MEET = 300.0
_SECONDS_TO_FLUSH = 30.0


class LinkLost(ConnectionError):
    """The other part of the job has ended or does not answer."""


class Alarm:
    """Where any rank leaves what ended it, for the first rank of the other part: it may have failed
    alone, while those of its part wait for it.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def give(self, error: Exception) -> None:
        """Leave an error that can be pickled."""
        self._store.set(_ALARM, pickle.dumps(error))

    def given(self) -> Exception | None:
        """The error that a rank has left."""
        return pickle.loads(self._store.get(_ALARM)) if self._store.check([_ALARM]) else None


class Link:
    """Messages in both directions, in order. Nobody waits for the other side to read: one thread
    sends what is queued here, another one queues what comes.
    """

    def __init__(self, connection: socket.socket, other: str) -> None:
        """`other`: what is at the other end, for errors."""
        self.other = other
        self.last_heard = time.monotonic()
        """When the other side last gave a sign of life."""
        self.is_closed = False
        """Whether the other side has closed it, perhaps after messages that are still to read."""
        self._connection = connection
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._incoming: SimpleQueue[bytes | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send_queued, daemon=True, name="link")
        self._sender.start()
        threading.Thread(target=self._read, daemon=True, name="link").start()

    def send(self, message: Any) -> None:
        """Queue a message. One that cannot arrive any more is dropped: `receive` says so."""
        self._outgoing.put(pickle.dumps(message))

    def beat(self) -> None:
        """Queue a sign of life."""
        self._outgoing.put(b"")

    def receive(self, seconds: float) -> bytes | None:
        """The next message, pickled; None if none comes in that time. Raises LinkLost if none can
        come any more.
        """
        try:
            message = self._incoming.get(timeout=seconds)
        except Empty:
            return None
        if message is None:
            self._incoming.put(None)  # for whoever asks again
            raise LinkLost(
                f"{self.other} have ended; --resume goes on from the last checkpoint, and the"
                " launcher says more"
            )
        return message

    @property
    def num_waiting(self) -> int:
        """Messages that have come and were not read."""
        return self._incoming.qsize()

    def close(self) -> None:
        """Send what is queued, for a while, and hang up."""
        self._outgoing.put(None)
        self._sender.join(_SECONDS_TO_FLUSH)
        with suppress(OSError):  # the other side was faster
            self._connection.shutdown(socket.SHUT_RDWR)

    def _send_queued(self) -> None:
        with suppress(OSError):
            while (message := self._outgoing.get()) is not None:
                self._connection.sendall(_LENGTH.pack(len(message)))
                self._connection.sendall(message)

    def _read(self) -> None:
        with suppress(OSError), self._connection.makefile("rb") as stream:
            while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
                (length,) = _LENGTH.unpack(head)
                message = stream.read(length)
                if len(message) < length:
                    break
                self.last_heard = time.monotonic()
                if message:
                    self._incoming.put(message)
        self.is_closed = True
        self._incoming.put(None)


def listen(store: dist.Store, host: str) -> Link:
    """The connection that `connect` makes in the other part, through an address of this machine
    ("": any). Raises OSError.
    """
    token, options = secrets.token_hex(16), {}
    if not host and socket.has_dualstack_ipv6():  # nodes may have addresses of either kind
        options = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    with socket.create_server((host, 0), **options) as server:
        server.settimeout(_SECONDS_TO_MEET)
        store.set(_KEY, f"{server.getsockname()[1]} {token}")
        while True:
            connection, _ = server.accept()
            connection.settimeout(_SECONDS_TO_MEET)
            said = connection.recv(len(token), socket.MSG_WAITALL)
            if hmac.compare_digest(said, token.encode()):
                connection.settimeout(None)
                return Link(connection, SAMPLERS)
            connection.close()


def connect(store: dist.Store, host: str) -> Link:
    """The connection to the part that listens on `host`. Raises OSError."""
    store.set_timeout(timedelta(seconds=_SECONDS_TO_MEET))
    port, token = store.get(_KEY).decode().split()
    connection = socket.create_connection((host, int(port)), timeout=_SECONDS_TO_MEET)
    connection.sendall(token.encode())
    connection.settimeout(None)
    return Link(connection, TRAINERS)


def meet_part(store: dist.Store, *, listens: bool, is_one_machine: bool) -> Link:
    """The connection between the first ranks of both parts; the one that listens is rank 0 of the
    job. Raises OSError.
    """
    if listens:
        return listen(store, "127.0.0.1" if is_one_machine else "")
    return connect(store, "127.0.0.1" if is_one_machine else os.environ["MASTER_ADDR"])
