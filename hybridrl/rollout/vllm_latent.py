"""vLLM's latent attention: the copies of the projection up that decoding reads.

For decoding vLLM multiplies queries and outputs with the projection up of keys and values, cut and
turned into `W_UK_T` and `W_UV`, which it makes once after loading. After every write of
`kv_b_proj` they are made again here, in place, since CUDA graphs keep their addresses.
"""

from __future__ import annotations

from typing import Any

import torch

ABSORBED = ("W_UK_T", "W_UV")  # since 0.32 parameters, before plain attributes


@torch.no_grad()
def absorb(model: torch.nn.Module) -> None:
    """Makes every layer's copies of its projection up again; nothing where there are none.

    Args:
        model: vLLM's. Of a layer `kv_b_proj.weight` is (N * (P + V), L): of each of N heads the P
            rows of its key, then the V rows of its value; `W_UK_T` is (N, P, L), `W_UV` (N, L, V).
    """
    for layer in model.modules():
        if not all(hasattr(layer, name) for name in ABSORBED):
            continue
        attention: Any = layer
        weight = attention.kv_b_proj.weight
        heads = weight.view(attention.num_heads, -1, weight.size(-1))
        size = attention.qk_nope_head_dim
        attention.W_UK_T.copy_(heads[:, :size])
        attention.W_UV.copy_(heads[:, size:].transpose(1, 2))
