"""Executes a plan by reading other ranks' training parameters in place, without messages.

Who waits for whom: the constructor and `run` are collective. A barrier before the copies ensures
that all parameters are final. A barrier after them ensures that no rank changes parameters while
others still read them. In between, a rank only reads other ranks' memory and writes its own.

First, one kernel reads small and strided rectangles from all peers, interleaved, while the host
enqueues the copies for the copy engines. These start when the kernel ends, because kernel and copy
engines slow each other down (docs/adr/0003). They copy blocks that are large and contiguous in
their source. Blocks that are strided in their destination go to a staging area, which is another
destination that is written later (blocks.py), and from there a kernel copies them while the
engines continue. Other kernels copy data that stays on the rank. If a few ranks hold most blocks,
the first kernel also reads some of these. From the second run on, the first
barrier and the kernels are CUDA graphs (`Repeated`), which are captured before that barrier.
Elements are cast from the source's type to the destination's as they are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from hybridrl import ops
from hybridrl.hybrid_engine.planning.plan import CopyOp, Plan, PlanError
from hybridrl.hybrid_engine.transports.blocks import kernel_shares, split_blocks, stage_copies
from hybridrl.hybrid_engine.transports.transport import (
    AddressWatch,
    Pair,
    Peers,
    Repeated,
    Traffic,
    is_same_memory,
)
from hybridrl.models.boxes import box_view
from hybridrl.models.sources import SourceTensor
from hybridrl.parallel.peer_memory import PeerMemory

# From this size on, a copy engine is faster than the kernel: 370 GB/s instead of 330. Below 1 MiB
# the fixed time per copy matters. Measured on H200.
BLOCK_BYTES = 2 << 20

# Number of programs of the kernels that run alongside the copy engines. More programs would take
# memory bandwidth away from the engines.
LOCAL_PROGRAMS = 48

Place = tuple[int, tuple[int, ...], torch.dtype]
"""Location of a contiguous tensor in its rank's part of peer memory: offset in bytes, shape and
type.
"""


class PeerTransport:
    """Copies the plan's slices from other ranks' memory to this rank's tensors.

    Args:
        sources: This rank's source tensors by name, all within this rank's part of `memory`.
        dests: This rank's destination tensors by name; written in place. If a destination shares
            its memory with the source of the same content (alias.py), nothing is copied.

    Raises PlanError on every rank if a source tensor is outside `memory` on some rank.
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
                raise PlanError(f"parameter {outside[0]} of rank {other} is not in peer memory")
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

    @torch.no_grad()
    def run(self) -> Traffic:
        self._prepare()
        # Capture before the barrier: capturing waits for the device, and a barrier on the device
        # never ends if a rank has failed.
        for work in self._repeated:
            work.capture()
        self._cut_up()
        self._run_blocks()
        if self._plan.streams:
            self._memory.barrier()
        return self._traffic

    def close(self) -> None:
        """Does nothing, because the graphs contain kernels but no NCCL messages.

        Waiting for the device here could mean waiting for a failed rank at a barrier.
        """

    def _prepare(self) -> None:
        """Creates the tables of the copies; creates them again only if a destination has moved."""
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
        # Read from one peer after another, and start with a different peer on each rank: if two
        # ranks read from the same peer, each reads at half of the link's rate. More streams are not
        # faster.
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
        self._kernels = on_rank, unpack  # `Repeated` references them weakly
        self._repeated = []
        self._cut_up = self._repeat(self._read_cut_up, bool(self._plan.streams or remote))
        self._local = self._repeat(on_rank.run, bool(local))
        self._unpack = self._repeat(unpack.run, bool(staged.from_staging))

    def _agree_on_kernel(self, peers: Peers) -> list[int]:
        """Returns how many bytes of each peer's blocks this rank's kernel reads; collective."""
        own = np.zeros((2, self._plan.world_size), np.int64)
        for op, source, dest in self._copies():
            if op.source_rank != self._rank:
                own[int(self._is_block(source, dest)), op.source_rank] += dest.nbytes
        cut_up, blocks = np.stack(peers.gather_objects(own), axis=-1)
        shares: list[int] = kernel_shares(cut_up, blocks)[:, self._rank].tolist()
        return shares

    def _copies(self) -> Iterator[tuple[CopyOp, Tensor, Tensor]]:
        pieces = [self._memory.of(peer) for peer in range(self._plan.world_size)]
        for op in self._plan.ops[self._rank]:
            place = self._sources[op.source_rank][op.source]
            assert place is not None  # otherwise the constructor would have raised
            source = box_view(_view(pieces[op.source_rank], place), op.source_box)
            yield op, source, box_view(self._dests[op.dest], op.dest_box)

    def _is_block(self, source: Tensor, dest: Tensor) -> bool:
        """Whether a copy engine would copy this pair faster than the kernel."""
        same_type = source.dtype == dest.dtype
        is_large = same_type and dest.nbytes >= BLOCK_BYTES and source.is_contiguous()
        return is_large and ops.has_copy_engine(self._device)

    def _repeat(self, queue: Callable[[], None], has_work: bool) -> Callable[[], None]:
        if self._device.type == "cuda" and not has_work:
            return lambda: None
        self._repeated.append(Repeated(queue, self._device))
        return self._repeated[-1].run

    def _read_cut_up(self) -> None:
        """Waits until all ranks' parameters are final, then reads the kernel's rectangles."""
        if self._plan.streams:
            self._memory.barrier()
        self._remote.run()

    def _run_blocks(self) -> None:
        """Copies blocks from peers and data that stays on the rank, on separate streams."""
        if not any(batch.num_launches for batch in self._batches):
            self._local()
            return
        to_staging, direct, last = self._batches
        engines, beside = self._engines, self._beside
        current = None if engines is None else torch.cuda.current_stream()
        # The current stream waits only for staged blocks, not for the copies enqueued below.
        to_staging.run(engines, [(engines, current), (beside, current)], [(current, engines)])
        direct.run(engines)
        with nullcontext() if beside is None else torch.cuda.stream(beside):
            self._local()
        self._unpack()
        last.run(engines, [(engines, current)], [(current, engines), (current, beside)])


def _place(tensor: SourceTensor, piece: Tensor) -> Place | None:
    """Returns a tensor's place in a rank's peer memory; None if outside or not contiguous."""
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
