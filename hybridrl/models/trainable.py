"""Checks `train.freeze`, and selects the trained rows of the weight table.

Models set `requires_grad` accordingly, which Megatron's data-parallel wrapper and optimizer obey;
plans use the table to count memory and FLOPs. No torch.

Invariant: a Megatron parameter is trained or frozen as a whole, and so are the experts of a layer.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from typing import Any

from hybridrl.errors import UserError
from hybridrl.models.adapters.rows import WEIGHT, A, base_of, is_adapter
from hybridrl.models.expert_stacks import ordered_by_stack, place_in_stack
from hybridrl.models.family import EMBEDDING, OUTPUT_LAYER, Family, ModelShape, Row
from hybridrl.models.vision.shape import PARAMETER
from hybridrl.models.weights import Head, hf_shapes

KEY = "train.freeze"
PARTS: Mapping[str, Callable[[Row], bool]] = {
    "vision": lambda row: row.megatron.startswith(PARAMETER),
    "embeddings": lambda row: row.megatron == EMBEDDING,
    "head": lambda row: row.megatron == OUTPUT_LAYER,
    "norms": lambda row: (
        "norm" in row.parts[0]
        and len(row.shapes[0]) == 1
        and not row.megatron.startswith(PARAMETER)
    ),
    "router": lambda row: ".mlp.router." in row.megatron,
    "experts": lambda row: row.num_experts > 0,
    "layers": lambda row: row.stage == "layer",
}
LAYERS = re.compile(r"layers\.(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class BackwardShares:
    """Cost of a backward pass, as shares of a forward pass's FLOPs.

    Args:
        weights: Share of the layers' weights for which gradients are computed.
        flow: Share of the layers' weights through which gradients flow to trained parameters.
        attention: Share of the layers through whose attention gradients flow.
        head_weights: 1 if a gradient of the output head is computed, else 0.
        head_flow: 1 if gradients flow through the head to the layers, else 0.
    """

    weights: float = 1.0
    flow: float = 1.0
    attention: float = 1.0
    head_weights: int = 1
    head_flow: int = 1


ALL = BackwardShares()


def frozen_names(freeze: tuple[str, ...] | None, shape: ModelShape) -> tuple[str, ...]:
    if freeze is not None:
        return freeze
    return () if shape.vision is None else ("vision",)


@lru_cache(64)
def trained_family(
    family: Family, shape: ModelShape, freeze: tuple[str, ...], head: Head = "lm"
) -> Family:
    """Returns a family whose weight table contains only the trained parameters.

    Args:
        head: Head of the model; a value head is always trained.
    """
    if family.lora is not None:
        parts = [PARTS[name] for name in family.lora.full]
        trained = [
            row
            for row in family.rows(shape)
            if is_adapter(row.megatron) or any(is_part(row) for is_part in parts)
        ]
        return replace(family, rows=lambda _: tuple(trained))
    if not freeze:
        return family
    rows = []
    for row in family.rows(shape):
        layers = row.layers_of(shape)
        kept = tuple(layer for layer in layers if not any(_matches(row, layer, freeze)))
        if kept:
            rows.append(row if len(kept) == len(layers) else replace(row, layers=kept))
    return replace(family, rows=lambda _: tuple(rows))


@lru_cache(64)
def only_parts(family: Family, shape: ModelShape, names: tuple[str, ...]) -> Family:
    kept = tuple(row for row in family.rows(shape) if any(PARTS[name](row) for name in names))
    return replace(family, rows=lambda _: kept)


@lru_cache(64)
def synced_family(family: Family, shape: ModelShape, held: Family) -> Family:
    """Returns a family whose weight table contains only what each sync of the engines sends.

    Without adapters, this is the family itself. The other weights are sent once.

    Args:
        held: The family with only the adapters that engines hold. The other adapters are merged
            into weights.
    """
    if family.lora is None:
        return family
    own, merged = trained_family(family, shape, ()).rows(shape), _merged(family, shape, held)
    sent = tuple(row for row in held.rows(shape) if row in own or row.megatron in merged)
    return replace(held, rows=lambda _: sent)


@lru_cache(64)
def unmerged_family(family: Family, shape: ModelShape, held: Family) -> Family:
    """Returns the family without adapters, and without the weights into which adapters are merged
    for engines; see `synced_family` for the arguments. These weights are equal in the trainer and
    in engines.
    """
    merged = _merged(family, shape, held)
    if not merged:
        return base_of(family)
    rows = tuple(row for row in base_of(family).rows(shape) if row.megatron not in merged)
    return replace(base_of(family), rows=lambda _: rows)


def _merged(family: Family, shape: ModelShape, held: Family) -> set[str]:
    names = {row.megatron for row in held.rows(shape)}
    adapters = (row.megatron for row in family.rows(shape) if row.megatron not in names)
    return {name.removesuffix(f".{A}") + WEIGHT for name in adapters if name.endswith(f".{A}")}


def freeze_rules(
    freeze: Sequence[str], family: Family, shape: ModelShape, head: Head = "lm"
) -> Iterator[UserError]:
    rows = [row for row in family.rows(shape) if head == "lm" or row.megatron != OUTPUT_LAYER]
    faults = list(_unknown(freeze, rows, shape)) or list(_partly_frozen(freeze, rows, shape))
    yield from faults
    if faults or not freeze or head == "value":
        return
    if not trained_family(family, shape, tuple(freeze), head).rows(shape):
        allowed = "at least one parameter that is not frozen"
        yield UserError(KEY, ", ".join(freeze), allowed, "Freeze fewer parts.")


def _unknown(freeze: Sequence[str], rows: Sequence[Row], shape: ModelShape) -> Iterator[UserError]:
    known = [name for name, is_part in PARTS.items() if any(map(is_part, rows))]
    allowed = ", ".join((*known, f"layers.N or layers.A-B up to {shape.num_layers - 1}"))
    for name in freeze:
        if any(any(_matches(row, layer, [name])) for row in rows for layer in row.layers_of(shape)):
            continue
        close = difflib.get_close_matches(name, PARTS, n=1)
        remedy = f"Did you mean {close[0]!r}?" if close else "Correct the name, or remove it."
        if name == "head" and shape.tied_embeddings:
            remedy = "The model's output layer is its embedding: name embeddings to freeze both."
        yield UserError(KEY, name, f"{allowed}, or a pattern over HF names", remedy)


def _partly_frozen(
    freeze: Sequence[str], rows: Sequence[Row], shape: ModelShape
) -> Iterator[UserError]:
    """Yields an error for tensors of one parameter, or a weight and its bias, frozen in part."""
    frozen_weights = set[tuple[str, int]]()
    biases: dict[tuple[str, int], str] = {}
    for row in rows:
        module, _, kind = row.megatron.rpartition(".")
        for layer in row.layers_of(shape):
            matched = _matches(row, layer, freeze)
            names = ", ".join(dict.fromkeys(part.format(L=layer, E="*") for part in row.parts))
            if any(matched) and not all(matched):
                allowed = f"{names} frozen together"
                yield UserError(KEY, ", ".join(freeze), allowed, "Name all of them, or none.")
                return
            if kind == "weight" and any(matched):
                frozen_weights.add((module, layer))
            elif kind == "bias" and not any(matched):
                biases[module, layer] = names
    # Megatron does not compute a gradient for the bias of a frozen weight.
    for weight, names in biases.items():
        if weight in frozen_weights:
            allowed = f"{names} frozen with the weight"
            yield UserError(KEY, ", ".join(freeze), allowed, "Freeze the bias too, or train both.")
            return


@lru_cache(64)
def backward_shares(
    family: Family, shape: ModelShape, freeze: tuple[str, ...], head: Head = "lm"
) -> BackwardShares:
    """Returns the cost of a model's backward pass; see `trained_family` for the arguments.

    Gradients flow from the loss back to the first layer with a trained parameter.
    """
    if not freeze and family.lora is None:
        return ALL
    rows = trained_family(family, shape, freeze, head).rows(shape)
    layers = [layer for row in rows if row.stage == "layer" for layer in row.layers_of(shape)]
    first = min(layers, default=shape.num_layers)
    if any(row.stage == "first" for row in rows):
        first = 0
    weights = _matmul_weights(family.rows(shape), shape)
    trains_head = head == "value" or shape.tied_embeddings and first == 0
    trains_head |= any(row.megatron == OUTPUT_LAYER for row in rows)
    below_head = any(row.megatron != OUTPUT_LAYER for row in rows)
    return BackwardShares(
        weights=sum(_matmul_weights(rows, shape)) / sum(weights),
        flow=sum(weights[first:]) / sum(weights),
        attention=1 - first / shape.num_layers,
        head_weights=int(trains_head),
        head_flow=int(below_head),
    )


def mark(parameters: Mapping[str, Any], trained: Collection[str]) -> None:
    """Marks parameters as trained or frozen by setting `requires_grad`."""
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in trained)


def frozen(parameters: Mapping[str, Any]) -> dict[str, Any]:
    order = reversed(ordered_by_stack(list(parameters)))
    return {name: parameters[name] for name in order if not parameters[name].requires_grad}


def has_trained(module: Any) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def stack_frozen(parameters: Mapping[str, Any]) -> None:
    """Moves the frozen experts of each stack into contiguous memory.

    Megatron's buffers already store trained experts in this way. An engine that stacks its experts
    can then use them in place. Stacks that are already contiguous, because another model uses them
    too, stay where they are.
    """
    stacks: dict[str, list[Any]] = {}
    for name, parameter in frozen(parameters).items():
        if place := place_in_stack(name):
            stacks.setdefault(place[0], []).append(parameter)
    for experts in stacks.values():
        first = experts[0].data
        storages = {expert.untyped_storage().data_ptr() for expert in experts}
        places = [first.data_ptr() + number * first.nbytes for number in range(len(experts))]
        if len(storages) == 1 and [expert.data_ptr() for expert in experts] == places:
            continue
        stack = first.new_empty((len(experts), *first.shape))
        for slot, expert in zip(stack, experts, strict=True):
            expert.data = slot.copy_(expert.data)


def trained_summary(freeze: tuple[str, ...], family: Family, shape: ModelShape) -> str:
    """Returns a text with the number of trained parameters; "" if nothing is frozen."""
    if not freeze and family.lora is None:
        return ""
    total, trained = (
        sum(prod(size) for size in hf_shapes(part, shape).values())
        for part in (family, trained_family(family, shape, freeze))
    )
    return f"{trained:,} of {total:,} parameters ({'lora' if family.lora else KEY})"


def _matmul_weights(rows: Sequence[Row], shape: ModelShape) -> list[float]:
    """Returns, for each layer, the number of weights that multiply each token."""
    weights = [0.0] * shape.num_layers
    for row in rows:
        if row.stage != "layer" or len(row.shapes[0]) < 2:
            continue
        size = float(sum(prod(part) for part in row.shapes))
        if row.num_experts and shape.moe is not None:
            size *= shape.moe.experts_per_token
        for layer in row.layers_of(shape):
            weights[layer] += size
    return weights


def _matches(row: Row, layer: int, freeze: Sequence[str]) -> list[bool]:
    return [
        any(_stands_for(name, row, layer, part.format(L=layer, E=expert)) for name in freeze)
        for part in row.parts
        for expert in range(row.num_experts or 1)
    ]


def _stands_for(name: str, row: Row, layer: int, hf: str) -> bool:
    if (is_part := PARTS.get(name)) is not None:
        return is_part(row)
    if found := LAYERS.fullmatch(name):
        return row.stage == "layer" and int(found[1]) <= layer <= int(found[2] or found[1])
    return fnmatchcase(hf, name)
