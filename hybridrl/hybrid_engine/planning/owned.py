"""Layouts of the elements that each rank's optimizer updates.

Megatron's distributed optimizer cuts each flat parameter buffer into contiguous shards, one for
each data-parallel rank. So a rank owns a range of a tensor's elements, counted row by row, or none.
After an optimizer step only owned ranges hold new values, so with `train.fuse_param_gather` the
sources of a plan are these ranges alone.

Such a plan never writes an owned range. A rank copies its own range from its own tensor; where the
engine's parameter is the same memory (alias.py) there is nothing to copy. The plan fills the other
owners' ranges only, so no range is read while it is written.

Router biases are not parameters: no optimizer updates them, and every rank that has one owns all of
it. Several ranks may thus own the same bias; a plan takes it from any of them.

Pure, no torch. Invariant: an owned layout tiles its tensors like the layout from which it was made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from hybridrl.models.boxes import Box, intersection, moved, span_boxes
from hybridrl.models.weights import EXPERTS, RankLayout, Region
from hybridrl.parallel.layout import TrainLayout

ROUTER_BIAS = ".router.expert_bias"


def owned_layout(layout: RankLayout, ranges: Mapping[str, tuple[int, int]]) -> RankLayout:
    """Returns the layout whose regions are the owned elements; all others become padding.

    Args:
        layout: Layout of all elements of the rank.
        ranges: (start, stop) of the owned elements of each local tensor, counted row by row. The
            rank owns nothing of a tensor without an entry.
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
    """Returns each rank's owned layout, assuming that every tensor is cut into equal shards.

    Tensors are cut over the data- and context-parallel ranks, those of experts over the
    expert-data-parallel ones; every rank owns its router biases whole. Megatron instead cuts
    buckets of several tensors, which are unknown before there is a model. The bytes of all ranks
    together are the same, those of one rank nearly so.
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
