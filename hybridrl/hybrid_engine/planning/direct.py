"""Finds blocks, large and contiguous on both ends, that can bypass the staging buffers.

Such a block is sent as one message from the source tensor to the destination tensor. Only its owner
knows whether a tensor is contiguous there, so the ranks agree on these blocks in advance, for one
plan or for many at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from hybridrl.hybrid_engine.planning.plan import CopyOp, Plan, Stream
from hybridrl.hybrid_engine.transports.transport import Peers
from hybridrl.models.boxes import Box, box_view, volume
from hybridrl.models.sources import SourceTensor

# Smaller blocks are packed into messages of 64 MiB: NCCL sends messages of 16 MiB at 100 GB/s, but
# messages of 32 MiB and more at 300 GB/s. Measured on H200.
BLOCK_BYTES = 32 << 20


@dataclass(frozen=True)
class Direct:
    """Operations that bypass the staging buffers.

    Args:
        sends, receives: This rank's operations by peer, in the same order on both ranks.
        elements: Number of elements that bypass the staging buffers, for every stream of the plan.
    """

    sends: Mapping[int, list[CopyOp]] = field(default_factory=dict)
    receives: Mapping[int, list[CopyOp]] = field(default_factory=dict)
    elements: Mapping[Stream, int] = field(default_factory=dict)

    @property
    def ops(self) -> frozenset[CopyOp]:
        return frozenset(chain(*self.sends.values(), *self.receives.values()))


def agree_on_all(
    plans: Sequence[Plan],
    peers: Peers,
    sources: Mapping[str, SourceTensor],
    dests: Sequence[Mapping[str, Tensor]],
    wire_dtype: torch.dtype,
) -> list[Direct]:
    """Finds each plan's operations that need no staging; collective, with two rounds for all.

    Args:
        dests: Destinations of each plan; tensors on device "meta" suffice.
    """
    single_hops = [_SingleHops(plan, peers.rank, wire_dtype) for plan in plans]
    pairs = list(zip(single_hops, dests, strict=True))
    asked = peers.gather_objects([one.asked(own) for one, own in pairs])
    granted = [
        one.granted([of_rank[number] for of_rank in asked], sources)
        for number, one in enumerate(single_hops)
    ]
    answers = peers.gather_objects(granted)
    return [
        one.direct(granted[number], [of_rank[number] for of_rank in answers])
        for number, one in enumerate(single_hops)
    ]


class _SingleHops:
    """The operations of one plan that this rank sends or receives without a forwarding rank.

    The receiver asks for blocks that are contiguous at the destination, and the sender accepts
    those that are also contiguous in the source.
    """

    def __init__(self, plan: Plan, rank: int, wire_dtype: torch.dtype) -> None:
        self._rank, self._dtype = rank, wire_dtype
        straight = [stream for stream in plan.streams if len(stream.route) == 1]
        self._receives = {
            s.source: plan.ops_between(s.source, rank) for s in straight if s.route[0] == rank
        }
        self._sends = {
            s.route[0]: plan.ops_between(rank, s.route[0]) for s in straight if s.source == rank
        }

    def _is_block(self, tensor: SourceTensor, op: CopyOp, box: Box) -> bool:
        if not isinstance(tensor, Tensor):
            return False
        size = volume(op.dest_box) * self._dtype.itemsize
        is_large = size >= BLOCK_BYTES and op.route == (op.dest_rank,)
        return is_large and tensor.dtype == self._dtype and box_view(tensor, box).is_contiguous()

    def asked(self, dests: Mapping[str, Tensor]) -> dict[int, list[int]]:
        """Returns, for each peer, the indices of operations for which this receiver asks it."""
        return {
            peer: [i for i, op in enumerate(ops) if self._is_block(dests[op.dest], op, op.dest_box)]
            for peer, ops in self._receives.items()
        }

    def granted(
        self, asked: Sequence[Mapping[int, Sequence[int]]], sources: Mapping[str, SourceTensor]
    ) -> dict[int, tuple[list[int], int]]:
        """Returns, for each peer, the indices and the size of operations that this sender accepts.

        `asked` has the operations for which each rank asked.
        """
        found = {}
        for peer, ops in self._sends.items():
            numbers = [
                i
                for i in asked[peer].get(self._rank, [])
                if self._is_block(sources[ops[i].source], ops[i], ops[i].source_box)
            ]
            if numbers:
                found[peer] = numbers, sum(volume(ops[i].dest_box) for i in numbers)
        return found

    def direct(
        self,
        granted: Mapping[int, tuple[list[int], int]],
        answers: Sequence[Mapping[int, tuple[list[int], int]]],
    ) -> Direct:
        elements: Counter[Stream] = Counter()
        for source, given in enumerate(answers):
            for dest, (_, total) in given.items():
                elements[Stream(source, (dest,))] += total
        return Direct(
            {peer: [self._sends[peer][i] for i in own] for peer, (own, _) in granted.items()},
            {
                peer: [ops[i] for i in answers[peer][self._rank][0]]
                for peer, ops in self._receives.items()
                if self._rank in answers[peer]
            },
            elements,
        )
