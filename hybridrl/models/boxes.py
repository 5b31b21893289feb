"""Intersects, translates and checks half-open rectangles of tensor elements. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[tuple[int, int], ...]
Shape = tuple[int, ...]


def whole(shape: Shape) -> Box:
    return tuple((0, size) for size in shape)


def sizes(box: Box) -> Shape:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def box_view(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)]


def intersection(one: Box, other: Box) -> Box | None:
    shared = tuple((max(a, x), min(b, y)) for (a, b), (x, y) in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def moved(box: Box, origin: Box, target: Box) -> Box:
    """Translates `box` by the distance from the start of `origin` to the start of `target`."""
    return tuple(
        (a + t - o, b + t - o) for (a, b), (o, _), (t, _) in zip(box, origin, target, strict=True)
    )


def span_boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Yields boxes that cover elements `start` to `stop` of a tensor, in row-major order."""
    if not shape:
        yield ()
        return
    inner = prod(shape[1:])
    while start < stop:
        row, rest = divmod(start, inner)
        rows = (stop - start) // inner if rest == 0 else 0
        end = start + rows * inner if rows else min(stop, (row + 1) * inner)
        if rows:
            yield ((row, row + rows), *((0, size) for size in shape[1:]))
        else:
            for box in span_boxes(shape[1:], rest, rest + end - start):
                yield ((row, row + 1), *box)
        start = end


def tiling_fault(
    boxes: Sequence[Box], shape: Shape, allow_overlap: bool = False
) -> tuple[str, Box] | None:
    """Returns the first fault in a tiling of a tensor; None if the tiling is correct.

    Returns:
        "outside", "overlap" or "hole", and the first rectangle that has this fault.
    """
    if len(boxes) == 1 and boxes[0] == whole(shape):
        return None
    for box in boxes:
        fits = len(box) == len(shape) and all(
            0 <= start < stop <= size for (start, stop), size in zip(box, shape, strict=True)
        )
        if not fits:
            return "outside", box
    # Split every dim at all edges of boxes, so that each box consists of whole cells.
    cuts = [
        sorted({0, size, *(edge for box in boxes for edge in box[dim])})
        for dim, size in enumerate(shape)
    ]
    index = [{edge: i for i, edge in enumerate(edges)} for edges in cuts]
    seen: set[tuple[int, ...]] = set()
    for box in boxes:
        spans = (range(at[a], at[b]) for (a, b), at in zip(box, index, strict=True))
        for cell in product(*spans):
            if cell in seen and not allow_overlap:
                return "overlap", _cell_box(cell, cuts)
            seen.add(cell)
    for cell in product(*(range(len(edges) - 1) for edges in cuts)):
        if cell not in seen:
            return "hole", _cell_box(cell, cuts)
    return None


def show(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def _cell_box(cell: tuple[int, ...], cuts: list[list[int]]) -> Box:
    return tuple((edges[i], edges[i + 1]) for i, edges in zip(cell, cuts, strict=True))
