"""Ranks that are threads of one process, with the host-side exchanges of a `World`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


class _Meeting:
    """Where ranks leave what the others read."""

    def __init__(self, size: int) -> None:
        self.barrier, self.left = threading.Barrier(size, timeout=60), [None] * size


class ThreadRank:
    """One rank; counts the bytes that it sends to others."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting
        self.sent_bytes = 0

    def gather_objects(self, value: Any) -> list[Any]:
        self._meeting.left[self.rank] = value
        self._meeting.barrier.wait()
        found = list(self._meeting.left)
        self._meeting.barrier.wait()
        return found

    def broadcast_object(self, value: Any, source: int) -> Any:
        return self.gather_objects(value)[source]

    def sum_on_host(self, values: Tensor) -> Tensor:
        return torch.stack(self.gather_objects(values)).sum(0)

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_W: Sequence[int], sent_W: Sequence[int]
    ) -> None:
        self.sent_bytes += sent.nbytes
        parts = self.gather_objects(sent.split(list(sent_W)))
        places = received.split(list(received_W))
        for place, part in zip(places, [of[self.rank] for of in parts], strict=True):
            place.copy_(part)


def only_rank() -> ThreadRank:
    """Returns the rank of a job of one."""
    return ThreadRank(0, 1, _Meeting(1))


def on_ranks(size: int, call: Callable[[ThreadRank], Any]) -> list[Any]:
    """Returns what `call` gives on each of `size` ranks that run at the same time."""
    meeting = _Meeting(size)

    def one(rank: int) -> Any:
        try:
            return call(ThreadRank(rank, size, meeting))
        except BaseException:
            meeting.barrier.abort()  # or the others would wait for it
            raise

    with ThreadPoolExecutor(size) as pool:
        results = [pool.submit(one, rank) for rank in range(size)]
    failed = [result.exception() for result in results if result.exception() is not None]
    real = [error for error in failed if not isinstance(error, threading.BrokenBarrierError)]
    for error in (*real, *failed):
        raise error
    return [result.result() for result in results]
