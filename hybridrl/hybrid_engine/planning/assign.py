"""Assigns each rank a replica and a tensor-parallel rank in it. Pure, no torch.

The bytes that a rank receives depend only on its tensor-parallel rank in the engine. The search
therefore assigns every rank a tensor-parallel rank, each the same number of times on a node, and
then forms replicas from ranks in ascending order. Candidates are compared by the bytes that the
busiest receiver receives, then by the bytes that the busiest sender sends (with senders balanced by
a linear program), then by the total over all ranks. The search is exact for up to 8 ranks. In
larger jobs each node of up to 8 ranks is searched separately, and HybridFlow's groups at regular
intervals (Sheng et al. 2025, "HybridFlow", section 5.3) are additional candidates.

The ranks of an engine's process group must ascend, because torch sorts a group's ranks but vLLM
uses them in the given order. `is_ascending=False` drops this rule, to show how many bytes it costs.
Another order of the training axes (`choose_order`) often avoids the cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, permutations

import numpy as np

from hybridrl.config.rules import is_megatron_order
from hybridrl.hybrid_engine.planning.pieces import join
from hybridrl.models.weights import RankLayout
from hybridrl.parallel.layout import AXES, RolloutLayout, TrainLayout

MAX_EXACT = 8
CHUNK = 4096  # candidates that are evaluated together, to limit memory
# Share of the received bytes that an order must save to spread data-parallel groups further.
WORTH_SPREADING = 0.1


@dataclass(frozen=True)
class Assignment:
    """A rollout layout and its costs, in elements.

    `receive` is what the busiest receiver receives, `send` what the busiest sender sends, with
    senders balanced.
    """

    layout: RolloutLayout
    receive: int
    send: int

    @property
    def cost(self) -> tuple[int, int]:
        """Costs to minimise, the more important one first."""
        return self.receive, self.send


def assign(
    sources: Sequence[RankLayout],
    parts: Sequence[RankLayout],
    domain_size: int | None = None,
    is_ascending: bool = True,
    ranks: Sequence[int] | None = None,
    costs: Costs | None = None,
) -> Assignment:
    """Assigns each of the given ranks a replica and a tensor-parallel rank in it.

    Args:
        parts: Engine layout of each tensor-parallel rank. The number of ranks must be a multiple of
            the number of parts.
        domain_size: Number of consecutive ranks on one node; None if all are on one node. A replica
            is placed on one node if it fits, otherwise on as few nodes as possible.
        is_ascending: Whether the ranks of a replica must ascend in tensor-parallel order.
    """
    costs = costs or Costs.of(sources, parts)
    if ranks is None or len(ranks) == len(sources):
        return _assign(costs, domain_size, is_ascending)
    own_node = domain_of(ranks, domain_size or len(sources))
    found = _assign(costs.moved(ranks), own_node, is_ascending)
    return replace(found, layout=found.layout.on(ranks, len(sources)))


def domain_of(ranks: Sequence[int], domain_size: int) -> int | None:
    """Returns how many of these ascending ranks are on each node; None if the numbers differ."""
    nodes = Counter(rank // domain_size for rank in ranks)
    return nodes[ranks[0] // domain_size] if len(set(nodes.values())) == 1 else None


def evaluate_layout(
    sources: Sequence[RankLayout],
    parts: Sequence[RankLayout],
    layout: RolloutLayout,
    costs: Costs | None = None,
) -> Assignment:
    return _evaluate((costs or Costs.of(sources, parts)).moved(layout.ranks), layout)


def evaluate_parts(
    sources: Sequence[RankLayout], parts: Sequence[RankLayout], layout: RolloutLayout
) -> Assignment:
    """Returns a given layout with its costs; parts may differ between replicas.

    `parts` has the engine layout of each rank with an engine, in order. Equal layouts should be one
    object, which saves comparisons.
    """
    numbers = {id(part): number for number, part in enumerate({id(p): p for p in parts}.values())}
    distinct = list({id(part): part for part in parts}.values())
    costs = Costs.of(sources, distinct).moved(layout.ranks)
    places = np.array([[numbers[id(part)] for part in parts]])
    return Assignment(layout, int(costs.receive(places)[0]), int(costs.send(places)[0]))


def part_patterns(size: int, tp: int, domain_size: int | None) -> tuple[int, list[np.ndarray]]:
    """Returns the number of ranks in a unit, which consists of whole replicas, and the candidates.

    A candidate is a pattern that assigns each rank of a unit a tensor-parallel rank. For units of
    up to 8 ranks all patterns are returned, for larger units only patterns with regular intervals.
    """
    unit = _unit(size, tp, domain_size or size)
    if unit <= MAX_EXACT:
        return unit, list(_patterns(unit, tp, True))
    return unit, [np.arange(unit) // stride % tp for stride in _strides(unit, tp)]


@dataclass(frozen=True)
class OrderChoice:
    """An order of the training axes, in Megatron's notation, and its cost, in elements.

    `receive` is what the busiest receiver receives, `default_receive` what it receives in
    Megatron's default order.
    """

    order: str
    receive: int
    default_receive: int


def choose_order(
    train: TrainLayout,
    sources: Sequence[RankLayout],
    parts: Sequence[RankLayout],
    domain_size: int | None = None,
) -> OrderChoice:
    """Finds the order of the training axes with which the busiest receiver receives the least.

    Candidates are orders that Megatron accepts and that do not spread training's messages over more
    nodes: tensor- and context-parallel groups may span no more nodes than in Megatron's default
    order, and data-parallel groups on a single node must stay on a single node. Data-parallel
    groups that span several nodes may span more nodes only if that saves a tenth of the bytes
    (WORTH_SPREADING), because gradients are then sent over fewer network cards. Between equal
    orders, Megatron's default order is preferred, then the order whose busiest sender sends least,
    then the first order in a fixed list.
    """
    costs = Costs.of(sources, parts)
    own = _assign(costs, domain_size)
    choice, least = train.order, own.cost
    bound = int(costs.missing.min(axis=1).max())  # received even if each rank had its cheapest part
    if own.receive == bound:
        return OrderChoice(choice, own.receive, own.receive)
    node = domain_size or train.world_size
    num_nodes = {axis: _num_nodes(train, axis, node) for axis in ("tp", "cp", "dp")}
    found = {tuple(costs.of_rank): own}
    for order in _other_orders(train):
        other = replace(train, order=order)
        spans = {axis: _num_nodes(other, axis, node) for axis in num_nodes}
        if any(sum(spans[axis]) > sum(num_nodes[axis]) for axis in ("tp", "cp")):
            continue
        if max(num_nodes["dp"]) == 1 < max(spans["dp"]):
            continue
        moved = costs.moved(ranks_moved(train, other))
        key = tuple(moved.of_rank)
        if key not in found:
            found[key] = _assign(moved, domain_size)
        is_spread = sum(spans["dp"]) > sum(num_nodes["dp"])
        limit = own.receive * (1 - WORTH_SPREADING) if is_spread else own.receive
        if found[key].receive < limit and found[key].cost < least:
            choice, least = order, found[key].cost
    return OrderChoice(choice, least[0], own.receive)


def ranks_moved(train: TrainLayout, other: TrainLayout) -> list[int]:
    where = (other.coordinates(rank) for rank in range(train.world_size))
    return [train.rank_at(**vars(place)) for place in where]


def _other_orders(train: TrainLayout) -> Iterator[str]:
    """Yields the other orders that Megatron accepts; `ep` always follows `cp`."""
    for axes in permutations(AXES):
        order = "-".join(axes).replace("cp", "cp-ep")
        if order != train.order and is_megatron_order(order, train.pp, train.cp, train.ep):
            yield order


def _num_nodes(layout: TrainLayout, axis: str, node: int) -> list[int]:
    return [len({rank // node for rank in group}) for group in layout.groups(axis)]


def _assign(costs: Costs, domain_size: int | None, is_ascending: bool = True) -> Assignment:
    size, tp = costs.missing.shape
    if tp == 1:
        return _evaluate(costs, RolloutLayout.consecutive(size, tp))
    unit = _unit(size, tp, domain_size or size)
    candidates = [np.arange(size) // stride % tp for stride in _strides(unit, tp)]
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


def _evaluate(costs: Costs, layout: RolloutLayout) -> Assignment:
    places = np.array([[layout.tp_rank(rank) for rank in layout.ranks]])
    return Assignment(layout, int(costs.receive(places)[0]), int(costs.send(places)[0]))


class Costs:
    """Costs of assigning any tensor-parallel rank to any rank, in elements.

    Args:
        of_rank: Class of each rank; ranks in the same class hold the same elements.
        holds: Whether a rank (outer index) holds the pieces that belong to a set of owners (inner
            index).
        need: Number of elements that a tensor-parallel rank (outer index) needs from a set of
            owners (inner index).
        senders: Like `holds`, but for all ranks that send; None if these are the same ranks.

    Attributes:
        missing: Number of elements that a rank (outer index) must receive if it becomes a
            tensor-parallel rank (inner index).
    """

    def __init__(
        self,
        of_rank: Sequence[int],
        holds: np.ndarray,
        need: np.ndarray,
        senders: np.ndarray | None = None,
    ) -> None:
        self.of_rank, self._holds, self._need = of_rank, holds, need
        self._senders = holds if senders is None else senders
        self.missing = ~holds @ need.T

    @classmethod
    def of(cls, sources: Sequence[RankLayout], parts: Sequence[RankLayout]) -> Costs:
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
        return cls(joined.sources.of_rank, holds, need)

    def moved(self, ranks: Sequence[int]) -> Costs:
        of_rank = [self.of_rank[rank] for rank in ranks]
        return Costs(of_rank, self._holds[list(ranks)], self._need, self._senders)

    def receive(self, candidates: np.ndarray) -> np.ndarray:
        return self.missing[np.arange(candidates.shape[1]), candidates].max(axis=1)

    def send(self, candidates: np.ndarray) -> np.ndarray:
        """Returns for each candidate how many elements its busiest sender must send at least.

        By duality this is the maximum, over all sets of ranks, of the elements that only the set
        holds divided by its size. In large jobs only the sets of owners and the set of all ranks
        are tried, which is exact if sets of owners are disjoint or nested.
        """
        size = len(self._senders)
        if size <= MAX_EXACT:
            sets = np.arange(1, 1 << size)[:, None] >> np.arange(size) & 1 == 1
        else:
            sets = np.unique(np.concatenate([self._senders.T, np.ones((1, size), bool)]), axis=0)
        outside = (~sets).astype(np.float64) @ self._senders  # number of owners outside the set
        share = (outside == 0) / sets.sum(axis=1, keepdims=True)
        found = []
        for start in range(0, len(candidates), CHUNK):
            demand = np.zeros((len(candidates[start : start + CHUNK]), self._need.shape[1]))
            for rank, places in enumerate(candidates[start : start + CHUNK].T):
                demand += (self._need * ~self._holds[rank])[places]
            found.append((demand @ share.T).max(axis=1))
        return np.ceil(np.concatenate(found) - 0.01)

    def best(self, candidates: np.ndarray, unit: int) -> Assignment:
        """Returns the cheapest candidate; ties go to the least traffic, then to the first."""
        size, tp = self.missing.shape
        receive = self.receive(candidates)
        candidates = candidates[receive == receive.min()]
        send = self.send(candidates)
        candidates = candidates[send == send.min()]
        total = self.missing[np.arange(size), candidates].sum(axis=1)
        layout = numbered(candidates[total.argmin()].tolist(), unit, tp)
        return Assignment(layout, int(receive.min()), int(send.min()))


def numbered(places: Sequence[int], unit: int, tp: int) -> RolloutLayout:
    """Returns the layout with these tensor-parallel ranks; replicas' ranks ascend in each unit."""
    counters = [[count(first // tp) for _ in range(tp)] for first in range(0, len(places), unit)]
    pairs = ((next(counters[rank // unit][place]), place) for rank, place in enumerate(places))
    return RolloutLayout(tp, tuple(pairs))


def _strides(unit: int, tp: int) -> list[int]:
    """Returns the possible intervals between a replica's ranks within a unit."""
    return [s for s in range(1, unit // tp + 1) if unit % (s * tp) == 0]


def _unit(size: int, tp: int, domain_size: int) -> int:
    """Returns the smallest number of ranks that consists of whole nodes and of whole replicas."""
    whole_nodes = range(domain_size, size, domain_size)
    return next((n for n in whole_nodes if n % tp == 0 and size % n == 0), size)


@lru_cache
def _patterns(size: int, tp: int, is_ascending: bool) -> np.ndarray:
    """Returns every way to assign `size` ranks a tensor-parallel rank each, all equally often.

    A pattern allows ascending groups if, among the first n ranks for any n, no tensor-parallel rank
    occurs more often than the next lower one.
    """
    found = np.array(list(permutations(np.arange(size) % tp)), np.int8)
    if is_ascending:
        given = (found[:, :, None] == np.arange(tp)).cumsum(axis=1)
        found = found[(given[:, :, :-1] >= given[:, :, 1:]).all(axis=(1, 2))]
    return np.unique(found, axis=0)


def _least(patterns: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Returns the pattern whose busiest receiver receives least, then the least total traffic."""
    each = missing[np.arange(len(missing)), patterns]
    return patterns[np.lexsort((each.sum(axis=1), each.max(axis=1)))[0]]


def _matched(missing: np.ndarray) -> np.ndarray:
    """Assigns tensor-parallel ranks, each equally often, so that the largest cost is minimal."""
    limits = np.unique(missing)
    first = bisect_left(limits, True, key=lambda limit: _matching(missing <= limit) is not None)
    return np.array(_matching(missing <= limits[first]))


def _matching(is_allowed: np.ndarray) -> list[int] | None:
    """Assigns allowed tensor-parallel ranks, each equally often; None if that is impossible."""
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
