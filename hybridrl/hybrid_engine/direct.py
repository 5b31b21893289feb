"""Which operations need no staging: large blocks that are contiguous at both ends.

Such a block is one message from the source tensor into the destination tensor, without packing and
unpacking. Only the receiver knows whether a block is contiguous in the destination tensor, and only
the sender whether it is in the source tensor. So they ask each other, once a plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from hybridrl.hybrid_engine.plan import CopyOp, Plan, Stream
from hybridrl.hybrid_engine.transport import Peers
from hybridrl.models.boxes import Box, volume
from hybridrl.models.hf import box_view

# Smaller ones go packed: NCCL moves messages of 16 MiB at 100 GB/s, of 32 MiB and more at 300, and
# what is packed travels in messages of 64 MiB. Measured on H200.
BLOCK_BYTES = 32 << 20


@dataclass(frozen=True)
class Direct:
    """What goes without staging.

    Args:
        sends, receives: this rank's operations by peer, in the same order at both ends.
        elements: of every stream of all ranks, how many go so.
    """

    sends: Mapping[int, list[CopyOp]] = field(default_factory=dict)
    receives: Mapping[int, list[CopyOp]] = field(default_factory=dict)
    elements: Mapping[Stream, int] = field(default_factory=dict)

    @property
    def ops(self) -> frozenset[CopyOp]:
        """All of this rank's."""
        return frozenset(chain(*self.sends.values(), *self.receives.values()))


def agree_direct(
    plan: Plan,
    peers: Peers,
    sources: Mapping[str, Tensor],
    dests: Mapping[str, Tensor],
    wire_dtype: torch.dtype,
) -> Direct:
    """Finds the operations that need no staging; collective.

    Args: as of `PackedTransport`.
    """
    rank, straight = peers.rank, [stream for stream in plan.streams if len(stream.route) == 1]
    receives = {s.source: plan.ops_between(s.source, rank) for s in straight if s.route[0] == rank}
    sends = {s.route[0]: plan.ops_between(rank, s.route[0]) for s in straight if s.source == rank}

    def is_block(tensor: Tensor, op: CopyOp, box: Box) -> bool:
        size = volume(op.dest_box) * wire_dtype.itemsize
        is_large = size >= BLOCK_BYTES and op.route == (op.dest_rank,)
        return is_large and tensor.dtype == wire_dtype and box_view(tensor, box).is_contiguous()

    asked = peers.gather_objects(
        {
            peer: [i for i, op in enumerate(ops) if is_block(dests[op.dest], op, op.dest_box)]
            for peer, ops in receives.items()
        }
    )
    granted = {}
    for peer, ops in sends.items():
        numbers = [
            i
            for i in asked[peer].get(rank, [])
            if is_block(sources[ops[i].source], ops[i], ops[i].source_box)
        ]
        if numbers:
            granted[peer] = numbers, sum(volume(ops[i].dest_box) for i in numbers)
    answers = peers.gather_objects(granted)
    elements: Counter[Stream] = Counter()
    for source, given in enumerate(answers):
        for dest, (_, total) in given.items():
            elements[Stream(source, (dest,))] += total
    return Direct(
        {peer: [sends[peer][i] for i in numbers] for peer, (numbers, _) in granted.items()},
        {
            peer: [ops[i] for i in answers[peer][rank][0]]
            for peer, ops in receives.items()
            if rank in answers[peer]
        },
        elements,
    )
