"""Quantizes many rectangles of weights in one launch, using a table that is built once.

A quantized weight is float8_e4m3fn times the fp32 scale of its 128 x 128 block. One kernel computes
the largest magnitude of each block, from which the scales are made; another one divides the weights
by the scales and rounds them. Ideal: each kernel reads every source byte once, and the second one
writes one byte per element. The time of both is then 5 bytes per bf16 element divided by the memory
bandwidth.

Each table entry is a band: rows of one row of blocks, and up to BAND blocks of columns. GPUs since
Ada round with an instruction. Older GPUs and Triton's interpreter, whose own cast loses the carry
into the exponent, round on the bits of fp32 numbers, which gives the same result. Scales are powers
of two, so weights are multiplied by exact reciprocals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from hybridrl.kernels.rectangles import TRITON_TYPES
from hybridrl.kernels.reference import BLOCK, Tiles

WARPS = 8  # 64 elements of a block per thread
BAND = 16  # blocks in a band
FIELDS = 8
LEAST_NATIVE = (8, 9)  # compute capability of GPUs with an instruction that rounds to FP8
ALIGNED = 16  # bytes of the source, and elements, that are accessed together if alignment permits

Band = tuple[int, int, int, int, int, int, int, int]
"""Addresses of source, destination and first scale; rows; columns; position of the first column in
its block; strides of source and destination.
"""


class _Kind(NamedTuple):
    """Element type of the sources, and alignment of a launch's bands."""

    source: torch.dtype
    alignment: int


class _Launches:
    """Tables of bands by kind, on the device; one launch for each table."""

    def __init__(
        self, pairs: Sequence[tuple[Tiles, torch.Tensor | None]], device: torch.device, block: int
    ) -> None:
        found: dict[_Kind, list[Band]] = {}
        for tiles, dest in pairs:
            if tiles.weight.numel():
                _check(tiles, dest, block)
                found.setdefault(_kind(tiles, dest), []).extend(_bands(tiles, dest, block))
        self._tables = [
            (torch.tensor(bands, dtype=torch.int64).to(device), kind)
            for kind, bands in sorted(found.items(), key=str)
        ]


class BlockMaxima(_Launches):
    """Raises each block's entry to the largest magnitude of the block's elements; see
    `reference.BlockMaxima`. One launch for each source type and alignment.

    Args:
        tiles: Rectangles, whose last dim is contiguous.
        device: Device of the rectangles.
        block: Rows and columns of a block.
    """

    def __init__(self, tiles: Sequence[Tiles], device: torch.device, block: int = BLOCK) -> None:
        self._block = block
        super().__init__([(one, None) for one in tiles], device, block)

    def run(self) -> None:
        for table, kind in self._tables:
            _block_maxima[(len(table),)](
                table,
                TRITON_TYPES[kind.source],
                ALIGNMENT=kind.alignment,
                FIELDS=FIELDS,
                BLOCK=self._block,
                num_warps=WARPS,
            )


