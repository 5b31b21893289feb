"""The one place where kernels are bound.

Each operation is taken from CUDA, Triton or the reference, by the device that it runs on. The
reference is plain PyTorch, the same on CPU and GPU.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch

from hybridrl.kernels import copy_engine, reference
from hybridrl.kernels.copy_engine import Stream, Waits
from hybridrl.kernels.reference import (
    VocabStats,
    invert_rows,
    row_uniforms,
    vocab_chosen,
    vocab_chosen_backward,
    vocab_top,
)

__all__ = [
    "Blocks",
    "Copies",
    "VocabStats",
    "Waits",
    "block_copies",
    "compiled_operations",
    "draw_rows",
    "has_copy_engine",
    "invert_rows",
    "rectangle_copies",
    "row_uniforms",
    "storage_placer",
    "vocab_backward",
    "vocab_chosen",
    "vocab_chosen_backward",
    "vocab_stats",
    "vocab_top",
]


def vocab_stats(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_T: torch.Tensor,
    temperature: float,
    cap: float = 0.0,
) -> VocabStats:
    """Computes the softmax statistics of one vocabulary shard without keeping its logits.

    Args: as of `reference.vocab_stats`.
    """
    if hidden_TD.is_cuda:
        from hybridrl.kernels import token_logprobs  # torch's CUDA builds bring triton

        return token_logprobs.vocab_stats(hidden_TD, weight_VD, target_T, temperature, cap)
    return reference.vocab_stats(hidden_TD, weight_VD, target_T, temperature, cap)


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
    """Computes this shard's part of the gradients of log-probability and entropy.

    Args and returns: as of `reference.vocab_backward`.
    """
    stats, grads = (max_T, log_sum_T, entropy_T), (grad_logp_T, grad_entropy_T, grad_weight_VD)
    arguments = hidden_TD, weight_VD, target_T, temperature, *stats, *grads, cap, is_trained
    if hidden_TD.is_cuda:
        from hybridrl.kernels import token_logprobs

        return token_logprobs.vocab_backward(*arguments)
    return reference.vocab_backward(*arguments)


def draw_rows(
    logits_BV: torch.Tensor,
    temperature_B: torch.Tensor,
    is_greedy_B: torch.Tensor,
    seed_B: torch.Tensor,
    count_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a token of each row from the softmax of its logits.

    Args and returns: as of `reference.draw_rows`.
    """
    arguments = logits_BV, temperature_B, is_greedy_B, seed_B, count_B
    if logits_BV.is_cuda:
        from hybridrl.kernels import draws

        if draws.fits(logits_BV.size(1)):
            return draws.draw_rows(*arguments)
    return reference.draw_rows(*arguments)


class Copies(Protocol):
    """A fixed list of copies; tensors keep their addresses for as long as it is used."""

    @property
    def num_launches(self) -> int:
        """Kernels that a run starts."""
        ...

    @property
    def table_bytes(self) -> int:
        """Device memory of its tables."""
        ...

    def run(self) -> None:
        """Copies everything, on the device's current stream."""
        ...


class Blocks(Protocol):
    """A fixed list of copies of contiguous blocks."""

    @property
    def num_launches(self) -> int:
        """Batches that a run starts: one, or none if the list is empty."""
        ...

    def run(self, stream: Stream, first: Waits = (), then: Waits = ()) -> None:
        """Queues all on a stream that is not the default one; None on CPU.

        Args:
            stream: of the device that is current.
            first, then: pairs (waiting, awaited) of streams, before the copies and after them: what
                is queued on the first from there on waits for what the second has.
        """
        ...


def rectangle_copies(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
    lanes: Sequence[int] | None = None,
    programs: int | None = None,
) -> Copies:
    """Returns the copies of (source, destination) views, ready to be run again and again.

    Args:
        pairs: of equal shapes, whose last dim is contiguous; destinations do not overlap.
        device: where destinations lie.
        lanes: of each pair, through what its source is read; lanes are kept busy evenly.
        programs: how much of the device the copies may take at once, so that something else runs
            beside them; None: all of it.
    """
    copies: Copies
    if device.type == "cuda":
        from hybridrl.kernels.rectangles import RectangleCopies  # torch's CUDA builds bring triton

        copies = RectangleCopies(pairs, device, lanes, programs)
    else:
        copies = reference.RectangleCopies(pairs, device, lanes, programs)
    return copies


def has_copy_engine(device: torch.device) -> bool:
    """Whether `block_copies` works here."""
    return device.type != "cuda" or copy_engine.has_copy_engine()


def block_copies(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> Blocks:
    """Returns copies of contiguous (source, destination) views by the GPU's copy engines.

    Args:
        pairs: of equal sizes and types, contiguous; destinations do not overlap.
        device: where destinations lie.
    """
    if device.type != "cuda":
        return reference.BlockCopies(pairs)
    compiled = compiled_operations()
    if compiled is not None:
        return copy_engine.CompiledBlockCopies(pairs, compiled.queue_blocks)
    return copy_engine.BlockCopies(pairs)


def storage_placer(device: torch.device) -> Callable[[torch.Tensor, int, int], object] | None:
    """Returns what lets a tensor's storage lie at an address, of which so many bytes stay mapped
    while it is used; address and bytes 0: nowhere. None where nothing was compiled, and on CPU.
    """
    compiled = compiled_operations() if device.type == "cuda" else None
    return None if compiled is None else compiled.place_storage


COMPILED = "queue_blocks", "place_storage", "engine_pieces", "set_engine_piece"  # in csrc/


@cache
def compiled_operations() -> Any | None:
    """Returns the operations of csrc/; None where the installation compiled none."""
    try:
        import hybridrl._C  # noqa: F401  # registers them
    except ModuleNotFoundError:
        return None
    except ImportError as error:  # compiled for another torch
        _warn_of_compiled(f"do not load ({error})")
        return None
    missing = [name for name in COMPILED if not hasattr(torch.ops.hybridrl, name)]
    if missing:  # compiled from an older state of csrc/
        _warn_of_compiled(f"lack {missing[0]}")
        return None
    return torch.ops.hybridrl


def _warn_of_compiled(what: str) -> None:
    warnings.warn(
        f"hybridrl's compiled operations {what}; others take their place. "
        "Install hybridrl again to compile them for this torch.",
        stacklevel=3,
    )


def compiled_library() -> str:
    """Returns the file of csrc/'s library, in which torch's pools find their allocator; only where
    `compiled_operations` has some.
    """
    return str(importlib.import_module("hybridrl._C").__file__)
