"""Counts a model's elements on a rank by one layer of each kind, as complete layouts would."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import lcm, prod

from hybridrl.hybrid_engine.memory.alias import shared_names
from hybridrl.models.boxes import Shape
from hybridrl.models.expert_stacks import stacks_are_even
from hybridrl.models.family import Family, ModelShape
from hybridrl.models.weights import EXPERTS, Head, RankLayout, fused_layout, megatron_layout
from hybridrl.parallel.layout import TrainLayout
from hybridrl.services.planner.phase_memory import Elements

LAYER = re.compile(r"(?:^|[./])layers\.(\d+)\.")
KEPT = 4096  # number of cached layouts; a search uses a few hundred


@dataclass(frozen=True)
class _Thin:
    """A weight table of one layer of each kind; `kind_of` maps each layer to such a layer."""

    outside: Family
    layers: Family
    kind_of: tuple[int, ...]


def fullest_stage(
    family: Family, shape: ModelShape, layout: TrainLayout, head: Head = "lm"
) -> Elements:
    """Returns the number of elements on the fullest rank; ranks of a stage hold equally many."""
    return _fullest_stage(family, shape, _without_replicas(layout), head)


@lru_cache(KEPT)
def _fullest_stage(family: Family, shape: ModelShape, layout: TrainLayout, head: Head) -> Elements:
    thin = _thin(family, shape)
    one_stage = replace(layout, world_size=layout.world_size // layout.pp, pp=1, vpp=1)
    of_layer = _by_layer(megatron_layout(thin.layers, shape, one_stage, 0, head).shapes)
    found = []
    for stage in range(layout.pp):
        rank = layout.rank_at(tp=0, cp=0, dp=0, pp=stage)
        outside = megatron_layout(thin.outside, shape, layout, rank, head).shapes
        sizes = [(sum(prod(size) for size in outside.values()), 0)]
        for chunk in layout.layers(stage, shape.num_layers):
            sizes += [of_layer.get(thin.kind_of[layer], (0, 0)) for layer in chunk]
        elements, experts = zip(*sizes, strict=True)
        found.append(Elements(sum(elements), sum(experts)))
    return max(found)


@lru_cache(KEPT)
def engine_elements(family: Family, shape: ModelShape, tp: int, ep: int) -> int:
    """Returns the number of elements on the first rank of an engine of size `tp`, `ep`."""
    thin = _thin(family, shape)
    outside = fused_layout(thin.outside, shape, tp, 0, ep).shapes
    of_layer = _by_layer(fused_layout(thin.layers, shape, tp, 0, ep).shapes)
    layers = (of_layer.get(kind, (0, 0))[0] for kind in thin.kind_of)
    return sum(prod(size) for size in outside.values()) + sum(layers)


@lru_cache(KEPT)
def shared_elements(
    family: Family,
    shape: ModelShape,
    layout: TrainLayout,
    tp: int,
    ep: int,
    has_buckets: bool = True,
) -> int:
    """Returns the engine elements in the trainer's memory, on the rank that shares the fewest.

    A rank trains only its pipeline stage, and tensors are shared only if engine and trainer shard
    them identically. `has_buckets` is as in `stacks_are_even`.
    """
    thin, stages = _thin(family, shape), _without_replicas(layout)
    one = replace(stages, world_size=stages.world_size // stages.pp, pp=1, vpp=1)
    of_layers = megatron_layout(thin.layers, shape, one, 0)
    # The engine's part is the same for every pipeline stage.
    engine_outside = fused_layout(thin.outside, shape, tp, 0, ep)
    engine_layers = fused_layout(thin.layers, shape, tp, 0, ep)
    by_evenness: dict[bool, dict[int, tuple[int, int]]] = {}
    found = []
    for stage in range(stages.pp):
        rank = stages.rank_at(tp=0, cp=0, dp=0, pp=stage)
        outside = megatron_layout(thin.outside, shape, stages, rank)
        is_even = stacks_are_even({**outside.shapes, **of_layers.shapes}, layout, has_buckets)
        shared = _shared(outside, engine_outside, is_even)
        elements = sum(prod(size) for size in shared.values())
        if is_even not in by_evenness:
            by_evenness[is_even] = _by_layer(_shared(of_layers, engine_layers, is_even))
        by_layer = by_evenness[is_even]
        for chunk in stages.layers(stage, shape.num_layers):
            elements += sum(by_layer.get(thin.kind_of[layer], (0, 0))[0] for layer in chunk)
        found.append(elements)
    return min(found)


def _shared(source: RankLayout, engine: RankLayout, is_even: bool) -> Mapping[str, Shape]:
    return {name: engine.shapes[name] for name in shared_names(source, engine, is_even)}


def _without_replicas(layout: TrainLayout) -> TrainLayout:
    """Returns a smaller layout without replicas, whose ranks hold the same number of elements."""
    plane = lcm(layout.tp, layout.ep * layout.etp)
    return replace(layout, world_size=plane * layout.pp, cp=1)


@cache
def _thin(family: Family, shape: ModelShape) -> _Thin:
    rows = family.rows(shape)
    of_layers = [row for row in rows if row.stage == "layer"]
    first: dict[tuple[bool, ...], int] = {}
    kinds = []
    for layer in range(shape.num_layers):
        has = tuple(row.layers is None or layer in row.layers for row in of_layers)
        kinds.append(first.setdefault(has, layer))
    kept = []
    for row in of_layers:
        layers = (kind for kind in first.values() if row.layers is None or kind in row.layers)
        kept.append(replace(row, layers=tuple(layers)))
    outside = tuple(row for row in rows if row.stage != "layer")
    of_kinds = replace(family, rows=lambda _: tuple(kept))
    return _Thin(replace(family, rows=lambda _: outside), of_kinds, tuple(kinds))


def _by_layer(shapes: Mapping[str, Shape]) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for name, shape in shapes.items():
        if match := LAYER.search(name):
            elements, experts = found.get(int(match[1]), (0, 0))
            size = prod(shape)
            found[int(match[1])] = elements + size, experts + (size if EXPERTS in name else 0)
    return found
