"""Process groups of one job, and the collectives that keep ranks agreed.

Everything here is collective: every rank of the world calls it at the same point. An error of one
rank is made known to all by `all_agree` before anyone raises, or ends the job: no rank is left
waiting for a peer that has stopped.

Who waits for whom: ranks come together over gloo, in a group without a bound of its own, and wait
for the slowest as long as it lives (heartbeat.py). Collectives of tensors are bounded by
`run.collective_timeout_s`; where they follow work that may take one rank longer than another
(generation, scoring, files), ranks come together first.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hybridrl.config.own_code import contained
from hybridrl.errors import UserError
from hybridrl.parallel import heartbeat
from hybridrl.parallel.failure import PeerError
from hybridrl.parallel.messages import broadcast_object, pack, unpack
from hybridrl.parallel.waiting_room import WaitingRoom
from hybridrl.platform import Platform

SIZE_BITS = 48  # of a message's size; a signal stands above
# Of process groups whose ranks wait for each other as long as all live.
UNBOUNDED = datetime.timedelta(days=365)
DYING_S = 0.5


@dataclass
class Agreement:
    """What ranks tell each other at the end of `World.all_agree`: own `value`, all `values`."""

    value: Any = None
    values: list[Any] = field(default_factory=list)


class World:
    """All ranks of the job, and how they talk; who trains with whom is a mesh's (mesh.py).

    Megatron keeps the groups of a process in one place: a new World ends the use of an older one.

    Args:
        platform: device and backend of this rank.
        timeout_s: bound of a collective that all ranks have entered, seconds.
        stall_timeout_s: bound of the wait for a rank that lives; None: there is none.

    Attributes:
        heartbeat: this rank's signs of life; waits for others.
        mates: the ranks of this one's host, itself too, ascending.
        sums_on_host: sums and maxima of values go over gloo, so that a rank whose engine generates
            meanwhile queues no collective beside it on its device.
        num_hosts: of all ranks.
        stop_signal: the signal that asked some rank to save and end, as of the last exchange of
            values, so that all ranks know it at the same place; 0: none.
    """

    def __init__(
        self, platform: Platform, timeout_s: float, stall_timeout_s: float | None = None
    ) -> None:
        self.platform, self.timeout_s = platform, timeout_s
        self.rank: int = dist.get_rank()
        self.size: int = dist.get_world_size()
        self.heartbeat = heartbeat.of_job(timeout_s, stall_timeout_s)
        self.stop_signal, self.sums_on_host = 0, False
        self._cpu_group = dist.new_group(backend="gloo", timeout=UNBOUNDED)
        self._introduce()
        parallel_state.destroy_model_parallel()  # of a World before this one, in the same process
        self.sum_over_world(torch.zeros(1))  # NCCL connects ranks at a group's first use

    def _introduce(self) -> None:
        """Tells all ranks where this one runs."""
        host = heartbeat.host_id()
        ranks: list[tuple[str, int]] = self.gather_objects((host, os.getpid()))
        self.mates = [rank for rank, (other, _) in enumerate(ranks) if other == host]
        self.num_hosts = len({other for other, _ in ranks})
        self.heartbeat.know_mates(ranks)

    def count_groups_alike(self) -> None:
        """Lets all ranks go on with the same number of process groups, after some have made groups
        among themselves: torch names a group by its number, and ranks find each other by the name.
        """
        counted = dist.distributed_c10d._world
        counted.group_count = max(self.gather_objects(counted.group_count))

    def forget_stop(self) -> None:
        """Takes no notice any more of signals that came until now; all ranks call it in turn with
        the same other calls.
        """
        self.heartbeat.forget_stop()
        self.stop_signal = 0

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        """All ranks, over gloo on every platform."""
        return self._cpu_group

    def sum_over_world(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `values` (any shape, same on all ranks) over all ranks, on the CPU."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max_over_world(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the elementwise maximum of `values` over all ranks, on the CPU."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: torch.Tensor, op: Any) -> torch.Tensor:
        if self.sums_on_host:
            return self._begun_on_host(values.cpu(), op)()
        # A sync point: what is reduced here are metrics and columns that the host reads.
        on_device = values.to(self.platform.device, copy=True)
        dist.all_reduce(on_device, op=op)
        return on_device.cpu()

    def sum_on_host(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `values` over all ranks, on the CPU as they are; over gloo.

        Raises:
            PeerError: a rank is lost, died or stays away.
        """
        return self.begin_sum_on_host(values)()

    def begin_sum_on_host(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins what `sum_on_host` does; returns what waits for the sum and returns it. Until then
        no rank begins another exchange over gloo.
        """
        return self._begun_on_host(values, dist.ReduceOp.SUM)

    def _begun_on_host(self, values: torch.Tensor, op: Any) -> Callable[[], torch.Tensor]:
        what, total = "an exchange of sums", values.clone()
        with self._explained(what):
            work = dist.all_reduce(total, op, self._cpu_group, async_op=True)

        def wait() -> torch.Tensor:
            with self._explained(what):
                self.heartbeat.wait(work, what)
            return total

        return wait

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_W: Sequence[int],
        sent_W: Sequence[int],
    ) -> None:
        """Fills `received` with what each rank sends to this one, rank after rank; over gloo.

        Args:
            received, sent: on the CPU, cut along their first dimension.
            received_W, sent_W: how much of them comes from, and goes to, each rank.

        Raises:
            PeerError: a rank is lost, died or stays away.
        """
        what, sizes = "an exchange of samples", (list(received_W), list(sent_W))
        with self._explained(what):
            work = dist.all_to_all_single(
                received, sent, sizes[0], sizes[1], group=self._cpu_group, async_op=True
            )
            self.heartbeat.wait(work, what)

    def exchange_objects(self, sent: Mapping[int, Any]) -> list[Any]:
        """Returns what each rank sends to this one (picklable), in rank order, None where it sends
        nothing; over gloo. Nothing passes a rank that it is not for.

        Args:
            sent: by the rank that it is for.

        Raises:
            PeerError: a rank is lost, died or stays away.
        """
        packed = [pack(sent.get(rank)) for rank in range(self.size)]
        sizes = torch.tensor([len(one) for one in packed])
        sizes_in, ones = torch.empty_like(sizes), [1] * self.size
        self.all_to_all(sizes_in, sizes, ones, ones)
        lengths = sizes_in.tolist()
        received = torch.empty(sum(lengths), dtype=torch.uint8)
        if int(self.sum_on_host(sizes.sum())):  # else nothing moves
            self.all_to_all(received, torch.cat(packed), lengths, sizes.tolist())
        return [unpack(part) for part in received.split(lengths)]

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's `value` (picklable; NumPy arrays travel as they are), in rank
        order; over gloo on every platform, so the device has no part in it.

        Raises:
            PeerError: a rank is lost, died or stays away.
        """
        return self._gather(pack(value), "an exchange of values")

    def broadcast_object(self, value: Any, source: int) -> Any:
        """Returns the `value` (picklable) of rank `source` on every rank; over gloo.

        Raises:
            PeerError: a rank is lost, died or stays away.
        """
        what = f"a broadcast of rank {source}"

        def wait(work: dist.Work) -> None:
            self.heartbeat.wait(work, what)

        with self._explained(what):
            return broadcast_object(value, self.rank == source, source, self._cpu_group, wait)

    def check(self) -> None:
        """Raises PeerError if a rank is lost, which all ranks are told."""
        self.heartbeat.check()

    def has_lost(self) -> bool:
        """Whether a rank is known to be lost, as all ranks are told, or to have ended."""
        return self.heartbeat.verdict is not None or bool(self.heartbeat.dead_mates())

    def dead_ranks(self) -> list[int]:
        """Returns the ranks of this host whose processes have ended. A process that ends closes its
        connections first: one that is about to is waited for, DYING_S.
        """
        deadline = time.monotonic() + DYING_S
        while not (dead := self.heartbeat.dead_mates()) and time.monotonic() < deadline:
            time.sleep(DYING_S / 100)
        return dead

    def arrive(self, what: str) -> None:
        """Waits until all ranks have come here, the slowest too: before collectives of tensors,
        whose wait is bounded, where the work before may take one rank longer than another.

        Args:
            what: that work.

        Raises:
            PeerError: a rank is lost, died or stays away.
        """
        with self.heartbeat.part(what), self._explained(what):
            work = dist.barrier(group=self._cpu_group, async_op=True)
            self.heartbeat.wait(work, what)

    @contextlib.contextmanager
    def all_agree(self, what: str, is_unbounded: bool = False) -> Iterator[Agreement]:
        """Runs a part that may fail on one rank only; afterwards either all ranks go on or all
        raise. What each set as `value` of the agreement, all find in its `values`, by rank.

        A peer of the failed rank may sit in a collective of that part, for which nobody else comes:
        NCCL's kernels would spin there until `run.collective_timeout_s`, and no other thread could
        call the peer back. So the failed rank tells the store what happened and waits PATIENCE_S
        for all to arrive; then it raises alone, and its end brings down the others: gloo breaks off
        when a connection closes, be it here or in the peer's own collective, and processes in NCCL
        are ended by what started them (our launcher, torchrun), which sees that a rank has failed.

        Args:
            what: the part does.
            is_unbounded: whether collectives of the default group, inside, wait for a slow rank as
                long as it lives: they are of a library that lets ranks read or write files between
                them.

        Raises:
            UserError: on every rank, when any rank met one (its own, or the first other's).
            PeerError: on the other ranks, when a rank failed otherwise, or did not come.
        """
        agreement, error = Agreement(), None
        with self.heartbeat.part(what, is_unbounded), self._unbounded(is_unbounded):
            try:
                with contained():
                    yield agreement
            except Exception as caught:  # made global below, then raised again
                if isinstance(caught, PeerError) and caught.is_lost:  # all ranks know
                    raise
                error = caught
        room = WaitingRoom(self.rank, self.size)
        outcome = None if error is None else error if isinstance(error, UserError) else _line(error)
        if error is not None and not room.wait_in_failure(f"failed in {what}: {_line(error)}"):
            first = room.first_failure()  # a closed connection is not why a run failed
            raise error if first is None else first from error
        is_silent = error is None and agreement.value is None
        mine = None if is_silent else (outcome, None if error else agreement.value)
        try:
            found = self._gather(pack(mine), what, room)
        except PeerError as lost:
            if error is not None:
                raise error from lost
            raise
        if error is not None:
            raise error
        answers = [(None, None) if one is None else one for one in found]
        for rank, (other, _) in enumerate(answers):
            if isinstance(other, UserError):
                raise other
            if other is not None:
                raise PeerError(f"rank {rank} failed in {what}: {other}", rank)
        agreement.values = [value for _, value in answers]

    @contextlib.contextmanager
    def _unbounded(self, is_unbounded: bool) -> Iterator[None]:
        """Takes the bound off collectives of the default group, if told so."""
        if not is_unbounded:
            yield
            return
        set_timeout = dist.distributed_c10d._set_pg_timeout
        set_timeout(UNBOUNDED)
        try:
            yield
        finally:
            set_timeout(datetime.timedelta(seconds=self.timeout_s))

    @contextlib.contextmanager
    def _explained(self, what: str, room: WaitingRoom | None = None) -> Iterator[None]:
        """Turns a collective that failed into an error that says after what, and who did it."""
        try:
            yield
        except PeerError:
            raise
        except RuntimeError as lost:
            known = None if room is None else room.first_failure()
            dead = self.dead_ranks()
            who = f"of this host ranks {dead} have ended" if dead else "one has ended"
            said = f"rank {self.rank} had no answer from all ranks after {what}: {who} ({lost})"
            culprit = dead[0] if len(dead) == 1 else None
            raise known or PeerError(said, culprit) from lost

    def _gather(
        self, packed: torch.Tensor, what: str, room: WaitingRoom | None = None
    ) -> list[Any]:
        """Returns what each rank packed: one collective of 8 bytes a rank where all packed None, a
        broadcast besides where one rank alone packed something.

        The sizes carry the signal that asks a rank to stop in their upper bits.
        """
        with self._explained(what, room):
            given = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            mine = len(packed) | self.heartbeat.stop_signal << SIZE_BITS
            self._all_gather(given, torch.tensor([mine]), what, room)
            sizes = [int(one) & ((1 << SIZE_BITS) - 1) for one in given]
            self.stop_signal = max(int(one) >> SIZE_BITS for one in given)
            longest = max(sizes)
            if not longest:
                return [None] * self.size
            if sizes.count(0) == self.size - 1:  # padded, it would come once for every rank
                source = sizes.index(longest)
                part = packed if self.rank == source else torch.empty(longest, dtype=torch.uint8)
                work = dist.broadcast(part, source, group=self._cpu_group, async_op=True)
                self._wait(work, what, room)
                return [unpack(part) if rank == source else None for rank in range(self.size)]
            padded = torch.nn.functional.pad(packed, (0, longest - len(packed)))
            parts = [torch.empty_like(padded) for _ in sizes]
            self._all_gather(parts, padded, what, room)
        return [unpack(part[:size]) for part, size in zip(parts, sizes, strict=True)]

    def _all_gather(
        self, parts: list[torch.Tensor], own: torch.Tensor, what: str, room: WaitingRoom | None
    ) -> None:
        self._wait(dist.all_gather(parts, own, group=self._cpu_group, async_op=True), what, room)

    def _wait(self, work: dist.Work, what: str, room: WaitingRoom | None) -> None:
        self.heartbeat.wait(work, what, poll=None if room is None else room.look)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def same_on_all_ranks(
    world: World, what: str, value: str, ranks: Collection[int] | None = None
) -> None:
    """Checks that `value` (for example a schedule's hash) is equal on all ranks, or on some; all
    call.

    Raises:
        RuntimeError: naming the ranks that differ from the first.
    """
    values: Sequence[str] = world.gather_objects(value)
    asked = sorted(range(world.size) if ranks is None else ranks)
    differing = [rank for rank in asked if values[rank] != values[asked[0]]]
    if differing:
        raise RuntimeError(
            f"{what} differs between rank {asked[0]} and ranks {differing}: {values}"
        )
