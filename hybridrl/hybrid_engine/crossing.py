"""What crosses between nodes: each piece once to every node that needs it and has it on no rank.

It lands at one of the node's ranks that need it, chosen so that these receive alike, and goes on
from there to the others. Pure, no torch. Invariant: all ranks of a node that need a piece find the
same way of it, whatever the order in which each of them comes to it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hybridrl.hybrid_engine.deals import Deal, deal_out
from hybridrl.hybrid_engine.pieces import Group, Join, Wanted

# Groups whose ways are kept once found: those of several nodes.
KEPT_GROUPS = 4096


class Way(NamedTuple):
    """How a piece goes.

    Args:
        source: the rank that sends it.
        route: where it lands, then the ranks of that node to which it goes on.
        is_plain: all of the route are of one target class, and so come to their pieces in one
            order.
    """

    source: int
    route: tuple[int, ...]
    is_plain: bool


class _Pattern:
    """Nodes whose ranks have these target classes: what they want, numbered within each group."""

    def __init__(self, joined: Join, classes: Sequence[int]) -> None:
        self.classes = classes
        self.counts: Counter[Group] = Counter()
        self.places: dict[Wanted, tuple[Group, int]] = {}
        for key, group in joined.wanted_by(classes).items():
            self.places[key] = group, self.counts[group]
            self.counts[group] += 1

    def ranks(self, group: Group) -> list[int]:
        """Returns which of a node's ranks need what is in a group, counted from its first."""
        return [place for place, number in enumerate(self.classes) if number in group[1]]


class Crossings:
    """The pieces that cross, by node; `deals` are still to be dealt out before they have ways.

    Args:
        joined: what the targets need of whom.
        domain_size: ranks of one node, which are consecutive.
    """

    def __init__(self, joined: Join, domain_size: int) -> None:
        self._domain_size = domain_size
        self.deals: list[Deal] = []
        of_rank = joined.targets.of_rank
        starts = range(0, len(of_rank), domain_size)
        self._sent: list[dict[Group, tuple[Deal, int]]] = [{} for _ in starts]
        self._patterns: list[_Pattern] = []
        self._landings: dict[tuple[int, tuple[Group, ...]], dict[Group, Deal]] = {}
        self._landing_of: dict[int, dict[Group, Deal]] = {}  # by node: the keys above are long
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
                self._add_deal(joined, alike, group, count)

    def _add_deal(self, joined: Join, alike: Sequence[int], group: Group, count: int) -> None:
        owners = np.array(joined.owners(group[0]))
        owning = set((owners // self._domain_size).tolist())
        receivers = [node for node in alike if node not in owning]
        if receivers:
            deal = Deal(receivers, owners, count, joined.kinds[group[0]].volume)
            self.deals.append(deal)
            for position, node in enumerate(receivers):
                self._sent[node][group] = (deal, position)

    def way(self, rank: int, wanted: Wanted) -> Way:
        """Returns how a piece comes to the node of a rank that needs it."""
        node = rank // self._domain_size
        group, index = self._patterns[node].places[wanted]
        sources, routes = self._ways_of(node, group)
        return Way(sources[index], routes[index], len(group[1]) == 1)

    def streams(self) -> Counter[tuple[int, tuple[int, ...]]]:
        """Returns the elements that go from each source along each route."""
        found: Counter[tuple[int, tuple[int, ...]]] = Counter()
        for node, groups in enumerate(self._sent):
            for group, (deal, position) in groups.items():
                landing = self._landing(node)[group]
                edges = np.union1d(deal.changes_to(position), landing.changes_to(0))
                ways = zip(*self._find_ways(node, group, edges[:-1]), strict=True)
                for way, count in zip(ways, np.diff(edges).tolist(), strict=True):
                    found[way] += count * deal.size
        return found

    def digest(self) -> bytes:
        """Returns what all ways follow from, besides `deals`."""
        digest = hashlib.sha256()
        for node, groups in enumerate(self._sent):
            for group in groups:
                digest.update(repr((node, group)).encode())
                digest.update(self._landing(node)[group].sent.tobytes())
        return digest.digest()

    def _find_ways(
        self, node: int, group: Group, pieces: np.ndarray | None = None
    ) -> tuple[list[int], list[tuple[int, ...]]]:
        """Returns the sources and the routes of a group's pieces, or of some, by their numbers."""
        deal, position = self._sent[node][group]
        start = node * self._domain_size
        ranks = [start + place for place in self._patterns[node].ranks(group)]
        routes = {
            first - start: (first, *(rank for rank in ranks if rank != first)) for first in ranks
        }
        landing = self._landing(node)[group].senders_to(0, pieces)
        return deal.senders_to(position, pieces), [routes[place] for place in landing]

    def _landing(self, node: int) -> dict[Group, Deal]:
        """Returns at which of its ranks a node receives how many pieces; alike nodes do alike."""
        if node in self._landing_of:
            return self._landing_of[node]
        pattern, groups = self._patterns[node], self._sent[node]
        key = (id(pattern), tuple(groups))
        if key not in self._landings:
            self._landings[key] = {
                group: Deal([0], np.array(pattern.ranks(group)), deal.count, deal.size)
                for group, (deal, _) in groups.items()
            }
            deal_out(list(self._landings[key].values()), self._domain_size)
        self._landing_of[node] = self._landings[key]
        return self._landings[key]
