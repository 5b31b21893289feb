"""Quantizes many rectangles to block FP8 in one launch, from a table that is made once.

A weight is 8-bit floats, float8_e4m3fn, times a float32 scale of each 128 x 128 block, as
DeepSeek's checkpoints and vLLM hold it. Sources lie wherever the device can read, a peer's memory
included, so weights are quantized while they travel. Ideal: every source byte is read once, and a
byte is written for each element, so the time is the bytes over the link's rate, or over the memory
bandwidth.

Rounding is done on the bits of float32, as torch's cast does it: GPUs that have no instruction for
it, Triton's interpreter (whose own cast drops the carry into the exponent) and torch give the same
bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from hybridrl.kernels.rectangles import TRITON_TYPES, spread
from hybridrl.kernels.reference import BLOCK, FP8_MAX, LEAST_AMAX

WARPS = 8  # 64 elements of a block a thread
FIELDS = 7
ALIGNED = 16  # bytes, and elements of the destination, that are moved as one where all lies so

Block = tuple[int, int, int, int, int, int, int]
"""Addresses of source, destination and scale; rows, columns; strides of source and destination."""

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class QuantizedCopies:
    """A fixed list of copies that quantize, run as one launch for each source type and alignment.

    Args:
        triples: (source, destination, scales) views, of two dims or more, whose last dim is
            contiguous. Source and destination are of equal shapes and of whole blocks, the last
            ones cut off by the tensor's edge; scales have an element for each block. Sources may be
            of another device whose memory this one can read.
        device: that runs the copies.
        lanes: as of `RectangleCopies`.
        programs: likewise.
    """

    def __init__(
        self,
        triples: Sequence[Triple],
        device: torch.device,
        lanes: Sequence[int] | None = None,
        programs: int | None = None,
    ) -> None:
        self._programs = programs
        found: dict[tuple[torch.dtype, int], dict[int, list[Block]]] = {}
        for lane, triple in zip(lanes or [0] * len(triples), triples, strict=True):
            for source, dest, scales in _planes(*triple):
                kind = source.dtype, _alignment(source, dest)
                blocks = found.setdefault(kind, {}).setdefault(lane, [])
                blocks.extend(_blocks(source, dest, scales))
        self._launches = [
            (torch.tensor(spread(by_lane), dtype=torch.int64).to(device), kind)
            for kind, by_lane in sorted(found.items(), key=str)
        ]

    @property
    def num_launches(self) -> int:
        """How many kernels a run starts."""
        return len(self._launches)

    @property
    def table_bytes(self) -> int:
        """Device memory of the tables."""
        return sum(table.nbytes for table, _ in self._launches)

    def run(self) -> None:
        """Quantizes everything, on the current stream."""
        for table, (source_type, alignment) in self._launches:
            grid = min(len(table), self._programs or len(table))
            turns = -(-len(table) // grid)
            _quantize_blocks[(grid,)](
                table,
                len(table),
                TRITON_TYPES[source_type],
                ALIGNMENT=alignment,
                FIELDS=FIELDS,
                BLOCK=BLOCK,
                FP8_MAX=FP8_MAX,
                LEAST_AMAX=LEAST_AMAX,
                TURNS=1 << (turns - 1).bit_length(),  # each value is compiled once
                num_warps=WARPS,
            )


@triton.jit
def _quantize_blocks(  # type: ignore[no-untyped-def]  # Triton's types are not Python's
    table,
    num_blocks,
    SOURCE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8_MAX: tl.constexpr,
    LEAST_AMAX: tl.constexpr,
    TURNS: tl.constexpr,
):
    source_size: tl.constexpr = SOURCE.primitive_bitwidth // 8
    source_align: tl.constexpr = max(ALIGNMENT, source_size)
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    for turn in range(TURNS):
        number = tl.program_id(0) + turn * tl.num_programs(0)
        is_block = number < num_blocks
        entry = table + number * FIELDS
        source = tl.load(entry, mask=is_block, other=0).to(tl.pointer_type(SOURCE))
        dest = tl.load(entry + 1, mask=is_block, other=0).to(tl.pointer_type(tl.uint8))
        scale_at = tl.load(entry + 2, mask=is_block, other=0).to(tl.pointer_type(tl.float32))
        rows = tl.load(entry + 3, mask=is_block, other=0)
        columns = tl.multiple_of(tl.load(entry + 4, mask=is_block, other=0), ALIGNMENT)
        source_stride = tl.load(entry + 5, mask=is_block, other=0)
        dest_stride = tl.load(entry + 6, mask=is_block, other=0)
        is_inside = (row < rows) & (column < columns)
        read = tl.multiple_of(source + row * source_stride + column, [1, source_align])
        value = tl.load(read, mask=is_inside, other=0.0).to(tl.float32)
        # A maximum on GPUs passes over what is not a number; the block may not.
        is_broken = tl.max(tl.max((value != value).to(tl.int32), 1), 0) > 0
        largest = tl.maximum(tl.max(tl.max(tl.abs(value), 1), 0), LEAST_AMAX)
        scale = tl.where(is_broken, float("nan"), tl.div_rn(largest, FP8_MAX))
        tl.store(scale_at, scale, mask=is_block)
        scaled = tl.div_rn(value, tl.full([BLOCK, BLOCK], 1.0, tl.float32) * scale)
        written = tl.multiple_of(dest + row * dest_stride + column, [1, ALIGNMENT])
        tl.store(written, _fp8_bits(scaled), mask=is_inside)


@triton.jit
def _fp8_bits(value):  # type: ignore[no-untyped-def]
    # float8_e4m3fn: sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7f is not a number.
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    is_number = value == value
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
    # Half a step less one, and one more if the last bit kept is odd: ties go to even.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (127 - 7 << 3)
    # Below 2^-6 steps are 2^-9, as those of float32 at 2^14: the addition rounds.
    denormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
    denormal -= 0x46800000  # 2^14
    code = tl.where(magnitude < 0x3C800000, denormal, normal)  # 2^-6
    return (tl.where(is_number, code, 0x7F) | sign).to(tl.uint8)


def _planes(
    source: torch.Tensor, dest: torch.Tensor, scales: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yields the two-dimensional copies of a triple."""
    shape = (*dest.shape[:-2], *(-(-size // BLOCK) for size in dest.shape[-2:]))
    if source.shape != dest.shape or dest.dim() < 2 or scales.shape != shape:
        raise ValueError(
            f"quantizing shape {tuple(source.shape)} to {tuple(dest.shape)} with scales of "
            f"{tuple(scales.shape)}: shapes must be equal, of two dims or more, and scales {shape}"
        )
    if (dest.dtype, scales.dtype) != (torch.float8_e4m3fn, torch.float32):
        raise ValueError(
            f"quantizing to {dest.dtype} with scales of {scales.dtype}: must be "
            "torch.float8_e4m3fn and torch.float32"
        )
    for view in (source, dest):
        if view.size(-1) > 1 and view.stride(-1) != 1:
            raise ValueError(
                f"quantizing shape {tuple(view.shape)} of strides {view.stride()}: the last dim "
                "must be contiguous"
            )
    if dest.dim() == 2:
        yield source, dest, scales
    else:
        for triple in zip(source, dest, scales, strict=True):
            yield from _planes(*triple)


def _alignment(source: torch.Tensor, dest: torch.Tensor) -> int:
    sizes = [source.data_ptr(), source.stride(0) * source.element_size()]
    sizes += [dest.data_ptr(), dest.stride(0), dest.size(1)]
    return ALIGNED if all(size % ALIGNED == 0 for size in sizes) else 1


def _blocks(source: torch.Tensor, dest: torch.Tensor, scales: torch.Tensor) -> Iterator[Block]:
    rows, columns = dest.shape
    strides = source.stride(0), dest.stride(0)
    for i, row in enumerate(range(0, rows, BLOCK)):
        for j, column in enumerate(range(0, columns, BLOCK)):
            yield (
                source.data_ptr() + (row * strides[0] + column) * source.element_size(),
                dest.data_ptr() + row * strides[1] + column,
                scales.data_ptr() + (i * scales.stride(0) + j * scales.stride(1)) * 4,
                min(BLOCK, rows - row),
                min(BLOCK, columns - column),
                *strides,
            )
