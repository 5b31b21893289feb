"""Runs work on a background thread while the main thread continues.

Who waits for whom: the main thread waits for the work in `join`. The work never waits for the main
thread of any rank. Collectives in the work use process groups that the main thread does not use at
the same time, so the two threads may call collectives in any order. On a GPU, the work runs on a
separate stream, after the kernels that the main thread has enqueued, and is complete when `join`
returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from hybridrl.metrics.timing import Span

POLL_S = 0.05  # interval at which the main thread checks the job


class BackgroundThread:
    """Runs one function at a time. `span` has the start and end of the last joined work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._began = self._ended = 0.0
        self.span: Span | None = None

    def start(self, work: Callable[[], None], name: str) -> None:
        """Starts the work. Earlier work must have been joined."""
        if self._thread is not None:
            raise RuntimeError(f"{name}: earlier work is not joined")
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._error, self._began = None, time.perf_counter()
        # A daemon thread, so that a failing process does not wait for it.
        self._thread = threading.Thread(target=self._run, args=[work], name=name, daemon=True)
        self._thread.start()

    def join(self, poll: Callable[[], None], timeout_s: float | None = None) -> bool:
        """Waits for the work, polling, and raises its error; False after `timeout_s`."""
        if (thread := self._thread) is None:
            return True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while thread.is_alive():
            if deadline is not None and time.monotonic() > deadline:
                return False
            thread.join(POLL_S)
            if thread.is_alive():
                poll()
        name, self._thread = thread.name, None
        self.span = Span(name, self._began, self._ended)
        if (error := self._error) is not None:
            raise error
        return True

    def _run(self, work: Callable[[], None]) -> None:
        try:
            if self._stream is None:
                work()
            else:
                torch.cuda.set_device(self._device)  # each thread has its own current device
                with torch.cuda.stream(self._stream):
                    work()
                self._stream.synchronize()  # so that results can be read after `join`
        except BaseException as error:  # raised again by `join`
            self._error = error
        finally:
            self._ended = time.perf_counter()
