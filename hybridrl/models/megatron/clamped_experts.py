"""Experts with GPT-OSS's clamped activation, whose gate and up alternate.

Rows 0, 2, ... of the first projection and of its bias are the gate, rows 1, 3, ... are up, as on
disk and in engines. Megatron's experts expect the gate's rows first, and would need a copy in
another order for every transfer of weights.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Returns x * sigmoid(1.702 x), an approximation of GELU (Hendrycks, Gimpel 2016, "Gaussian
    Error Linear Units", section 2). Megatron's own function would be compiled.
    """
    return x * torch.sigmoid(1.702 * x)


def clamped_swiglu(widened: torch.Tensor, config: Any) -> torch.Tensor:
    """Returns activation(min(gate, c)) * (clamp(up, -c, c) + offset), (..., width).

    Agarwal et al. 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.2.

    Args:
        widened: Gate and up in turn, (..., 2 * width).
    """
    limit = config.activation_func_clamp_value
    gate, up = widened[..., ::2].clamp(max=limit), widened[..., 1::2].clamp(-limit, limit)
    activated: torch.Tensor = config.activation_func(gate) * (up + config.glu_linear_offset)
    return activated


class ClampedExpert(MLP):
    """One expert; with `recomputes`, the backward pass computes the activation again."""

    recomputes = False

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """Returns the output, (T, D), which contains the bias, and no separate bias.

        Args:
            per_token_scale: Weight of the expert for each token, (T,), which also weights the bias.
        """
        widened, bias = self.linear_fc1(hidden_states)
        if not self.recomputes:
            output, output_bias = self.linear_fc2(self._activated(widened, bias, per_token_scale))
        else:
            kept = CheckpointWithoutOutput(fp8=self.config.fp8)  # type: ignore[arg-type]
            activated = kept.checkpoint(self._activated, widened, bias, per_token_scale)
            output, output_bias = self.linear_fc2(activated)
            kept.discard_output_and_register_recompute(output)
        return output + (output_bias * per_token_scale[:, None]).to(output.dtype), None

    def _activated(
        self, widened: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        activated = clamped_swiglu(widened + bias, self.config)
        return (activated * scale[:, None]).to(activated.dtype)


class ClampedExperts(SequentialMLP):
    """A rank's experts, computed one by one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for expert in self.local_experts:  # SequentialMLP ignores its spec and builds MLPs
            expert.__class__ = ClampedExpert


class LeanClampedExperts(ClampedExperts):
    """Experts that compute their activations again in the backward pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for expert in self.local_experts:
            expert.recomputes = True  # type: ignore[assignment]  # a plain attribute
