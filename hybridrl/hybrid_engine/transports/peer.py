"""Runs a plan by reading other ranks' training parameters in place, without messages or staging.

Who waits for whom: the constructor and `run` are collective. A barrier before the copies ensures
that all parameters are final; one after them ensures that nobody changes parameters that are still
being read. In between a rank only reads the others' memory and writes its own.

One kernel reads small and cut-up rectangles from all peers in turn. Meanwhile the host queues the
copy engines' work, which begins when the kernel ends, since both together would slow each other
down (docs/adr/0003). Copy engines bring blocks that are large and contiguous at their source. A
block that is strided at its destination is staged in a destination whose own content comes last
(staging.py); a kernel copies it from there while the engines continue. The same kernel copies data
that stays on the rank. Where few ranks hold most blocks, the first kernel reads a part of these too
(kernel_share.py). From the second run on the first barrier and the copying kernels are CUDA graphs
(repeated.py), which are captured before that barrier.

Elements are cast from the source's type to the destination's as they are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from hybridrl import ops
from hybridrl.hybrid_engine.planning.kernel_share import kernel_shares, split_blocks
from hybridrl.hybrid_engine.planning.plan import CopyOp, Plan, PlanError
from hybridrl.hybrid_engine.transports.repeated import Repeated
from hybridrl.hybrid_engine.transports.staging import stage_copies
from hybridrl.hybrid_engine.transports.transport import (
    AddressWatch,
    Pair,
    Peers,
    Traffic,
    is_same_memory,
)
from hybridrl.models.hf.shards import box_view
from hybridrl.models.sources import SourceTensor
from hybridrl.parallel.peer_memory import PeerMemory

# A copy engine is faster than the kernel from this size on: 370 against 330 GB/s from 2 MiB. Below
# 1 MiB its fixed time per copy matters. Measured on H200.
BLOCK_BYTES = 2 << 20

# Programs of the kernel that runs alongside the copy engines; more would take memory bandwidth
# away from them.
LOCAL_PROGRAMS = 48

Place = tuple[int, tuple[int, ...], torch.dtype]
"""A contiguous tensor in its rank's piece of memory: offset in bytes, shape, type."""


