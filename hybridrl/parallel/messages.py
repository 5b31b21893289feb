"""Packs objects into bytes for a collective: arrays are copied, everything else is pickled."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

ALIGNMENT = 8  # bytes; size of the largest number type in an array


def pack(value: Any) -> Tensor:
    """Packs `value` into a uint8 tensor (n,), where n is a multiple of 8. For None, n is 0.

    The bytes contain the number of parts and the length of each part (int64), followed by the
    parts: the pickle, and the memory of each NumPy array that it refers to.
    """
    if value is None:
        return torch.empty(0, dtype=torch.uint8)
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts: list[bytes | memoryview] = [head, *(buffer.raw() for buffer in buffers)]
    lengths = [len(parts), *map(len, parts)]
    starts = _starts(lengths[1:])
    packed = np.zeros(starts[-1], dtype=np.uint8)
    packed[: starts[0]] = np.array(lengths, dtype=np.int64).view(np.uint8)
    for start, part in zip(starts, parts, strict=False):
        packed[start : start + len(part)] = np.frombuffer(part, dtype=np.uint8)
    return torch.from_numpy(packed)


def unpack(packed: Tensor) -> Any:
    """Unpacks a value. `packed` may have trailing bytes. Arrays in the result share its memory."""
    if not len(packed):
        return None
    found = packed.numpy()
    count = int(found[:ALIGNMENT].view(np.int64)[0])
    lengths = found[ALIGNMENT : ALIGNMENT * (count + 1)].view(np.int64).tolist()
    starts = _starts(lengths)
    parts = [found[start : start + n] for start, n in zip(starts, lengths, strict=False)]
    return pickle.loads(parts[0].tobytes(), buffers=parts[1:])


def broadcast_object(
    value: Any,
    is_source: bool,
    source: int,
    group: dist.ProcessGroup,
    wait: Callable[[dist.Work], None],
) -> Any:
    """Returns the (picklable) `value` of rank `source` on every rank of a gloo group."""
    packed = pack(value if is_source else None)
    size = torch.tensor([len(packed)])
    wait(dist.broadcast(size, source, group, async_op=True))
    if not int(size):
        return None
    if not is_source:
        packed = torch.empty(int(size), dtype=torch.uint8)
    wait(dist.broadcast(packed, source, group, async_op=True))
    return value if is_source else unpack(packed)


def _starts(lengths: list[int]) -> list[int]:
    """Returns the start of each part, and the end of the last part."""
    room = [-(-length // ALIGNMENT) * ALIGNMENT for length in lengths]
    return list(accumulate(room, initial=ALIGNMENT * (len(lengths) + 1)))
