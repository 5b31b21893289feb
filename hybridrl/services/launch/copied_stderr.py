"""Copies rank 0's stderr to rank 0's log and to the console. Does not import torch."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import IO

from hybridrl import console

END_S = 1.0  # Time to finish copying after the rank is gone.
READ_S = 0.2  # Time to copy the last output if the rank was killed but still exists.


class CopiedStderr:
    """Copies rank 0's stderr in a thread. `fault` is why the log is incomplete, or None."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self._thread: threading.Thread | None = None

    def start(self, source: IO[bytes], log: Path) -> None:
        self._thread = threading.Thread(target=self._copy, args=(source, log), daemon=True)
        self._thread.start()

    def finish(self, is_gone: bool) -> None:
        """Waits until all is copied, for a limited time: child processes may keep stderr open."""
        if self._thread is not None:
            self._thread.join(END_S if is_gone else READ_S)

    def _copy(self, source: IO[bytes], log: Path) -> None:
        """Copies until stderr ends, even after write errors: a full pipe would block the rank."""
        with log.open("ab", buffering=0) as file:
            while block := os.read(source.fileno(), 65536):
                try:
                    if self.fault is None:
                        _write_all(file.fileno(), block)
                except OSError as error:  # the disk is full; keep copying to the console
                    self.fault = error.strerror
                console.write(console.STDERR, block)


def _write_all(descriptor: int, block: bytes) -> None:
    while block:  # a nearly full disk accepts part of a block, and fails at the next write
        block = block[os.write(descriptor, block) :]
