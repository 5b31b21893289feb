"""Norms as ModuleSpecs, for hosts without transformer-engine.

Megatron's own wrapper of torch's norms does not support sequence parallelism. The norms here mark
their weights, so that Megatron sums their gradients over the tensor-parallel ranks; sequence
parallelism needs nothing else from a norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridrl.errors import ModelError


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float | None, is_centered: bool = False
) -> torch.Tensor:
    """Divides x, (..., width), by its root mean square, and multiplies by the weight, (width,).

    Args:
        x: Input, in the weight's data type or a wider type.
        is_centered: Whether to multiply by 1 + weight in float32, as in Gemma; with 16 bits, the
            sum would lose small weights.
    """
    if not is_centered:
        return torch.nn.functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    whole = 1.0 + weight.float()
    return torch.nn.functional.rms_norm(x.float(), weight.shape, whole, eps).to(x.dtype)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, extended to inputs with a wider data type than the weight."""

    is_centered = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, self.is_centered)


class CenteredNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight (Gemma)."""

    is_centered = True


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm, extended to inputs with a wider data type than the weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(
            x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps
        )


class TorchNorm:
    """Builds the `RMSNorm`, `CenteredNorm` or `LayerNorm` that a TransformerConfig names."""

    def __new__(  # type: ignore[misc]  # a ModuleSpec names a class; what it builds is the torch module
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> torch.nn.Module:
        is_centered = config.layernorm_zero_centered_gamma
        if is_centered and config.normalization != "RMSNorm":
            raise ModelError(
                "layernorm_zero_centered_gamma of the family's transformer_config",
                "true",
                "false with normalization=LayerNorm and torch's layers",
                "Give the family a layer_spec whose norms support it.",
            )
        kind: type[torch.nn.RMSNorm | torch.nn.LayerNorm] = LayerNorm
        if config.normalization == "RMSNorm":
            kind = CenteredNorm if is_centered else RMSNorm
        norm: torch.nn.Module = kind(
            hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def narrowing(norm: Callable[..., torch.nn.Module]) -> type:
    """Returns a class that builds `norm` with outputs in the data type of its parameters.

    Layers then compute in that type even if the residual stream is wider.
    """

    class Narrowing:
        def __new__(  # type: ignore[misc]  # as TorchNorm
            cls, config: TransformerConfig, *args: Any, **keywords: Any
        ) -> torch.nn.Module:
            built = norm(config=config, *args, **keywords)  # noqa: B026
            built.register_forward_hook(lambda module, args, out: out.to(config.params_dtype))
            return built

    return Narrowing


def wide_residual_add(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
    """Returns a bias-dropout-add without dropout for an fp32 residual stream.

    Megatron's own function would cast the residual to the data type of the other addend.
    """

    def add(
        output_with_bias: tuple[torch.Tensor, torch.Tensor | None],
        residual: torch.Tensor,
        dropout: float,
    ) -> torch.Tensor:
        output, bias = output_with_bias
        return residual.float() + (output if bias is None else output + bias)

    return add


def scaled_add(scale: float, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a bias-dropout-add like `plain` that scales the layer's output by `scale`."""

    def made(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        add_plain = plain(training, fused)

        def add(
            output_with_bias: tuple[torch.Tensor, torch.Tensor | None],
            residual: torch.Tensor,
            dropout: float,
        ) -> torch.Tensor:
            output, bias = output_with_bias
            whole = output if bias is None else output + bias
            scaled: torch.Tensor = add_plain((whole * scale, None), residual, dropout)
            return scaled

        return add

    return made
