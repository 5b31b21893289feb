"""Copies many rectangles between tensors in one launch, using a table that is built once.

All copies of a reshard have this form: local copies, packing, unpacking and reading a peer's memory
all copy rectangles of one tensor to rectangles of another. Ideal: every byte is read once and
written once. The time is then twice the number of bytes divided by the memory bandwidth, or, if
sources are read over a link, the number of bytes divided by the link's rate.

For each tile of a rectangle the table contains both addresses, the numbers of rows and columns, and
both row strides. The table contains addresses, so tensors must not move after it is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl

# TILE: number of units that a program has in flight, a power of two; 2048 x 16 bytes keep the link
# busy. STEPS: number of steps in which a program copies a tile; four steps keep the table small, 48
# bytes per 128 KiB of data.
TILE = 2048
STEPS = 4
WARPS = 8
FIELDS = 6
# Element type and number of elements for each unit size in bytes. Copies without a cast use the
# largest unit that divides all addresses, widths and strides.
UNITS = {
    16: (torch.int64, 2),
    8: (torch.int64, 1),
    4: (torch.int32, 1),
    2: (torch.int16, 1),
    1: (torch.uint8, 1),
}
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
Entry = TypeVar("Entry")


class Kind(NamedTuple):
    """Element types of a copy, and its number of elements per unit."""

    source: torch.dtype
    dest: torch.dtype
    unit: int


class RectangleCopies:
    """A fixed list of copies, executed as one launch for each pair of element types.

    Args:
        pairs: (source, destination) views of equal shapes, with a contiguous last dim. Destinations
            do not overlap. Sources may be on another device whose memory this one can read.
        device: Device that runs the copies.
        lanes: For each pair, the number of the link over which its source is read; None if all
            pairs use the same link. Each lane's copies are spread evenly over the launch, so that
            all links stay busy.
        programs: Maximum number of concurrent programs; None for one program per tile.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        device: torch.device,
        lanes: Sequence[int] | None = None,
        programs: int | None = None,
    ) -> None:
        self._programs = programs
        found: dict[Kind, dict[int, list[Tile]]] = {}
        for lane, (source, dest) in zip(lanes or [0] * len(pairs), pairs, strict=True):
            for kind, rectangle in _rectangles(source, dest):
                tiles = found.setdefault(kind, {}).setdefault(lane, [])
                sizes = source.element_size(), dest.element_size()
                if source.dtype == dest.dtype:
                    sizes = (kind.source.itemsize * kind.unit,) * 2
                tiles.extend(_tiles(rectangle, *sizes))
        self._launches = [
            (torch.tensor(spread(by_lane), dtype=torch.int64).to(device), kind)
            for kind, by_lane in sorted(found.items(), key=str)
        ]
        self._compiled: list[Any] = [None] * len(self._launches)

    def run(self) -> None:
        for number, (table, kind) in enumerate(self._launches):
            self._compiled[number] = self._launch(table, kind, self._compiled[number])

    def _launch(self, table: torch.Tensor, kind: Kind, compiled: Any) -> Any:
        """Executes the copies in one table; returns the compiled kernel.

        From the second run on, the compiled kernel is launched directly. Triton's lookup by the
        types of all arguments takes longer on the host than the launch itself, and would delay
        small copies.
        """
        grid = min(len(table), self._programs or len(table))
        turns = -(-len(table) // grid)
        arguments = (
            table,
            len(table),
            TRITON_TYPES[kind.source],
            TRITON_TYPES[kind.dest],
            kind.unit,
            FIELDS,
            TILE,
            STEPS,
            1 << (turns - 1).bit_length(),  # a power of two, to compile few variants
        )
        if compiled is None:  # the first run, or any run in Triton's interpreter
            return _copy_rectangles[(grid,)](*arguments, num_warps=WARPS)
        compiled[(grid, 1, 1)](*arguments)
        return compiled


@triton.jit
def _copy_rectangles(  # type: ignore[no-untyped-def]  # Triton's types are not Python's
    table,
    num_tiles,
    SOURCE: tl.constexpr,
    DEST: tl.constexpr,
    UNIT: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    TURNS: tl.constexpr,
):
    # A unit's address is a multiple of its size (_as_units), so Triton copies it with one access.
    source_size: tl.constexpr = SOURCE.primitive_bitwidth // 8 * UNIT
    dest_size: tl.constexpr = DEST.primitive_bitwidth // 8 * UNIT
    element = tl.arange(0, UNIT)[None, :]
    for turn in range(TURNS):
        number = tl.program_id(0) + turn * tl.num_programs(0)
        is_tile = number < num_tiles
        entry = table + number * FIELDS
        address = tl.load(entry, mask=is_tile, other=0)
        source = tl.multiple_of(address, source_size).to(tl.pointer_type(SOURCE))
        address = tl.load(entry + 1, mask=is_tile, other=0)
        dest = tl.multiple_of(address, dest_size).to(tl.pointer_type(DEST))
        rows = tl.load(entry + 2, mask=is_tile, other=0).to(tl.int32)
        columns = tl.load(entry + 3, mask=is_tile, other=1).to(tl.int32)
        source_stride = tl.load(entry + 4, mask=is_tile, other=0)
        dest_stride = tl.load(entry + 5, mask=is_tile, other=0)
        for step in tl.static_range(STEPS):
            place = step * TILE + tl.arange(0, TILE)
            row = place // columns
            column = place - row * columns
            is_inside = (place < rows * columns)[:, None]
            read = (row * source_stride + column)[:, None] * UNIT + element
            written = (row * dest_stride + column)[:, None] * UNIT + element
            value = tl.load(source + read, mask=is_inside)
            tl.store(dest + written, value.to(DEST), mask=is_inside)


def _rectangles(source: torch.Tensor, dest: torch.Tensor) -> Iterator[tuple[Kind, Tile]]:
    """Yields the rectangles of a copy; sizes and strides are numbers of units."""
    if source.shape != dest.shape:
        raise ValueError(
            f"a copy from shape {tuple(source.shape)} to another shape, {tuple(dest.shape)}"
        )
    if dest.numel() == 0:
        return
    if source.is_contiguous() and dest.is_contiguous():
        source, dest = source.reshape(1, -1), dest.reshape(1, -1)
    if dest.dim() > 2:
        for one, other in zip(source, dest, strict=True):
            yield from _rectangles(one, other)
        return
    one, other = _two_dims(source), _two_dims(dest)
    rows, columns = other.shape
    strides = (one.stride(0), other.stride(0)) if rows > 1 else (columns, columns)
    entry = (source.data_ptr(), dest.data_ptr(), rows, columns, *strides)
    if source.dtype != dest.dtype:
        yield Kind(source.dtype, dest.dtype, 1), entry
    else:
        yield _as_units(entry, dest.element_size())


def _as_units(entry: Tile, itemsize: int) -> tuple[Kind, Tile]:
    """Returns the widest unit that the copy can use, and the rectangle in these units."""
    sizes = [entry[0], entry[1], *(count * itemsize for count in entry[3:])]
    width = next(width for width in UNITS if all(size % width == 0 for size in sizes))
    columns, source_stride, dest_stride = (count * itemsize // width for count in entry[3:])
    word, unit = UNITS[width]
    return Kind(word, word, unit), (*entry[:3], columns, source_stride, dest_stride)


def _tiles(entry: Tile, source_size: int, dest_size: int) -> Iterator[Tile]:
    """Splits a rectangle into tiles of whole rows, or into pieces of longer rows."""
    source, dest, rows, columns, source_stride, dest_stride = entry
    most = TILE * STEPS
    step = max(1, most // columns)
    for row in range(0, rows, step):
        height = min(step, rows - row)
        for column in range(0, columns, most):
            width = min(most, columns - column)
            yield (
                source + (row * source_stride + column) * source_size,
                dest + (row * dest_stride + column) * dest_size,
                height,
                width,
                source_stride,
                dest_stride,
            )


def spread(by_lane: Mapping[int, Sequence[Entry]]) -> list[Entry]:
    """Returns all tiles; each lane's tiles are in order and spread evenly over the result."""
    placed = [
        ((number + 0.5) / len(tiles), tile)
        for tiles in by_lane.values()
        for number, tile in enumerate(tiles)
    ]
    return [tile for _, tile in sorted(placed, key=lambda entry: entry[0])]


def _two_dims(view: torch.Tensor) -> torch.Tensor:
    if view.dim() and view.size(-1) > 1 and view.stride(-1) != 1:
        raise ValueError(
            f"a copy of shape {tuple(view.shape)} and strides {view.stride()}: the last dim must "
            "be contiguous"
        )
    return view.reshape(1, -1) if view.dim() < 2 else view
