"""The check that all tensor-parallel ranks of a replica draw the same tokens.

Who waits for whom: every rank calls `report` after each step and `settle` before the next; `settle`
waits until all ranks have reported a step, the one that `steps_ahead` says. So no rank ends on
tokens that its peers do not have. With `steps_ahead` ranks may have started different steps when
they hear of a difference: nobody waits for the device then.

On one host the sums lie in memory that all ranks map, which takes microseconds. A message took 0.3
ms of a step to send and up to 1 ms to arrive. Between hosts, and where memory cannot be shared,
there are messages.
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
# A rank writes a step's sum while a peer may have yet to read that of three steps before.
KEPT_STEPS = 4
SUM_BITS = 32
SUM = (1 << SUM_BITS) - 1
STEP = (1 << 31) - 1
SPIN_S, LOOK_S = 0.001, 0.0002
LOOKS_AT_PEERS_EVERY_S = 0.5
NO_LIMIT_S = 1800.0  # where the engine's own limit counts, which is gloo's


class TokensDifferError(RuntimeError):
    """The ranks of one replica drew different tokens, so their caches no longer fit together."""


class _Sums(Protocol):
    """One number of every rank for each step."""

    def tell(self, step: int, own: int) -> None:
        """Tells all ranks this one's number of a step."""

    def of(self, step: int) -> list[int]:
        """Waits for the numbers of all ranks; each step is asked for once, in order."""


class TokenAgreement:
    """Compares what the ranks of one replica drew.

    Args:
        ranks: Global ranks of the replica.
        sums: Their exchange of sums; None: a rank is alone.
        steps_ahead: Steps that a rank may start before it knows whether its peers drew the same
            tokens: 1 for an engine that starts a batch and then waits for the one before; 0 for one
            that waits for the batch that it starts, or for room for its launches.
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
        """Returns the agreement of a gloo group's ranks; collective over it. `timeout_s` bounds the
        wait for a peer; None: half an hour.
        """
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == 1:
            return cls(ranks, None, steps_ahead)
        members = _Members(group, group.rank(), group.size())
        limit_s = NO_LIMIT_S if timeout_s is None else timeout_s
        hosts = members.gather_objects(peer_memory.host_id())
        is_out_of_reach = peer_memory.why_unreachable(CPU, hosts)
        if is_out_of_reach or peer_memory.why_unusable(CPU, limit_s, members):
            return cls(ranks, _GatheredSums(group), steps_ahead)
        return cls(ranks, _SharedSums(members, ranks, limit_s), steps_ahead)

    def report(self, names: Sequence[str], tokens: Sequence[int]) -> None:
        """Tells the other ranks what this one drew: names of requests, and a token of each."""
        if self._sums is None or self._difference is not None:
            return
        self._step += 1
        own = zlib.crc32(array("q", tokens), zlib.crc32("\n".join(names).encode()))
        self._sums.tell(self._step, own)
        self._unsettled.append(self._step)

    def settle(self, is_last: bool = False) -> None:
        """Waits for the reports of all ranks, but for the last `steps_ahead` unless no step
        follows.

        Raises:
            TokensDifferError: On all ranks, naming those that differ; again before each step.
        """
        if self._difference is not None and not is_last:
            raise self._difference
        while len(self._unsettled) > (0 if is_last else self._steps_ahead):
            assert self._sums is not None
            step = self._unsettled.popleft()
            sums = self._sums.of(step)
            differing = [
                rank for rank, one in zip(self._ranks, sums, strict=True) if one != sums[0]
            ]
            if differing:
                self._unsettled.clear()
                self._difference = TokensDifferError(
                    f"in engine step {step} ranks {differing} drew other tokens than rank "
                    f"{self._ranks[0]} of the same replica {self._ranks}: their weights, seeds or "
                    "requests differ"
                )
                raise self._difference


@dataclass(frozen=True)
class _Members:
    """The ranks of a group, numbered by their places in it, as `peer_memory` asks them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's `value`, in order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found


class _GatheredSums:
    """Numbers that are sent, eight bytes a rank and step."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, group.size()
        self._sent: deque[tuple[dist.Work, list[torch.Tensor]]] = deque()

    def tell(self, step: int, own: int) -> None:
        mine = torch.tensor([own])
        sums = [torch.empty_like(mine) for _ in range(self._size)]
        self._sent.append((dist.all_gather(sums, mine, group=self._group, async_op=True), sums))

    def of(self, step: int) -> list[int]:
        work, sums = self._sent.popleft()
        work.wait()
        return [int(one) for one in sums]


class _SharedSums:
    """Numbers in memory that the ranks of a host have mapped; a word has a step and its number."""

    def __init__(self, members: _Members, ranks: Sequence[int], timeout_s: float) -> None:
        memory = peer_memory.allocate(KEPT_STEPS * 8, CPU, timeout_s, members)
        pieces = [memory.of(place) for place in range(members.size)]
        self._words = [piece.view(torch.int64).numpy() for piece in pieces]
        self._own, self._ranks, self._timeout_s = self._words[members.rank], ranks, timeout_s
        self._peers = [_process(pid) for pid in members.gather_objects(os.getpid())]
        weakref.finalize(self, _close, self._peers)

    def tell(self, step: int, own: int) -> None:
        # One write of eight bytes: a peer never sees a step with another step's number.
        self._own[step % KEPT_STEPS] = (step & STEP) << SUM_BITS | own

    def of(self, step: int) -> list[int]:
        return [self._word(place, step) & SUM for place in range(len(self._words))]

    def _word(self, place: int, step: int) -> int:
        words, slot, wanted = self._words[place], step % KEPT_STEPS, step & STEP
        word = int(words[slot])
        if word >> SUM_BITS == wanted:
            return word
        began = looked = time.monotonic()
        while True:
            word = int(words[slot])
            if word >> SUM_BITS == wanted:
                return word
            now = time.monotonic()
            if now - began < SPIN_S:
                os.sched_yield()  # to a peer, where ranks are more than cores
                continue
            time.sleep(LOOK_S)
            if now - looked > LOOKS_AT_PEERS_EVERY_S:
                looked = now
                self._look_at(place, step, now - began)

    def _look_at(self, place: int, step: int, waited_s: float) -> None:
        """Raises where a peer is gone, or late."""
        rank, peer = self._ranks[place], self._peers[place]
        if peer is not None and _has_ended(peer):
            raise RuntimeError(f"rank {rank} ended before its engine had taken step {step}")
        if waited_s > self._timeout_s:
            raise RuntimeError(
                f"rank {rank} has not taken engine step {step} after {self._timeout_s:g} s, as the "
                f"others of its replica {list(self._ranks)} have"
            )


def _has_ended(process: int) -> bool:
    poll = select.poll()  # takes descriptors above 1,023 too
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _close(descriptors: Sequence[int | None]) -> None:
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)


def _process(pid: int) -> int | None:
    """Returns a descriptor that can be read from once a process has ended; None: none is given."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # Python may have been built without it
        return None
