"""Routes pieces that must be sent between nodes.

A piece is sent to a node once if some ranks of the node need it and no rank of the node holds it.
The piece lands on one of the ranks that need it, and this rank forwards it to the others. The
landing ranks are chosen so that they receive equal amounts. Pure, no torch. Invariant: all ranks of
a node compute the same `Way` for a piece, regardless of the order in which they request ways.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hybridrl.hybrid_engine.planning.pieces import Join, ReceiverGroup, Wanted
from hybridrl.hybrid_engine.planning.senders import Demand, balance_senders

# Maximum number of receiver groups, over all nodes, whose ways are cached.
KEPT_GROUPS = 4096

Landings = dict[ReceiverGroup, Demand]
"""Landing ranks of receiver groups; `send_counts` counts the pieces that land on each rank."""


class Way(NamedTuple):
    """The ranks that send, receive and forward a piece.

    Args:
        route: The rank on which the piece lands, then the ranks of its node to which it is
            forwarded.
        is_plain: Whether all ranks of the route have the same target class and so list pieces in
            the same order.
    """

    source: int
    route: tuple[int, ...]
    is_plain: bool


class _Pattern:
    """The pieces that a node with these target classes needs, numbered within receiver groups."""

    def __init__(self, joined: Join, classes: Sequence[int]) -> None:
        self.classes = classes
        self.counts: Counter[ReceiverGroup] = Counter()
        self.places: dict[Wanted, tuple[ReceiverGroup, int]] = {}
        for key, group in joined.wanted_by(classes).items():
            self.places[key] = group, self.counts[group]
            self.counts[group] += 1

    def ranks(self, group: ReceiverGroup) -> list[int]:
        """Returns the ranks that need a group's pieces, relative to the node's first rank."""
        return [place for place, number in enumerate(self.classes) if number in group.targets]


class Crossings:
    """The pieces that are sent to each node from other nodes.

    `balance_senders(demands)` must run before `way`, `streams` or `digest` is called.
    """

    def __init__(self, joined: Join, domain_size: int) -> None:
        self._domain_size = domain_size
        self.demands: list[Demand] = []
        of_rank = joined.targets.of_rank
        starts = range(0, len(of_rank), domain_size)
        self._sent: list[dict[ReceiverGroup, tuple[Demand, int]]] = [{} for _ in starts]
        self._patterns: list[_Pattern] = []
        self._landings: dict[tuple[int, tuple[ReceiverGroup, ...]], Landings] = {}
        # Landings by node: a shortcut, because the keys of `_landings` are long.
        self._landing_of: dict[int, Landings] = {}
        self._ways_of = lru_cache(KEPT_GROUPS)(self._find_ways)
        if len(starts) < 2:
            return
        found: dict[tuple[int, ...], _Pattern] = {}
        for start in starts:
            classes = tuple(of_rank[start : start + domain_size])
            if classes not in found:
                found[classes] = _Pattern(joined, classes)
            self._patterns.append(found[classes])
        for pattern in found.values():
            alike = [node for node, other in enumerate(self._patterns) if other is pattern]
            for group, count in pattern.counts.items():
                self._add_demand(joined, alike, group, count)

    def _add_demand(
        self, joined: Join, alike: Sequence[int], group: ReceiverGroup, count: int
    ) -> None:
        owners = np.array(joined.owners(group.kind))
        owning = set((owners // self._domain_size).tolist())
        receivers = [node for node in alike if node not in owning]
        if receivers:
            demand = Demand(receivers, owners, count, joined.kinds[group.kind].volume)
            self.demands.append(demand)
            for position, node in enumerate(receivers):
                self._sent[node][group] = (demand, position)

    def way(self, rank: int, wanted: Wanted) -> Way:
        """Returns the `Way` by which a piece reaches the node of a rank that needs it."""
        node = rank // self._domain_size
        group, index = self._patterns[node].places[wanted]
        sources, routes = self._ways_of(node, group)
        return Way(sources[index], routes[index], len(group.targets) == 1)

    def streams(self) -> Counter[tuple[int, tuple[int, ...]]]:
        """Returns the number of elements that are sent from each source along each route."""
        found: Counter[tuple[int, tuple[int, ...]]] = Counter()
        for node, groups in enumerate(self._sent):
            for group, (demand, position) in groups.items():
                landing = self._landing(node)[group]
                edges = np.union1d(demand.edges_to(position), landing.edges_to(0))
                ways = zip(*self._find_ways(node, group, edges[:-1]), strict=True)
                for way, count in zip(ways, np.diff(edges).tolist(), strict=True):
                    found[way] += count * demand.size
        return found

    def digest(self) -> bytes:
        """Returns a digest of everything that determines the ways, apart from `demands`."""
        digest = hashlib.sha256()
        for node, groups in enumerate(self._sent):
            for group in groups:
                digest.update(repr((node, group)).encode())
                digest.update(self._landing(node)[group].send_counts.tobytes())
        return digest.digest()

    def _find_ways(
        self, node: int, group: ReceiverGroup, pieces: np.ndarray | None = None
    ) -> tuple[list[int], list[tuple[int, ...]]]:
        """Returns source and route of each piece of a node's group, or of some pieces only."""
        demand, position = self._sent[node][group]
        start = node * self._domain_size
        ranks = [start + place for place in self._patterns[node].ranks(group)]
        routes = {
            first - start: (first, *(rank for rank in ranks if rank != first)) for first in ranks
        }
        landing = self._landing(node)[group].senders_to(0, pieces)
        return demand.senders_to(position, pieces), [routes[place] for place in landing]

    def _landing(self, node: int) -> Landings:
        """Returns the ranks on which a node's pieces land; equal nodes share one result."""
        if node in self._landing_of:
            return self._landing_of[node]
        pattern, groups = self._patterns[node], self._sent[node]
        key = (id(pattern), tuple(groups))
        if key not in self._landings:
            self._landings[key] = {
                group: Demand([0], np.array(pattern.ranks(group)), demand.count, demand.size)
                for group, (demand, _) in groups.items()
            }
            balance_senders(list(self._landings[key].values()), self._domain_size)
        self._landing_of[node] = self._landings[key]
        return self._landings[key]
