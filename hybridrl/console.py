"""The console: stdout and stderr that a run does not depend on. No imports of hybridrl.

A console may go away while a run trains: the reader of a pipe ends, a terminal is closed, the disk
behind `2> file` is full, nobody scrolls `| less`. Invariant: in a process that has called `protect`
no write to these streams raises, blocks for more than STALL_S, or ends a program that the process
starts later. What the console cannot take is dropped. The run's own files have what matters.

All code writes to `sys.stdout` and `sys.stderr`, by `say`, `print` or a library. The protection is
in the files below these streams, so it covers users' code too.
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
# How long a write waits for a console that takes nothing. Far longer than a busy reader pauses, far
# shorter than other ranks wait for this one.
STALL_S = 10.0
# A pipe that is ready takes this much without blocking (PIPE_BUF on Linux).
READY_BYTES = 4096
RETRY_S = 0.01


class ConsoleFile(io.FileIO):
    """Descriptor 1 or 2 as a file whose writes never fail.

    Args:
        descriptor: STDOUT or STDERR; stays open.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.name = f"<{NAMES[descriptor]}>"
        self._is_stalled, self._num_dropped = False, 0

    def close(self) -> None:
        """Does nothing: all streams of the descriptor share the file, and one that nobody has any
        more, as after a block of `protected`, closes it.
        """

    def write(self, data: Any, /) -> int:
        """Writes what the console takes; returns the size of all."""
        block = memoryview(data).cast("B")
        if self._num_dropped and self._is_ready():
            missing = f"\nhybridrl: {self._num_dropped} bytes of output are missing here: the "
            missing += "console did not take them\n"
            if self._written(memoryview(missing.encode())):
                self._num_dropped = 0
        rest = block
        while rest and (written := self._written(rest[:READY_BYTES])):
            rest = rest[written:]
        self._num_dropped += len(rest)
        return len(block)

    def _written(self, block: memoryview) -> int:
        """Returns how many bytes the console took; 0 where it takes none."""
        deadline = time.monotonic() + STALL_S
        while self._is_ready() and time.monotonic() < deadline:
            try:
                written = super().write(block)
            except OSError as error:
                self._give_up(error)
                return 0
            if written is not None:
                return written
            time.sleep(RETRY_S)  # the descriptor does not block, and another program was faster
        return 0

    def _is_ready(self) -> bool:
        """Whether the console can be written to; waits for that, but once only."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        self._is_stalled = not poll.poll(0.0 if self._is_stalled else STALL_S * 1000)
        return not self._is_stalled

    def _give_up(self, error: OSError) -> None:
        """Replaces a console that will never work again, so that programs that this process starts
        do not die of it.
        """
        if error.errno not in (errno.EPIPE, errno.EIO):
            return
        with contextlib.suppress(OSError):  # no descriptor is free: the next write tries again
            # A disk's EIO is not for ever.
            if error.errno == errno.EPIPE or stat.S_ISCHR(os.fstat(self.fileno()).st_mode):
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self.fileno())
                os.close(nothing)


_FILES: dict[int, ConsoleFile] = {}  # one a descriptor, since it knows whether the console stalls


def _file(descriptor: int) -> ConsoleFile:
    return _FILES.setdefault(descriptor, ConsoleFile(descriptor))


def write(descriptor: int, block: bytes) -> None:
    """Writes what a process of the run has written, as it is."""
    _file(descriptor).write(block)


def say(text: str, to: TextIO | None = None) -> None:
    """Prints a line for the user.

    Args:
        text: the line.
        to: a stream of the console; None: stderr.
    """
    stream = sys.stderr if to is None else to
    if stream is not None:  # Python has none where the descriptor was closed
        # In users' own programs and notebooks the stream may not be one of `protect`.
        with contextlib.suppress(OSError, ValueError):
            print(text, file=stream, flush=True)


def protect(*descriptors: int) -> None:
    """Replaces this process's stdout, stderr or both by streams that never fail. Streams that are
    not the console's, as in notebooks and tests, stay as they are.

    Args:
        descriptors: of STDOUT and STDERR. Leave STDOUT out where it has the result of a command:
            that a result could not be written is an error.
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
    """Protects stdout and stderr within the block, as `protect`; for a program of the user's."""
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
    """Whether a stream writes to the descriptor, or is missing since that was closed, and is not
    protected yet.
    """
    if stream is None:
        return True
    if type(stream) is not io.TextIOWrapper:
        return False
    with contextlib.suppress(OSError, ValueError):
        file = getattr(stream.buffer, "raw", stream.buffer)
        return stream.fileno() == descriptor and not isinstance(file, ConsoleFile)
    return False


def _protected(descriptor: int, before: Any) -> io.TextIOWrapper:
    """Returns a stream like the one before, which is flushed."""
    is_text = isinstance(before, io.TextIOWrapper)
    is_unbuffered = is_text and before.write_through
    if is_text:
        with contextlib.suppress(OSError, ValueError):
            before.flush()
    file = _file(descriptor)
    return io.TextIOWrapper(
        # As Python's own: with PYTHONUNBUFFERED nothing is between the text and the file.
        file if is_unbuffered else io.BufferedWriter(file),  # type: ignore[arg-type]
        encoding=before.encoding if is_text else "utf-8",
        errors="backslashreplace",  # a letter that the console lacks is no reason to end either
        line_buffering=descriptor == STDERR or (is_text and before.line_buffering),
        write_through=is_unbuffered,
    )


def _open_closed() -> None:
    """Opens descriptors up to 2 that were closed: files of the run would get their numbers, and
    what libraries print would be written there.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(number, True)
    os.close(number)
