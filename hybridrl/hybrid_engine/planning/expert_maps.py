"""Assigns whole experts to the ranks of an engine replica. Pure, no torch.

Each rank of an engine replica must hold the same number of a layer's experts, but may hold any of
them. Each replica therefore has its own map, the same in all layers, chosen so that its ranks keep
as many as possible of the elements that they train. The search starts from the linear map. The
search moves experts around cycles of ranks as long as this keeps more elements in place; afterwards
no balanced map keeps more (cycle cancelling, Klein 1967, "A primal method for minimal cost flows").
Swaps between two ranks then reduce the elements that the worst rank lacks. A map replaces the
linear map only if the busiest receiver receives less, or if it receives as much and the busiest
sender sends less. Invariant: all ranks compute the same maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybridrl.hybrid_engine.planning.assign import (
    Assignment,
    Costs,
    assign,
    domain_of,
    evaluate_parts,
    numbered,
    part_patterns,
)
from hybridrl.models.adapters.rows import base_of
from hybridrl.models.boxes import volume
from hybridrl.models.family import Family, ModelShape
from hybridrl.models.weights import NOTHING, RankLayout
from hybridrl.parallel.layout import RolloutLayout


@dataclass(frozen=True)
class Engines:
    """Engine layouts of all ranks.

    Args:
        best, linear: Layouts with costs; `linear` has experts in order.
        costs: Costs of assigning any part to any rank, with experts in order.
    """

    best: Assignment
    targets: list[RankLayout]
    linear: Assignment
    costs: Costs


class ExpertTensors:
    """Names of the HF tensors of a model's experts (`num_experts` per layer), without adapters."""

    def __init__(self, family: Family, shape: ModelShape) -> None:
        self.num_experts = shape.moe.num_experts if shape.moe else 0
        self._of: dict[str, tuple[int, int]] = {}
        self._names: list[list[str]] = []
        for row in base_of(family).rows(shape):
            for layer in range(shape.num_layers) if row.num_experts else ():
                if row.layers is not None and layer not in row.layers:
                    continue
                for part in row.parts:
                    names = [part.format(L=layer, E=e) for e in range(row.num_experts)]
                    self._of |= {name: (len(self._names), e) for e, name in enumerate(names)}
                    self._names.append(names)

    def expert(self, hf: str) -> int | None:
        found = self._of.get(hf)
        return None if found is None else found[1]

    def of_expert(self, hf: str, expert: int) -> str:
        """Returns the name of the corresponding tensor of another expert of the same layer."""
        return self._names[self._of[hf][0]][expert]


def lay_out_engines(
    sources: Sequence[RankLayout],
    parts: Sequence[RankLayout],
    tensors: ExpertTensors | None,
    domain_size: int | None = None,
    ranks: Sequence[int] | None = None,
) -> Engines:
    """Assigns each rank a part of an engine replica and experts, so that few bytes must be sent.

    Args:
        parts: Engine layout of each tensor-parallel rank, with experts in order.
        tensors: Tensors of the experts; None if a replica's ranks do not hold whole experts.
    """
    costs = Costs.of(sources, parts)
    linear = assign(sources, parts, domain_size, ranks=ranks, costs=costs)
    tp_ranks = map(linear.layout.tp_rank, range(len(sources)))
    of_ranks = [NOTHING if at is None else parts[at] for at in tp_ranks]
    in_order = Engines(linear, of_ranks, linear, costs)
    if tensors is None or linear.receive == 0:
        return in_order
    having = linear.layout.ranks
    search = _Search(sources, parts, tensors, having)
    places, maps = search.best(domain_of(having, domain_size or len(sources)))
    layout = replace(places, experts=tuple(maps)).on(having, len(sources))
    made: dict[tuple[int, tuple[int, ...]], RankLayout] = {}
    held = []
    for (_, tp_rank), experts in zip(map(layout.place, having), maps, strict=True):
        if (tp_rank, experts) not in made:
            made[tp_rank, experts] = with_experts(parts[tp_rank], tensors, experts)
        held.append(made[tp_rank, experts])
    dealt = evaluate_parts(sources, held, layout)
    if dealt.cost >= linear.cost:
        return in_order
    targets = dict(zip(having, held, strict=True))
    dealt_to = [targets.get(rank, NOTHING) for rank in range(len(sources))]
    return Engines(dealt, dealt_to, linear, costs)


