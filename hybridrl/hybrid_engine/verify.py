"""Proof on demand that what arrived is what was sent: checksums of both ends of every copy.

Who waits for whom: `verify` is collective over the group. Every rank sums up the slices that it is
the source of and those that it received, and all compare. The plan is proven to be right before it
runs (proof.py); this finds what a proof cannot: a broken transport, a parameter that an engine
repacked, memory that something else overwrote.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.hybrid_engine.packed import gather_objects
from hybridrl.hybrid_engine.plan import Plan
from hybridrl.models.hf import box_view

Key = tuple[int, int]
"""A copy: the rank that receives it, and its number among that rank's copies."""

BYTES_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class VerifyError(RuntimeError):
    """An engine parameter differs from the training weights that it was written from."""


def verify(
    plan: Plan,
    rank: int,
    sources: Mapping[str, Tensor],
    dests: Mapping[str, Tensor],
    wire_dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Compares every slice at its source, cast as on its way, with the slice where it arrived.

    Args: as of `PackedTransport`.

    Raises:
        VerifyError: on every rank, naming the parameter, the element range and both ranks.
    """
    dtypes: list[dict[str, torch.dtype]] = gather_objects(
        {name: tensor.dtype for name, tensor in dests.items()}, group
    )
    sent: dict[Key, int] = {}
    for dest_rank, ops in enumerate(plan.ops):
        for number, op in enumerate(ops):
            if op.source_rank == rank:
                part = box_view(sources[op.source], op.source_box)
                if dest_rank != rank:
                    part = part.to(wire_dtype)
                sent[dest_rank, number] = checksum(part.to(dtypes[dest_rank][op.dest]))
    arrived = {
        (rank, number): checksum(box_view(dests[op.dest], op.dest_box))
        for number, op in enumerate(plan.ops[rank])
    }
    expected = {key: value for part in gather_objects(sent, group) for key, value in part.items()}
    found = {key: value for part in gather_objects(arrived, group) for key, value in part.items()}
    for dest_rank, number in sorted(found):
        if found[dest_rank, number] != expected[dest_rank, number]:
            op = plan.ops[dest_rank][number]
            raise VerifyError(
                f"{op.dest}{list(op.dest_box)} of the engine on rank {dest_rank} differs from "
                f"{op.source}{list(op.source_box)} of the model on rank {op.source_rank}"
            )


def checksum(part: Tensor) -> int:
    """Returns a number that changes when a bit does, or when two elements swap places."""
    words = part.contiguous().view(BYTES_OF[part.element_size()]).flatten().to(torch.int64)
    place = torch.arange(1, words.numel() + 1, device=words.device)
    # Odd multipliers of the place, so that each term is a one-to-one function of its word mod 2^64.
    return int((words * (place * 2 * 2654435761 + 1)).sum())
