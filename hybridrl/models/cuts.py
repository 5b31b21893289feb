"""Computes the slices of a weight row's HF tensors that a tensor-parallel rank holds. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hybridrl.errors import ModelError
from hybridrl.models.family import ModelShape, Row

ENGINE_VOCAB_MULTIPLE = 64


class Run(NamedTuple):
    """Slices `start` to `stop` of one HF tensor of a table row."""

    part: int
    start: int
    stop: int


class Cut(NamedTuple):
    """One rank's shard of a row: runs stacked along `dim`, then `num_padding` padding slices."""

    dim: int
    runs: Sequence[Run]
    num_padding: int = 0


def megatron_cut(row: Row, shape: ModelShape, tp: int, tp_rank: int) -> Cut:
    """Returns a Megatron rank's shard of a row that does not belong to experts."""
    cut = _whole_cut(row, shape, tp, tp_rank)
    if row.stored is None:
        return cut
    return cut._replace(runs=[run for run in cut.runs if run.part in row.stored])


def _whole_cut(row: Row, shape: ModelShape, tp: int, tp_rank: int) -> Cut:
    if row.kind == "vocab":
        return _vocab_cut(row, shape.padded_vocab(tp), tp, tp_rank)
    if row.kind in ("heads", "kv_heads"):
        heads = shape.num_heads if row.kind == "heads" else shape.num_kv_heads
        _even(row, heads, tp, tp_rank)
    if row.kind == "grouped":
        return _grouped_cut(row, tp, tp_rank)
    if row.kind != "qkv":
        return plain_cut(row, tp, tp_rank)
    _heads(row, shape, tp, tp_rank)
    interleaved = _interleaved(row, shape)
    start, stop = _even(row, sum(b - a for _, a, b in interleaved), tp, tp_rank)
    return Cut(0, _clip(interleaved, start, stop))


def fused_cut(row: Row, shape: ModelShape, tp: int, tp_rank: int) -> Cut:
    if row.kind == "vocab":
        padded = -(-shape.vocab_size // ENGINE_VOCAB_MULTIPLE) * ENGINE_VOCAB_MULTIPLE
        return _vocab_cut(row, padded, tp, tp_rank)
    if row.kind in ("heads", "kv_heads") and "norm" in row.megatron:
        # A norm over all heads, which every rank holds and applies to the gathered heads.
        return Cut(0, [Run(0, 0, row.shapes[0][0])])
    if row.kind == "heads":
        _even(row, shape.num_heads, tp, tp_rank)
    if row.kind == "grouped":  # engines keep the order of the HF tensor
        _groups(row, tp, tp_rank)
    if row.kind != "qkv":
        return plain_cut(row, tp, tp_rank)
    (q0, q1), (kv0, kv1) = _heads(row, shape, tp, tp_rank)
    head, query = shape.head_dim, shape.query_size // shape.num_heads
    heads = ((0, q0 * query, q1 * query), (1, kv0 * head, kv1 * head), (2, kv0 * head, kv1 * head))
    return Cut(0, [Run(*one) for one in heads])


def plain_cut(row: Row, tp: int, tp_rank: int, key: str = "train.tp or rollout.tp") -> Cut:
    """Returns the shard of a row whose HF tensors are sharded separately."""
    if row.kind == "replicated":
        return Cut(0, [Run(part, 0, shape[0]) for part, shape in enumerate(row.shapes)])
    dim = 1 if row.kind == "row" else 0
    ends = [_even(row, shape[dim], tp, tp_rank, key) for shape in row.shapes]
    return Cut(dim, [Run(part, start, stop) for part, (start, stop) in enumerate(ends)])


def _vocab_cut(row: Row, padded: int, tp: int, tp_rank: int) -> Cut:
    start, stop = _even(row, padded, tp, tp_rank)
    first, last = (min(edge, row.shapes[0][0]) for edge in (start, stop))
    runs = [Run(0, first, last)] if first < last else []
    return Cut(0, runs, stop - start - (last - first))


def _groups(row: Row, tp: int, tp_rank: int) -> range:
    num_groups, rest = divmod(row.shapes[0][0], sum(row.group))
    if rest:
        raise table_error(row.megatron, f"{row.shapes[0][0]} rows in groups of {row.group}")
    return range(*_even(row, num_groups, tp, tp_rank))


def _grouped_cut(row: Row, tp: int, tp_rank: int) -> Cut:
    runs, size = [], sum(row.group)
    for section, num_rows in enumerate(row.group):
        offset = sum(row.group[:section])
        for group in _groups(row, tp, tp_rank):
            start = group * size + offset
            runs.append(Run(0, start, start + num_rows))
    return Cut(0, runs)


def _heads(
    row: Row, shape: ModelShape, tp: int, tp_rank: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    queries = _even(row, shape.num_heads, tp, tp_rank)
    if tp <= shape.num_kv_heads:
        return queries, _even(row, shape.num_kv_heads, tp, tp_rank)
    copies, rest = divmod(tp, shape.num_kv_heads)
    if rest:
        raise _cut_error(row, shape.num_kv_heads, tp)
    return queries, (tp_rank // copies, tp_rank // copies + 1)


def _interleaved(row: Row, shape: ModelShape) -> list[Run]:
    """Returns all rows of Megatron's linear_qkv: for each KV head, the head's queries, their gates
    if attention is gated, the key and the value. In the HF tensor, a query's gate follows it.

    Each rank holds an equal share of these rows. If there are fewer KV heads than ranks, a rank's
    share is only part of a head's group, and Megatron gathers the activations
    (transformer/attention.py, get_query_key_value_tensors).
    """
    head, per_query = shape.head_dim, shape.query_size // shape.num_heads
    group = shape.num_heads // shape.num_kv_heads * per_query
    if [part[0] for part in row.shapes] != [shape.num_kv_heads * n for n in (group, head, head)]:
        raise table_error(row.megatron, f"HF shapes {row.shapes}, which do not match the heads")
    runs: list[Run] = []
    for kv in range(shape.num_kv_heads):
        start, stop = kv * group, (kv + 1) * group
        if shape.gated_attention:
            for first in (start, start + head):  # queries, then gates
                runs += [Run(0, one, one + head) for one in range(first, stop, per_query)]
        else:
            runs.append(Run(0, start, stop))
        runs += [Run(part, kv * head, (kv + 1) * head) for part in (1, 2)]
    return runs


def _clip(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    found, offset = [], 0
    for part, a, b in runs:
        first, last = max(start, offset), min(stop, offset + b - a)
        if first < last:
            found.append(Run(part, a + first - offset, a + last - offset))
        offset += b - a
    return found


def _even(
    row: Row, total: int, tp: int, tp_rank: int, key: str = "train.tp or rollout.tp"
) -> tuple[int, int]:
    if total % tp:
        raise _cut_error(row, total, tp, key)
    return tp_rank * total // tp, (tp_rank + 1) * total // tp


def _cut_error(row: Row, size: int, tp: int, key: str = "train.tp or rollout.tp") -> ModelError:
    return ModelError(
        f"tensor parallel size for {row.parts[0]}",
        tp,
        f"a size that divides {size}" + (" or is a multiple of it" if row.kind == "qkv" else ""),
        f"Choose another {key}.",
    )


def table_error(name: str, found: str) -> ModelError:
    """Returns the error for a weight table that does not match its model."""
    return ModelError(
        f"weight table: {name}",
        found,
        "rectangles that cover every tensor exactly",
        "Fix the family's rows.",
    )
