"""Normalisation as a ModuleSpec piece for hosts without transformer-engine.

Megatron's own torch wrapper refuses sequence parallel; this one marks its weights so that Megatron
sums their gradients over the tensor-parallel ranks, which is all that sequence parallel needs of a
norm.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class TorchNorm:
    """Builds `torch.nn.RMSNorm` or `LayerNorm` from a TransformerConfig, as `ModuleSpec` pieces are
    built.

    Args:
        config: names the normalisation and says whether sequence parallel is on.
        hidden_size: size of the normalised last dimension.
        eps: added to the variance.
    """

    def __new__(  # type: ignore[misc]  # a ModuleSpec names a class; what it builds is the torch module
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> torch.nn.Module:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(
            hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
