"""Finds the matrices that Muon updates (muon.py); AdamW updates all other parameters. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.models.boxes import Box, sizes, volume
from hybridrl.models.weights import RankLayout, Region

NUM_ITERATIONS = 5  # of the Newton-Schulz iteration (muon.py)
# Parts of the names (local or HF) of matrices that AdamW updates nevertheless.
_BY_ADAMW = ("embed", "output_layer.", "lm_head", "score.weight")

Slices = tuple[slice, slice]


@dataclass(frozen=True)
class Matrix:
    """A matrix of the HF checkpoint, of which a local parameter has a part.

    Args:
        shape: Rows and columns.
        places: For each tensor-parallel rank, pairs of slices of its local tensor and of the matrix
            that have the same elements. If this rank has the whole matrix, only its own pairs.
    """

    shape: tuple[int, int]
    places: tuple[tuple[tuple[Slices, Slices], ...], ...]


def is_hf_matrix(name: str, size: Sequence[int]) -> bool:
    """Whether Muon updates an HF tensor, or the matrices that are stacked in it."""
    return len(size) > 1 and min(size[-2:]) > 1 and not _is_by_adamw(name)


def matrices_of(layouts: Sequence[RankLayout], own: int) -> dict[str, tuple[Matrix, ...]]:
    """Returns the matrices of each local parameter that Muon updates.

    Args:
        layouts: Layouts of the tensor-parallel ranks.
        own: Index of this rank's layout.
    """
    shapes = layouts[own].shapes
    names = [n for n, size in shapes.items() if len(size) == 2 and not _is_by_adamw(n)]
    regions = [_by_name(layout, set(names)) for layout in layouts]
    found: dict[str, tuple[Matrix, ...]] = {}
    for name in names:
        boxes: dict[tuple[Any, ...], list[tuple[int, Region]]] = {}
        for rank, of_rank in enumerate(regions):
            for region in of_rank.get(name, ()):
                key = (region.hf, *region.hf_box[:-2])
                boxes.setdefault(key, []).append((rank, region))
        if all(_is_matrix(region) for one in boxes.values() for _, region in one):
            matrices = tuple(_matrix(one, len(layouts)) for one in boxes.values())
            if all(min(matrix.shape) > 1 for matrix in matrices):
                found[name] = matrices
    return found


def _is_by_adamw(name: str) -> bool:
    return any(part in name for part in _BY_ADAMW)


def _by_name(layout: RankLayout, names: set[str]) -> dict[str, list[Region]]:
    found: dict[str, list[Region]] = {}
    for region in layout.regions:
        if region.local in names:
            found.setdefault(region.local, []).append(region)
    return found


def _is_matrix(region: Region) -> bool:
    inner = region.hf_box[-2:]
    is_whole = volume(inner) == volume(region.hf_box)
    return is_whole and sizes(inner) == sizes(region.local_box)


def _matrix(regions: Sequence[tuple[int, Region]], num_ranks: int) -> Matrix:
    inner = [region.hf_box[-2:] for _, region in regions]
    first = [min(box[dim][0] for box in inner) for dim in range(2)]
    last = [max(box[dim][1] for box in inner) for dim in range(2)]
    places: list[list[tuple[Slices, Slices]]] = [[] for _ in range(num_ranks)]
    for rank, region in regions:
        here = _slices(region.local_box, [0, 0])
        places[rank].append((here, _slices(region.hf_box[-2:], first)))
    return Matrix((last[0] - first[0], last[1] - first[1]), tuple(map(tuple, places)))


def _slices(box: Box, origin: Sequence[int]) -> Slices:
    rows, columns = (
        slice(begin - start, end - start) for (begin, end), start in zip(box, origin, strict=True)
    )
    return rows, columns


def is_split(matrix: Matrix, own: int) -> bool:

    def elements() -> Iterator[int]:
        for _, (rows, columns) in matrix.places[own]:
            yield (rows.stop - rows.start) * (columns.stop - columns.start)

    return sum(elements()) < matrix.shape[0] * matrix.shape[1]
