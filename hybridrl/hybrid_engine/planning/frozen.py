"""Finds HF tensors that never change, for a second plan that sends only the others. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from hybridrl.models.weights import RankLayout


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
