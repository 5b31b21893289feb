"""Enqueues the same operations on a device many times.

Invariant: a graph replays the operations that were enqueued when it was captured, so code that
moves a tensor must create another `Repeated`. Who waits for whom: only `capture` waits, once, until
this rank's device is idle; it also returns PyTorch's cached blocks to the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch


class Repeated:
    """Enqueues the same operations in each run; on a GPU as one CUDA graph from the second run on.

    The first run enqueues them individually, because it compiles kernels and connects process
    groups.

    Args:
        queue: Method that enqueues the operations on the device's current stream, allocates no
            memory, and whose tensors keep their addresses. Referenced weakly, because its object
            may own this `Repeated`.
    """

    def __init__(self, queue: Callable[[], object], device: torch.device) -> None:
        self._method, self._device = WeakMethod(queue), device
        self._graph: Any = None
        self._has_run = False

    def capture(self) -> None:
        """Captures the graph after the first run; must precede operations that wait for ranks."""
        if self._device.type == "cpu" or not self._has_run or self._graph is not None:
            return
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may query events during the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._queue()
        self._graph = graph

    def run(self) -> None:
        self.capture()
        if self._graph is not None:
            self._graph.replay()
            return
        self._queue()
        self._has_run = True

    def _queue(self) -> None:
        queue = self._method()
        assert queue is not None  # the caller of `run` or `capture` keeps the object alive
        queue()

    def close(self) -> None:
        if self._graph is not None:
            torch.cuda.synchronize(self._device)
            self._graph = None
