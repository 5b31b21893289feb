"""Rank 0's stderr, on its way to its log and to the console. No torch."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import IO

from hybridrl import console

END_S = 1.0  # for the copy's end, once the rank is gone
READ_S = 0.2  # to read what a rank has written that is not gone yet, and writes no more


class CopiedStderr:
    """What rank 0 writes to stderr.

    Attributes:
        fault: why the log lacks the rest; None if it is whole.
    """

    def __init__(self) -> None:
        self.fault: str | None = None
        self._thread: threading.Thread | None = None

    def start(self, source: IO[bytes], log: Path) -> None:
        """Begins to copy."""
        self._thread = threading.Thread(target=self._copy, args=(source, log), daemon=True)
        self._thread.start()

    def finish(self, is_gone: bool) -> None:
        """Waits until all is copied, unless something keeps the rank's stderr open: what it has
        started, or itself where it is killed and not gone.
        """
        if self._thread is not None:
            self._thread.join(END_S if is_gone else READ_S)

    def _copy(self, source: IO[bytes], log: Path) -> None:
        """Reads until the end whatever happens: a rank whose pipe is full waits for ever."""
        with log.open("ab", buffering=0) as file:
            while block := os.read(source.fileno(), 65536):
                try:
                    if self.fault is None:
                        _write_all(file.fileno(), block)
                except OSError as error:  # the disk is full; the console still gets all
                    self.fault = error.strerror
                console.write(console.STDERR, block)


def _write_all(descriptor: int, block: bytes) -> None:
    while block:  # a disk takes what it has room for, and fails only the next time
        block = block[os.write(descriptor, block) :]
