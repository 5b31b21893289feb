"""The check that all tensor-parallel ranks of a replica draw the same tokens.

Who waits for whom: every rank of the group calls `report` after every step and `settle` before the
next; `settle` waits until all ranks have reported a step. Which one says `steps_ahead`. So no rank
finds itself done on tokens that its peers do not have, and all hear of a difference before they
wait for a step that follows it. With `steps_ahead` they may have started that one, each another:
what it has on the device may never end, and nobody is to wait for it.

On one host sums lie in memory that all ranks of the replica have mapped: two ranks that are as fast
wait microseconds. A message took a third of a millisecond of each step to send and up to one to
come, of four that a step of a small model takes. Between hosts, and where memory cannot be shared,
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
        ranks: of the replica.
        sums: how they tell each other what they drew; None: a rank is alone.
        steps_ahead: how many steps a rank may start before it knows of the tokens that they follow
            whether its peers have drawn them. 1 for an engine whose step starts a batch and then
            waits for the one before, which all ranks have started alike; 0 for one that waits for
            the batch that it starts, or whose start of a batch has so many launches that it waits
            for room for them: where its peers have started another one, it would wait forever.
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
        """Returns that of a group's ranks; collective over it.

        Args:
            group: gloo group of the replica's ranks.
            timeout_s: how long `settle` waits for a peer; None: half an hour.
            steps_ahead: as of the class.
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
        """Waits for the reports of all ranks; once ranks differ, for none any more.

        Args:
            is_last: whether no step follows; else the last `steps_ahead` reports may be open.

        Raises:
            TokensDifferError: on all of them, naming those that differ; again before each step.
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
