"""HF tensors that never change, and layouts without them.

An engine that still has them gets the other weights only, by a plan of its own. Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from hybridrl.models.weights import RankLayout


def frozen_tensors(
    layouts: Sequence[RankLayout], frozen: Sequence[Collection[str]]
) -> frozenset[str]:
    """Returns the HF tensors that are frozen wherever a rank holds a part of them.

    Args:
        layouts: The layout of every rank.
        frozen: For every rank the names of its local tensors that never change.
    """
    found: set[str] = set()
    changing: set[str] = set()
    pairs = list(zip(layouts, frozen, strict=True))
    for layout, names in {(id(one), id(other)): (one, other) for one, other in pairs}.values():
        for region in layout.regions:
            (found if region.local in names else changing).add(region.hf)
    return frozenset(found - changing)


def without(layouts: Sequence[RankLayout], frozen: Collection[str]) -> list[RankLayout]:
    """Returns the layouts without these HF tensors, whose place counts as padding; layouts that are
    one object stay one.
    """
    found: dict[int, RankLayout] = {}
    for layout in layouts:
        if id(layout) not in found:
            kept = tuple(r for r in layout.regions if r.hf not in frozen)
            gone = tuple((r.local, r.local_box) for r in layout.regions if r.hf in frozen)
            found[id(layout)] = replace(layout, regions=kept, padding=(*layout.padding, *gone))
    return [found[id(layout)] for layout in layouts]
