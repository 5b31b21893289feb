"""Who sends what: items that several could send, dealt out so that the busiest sends least.

Pure, no torch. A deal is about items of one size that one set of receivers needs and any of one set
of senders could send. Each deal alone is poured onto its senders like water, given what the others
make them send; repeating that until nothing improves minimises the sum of the squared loads, and
with it, but for one item, the largest load (a convex function, minimised block by block).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

MAX_SWEEPS = 100


@dataclass
class Deal:
    """Items of one size that each receiver needs and each sender has.

    Args:
        receivers: each needs all of the items.
        senders: any of them may send any item, ascending.
        count: items a receiver needs.
        size: of one item.
        sent: items that each sender sends, over all receivers; set by `deal_out`.

    The senders in order serve the receivers in order, so that few pairs meet.
    """

    receivers: Sequence[int]
    senders: np.ndarray
    count: int
    size: int
    sent: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def total(self) -> int:
        """Items sent in all."""
        return self.count * len(self.receivers)

    def senders_to(self, position: int, items: np.ndarray | None = None) -> list[int]:
        """Returns who sends each of its items, or some of them, to the receiver at `position`."""
        items = (np.arange(self.count) if items is None else items) + position * self.count
        return self.senders[np.searchsorted(np.cumsum(self.sent), items, side="right")].tolist()

    def changes_to(self, position: int) -> np.ndarray:
        """Returns at which of its items another sends to the receiver at `position`; 0 and the end
        too.
        """
        stops = np.cumsum(self.sent) - position * self.count
        return np.unique(np.concatenate([[0], np.clip(stops, 0, self.count)]))

    def add_traffic(self, traffic: np.ndarray) -> None:
        """Adds what is sent to `traffic`, by sender (outer) and receiver (inner)."""
        stops = np.cumsum(self.sent)
        edges = np.union1d(stops, np.arange(len(self.receivers) + 1) * self.count)
        senders = self.senders[np.searchsorted(stops, edges[:-1], side="right")]
        receivers = np.asarray(self.receivers)[edges[:-1] // self.count]
        np.add.at(traffic, (senders, receivers), np.diff(edges) * self.size)


def deal_out(deals: Sequence[Deal], num_senders: int) -> np.ndarray:
    """Sets `sent` of every deal; returns what each sender sends altogether."""
    loads = np.zeros(num_senders, np.int64)
    order = sorted(range(len(deals)), key=lambda i: (len(deals[i].senders), -deals[i].size, i))
    open_deals = []
    for deal in (deals[i] for i in order):
        deal.sent = _poured(loads[deal.senders], deal.total, deal.size)
        loads[deal.senders] += deal.sent * deal.size
        if len(deal.senders) > 1:
            open_deals.append(deal)
    for _ in range(MAX_SWEEPS):
        improved = False
        for deal in open_deals:
            now = loads[deal.senders]
            without = now - deal.sent * deal.size
            sent = _poured(without, deal.total, deal.size)
            then = without + sent * deal.size
            changed = np.flatnonzero(then != now)
            pairs = zip(then[changed].tolist(), now[changed].tolist(), strict=True)
            if sum(new * new - old * old for new, old in pairs) < 0:  # exact: Python's integers
                deal.sent, improved = sent, True
                loads[deal.senders] = then
        if not improved:
            break
    return loads


def _poured(loads: np.ndarray, num_items: int, size: int) -> np.ndarray:
    """Returns how many of `num_items` items each sender adds to its load, the lowest filled up."""
    order = np.argsort(loads, kind="stable")
    low = loads[order]
    places = np.arange(1, len(low) + 1)
    poured = np.cumsum(low) + num_items * size  # the level times the number of those below it
    num = int(np.flatnonzero(low * places < poured)[-1]) + 1
    low = low[:num]
    items = (int(poured[num - 1]) - num * low) // (num * size)
    rest = num_items - int(items.sum())
    items[np.argsort(low + items * size, kind="stable")[:rest]] += 1
    found = np.zeros(len(loads), np.int64)
    found[order[:num]] = items
    return found
