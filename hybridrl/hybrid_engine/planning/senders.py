"""Chooses a sender for each item so that the busiest sender sends as little as possible.

Pure, no torch. A demand consists of items of one size, all of which every receiver needs and every
sender can send. A single demand is spread over its senders by water-filling on top of the loads
from the other demands. Repeating this for each demand until nothing improves minimises the sum of
the squared loads (block coordinate descent on a convex function). This also minimises the largest
load, to within the size of one item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

MAX_SWEEPS = 100


@dataclass
class Demand:
    """Items of one size that all receivers need and all senders hold.

    The receivers' items are listed one receiver after another, and each sender sends a contiguous
    range of this list, so that few pairs of ranks exchange messages.

    Args:
        receivers, senders: Ranks that need all of the items, and ranks that hold all of them;
            senders ascend.
        send_counts: Number of items that each sender sends to all receivers together; set by
            `balance_senders`.
    """

    receivers: Sequence[int]
    senders: np.ndarray
    count: int
    size: int
    send_counts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def total(self) -> int:
        """Number of items sent to all receivers together."""
        return self.count * len(self.receivers)

    def senders_to(self, position: int, items: np.ndarray | None = None) -> list[int]:
        """Returns the sender of each item, or of some items, for the receiver at a position."""
        items = (np.arange(self.count) if items is None else items) + position * self.count
        stops = np.cumsum(self.send_counts)
        return self.senders[np.searchsorted(stops, items, side="right")].tolist()

    def edges_to(self, position: int) -> np.ndarray:
        """Returns 0, the item indices at which a receiver's sender changes, and `count`."""
        stops = np.cumsum(self.send_counts) - position * self.count
        return np.unique(np.concatenate([[0], np.clip(stops, 0, self.count)]))

    def add_traffic(self, traffic: np.ndarray) -> None:
        """Adds the demand's elements to `traffic`, which has shape (senders, receivers)."""
        stops = np.cumsum(self.send_counts)
        edges = np.union1d(stops, np.arange(len(self.receivers) + 1) * self.count)
        senders = self.senders[np.searchsorted(stops, edges[:-1], side="right")]
        receivers = np.asarray(self.receivers)[edges[:-1] // self.count]
        np.add.at(traffic, (senders, receivers), np.diff(edges) * self.size)


def balance_senders(demands: Sequence[Demand], num_senders: int) -> np.ndarray:
    """Sets `send_counts` of every demand; returns all elements of each sender (num_senders,)."""
    loads = np.zeros(num_senders, np.int64)
    with_choice = []
    for demand in sorted(demands, key=lambda one: (len(one.senders), -one.size)):
        demand.send_counts = _water_filled(loads[demand.senders], demand.total, demand.size)
        loads[demand.senders] += demand.send_counts * demand.size
        if len(demand.senders) > 1:
            with_choice.append(demand)
    for _ in range(MAX_SWEEPS):
        improved = False
        for demand in with_choice:
            now = loads[demand.senders]
            without = now - demand.send_counts * demand.size
            counts = _water_filled(without, demand.total, demand.size)
            then = without + counts * demand.size
            changed = np.flatnonzero(then != now)
            pairs = zip(then[changed].tolist(), now[changed].tolist(), strict=True)
            if sum(new * new - old * old for new, old in pairs) < 0:  # exact: Python integers
                demand.send_counts, improved = counts, True
                loads[demand.senders] = then
        if not improved:
            break
    return loads


def _water_filled(loads: np.ndarray, num_items: int, size: int) -> np.ndarray:
    order = np.argsort(loads, kind="stable")
    low = loads[order]
    places = np.arange(1, len(low) + 1)
    filled = np.cumsum(low) + num_items * size  # level times the number of senders below it
    num = int(np.flatnonzero(low * places < filled)[-1]) + 1
    low = low[:num]
    items = (int(filled[num - 1]) - num * low) // (num * size)
    rest = num_items - int(items.sum())
    items[np.argsort(low + items * size, kind="stable")[:rest]] += 1
    found = np.zeros(len(loads), np.int64)
    found[order[:num]] = items
    return found
