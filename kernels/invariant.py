"""Operations whose result for a row has the same bits in every batch.

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
LOGIT_COLUMNS = 16 * COLUMNS  # converted together; 8 MiB with 2,048 hidden dims in float32


def logits(hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Returns hidden @ weight.T, (N, V) fp32. Converts the weight in chunks, for the caches."""
    wide = hidden_ND.float()
    if weight_VD.dtype == torch.float32:
        return product(wide, weight_VD)
    return torch.cat([product(wide, part.float()) for part in weight_VD.split(LOGIT_COLUMNS)], 1)


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


def rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight_D: torch.Tensor,
    inverse: torch.Tensor,
    is_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of the rows and of the weight, in their types.

    Args:
        inverse: Second result of `rms_norm`.
    """
    unit, wide = x.float() * inverse, grad.float()
    scaled = wide * (weight_D.float() + 1.0 if is_centered else weight_D.float())
    grad_x = inverse * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    grad_weight = (wide * unit).reshape(-1, x.size(-1)).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight_D.dtype)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up, (..., F), of rows that contain the gate and then the up, (..., 2 F);
    silu is rounded to their type.
    """
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of the input of `swiglu`."""
    gate, up = (part.float() for part in x.chunk(2, dim=-1))
    sigmoid, wide = gate.sigmoid(), grad.float()
    silu = gate * sigmoid
    grad_gate = wide * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat((grad_gate, wide * silu), -1).to(x.dtype)


def rotate(
    x_THD: torch.Tensor, table_LD: torch.Tensor, row_T: torch.Tensor, is_inverse: bool = False
) -> torch.Tensor:
    """Returns heads whose first dims are rotated by the angles of a token's position; each product
    is rounded to their type, as in Megatron and transformers.

    Args:
        table_LD: For each position, the cosines of half the rotated dims, then their sines, in the
            type of x.
        row_T: Row of the table for each token.
        is_inverse: Whether to rotate backwards.
    """
    size = table_LD.size(1)
    cos, sin = (torch.cat((half, half), -1) for half in table_LD[row_T][:, None].chunk(2, dim=-1))
    part, rest = x_THD[..., :size], x_THD[..., size:]
    first, second = part.chunk(2, dim=-1)
    turned = torch.cat((-second, first), -1) * (-sin if is_inverse else sin)
    return torch.cat((part * cos + turned, rest), -1)


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
