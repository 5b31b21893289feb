"""Multiplies few tokens by FP8 weights, without rounding the tokens to FP8.

y = x @ W.T, in which W is float8_e4m3fn times the fp32 scale of its 128 x 128 block. Scales are
powers of two, so weights become bf16 without rounding. GPUs convert FP8 to bf16 only through fp16
and fp32; here two shifted elements are multiplied by 2 ** 120 times the scale, in one instruction.
Sums are in fp32.

Ideal: every weight is read once, so the time is the number of weights divided by the memory
bandwidth. The blocks of all tiles form one sequence, of which every program computes an equal part.
A program that ends inside a tile stores its sums. The last program to arrive at a tile adds up the
sums, always in the same order.

Shape suffixes: M tokens, K contracted, N outputs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from hybridrl.kernels.reference import BLOCK
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_TOKENS = 128
MIN_TOKENS_BLOCK = 16  # least size of a tensor core's product
MAX_SUMS = 2 * 2 * 128 * MAX_TOKENS  # stored sums per multiprocessor
MAX_TILES = 1 << 16
ALIGNED = 16  # bytes; for addresses and rows that the memory accelerator copies
BIAS = tl.constexpr(2.0**120)  # exponents are stored plus 127 in bf16, and plus 7 in FP8


class Tiling(NamedTuple):
    """Sizes of a launch.

    Attributes:
        outputs, contracted: Sizes of the block of weights that a program multiplies at a time.
        stages: Blocks that are loaded ahead.
        warps: Warps of a program.
        programs: Programs per multiprocessor.
        tma: Whether the memory accelerator copies blocks, instead of threads.
    """

    outputs: int
    contracted: int
    stages: int
    warps: int
    programs: int
    tma: bool = True


class Workspace(NamedTuple):
    """Memory for sums, fp32, and for numbers of programs that have finished with a tile, int32,
    which are 0 between launches.
    """

    sums: torch.Tensor
    counts: torch.Tensor


# Fastest tilings on H200 by block of tokens, outputs and inputs of a weight: the layers of
# Qwen2.5-7B. A layer's four products together take 0.74, 0.80 and 0.98 times as long as cuBLAS's
# with bf16 weights, and 1.55 times as long with 128 tokens, which engines therefore compute
# themselves (benchmarks/results/fp8_linear_h200.json).
TILINGS: dict[tuple[int, int, int], Tiling] = {
    (16, 3584, 3584): Tiling(64, 128, 3, 4, 2),
    (16, 3584, 18944): Tiling(64, 128, 3, 4, 3),
    (16, 4608, 3584): Tiling(64, 128, 3, 4, 3),
    (16, 37888, 3584): Tiling(128, 128, 3, 4, 2),
    (32, 3584, 3584): Tiling(64, 128, 2, 4, 3),
    (32, 3584, 18944): Tiling(64, 128, 3, 4, 3),
    (32, 4608, 3584): Tiling(64, 128, 3, 4, 3),
    (32, 37888, 3584): Tiling(64, 128, 3, 4, 4),
    (64, 3584, 3584): Tiling(64, 128, 2, 4, 3),
    (64, 3584, 18944): Tiling(64, 128, 3, 4, 2),
    (64, 4608, 3584): Tiling(64, 128, 3, 4, 2),
    (64, 37888, 3584): Tiling(64, 128, 3, 4, 2),
}


def is_measured(num_tokens: int, outputs: int, inputs: int) -> bool:
    """Whether a tiling was measured for a number of tokens and a weight's sizes."""
    return (tokens_block(num_tokens), outputs, inputs) in TILINGS


def choose(tokens: int, outputs: int, inputs: int) -> Tiling:
    """Returns the tiling for a number of tokens and a weight's sizes."""
    block = tokens_block(tokens)
    if (found := TILINGS.get((block, outputs, inputs))) is not None:
        return found
    if block <= 64:
        return Tiling(128, 128, 3, 4, 2)
    return Tiling(128, 128, 3, 8, 1)