class _Search:
    """Assigns parts and experts so that the worst rank lacks least, and then all ranks together."""

    def __init__(
        self,
        sources: Sequence[RankLayout],
        parts: Sequence[RankLayout],
        tensors: ExpertTensors,
        ranks: Sequence[int],
    ) -> None:
        dense = [_without_experts(part, tensors) for part in parts]
        self._missing = Costs.of(sources, dense).missing[list(ranks)]
        self._num_experts = tensors.num_experts
        found: dict[int, np.ndarray] = {}
        for source in (sources[rank] for rank in ranks):
            if id(source) not in found:
                found[id(source)] = self._held(source, tensors)
        self._held_by = np.array([found[id(sources[rank])] for rank in ranks])
        numbers: dict[bytes, int] = {}
        self._kinds = [numbers.setdefault(row.tobytes(), len(numbers)) for row in self._held_by]
        of_part = [region for region in parts[0].regions if tensors.expert(region.hf) is not None]
        self._share = sum(volume(region.hf_box) for region in of_part)
        self._tp = len(parts)
        self._maps: dict[tuple[int, ...], list[list[int]]] = {}

    def _held(self, source: RankLayout, tensors: ExpertTensors) -> np.ndarray:
        held = np.zeros(self._num_experts, np.int64)
        for region in source.regions:
            if (expert := tensors.expert(region.hf)) is not None:
                held[expert] += volume(region.hf_box)
        return held

    def best(self, domain_size: int | None) -> tuple[RolloutLayout, list[tuple[int, ...]]]:
        size = len(self._missing)
        unit, patterns = part_patterns(size, self._tp, domain_size)
        places: list[int] = []
        maps: list[tuple[int, ...]] = []
        known: dict[tuple[object, ...], tuple[list[int], list[tuple[int, ...]]]] = {}
        for first in range(0, size, unit):
            rows = slice(first, first + unit)
            key = (*self._kinds[rows], self._missing[rows].tobytes())
            if key not in known:
                tried = [self._tried(first, pattern) for pattern in patterns]
                _, number = min((cost, n) for n, (cost, _) in enumerate(tried))
                known[key] = patterns[number].tolist(), tried[number][1]
            places += known[key][0]
            maps += known[key][1]
        return numbered(places, unit, self._tp), maps

    def _tried(
        self, first: int, pattern: np.ndarray
    ) -> tuple[tuple[int, int], list[tuple[int, ...]]]:
        """Returns what the worst rank and all ranks lack with a pattern, and the ranks' experts."""
        members = [first + np.flatnonzero(pattern == place) for place in range(self._tp)]
        maps: list[tuple[int, ...]] = [()] * len(pattern)
        for replica in zip(*(ranks.tolist() for ranks in members), strict=True):
            lacking = self._missing[list(replica), range(self._tp)]
            key = (*(self._kinds[rank] for rank in replica), *lacking.tolist())
            if key not in self._maps:
                self._maps[key] = balanced_map(self._held_by[list(replica)], lacking)
            for rank, experts in zip(replica, self._maps[key], strict=True):
                maps[rank - first] = tuple(experts)
        rows = np.arange(first, first + len(pattern))
        pairs = zip(rows, maps, strict=True)
        kept = [int(self._held_by[row, list(own)].sum()) for row, own in pairs]
        lacked = (self._missing[rows, pattern] + self._share - np.array(kept)).tolist()
        return (max(lacked), sum(lacked)), maps


def _without_experts(part: RankLayout, tensors: ExpertTensors) -> RankLayout:
    regions = tuple(region for region in part.regions if tensors.expert(region.hf) is None)
    return replace(part, regions=regions)


def with_experts(part: RankLayout, tensors: ExpertTensors, experts: Sequence[int]) -> RankLayout:
    """Returns the layout with its experts replaced, in ascending order, by as many others."""
    of_region = [tensors.expert(region.hf) for region in part.regions]
    places = {
        old: new
        for old, new in zip(sorted({e for e in of_region if e is not None}), experts, strict=True)
    }
    regions = tuple(
        region if old is None else replace(region, hf=tensors.of_expert(region.hf, places[old]))
        for region, old in zip(part.regions, of_region, strict=True)
    )
    return replace(part, regions=regions)


def balanced_map(held: np.ndarray, lacking: np.ndarray) -> list[list[int]]:
    """Assigns each rank the same number of experts.

    First keeps as many elements as possible in place. Then swaps experts between pairs of ranks, so
    that the worst rank lacks fewer elements.

    Args:
        held: Number of elements of each expert (inner index) that each rank (outer index) holds.
        lacking: Number of elements apart from experts that each rank lacks.

    Returns:
        The experts of each rank, ascending; the linear map if no map is better.
    """
    columns, kind_of = np.unique(held, axis=1, return_inverse=True)
    # The shape of `kind_of` depends on numpy's version.
    dealt = _ExpertAssignment(columns, kind_of.reshape(-1))
    while (circle := _gaining_circle(dealt.costs())) is not None:
        dealt.give_on(circle)
    while dealt.relieve(lacking):
        pass
    return [sorted(experts) for experts in dealt.experts]


