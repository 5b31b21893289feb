"""Computes mixtures of experts on CPUs, for engines whose own CPU code is wrong or missing.

vllm/experts.py and sglang/start.py explain why each engine needs this module.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def experts_forward(
    hidden_TD: Tensor,
    gate_up_EID: Tensor,
    down_EDI: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    local_of_expert: Tensor | None = None,
) -> Tensor:
    """Returns for each token the weighted sum of the outputs of its experts on this rank, (T, D).

    Args:
        hidden_TD: Hidden states of T tokens.
        gate_up_EID: Gate and up projections, (local experts, 2 * width, D), with the gate's rows
            first.
        down_EDI: Down projections, (local experts, D, width).
        weights_TK, experts_TK: Weights and global indices of each token's K experts.
        local_of_expert: Local index of each expert; -1 for an expert on another rank. None if all
            experts are local.
    """
    if local_of_expert is not None:
        experts_TK = local_of_expert[experts_TK.long()]
    out_TD = torch.zeros_like(hidden_TD)
    for expert in torch.unique(experts_TK).tolist():
        if expert < 0:
            continue
        tokens, places = torch.nonzero(experts_TK == expert, as_tuple=True)
        gate, up = F.linear(hidden_TD[tokens], gate_up_EID[expert]).chunk(2, dim=-1)
        found = F.linear(F.silu(gate) * up, down_EDI[expert])
        out_TD.index_add_(0, tokens, found * weights_TK[tokens, places, None].to(found.dtype))
    return out_TD
