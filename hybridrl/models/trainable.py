"""The trainable set of a model: what `train.freeze` names, and what is left to train. No torch.

Owns the names of parts, the rules for them, and the weight table of what is trained. Everything
else asks here: a live model marks its parameters by it (`requires_grad`, which Megatron's data
parallel wrapper and optimizer follow), and plans count memory and FLOPs by it.
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
from hybridrl.models.expert_stacks import in_stacks, place_in_stack
from hybridrl.models.family import OUTPUT_LAYER, Family, ModelShape, Row
from hybridrl.models.weights import Head, hf_shapes

KEY = "train.freeze"
PARTS: Mapping[str, Callable[[Row], bool]] = {
    "embeddings": lambda row: row.stage == "first",
    "head": lambda row: row.megatron == OUTPUT_LAYER,
    "norms": lambda row: "norm" in row.parts[0] and len(row.shapes[0]) == 1,
    "router": lambda row: ".mlp.router." in row.megatron,
    "experts": lambda row: row.num_experts > 0,
    "layers": lambda row: row.stage == "layer",
}
LAYERS = re.compile(r"layers\.(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class BackwardShares:
    """How much of a forward pass's FLOPs a backward pass takes.

    Args:
        weights: Share of the layers' weights that have a gradient.
        flow: Share of the layers' weights that gradients flow through, to what is trained.
        attention: Share of the layers whose attention they flow through.
        head_weights: 1 if the output head has a gradient, else 0.
        head_flow: 1 if gradients flow through the head, else 0.
    """

    weights: float = 1.0
    flow: float = 1.0
    attention: float = 1.0
    head_weights: int = 1
    head_flow: int = 1


ALL = BackwardShares()


@lru_cache(64)
def trained_family(
    family: Family, shape: ModelShape, freeze: tuple[str, ...], head: Head = "lm"
) -> Family:
    """Returns the family whose weight table has only what is trained: layouts, shapes and sizes
    made from it are those of the trainable set.

    Args:
        family, shape: Those of the model.
        freeze: `train.freeze`, whose rules hold.
        head: What the model ends in; a value head is always trained.
    """
    if not freeze:
        return family
    kept = []
    for row in family.rows(shape):
        layers = row.layers_of(shape)
        left = tuple(layer for layer in layers if not any(_matches(row, layer, freeze)))
        if left:
            kept.append(row if len(left) == len(layers) else replace(row, layers=left))
    return replace(family, rows=lambda _: tuple(kept))


def freeze_rules(
    freeze: Sequence[str], family: Family, shape: ModelShape, head: Head = "lm"
) -> Iterator[UserError]:
    """Yields what is wrong with the parts that shall be frozen.

    Args:
        freeze: `train.freeze`.
        family, shape: Those of the model.
        head: What the trained model ends in.
    """
    rows = [row for row in family.rows(shape) if head == "lm" or row.megatron != OUTPUT_LAYER]
    found = list(_unknown(freeze, rows, shape)) or list(_divided(freeze, rows, shape))
    yield from found
    if found or not freeze or head == "value":
        return
    if not trained_family(family, shape, tuple(freeze), head).rows(shape):
        allowed = "some parameters left to train"
        yield UserError(KEY, ", ".join(freeze), allowed, "Freeze fewer parts.")


def _unknown(freeze: Sequence[str], rows: Sequence[Row], shape: ModelShape) -> Iterator[UserError]:
    """Yields the names that stand for nothing of the model."""
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


def _divided(freeze: Sequence[str], rows: Sequence[Row], shape: ModelShape) -> Iterator[UserError]:
    """Yields the first tensors that are frozen without others that training needs them with."""
    frozen_weights = set[tuple[str, int]]()
    biases: dict[tuple[str, int], str] = {}
    for row in rows:
        place, _, kind = row.megatron.rpartition(".")
        for layer in row.layers_of(shape):
            matched = _matches(row, layer, freeze)
            names = ", ".join(dict.fromkeys(part.format(L=layer, E="*") for part in row.parts))
            if any(matched) and not all(matched):
                allowed = f"{names} frozen together"
                yield UserError(KEY, ", ".join(freeze), allowed, "Name all of them, or none.")
                return
            if kind == "weight" and any(matched):
                frozen_weights.add((place, layer))
            elif kind == "bias" and not any(matched):
                biases[place, layer] = names
    # Megatron gives a bias beside a frozen weight no gradient.
    for names in (names for of, names in biases.items() if of in frozen_weights):
        allowed = f"{names} frozen with the weight"
        yield UserError(KEY, ", ".join(freeze), allowed, "Freeze the bias too, or train both.")
        return


@lru_cache(64)
def backward_shares(
    family: Family, shape: ModelShape, freeze: tuple[str, ...], head: Head = "lm"
) -> BackwardShares:
    """Returns what a backward pass computes of a model; arguments as of `trained_family`.

    Gradients flow from the loss down to the first layer that has something to train.
    """
    if not freeze:
        return ALL
    rows = trained_family(family, shape, freeze, head).rows(shape)
    layers = [layer for row in rows if row.stage == "layer" for layer in row.layers_of(shape)]
    first = min(layers, default=shape.num_layers)
    if any(row.stage == "first" for row in rows):
        first = 0
    whole = _matmul_weights(family.rows(shape), shape)
    trains_head = head == "value" or shape.tied_embeddings and first == 0
    trains_head |= any(row.megatron == OUTPUT_LAYER for row in rows)
    below_head = any(row.megatron != OUTPUT_LAYER for row in rows)
    total = sum(whole)
    return BackwardShares(
        sum(_matmul_weights(rows, shape)) / total,
        sum(whole[first:]) / total,
        1 - first / shape.num_layers,
        int(trains_head),
        int(below_head),
    )


def mark(parameters: Mapping[str, Any], trained: Collection[str]) -> None:
    """Marks parameters as trained or frozen, by their local names."""
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in trained)


def frozen(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters that are marked as frozen, so that stacks of experts ascend."""
    order = reversed(in_stacks(list(parameters)))
    return {name: parameters[name] for name in order if not parameters[name].requires_grad}


