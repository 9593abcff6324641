"""The connection between the two parts of a job of which one trains and the other samples: messages
between their first ranks.

It is a plain socket, since the parts are separate worlds of torch.distributed (docs/decisions.md).
A frame is eight bytes of length and a message (`messages.py`); an empty one says that its sender
lives. Messages are read only from an end that has proven, by HMAC, that it knows a key. The key is
in a file that nobody but the user can read: all can read the store of a job on several nodes.
"""

import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from queue import Empty, SimpleQueue

import torch.distributed as dist

from ragen_mega.run.messages import PORTABLE, decode, encode

TRAINERS, SAMPLERS = "the ranks that train", "the ranks that sample"
_LENGTH = struct.Struct("<q")
_ADDRESS, _ALARM, _BEATS = "link", "alarm", "beats"
_KEY_FILE = ".link-"
"""Prefix of the name of a key's file."""
_NUM_RANDOM, _NUM_PROOF = 32, 32
"""Bytes of a challenge, and of its answer."""
_SECONDS_TO_MEET = 300.0
_MOST_STRANGERS = 64
"""Connections without a proof that stay; a part of the job proves itself at once."""
_SECONDS_TO_FLUSH = 30.0


class LinkLost(ConnectionError):
    """The other part of the job has ended or does not answer."""


