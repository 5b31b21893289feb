"""Writes weights that are spread over ranks as one HF directory, one tensor in hand at a time.

Who waits for whom: `export_hf` is collective. For each HF tensor in turn its owners
send their slices to rank 0, which writes it and lets it go. If rank 0 cannot write, it goes on
receiving, and all ranks raise its error at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.errors import CheckpointError, UserError
from hybridrl.hybrid_engine.packed import PackedTransport, agree_wire_dtype
from hybridrl.hybrid_engine.plan import plan_reshard
from hybridrl.hybrid_engine.transport import Peers
from hybridrl.hybrid_engine.wire import wire_views
from hybridrl.models.boxes import Shape
from hybridrl.models.hf import HfWriter, stored_as
from hybridrl.models.weights import NOTHING, RankLayout, Region, hf_layout

STAGING_BYTES = 64 << 20


def export_hf(
    directory: str | Path,
    layouts: Sequence[RankLayout],
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    config: Mapping[str, Any],
    *,
    peers: Peers,
    side_files: Path | None = None,
) -> None:
    """Writes an HF directory from the ranks' shards; collective.

    Args:
        directory: where to; must not exist or be empty. Rank 0's disk is the one that matters.
        layouts: what each rank holds.
        tensors: this rank's tensors.
        shapes: every HF tensor of the model, as from `hf_shapes`.
        dtype: type of the written tensors, but of those that are kept in fp32.
        config: content of config.json.
        peers: the ranks of the layouts.
        side_files: folder whose tokenizer files are copied along.

    Raises:
        UserError: on every rank, if rank 0 cannot write there.
    """
    writer: HfWriter | None = None
    error: UserError | None = None
    if peers.rank == 0:
        try:
            writer = HfWriter(directory, shapes, dtype, config, side_files=side_files)
        except (UserError, OSError) as caught:
            error = _as_user_error(directory, caught)
    _raise_together(error, peers)
    try:
        for name, tensor in gather_tensors(layouts, tensors, shapes, dtype, peers):
            if writer is not None and error is None:
                try:
                    writer.write(name, tensor)
                except OSError as caught:
                    error = _as_user_error(directory, caught)
        if writer is not None and error is None:
            try:
                writer.complete()
            except OSError as caught:
                error = _as_user_error(directory, caught)
    finally:
        if writer is not None:
            writer.discard()
    _raise_together(error, peers)


def gather_tensors(
    layouts: Sequence[RankLayout],
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    peers: Peers,
) -> Iterator[tuple[str, Tensor]]:
    """Yields every HF tensor, whole, on rank 0, one after the other; collective.

    The other ranks must run through the iterator too; it yields nothing there.
    """
    regions = [_by_hf_name(layout) for layout in layouts]
    rank = peers.rank
    out_dtype = {"": torch.empty(0, dtype=dtype)} if rank == 0 else {}
    wire_dtype = agree_wire_dtype(tensors, out_dtype, peers, (layouts[rank], NOTHING))
    sent = wire_views(tensors, layouts[rank], wire_dtype)
    here = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    device = next((tensor.device for tensor in tensors.values()), torch.device(here))
    for name, shape in shapes.items():
        sources = [RankLayout(tuple(own.get(name, ())), {}) for own in regions]
        targets = [hf_layout({name: shape}), *([NOTHING] * (len(layouts) - 1))]
        plan = plan_reshard(sources, targets, wire_dtype.itemsize)
        dests = {}
        if rank == 0:
            dests[name] = torch.empty(shape, dtype=stored_as(name, dtype), device=device)
        written = wire_views(dests, targets[rank], wire_dtype)
        PackedTransport(plan, peers, sent, written, STAGING_BYTES, wire_dtype).run()
        if rank == 0:
            yield name, dests.pop(name)


def _by_hf_name(layout: RankLayout) -> dict[str, list[Region]]:
    found: dict[str, list[Region]] = {}
    for region in layout.regions:
        found.setdefault(region.hf, []).append(region)
    return found


def _as_user_error(directory: str | Path, error: Exception) -> UserError:
    if isinstance(error, UserError):
        return error
    return CheckpointError(
        str(directory), error, "a directory that can be written", "Check space and permissions."
    )


def _raise_together(error: UserError | None, peers: Peers) -> None:
    for found in peers.gather_objects(error):
        if found is not None:
            raise found
