"""Records which collectives a rank takes part in, and how many elements their inputs have."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations in which each rank's part of a tensor is gathered, summed or exchanged.
NAMES = ("allgather", "reduce_scatter", "allreduce", "alltoall")


class Collectives(TorchDispatchMode):
    """Records collectives in this context.

    Attributes:
        found: Name of each collective, and the number of rows and columns of its input, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            name = next((one for one in NAMES if one in func.__name__), None)
            tensors = [one for one in args if isinstance(one, torch.Tensor)]
            if name is not None and tensors:
                *rows, columns = tensors[-1].shape or (1,)
                self.found.append((name, prod(rows), columns))
        return func(*args, **(kwargs or {}))
