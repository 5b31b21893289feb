"""Which rank generates with which part of which engine replica. Pure, no torch.

The bytes that a rank receives depend on its tensor-parallel rank in the engine alone. So the search
gives every rank a tensor-parallel rank, each equally often on a node, and forms replicas of ranks
in ascending order. Candidates are compared by the bytes of the rank that receives most, then by
those of the rank that sends most (where senders are balanced by a linear program), then by all
bytes. The search is exact for up to 8 ranks. In larger worlds each node of up to 8 ranks is
searched by itself, and HybridFlow's groups at regular intervals (Sheng et al. 2025, "HybridFlow",
section 5.3) are candidates too.

An engine's groups must ascend: torch sorts the ranks of a group, vLLM takes the order that it was
given. `is_ascending=False` tells what that rule costs; another order of the training axes
(`choose_order`) often avoids the cost.
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
CHUNK = 4096  # candidates evaluated at once, which bounds memory
# Share of the received bytes that an order must save to spread data-parallel groups on more nodes.
WORTH_SPREADING = 0.1


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
    ranks: Sequence[int] | None = None,
    costs: Costs | None = None,
) -> Assignment:
    """Gives every rank its part of an engine replica, or some ranks; the others then have none.

    Args:
        sources: what each rank trains with; nothing, for some.
        parts: what each tensor-parallel rank of the engine holds; their number divides the ranks'.
        domain_size: ranks of one node, which are consecutive; None: all are of one. A replica
            stays on one node if it fits, else on as few as it can.
        is_ascending: whether the ranks of a replica must ascend in tensor-parallel order.
        ranks: that have engines, ascending; None: all.
        costs: of these sources and parts, where they are known already.
    """
    costs = costs or Costs.of(sources, parts)
    if ranks is None or len(ranks) == len(sources):
        return _assign(costs, domain_size, is_ascending)
    own_node = domain_of(ranks, domain_size or len(sources))
    found = _assign(costs.moved(ranks), own_node, is_ascending)
    return replace(found, layout=found.layout.on(ranks, len(sources)))


def domain_of(ranks: Sequence[int], domain_size: int) -> int | None:
    """Returns how many of these ranks, ascending, are on each node; None: not equally many.

    Args:
        domain_size: consecutive ranks of the world that are one node.
    """
    nodes = Counter(rank // domain_size for rank in ranks)
    return nodes[ranks[0] // domain_size] if len(set(nodes.values())) == 1 else None


def evaluate_layout(
    sources: Sequence[RankLayout],
    parts: Sequence[RankLayout],
    layout: RolloutLayout,
    costs: Costs | None = None,
) -> Assignment:
    """Returns a given layout with its costs; engines may be on some of the ranks."""
    return _evaluate((costs or Costs.of(sources, parts)).moved(layout.ranks), layout)


def evaluate_parts(
    sources: Sequence[RankLayout], parts: Sequence[RankLayout], layout: RolloutLayout
) -> Assignment:
    """Returns a layout with its costs where each rank's part is its own.

    Args:
        sources: what each rank trains with.
        parts: what each rank that has an engine holds of it, in order; the same object for equal
            ones saves comparing them.
        layout: which part of which replica that is.
    """
    numbers = {id(part): number for number, part in enumerate({id(p): p for p in parts}.values())}
    distinct = list({id(part): part for part in parts}.values())
    costs = Costs.of(sources, distinct).moved(layout.ranks)
    places = np.array([[numbers[id(part)] for part in parts]])
    return Assignment(layout, int(costs.receive(places)[0]), int(costs.send(places)[0]))


def missing_elements(sources: Sequence[RankLayout], parts: Sequence[RankLayout]) -> np.ndarray:
    """Returns the elements that each source rank (outer) lacks of each part (inner)."""
    return Costs.of(sources, parts).missing


def part_patterns(size: int, tp: int, domain_size: int | None) -> tuple[int, list[np.ndarray]]:
    """Returns how many consecutive ranks divide up replicas among themselves, and the ways to give
    them tensor-parallel ranks: of up to 8 ranks all, else at regular intervals.

    Args:
        size: number of ranks that have engines.
        tp: ranks of a replica.
        domain_size: ranks of a node; None: all are of one.
    """
    unit = _unit(size, tp, domain_size or size)
    if unit <= MAX_EXACT:
        return unit, list(_patterns(unit, tp, True))
    return unit, [np.arange(unit) // stride % tp for stride in _strides(unit, tp)]


@dataclass(frozen=True)
class OrderChoice:
    """An order of the training axes, and what it saves; in elements.

    Args:
        order: in Megatron's notation.
        receive: most that one rank receives in this order.
        default_receive: most that one rank receives in Megatron's own order.
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
    """Finds the order of the training axes in which the rank that receives most receives least.

    Only orders that Megatron takes, and that keep training's messages where they are in Megatron's
    own: tensor- and context-parallel groups span no more nodes, and data-parallel groups that lie
    on one node stay on one. Those that span several anyway may span more of them if that saves a
    tenth (WORTH_SPREADING), since gradients then have fewer network cards. Of equal orders
    Megatron's own wins, then the one whose busiest rank sends least, then the first in a fixed
    list.

    Args:
        train: the layout, in Megatron's own order.
        sources: what each rank trains with in that order.
        parts: what each tensor-parallel rank of the engine holds.
        domain_size: ranks of one node, which are consecutive; None: all are of one.
    """
    costs = Costs.of(sources, parts)
    own = _assign(costs, domain_size)
    choice, least = train.order, own.cost
    bound = int(costs.missing.min(axis=1).max())  # each rank as the part that it lacks least of
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
    """Returns for each rank of `other` the rank of `train`, of the same sizes, at its place."""
    where = (other.coordinates(rank) for rank in range(train.world_size))
    return [train.rank_at(**vars(place)) for place in where]