def has_trained(module: Any) -> bool:
    """Whether some parameter of a module is marked as trained."""
    return any(parameter.requires_grad for parameter in module.parameters())


def stack_frozen(parameters: Mapping[str, Any]) -> None:
    """Puts the frozen experts of each stack one after another in memory, as Megatron's buffers hold
    trained ones: an engine that stacks them can then read them where they are.
    """
    stacks: dict[str, list[Any]] = {}
    for name, parameter in frozen(parameters).items():
        if place := place_in_stack(name):
            stacks.setdefault(place[0], []).append(parameter)
    for experts in stacks.values():
        first = experts[0].data
        stacked = first.new_empty((len(experts), *first.shape))
        for own, expert in zip(stacked, experts, strict=True):
            expert.data = own.copy_(expert.data)


def said_of_freeze(freeze: tuple[str, ...], family: Family, shape: ModelShape) -> str:
    """Returns what `train.freeze` leaves to train, in words; empty if nothing is frozen."""
    if not freeze:
        return ""
    all_of, trained = (
        sum(prod(size) for size in hf_shapes(one, shape).values())
        for one in (family, trained_family(family, shape, freeze))
    )
    return f"{trained:,} of {all_of:,} parameters, as {KEY} says"


def _matmul_weights(rows: Sequence[Row], shape: ModelShape) -> list[float]:
    """Returns, for each layer, the weights that a token is multiplied with."""
    found = [0.0] * shape.num_layers
    for row in rows:
        if row.stage != "layer" or len(row.shapes[0]) < 2:
            continue
        size = float(sum(prod(part) for part in row.shapes))
        if row.num_experts and shape.moe is not None:
            size *= shape.moe.experts_per_token
        for layer in row.layers_of(shape):
            found[layer] += size
    return found


def _matches(row: Row, layer: int, freeze: Sequence[str]) -> list[bool]:
    """Returns, for each HF tensor of a parameter, whether `train.freeze` names it."""
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
