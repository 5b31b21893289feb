"""Process groups that span all ranks of a job, and the collectives by which ranks agree.

Who waits for whom: all ranks of the world call each function at the same point. They synchronize
over gloo, in a group without a timeout, and wait for the slowest rank as long as it is alive
(heartbeat.py). Collectives on tensors time out after `run.collective_timeout_s`. Ranks therefore
call `World.arrive` before a collective on tensors if one rank may have worked much longer than the
others (generation, scoring, files).

If one rank fails, `all_agree` informs all ranks before any of them raises an error. If some rank
cannot be informed, the job ends. No rank keeps waiting for a peer that has stopped.
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

SIZE_BITS = 48  # bits for the size of a message; the higher bits contain a signal
# Timeout for process groups in which the heartbeat limits how long ranks wait.
UNBOUNDED = datetime.timedelta(days=365)
DYING_S = 0.5


@dataclass
class Agreement:
    """Values at the end of `World.all_agree`: this rank's, and those of all ranks."""

    value: Any = None
    values: list[Any] = field(default_factory=list)


class World:
    """All ranks of the job, and their communication. mesh.py decides which ranks train together.

    Creating a World invalidates earlier ones, because Megatron stores only one set of groups per
    process.

    Methods that exchange something raise PeerError if a rank is lost, has died or does not arrive.

    Args:
        timeout_s: Timeout in seconds for a collective that all ranks have entered.
        stall_timeout_s: Maximum time in seconds to wait for a rank that is alive; None for no
            limit.

    Attributes:
        host_ranks: Ranks on this rank's host, including itself, ascending.
        sums_on_host: Whether sums and maxima use gloo, so that they do not wait behind an engine's
            kernels on the device.
        stop_signal: Number of the signal that asked some rank to save and stop; 0 if there was no
            signal. Changes only when all ranks exchange values, in the same way on all ranks.
    """

    def __init__(
        self, platform: Platform, timeout_s: float, stall_timeout_s: float | None = None
    ) -> None:
        self.platform, self.timeout_s = platform, timeout_s
        self.rank: int = dist.get_rank()
        self.size: int = dist.get_world_size()
        self.heartbeat = heartbeat.of_job(timeout_s, stall_timeout_s)
        self.stop_signal, self.sums_on_host = 0, False
        self.cpu_group = dist.new_group(backend="gloo", timeout=UNBOUNDED)
        self._introduce()
        parallel_state.destroy_model_parallel()  # groups of an earlier World in this process
        self.sum_over_world(torch.zeros(1))  # makes NCCL connect the ranks now

    def _introduce(self) -> None:
        host = heartbeat.host_id()
        ranks: list[tuple[str, int]] = self.gather_objects((host, os.getpid()))
        self.host_ranks = [rank for rank, (other, _) in enumerate(ranks) if other == host]
        self.num_hosts = len({other for other, _ in ranks})
        self.heartbeat.set_host_peers(ranks)

    def count_groups_alike(self) -> None:
        """Sets torch's counter of process groups to the same value on all ranks.

        Groups of only some ranks make the counters differ, but ranks find each other by names that
        contain the counter.
        """
        counted = dist.distributed_c10d._world
        counted.group_count = max(self.gather_objects(counted.group_count))

    def forget_stop(self) -> None:
        """Ignores all signals received so far; all ranks call it between the same collectives."""
        self.heartbeat.forget_stop()
        self.stop_signal = 0

    def sum_over_world(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `values` (same shape on all ranks) over all ranks, on the CPU."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max_over_world(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the elementwise maximum of `values` over all ranks, on the CPU."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: torch.Tensor, op: Any) -> torch.Tensor:
        if self.sums_on_host:
            return self._begin_reduction(values.cpu(), op)()
        # A sync point: the host reads the reduced metrics and columns.
        on_device = values.to(self.platform.device, copy=True)
        dist.all_reduce(on_device, op=op)
        return on_device.cpu()

    def sum_on_host(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `values` over all ranks, on the CPU and over gloo."""
        return self.begin_sum_on_host(values)()

    def begin_sum_on_host(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts `sum_on_host`. Returns a function that waits for the sum and returns it.

        Until that function has returned, no rank may start another exchange over gloo.
        """
        return self._begin_reduction(values, dist.ReduceOp.SUM)

    def _begin_reduction(self, values: torch.Tensor, op: Any) -> Callable[[], torch.Tensor]:
        what, total = "an exchange of sums", values.clone()
        with self._explained(what):
            work = dist.all_reduce(total, op, self.cpu_group, async_op=True)

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
        """Fills `received` with the parts from all ranks, in rank order; over gloo.

        Args:
            received, sent: CPU tensors, split along their first dimension.
            received_W, sent_W: Sizes of the parts received from, and sent to, each rank.
        """
        what = "an exchange of samples"
        with self._explained(what):
            work = dist.all_to_all_single(
                received, sent, list(received_W), list(sent_W), group=self.cpu_group, async_op=True
            )
            self.heartbeat.wait(work, what)

    def exchange_objects(self, sent: Mapping[int, Any]) -> list[Any]:
        """Returns the (picklable) objects from all ranks; `sent` has those for each rank."""
        packed = [pack(sent.get(rank)) for rank in range(self.size)]
        sizes = torch.tensor([len(one) for one in packed])
        sizes_in, ones = torch.empty_like(sizes), [1] * self.size
        self.all_to_all(sizes_in, sizes, ones, ones)
        lengths = sizes_in.tolist()
        received = torch.empty(sum(lengths), dtype=torch.uint8)
        if int(self.sum_on_host(sizes.sum())):  # at least one rank sends an object
            self.all_to_all(received, torch.cat(packed), lengths, sizes.tolist())
        return [unpack(part) for part in received.split(lengths)]

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's (picklable) `value`; NumPy arrays are sent without pickling."""
        return self._gather(pack(value), "an exchange of values")

    def broadcast_object(self, value: Any, source: int) -> Any:
        """Returns the (picklable) `value` of rank `source` on every rank; over gloo."""
        what = f"a broadcast of rank {source}"

        def wait(work: dist.Work) -> None:
            self.heartbeat.wait(work, what)

        with self._explained(what):
            return broadcast_object(value, self.rank == source, source, self.cpu_group, wait)

    def check(self) -> None:
        self.heartbeat.check()

    def has_lost(self) -> bool:
        """Whether the job has declared a rank lost, or a rank on this host has ended."""
        return self.heartbeat.verdict is not None or bool(self.heartbeat.dead_host_peers())

    def dead_ranks(self) -> list[int]:
        """Returns the ranks on this host whose processes have ended.

        Waits up to DYING_S for a process to end, because its connections close before it ends.
        """
        deadline = time.monotonic() + DYING_S
        while not (dead := self.heartbeat.dead_host_peers()) and time.monotonic() < deadline:
            time.sleep(DYING_S / 100)
        return dead

    def arrive(self, what: str) -> None:
        """Waits until all ranks have arrived, before a collective with a timeout.

        Call it if one rank's preceding work (`what`) may take much longer than another's.
        """
        with self.heartbeat.part(what), self._explained(what):
            work = dist.barrier(group=self.cpu_group, async_op=True)
            self.heartbeat.wait(work, what)

    @contextlib.contextmanager
    def all_agree(self, what: str, is_unbounded: bool = False) -> Iterator[Agreement]:
        """Lets all ranks continue after its block, or all ranks raise an error.

        Each rank may set the agreement's `value`. After the block, `values` contains the values of
        all ranks.

        When one rank has failed, a peer may be waiting in a collective that the failed rank never
        enters. In NCCL, the peer's kernels would spin until `run.collective_timeout_s`, and no
        thread could interrupt them. The failed rank therefore records its error in the store and
        waits PATIENCE_S for all ranks to arrive. If they do not, it raises its error alone, and the
        end of its process stops the peers: gloo collectives fail when a connection closes, and the
        launcher or torchrun kills processes that wait in NCCL.

        Args:
            what: Name of the block's work, for messages.
            is_unbounded: Whether the block's collectives in the default group have no timeout,
                because a library reads or writes files between them.

        Raises this rank's own UserError or the first one; PeerError if another rank raised another
        error, or did not arrive.
        """
        agreement, error = Agreement(), None
        with self.heartbeat.part(what, is_unbounded), self._unbounded(is_unbounded):
            try:
                with contained():
                    yield agreement
            except Exception as caught:  # sent to all ranks below, and then raised again
                if isinstance(caught, PeerError) and caught.is_lost:  # all ranks know about it
                    raise
                error = caught
        room = WaitingRoom(self.rank, self.size)
        outcome = None if error is None else error if isinstance(error, UserError) else _line(error)
        if error is not None and not room.wait_in_failure(f"failed in {what}: {_line(error)}"):
            first = room.first_failure()  # another rank's failure may have closed a connection
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
        """Context manager: disables the timeout of collectives in the default group."""
        if not is_unbounded:
            yield
            return
        # torch 2.13 has only the private function; 2.15 warns about it.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(UNBOUNDED)
        try:
            yield
        finally:
            set_timeout(datetime.timedelta(seconds=self.timeout_s))

    @contextlib.contextmanager
    def _explained(self, what: str, room: WaitingRoom | None = None) -> Iterator[None]:
        """Raises a PeerError that names the work and the failed rank if a collective fails."""
        try:
            yield
        except PeerError:
            raise
        except RuntimeError as lost:
            known = None if room is None else room.first_failure()
            dead = self.dead_ranks()
            who = f"ranks {dead} on its host have ended" if dead else "some rank has ended"
            message = (
                f"rank {self.rank} could not communicate with all ranks after {what}: {who} "
                f"({lost})"
            )
            culprit = dead[0] if len(dead) == 1 else None
            raise known or PeerError(message, culprit) from lost

    def _gather(
        self, packed: torch.Tensor, what: str, room: WaitingRoom | None = None
    ) -> list[Any]:
        """Returns the unpacked values of all ranks.

        One collective with 8 bytes per rank, then a broadcast for a single value. The upper bits of
        the sizes contain the signal that asks a rank to stop.
        """
        group = self.cpu_group

        def wait(work: dist.Work) -> None:
            self.heartbeat.wait(work, what, poll=None if room is None else room.look)

        with self._explained(what, room):
            given = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            mine = len(packed) | self.heartbeat.stop_signal << SIZE_BITS
            wait(dist.all_gather(given, torch.tensor([mine]), group=group, async_op=True))
            sizes = [int(one) & ((1 << SIZE_BITS) - 1) for one in given]
            self.stop_signal = max(int(one) >> SIZE_BITS for one in given)
            longest = max(sizes)
            if not longest:
                return [None] * self.size
            # An all_gather would pad the values of all other ranks.
            if sizes.count(0) == self.size - 1:
                source = sizes.index(longest)
                part = packed if self.rank == source else torch.empty(longest, dtype=torch.uint8)
                wait(dist.broadcast(part, source, group=group, async_op=True))
                return [unpack(part) if rank == source else None for rank in range(self.size)]
            padded = torch.nn.functional.pad(packed, (0, longest - len(packed)))
            parts = [torch.empty_like(padded) for _ in sizes]
            wait(dist.all_gather(parts, padded, group=group, async_op=True))
        return [unpack(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def same_on_all_ranks(
    world: World, what: str, value: str, ranks: Collection[int] | None = None
) -> None:
    """Raises RuntimeError unless `value` (a schedule's hash) is equal on `ranks`; collective."""
    values: Sequence[str] = world.gather_objects(value)
    first, *others = sorted(range(world.size) if ranks is None else ranks)
    differing = [rank for rank in others if values[rank] != values[first]]
    if differing:
        raise RuntimeError(f"{what} differs between rank {first} and ranks {differing}: {values}")
