"""Which rank copies which rectangle where: two sets of layouts turned into copy operations.

Pure and deterministic, no torch: every rank computes the same plan from the same layouts. What a
rank holds already is copied locally, every other slice is received once, from the owner that has
the least to send so far. Invariant: after the operations every element of every target region is
written exactly once (proof.py proves it from the operations alone).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from hybridrl.models.boxes import Box, intersection, moved, show, sizes, tiling_fault, volume
from hybridrl.models.weights import RankLayout


class PlanError(Exception):
    """Layouts that cannot be joined, or a plan that does not do what it must."""


class CopyOp(NamedTuple):
    """Copy `source_box` of `source` on `source_rank` into `dest_box` of `dest` on `dest_rank`."""

    source_rank: int
    dest_rank: int
    source: str
    source_box: Box
    dest: str
    dest_box: Box


@dataclass(frozen=True)
class Plan:
    """The copy operations of all ranks.

    Args:
        ops: for each destination rank its operations, local ones included.
        itemsize: bytes of one element on the wire.
    """

    ops: tuple[tuple[CopyOp, ...], ...]
    itemsize: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ops)

    @cached_property
    def _traffic(self) -> tuple[tuple[int, ...], ...]:
        """Bytes from each source rank (outer) to each destination rank (inner)."""
        sent = [[0] * self.world_size for _ in range(self.world_size)]
        for ops in self.ops:
            for op in ops:
                sent[op.source_rank][op.dest_rank] += volume(op.dest_box) * self.itemsize
        return tuple(tuple(row) for row in sent)

    @property
    def send_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank sends to others."""
        return tuple(sum(row) - row[rank] for rank, row in enumerate(self._traffic))

    @property
    def receive_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank receives from others."""
        columns = zip(*self._traffic, strict=True)
        return tuple(sum(column) - column[rank] for rank, column in enumerate(columns))

    @property
    def local_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank copies from its own tensors."""
        return tuple(row[rank] for rank, row in enumerate(self._traffic))

    @property
    def messages(self) -> tuple[int, ...]:
        """Number of other ranks that each rank receives from: its messages in one chunk at most."""
        columns = zip(*self._traffic, strict=True)
        return tuple(
            sum(1 for source, count in enumerate(column) if count and source != rank)
            for rank, column in enumerate(columns)
        )

    def hash(self) -> str:
        """Returns a digest of all operations, equal on ranks that hold the same plan."""
        digest = hashlib.sha256(str(self.itemsize).encode())
        for ops in self.ops:
            digest.update(repr([tuple(op) for op in ops]).encode())
        return digest.hexdigest()


class _Owner(NamedTuple):
    """Where one rank holds a slice of an HF tensor."""

    name: str
    box: Box


class _Slice(NamedTuple):
    """A rectangle of an HF tensor that every one of its owners holds whole."""

    box: Box
    owners: dict[int, _Owner]


@dataclass(frozen=True)
class _Slices:
    """The disjoint slices of one HF tensor, in order along `dim` if they can be ordered."""

    slices: list[_Slice]
    dim: int | None = None
    starts: Sequence[int] = ()

    def near(self, box: Box) -> list[_Slice]:
        """Returns the slices that may share elements with `box`."""
        if self.dim is None:
            return self.slices
        start, stop = box[self.dim]
        first = max(bisect_right(self.starts, start) - 1, 0)
        return self.slices[first : bisect_left(self.starts, stop)]


def plan_reshard(
    sources: Sequence[RankLayout], targets: Sequence[RankLayout], itemsize: int
) -> Plan:
    """Plans how the targets' tensors are filled from the sources'.

    Args:
        sources: what each rank holds.
        targets: what each rank must have; as many as sources, empty where nothing is needed.
        itemsize: bytes of one element on the wire.

    Raises:
        PlanError: a target needs what no source holds; names the HF tensor and its elements.
    """
    if len(sources) != len(targets):
        raise PlanError(f"{len(sources)} source layouts, but {len(targets)} target layouts")
    held = _slices(sources)
    cuts: dict[tuple[str, Box], list[_Slice]] = {}
    loads = [0] * len(sources)
    ops: list[tuple[CopyOp, ...]] = []
    for rank, target in enumerate(targets):
        needed: list[CopyOp] = []
        for region in target.regions:
            key = (region.hf, region.hf_box)
            if key not in cuts:
                cuts[key] = _cut(*key, held)
            for box, owners in cuts[key]:
                source_rank = rank
                if rank not in owners:
                    source_rank = min(owners, key=lambda owner: (loads[owner], owner))
                    loads[source_rank] += volume(box)
                name, source_box = owners[source_rank]
                dest_box = moved(box, region.hf_box, region.local_box)
                op = CopyOp(source_rank, rank, name, source_box, region.local, dest_box)
                _append(needed, op)
        ops.append(tuple(needed))
    return Plan(tuple(ops), itemsize)