class PeerTransport:
    """Copies the plan's slices out of the ranks' peer memory.

    Args:
        plan: Plan, the same on every rank.
        peers: Ranks of the plan.
        sources: This rank's source tensors by name, all in its part of `memory`.
        dests: This rank's destination tensors by name; written in place. A destination may be the
            same memory as a source with the same content (alias.py); then nothing is copied.
        memory: Peer memory of the same ranks.

    Raises:
        PlanError: A rank's source is not in `memory`. Raised on every rank.
    """

    def __init__(
        self,
        plan: Plan,
        peers: Peers,
        sources: Mapping[str, SourceTensor],
        dests: Mapping[str, Tensor],
        memory: PeerMemory,
    ) -> None:
        rank = peers.rank
        self._plan, self._rank, self._dests, self._memory = plan, rank, dests, memory
        own = memory.of(rank)
        self._device = own.device
        self._sources: list[dict[str, Place | None]] = peers.gather_objects(
            {name: _place(tensor, own) for name, tensor in sources.items()}
        )
        for other, places in enumerate(self._sources):
            outside = sorted(name for name, place in places.items() if place is None)
            if outside:
                raise PlanError(f"rank {other}: {outside[0]} is not in peer memory")
        self._kernel_bytes = self._agree_on_kernel(peers)
        self._engines = torch.cuda.Stream(self._device) if own.is_cuda else None
        self._beside = torch.cuda.Stream(self._device) if own.is_cuda else None
        self._watch = AddressWatch(self._dests)
        self._repeated: list[Repeated] = []
        self._traffic = Traffic(
            sent_bytes=plan.send_bytes[rank],
            received_bytes=plan.receive_bytes[rank],
            node_sent_bytes=0,
            node_received_bytes=0,
            messages=0,
            num_exchanges=0,
            staging_bytes=0,
        )

    @property
    def launches(self) -> int:
        """Number of kernels, batches of copies and barriers that a run starts."""
        batches = sum(batch.num_launches for batch in self._batches)
        kernels = sum(kernel.num_launches for kernel in self._kernels)
        return kernels + batches + 2 * bool(self._plan.streams)

    @property
    def extra_bytes(self) -> int:
        """Device memory held in addition to parameters and peer memory."""
        return sum(kernel.table_bytes for kernel in self._kernels)

    @torch.no_grad()
    def run(self) -> Traffic:
        """Fills the destination tensors; collective."""
        self.prepare()
        # All before the barrier: a capture waits for the device, and a failed rank never arrives.
        for work in self._repeated:
            work.capture()
        self._cut_up()
        self._run_blocks()
        if self._plan.streams:
            self._memory.barrier()
        return self._traffic

    def close(self) -> None:
        """Does nothing: the graphs hold kernels alone, no messages.

        Waiting for the device here could mean waiting for a failed rank at a barrier.
        """

    def prepare(self) -> None:
        """Makes the tables of the copies; makes them again only if a destination has moved."""
        if not self._watch.look_again():
            return
        local: list[Pair] = []
        remote: list[tuple[int, Pair]] = []
        of_peer: dict[int, list[Pair]] = {}
        size = self._plan.world_size
        for op, source, dest in self._copies():
            if op.source_rank == self._rank:
                if not is_same_memory(source, dest):
                    local.append((source, dest))
            elif self._is_block(source, dest):
                of_peer.setdefault(op.source_rank, []).append((source, dest))
            else:
                remote.append((op.source_rank, (source, dest)))
        # One peer after the other, and each rank starts with a different one: two ranks that read
        # from the same peer get half of its link each. More streams are no faster.
        large: list[tuple[int, Pair]] = []
        for peer in sorted(of_peer, key=lambda peer: (peer - self._rank) % size):
            taken, left = split_blocks(of_peer[peer], self._kernel_bytes[peer], BLOCK_BYTES)
            remote += [(peer, pair) for pair in taken]
            large += [(peer, pair) for pair in left]
        staged = stage_copies([pair for _, pair in large])
        self._batches = [
            ops.block_copies(pairs, self._device)
            for pairs in (staged.to_staging, staged.direct, staged.last)
        ]
        remote += [large[index] for index in staged.unstaged]
        lanes = [(peer - self._rank) % size for peer, _ in remote]
        programs = LOCAL_PROGRAMS if large else None
        on_rank = ops.rectangle_copies(local, self._device, programs=programs)
        unpack = ops.rectangle_copies(staged.from_staging, self._device, programs=programs)
        self._remote = ops.rectangle_copies([pair for _, pair in remote], self._device, lanes)
        self._kernels = on_rank, self._remote, unpack
        self._repeated = []
        has_cut_up = bool(self._plan.streams or self._remote.num_launches)
        self._cut_up = self._repeat(self._read_cut_up, has_cut_up)
        self._local = self._repeat(on_rank.run, on_rank.num_launches > 0)
        self._unpack = self._repeat(unpack.run, unpack.num_launches > 0)

    def _agree_on_kernel(self, peers: Peers) -> list[int]:
        """Returns how many bytes of each peer's blocks the kernel reads; collective."""
        own = np.zeros((2, self._plan.world_size), np.int64)
        for op, source, dest in self._copies():
            if op.source_rank != self._rank:
                own[int(self._is_block(source, dest)), op.source_rank] += dest.nbytes
        cut_up, blocks = np.stack(peers.gather_objects(own), axis=-1)
        shares: list[int] = kernel_shares(cut_up, blocks)[:, self._rank].tolist()
        return shares

    def _copies(self) -> Iterator[tuple[CopyOp, Tensor, Tensor]]:
        """Yields this rank's operations with views of their sources and destinations."""
        pieces = [self._memory.of(peer) for peer in range(self._plan.world_size)]
        for op in self._plan.ops[self._rank]:
            place = self._sources[op.source_rank][op.source]
            assert place is not None  # else the constructor has raised
            source = box_view(_view(pieces[op.source_rank], place), op.source_box)
            yield op, source, box_view(self._dests[op.dest], op.dest_box)

    def _is_block(self, source: Tensor, dest: Tensor) -> bool:
        """Whether a copy engine is faster than the kernel."""
        same_type = source.dtype == dest.dtype
        is_large = same_type and dest.nbytes >= BLOCK_BYTES and source.is_contiguous()
        return is_large and ops.has_copy_engine(self._device)

    def _repeat(self, queue: Callable[[], None], has_work: bool) -> Callable[[], None]:
        """Returns a function that queues `queue`, as a CUDA graph from the second call on."""
        if self._device.type == "cuda" and not has_work:
            return _nothing
        self._repeated.append(Repeated(queue, self._device))
        return self._repeated[-1].run

    def _read_cut_up(self) -> None:
        """Reads the rectangles that are left to the kernel, once all parameters are final."""
        if self._plan.streams:
            self._memory.barrier()
        self._remote.run()

    def _run_blocks(self) -> None:
        """Copies blocks and data that stays on the rank, each on its own stream."""
        if not any(batch.num_launches for batch in self._batches):
            self._local()
            return
        to_staging, direct, last = self._batches
        engines, beside = self._engines, self._beside
        current = None if engines is None else torch.cuda.current_stream()
        # The current stream waits for staged blocks only, not for copies queued from here on.
        to_staging.run(engines, [(engines, current), (beside, current)], [(current, engines)])
        direct.run(engines)
        with nullcontext() if beside is None else torch.cuda.stream(beside):
            self._local()
        self._unpack()
        last.run(engines, [(engines, current)], [(current, engines), (current, beside)])


def _nothing() -> None:
    """Queues nothing."""


def _place(tensor: SourceTensor, piece: Tensor) -> Place | None:
    """Returns a tensor's place in a rank's piece; None if it is outside or not contiguous."""
    if not isinstance(tensor, Tensor):
        return None
    offset = tensor.data_ptr() - piece.data_ptr()
    is_inside = offset >= 0 and offset + tensor.nbytes <= piece.nbytes
    if not (is_inside and tensor.is_contiguous()):
        return None
    return offset, tuple(tensor.shape), tensor.dtype


def _view(piece: Tensor, place: Place) -> Tensor:
    offset, shape, dtype = place
    size = dtype.itemsize * torch.Size(shape).numel()
    return piece[offset : offset + size].view(dtype).view(shape)
