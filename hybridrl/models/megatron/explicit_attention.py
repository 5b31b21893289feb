"""Attention from explicit products of queries and keys, for soft caps and sinks.

torch's scaled_dot_product_attention has neither. Products are computed for some queries at a time,
in fp32, and again in the backward pass, so that a long sequence's products are never all in memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

# Maximum number of fp32 products that are in memory at a time: 0.5 GB.
MAX_PRODUCTS = 1 << 27


def explicit_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    *,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attends with products p that become cap * tanh(p / cap), or with sinks.

    Args:
        query: [n, heads, q, d].
        key, value: [n, KV heads, k, d].
        mask: Whether a query attends to a key; bool, broadcastable to [n, 1, q, k]. Every query
            attends to at least one key.
        cap: Soft cap of the scaled products; 0 for none.
        sinks: Logit of each head that takes part in the softmax but has no value, [heads]; None for
            none.

    Returns:
        [n, heads, q, d]; d is the head size of the values.
    """
    num_kv, num_queries = key.size(1), query.size(2)
    grouped = query.unflatten(1, (num_kv, -1))
    mask = mask[:, :, None].expand(-1, -1, -1, num_queries, -1)
    sinks_NG11 = None if sinks is None else sinks.float().view(num_kv, -1, 1, 1)

    def attend(some: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        products = (some @ key[:, :, None].transpose(-1, -2)).float() * scale
        if cap:
            products = cap * torch.tanh(products / cap)
        products = products.masked_fill(~mask, float("-inf"))
        if sinks_NG11 is None:
            weights = products.softmax(-1)
        else:
            total = torch.logaddexp(products.logsumexp(-1, keepdim=True), sinks_NG11)
            weights = (products - total).exp()
        weights = F.dropout(weights, dropout) if dropout else weights
        return weights.to(value.dtype) @ value[:, :, None]

    rows = query.size(0) * query.size(1) * key.size(2)
    step = max(MAX_PRODUCTS // max(rows, 1), 1)
    if step >= num_queries:
        return attend(grouped, mask).flatten(1, 2)
    parts = [
        checkpoint(
            attend,
            grouped[..., at : at + step, :],
            mask[..., at : at + step, :],
            use_reentrant=False,
        )
        for at in range(0, num_queries, step)
    ]
    return torch.cat(parts, -2).flatten(1, 2)
