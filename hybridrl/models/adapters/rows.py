"""Adapters as rows of a weight table: names, shapes and shards of all A and B. No torch.

A family with adapters is an ordinary family whose table has two more rows for each adapted Megatron
linear layer: `lora_a` stacks the A of its HF projections, `lora_b` their B. The HF names are
PEFT's, without their prefix. Layouts, checkpoints, optimizer states and reshards follow from the
table, as for every other parameter.

Invariant: a rank's rows of `lora_b`, and its columns of `lora_a`, are those of the weight that they
adapt. A tensor-parallel rank therefore never needs adapters of other ranks' rows.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod

from hybridrl.errors import UserError
from hybridrl.models.adapters.lora import ALL_LINEAR, EXPERTS, Lora
from hybridrl.models.family import Family, ModelShape, Row

A, B = "lora_a", "lora_b"
GROUPED_ADAPTERS = "adapters"  # module with the adapters of a layer that computes several experts
HF_A, HF_B = "lora_A.weight", "lora_B.weight"
WEIGHT = ".weight"


@lru_cache(64)
def adapted(family: Family, lora: Lora | None) -> Family:
    if lora is None:
        return family

    def rows(shape: ModelShape) -> tuple[Row, ...]:
        return (*family.rows(shape), *_adapter_rows(family, shape, lora))

    return replace(family, rows=rows, lora=lora)


@lru_cache(64)
def base_of(family: Family) -> Family:
    if family.lora is None:
        return family

    def rows(shape: ModelShape) -> tuple[Row, ...]:
        return tuple(row for row in family.rows(shape) if not is_adapter(row.megatron))

    return replace(family, rows=rows, lora=None)


@lru_cache(64)
def without_expert_adapters(family: Family) -> Family:
    if family.lora is None or EXPERTS not in family.lora.targets:
        return family
    targets = tuple(name for name in family.lora.targets if name != EXPERTS)
    return adapted(base_of(family), replace(family.lora, targets=targets) if targets else None)


@lru_cache(64)
def only_adapters(family: Family) -> Family:

    def rows(shape: ModelShape) -> tuple[Row, ...]:
        return tuple(row for row in family.rows(shape) if is_adapter(row.megatron))

    return replace(family, rows=rows)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, by its Megatron, local or HF name."""
    return name.endswith((f".{A}", f".{B}", f".{HF_A}", f".{HF_B}"))


def weight_of(module: str) -> str:
    """Returns the local name of the weight that an adapter changes."""
    linear, is_grouped, expert = module.rpartition(f".{GROUPED_ADAPTERS}.")
    return f"{linear}{WEIGHT}{expert}" if is_grouped else module + WEIGHT


def modules(row: Row) -> tuple[str, ...]:
    """Returns the HF names of a weight's linear layers, without repetitions.

    Projections that the HF checkpoint stores in one tensor are one linear layer.
    """
    return tuple(dict.fromkeys(part.removesuffix(WEIGHT) for part in row.parts))


def can_adapt(row: Row) -> bool:
    """Whether a row is the weight of a linear layer that can have an adapter."""
    is_linear = row.stage == "layer" and len(row.shapes[0]) == 2 and ".linear_" in row.megatron
    # GPT-OSS stores its experts in one tensor, whose slices have no names for PEFT.
    return is_linear and all(name.endswith(WEIGHT) for name in (row.megatron, *row.parts))


def adapts_experts(family: Family, shape: ModelShape) -> bool:
    return any(is_adapter(row.megatron) and row.num_experts for row in family.rows(shape))


def _adapter_rows(family: Family, shape: ModelShape, lora: Lora) -> Iterator[Row]:
    for row in family.rows(shape):
        if not can_adapt(row):
            continue
        targets = tuple(name for name in modules(row) if _is_target(row, name, lora))
        if not targets:
            continue
        stored = tuple(
            index for index, part in enumerate(row.parts) if part.removesuffix(WEIGHT) in targets
        )
        module = row.megatron.removesuffix(WEIGHT)
        is_row = row.kind == "row"
        yield replace(
            row,
            megatron=f"{module}.{A}",
            parts=tuple(f"{name}.{HF_A}" for name in targets),
            shapes=((lora.rank, row.shapes[0][1]),) * len(targets),
            kind="row" if is_row else "replicated",
        )
        yield replace(
            row,
            megatron=f"{module}.{B}",
            parts=tuple(f"{part.removesuffix(WEIGHT)}.{HF_B}" for part in row.parts),
            shapes=tuple((size[0], lora.rank) for size in row.shapes),
            kind="replicated" if is_row else row.kind,
            stored=None if len(stored) == len(row.parts) else stored,
        )


def _is_target(row: Row, module: str, lora: Lora) -> bool:
    if row.num_experts:
        return EXPERTS in lora.targets
    return ALL_LINEAR in lora.targets or module.rpartition(".")[2] in lora.targets


def target_names(family: Family, shape: ModelShape) -> list[str]:
    """Returns the names, except experts, that `lora.targets` may contain for a model, in order."""
    rows = [row for row in family.rows(shape) if can_adapt(row) and not row.num_experts]
    return list(dict.fromkeys(name.rpartition(".")[2] for row in rows for name in modules(row)))


def adapter_rules(lora: Lora, family: Family, shape: ModelShape) -> Iterator[UserError]:
    has_experts = any(row.num_experts for row in family.rows(shape) if can_adapt(row))
    known = [ALL_LINEAR, *([EXPERTS] if has_experts else []), *target_names(family, shape)]
    for name in lora.targets:
        if name in known:
            continue
        close = difflib.get_close_matches(name, known, n=1)
        remedy = f"Did you mean {close[0]!r}?" if close else "Correct the name, or remove it."
        if name == EXPERTS:
            remedy = "Remove it: " + (
                "this model has no experts."
                if shape.moe is None
                else f"experts of family {family.name} cannot have adapters."
            )
        yield UserError("lora.targets", name, ", ".join(known), remedy)
        return
    for row in family.rows(shape):
        for name in modules(row) if can_adapt(row) else ():
            sizes = [
                size
                for part, size in zip(row.parts, row.shapes, strict=True)
                if part == name + WEIGHT
            ]
            least = min(sum(size[0] for size in sizes), sizes[0][1])
            short = name.rpartition(".")[2]
            if least < shape.head_dim and short not in lora.targets and not row.num_experts:
                # A layer with one output per head, among all linear layers. A larger rank is
                # redundant there, but PEFT's directories have it.
                continue
            if _is_target(row, name, lora) and lora.rank > least:
                short += " in an expert" if row.num_experts else ""
                allowed = f"1 to {least}, the smaller dimension of {short}"
                yield UserError("lora.rank", lora.rank, allowed, "Lower lora.rank.")
                return


def num_parameters(family: Family, shape: ModelShape) -> int:
    return sum(
        len(row.layers_of(shape))
        * (row.num_experts or 1)
        * sum(prod(row.shapes[index]) for index in row.stored_parts)
        for row in family.rows(shape)
    )


def num_active_adapter_parameters(family: Family, shape: ModelShape) -> int:
    """Returns the number of the adapters' parameters that each token is multiplied with."""
    per_token = 1 if shape.moe is None else shape.moe.experts_per_token
    rows = tuple(
        replace(row, num_experts=per_token) if row.num_experts else row
        for row in only_adapters(family).rows(shape)
    )
    return num_parameters(replace(family, rows=lambda _: rows), shape)


def num_adapter_parameters(family: Family, shape: ModelShape) -> int:
    return num_parameters(only_adapters(family), shape)
