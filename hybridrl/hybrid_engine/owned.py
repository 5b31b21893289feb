"""What of a layout a rank owns alone: the parts whose new values it has before any other rank.

A distributed optimizer shares out a model's flat parameter buffers over data-parallel ranks; each
updates one contiguous part of each buffer, so of a tensor a range of elements counted row by row,
or none. A plan whose sources are the owned parts reads nothing else (`train.fuse_param_gather`). It
never writes there either: what a rank owns it copies from its own, and where the engine's parameter
is the same memory (alias.py) that copy falls away. So in such a parameter a plan fills just the
ranges of the other owners, and no range is read while it is written.

Pure, no torch. Invariant: the layout made here tiles its tensors like the one it was made from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from hybridrl.models.boxes import Box, intersection, moved, span_boxes
from hybridrl.models.weights import RankLayout, Region
from hybridrl.parallel.layout import TrainLayout


def owned_layout(layout: RankLayout, ranges: Mapping[str, tuple[int, int]]) -> RankLayout:
    """Returns the layout whose regions are only the owned parts; the others count as padding.

    Args:
        layout: of everything that the rank holds.
        ranges: by local tensor (start, stop) of its owned elements; one that is missing is another
            rank's altogether.
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
    """Returns what each rank owns where every tensor is cut into as many equal parts as it has
    owners, the data- and context-parallel ranks.

    Megatron shares buckets of several tensors out. Those are known once there is a model; here are
    the same bytes altogether, and nearly so on each rank.
    """
    owners = layout.dp * layout.cp
    if owners == 1:
        return list(whole)
    found = []
    for rank, own in enumerate(whole):
        where = layout.coordinates(rank)
        part = where.dp * layout.cp + where.cp
        sizes = {name: prod(shape) for name, shape in own.shapes.items()}
        ranges = {n: (s * part // owners, s * (part + 1) // owners) for n, s in sizes.items()}
        found.append(owned_layout(own, ranges))
    return found
