"""Selects the implementation of each operation by device: CUDA, Triton or the PyTorch reference.

No other module makes this choice. The reference is plain PyTorch and is the same on CPU and GPU.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from hybridrl.kernels import copy_engine, invariant, reference
from hybridrl.kernels.copy_engine import Stream, Waits
from hybridrl.kernels.reference import (
    BLOCK,
    Tiles,
    VocabStats,
    invert_rows,
    power_of_two_scales,
    quantize_blocks,
    row_uniforms,
    vocab_chosen,
    vocab_chosen_backward,
    vocab_top,
)


def vocab_stats(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_T: torch.Tensor,
    temperature: float,
    cap: float = 0.0,
) -> VocabStats:
    """Computes a vocabulary shard's softmax statistics, as `reference.vocab_stats`."""
    operations = _head_operations(hidden_TD)
    return operations.vocab_stats(hidden_TD, weight_VD, target_T, temperature, cap)


def _head_operations(hidden_TD: torch.Tensor) -> Any:
    if hidden_TD.is_cuda:
        from hybridrl.kernels import token_logprobs  # torch's CUDA builds bring triton

        return token_logprobs
    return reference


def vocab_backward(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_T: torch.Tensor,
    temperature: float,
    max_T: torch.Tensor,
    log_sum_T: torch.Tensor,
    entropy_T: torch.Tensor,
    grad_logp_T: torch.Tensor,
    grad_entropy_T: torch.Tensor | None,
    grad_weight_VD: torch.Tensor | None,
    cap: float = 0.0,
    is_trained: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes the shard's part of the gradients, as `reference.vocab_backward`."""
    stats, grads = (max_T, log_sum_T, entropy_T), (grad_logp_T, grad_entropy_T, grad_weight_VD)
    return _head_operations(hidden_TD).vocab_backward(
        hidden_TD, weight_VD, target_T, temperature, *stats, *grads, cap, is_trained
    )


def draw_rows(
    logits_BV: torch.Tensor,
    temperature_B: torch.Tensor,
    is_greedy_B: torch.Tensor,
    seed_B: torch.Tensor,
    count_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one token per row from the softmax of its logits, as `reference.draw_rows`."""
    arguments = logits_BV, temperature_B, is_greedy_B, seed_B, count_B
    if logits_BV.is_cuda:
        from hybridrl.kernels import draws

        if draws.fits(logits_BV.size(1)):
            return draws.draw_rows(*arguments)
    return reference.draw_rows(*arguments)


def add_up(
    y_MN: torch.Tensor,
    down_MR: torch.Tensor,
    bs: Sequence[torch.Tensor],
    slot_M: torch.Tensor,
    slot: int,
) -> None:
    """Adds the products of a LoRA adapter's B matrices in place, as `reference.add_up`."""
    if y_MN.is_cuda:
        from hybridrl.kernels import adapters

        if len(bs) <= adapters.MOST_PROJECTIONS:
            adapters.add_up(y_MN, down_MR, bs, slot_M, slot)
            return
    reference.add_up(y_MN, down_MR, bs, slot_M, slot)


def causal_convolution(
    channels_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    before_NPC: torch.Tensor | None,
) -> torch.Tensor:
    """Convolves channels of packed sequences and applies SiLU, as `kernels.convolution.convolve`.

    The reference in PyTorch is models/megatron/delta_rule.py.
    """
    from hybridrl.kernels import convolution

    return convolution.convolve(channels_TC, weight_CK, convolution.Spans(*places), before_NPC)


def delta_rule_fault(key_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
    """Returns why `gated_delta_rule` cannot compute heads of these sizes and type, or None."""
    if find_spec("triton") is None:
        return "triton is not installed"
    from hybridrl.kernels import delta_rule

    return delta_rule.fault(key_dim, value_dim, dtype)


def gated_delta_rule(
    query_THK: torch.Tensor,
    key_THK: torch.Tensor,
    value_TGV: torch.Tensor,
    decay_TG: torch.Tensor,
    beta_TG: torch.Tensor,
    chunks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    state_NGKV: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the gated delta rule with Triton, as `kernels.delta_rule.delta_rule`.

    The reference in PyTorch, models/megatron/delta_rule.py, arranges sequences in another way.
    """
    from hybridrl.kernels import delta_rule

    return delta_rule.delta_rule(
        query_THK, key_THK, value_TGV, decay_TG, beta_TG, delta_rule.Chunks(*chunks), state_NGKV
    )


def invariant_linear(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None
) -> torch.Tensor:
    """Returns x @ weight.T + bias; the bits of a row do not depend on the other rows and columns.

    On GPUs, this holds for cuBLAS without a workspace (platform.multiply_in_one_order), with which
    it does not split the contracted dimension.
    """
    if x_MK.is_cuda:
        return F.linear(x_MK, weight_NK, bias_N)
    product_MN = invariant.product(x_MK, weight_NK)
    return product_MN if bias_N is None else product_MN + bias_N


def _row_operations(x: torch.Tensor) -> Any:
    if x.is_cuda:
        from hybridrl.kernels import rows

        return rows
    return invariant


def invariant_rms_norm(
    x: torch.Tensor, weight_D: torch.Tensor, eps: float, is_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalizes rows. Arguments and results as in `invariant.rms_norm`."""
    return _row_operations(x).rms_norm(x, weight_D, eps, is_centered)[:2]


def invariant_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight_D: torch.Tensor, eps: float, is_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the normalized rows of x + residual, and the sum."""
    if x.is_cuda:
        found, _, total = _row_operations(x).rms_norm(x, weight_D, eps, is_centered, residual)
        return found, total
    total = x + residual
    return invariant.rms_norm(total, weight_D, eps, is_centered)[0], total


def invariant_rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight_D: torch.Tensor,
    inverse: torch.Tensor,
    is_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns gradients of a norm. Arguments and results as in `invariant.rms_norm_backward`."""
    return _row_operations(x).rms_norm_backward(grad, x, weight_D, inverse, is_centered)


def invariant_swiglu(x: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up. Argument and result as in `invariant.swiglu`."""
    return _row_operations(x).swiglu(x)


def invariant_swiglu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of the input of `invariant_swiglu`."""
    return _row_operations(x).swiglu_backward(grad, x)


def invariant_rotate(
    x_THD: torch.Tensor, table_LD: torch.Tensor, row_T: torch.Tensor, is_inverse: bool = False
) -> torch.Tensor:
    """Rotates heads by their positions' angles. Arguments and result as in `invariant.rotate`."""
    return _row_operations(x_THD).rotate(x_THD, table_LD, row_T, is_inverse=is_inverse)


def invariant_attention(
    query_BHQD: torch.Tensor,
    key_BHSD: torch.Tensor,
    value_BHSD: torch.Tensor,
    is_seen_BQS: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attends. Arguments and results as in `invariant.attention`."""
    return invariant.attention(query_BHQD, key_BHSD, value_BHSD, is_seen_BQS, scale)


def invariant_logits(hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Returns logits, (N, V) fp32, whose bits no other row changes; see `invariant_linear`."""
    if hidden_ND.is_cuda:
        return wide_logits(hidden_ND, weight_VD)
    return invariant.logits(hidden_ND, weight_VD)


def wide_logits(hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Returns the logits, (N, V) fp32, never rounded to another type. Inputs have one type."""
    if hidden_ND.is_cuda and hidden_ND.dtype != torch.float32:
        logits_NV: torch.Tensor = torch.mm(hidden_ND, weight_VD.T, out_dtype=torch.float32)
        return logits_NV
    return reference.wide_logits(hidden_ND, weight_VD)


def invariant_logps(
    logits_NV: torch.Tensor, target_N: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Returns the log-probabilities of the targets, (N,) fp32, as engines on CPU compute them."""
    # A tensor, because torch on CUDA multiplies by the inverse of a number.
    divisor = torch.tensor(temperature, dtype=torch.float32, device=logits_NV.device)
    logp_NV = (logits_NV / divisor).log_softmax(-1)
    return logp_NV.gather(1, target_N[:, None])[:, 0]


class Copies(Protocol):
    """A fixed list of copies between tensors. The tensors' addresses must not change."""

    def run(self) -> None:
        """Enqueues all copies on the device's current stream."""


class Blocks(Protocol):
    """A fixed list of copies of contiguous blocks."""

    @property
    def num_launches(self) -> int:
        """Number of batches that one `run()` enqueues: 1, or 0 if the list is empty."""

    def run(self, stream: Stream, first: Waits = (), then: Waits = ()) -> None:
        """Enqueues all copies without waiting for them.

        Args:
            stream: A stream of the current device that is not the default one; None on CPU.
            first, then: Pairs (waiting, awaited) of streams: everything enqueued later on the
                waiting stream waits for what is now enqueued on the awaited stream. `first` is
                applied before the copies, `then` after them.
        """


def rectangle_copies(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
    lanes: Sequence[int] | None = None,
    programs: int | None = None,
) -> Copies:
    """Prepares copies between (source, destination) views that can be run repeatedly.

    Args:
        pairs: Views of equal shapes with a contiguous last dim; destinations do not overlap.
        lanes: For each source, the link through which it is read; they share the work evenly.
        programs: Maximum number of Triton programs; None for the whole device.
    """
    if device.type == "cuda":
        from hybridrl.kernels.rectangles import RectangleCopies  # torch's CUDA builds bring triton

        return RectangleCopies(pairs, device, lanes, programs)
    return reference.RectangleCopies(pairs, device, lanes, programs)


def block_maxima(tiles: Sequence[Tiles], device: torch.device, block: int = BLOCK) -> Copies:
    """Prepares the search for the largest magnitude of each block; see `reference.BlockMaxima`."""
    return _quantizing(device).BlockMaxima(tiles, device, block)


def _quantizing(device: torch.device) -> Any:
    if device.type == "cuda":
        from hybridrl.kernels import quantize

        return quantize
    return reference


def quantized_copies(
    pairs: Sequence[tuple[Tiles, torch.Tensor]],
    device: torch.device,
    programs: int | None = None,
    block: int = BLOCK,
) -> Copies:
    """Prepares copies that quantize weights to float8_e4m3fn and can be run repeatedly.

    Args:
        pairs: Rectangles of weights with the scales of their blocks, and destinations of equal
            shapes for the bits, uint8. Last dims are contiguous; destinations do not overlap.
        programs: Maximum number of Triton programs; None for the whole device.
        block: Rows and columns of a block.
    """
    return _quantizing(device).QuantizedCopies(pairs, device, programs, block)


def fp8_product_fits(num_tokens: int, weight_NK: torch.Tensor) -> bool:
    """Whether `fp8_product`, made for few tokens, was measured for these sizes."""
    if weight_NK.is_cuda:
        from hybridrl.kernels import fp8_linear

        return fp8_linear.is_measured(num_tokens, *weight_NK.shape)
    return True


def prepare_fp8_products(device: torch.device) -> None:
    """Allocates the memory that `fp8_product` shares, before CUDA graphs with it are captured."""
    if device.type == "cuda":
        from hybridrl.kernels import fp8_linear

        fp8_linear.workspace(device)


def fp8_product(x_MK: torch.Tensor, weight_NK: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiplies unrounded tokens by FP8 weights; see `reference.fp8_product`."""
    if x_MK.is_cuda:
        from hybridrl.kernels import fp8_linear

        return fp8_linear.product(x_MK, weight_NK, scales)
    return reference.fp8_product(x_MK, weight_NK, scales)


def has_copy_engine(device: torch.device) -> bool:
    """Whether `block_copies` works on this device."""
    return device.type != "cuda" or copy_engine.has_copy_engine()


def block_copies(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> Blocks:
    """Prepares copies between (source, destination) views, made by the GPU's copy engines.

    Views are contiguous and of equal sizes and types; destinations do not overlap.
    """
    if device.type != "cuda":
        return reference.BlockCopies(pairs)
    if (compiled := compiled_operations()) is not None:
        return copy_engine.CompiledBlockCopies(pairs, compiled.queue_blocks)
    return copy_engine.BlockCopies(pairs)


def storage_placer(device: torch.device) -> Callable[[torch.Tensor, int, int], object] | None:
    """Returns the operation `place(tensor, address, num_mapped_bytes)`, which moves a tensor's
    storage to an address; with 0 and 0 it removes the storage. None on CPU and without compiled
    operations.
    """
    compiled = compiled_operations() if device.type == "cuda" else None
    return None if compiled is None else compiled.place_storage


COMPILED = "queue_blocks", "place_storage", "engine_pieces", "set_engine_piece"  # in csrc/


@cache
def compiled_operations() -> Any | None:
    """Returns the operations in csrc/; None if they were not compiled during installation."""
    try:
        import hybridrl._C  # noqa: F401  # registers them
    except ModuleNotFoundError:
        return None
    except ImportError as error:  # compiled for another version of torch
        _warn_of_compiled(f"cannot be loaded ({error})")
        return None
    missing = [name for name in COMPILED if not hasattr(torch.ops.hybridrl, name)]
    if missing:  # compiled from an older version of csrc/
        _warn_of_compiled(f"lack {missing[0]}")
        return None
    return torch.ops.hybridrl


def _warn_of_compiled(what: str) -> None:
    warnings.warn(
        f"hybridrl's compiled operations {what}; slower operations are used instead. "
        "Reinstall hybridrl to compile them for this version of torch.",
        stacklevel=3,
    )


def compiled_library() -> str:
    """Returns the path of csrc/'s library, which has the allocator for torch's memory pools."""
    return str(importlib.import_module("hybridrl._C").__file__)