def product(x_MK: torch.Tensor, weight_NK: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns x @ W.T, (M, N) bf16; see `reference.fp8_product`. M is at most MAX_TOKENS."""
    if x_MK.stride(1) != 1 or x_MK.stride(0) * x_MK.element_size() % ALIGNED:
        x_MK = x_MK.contiguous()
    if x_MK.data_ptr() % ALIGNED:
        x_MK = x_MK.clone()
    y_MN = x_MK.new_empty(x_MK.size(0), weight_NK.size(0))
    tiling = choose(x_MK.size(0), *weight_NK.shape)
    launch(x_MK, weight_NK, scales, y_MN, workspace(x_MK.device), tiling)
    return y_MN


@cache
def workspace(device: torch.device) -> Workspace:
    """Returns the memory that all launches on a device share. The first call must precede the
    capture of CUDA graphs. Launches follow each other on one stream.
    """
    sums = torch.empty(MAX_SUMS * num_processors(device), dtype=torch.float32, device=device)
    return Workspace(sums, torch.zeros(MAX_TILES, dtype=torch.int32, device=device))


@cache
def num_processors(device: torch.device) -> int:
    """Returns the number of a device's multiprocessors."""
    if device.type != "cuda":
        return 5  # Triton's interpreter; programs then end inside tiles
    return torch.cuda.get_device_properties(device).multi_processor_count


def tokens_block(num_tokens: int) -> int:
    """Returns the number of tokens for which a launch is compiled."""
    return max(MIN_TOKENS_BLOCK, triton.next_power_of_2(num_tokens))


def launch(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    scales: torch.Tensor,
    y_MN: torch.Tensor,
    space: Workspace,
    tiling: Tiling,
) -> None:
    """Computes y = x @ W.T with a tiling."""
    (num_tokens, inputs), outputs = x_MK.shape, weight_NK.size(0)
    block = tokens_block(num_tokens)
    tiles, blocks = outputs // tiling.outputs, inputs // tiling.contracted
    programs = min(tiling.programs * num_processors(x_MK.device), tiles * blocks)
    if outputs % tiling.outputs or inputs % tiling.contracted or inputs % BLOCK:
        raise ValueError(
            f"a weight of {outputs} x {inputs}; sizes must be multiples of {tiling.outputs} and "
            f"{max(tiling.contracted, BLOCK)}"
        )
    if tiles > MAX_TILES or 2 * programs * tiling.outputs * block > space.sums.numel():
        raise ValueError(f"the workspace is too small for {tiles} tiles and {programs} programs")
    x, weight = x_MK, weight_NK.view(torch.uint8)
    if tiling.tma:
        x = TensorDescriptor.from_tensor(x_MK, [block, tiling.contracted])
        weight = TensorDescriptor.from_tensor(weight, [tiling.outputs, tiling.contracted])
    _product[(programs,)](
        x,
        weight,
        scales,
        y_MN,
        *space,
        num_tokens,
        outputs,
        inputs,
        x_MK.stride(0),
        BM=block,
        BN=tiling.outputs,
        BK=tiling.contracted,
        STAGES=tiling.stages,
        USES_TMA=tiling.tma,
        IS_NATIVE=x_MK.is_cuda,
        num_warps=tiling.warps,
    )


@triton.jit(do_not_specialize=["M"])
def _product(  # type: ignore[no-untyped-def]  # Triton's types are not Python's
    x_ptr,
    w_ptr,
    scale_ptr,
    y_ptr,
    sums_ptr,
    count_ptr,
    M,
    N,
    K,
    stride_x,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    USES_TMA: tl.constexpr,
    IS_NATIVE: tl.constexpr,
):
    """A program computes blocks `begin` to `end` of the sequence. A tile's sums are (BN, BM),
    because tensor cores take one of their operands from registers, where weights are widened.
    """
    programs = tl.num_programs(0)
    me = tl.program_id(0)
    blocks = K // BK
    units = blocks * (N // BN)
    begin = me * units // programs
    end = (me + 1) * units // programs
    row = tl.arange(0, BN)
    token = tl.arange(0, BM)
    is_token = token < M
    inner = row[:, None] * BM + token[None, :]
    places = y_ptr + token[None, :] * N + row[:, None]
    if not USES_TMA:
        column = tl.arange(0, BK)
        ws = w_ptr + row[:, None] * K + column[None, :]
        xs = x_ptr + token[:, None] * stride_x + column[None, :]
    sums = tl.zeros((BN, BM), dtype=tl.float32)
    for unit in tl.range(begin, end, num_stages=STAGES):
        tile = unit // blocks
        block = unit % blocks
        if USES_TMA:
            codes = w_ptr.load([tile * BN, block * BK])
            x = x_ptr.load([0, block * BK])
        else:
            codes = tl.load(ws + (tile.to(tl.int64) * BN * K + block * BK))
            x = tl.load(xs + block * BK, mask=is_token[:, None], other=0.0)
        scale_row = (tile * BN + row) // 128
        scale = tl.load(scale_ptr + scale_row * (K // 128) + block * BK // 128)
        # The product of a block is a separate sum. If tensor cores added it to the other sums,
        # every 16 columns would be widened only after the product of the 16 before them.
        if not IS_NATIVE:
            w = _widen_plainly(codes, BIAS)
            x = x.to(tl.float32)
        elif x.dtype == tl.float16:
            w = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            w = _widen(codes, tl.full((BN, BK), BIAS, tl.bfloat16))
        sums += tl.dot(w, tl.trans(x), input_precision="ieee") * scale[:, None]
        if block == blocks - 1:
            if unit - begin >= blocks - 1:
                tl.store(places + tile * BN, sums.to(tl.bfloat16), mask=is_token[None, :])
            else:
                tl.store(sums_ptr + 2 * me * (BN * BM) + inner, sums)
            sums = tl.zeros((BN, BM), dtype=tl.float32)
    head = begin // blocks
    tail = end // blocks
    if end % blocks != 0:
        tl.store(sums_ptr + (2 * me + 1) * (BN * BM) + inner, sums)
        _finish(tail, places, inner, is_token, sums_ptr, count_ptr, blocks, units, BM, BN)
    if (begin % blocks != 0) & (tail > head):
        _finish(head, places, inner, is_token, sums_ptr, count_ptr, blocks, units, BM, BN)


@triton.jit
def _widen(codes, factor):  # type: ignore[no-untyped-def]
    """Returns FP8 codes times a factor that includes BIAS, bf16. Moves the sign to bit 15, and
    exponent and mantissa to bits 4 to 10.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 wide, size;
        cvt.u32.u16 wide, $1;
        prmt.b32 wide, wide, 0, 0x1404;
        shr.u32 size, wide, 4;
        and.b32 size, size, 0x07F007F0;
        lop3.b32 wide, wide, 0x80008000, size, 0xEA;
        mul.rn.bf16x2 $0, wide, $2;
        }
        """,
        "=r,h,r",
        [codes, factor],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _widen_plainly(codes, factor):  # type: ignore[no-untyped-def]
    """`_widen` in fp32, for Triton's interpreter, which cannot run assembly."""
    codes = codes.to(tl.int32)
    bits = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * factor


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    tile,
    places,
    inner,
    is_token,
    sums_ptr,
    count_ptr,
    blocks,
    units,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Adds up a tile's sums if all programs that compute parts of it have stored theirs. The last
    of these programs reaches the tile's end; the others end inside it.
    """
    programs = tl.num_programs(0)
    first = ((tile * blocks + 1) * programs - 1) // units
    last = ((tile + 1) * blocks * programs - 1) // units
    tl.debug_barrier()
    if tl.atomic_add(count_ptr + tile, 1) == last - first:
        total = tl.zeros((BN, BM), dtype=tl.float32)
        for other in tl.range(first, last + 1, num_stages=3):
            place = 2 * other + (other != last).to(tl.int32)
            total += tl.load(sums_ptr + place * (BN * BM) + inner, cache_modifier=".cg")
        tl.store(places + tile * BN, total.to(tl.bfloat16), mask=is_token[None, :])
        tl.store(count_ptr + tile, 0)
