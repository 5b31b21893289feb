"""Verifies a finished transfer by checksums of the source and destination of every copy.

`verify` is collective. proof.py has already proven that the plan is correct. Checksums detect other
faults: a broken transport, a parameter that the engine repacked, or memory that other code
overwrote.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridrl.hybrid_engine.planning.plan import Plan
from hybridrl.hybrid_engine.transports.transport import Peers
from hybridrl.models.boxes import box_view
from hybridrl.models.sources import ComputedSlice, SourceTensor, slice_of

Key = tuple[int, int]
"""Identifies a copy by the rank that receives it and its index among that rank's copies."""

BYTES_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 22  # elements per sum, to limit memory: each element's intermediate takes 8 bytes


class VerifyError(RuntimeError):
    """An engine parameter differs from the training weights that it was written from."""


@torch.no_grad()
def verify(
    plan: Plan,
    peers: Peers,
    sources: Mapping[str, SourceTensor],
    dests: Mapping[str, Tensor],
    wire_dtype: torch.dtype,
) -> None:
    """Compares every source slice, cast as in the transfer, with the slice at its destination.

    Raises VerifyError on every rank, which names the parameter, the elements and both ranks.
    """
    rank = peers.rank
    dtypes: list[dict[str, torch.dtype]] = peers.gather_objects(
        {name: tensor.dtype for name, tensor in dests.items()}
    )
    sent: dict[Key, Tensor] = {}
    # By slice, so that a slice sent to many ranks is summed only once.
    summed: dict[tuple[object, ...], Tensor] = {}
    for dest_rank, copies in enumerate(plan.ops):
        for number, op in enumerate(copies):
            if op.source_rank != rank:
                continue
            wire = None if dest_rank == rank else wire_dtype
            dtype = dtypes[dest_rank][op.dest]
            what = (op.source, op.source_box, wire, dtype)
            if what not in summed:
                found = slice_of(sources[op.source], op.source_box)
                part = found.compute() if isinstance(found, ComputedSlice) else found
                part = part if wire is None else part.to(wire)
                summed[what] = checksum(part.to(dtype))
            sent[dest_rank, number] = summed[what]
    arrived = {
        (rank, number): checksum(box_view(dests[op.dest], op.dest_box))
        for number, op in enumerate(plan.ops[rank])
    }
    _compare(plan, peers.gather_objects((_read(sent), _read(arrived))))


def _compare(plan: Plan, sums: list[tuple[dict[Key, int], dict[Key, int]]]) -> None:
    expected = {key: value for part, _ in sums for key, value in part.items()}
    found = {key: value for _, part in sums for key, value in part.items()}
    for dest_rank, number in sorted(found):
        if found[dest_rank, number] != expected[dest_rank, number]:
            op = plan.ops[dest_rank][number]
            raise VerifyError(
                f"{op.dest}{list(op.dest_box)} of the engine on rank {dest_rank} differs from "
                f"{op.source}{list(op.source_box)} of the model on rank {op.source_rank}"
            )


def checksum(part: Tensor) -> Tensor:
    """Returns an int64 scalar that changes with any bit, and if two elements swap places."""
    words = part.contiguous().view(BYTES_OF[part.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for start in range(0, words.numel(), CHUNK):
        piece = words[start : start + CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + piece.numel(), device=part.device)
        # The multipliers are odd, so that different words yield different terms modulo 2^64.
        total += (piece * (place * 2 * 2654435761 + 1)).sum()
    return total


def _read(sums: Mapping[Key, Tensor]) -> dict[Key, int]:
    """Copies the checksums to the host with a single sync point."""
    if not sums:
        return {}
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