def _other_orders(train: TrainLayout) -> Iterator[str]:
    """Yields the orders that Megatron takes; expert parallelism is beside context parallelism."""
    for axes in permutations(AXES):
        order = "-".join(axes).replace("cp", "cp-ep")
        if order != train.order and is_megatron_order(order, train.pp, train.cp, train.ep):
            yield order


def _num_nodes(layout: TrainLayout, axis: str, node: int) -> list[int]:
    """Returns on how many nodes the ranks of each group of an axis are."""
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
    """What tensor-parallel ranks cost each rank.

    Args:
        of_rank: class of each rank, of those that hold the same.
        holds: whether each rank (outer) holds pieces of each set of owners (inner).
        need: elements that each tensor-parallel rank (outer) needs of each set (inner).
        senders: as `holds`, of all ranks that send, which may be more; None: the same.

    Attributes:
        missing: elements that each rank (outer) must receive as each tensor-parallel rank (inner).
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
        """Returns what `parts` cost ranks that hold `sources`."""
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
        """Returns the costs of ranks that hold what `ranks` name here; all ranks of here send."""
        of_rank = [self.of_rank[rank] for rank in ranks]
        return Costs(of_rank, self._holds[list(ranks)], self._need, self._senders)

    def receive(self, candidates: np.ndarray) -> np.ndarray:
        """Returns, for rows of tensor-parallel ranks, what the fullest rank must receive."""
        return self.missing[np.arange(candidates.shape[1]), candidates].max(axis=1)

    def send(self, candidates: np.ndarray) -> np.ndarray:
        """Returns what the busiest rank must send.

        By duality of the linear program: what can come only from a set of ranks, over the size of
        that set; the largest. In large worlds the sets are those that share something; that is all
        where sets of owners are disjoint or within each other.
        """
        size = len(self._senders)
        if size <= MAX_EXACT:
            sets = np.arange(1, 1 << size)[:, None] >> np.arange(size) & 1 == 1
        else:
            sets = np.unique(np.concatenate([self._senders.T, np.ones((1, size), bool)]), axis=0)
        outside = (~sets).astype(np.float64) @ self._senders  # owners that a set leaves out
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
        layout = numbered(candidates[total.argmin()].tolist(), unit, tp)
        return Assignment(layout, int(receive.min()), int(send.min()))


def numbered(places: Sequence[int], unit: int, tp: int) -> RolloutLayout:
    """Returns the layout of ranks with these tensor-parallel ranks; replicas are of ascending ranks
    within each `unit` of them.
    """
    counters = [[count(first // tp) for _ in range(tp)] for first in range(0, len(places), unit)]
    pairs = ((next(counters[rank // unit][place]), place) for rank, place in enumerate(places))
    return RolloutLayout(tp, tuple(pairs))


def _strides(unit: int, tp: int) -> list[int]:
    """Returns the intervals at which the ranks of a replica may lie in a unit."""
    return [s for s in range(1, unit // tp + 1) if unit % (s * tp) == 0]


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
