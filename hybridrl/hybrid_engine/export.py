"""Writes weights that are sharded over ranks as one HF directory.

Who waits for whom: `export_hf` is collective. In each round every rank that can access the
directory receives one whole HF tensor from the ranks that own its shards, writes the tensor and
frees it. If writing fails, the rank keeps receiving, and all ranks raise its error at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.errors import CheckpointError, UserError
from hybridrl.hybrid_engine.planning.direct import agree_on_all
from hybridrl.hybrid_engine.planning.plan import Plan, plan_reshard
from hybridrl.hybrid_engine.planning.wire_elements import wire_views
from hybridrl.hybrid_engine.transports.packed import PackedTransport, agree_wire_dtype
from hybridrl.hybrid_engine.transports.transport import Peers
from hybridrl.models.boxes import Shape
from hybridrl.models.hf.shards import MAX_SHARD_BYTES, HfPlaces, HfWriter, KeptTensors, stored_as
from hybridrl.models.sources import WeightSource
from hybridrl.models.weights import NOTHING, RankLayout, Region, hf_layout

STAGING_BYTES = 64 << 20
ROUNDS_PER_AGREEMENT = 64  # rounds that the ranks prepare in one collective


def export_hf(
    directory: str | Path,
    source: WeightSource,
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    config: Mapping[str, Any],
    *,
    peers: Peers,
    side_files: Path | None = None,
    card: str | None = None,
    kept: KeptTensors | None = None,
) -> None:
    """Writes an HF directory from the ranks' shards; collective.

    Args:
        directory: Directory to write; it must not exist yet, or be empty. Rank 0 creates it; every
            rank that can then access it writes some of the tensors.
        dtype: Type of the written tensors, except those that are always stored in fp32.
        side_files: Folder from which tokenizer files are copied; None to copy none.
        kept: Tensors that training did not load, which are copied unchanged; the same on all ranks.

    Raises UserError on every rank if one cannot write, or cannot read a kept tensor.
    """
    writer, error = None, None
    if peers.rank == 0:
        try:
            of_model = directory, shapes, dtype, config
            writer = HfWriter(*of_model, side_files=side_files, card=card, kept=kept)
        except (UserError, OSError) as caught:
            error = _as_user_error(directory, caught)
    _raise_together(error, peers)
    partial = peers.broadcast_object(None if writer is None else writer.partial.absolute(), 0)
    sees = peers.gather_objects(partial.is_dir())
    writers = [rank for rank, does_see in enumerate(sees) if does_see]
    places = HfPlaces(shapes, dtype, MAX_SHARD_BYTES, config, kept)
    written: list[str] = []
    try:
        groups = places.together(shapes)
        for name, tensor in gather_tensors(source, shapes, dtype, peers, writers, groups):
            if error is None:
                try:
                    written += places.write(partial, name, tensor)
                except OSError as caught:
                    error = _as_user_error(directory, caught)
        if kept is not None and error is None and peers.rank in writers:
            own = list(kept.shapes)[writers.index(peers.rank) :: len(writers)]
            try:
                for name in own:
                    written += places.write(partial, name, kept.read(name))
            except (UserError, OSError) as caught:
                error = _as_user_error(directory, caught)
        results = peers.gather_objects((error, written))
        if writer is not None and all(failed is None for failed, _ in results):
            writer.wrote([name for _, names in results for name in names])
            try:
                writer.complete()
            except OSError as caught:
                error = _as_user_error(directory, caught)
    finally:
        if writer is not None:
            writer.discard()
    _raise_together(error, peers)


def gather_tensors(
    source: WeightSource,
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    peers: Peers,
    writers: Sequence[int] = (0,),
    groups: Iterable[Sequence[str]] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields each whole HF tensor on one of the `writers`, which take turns; collective.

    All ranks must exhaust the iterator, although it yields nothing on ranks outside `writers`.

    Args:
        groups: Names of all tensors, in groups whose tensors one rank receives after each other;
            by default, each tensor is a group.
    """
    rank, layouts, tensors = peers.rank, source.layouts, source.tensors
    with torch.no_grad():
        source.refresh()
    out_dtype = {"": torch.empty(0, dtype=dtype)} if rank in writers else {}
    wire_dtype = agree_wire_dtype(tensors, out_dtype, peers, (layouts[rank], NOTHING))
    sent = wire_views(tensors, layouts[rank], wire_dtype)
    here = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    device = next((tensor.device for tensor in tensors.values()), torch.device(here))
    turns = _turns([(name,) for name in shapes] if groups is None else groups, writers)
    rounds = _rounds(layouts, shapes, turns, wire_dtype.itemsize)
    while agreed := list(islice(rounds, ROUNDS_PER_AGREEMENT)):
        plans = [plan for plan, _ in agreed]
        own = [targets.get(rank, NOTHING) for _, targets in agreed]
        meta = [wire_views(_wholes(one, dtype, "meta"), one, wire_dtype) for one in own]
        directs = agree_on_all(plans, peers, sent, meta, wire_dtype)
        for plan, target, direct in zip(plans, own, directs, strict=True):
            dests = _wholes(target, dtype, device)
            moved = peers, sent, wire_views(dests, target, wire_dtype), STAGING_BYTES, wire_dtype
            PackedTransport(plan, *moved, direct=direct).run()
            while dests:
                yield dests.popitem()


def _turns(groups: Iterable[Sequence[str]], writers: Sequence[int]) -> list[dict[int, str]]:
    """Returns, for each round, each writer's tensor. A group goes to the writer with the fewest."""
    queues: dict[int, list[str]] = {writer: [] for writer in writers}
    for group in groups:
        queues[min(queues, key=lambda one: len(queues[one]))] += group
    rounds = zip_longest(*queues.values())
    return [
        {one: name for one, name in zip(queues, names, strict=True) if name is not None}
        for names in rounds
    ]


def _rounds(
    layouts: Sequence[RankLayout],
    shapes: Mapping[str, Shape],
    turns: Iterable[Mapping[int, str]],
    itemsize: int,
) -> Iterator[tuple[Plan, dict[int, RankLayout]]]:
    """Yields each round's plan, and for each writer the layout of the tensor that it receives."""
    regions = [_by_hf_name(layout) for layout in layouts]
    for round_of in turns:
        sources = [
            RankLayout(tuple(r for name in round_of.values() for r in own.get(name, ())), {})
            for own in regions
        ]
        targets = {one: hf_layout({name: shapes[name]}) for one, name in round_of.items()}
        wanted = [targets.get(one, NOTHING) for one in range(len(layouts))]
        yield plan_reshard(sources, wanted, itemsize), targets


def _wholes(
    layout: RankLayout, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor]:
    return {
        name: torch.empty(shape, dtype=stored_as(name, dtype), device=device)
        for name, shape in layout.shapes.items()
    }


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
