"""Standard output and standard error of a process that outlives their reader, and what a process
says there while it lets its user wait.
"""

import errno
import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def guard_outputs(*, is_needed: bool) -> None:
    """Let this process outlive the reader of its outputs, as in `| head` or under a `tee` that has
    ended: what can no longer be written is dropped. Where standard output `is_needed`, for the
    answer of a command is in it, any other reason, such as a full disk, raises OSError that names
    it. Where files hold all that matters, standard error tells of the loss once.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue  # closed, guarded already, or the stream of a program around this one
        stream.flush()
        raw = _Output(stream.fileno(), is_needed)
        text = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, text)


@contextmanager
def waiting(what: str, seconds: float = 5.0) -> Iterator[None]:
    """Say on standard error what is under way, if the block takes longer than so many seconds; of
    the ranks of a job the first one alone.
    """

    def say() -> None:
        print(f"{what} ...", file=sys.stderr, flush=True)

    timer = threading.Timer(seconds, say)
    timer.daemon = True  # no end of the process waits for it
    if os.environ.get("RANK", "0") == "0":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Output(io.FileIO):
    """The descriptor of standard output or standard error, and nothing after a failure."""

    def __init__(self, descriptor: int, is_needed: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._is_needed = is_needed and descriptor == 1

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._drop(error)
            return memoryview(data).nbytes

    def _drop(self, error: OSError) -> None:
        """Drop all that follows, also of processes that this one starts."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self.fileno())
        os.close(nothing)
        name = "standard output" if self.fileno() == 1 else "standard error"
        if not self._is_needed:
            with suppress(OSError):
                text = f"{name} cannot be written to any more ({error.strerror}): it is dropped"
                os.write(2, f"{text}, and the work goes on\n".encode())
        elif error.errno != errno.EPIPE:  # of which programs of Unix say nothing
            raise OSError(
                f"cannot write to {name}: {error.strerror}; free space there, or redirect it"
            )
