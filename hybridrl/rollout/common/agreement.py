"""Checks that all tensor-parallel ranks of a replica draw the same tokens.

Every rank calls `report` after each step and `settle` before the next step. `settle` waits until
all ranks have reported the last step, or with `steps_ahead=1` the step before it. No rank therefore
continues with tokens that its peers did not draw. With `steps_ahead=1`, ranks may already have
started different steps when they detect a difference, but no rank waits for its device.

On one host the ranks exchange checksums through shared memory, which takes microseconds. Messages
are used only between hosts, or if memory cannot be shared, because they added 0.3 ms to a step and
arrived up to 1 ms later.
"""

from __future__ import annotations

import os
import select
import time
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hybridrl.parallel import peer_memory

CPU = torch.device("cpu")
# A rank may write a step's checksum before a peer has read the checksum from three steps earlier.
KEPT_STEPS = 4
SUM_BITS = 32
SUM = (1 << SUM_BITS) - 1
STEP = (1 << 31) - 1
SPIN_S, POLL_S = 0.001, 0.0002
PEER_CHECK_S = 0.5
DEFAULT_TIMEOUT_S = 1800.0  # gloo's default


class TokensDifferError(RuntimeError):
    """Raised if a replica's ranks drew different tokens, so that their caches no longer match."""


class _Sums(Protocol):
    def publish(self, step: int, own: int) -> None: ...

    def wait(self, step: int) -> list[int]:
        """Waits for the checksums of all ranks; called once for each step, in order."""


class TokenAgreement:
    """Compares the tokens that the ranks of a replica drew.

    Args:
        ranks: Global ranks of the replica.
        sums: Exchange of checksums; None for a replica of one rank.
        steps_ahead: Number of steps that a rank may start before it knows whether its peers drew
            the same tokens: 1 if the engine starts a batch and then waits for the previous batch;
            otherwise 0.
    """

    def __init__(self, ranks: Sequence[int], sums: _Sums | None, steps_ahead: int = 0) -> None:
        self._ranks, self._sums, self._steps_ahead = list(ranks), sums, steps_ahead
        self._step = 0
        self._unsettled: deque[int] = deque()
        self._difference: TokensDifferError | None = None

    @classmethod
    def over(
        cls, group: dist.ProcessGroup, timeout_s: float | None = None, steps_ahead: int = 0
    ) -> TokenAgreement:
        """Returns the agreement of a gloo group's ranks, with a time limit; collective."""
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == 1:
            return cls(ranks, None, steps_ahead)
        members = _Members(group, group.rank(), group.size())
        limit_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        hosts = members.gather_objects(peer_memory.host_id())
        is_out_of_reach = peer_memory.why_unreachable(CPU, hosts)
        if is_out_of_reach or peer_memory.why_unusable(CPU, limit_s, members):
            return cls(ranks, _GatheredSums(group), steps_ahead)
        return cls(ranks, _SharedSums(members, ranks, limit_s), steps_ahead)

    def report(self, names: Sequence[str], tokens: Sequence[int]) -> None:
        """Publishes the tokens that this rank drew, one for each request name."""
        if self._sums is None or self._difference is not None:
            return
        self._step += 1
        own = zlib.crc32(array("q", tokens), zlib.crc32("\n".join(names).encode()))
        self._sums.publish(self._step, own)
        self._unsettled.append(self._step)

    def settle(self, is_last: bool = False) -> None:
        """Waits for all ranks' reports, except for the last `steps_ahead` steps unless `is_last`.

        Raises:
            TokensDifferError: Ranks drew different tokens. Raised on all ranks, and again before
                each later step; names the differing ranks.
        """
        if self._difference is not None and not is_last:
            raise self._difference
        while len(self._unsettled) > (0 if is_last else self._steps_ahead):
            assert self._sums is not None
            step = self._unsettled.popleft()
            sums = self._sums.wait(step)
            differing = [
                rank for rank, one in zip(self._ranks, sums, strict=True) if one != sums[0]
            ]
            if differing:
                self._unsettled.clear()
                self._difference = TokensDifferError(
                    f"in engine step {step} ranks {differing} drew other tokens than rank "
                    f"{self._ranks[0]} of replica {self._ranks}: their weights, seeds or requests "
                    "differ"
                )
                raise self._difference


@dataclass(frozen=True)
class _Members:
    """A group's ranks, numbered by their position in the group, as `peer_memory` expects them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def gather_objects(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found


class _GatheredSums:
    """Exchanges checksums as messages, eight bytes per rank and step."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, group.size()
        self._sent: deque[tuple[dist.Work, list[torch.Tensor]]] = deque()

    def publish(self, step: int, own: int) -> None:
        mine = torch.tensor([own])
        sums = [torch.empty_like(mine) for _ in range(self._size)]
        self._sent.append((dist.all_gather(sums, mine, group=self._group, async_op=True), sums))

    def wait(self, step: int) -> list[int]:
        work, sums = self._sent.popleft()
        work.wait()
        return [int(one) for one in sums]


class _SharedSums:
    """Exchanges words, each with a step and its checksum, through memory that all ranks share."""

    def __init__(self, members: _Members, ranks: Sequence[int], timeout_s: float) -> None:
        memory = peer_memory.allocate(KEPT_STEPS * 8, CPU, timeout_s, members)
        pieces = [memory.of(place) for place in range(members.size)]
        self._words = [piece.view(torch.int64).numpy() for piece in pieces]
        self._own, self._ranks, self._timeout_s = self._words[members.rank], ranks, timeout_s
        self._peers = [_process(pid) for pid in members.gather_objects(os.getpid())]
        weakref.finalize(self, _close, self._peers)

    def publish(self, step: int, own: int) -> None:
        # One write stores all eight bytes, so a peer never sees a step with another step's
        # checksum.
        self._own[step % KEPT_STEPS] = (step & STEP) << SUM_BITS | own

    def wait(self, step: int) -> list[int]:
        return [self._word(place, step) & SUM for place in range(len(self._words))]

    def _word(self, place: int, step: int) -> int:
        words, slot, wanted = self._words[place], step % KEPT_STEPS, step & STEP
        began = checked = time.monotonic()
        while (word := int(words[slot])) >> SUM_BITS != wanted:
            now = time.monotonic()
            if now - began < SPIN_S:
                os.sched_yield()  # let a peer run, in case there are more ranks than cores
                continue
            time.sleep(POLL_S)
            if now - checked > PEER_CHECK_S:
                checked = now
                self._check_peer(place, step, now - began)
        return word

    def _check_peer(self, place: int, step: int, waited_s: float) -> None:
        rank, peer = self._ranks[place], self._peers[place]
        if peer is not None and _has_ended(peer):
            raise RuntimeError(f"rank {rank} ended before its engine finished step {step}")
        if waited_s > self._timeout_s:
            raise RuntimeError(
                f"rank {rank} of replica {list(self._ranks)} has not finished engine step {step} "
                f"within {self._timeout_s:g} s"
            )


def _has_ended(process: int) -> bool:
    poll = select.poll()  # select does not support descriptors above 1,023
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _close(descriptors: Sequence[int | None]) -> None:
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)


def _process(pid: int) -> int | None:
    """Returns a descriptor that becomes readable when a process ends; None if unsupported."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # some builds of Python lack pidfd_open
        return None