def _slices(sources: Sequence[RankLayout]) -> dict[str, _Slices]:
    """Returns each HF tensor as disjoint slices with all of their owners."""
    owned: dict[str, dict[Box, dict[int, _Owner]]] = {}
    for rank, layout in enumerate(sources):
        for region in layout.regions:
            owners = owned.setdefault(region.hf, {}).setdefault(region.hf_box, {})
            owners.setdefault(rank, _Owner(region.local, region.local_box))
    return {hf: _disjoint(boxes) for hf, boxes in owned.items()}


def _disjoint(boxes: dict[Box, dict[int, _Owner]]) -> _Slices:
    """Returns the boxes in order; where they overlap or form a grid, cut at all of their edges."""
    dims = range(len(next(iter(boxes))))
    for dim in dims:
        slices = [_Slice(*item) for item in sorted(boxes.items(), key=lambda item: item[0][dim])]
        pairs = zip(slices, slices[1:], strict=False)
        if all(one.box[dim][1] <= other.box[dim][0] for one, other in pairs):
            return _Slices(slices, dim, [one.box[dim][0] for one in slices])
    found: dict[Box, dict[int, _Owner]] = {}
    edges = [sorted({edge for box in boxes for edge in box[dim]}) for dim in dims]
    for cell in product(*(zip(cut, cut[1:], strict=False) for cut in edges)):
        for box, owners in boxes.items():
            if intersection(cell, box) is not None:
                for rank, (name, local) in owners.items():
                    owner = _Owner(name, moved(cell, box, local))
                    found.setdefault(cell, {}).setdefault(rank, owner)
    return _Slices([_Slice(*item) for item in sorted(found.items())])


def _cut(hf: str, box: Box, held: Mapping[str, _Slices]) -> list[_Slice]:
    """Returns the slices that together are `box`, each with its owners."""
    found: list[_Slice] = []
    for one in held[hf].near(box) if hf in held else ():
        shared = intersection(box, one.box)
        if shared == one.box:
            found.append(one)
        elif shared is not None:
            owners = {
                rank: _Owner(name, moved(shared, one.box, local))
                for rank, (name, local) in one.owners.items()
            }
            found.append(_Slice(shared, owners))
    if sum(volume(one.box) for one in found) != volume(box):
        origin = tuple((0, size) for size in sizes(box))
        fault = tiling_fault([moved(one.box, box, origin) for one in found], sizes(box))
        missing = moved(fault[1], origin, box) if fault else box
        raise PlanError(f"{hf}{show(missing)} is needed, but no rank holds it")
    return found


def _append(ops: list[CopyOp], op: CopyOp) -> None:
    """Appends `op`, or extends the last operation by it where both sides are adjacent."""
    if ops:
        last = ops[-1]
        same = (last.source_rank, last.source, last.dest) == (op.source_rank, op.source, op.dest)
        dim = _adjacent(last.dest_box, op.dest_box) if same else None
        if dim is not None and dim == _adjacent(last.source_box, op.source_box):
            source_box = _extended(last.source_box, op.source_box, dim)
            dest_box = _extended(last.dest_box, op.dest_box, dim)
            ops[-1] = last._replace(source_box=source_box, dest_box=dest_box)
            return
    ops.append(op)


def _adjacent(one: Box, other: Box) -> int | None:
    """Returns the dim along which `other` continues `one`; None if it does not."""
    differing = [dim for dim, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    if len(differing) == 1 and one[differing[0]][1] == other[differing[0]][0]:
        return differing[0]
    return None


def _extended(one: Box, other: Box, dim: int) -> Box:
    return (*one[:dim], (one[dim][0], other[dim][1]), *one[dim + 1 :])
