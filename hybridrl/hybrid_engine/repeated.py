"""Work that is queued on a device again and again, always the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Repeated:
    """Queues the same work each time it runs: on a GPU from the second time on as one CUDA graph,
    which the host starts in one call however many kernels and messages it has.

    The first time is queued piece by piece, since kernels are compiled and groups connected then.

    Args:
        queue: queues the work on the device's current stream. Tensors keep their addresses, and it
            allocates nothing.
        device: that does the work.
    """

    def __init__(self, queue: Callable[[], object], device: torch.device) -> None:
        self._queue, self._device = queue, device
        self._graph: Any = None
        self._has_run = False

    def run(self) -> None:
        """Queues the work on the device's current stream."""
        if self._device.type == "cpu" or not self._has_run:
            self._queue()
            self._has_run = True
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            # Other threads, NCCL's watchdog among them, may ask about events meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._queue()
            self._graph = graph
        self._graph.replay()

    def close(self) -> None:
        """Gives the graph up: NCCL cannot end while a graph holds its work."""
        if self._graph is not None:
            torch.cuda.synchronize(self._device)
            self._graph = None