class QuantizedCopies(_Launches):
    """A fixed list of copies that quantize blocks, executed as one launch for each source type and
    alignment.

    Args:
        pairs: Rectangles of weights with their scales, and destinations of equal shapes, uint8.
            The last dims are contiguous; destinations do not overlap.
        device: Device that runs the copies.
        programs: Maximum number of concurrent programs; None for one program per band.
        block: Rows and columns of a block.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Tiles, torch.Tensor]],
        device: torch.device,
        programs: int | None = None,
        block: int = BLOCK,
    ) -> None:
        self._programs, self._block = programs, block
        super().__init__(pairs, device, block)
        self._is_native = device.type == "cuda" and (
            torch.cuda.get_device_capability(device) >= LEAST_NATIVE
        )

    def run(self) -> None:
        for table, kind in self._tables:
            grid = min(len(table), self._programs or len(table))
            turns = -(-len(table) // grid)
            _quantize_blocks[(grid,)](
                table,
                len(table),
                TRITON_TYPES[kind.source],
                ALIGNMENT=kind.alignment,
                FIELDS=FIELDS,
                BLOCK=self._block,
                IS_NATIVE=self._is_native,
                TURNS=1 << (turns - 1).bit_length(),  # a power of two, to compile few variants
                num_warps=WARPS,
            )


@triton.jit
def _block_maxima(  # type: ignore[no-untyped-def]  # Triton's types are not Python's
    table, SOURCE: tl.constexpr, ALIGNMENT: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr
):
    source_size: tl.constexpr = SOURCE.primitive_bitwidth // 8
    together: tl.constexpr = max(ALIGNMENT // source_size, 1)
    entry = table + tl.program_id(0) * FIELDS
    source = tl.load(entry).to(tl.pointer_type(SOURCE))
    maxima = tl.load(entry + 2).to(tl.pointer_type(tl.int32))
    rows = tl.load(entry + 3)
    columns = tl.multiple_of(tl.load(entry + 4), together)
    phase = tl.multiple_of(tl.load(entry + 5), together)
    stride = tl.multiple_of(tl.load(entry + 6), together)
    source = tl.multiple_of(source, together * source_size)
    row = tl.arange(0, BLOCK)[:, None]
    number = 0
    first = -phase
    while first < columns:
        column = tl.multiple_of(first, together) + tl.arange(0, BLOCK)[None, :]
        is_inside = (row < rows) & (column >= 0) & (column < columns)
        value = tl.load(source + row * stride + column, mask=is_inside, other=0.0).to(tl.float32)
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        tl.atomic_max(maxima + number, tl.max(tl.max(bits, 1), 0))
        number += 1
        first += BLOCK


@triton.jit
def _quantize_blocks(  # type: ignore[no-untyped-def]
    table,
    num_bands,
    SOURCE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_NATIVE: tl.constexpr,
    TURNS: tl.constexpr,
):
    source_size: tl.constexpr = SOURCE.primitive_bitwidth // 8
    together: tl.constexpr = max(ALIGNMENT // source_size, 1)
    row = tl.arange(0, BLOCK)[:, None]
    for turn in range(TURNS):
        band = tl.program_id(0) + turn * tl.num_programs(0)
        is_band = band < num_bands
        entry = table + band * FIELDS
        address = tl.multiple_of(tl.load(entry, mask=is_band, other=0), together * source_size)
        source = address.to(tl.pointer_type(SOURCE))
        address = tl.multiple_of(tl.load(entry + 1, mask=is_band, other=0), ALIGNMENT)
        dest = address.to(tl.pointer_type(tl.uint8))
        scales = tl.load(entry + 2, mask=is_band, other=0).to(tl.pointer_type(tl.float32))
        rows = tl.load(entry + 3, mask=is_band, other=0)
        columns = tl.multiple_of(tl.load(entry + 4, mask=is_band, other=0), ALIGNMENT)
        phase = tl.multiple_of(tl.load(entry + 5, mask=is_band, other=0), ALIGNMENT)
        stride = tl.multiple_of(tl.load(entry + 6, mask=is_band, other=0), together)
        dest_stride = tl.multiple_of(tl.load(entry + 7, mask=is_band, other=0), ALIGNMENT)
        number = 0
        first = -phase
        while first < columns:
            column = tl.multiple_of(first, ALIGNMENT) + tl.arange(0, BLOCK)[None, :]
            is_inside = (row < rows) & (column >= 0) & (column < columns)
            read = source + row * stride + column
            value = tl.load(read, mask=is_inside, other=0.0).to(tl.float32)
            scaled = value * _reciprocal(tl.load(scales + number))
            if IS_NATIVE:
                code = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            else:
                code = _fp8_bits(scaled)
            tl.store(dest + row * dest_stride + column, code, mask=is_inside)
            number += 1
            first += BLOCK


@triton.jit
def _reciprocal(scale):  # type: ignore[no-untyped-def]
    # Exact for powers of two, whose exponents are between 1 and 253; NaN for NaN.
    bits = (254 << 23) - scale.to(tl.int32, bitcast=True)
    return tl.where(scale == scale, bits.to(tl.float32, bitcast=True), scale)


@triton.jit
def _fp8_bits(value):  # type: ignore[no-untyped-def]
    # float8_e4m3fn: sign, 4 bits of exponent with bias 7, 3 of fraction; 0x7f is NaN.
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    is_number = value == value
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
    # Half a step less one, and one more if the last bit kept is odd: ties go to even.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (127 - 7 << 3)
    # Below 2^-6 steps are 2^-9, as those of fp32 at 2^14, so the addition rounds.
    denormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
    denormal -= 0x46800000  # 2^14
    code = tl.where(magnitude < 0x3C800000, denormal, normal)  # 2^-6
    return (tl.where(is_number, code, 0x7F) | sign).to(tl.uint8)


def _check(tiles: Tiles, dest: torch.Tensor | None, block: int) -> None:
    weight, scales, row, column = tiles
    rows, columns = weight.shape
    wanted = -(-(row + rows) // block), -(-(column + columns) // block)
    if tuple(scales.shape) != wanted or scales.dtype != torch.float32:
        raise ValueError(
            f"a rectangle of shape {tuple(weight.shape)} at ({row}, {column}) of its block needs "
            f"float32 scales of shape {wanted}, not {scales.dtype} of {tuple(scales.shape)}"
        )
    if scales.size(1) > 1 and scales.stride(1) != 1:
        raise ValueError("the last dim of scales must be contiguous")
    if dest is not None and (dest.shape != weight.shape or dest.dtype != torch.uint8):
        raise ValueError(
            f"quantizing shape {tuple(weight.shape)} to {dest.dtype} of shape {tuple(dest.shape)}; "
            "the shapes must be equal, and the destination torch.uint8"
        )
    for view in (weight, dest):
        if view is not None and columns > 1 and view.stride(1) != 1:
            raise ValueError("the last dims of weights and destinations must be contiguous")


def _kind(tiles: Tiles, dest: torch.Tensor | None) -> _Kind:
    weight, _, _, column = tiles
    itemsize = weight.element_size()
    sizes = [weight.data_ptr(), weight.stride(0) * itemsize, column, weight.size(1)]
    if dest is not None:
        sizes += [dest.data_ptr(), dest.stride(0)]
    return _Kind(weight.dtype, ALIGNED if all(size % ALIGNED == 0 for size in sizes) else 1)


def _bands(tiles: Tiles, dest: torch.Tensor | None, block: int) -> Iterator[Band]:
    weight, scales, row_phase, column_phase = tiles
    rows, columns = weight.shape
    source_step, scale_step = weight.stride(0), scales.stride(0)
    dest_step = 0 if dest is None else dest.stride(0)
    itemsize = weight.element_size()
    source_at, scale_at = weight.data_ptr(), scales.data_ptr()
    dest_at = 0 if dest is None else dest.data_ptr()
    width = BAND * block
    for index, start in enumerate(range(-row_phase, rows, block)):
        row, height = max(start, 0), min(start + block, rows) - max(start, 0)
        for left in range(-column_phase, columns, width):
            column = max(left, 0)
            yield (
                source_at + (row * source_step + column) * itemsize,
                dest_at + row * dest_step + column,
                scale_at + (index * scale_step + (left + column_phase) // block) * 4,
                height,
                min(left + width, columns) - column,
                column - left if left < 0 else 0,
                source_step,
                dest_step,
            )
