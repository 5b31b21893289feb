"""Copies many rectangles between tensors in one launch, from a table that is made once.

Resharding is this operation throughout: what stays on a rank, what is packed for a peer, what is
unpacked, and what a rank reads out of a peer's memory are rectangles of one tensor that go to
rectangles of another. Ideal: every byte is read once and written once, so the time is twice the
bytes over the memory bandwidth, or the bytes over the link's rate where sources lie across it.

The table holds, for each tile of a rectangle: both addresses, rows, columns and both row strides.
Addresses are fixed when it is made, so the tensors must keep theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import triton
import triton.language as tl

# Elements that one program copies: enough that its table reads vanish beside them. A power of two.
TILE = 4096
WARPS = 8
FIELDS = 6
# Copies without a cast move words of this size, if all addresses, widths and strides allow it.
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
TRITON_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int64: tl.int64,
    torch.int32: tl.int32,
    torch.int16: tl.int16,
    torch.uint8: tl.uint8,
}

Tile = tuple[int, int, int, int, int, int]


class RectangleCopies:
    """A fixed list of copies, run as one launch for each pair of element types.

    Args:
        pairs: (source, destination) views of equal shapes, of one or two dims whose last is
            contiguous; destinations do not overlap. Sources may be of another device whose memory
            this one can read.
        device: that runs the copies.
    """

    def __init__(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device
    ) -> None:
        self._launches: list[tuple[torch.Tensor, Any, Any]] = []
        rectangles = sorted(
            (entry for pair in pairs if (entry := _rectangle(*pair)) is not None),
            key=lambda entry: str(entry[:2]),
        )
        for (source_type, dest_type), group in groupby(rectangles, lambda entry: entry[:2]):
            sizes = source_type.itemsize, dest_type.itemsize
            tiles = [tile for entry in group for tile in _tiles(entry[2], *sizes)]
            table = torch.tensor(tiles, dtype=torch.int64).to(device)
            launch = (table, TRITON_TYPES[source_type], TRITON_TYPES[dest_type])
            self._launches.append(launch)

    @property
    def num_launches(self) -> int:
        """How many kernels a run starts."""
        return len(self._launches)

    def run(self) -> None:
        """Copies everything, on the current stream."""
        for table, source_type, dest_type in self._launches:
            _copy_rectangles[(len(table),)](
                table, source_type, dest_type, FIELDS=FIELDS, TILE=TILE, num_warps=WARPS
            )


@triton.jit
def _copy_rectangles(  # type: ignore[no-untyped-def]  # Triton's types are not Python's
    table, SOURCE: tl.constexpr, DEST: tl.constexpr, FIELDS: tl.constexpr, TILE: tl.constexpr
):
    entry = table + tl.program_id(0) * FIELDS
    source = tl.load(entry).to(tl.pointer_type(SOURCE))
    dest = tl.load(entry + 1).to(tl.pointer_type(DEST))
    rows = tl.load(entry + 2)
    columns = tl.load(entry + 3)
    source_stride = tl.load(entry + 4)
    dest_stride = tl.load(entry + 5)
    place = tl.arange(0, TILE)
    row = place // columns
    column = place - row * columns
    is_inside = place < rows * columns
    value = tl.load(source + row * source_stride + column, mask=is_inside)
    tl.store(dest + row * dest_stride + column, value.to(DEST), mask=is_inside)


def _rectangle(
    source: torch.Tensor, dest: torch.Tensor
) -> tuple[torch.dtype, torch.dtype, Tile] | None:
    """Returns the element types and the rectangle of a copy, None if nothing is to be done."""
    if source.shape != dest.shape:
        raise ValueError(f"a copy from shape {tuple(source.shape)} to {tuple(dest.shape)}")
    if dest.numel() == 0:
        return None
    one, other = _two_dims(source), _two_dims(dest)
    if source.is_contiguous() and dest.is_contiguous():
        one, other = one.reshape(1, -1), other.reshape(1, -1)
    rows, columns = other.shape
    strides = (one.stride(0), other.stride(0)) if rows > 1 else (columns, columns)
    entry = (source.data_ptr(), dest.data_ptr(), rows, columns, *strides)
    if source.dtype != dest.dtype:
        return source.dtype, dest.dtype, entry
    word, scaled = _as_words(entry, dest.element_size())
    return word, word, scaled


def _as_words(entry: Tile, itemsize: int) -> tuple[torch.dtype, Tile]:
    """Returns the widest word that the copy can move, and the rectangle in words."""
    sizes = [entry[0], entry[1], *(count * itemsize for count in entry[3:])]
    width = next(width for width in WORDS if all(size % width == 0 for size in sizes))
    columns, source_stride, dest_stride = (count * itemsize // width for count in entry[3:])
    return WORDS[width], (*entry[:3], columns, source_stride, dest_stride)


def _tiles(entry: Tile, source_size: int, dest_size: int) -> Iterator[Tile]:
    """Cuts a rectangle into tiles of whole rows, or of pieces of rows that are longer."""
    source, dest, rows, columns, source_stride, dest_stride = entry
    step = max(1, TILE // columns)
    for row in range(0, rows, step):
        height = min(step, rows - row)
        for column in range(0, columns, TILE):
            width = min(TILE, columns - column)
            yield (
                source + (row * source_stride + column) * source_size,
                dest + (row * dest_stride + column) * dest_size,
                height,
                width,
                source_stride,
                dest_stride,
            )


def _two_dims(view: torch.Tensor) -> torch.Tensor:
    if view.dim() > 2 or (view.dim() and view.size(-1) > 1 and view.stride(-1) != 1):
        raise ValueError(
            f"a copy of shape {tuple(view.shape)} and strides {view.stride()}: at most two dims, "
            "the last contiguous"
        )
    return view.reshape(1, -1) if view.dim() < 2 else view
