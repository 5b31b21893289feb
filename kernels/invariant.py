"""Products, norms and attention whose result for a row has the same bits in every batch.

Plain PyTorch for CPUs. A library's product may sum in another order when the number of rows or
columns changes. The products here have one size: ROWS rows by COLUMNS columns, whatever the batch;
missing rows and columns are zeros. Keys of attention are summed in blocks of COLUMNS positions, one
after another; masked blocks add exact zeros. Two libraries of layers that call these functions
therefore compute the same bits for the same tokens.

Shape suffixes: M rows, K contracted, N columns; B batch, Q queries, S keys, H heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROWS, COLUMNS = 32, 64


def product(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """Returns x @ weight.T, (M, N), in the type of the inputs."""
    num_rows, num_columns = x_MK.size(0), weight_NK.size(0)
    if not num_rows:
        return x_MK.new_zeros(0, num_columns)
    blocks_K = _padded(weight_NK, COLUMNS).view(-1, COLUMNS, weight_NK.size(1)).transpose(1, 2)
    parts = []
    for rows_K in _padded(x_MK, ROWS).split(ROWS):
        found = torch.bmm(rows_K.expand(len(blocks_K), *rows_K.shape), blocks_K)
        parts.append(found.transpose(0, 1).reshape(ROWS, -1))
    return torch.cat(parts)[:num_rows, :num_columns].contiguous()


def rms_norm(
    x: torch.Tensor, weight_D: torch.Tensor, eps: float, is_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the normalized input in the input's type, and the inverse of the root mean square,
    (..., 1) fp32.

    As in transformers, the quotient is rounded to the input's type before it is multiplied by the
    weight; with `is_centered`, it is multiplied by 1 + weight in fp32, and rounded once.
    """
    wide = x.float().contiguous()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if is_centered:
        return (wide * inverse * (1.0 + weight_D.float())).to(x.dtype), inverse
    return weight_D * (wide * inverse).to(x.dtype), inverse


def attention(
    query_BHQD: torch.Tensor,
    key_BHSD: torch.Tensor,
    value_BHSD: torch.Tensor,
    is_seen_BQS: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Returns softmax(scale * query @ key.T) @ value, (B, H, Q, D), in the type of the query.

    Args:
        key_BHSD, value_BHSD: May have fewer heads than the query, which groups of heads share. A
            key's index must be its position in the sequence; keys after the last one that a query
            sees do not change the result.
        is_seen_BQS: Which keys each query attends to, at least one; the batch size may be 1.
    """
    groups = query_BHQD.size(1) // key_BHSD.size(1)
    num_queries = query_BHQD.size(2)
    query, key, value = (
        _padded(x.float(), block, dim=2)
        for x, block in ((query_BHQD, ROWS), (key_BHSD, COLUMNS), (value_BHSD, COLUMNS))
    )
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    seen = F.pad(is_seen_BQS, (0, key.size(2) - is_seen_BQS.size(2)))[:, None]
    parts = [
        _attend(rows, key, value, seen[:, :, start : start + ROWS], scale)
        for start, rows in zip(range(0, num_queries, ROWS), query.split(ROWS, dim=2), strict=True)
    ]
    return torch.cat(parts, 2)[:, :, :num_queries].to(query_BHQD.dtype)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attends with ROWS queries, of which the mask may lack some that are padding."""
    batch, heads, _, size = query.shape
    rows = query.flatten(0, 1)
    keys, values = (x.flatten(0, 1).split(COLUMNS, dim=1) for x in (key, value))
    scores = torch.stack([torch.bmm(rows, block.transpose(1, 2)) for block in keys], 2) * scale
    missing = ROWS - seen.size(2)
    mask = F.pad(seen, (0, 0, 0, missing)).expand(batch, heads, -1, -1).flatten(0, 1)
    mask = mask.view(len(mask), ROWS, len(keys), COLUMNS)
    scores = scores.masked_fill(~mask, -torch.inf)
    largest = scores.amax((2, 3), keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weights = (scores - largest).exp()
    total = weights.new_zeros(len(rows), ROWS, 1)
    result = weights.new_zeros(len(rows), ROWS, size)
    for number, block in enumerate(values):
        part = weights[:, :, number].contiguous()
        total = total + part.sum(-1, keepdim=True)
        result = result + torch.bmm(part, block)
    return (result / total).view(batch, heads, ROWS, size)


def _padded(x: torch.Tensor, block: int, dim: int = 0) -> torch.Tensor:
    """Returns x with zeros added at the end of a dim until its size is a multiple of `block`."""
    missing = -x.size(dim) % block
    if not missing:
        return x.contiguous()
    return torch.cat((x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])), dim)
