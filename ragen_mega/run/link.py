"""The connection between the two parts of a job of which one trains and the other samples: messages
between their first ranks.

It is a plain socket, since the parts are separate worlds of torch.distributed (docs/decisions.md).
A frame is eight bytes of length and a pickled message; an empty one says that its sender lives.
"""

import hmac
import json
import pickle
import secrets
import socket
import struct
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from ragen_mega.algorithm.tables import PlugInError
from ragen_mega.data.launcher import own_address
from ragen_mega.rollout.engine import EngineError

TRAINERS, SAMPLERS = "the ranks that train", "the ranks that sample"
_LENGTH = struct.Struct("<q")
_PLACE, _ALARM = "link", "alarm"
_KEY_FILE = ".link-"
_SECONDS_TO_MEET = 300.0
_SECONDS_TO_ANSWER = 10
_CHALLENGE_BYTES = 32  # as long as an answer
_SECONDS_TO_FLUSH = 30.0


FAILURES = (FloatingPointError, PlugInError, EngineError, OSError, ValueError)
"""The types of errors that one part tells the other, the special ones first."""


class LinkLost(ConnectionError):
    """The other part of the job has ended or does not answer."""


class Alarm:
    """Where any rank leaves what ended it, for the first rank of the other part: it may have failed
    alone, while those of its part wait for it.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def give(self, error: Exception) -> None:
        """Leave an error whose type is one of FAILURES."""
        self._store.set(_ALARM, json.dumps([type(error).__name__, str(error)]))

    def given(self) -> Exception | None:
        """The error that a rank has left. It is read as text, since whoever reaches the store of
        several nodes can write into it.
        """
        if not self._store.check([_ALARM]):
            return None
        kinds = {each.__name__: each for each in FAILURES}
        try:
            kind, text = json.loads(self._store.get(_ALARM))
            return kinds[kind](str(text))
        except (ValueError, TypeError, KeyError):
            return ValueError(f"the key {_ALARM} of the job's store holds no error of a rank")


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


def _knows_key(connection: socket.socket, key: bytes, *, listens: bool) -> bool:
    """Whether the other end knows the key. Each end sends a random challenge and answers the
    other's by its HMAC, so that the key itself is never sent.
    """

    def answer(is_listener: bool, challenge: bytes) -> bytes:
        return hmac.digest(key, bytes([is_listener]) + challenge, "sha256")

    ours = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.settimeout(None)
    try:
        _limit_silence(connection, _SECONDS_TO_ANSWER)
        connection.sendall(ours)
        theirs = connection.recv(_CHALLENGE_BYTES, socket.MSG_WAITALL)
        connection.sendall(answer(listens, theirs))
        said = connection.recv(_CHALLENGE_BYTES, socket.MSG_WAITALL)
        _limit_silence(connection, 0)
    except OSError:
        return False
    return hmac.compare_digest(said, answer(not listens, ours))


def _limit_silence(connection: socket.socket, seconds: int) -> None:
    """Let `recv` fail after so much silence; 0: never."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def listen(store: dist.Store, folder: Path) -> Link:
    """The connection that `connect` makes in the other part. Raises OSError.

    The store, which anybody who reaches its port can read, gets the address and the name of a file
    of `folder`; the key is in that file, which only its owner can read.
    """
    key, host = secrets.token_bytes(32), own_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, path = tempfile.mkstemp(prefix=_KEY_FILE, dir=folder)  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(key)
        with socket.create_server((host, 0), family=family) as server:
            server.settimeout(_SECONDS_TO_MEET)
            place = {"host": host, "port": server.getsockname()[1], "file": Path(path).name}
            store.set(_PLACE, json.dumps(place))
            while True:
                connection, _ = server.accept()
                if _knows_key(connection, key, listens=True):
                    return Link(connection, SAMPLERS)
                connection.close()
    finally:
        Path(path).unlink(missing_ok=True)


def connect(store: dist.Store, folder: Path) -> Link:
    """The connection to the part that listens. Raises OSError, also where it does not know the key.
    """
    store.set_timeout(timedelta(seconds=_SECONDS_TO_MEET))
    place = json.loads(store.get(_PLACE))
    path = folder / Path(place["file"]).name
    if not path.name.startswith(_KEY_FILE):
        raise OSError(f"{path} must be a file {_KEY_FILE}*; somebody has changed the job's store")
    key = path.read_bytes()
    address = (place["host"], place["port"])
    connection = socket.create_connection(address, timeout=_SECONDS_TO_MEET)
    if not _knows_key(connection, key, listens=False):
        raise OSError(f"{address[0]}:{address[1]} must know the key in {path}, and does not")
    return Link(connection, TRAINERS)


def connect_parts(store: dist.Store, folder: Path, *, listens: bool) -> Link:
    """The connection between the first ranks of both parts; the one that listens is rank 0 of the
    job. Both see `folder`. Raises OSError.
    """
    return (listen if listens else connect)(store, folder)
