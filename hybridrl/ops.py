"""The one place where kernels are bound.

Each operation is taken from CUDA, Triton or the reference, chosen once at import by what the host
has. So far every
operation is the reference: plain PyTorch, the same on CPU and GPU.
"""

from __future__ import annotations

from hybridrl.kernels.reference import VocabStats, vocab_backward, vocab_stats

__all__ = ["VocabStats", "vocab_backward", "vocab_stats"]
