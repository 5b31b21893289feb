"""Protects stdout and stderr, so that a run does not depend on its console. Imports only libraries.

A console may fail while a run trains: the reader of a pipe exits, a terminal closes, a disk is
full, or nobody scrolls `| less`. Invariant: after `protect`, no write to these streams, by users'
code too, raises an error or blocks longer than STALL_S, and a broken console does not kill programs
that the process starts later. Output that the console does not accept is dropped; everything
important is also in the run's own files.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

STDOUT, STDERR = 1, 2
NAMES = {STDOUT: "stdout", STDERR: "stderr"}
# Longest wait for a console that accepts no data. It is much longer than a busy reader pauses, and
# much shorter than other ranks wait for this one.
STALL_S = 10.0
# Number of bytes that a ready pipe accepts without blocking (PIPE_BUF on Linux).
READY_BYTES = 4096
RETRY_S = 0.01


class ConsoleFile(io.FileIO):
    """A file whose writes never fail, for descriptor 1 or 2, which stays open."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.name = f"<{NAMES[descriptor]}>"
        self._is_stalled, self._num_dropped = False, 0

    def close(self) -> None:
        """Does nothing: all streams of the descriptor share this file, and each would close it."""

    def write(self, data: Any, /) -> int:
        """Writes as much as the console accepts; returns the size of the whole block."""
        block = memoryview(data).cast("B")
        if self._num_dropped and self._is_ready():
            missing = (
                f"\nhybridrl: {self._num_dropped} bytes of output are missing here, because the "
            )
            missing += "console did not accept them\n"
            if self._written(memoryview(missing.encode())):
                self._num_dropped = 0
        rest = block
        while rest and (written := self._written(rest[:READY_BYTES])):
            rest = rest[written:]
        self._num_dropped += len(rest)
        return len(block)

    def _written(self, block: memoryview) -> int:
        """Returns the number of bytes that the console accepted."""
        deadline = time.monotonic() + STALL_S
        while self._is_ready() and time.monotonic() < deadline:
            try:
                written = super().write(block)
            except OSError as error:
                self._give_up(error)
                return 0
            if written is not None:
                return written
            # The descriptor is non-blocking, and another program filled the pipe.
            time.sleep(RETRY_S)
        return 0

    def _is_ready(self) -> bool:
        """Whether the console accepts data. Waits up to STALL_S, but not after a failed wait."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        self._is_stalled = not poll.poll(0.0 if self._is_stalled else STALL_S * 1000)
        return not self._is_stalled

    def _give_up(self, error: OSError) -> None:
        """Replaces a broken console with /dev/null, so that it kills no programs started later."""
        if error.errno not in (errno.EPIPE, errno.EIO):
            return
        with contextlib.suppress(OSError):  # if no descriptor is free, the next write tries again
            # EIO from a disk may be temporary.
            if error.errno == errno.EPIPE or stat.S_ISCHR(os.fstat(self.fileno()).st_mode):
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self.fileno())
                os.close(nothing)


_FILES: dict[int, ConsoleFile] = {}  # one per descriptor, because it remembers stalls


def _file(descriptor: int) -> ConsoleFile:
    return _FILES.setdefault(descriptor, ConsoleFile(descriptor))


def write(descriptor: int, block: bytes) -> None:
    """Writes bytes unchanged to STDOUT or STDERR."""
    _file(descriptor).write(block)


def say(text: str, to: TextIO | None = None) -> None:
    """Prints a line for the user to a console stream, by default to stderr."""
    stream = sys.stderr if to is None else to
    if stream is not None:  # Python has no stream for a closed descriptor
        # The stream may be unprotected in users' own programs and notebooks.
        with contextlib.suppress(OSError, ValueError):
            print(text, file=stream, flush=True)


def protect(*descriptors: int) -> None:
    """Replaces stdout, stderr or both with streams that never fail, if they are unprotected.

    Omit STDOUT if a command prints its result there, because losing it must be an error.
    """
    _open_closed()
    for descriptor in descriptors:
        name = NAMES[descriptor]
        if _is_of_console(before := getattr(sys, name), descriptor):
            stream = _protected(descriptor, before)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


@contextlib.contextmanager
def protected() -> Iterator[None]:
    """Context manager: protects stdout and stderr of a user's program during a block."""
    before = {name: (getattr(sys, name), getattr(sys, f"__{name}__")) for name in NAMES.values()}
    protect(STDOUT, STDERR)
    made = {name: getattr(sys, name) for name in NAMES.values()}
    try:
        yield
    finally:
        for name, (stream, first) in before.items():
            if made[name] is not stream and getattr(sys, name) is made[name]:
                made[name].flush()
                setattr(sys, name, stream)
                setattr(sys, f"__{name}__", first)


def _is_of_console(stream: Any, descriptor: int) -> bool:
    """Whether a stream writes to the descriptor unprotected; None counts, for a closed one."""
    if stream is None:
        return True
    if type(stream) is not io.TextIOWrapper:
        return False
    with contextlib.suppress(OSError, ValueError):
        file = getattr(stream.buffer, "raw", stream.buffer)
        return stream.fileno() == descriptor and not isinstance(file, ConsoleFile)
    return False


def _protected(descriptor: int, before: Any) -> io.TextIOWrapper:
    """Returns a protected stream with the settings of the previous one, which is flushed."""
    is_text = isinstance(before, io.TextIOWrapper)
    is_unbuffered = is_text and before.write_through
    if is_text:
        with contextlib.suppress(OSError, ValueError):
            before.flush()
    file = _file(descriptor)
    return io.TextIOWrapper(
        # Like Python's own streams, unbuffered if PYTHONUNBUFFERED is set.
        file if is_unbuffered else io.BufferedWriter(file),  # type: ignore[arg-type]
        encoding=before.encoding if is_text else "utf-8",
        errors="backslashreplace",  # never fails on a character that the encoding lacks
        line_buffering=descriptor == STDERR or (is_text and before.line_buffering),
        write_through=is_unbuffered,
    )


def _open_closed() -> None:
    """Opens descriptors 0 to 2 if they were closed, so that no file gets their output."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(number, True)
    os.close(number)
