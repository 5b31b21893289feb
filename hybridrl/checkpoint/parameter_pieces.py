"""Pieces of parameters whose optimizer state is divided among data-parallel ranks, and their
exchange (optimizer_state.py).

One of the ranks with a piece of a parameter, its keeper, writes and reads the whole parameter. With
more than one replica, nearly every parameter is cut, so most of the state is sent. GPUs send saved
states over NCCL in rounds of bounded size, and copy them directly to the page-locked memory of
checkpoint copies, if there is any. With gloo, sending took 11 s for a state of 13 GB per rank
(benchmarks/results/restart_4gpu_h200.json). Loading uses gloo.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.checkpoint.optimizer_kinds import Kinds

# Maximum total size of the pieces in transit on the host while loading. Waiting for each piece
# would be slow.
MOST_BYTES_UNDER_WAY = 256 << 20
ROUND_BYTES = 64 << 20  # maximum that a rank sends or receives per round; size of the GPU buffer


@dataclass(frozen=True)
class Cut:
    """A parameter, the data-parallel ranks with a piece of it, and the elements in each piece."""

    parameter: torch.nn.Parameter
    pieces: Mapping[int, slice]
    keeper: int  # rank that writes and reads the whole parameter

    @property
    def others(self) -> Iterator[tuple[int, slice]]:
        return ((rank, span) for rank, span in self.pieces.items() if rank != self.keeper)

    def empty(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns uninitialized memory for one state of the whole parameter, from numpy, so that
        each view can become a tensor with a separate storage. Pages are allocated when they are
        written.
        """
        num_bytes = self.parameter.numel() * dtype.itemsize
        return torch.from_numpy(np.empty(num_bytes, np.uint8)).view(dtype)


