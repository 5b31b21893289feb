"""The one place where kernels are bound.

Each operation is taken from CUDA, Triton or the reference, by the device that it runs on. The
reference is plain PyTorch, the same on CPU and GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hybridrl.kernels import reference
from hybridrl.kernels.reference import VocabStats, vocab_backward, vocab_stats

__all__ = ["Copies", "VocabStats", "rectangle_copies", "vocab_backward", "vocab_stats"]


class Copies(Protocol):
    """A fixed list of copies; tensors keep their addresses for as long as it is used."""

    def run(self) -> None:
        """Copies everything, on the device's current stream."""
        ...


def rectangle_copies(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> Copies:
    """Returns the copies of (source, destination) views, ready to be run again and again.

    Args:
        pairs: of equal shapes, of one or two dims whose last is contiguous; destinations do not
            overlap.
        device: where destinations lie.
    """
    copies: Copies
    if device.type == "cuda":
        from hybridrl.kernels.rectangles import RectangleCopies  # torch's CUDA builds bring triton

        copies = RectangleCopies(pairs, device)
    else:
        copies = reference.RectangleCopies(pairs, device)
    return copies
