"""Work that is queued on a device many times without change.

Invariant: a graph repeats the work that was queued when it was captured; code that moves a tensor
makes another `Repeated`. Who waits for whom: `capture` waits for all work of this rank's device and
returns PyTorch's free blocks to the driver, once; nothing else waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch


class Repeated:
    """Queues the same work on each run; on a GPU as one CUDA graph from the second run on.

    The host starts a graph with one call, however many kernels and messages it has. The first run
    queues each piece, since kernels are compiled and groups connected then.

    Args:
        queue: Method that queues the work on the device's current stream. It allocates nothing, and
            its tensors keep their addresses. Its object may own this one, so it is referenced
            weakly.
        device: Device that runs the work.
    """

    def __init__(self, queue: Callable[[], object], device: torch.device) -> None:
        self._method, self._device = WeakMethod(queue), device
        self._graph: Any = None
        self._has_run = False

    def capture(self) -> None:
        """Captures the graph if the first run is over and there is none.

        Capture waits for all work of the device, so it must precede work that waits for other
        ranks.
        """
        if self._device.type == "cpu" or not self._has_run or self._graph is not None:
            return
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may query events during the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._queue()
        self._graph = graph

    def run(self) -> None:
        """Queues the work on the device's current stream."""
        self.capture()
        if self._graph is not None:
            self._graph.replay()
            return
        self._queue()
        self._has_run = True

    def _queue(self) -> None:
        queue = self._method()
        assert queue is not None  # the caller of this method owns the object
        queue()

    def close(self) -> None:
        """Drops the graph: NCCL cannot shut down while a graph holds its work."""
        if self._graph is not None:
            torch.cuda.synchronize(self._device)
            self._graph = None