def cuts_of(optimizer: Any, dp: int) -> Iterator[Cut]:
    """Yields the parameters in the order in which Megatron numbers them."""
    kept = [0] * dp  # number of elements, by rank
    for buffer in optimizer.buffers:
        for parameter, (start, end, which) in buffer.param_index_map.items():
            bucket = buffer.buckets[which]
            share = bucket.grad_data.numel() // dp
            first, last = start - bucket.offset, end - bucket.offset
            pieces = {
                rank: slice(max(first, rank * share) - first, min(last, (rank + 1) * share) - first)
                for rank in range(first // share, (last - 1) // share + 1)
            }
            keeper = min(pieces, key=lambda rank: kept[rank])
            kept[keeper] += parameter.numel()
            yield Cut(parameter, pieces, keeper)


def connect(optimizers: Iterable[Any]) -> None:
    """Sends a number between GPUs that will exchange pieces, so that NCCL allocates its memory now
    and not during the first save. Collective over the data-parallel ranks.
    """
    for optimizer in optimizers:
        group = optimizer.data_parallel_group
        cuts = list(cuts_of(optimizer, group.size()))
        if not cuts or not is_gpu(cuts[0].parameter.device):
            continue
        ways = sorted({(sender, cut.keeper) for cut in cuts for sender, _ in cut.others})
        one = torch.zeros(2, dtype=torch.float32, device=cuts[0].parameter.device)
        transfers = []
        for sender, keeper in ways:
            if group.rank() == sender:
                transfers.append(dist.P2POp(dist.isend, one[:1], group=group, group_peer=keeper))
            if group.rank() == keeper:
                transfers.append(dist.P2POp(dist.irecv, one[1:], group=group, group_peer=sender))
        for work in dist.batch_isend_irecv(transfers) if transfers else ():
            work.wait()


class SentPiece(NamedTuple):
    """Elements that one rank sends to another: ranges in the parameter and in the
    sender's piece.
    """

    key: tuple[int, str]
    sender: int
    keeper: int
    span: slice
    part: slice


def rounds_of(
    cuts: Sequence[Cut], kinds: Sequence[Kinds], num_ranks: int
) -> Iterator[list[SentPiece]]:
    """Yields rounds, equal on all ranks, in which a rank sends or receives up to ROUND_BYTES."""
    found: list[SentPiece] = []
    counts = np.zeros((2, num_ranks), np.int64)
    for index, cut in enumerate(cuts):
        for name, dtype in kinds[index].items():
            most = ROUND_BYTES // dtype.itemsize
            for sender, piece in cut.others:
                for begin in range(piece.start, piece.stop, most):
                    end = min(begin + most, piece.stop)
                    size = (end - begin) * dtype.itemsize
                    if max(counts[0, sender], counts[1, cut.keeper]) + size > ROUND_BYTES:
                        yield found
                        found, counts = [], np.zeros_like(counts)
                    counts[0, sender] += size
                    counts[1, cut.keeper] += size
                    span, part = (slice(begin - start, end - start) for start in (0, piece.start))
                    found.append(SentPiece((index, name), sender, cut.keeper, span, part))
    if found:
        yield found


def send_round(
    sent: Sequence[SentPiece],
    own: Mapping[int, Mapping[str, Tensor]],
    kept: Mapping[int, Mapping[str, Tensor]],
    group: dist.ProcessGroup,
    staging: Tensor | None,
) -> None:
    """Sends and receives this rank's pieces of a round: `own` are pieces on this rank, `kept` the
    parameters that it assembles. Without `staging`, a buffer on the GPU, pieces are received
    directly.
    """
    rank, used = group.rank(), 0
    transfers: list[dist.P2POp] = []
    arrivals: list[tuple[Tensor, Tensor]] = []
    for (index, name), sender, keeper, span, part in sent:
        if rank == sender:
            piece = own[index][name].reshape(-1)[part].view(torch.uint8)  # NCCL lacks int16
            piece = piece if staging is None else piece.to(staging.device)
            transfers.append(dist.P2POp(dist.isend, piece, group=group, group_peer=keeper))
        elif rank == keeper:
            place = kept[index][name][span].view(torch.uint8)
            if staging is not None:
                arrivals.append((place, staging[used : used + place.numel()]))
                place = arrivals[-1][1]
                used += place.numel()
            transfers.append(dist.P2POp(dist.irecv, place, group=group, group_peer=sender))
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait()
    for place, arrived in arrivals:
        place.copy_(arrived, non_blocking=True)


def staging_buffer(device: torch.device) -> Tensor | None:
    """Returns a GPU buffer for pieces of a round that go to the host; None on CPU."""
    if not is_gpu(device):
        return None
    return torch.empty(ROUND_BYTES, dtype=torch.uint8, device=device)


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


class PieceExchange:
    """Pieces in transit between the ranks of a gloo group, on the host.

    Who waits for whom: whenever too many bytes are in transit, a rank waits until all pieces that
    it has begun to send or receive have arrived. All ranks process parameters and states in the
    same order, so the slowest rank never waits for another rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group = group
        self._under_way: list[tuple[Any, Tensor]] = []
        self._num_bytes = 0

    def all_kinds(self, found: Mapping[int, Mapping[str, Tensor]]) -> dict[int, Kinds]:
        """Returns the kinds of all states that ranks have read, by parameter number. Collective."""
        own = {i: {name: one.dtype for name, one in states.items()} for i, states in found.items()}
        kinds: list[Any] = [own] * self.size
        if self.size > 1:
            dist.all_gather_object(kinds, own, group=self._group)
        return {index: one for read in kinds for index, one in read.items()}

    def send(self, piece: Tensor, peer: int) -> None:
        """Begins to send a contiguous piece."""
        piece = piece.view(torch.uint8)
        self._add(dist.isend(piece, group=self._group, group_dst=peer), piece)

    def receive(self, place: Tensor, peer: int) -> None:
        place = place.view(torch.uint8)
        self._add(dist.irecv(place, group=self._group, group_src=peer), place)

    def wait(self) -> None:
        for work, _ in self._under_way:
            work.wait()
        self._under_way, self._num_bytes = [], 0

    def _add(self, work: Any, tensor: Tensor) -> None:
        self._under_way.append((work, tensor))
        self._num_bytes += tensor.nbytes
        if self._num_bytes > MOST_BYTES_UNDER_WAY:
            self.wait()
