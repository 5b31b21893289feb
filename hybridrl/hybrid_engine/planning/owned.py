"""Computes the layouts of the elements that each rank's optimizer updates, or that never change.

Megatron's distributed optimizer splits each flat parameter buffer into contiguous shards, one per
data-parallel rank. A rank thus owns a range of a tensor's elements, counted row by row, or no
element. After an optimizer step only owned ranges contain new values. With
`train.fuse_param_gather`, a plan therefore reads only owned ranges.

An engine parameter may share its memory with the training tensor (alias.py). The plan then copies
nothing within the rank and writes only the ranges that other ranks own, so no range is read while
it is written.

Router biases are not parameters. No optimizer updates them, and every rank that has a router bias
owns all of it. If several ranks own the same bias, a plan reads it from any of them.

Pure, no torch. Invariant: the regions and padding of an owned layout cover its tensors completely,
without overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod

from hybridrl.models.boxes import Box, intersection, moved, span_boxes
from hybridrl.models.weights import EXPERTS, RankLayout, Region
from hybridrl.parallel.layout import TrainLayout

ROUTER_BIAS = ".router.expert_bias"


def owned_layout(layout: RankLayout, ranges: Mapping[str, tuple[int, int]]) -> RankLayout:
    """Returns a layout of only the owned elements; all other elements become padding.

    `ranges` has (start, stop) of a local tensor's owned elements, counted row by row; without an
    entry, the rank owns none.
    """
    owned: dict[str, list[Box]] = {}
    others: dict[str, list[Box]] = {}
    for name, shape in layout.shapes.items():
        start, stop = ranges.get(name, (0, 0))
        owned[name] = list(span_boxes(shape, start, stop))
        others[name] = [*span_boxes(shape, 0, start), *span_boxes(shape, stop, prod(shape))]
    regions: list[Region] = []
    padding = list(layout.padding)
    for region in layout.regions:
        for box in owned[region.local]:
            part = intersection(box, region.local_box)
            if part is not None:
                hf_box = moved(part, region.local_box, region.hf_box)
                regions.append(Region(region.hf, hf_box, region.local, part))
        for box in others[region.local]:
            part = intersection(box, region.local_box)
            if part is not None:
                padding.append((region.local, part))
    return RankLayout(tuple(regions), layout.shapes, tuple(padding))


def equal_shares(layout: TrainLayout, whole: Sequence[RankLayout]) -> list[RankLayout]:
    """Returns each rank's owned layout, assuming that every tensor is split into equal shards.

    Experts' tensors are split across expert-data-parallel ranks, router biases not at all. Megatron
    instead splits buckets of several tensors, which are unknown until the model is built. The total
    over all ranks is the same in both cases, and each rank's share is nearly the same.
    """
    owners = layout.dp * layout.cp
    if owners == layout.edp == 1:
        return list(whole)
    found = []
    for rank, own in enumerate(whole):
        where = layout.coordinates(rank)
        part = where.dp * layout.cp + where.cp
        ranges = {}
        for name, shape in own.shapes.items():
            at, num, size = part, owners, prod(shape)
            if name.endswith(ROUTER_BIAS):
                at, num = 0, 1
            elif EXPERTS in name:
                at, num = layout.expert_coordinates(rank).edp, layout.edp
            ranges[name] = (size * at // num, size * (at + 1) // num)
        found.append(owned_layout(own, ranges))
    return found


def frozen_tensors(
    layouts: Sequence[RankLayout], frozen: Sequence[Collection[str]]
) -> frozenset[str]:
    """Returns the HF tensors that are frozen on all ranks that hold a part of them.

    `frozen` has the names of each rank's local tensors that never change.
    """
    found: set[str] = set()
    changing: set[str] = set()
    pairs = list(zip(layouts, frozen, strict=True))
    for layout, names in {(id(one), id(other)): (one, other) for one, other in pairs}.values():
        for region in layout.regions:
            (found if region.local in names else changing).add(region.hf)
    return frozenset(found - changing)


def without(layouts: Sequence[RankLayout], frozen: Collection[str]) -> list[RankLayout]:
    """Returns the layouts without these HF tensors; their elements become padding.

    Layouts that are one object in the argument are one object in the result.
    """
    found: dict[int, RankLayout] = {}
    for layout in layouts:
        if id(layout) not in found:
            kept = tuple(r for r in layout.regions if r.hf not in frozen)
            gone = tuple((r.local, r.local_box) for r in layout.regions if r.hf in frozen)
            found[id(layout)] = replace(layout, regions=kept, padding=(*layout.padding, *gone))
    return [found[id(layout)] for layout in layouts]
