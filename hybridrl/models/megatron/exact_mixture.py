"""Makes Megatron's mixtures of experts compute the same bits as the hf engine, whatever the batch.

Experts run one after another, in the order of their indices, on the tokens that chose them; each
adds its weighted output to the result. The engine does the same (rollout/hf/exact.py). Megatron's
own dispatcher would sort tokens by expert and add up in another order. Routers compute in float32
on both sides.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer

from hybridrl.errors import ModelError
from hybridrl.models.megatron.exact_linear import multiply
from hybridrl.models.megatron.router import Router


def mix_exactly(layer: MoELayer) -> None:
    """Replaces the forward passes of a layer and its router; ModelError for unsupported experts."""
    experts: Any = layer.experts
    if not isinstance(experts, SequentialMLP) or layer.use_shared_expert:
        raise ModelError(
            "numerics.match",
            "exact",
            f"close with {type(experts).__name__}"
            + (" and shared experts" if layer.use_shared_expert else ""),
            "Set numerics.match=close.",
        )
    router: Any = layer.router
    router.gating = partial(_gating, router)
    layer.forward = partial(_mixture, layer)  # type: ignore[method-assign]


def _gating(router: Router, input: torch.Tensor) -> torch.Tensor:
    return multiply(input.float(), router.weight.float(), None)


def _mixture(
    layer: MoELayer,
    hidden_states: torch.Tensor,
    intermediate_tensors: None = None,
    padding_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Takes the place of `MoELayer.forward` on one rank.

    Args:
        padding_mask: (1, S) bool, true at padding; None if there is no padding.
    """
    mask = None if padding_mask is None else padding_mask.transpose(0, 1).bool()
    probs_TE, chosen_TE = layer.route(hidden_states, mask)
    rows_TD = hidden_states.reshape(-1, hidden_states.size(-1))
    result_TD = torch.zeros_like(rows_TD)
    experts: Any = layer.experts
    for number, expert in enumerate(experts.local_experts):
        token_R = chosen_TE[:, number].nonzero()[:, 0]
        # An expert without tokens also runs, because the optimizer expects its gradient.
        output_RD, _ = expert(rows_TD[token_R])
        weight_R1 = probs_TE[token_R, number, None].to(output_RD.dtype)
        result_TD = result_TD.index_add(0, token_R, output_RD * weight_R1)
    return result_TD.view(hidden_states.shape), None