class Alarm:
    """Mailbox of the ranks without a link, read by the first rank of the other part: signs of life,
    and the error that ended a rank, which may have failed alone, while its part waits for it.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._num_beats, self._last_heard = b"", time.monotonic()

    def beat(self) -> None:
        """Leave a sign of life."""
        with suppress(RuntimeError):  # the store is gone with the other part, as the link says
            self._store.add(_BEATS, 1)

    @property
    def last_heard(self) -> float:
        """When a new sign of life was last found, for which this looks."""
        if self._store.check([_BEATS]) and (num := self._store.get(_BEATS)) != self._num_beats:
            self._num_beats, self._last_heard = num, time.monotonic()
        return self._last_heard

    def give(self, error: Exception) -> None:
        """Leave an error of one of the kinds of `PORTABLE`."""
        text = encode(error)
        self._store.set(_ALARM, text)  # type: ignore[arg-type] # bytes are taken too

    def given(self) -> Exception | None:
        """Return the error that a rank has left; LinkLost if it was no rank."""
        if not self._store.check([_ALARM]):
            return None
        try:
            error = decode(self._store.get(_ALARM))
        except ValueError:
            error = None
        lost = LinkLost("the job's store holds an alarm that no rank can have left")
        return error if isinstance(error, PORTABLE) else lost


class Link:
    """Messages in both directions, in order. Nobody waits for the other side to read: one thread
    sends what is queued here, another one queues what comes.
    """

    def __init__(self, connection: socket.socket, other: str) -> None:
        """`other`: name of the other end, for errors."""
        self.other = other
        self.last_heard = time.monotonic()
        """When the other side last gave a sign of life."""
        self.is_closed = False
        """Whether the other side has closed it, perhaps after messages that are still to read."""
        self._connection = connection
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.seconds_sending = 0.0
        """Seconds that making and sending messages took, beside other work."""
        self._error: Exception | None = None  # what ended the making or reading of messages
        self._outgoing: SimpleQueue[Callable[[], bytes] | None] = SimpleQueue()
        self._incoming: SimpleQueue[bytes | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send_queued, daemon=True, name="link")
        self._sender.start()
        threading.Thread(target=self._read, daemon=True, name="link").start()

    def send(self, message: bytes | Callable[[], bytes]) -> None:
        """Queue a message of at least one byte, or the call that makes it when its turn comes. One
        that cannot arrive is dropped: `receive` says so.
        """
        self._outgoing.put(message if callable(message) else lambda: message)

    def beat(self) -> None:
        """Queue a sign of life."""
        self.send(b"")

    def receive(self, seconds: float) -> bytes | None:
        """Return the next message; None if none comes in that time. Raises LinkLost if
        none can come any more.
        """
        try:
            message = self._incoming.get(timeout=seconds)
        except Empty:
            return None
        if message is None:
            self._incoming.put(None)  # for whoever asks again
            if self._error:
                text = f"no message to or from {self.other}: {self._error!r}"
                raise LinkLost(text) from self._error
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
        """Send queued messages, for a while, and hang up."""
        self._outgoing.put(None)
        self._sender.join(_SECONDS_TO_FLUSH)
        with suppress(OSError):  # the other side was faster
            self._connection.shutdown(socket.SHUT_RDWR)

    def _send_queued(self) -> None:
        with suppress(OSError):
            while (make := self._outgoing.get()) is not None:
                start = time.monotonic()
                try:
                    message = make()
                except Exception as error:  # `receive` raises it
                    self._error = error
                    self._connection.shutdown(socket.SHUT_RDWR)  # so that neither side waits
                    break
                self._connection.sendall(_LENGTH.pack(len(message)))
                self._connection.sendall(message)
                self.seconds_sending += time.monotonic() - start

    def _read(self) -> None:
        try:
            with suppress(OSError), self._connection.makefile("rb") as stream:
                while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
                    (length,) = _LENGTH.unpack(head)
                    message = stream.read(length)
                    if len(message) < length:
                        break
                    self.last_heard = time.monotonic()
                    if message:
                        self._incoming.put(message)
        except MemoryError as error:  # `receive` raises it
            self._error = error
        finally:
            self.is_closed = True
            self._incoming.put(None)


def listen(store: dist.Store, folder: Path, host: str) -> Link:
    """Return the connection that `connect` makes in the other part, to the address `host` of this
    machine. The key is in `folder` meanwhile. Raises OSError.
    """
    key, name = secrets.token_bytes(_NUM_RANDOM), f"{_KEY_FILE}{secrets.token_hex(8)}"
    folder.mkdir(parents=True, exist_ok=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with open(folder / name, "xb", opener=lambda path, how: os.open(path, how, 0o600)) as file:
            file.write(key)
        with socket.create_server((host, 0), family=family) as server:
            store.set(_ADDRESS, json.dumps([host, server.getsockname()[1], name]))
            return _accept(server, key)
    finally:
        (folder / name).unlink(missing_ok=True)


def _accept(server: socket.socket, key: bytes) -> Link:
    """Accept the first connection whose other end knows the key. Strangers may come before it, and
    nobody waits for them: each says what it likes until many others have come.
    """
    end, num_both = time.monotonic() + _SECONDS_TO_MEET, 2 * _NUM_RANDOM
    heard: dict[socket.socket, bytes] = {}  # our challenge and what has come, the oldest first
    server.setblocking(False)
    try:
        while (left := end - time.monotonic()) > 0:
            ready = wait([server, *heard], left)
            gone = [*heard][:-_MOST_STRANGERS]
            for connection in [peer for peer in heard if peer in ready]:
                part = _received(connection, num_both + _NUM_PROOF - len(heard[connection]))
                heard[connection] += part
                both, said = heard[connection][:num_both], heard[connection][num_both:]
                if _is_proof(said, key, SAMPLERS, both):
                    connection.sendall(_proof(key, TRAINERS, both))
                    connection.setblocking(True)
                    del heard[connection]
                    return Link(connection, SAMPLERS)
                if not part or len(said) == _NUM_PROOF:
                    gone.append(connection)
            for connection in gone:
                heard.pop(connection, None)
                connection.close()
            if server in ready:
                with suppress(BlockingIOError, ConnectionError):  # who came has gone
                    connection, _ = server.accept()
                    connection.setblocking(False)
                    heard[connection] = secrets.token_bytes(_NUM_RANDOM)
                    connection.sendall(heard[connection])
    finally:
        for connection in heard:
            connection.close()
    raise TimeoutError(f"{SAMPLERS} have not come within {_SECONDS_TO_MEET:g} s")


def connect(store: dist.Store, folder: Path) -> Link:
    """Return the connection to the part that listens, with its key from `folder`. Raises OSError,
    and LinkLost if somebody else listens.
    """
    store.set_timeout(timedelta(seconds=_SECONDS_TO_MEET))
    host, port, name = json.loads(store.get(_ADDRESS))
    if not (name.startswith(_KEY_FILE) and name.removeprefix(_KEY_FILE).isalnum()):
        raise LinkLost(f"the job's store names {name!r} as the file of a key")
    key = (folder / name).read_bytes()
    end = time.monotonic() + _SECONDS_TO_MEET
    connection = socket.create_connection((host, port), timeout=_SECONDS_TO_MEET)
    ours = secrets.token_bytes(_NUM_RANDOM)
    both = _read_exactly(connection, _NUM_RANDOM, end) + ours
    connection.sendall(ours + _proof(key, SAMPLERS, both))
    if not _is_proof(_read_exactly(connection, _NUM_PROOF, end), key, TRAINERS, both):
        connection.close()
        raise LinkLost(f"{host}:{port} does not know the key of this job, so {TRAINERS} are not it")
    connection.settimeout(None)
    return Link(connection, TRAINERS)


def _received(connection: socket.socket, most: int) -> bytes:
    """Return what has come, of `most` bytes; nothing from an end that has hung up."""
    with suppress(OSError):
        return connection.recv(most)
    return b""


def _read_exactly(connection: socket.socket, num_bytes: int, end: float) -> bytes:
    """Read so many bytes until the moment `end`, which one that sends byte by byte moves not."""
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(max(0.001, end - time.monotonic()))
        if not (part := connection.recv(num_bytes - len(data))):
            raise LinkLost("the other end of a connection has hung up")
        data += part
    return data


def _proof(key: bytes, part: str, challenges: bytes) -> bytes:
    """Compute the answer that only a part of this job can give to the challenges of both ends."""
    return hmac.digest(key, part.encode() + challenges, "sha256")


def _is_proof(said: bytes, key: bytes, part: str, challenges: bytes) -> bool:
    return hmac.compare_digest(said, _proof(key, part, challenges))
