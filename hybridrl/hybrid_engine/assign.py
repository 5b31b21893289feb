"""Which rank generates with which part of which engine replica. Pure, no torch.

What a rank receives depends on its tensor-parallel rank alone. So an assignment is found as a
tensor-parallel rank for each rank, each equally often on a node; replicas are then formed of ranks
in ascending order. Best is the least largest receiver, then the least largest sender (spread over
the owners as a linear program would), then the least traffic. Exact for up to 8 ranks. In larger
worlds each node of up to 8 ranks is searched by itself, and HybridFlow's groups at regular
intervals (Sheng et al. 2025, "HybridFlow", section 5.3) compete with what that gives.

An engine's groups must ascend: torch sorts the ranks of a group, vLLM takes the order that it was
given. `is_ascending=False` tells what that rule costs; another order of the training axes
(`order_without_loss`) avoids the cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, permutations

import numpy as np

from hybridrl.config.rules import is_megatron_order
from hybridrl.hybrid_engine.pieces import join
from hybridrl.models.weights import RankLayout
from hybridrl.parallel.layout import AXES, RolloutLayout, TrainLayout

MAX_EXACT = 8
CHUNK = 4096  # candidates judged at once, which bounds memory


@dataclass(frozen=True)
class Assignment:
    """A rollout layout and its costs, in elements.

    Args:
        layout: which part of which replica each rank is.
        receive: most that one rank must receive.
        send: most that one rank must send, if sending is spread as well as it can be.
    """

    layout: RolloutLayout
    receive: int
    send: int

    @property
    def cost(self) -> tuple[int, int]:
        """What is to be small, the more important first."""
        return self.receive, self.send


def assign(
    sources: Sequence[RankLayout],
    parts: Sequence[RankLayout],
    domain_size: int | None = None,
    is_ascending: bool = True,
) -> Assignment:
    """Gives every rank its part of an engine replica.

    Args:
        sources: what each rank trains with.
        parts: what each tensor-parallel rank of the engine holds; their number divides the ranks'.
        domain_size: ranks of one node, which are consecutive; None: all are of one. A replica
            stays on one node if it fits, else on as few as it can.
        is_ascending: whether the ranks of a replica must ascend in tensor-parallel order.
    """
    size, tp = len(sources), len(parts)
    if tp == 1:
        return judge(sources, parts, RolloutLayout.consecutive(size, tp))
    costs = _Costs(sources, parts)
    unit = _unit(size, tp, domain_size or size)
    strides = [s for s in range(1, unit // tp + 1) if unit % (s * tp) == 0]
    candidates = [np.arange(size) // stride % tp for stride in strides]
    by_unit = costs.missing.reshape(-1, unit, tp)
    if unit <= MAX_EXACT:
        patterns = _patterns(unit, tp, is_ascending)
        if size == unit:
            candidates += list(patterns)
        else:
            candidates.append(np.concatenate([_least(patterns, part) for part in by_unit]))
    elif not is_ascending:
        candidates.append(np.concatenate([_matched(part) for part in by_unit]))
    return costs.best(np.array(candidates), unit)


def judge(
    sources: Sequence[RankLayout], parts: Sequence[RankLayout], layout: RolloutLayout
) -> Assignment:
    """Returns what a given layout costs."""
    places = np.array([[tp_rank for _, tp_rank in layout.assignment]])
    costs = _Costs(sources, parts)
    return Assignment(layout, int(costs.receive(places)[0]), int(costs.send(places)[0]))


def order_without_loss(
    train: TrainLayout,
    sources: Sequence[RankLayout],
    parts: Sequence[RankLayout],
    goal: Assignment,
    domain_size: int | None = None,
) -> str | None:
    """Returns an order of the training axes in which ascending groups cost no more than `goal`.

    Megatron takes it (`train.order`), and tensor-parallel groups stay on one node where they do in
    `train`. None: there is no such order.
    """
    node = domain_size or train.world_size

    def num_split(layout: TrainLayout) -> int:
        return sum(group[0] // node != group[-1] // node for group in layout.groups("tp"))

    tried = set()
    for axes in permutations(AXES):
        order = "-".join(axes).replace("cp", "cp-ep")
        if not is_megatron_order(order, train.pp, train.cp, train.ep):
            continue
        other = TrainLayout(
            train.world_size, train.tp, train.pp, train.cp, train.ep, train.vpp, order
        )
        places = tuple(other.coordinates(rank) for rank in range(train.world_size))
        if places in tried or num_split(other) > num_split(train):
            continue
        tried.add(places)
        moved = [sources[train.rank_at(**vars(place))] for place in places]
        if assign(moved, parts, domain_size).cost <= goal.cost:
            return order
    return None


class _Costs:
    """What tensor-parallel ranks cost each rank.

    Attributes:
        missing: elements that each rank (outer) must receive as each tensor-parallel rank (inner).
    """

    def __init__(self, sources: Sequence[RankLayout], parts: Sequence[RankLayout]) -> None:
        joined = join(sources, parts)
        owners: dict[tuple[int, ...], int] = {}
        of_kind = [owners.setdefault(kind.owners, len(owners)) for kind in joined.kinds]
        need = np.zeros((len(parts), len(owners)), np.int64)
        for part, number in enumerate(joined.targets.of_rank):
            for kind, pieces in joined.counts[number].items():
                need[part, of_kind[kind]] += pieces * joined.kinds[kind].volume
        holds = np.zeros((len(sources), len(owners)), bool)
        for classes, column in owners.items():
            for number in classes:
                holds[joined.sources.ranks[number], column] = True
        self.missing = ~holds @ need.T
        self._need, self._holds = need, holds

    def receive(self, candidates: np.ndarray) -> np.ndarray:
        """Returns, for rows of tensor-parallel ranks, what the fullest rank must receive."""
        return self.missing[np.arange(candidates.shape[1]), candidates].max(axis=1)

    def send(self, candidates: np.ndarray) -> np.ndarray:
        """Returns what the busiest rank must send.

        By duality of the linear program: what can come only from a set of ranks, over the size of
        that set; the largest. In large worlds the sets are those that share something; that is all
        where sets of owners are disjoint or within each other.
        """
        size = candidates.shape[1]
        if size <= MAX_EXACT:
            sets = np.arange(1, 1 << size)[:, None] >> np.arange(size) & 1 == 1
        else:
            sets = np.unique(np.concatenate([self._holds.T, np.ones((1, size), bool)]), axis=0)
        outside = (~sets).astype(np.float64) @ self._holds  # owners that a set leaves out
        share = (outside == 0) / sets.sum(axis=1, keepdims=True)
        found = []
        for start in range(0, len(candidates), CHUNK):
            demand = np.zeros((len(candidates[start : start + CHUNK]), self._need.shape[1]))
            for rank, places in enumerate(candidates[start : start + CHUNK].T):
                demand += (self._need * ~self._holds[rank])[places]
            found.append((demand @ share.T).max(axis=1))
        return np.ceil(np.concatenate(found) - 0.01)

    def best(self, candidates: np.ndarray, unit: int) -> Assignment:
        """Returns the cheapest; of equal ones that with the least traffic, then the first."""
        size, tp = self.missing.shape
        receive = self.receive(candidates)
        candidates = candidates[receive == receive.min()]
        send = self.send(candidates)
        candidates = candidates[send == send.min()]
        total = self.missing[np.arange(size), candidates].sum(axis=1)
        places = candidates[total.argmin()].tolist()
        counters = [[count(first * unit // tp) for _ in range(tp)] for first in range(size // unit)]
        pairs = ((next(counters[rank // unit][place]), place) for rank, place in enumerate(places))
        return Assignment(RolloutLayout(tp, tuple(pairs)), int(receive.min()), int(send.min()))


def _unit(size: int, tp: int, domain_size: int) -> int:
    """Returns the number of ranks, whole nodes, that replicas divide up among themselves."""
    whole_nodes = range(domain_size, size, domain_size)
    return next((n for n in whole_nodes if n % tp == 0 and size % n == 0), size)


@lru_cache
def _patterns(size: int, tp: int, is_ascending: bool) -> np.ndarray:
    """Returns every way to give each of `size` ranks a tensor-parallel rank, each equally often.

    Ascending groups exist where, up to any rank, no tensor-parallel rank was given more often than
    the one before it.
    """
    found = np.array(list(permutations(np.arange(size) % tp)), np.int8)
    if is_ascending:
        given = (found[:, :, None] == np.arange(tp)).cumsum(axis=1)
        found = found[(given[:, :, :-1] >= given[:, :, 1:]).all(axis=(1, 2))]
    return np.unique(found, axis=0)


def _least(patterns: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Returns the pattern with the least largest receiver, then with the least traffic."""
    each = missing[np.arange(len(missing)), patterns]
    return patterns[np.lexsort((each.sum(axis=1), each.max(axis=1)))[0]]


def _matched(missing: np.ndarray) -> np.ndarray:
    """Returns a tensor-parallel rank for each rank, each equally often, the largest cost least."""
    limits = np.unique(missing)
    first = bisect_left(limits, True, key=lambda limit: _matching(missing <= limit) is not None)
    return np.array(_matching(missing <= limits[first]))


def _matching(is_allowed: np.ndarray) -> list[int] | None:
    """Returns an allowed place for each rank, each place equally often; None: there is none."""
    size, tp = is_allowed.shape
    taken: list[list[int]] = [[] for _ in range(tp)]

    def give(rank: int, seen: set[int]) -> bool:
        for place in np.flatnonzero(is_allowed[rank]).tolist():
            if place in seen:
                continue
            seen.add(place)
            if len(taken[place]) < size // tp:
                taken[place].append(rank)
                return True
            for index, other in enumerate(taken[place]):
                if give(other, seen):
                    taken[place][index] = rank
                    return True
        return False

    if not all(give(rank, set()) for rank in range(size)):
        return None
    return [next(p for p in range(tp) if rank in taken[p]) for rank in range(size)]
