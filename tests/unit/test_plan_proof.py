"""A plan with a planted fault is refused, with the place named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from weight_cases import Case

from hybridrl.hybrid_engine.planning.plan import CopyOp, Plan, PlanError, plan_reshard
from hybridrl.hybrid_engine.planning.proof import prove
from hybridrl.models.family import ModelShape
from hybridrl.parallel.layout import RolloutLayout, TrainLayout

SHAPE = ModelShape(4, 16, 8, 2, 4, 32, 100, qkv_bias=True, qk_norm=True)
CASE = Case(SHAPE, TrainLayout(4, tp=2, pp=2), RolloutLayout.consecutive(4, 2), engine="fused")
QKV = "model.layers.1.self_attn.qkv_proj.weight"
GATE_UP = "model.layers.2.mlp.gate_up_proj.weight"


def _with_ops(plan: Plan, rank: int, change: Callable[[list[CopyOp]], list[CopyOp]]) -> Plan:
    ops = list(plan.ops)
    ops[rank] = tuple(change(list(ops[rank])))
    return replace(plan, ops=tuple(ops))


def _changed(name: str, change: Callable[[CopyOp], list[CopyOp]]) -> Plan:
    """Returns a good plan in which the first operation on `name` of rank 1 is replaced."""
    plan = plan_reshard(CASE.sources(), CASE.targets(), itemsize=2)

    def edit(ops: list[CopyOp]) -> list[CopyOp]:
        index = next(i for i, op in enumerate(ops) if op.dest == name)
        return [*ops[:index], *change(ops[index]), *ops[index + 1 :]]

    return _with_ops(plan, 1, edit)


def _shifted(op: CopyOp, rows: int) -> CopyOp:
    (start, stop), *rest = op.source_box
    return op._replace(source_box=((start + rows, stop + rows), *rest))


def _refused(plan: Plan, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        prove(plan, CASE.sources(), CASE.targets())


def test_proof_accepts_the_planners_plan() -> None:
    plan = plan_reshard(CASE.sources(), CASE.targets(), itemsize=2)
    prove(plan, CASE.sources(), CASE.targets())


def test_proof_refuses_a_hole() -> None:
    _refused(_changed(QKV, lambda op: []), rf"rank 1: {QKV}\[0:24, 0:16\] is never written")


def test_proof_refuses_a_hole_of_one_row() -> None:
    def shorten(op: CopyOp) -> list[CopyOp]:
        (a, b), *source = op.source_box
        (c, d), *dest = op.dest_box
        return [op._replace(source_box=((a, b - 1), *source), dest_box=((c, d - 1), *dest))]

    _refused(_changed(QKV, shorten), rf"{QKV}\[23:24, 0:16\] is never written")


def test_proof_refuses_an_overlap() -> None:
    _refused(_changed(QKV, lambda op: [op, op]), rf"{QKV}\[0:24, 0:16\] is written more")


def test_proof_refuses_a_source_box_that_is_off_by_rows() -> None:
    _refused(
        _changed(QKV, lambda op: [_shifted(op, 4)]), "but is copied from|elements that are not"
    )


def test_proof_refuses_swapped_gate_and_up() -> None:
    plan = plan_reshard(CASE.sources(), CASE.targets(), itemsize=2)

    def swap(ops: list[CopyOp]) -> list[CopyOp]:
        found = [i for i, op in enumerate(ops) if op.dest == GATE_UP]
        rows = {op.dest_box[0][1] - op.dest_box[0][0] for op in (ops[i] for i in found)}
        height = max(row[1] for row in (ops[i].dest_box[0] for i in found))
        if len(rows) == 1 and len(found) == 1:  # gate and up travel as one: cut it in two
            (op,) = (ops[i] for i in found)
            half = height // 2
            (s0, s1), *rest = op.source_box
            low = op._replace(source_box=((s0 + half, s1), *rest), dest_box=((0, half), *rest))
            high = op._replace(
                source_box=((s0, s0 + half), *rest), dest_box=((half, height), *rest)
            )
            return [*ops[: found[0]], low, high, *ops[found[0] + 1 :]]
        first, second = found[0], found[len(found) // 2]
        box_a, box_b = ops[first].source_box, ops[second].source_box
        ops[first] = ops[first]._replace(source_box=box_b)
        ops[second] = ops[second]._replace(source_box=box_a)
        return ops

    _refused(_with_ops(plan, 1, swap), r"gate_proj.weight\[.*up_proj.weight\[")


def test_proof_refuses_another_layers_weights() -> None:
    stale = "0/decoder.layers.0.self_attention.linear_qkv.weight"
    _refused(_changed(QKV, lambda op: [op._replace(source=stale)]), "layers.1.*layers.0")


def test_proof_refuses_writes_to_padding_and_outside() -> None:
    embedding = "model.embed_tokens.weight"  # 100 rows, padded to 128: rank 1 has 36 and 28 padding

    def grow(op: CopyOp) -> list[CopyOp]:
        (a, b), *source = op.source_box
        (c, d), *dest = op.dest_box
        return [op._replace(source_box=((a, b + 1), *source), dest_box=((c, d + 1), *dest))]

    _refused(_changed(embedding, grow), "elements that are not weights")


def test_proof_refuses_boxes_of_different_sizes_and_wrong_ranks() -> None:
    def narrow(op: CopyOp) -> list[CopyOp]:
        (a, b), *source = op.source_box
        return [op._replace(source_box=((a, b - 1), *source))]

    _refused(_changed(QKV, narrow), "which has another shape")
    _refused(_changed(QKV, lambda op: [op._replace(source_rank=9)]), "has a wrong source")
    _refused(_changed(QKV, lambda op: [op._replace(dest_rank=2)]), "has a wrong source")


def test_proof_refuses_names_that_do_not_exist() -> None:
    _refused(
        _changed(QKV, lambda op: [op._replace(source="0/nothing")]), "elements that are not weights"
    )
    _refused(
        _changed(QKV, lambda op: [op._replace(dest="nothing")]), "elements that are not weights"
    )
