"""Slices of a layout that exactly one rank owns: the rank whose optimizer updates them.

Megatron's distributed optimizer cuts each of a model's flat parameter buffers into contiguous
shards, one a data-parallel rank. Of a tensor a rank then owns a range of elements, counted row by
row, or none. After an optimizer step only the owned ranges hold new values, so with
`train.fuse_param_gather` the sources of a plan are these ranges alone.

Such a plan does not write to owned ranges. A rank copies the range that it owns from its own
tensor, and where the engine's parameter is the same memory (alias.py) there is nothing to copy. The
plan fills the ranges of the other owners only, so no range is read while it is written.

Biases of routers are no parameters: no optimizer updates them, and every rank that has them owns
them whole. So several ranks may own the same one; a plan takes it from any.

Pure, no torch. Invariant: the layout made here tiles its tensors like the one it was made from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from hybridrl.models.boxes import Box, intersection, moved, span_boxes
from hybridrl.models.weights import EXPERTS, RankLayout, Region
from hybridrl.parallel.layout import TrainLayout

ROUTER_BIAS = ".router.expert_bias"


def owned_layout(layout: RankLayout, ranges: Mapping[str, tuple[int, int]]) -> RankLayout:
    """Returns the layout whose regions are the owned elements; all others count as padding.

    Args:
        layout: of everything that the rank holds.
        ranges: (start, stop) of the owned elements of each local tensor, counted row by row. Of a
            tensor that is missing here the rank owns nothing.
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
    """Returns each rank's owned layout, if every tensor is cut into equal shards over the data- and
    context-parallel ranks, those of experts over the expert-data-parallel ones; biases of routers
    are each rank's own, whole.

    Megatron cuts buckets of several tensors instead, which are known once there is a model. The
    bytes of all ranks together are the same, those of one rank nearly so.
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
