"""Work that is queued on a device again and again, always the same.

Invariant: once there is a graph, its work is what was queued when it was made; whoever moves a
tensor makes another `Repeated`. Who waits for whom: `capture` waits for all of this rank's device
and gives PyTorch's free blocks back to it, once; nothing else waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch


class Repeated:
    """Queues the same work each time it runs: on a GPU from the second time on as one CUDA graph,
    which the host starts in one call however many kernels and messages it has.

    The first time is queued piece by piece, since kernels are compiled and groups connected then.

    Args:
        queue: method that queues the work on the device's current stream. Its object is not kept
            alive: it may own this. Tensors keep their addresses, and it allocates nothing.
        device: that does the work.
    """

    def __init__(self, queue: Callable[[], object], device: torch.device) -> None:
        self._method, self._device = WeakMethod(queue), device
        self._graph: Any = None
        self._has_run = False

    def capture(self) -> None:
        """Makes the graph, if it is time to and there is none; waits for all of the device's work,
        so that it comes before any work that waits for other ranks.
        """
        if self._device.type == "cpu" or not self._has_run or self._graph is not None:
            return
        graph = torch.cuda.CUDAGraph()
        # Other threads, NCCL's watchdog among them, may ask about events meanwhile.
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
        assert queue is not None  # who runs this has it
        queue()

    def close(self) -> None:
        """Gives the graph up: NCCL cannot end while a graph holds its work."""
        if self._graph is not None:
            torch.cuda.synchronize(self._device)
            self._graph = None
