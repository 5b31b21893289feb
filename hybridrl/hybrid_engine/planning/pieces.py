"""Splits the regions that targets need into pieces that some source rank holds completely.

Ranks with equal layouts form one class, and tensors that all ranks shard in the same way are split
only once, so the run time does not grow with the number of ranks. Pure, no torch. Invariant: the
pieces of a target's region tile it, and every owner of a piece holds all of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from hybridrl.models.boxes import Box, intersection, moved, show, sizes, tiling_fault, volume
from hybridrl.models.weights import RankLayout, Region


class PlanError(Exception):
    """No plan exists for these layouts, or a plan is wrong."""


class RankClasses:
    """Ranks grouped by equal layouts, which should be one object to save comparisons."""

    def __init__(self, layouts: Sequence[RankLayout]) -> None:
        self.layouts: list[RankLayout] = []
        self.of_rank: list[int] = []
        self.ranks: list[list[int]] = []
        by_object: dict[int, int] = {}
        by_content: dict[tuple[Region, ...], int] = {}
        for rank, layout in enumerate(layouts):
            if id(layout) not in by_object:
                number = by_content.setdefault(layout.regions, len(self.layouts))
                by_object[id(layout)] = number
                if number == len(self.layouts):
                    self.layouts.append(layout)
                    self.ranks.append([])
            self.of_rank.append(by_object[id(layout)])
            self.ranks[self.of_rank[-1]].append(rank)


class PieceKind(NamedTuple):
    """Pieces of one size that the same classes (ascending) of source ranks can send."""

    owners: tuple[int, ...]
    volume: int


class Piece(NamedTuple):
    """A rectangle of an HF tensor, and the index of its `PieceKind`."""

    box: Box
    kind: int


Wanted = tuple[str, Box, int]
"""A piece that a rank needs: HF name, box, and the number of identical pieces before it."""


class ReceiverGroup(NamedTuple):
    """Pieces of one kind that the same target classes (ascending) of a node need."""

    kind: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Join:
    """Pieces that every target rank needs, and the source ranks that hold them.

    Args:
        needs: For each target class, its regions in order, each with the pieces that tile it.
        counts: For each target class, the number of pieces of each kind that it needs.
    """

    sources: RankClasses
    targets: RankClasses
    kinds: list[PieceKind]
    needs: list[list[tuple[Region, tuple[Piece, ...]]]]
    counts: list[Counter[int]]

    def owners(self, kind: int) -> list[int]:
        return sorted(rank for c in self.kinds[kind].owners for rank in self.sources.ranks[c])

    def wants(self, target: int) -> Iterator[tuple[Region, int, Wanted]]:
        """Yields region, kind and identity of each piece that a target class needs, in order."""
        seen: Counter[tuple[str, Box]] = Counter()
        for region, pieces in self.needs[target]:
            for box, kind in pieces:
                yield region, kind, (region.hf, box, seen[region.hf, box])
                seen[region.hf, box] += 1

    def wanted_by(self, classes: Iterable[int]) -> dict[Wanted, ReceiverGroup]:
        """Returns the receiver group of each piece that ranks of these target classes need."""
        found: dict[Wanted, tuple[int, list[int]]] = {}
        for target in sorted(set(classes)):
            for _, kind, wanted in self.wants(target):
                found.setdefault(wanted, (kind, []))[1].append(target)
        return {wanted: ReceiverGroup(k, tuple(targets)) for wanted, (k, targets) in found.items()}


def join(sources: Sequence[RankLayout], targets: Sequence[RankLayout]) -> Join:
    """Splits the regions of each target along the borders of the sources' regions.

    Raises PlanError, naming tensor and elements, if a target needs elements that no source holds.
    """
    held, wanted = RankClasses(sources), RankClasses(targets)
    cutter = _Cutter(held)
    needs = [
        [(region, cutter.pieces(region.hf, region.hf_box)) for region in layout.regions]
        for layout in wanted.layouts
    ]
    counts = [Counter(p.kind for _, pieces in need for p in pieces) for need in needs]
    return Join(held, wanted, list(cutter.kinds), needs, counts)


@dataclass(frozen=True)
class _Slices:
    """Disjoint slices of an HF tensor with their owners, ordered along `dim` unless it is None."""

    slices: list[tuple[Box, tuple[int, ...]]]
    dim: int | None = None
    starts: Sequence[int] = ()

    def near(self, box: Box) -> list[tuple[Box, tuple[int, ...]]]:
        """Returns the slices that may overlap with `box`."""
        if self.dim is None:
            return self.slices
        start, stop = box[self.dim]
        first = max(bisect_right(self.starts, start) - 1, 0)
        return self.slices[first : bisect_left(self.starts, stop)]


class _Cutter:
    """Splits boxes of HF tensors; caches the result for each combination of holders and box."""

    def __init__(self, held: RankClasses) -> None:
        self.kinds: dict[PieceKind, int] = {}
        self._cuts: dict[tuple[int, Box], tuple[Piece, ...]] = {}
        holders: dict[str, list[tuple[int, Box]]] = {}
        for number, layout in enumerate(held.layouts):
            for region in layout.regions:
                holders.setdefault(region.hf, []).append((number, region.hf_box))
        alike: dict[tuple[tuple[int, Box], ...], int] = {}
        self._alike = {hf: alike.setdefault(tuple(who), len(alike)) for hf, who in holders.items()}
        self._slices = [_disjoint(who) for who in alike]

    def pieces(self, hf: str, box: Box) -> tuple[Piece, ...]:
        key = (self._alike.get(hf, -1), box)
        if key not in self._cuts:
            self._cuts[key] = self._cut(hf, *key)
        return self._cuts[key]

    def _cut(self, hf: str, number: int, box: Box) -> tuple[Piece, ...]:
        found = []
        for slice_box, owners in self._slices[number].near(box) if number >= 0 else ():
            shared = intersection(box, slice_box)
            if shared is not None:
                kind = PieceKind(owners, volume(shared))
                found.append(Piece(shared, self.kinds.setdefault(kind, len(self.kinds))))
        if sum(volume(piece.box) for piece in found) != volume(box):
            origin = tuple((0, size) for size in sizes(box))
            inside = [moved(piece.box, box, origin) for piece in found]
            fault = tiling_fault(inside, sizes(box))
            missing = moved(fault[1], origin, box) if fault else box
            raise PlanError(f"{hf}{show(missing)} is needed, but no rank holds it")
        return tuple(found)


def _disjoint(holders: Sequence[tuple[int, Box]]) -> _Slices:
    """Returns the held boxes in order; if they overlap or form a grid, splits them at all edges."""
    owners: dict[Box, set[int]] = {}
    for number, box in holders:
        owners.setdefault(box, set()).add(number)
    dims = range(len(holders[0][1]))
    for dim in dims:
        boxes = sorted(owners, key=lambda box: box[dim])
        pairs = zip(boxes, boxes[1:], strict=False)
        if all(one[dim][1] <= other[dim][0] for one, other in pairs):
            return _Slices(_with_owners(boxes, owners), dim, [box[dim][0] for box in boxes])
    cells: dict[Box, set[int]] = {}
    edges = [sorted({edge for box in owners for edge in box[dim]}) for dim in dims]
    for cell in product(*(zip(cut, cut[1:], strict=False) for cut in edges)):
        for box, numbers in owners.items():
            if intersection(cell, box) is not None:
                cells.setdefault(cell, set()).update(numbers)
    return _Slices(_with_owners(sorted(cells), cells))


def _with_owners(
    boxes: Sequence[Box], owners: Mapping[Box, set[int]]
) -> list[tuple[Box, tuple[int, ...]]]:
    return [(box, tuple(sorted(owners[box]))) for box in boxes]
