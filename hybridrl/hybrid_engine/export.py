"""Writes weights that are spread over ranks as one HF directory, all ranks their share of it, with
one tensor in hand at a time each.

Who waits for whom: `export_hf` is collective. In each round every rank that writes gets one HF
tensor, whole, from its owners, writes it into its place and lets it go. A rank that cannot write
goes on receiving, and all ranks raise its error at the end.
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
from hybridrl.models.hf import MAX_SHARD_BYTES, HfPlaces, HfWriter, stored_as
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
    card: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes an HF directory from the ranks' shards; collective.

    Args:
        directory: where to; must not exist or be empty. Rank 0's disk is the one that matters;
            ranks that see the folder there write a share of the tensors.
        layouts: what each rank holds.
        tensors: this rank's tensors.
        shapes: every HF tensor of the model, as from `hf_shapes`.
        dtype: type of the written tensors, but of those that are kept in fp32.
        config: content of config.json.
        peers: the ranks of the layouts.
        side_files: folder whose tokenizer files are copied along.
        card: text of the directory's README.md, if it is to have one.
        max_shard_bytes: of a file.

    Raises:
        UserError: on every rank, if one of them cannot write there.
    """
    options = {"side_files": side_files, "card": card, "max_shard_bytes": max_shard_bytes}
    writer, error = None, None
    if peers.rank == 0:
        try:
            writer = HfWriter(directory, shapes, dtype, config, **options)  # type: ignore[arg-type]
        except (UserError, OSError) as caught:
            error = _as_user_error(directory, caught)
    _raise_together(error, peers)
    partial = peers.broadcast_object(None if writer is None else writer.partial.absolute(), 0)
    sees = peers.gather_objects(partial.is_dir())
    writers = [rank for rank, does_see in enumerate(sees) if does_see]
    places = HfPlaces(shapes, dtype, max_shard_bytes)
    written: list[str] = []
    try:
        for name, tensor in gather_tensors(layouts, tensors, shapes, dtype, peers, writers):
            if error is None:
                try:
                    written.append(places.write(partial, name, tensor))
                except OSError as caught:
                    error = _as_user_error(directory, caught)
        told = peers.gather_objects((error, written))
        if writer is not None and all(failed is None for failed, _ in told):
            writer.wrote([name for _, names in told for name in names])
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
    writers: Sequence[int] = (0,),
) -> Iterator[tuple[str, Tensor]]:
    """Yields every HF tensor, whole, on one of the ranks `writers`, which take turns; collective.

    All ranks must run through the iterator; it yields nothing on others.
    """
    regions = [_by_hf_name(layout) for layout in layouts]
    rank = peers.rank
    out_dtype = {"": torch.empty(0, dtype=dtype)} if rank in writers else {}
    wire_dtype = agree_wire_dtype(tensors, out_dtype, peers, (layouts[rank], NOTHING))
    sent = wire_views(tensors, layouts[rank], wire_dtype)
    here = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    device = next((tensor.device for tensor in tensors.values()), torch.device(here))
    names = list(shapes)
    for first in range(0, len(names), len(writers)):
        round_of = dict(zip(writers, names[first : first + len(writers)], strict=False))
        sources = [
            RankLayout(tuple(r for name in round_of.values() for r in own.get(name, ())), {})
            for own in regions
        ]
        targets = [
            hf_layout({round_of[one]: shapes[round_of[one]]}) if one in round_of else NOTHING
            for one in range(len(layouts))
        ]
        plan = plan_reshard(sources, targets, wire_dtype.itemsize)
        dests, name = {}, round_of.get(rank)
        if name is not None:
            whole = torch.empty(shapes[name], dtype=stored_as(name, dtype), device=device)
            dests[name] = whole
        written = wire_views(dests, targets[rank], wire_dtype)
        PackedTransport(plan, peers, sent, written, STAGING_BYTES, wire_dtype).run()
        if name is not None:
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
