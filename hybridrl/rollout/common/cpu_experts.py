"""Computes mixtures of experts on CPUs, for engines whose own CPU code is wrong or missing
(vllm/experts.py, sglang/start.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrl.models.families.gpt_oss import ALPHA, LIMIT

Activation = Callable[[Tensor], Tensor]


def swiglu(widened: Tensor) -> Tensor:
    """Returns silu(gate) * up; the gate is the first half of the last dim."""
    gate, up = widened.chunk(2, dim=-1)
    return F.silu(gate) * up


def clamped_swiglu(widened: Tensor) -> Tensor:
    """Returns GPT-OSS's activation, in which gate and up alternate (clamped_experts.py)."""
    gate, up = widened[..., ::2].clamp(max=LIMIT), widened[..., 1::2].clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def experts_forward(
    hidden_TD: Tensor,
    gate_up_EID: Tensor,
    down_EDI: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    local_of_expert: Tensor | None = None,
    activation: Activation = swiglu,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Returns for each token the weighted sum of the outputs of its experts on this rank, (T, D).

    Args:
        hidden_TD: Hidden states of T tokens.
        gate_up_EID: Gate and up projections, (local experts, 2 * width, D), with rows in the order
            that `activation` expects.
        down_EDI: Down projections, (local experts, D, width).
        weights_TK, experts_TK: Weights and global indices of each token's K experts.
        local_of_expert: Local index of each expert; -1 for an expert on another rank. None if all
            experts are local.
        activation: Function from gate and up, (T, 2 * width), to the input of the down projection.
        biases: Biases of the two projections, (local experts, 2 * width) and (local experts, D);
            None if there are none.
    """
    if local_of_expert is not None:
        experts_TK = local_of_expert[experts_TK.long()]
    out_TD = torch.zeros_like(hidden_TD)
    for expert in torch.unique(experts_TK).tolist():
        if expert < 0:
            continue
        tokens, places = torch.nonzero(experts_TK == expert, as_tuple=True)
        first, second = (None, None) if biases is None else (one[expert] for one in biases)
        widened = F.linear(hidden_TD[tokens], gate_up_EID[expert], first)
        found = F.linear(activation(widened), down_EDI[expert], second)
        out_TD.index_add_(0, tokens, found * weights_TK[tokens, places, None].to(found.dtype))
    return out_TD