class _ExpertAssignment:
    """Experts of each rank, initially in order.

    `columns` has the number of elements that each rank (outer index) holds of an expert of each
    kind (inner index). `kind_of` has the kind of each expert.
    """

    def __init__(self, columns: np.ndarray, kind_of: np.ndarray) -> None:
        self._columns, self._kind_of = columns, kind_of
        num_ranks, each = len(columns), len(kind_of) // len(columns)
        self.experts = [list(range(rank * each, (rank + 1) * each)) for rank in range(num_ranks)]
        self._loss = columns[:, None, :] - columns[None, :, :]  # by giver, receiver, kind

    def _kinds(self, rank: int) -> np.ndarray:
        return np.unique(self._kind_of[self.experts[rank]])

    def costs(self) -> np.ndarray:
        return np.array(
            [self._loss[rank][:, self._kinds(rank)].min(1) for rank in range(len(self.experts))]
        )

    def give_on(self, circle: Sequence[int]) -> None:
        """Moves as many experts as possible around a cycle; each rank gives its cheapest kind."""
        pairs = list(zip(circle, (*circle[1:], circle[0]), strict=True))
        moved = []
        for giver, taker in pairs:
            kinds = self._kinds(giver)
            moved.append((giver, int(kinds[self._loss[giver, taker, kinds].argmin()]), taker))
        count = min(len(self._of_kind(giver, kind)) for giver, kind, _ in moved)
        self._move(moved, count)

    def _of_kind(self, rank: int, kind: int) -> list[int]:
        return [expert for expert in self.experts[rank] if self._kind_of[expert] == kind]

    def _move(self, moved: Sequence[tuple[int, int, int]], count: int = 1) -> None:
        given = [self._of_kind(giver, kind)[-count:] for giver, kind, _ in moved]
        for (giver, _, taker), experts in zip(moved, given, strict=True):
            self.experts[giver] = [e for e in self.experts[giver] if e not in experts]
            self.experts[taker] += experts

    def relieve(self, lacking: np.ndarray) -> bool:
        """Swaps an expert of the rank that lacks most elements with an expert of another rank.

        After the swap, the worse of both lacks the fewest elements. Returns False, and changes
        nothing, if no swap is an improvement.
        """
        columns = self._columns
        kept = [
            columns[rank, self._kind_of[experts]].sum() for rank, experts in enumerate(self.experts)
        ]
        lacks = lacking - np.array(kept)  # plus a constant that is the same for all ranks
        worst = int(lacks.argmax())
        found: list[tuple[tuple[int, int], tuple[tuple[int, int, int], ...]]] = []
        for other in range(len(columns)):
            if other == worst:
                continue
            mine, theirs = self._kinds(worst), self._kinds(other)
            # Outer index: the kind that `worst` gives. Inner index: the kind that it receives.
            own = lacks[worst] + columns[worst, mine, None] - columns[worst, theirs]
            its = lacks[other] + columns[other, theirs] - columns[other, mine, None]
            larger, both = np.maximum(own, its), own + its
            best = np.lexsort((both.ravel(), larger.ravel()))[0]
            give, take = divmod(int(best), len(theirs))
            exchange = (worst, int(mine[give]), other), (other, int(theirs[take]), worst)
            found.append(((int(larger[give, take]), int(both[give, take])), exchange))
        if not found:
            return False
        (larger_after, _), moved = min(found, key=lambda one: one[0])
        if larger_after >= lacks[worst]:
            return False
        self._move(moved)
        return True


def _gaining_circle(costs: np.ndarray) -> list[int] | None:
    """Returns a cycle of ranks that pass on experts at negative cost, or None (Bellman-Ford)."""
    num_ranks = len(costs)
    least, before, changed = np.zeros(num_ranks, np.int64), [0] * num_ranks, -1
    for _ in range(num_ranks):
        changed = -1
        for giver in range(num_ranks):
            for taker in range(num_ranks):
                if giver != taker and least[giver] + costs[giver, taker] < least[taker]:
                    least[taker] = least[giver] + costs[giver, taker]
                    before[taker], changed = giver, taker
        if changed < 0:
            return None
    for _ in range(num_ranks):  # walk back until the rank is on the cycle
        changed = before[changed]
    circle = [changed]
    while before[circle[-1]] != changed:
        circle.append(before[circle[-1]])
    return circle[::-1]
