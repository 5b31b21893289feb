"""Waits in the job's key-value store for ranks that may never arrive."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from enum import StrEnum

import torch.distributed as dist

from hybridrl.parallel.failure import PeerError
from hybridrl.parallel.heartbeat import POLL_S

# How long a failed rank waits for other ranks in `all_agree`, and the longest interval between two
# checks of the store. The interval is long, because hundreds of ranks may wait hours for a
# straggler.
PATIENCE_S = 10.0
MAX_POLL_S = 2.0
_NUMBERS = itertools.count()  # numbers of agreements, equal on all ranks
_WRITTEN: list[int] = []  # numbers of agreements in which this rank was the first to wait


class WaitingRoom:
    """Entries in the store for one call of `all_agree`, used once a rank has waited or failed.

    The store works even if peers do not respond. `waiting` counts the ranks that are in the gather
    or about to enter it. `failed` contains the first failure. `left` means that a failed rank has
    stopped waiting. The rank that created `waiting` deletes it two agreements later, when all ranks
    have left this one.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size, self._is_counted = rank, size, False
        self._every_s, self._next_look = POLL_S / 2, 0.0
        store = dist.distributed_c10d._get_default_store()
        self._number = next(_NUMBERS)
        self._store = dist.PrefixStore(f"hybridrl/agreement/{self._number}", store)
        with contextlib.suppress(dist.DistError):  # the store was in a rank that has ended
            for number in [one for one in _WRITTEN if one < self._number - 1]:
                _WRITTEN.remove(number)
                dist.PrefixStore(f"hybridrl/agreement/{number}", store).delete_key("waiting")

    def wait_in_failure(self, message: str) -> bool:
        """Records this rank's failure and waits for other ranks. Returns whether all arrived."""
        try:
            self._store.compare_set("failed", "", f"{self._rank} {message}")
            self._store.add("waiting", 1)
            self._is_counted = True
            deadline = time.monotonic() + PATIENCE_S
            while not self._store.check(["left"]):
                if self._store.add("waiting", 0) >= self._size:
                    return True
                if time.monotonic() > deadline:
                    self._store.set("left", "")
                    # Let waiting ranks read the failure before the store ends.
                    time.sleep(MAX_POLL_S + POLL_S)
                time.sleep(POLL_S)
        except dist.DistError:  # the store was in a rank that has ended
            pass
        return False

    def look(self) -> None:
        """Raises an error if a failed rank has left; called by other ranks while they wait."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._every_s = min(2 * self._every_s, MAX_POLL_S)
        self._next_look = now + self._every_s
        if not self._is_counted:
            self._is_counted = True
            if self._store.add("waiting", 1) == 1:
                _WRITTEN.append(self._number)
        if self._store.check(["left"]):
            raise self.first_failure() or RuntimeError("a rank that failed has left")

    def first_failure(self) -> PeerError | None:
        """Returns the first failed rank's error; None if unknown, or if it is this rank's."""
        try:
            if not self._store.check(["failed"]):
                return None
            rank, message = self._store.get("failed").decode().split(" ", 1)
        except dist.DistError:
            return None
        culprit = int(rank)
        return None if culprit == self._rank else PeerError(f"rank {rank} {message}", culprit)


class BarrierOutcome(StrEnum):
    """How a `timed_barrier` ended."""

    READY = "ready"  # all ranks arrived and became ready
    UNREADY = "unready"  # all ranks arrived, but some did not become ready in time
    LATE = "late"  # some ranks did not arrive in time
    LOST = "lost"  # a rank is lost


def timed_barrier(
    name: str,
    size: int,
    within_s: float,
    come_within_s: float,
    is_ready: Callable[[], bool],
    is_lost: Callable[[], bool],
) -> BarrierOutcome:
    """Waits for a limited time until all ranks have called this function and are ready.

    Ranks meet in the job's key-value store, so the barrier needs no process group. The first rank
    that decides on an outcome does so for all ranks.

    Args:
        name: Name of the barrier; must be the same on all ranks, and different for each barrier.
        within_s: Maximum time that this rank waits if all ranks have arrived.
        come_within_s: Maximum time that this rank waits for ranks that have not arrived; at most
            `within_s`.
        is_ready: Function that is called until it returns that this rank is ready.
        is_lost: Function that is called repeatedly; returns whether a rank is known to be lost.
    """
    store = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"hybridrl/barrier/{name}", store)
    since, is_counted = time.monotonic(), False
    try:
        store.add("here", 1)
        while not store.check(["outcome"]):
            if not is_counted and is_ready():
                is_counted = True
                store.add("ready", 1)
            waited_s, have_come = time.monotonic() - since, store.add("here", 0) >= size
            if store.add("ready", 0) >= size:
                store.compare_set("outcome", "", BarrierOutcome.READY)
            elif is_lost():
                store.compare_set("outcome", "", BarrierOutcome.LOST)
            elif waited_s > (within_s if have_come else come_within_s):
                found = BarrierOutcome.UNREADY if have_come else BarrierOutcome.LATE
                store.compare_set("outcome", "", found)
            else:
                time.sleep(POLL_S)
        return BarrierOutcome(store.get("outcome").decode())
    except dist.DistError:  # the store was in a rank that has ended
        return BarrierOutcome.LOST
