"""Copies rank 0's stderr to its log and to the console. No torch."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import IO

from hybridrl import console

END_S = 1.0  # time to finish the copy after the rank is gone
READ_S = 0.2  # time to copy the last output of a rank that is killed but not gone


class CopiedStderr:
    """A thread that copies rank 0's stderr.

    Attributes:
        fault: Reason why the log is incomplete; None if it is complete.
    """

    def __init__(self) -> None:
        self.fault: str | None = None
        self._thread: threading.Thread | None = None

    def start(self, source: IO[bytes], log: Path) -> None:
        """Starts to copy."""
        self._thread = threading.Thread(target=self._copy, args=(source, log), daemon=True)
        self._thread.start()

    def finish(self, is_gone: bool) -> None:
        """Waits for the end of the copy, for a limited time.

        The rank's child processes may keep its stderr open, or the rank itself if it is killed but
        not gone.
        """
        if self._thread is not None:
            self._thread.join(END_S if is_gone else READ_S)

    def _copy(self, source: IO[bytes], log: Path) -> None:
        """Copies until the end, even after errors: a rank whose pipe is full blocks forever."""
        with log.open("ab", buffering=0) as file:
            while block := os.read(source.fileno(), 65536):
                try:
                    if self.fault is None:
                        _write_all(file.fileno(), block)
                except OSError as error:  # the disk is full; the console still gets everything
                    self.fault = error.strerror
                console.write(console.STDERR, block)


def _write_all(descriptor: int, block: bytes) -> None:
    while block:  # a full disk accepts a part and fails at the next write
        block = block[os.write(descriptor, block) :]
