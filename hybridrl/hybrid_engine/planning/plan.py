"""Plans the copy operations between ranks that fill the target layouts from the source layouts.

Pure and deterministic, no torch: every rank computes the same plan from the same layouts. Elements
that a rank already holds are copied locally. A rank receives every other slice once, from an owner
on the same node if there is one. Owners are chosen so that the busiest owner sends as little as
possible (senders.py). A slice that no rank of a node owns is sent to the node once; the rank on
which it lands forwards it to the others (crossing.py). Invariant: the operations write every
element of every target region exactly once (proof.py proves this).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from hybridrl.hybrid_engine.planning.crossing import Crossings, Way
from hybridrl.hybrid_engine.planning.pieces import Join, PlanError, join
from hybridrl.hybrid_engine.planning.senders import Demand, balance_senders
from hybridrl.hybrid_engine.planning.wire_elements import wire_layouts
from hybridrl.models.boxes import Box, intersection, moved, volume
from hybridrl.models.weights import RankLayout, Region

__all__ = ["CopyOp", "Plan", "PlanError", "PlannedOps", "Stream", "plan_reshard"]

# Maximum number of ranks whose operations are cached. A small job caches all ranks. In a large job,
# a rank needs the operations of only a few others, and those of a thousand ranks would fill its
# memory.
KEPT_RANKS = 64


class Stream(NamedTuple):
    """Path of elements, in order: from `source` to the first rank of `route`, then onwards."""

    source: int
    route: tuple[int, ...]

    @property
    def hops(self) -> list[tuple[int, int]]:
        first, *others = self.route
        return [(self.source, first), *((first, rank) for rank in others)]


class CopyOp(NamedTuple):
    """Copy from `source_box` of `source` on `source_rank` to `dest_box` of `dest` on `dest_rank`.

    The elements are sent along `stream`. If both ranks are the same, the copy is local.
    """

    source_rank: int
    dest_rank: int
    source: str
    source_box: Box
    dest: str
    dest_box: Box
    route: tuple[int, ...]

    @property
    def stream(self) -> Stream:
        return Stream(self.source_rank, self.route)


@dataclass(frozen=True)
class Plan:
    """Copy operations of all ranks.

    Args:
        ops: For each destination rank, its operations, including local copies.
        itemsize: Size in bytes of an element as it is sent.
        weight_itemsize: Size in bytes of an ordinary weight as it is sent; None for the size of one
            element.
    """

    ops: Sequence[tuple[CopyOp, ...]]
    itemsize: int
    domain_size: int
    weight_itemsize: int | None = None

    def ops_between(self, source_rank: int, dest_rank: int) -> Sequence[CopyOp]:
        if isinstance(self.ops, PlannedOps):
            return self.ops.made(dest_rank, source_rank)
        return [op for op in self.ops[dest_rank] if op.source_rank == source_rank]

    @property
    def world_size(self) -> int:
        return len(self.ops)

    @cached_property
    def streams(self) -> dict[Stream, int]:
        """Number of elements of each stream between ranks, in the order within a message."""
        if isinstance(self.ops, PlannedOps):
            found = self.ops.streams()
        else:
            found = Counter()
            for op in (op for ops in self.ops for op in ops):
                if op.source_rank != op.dest_rank == op.route[0]:
                    found[op.stream] += volume(op.dest_box)
        return {stream: found[stream] for stream in sorted(found)}

    @cached_property
    def traffic(self) -> np.ndarray:
        """Bytes that each rank (outer) sends to each rank (inner), or copies to itself."""
        sent = np.zeros((self.world_size, self.world_size), np.int64)
        for stream, elements in self.streams.items():
            for hop in stream.hops:
                sent[hop] += elements
        if isinstance(self.ops, PlannedOps):
            np.fill_diagonal(sent, self.ops.needed() - sent.sum(axis=0))
        else:
            for rank, ops in enumerate(self.ops):
                sent[rank, rank] = _elements(op for op in ops if op.source_rank == rank)
        return sent * self.itemsize

    @property
    def send_bytes(self) -> tuple[int, ...]:
        return tuple((self.traffic.sum(axis=1) - self.traffic.diagonal()).tolist())

    @property
    def receive_bytes(self) -> tuple[int, ...]:
        return tuple((self.traffic.sum(axis=0) - self.traffic.diagonal()).tolist())

    @property
    def local_bytes(self) -> tuple[int, ...]:
        return tuple(self.traffic.diagonal().tolist())

    @property
    def messages(self) -> tuple[int, ...]:
        """For each rank, the number of ranks that send to it: its messages per exchange."""
        counts = np.count_nonzero(self.traffic, axis=0) - (self.traffic.diagonal() > 0)
        return tuple(counts.tolist())

    def hash(self) -> str:
        """Returns a digest of all operations; ranks with the same plan have the same digest."""
        digest = hashlib.sha256(str(self.itemsize).encode())
        if isinstance(self.ops, PlannedOps):
            digest.update(self.ops.digest())
        else:
            for ops in self.ops:
                digest.update(repr([tuple(op) for op in ops]).encode())
        return digest.hexdigest()


class PlannedOps(Sequence[tuple[CopyOp, ...]]):
    """Operations of each destination rank, computed on access."""

    def __init__(self, joined: Join, domain_size: int) -> None:
        self.joined = joined
        self._crossings = Crossings(joined, domain_size)
        self._demands: list[Demand] = []
        self._demands_of: list[dict[int, tuple[Demand, int]]] = [{} for _ in joined.targets.of_rank]
        for target, counts in enumerate(joined.counts):
            for kind, count in counts.items():
                self._add_demands(target, kind, count, domain_size)
        balance_senders([*self._crossings.demands, *self._demands], len(self))
        self._held: list[dict[str, list[Region]]] = []
        for layout in joined.sources.layouts:
            self._held.append({})
            for region in layout.regions:
                self._held[-1].setdefault(region.hf, []).append(region)
        self._ops_of = lru_cache(KEPT_RANKS)(self.made)

    def _add_demands(self, target: int, kind: int, count: int, domain_size: int) -> None:
        """Adds the demands of a target class for pieces of a kind with owners on the same node."""
        holders, size = self.joined.kinds[kind]
        classes = self.joined.sources.of_rank
        dests = [rank for rank in self.joined.targets.ranks[target] if classes[rank] not in holders]
        owners = np.array(self.joined.owners(kind))
        owning = set((owners // domain_size).tolist())
        for node in sorted({rank // domain_size for rank in dests} & owning):
            receivers = [rank for rank in dests if rank // domain_size == node]
            demand = Demand(receivers, owners[owners // domain_size == node], count, size)
            self._demands.append(demand)
            for position, rank in enumerate(receivers):
                self._demands_of[rank][kind] = (demand, position)

    def __len__(self) -> int:
        return len(self._demands_of)

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return [self[i] for i in range(*rank.indices(len(self)))]
        return self._ops_of(range(len(self))[rank])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(self.digest())

    def made(self, rank: int, only_from: int | None = None) -> tuple[CopyOp, ...]:
        """Returns a rank's operations in order, by default from all source ranks."""
        source_class = self.joined.sources.of_rank
        senders = {
            kind: iter(demand.senders_to(position))
            for kind, (demand, position) in self._demands_of[rank].items()
        }
        found: list[CopyOp] = []
        is_next = False  # whether this piece directly follows the last operation
        for region, kind, wanted in self.joined.wants(self.joined.targets.of_rank[rank]):
            if source_class[rank] in self.joined.kinds[kind].owners:
                way = Way(rank, (rank,), is_plain=True)
            elif kind in senders:
                way = Way(next(senders[kind]), (rank,), is_plain=True)
            else:
                way = self._crossings.way(rank, wanted)
            if only_from not in (None, way.source):
                is_next = False
                continue
            hf, box, _ = wanted
            source = _holder(self._held[source_class[way.source]][hf], box)
            source_box = moved(box, source.hf_box, source.local_box)
            dest_box = moved(box, region.hf_box, region.local_box)
            op = CopyOp(
                way.source, rank, source.local, source_box, region.local, dest_box, way.route
            )
            # All ranks of a route must receive the elements in the same order, so operations are
            # merged only if these ranks have the same regions.
            if is_next and way.is_plain:
                _append(found, op)
            else:
                found.append(op)
            is_next = True
        return tuple(found)

    def streams(self) -> Counter[Stream]:
        found = Counter({Stream(*key): n for key, n in self._crossings.streams().items()})
        near = np.zeros((len(self), len(self)), np.int64)
        for demand in self._demands:
            demand.add_traffic(near)
        for sender, receiver in np.argwhere(near).tolist():
            found[Stream(sender, (receiver,))] += int(near[sender, receiver])
        return found

    def needed(self) -> np.ndarray:
        kinds, classes = self.joined.kinds, self.joined.targets
        needed = [sum(n * kinds[k].volume for k, n in c.items()) for c in self.joined.counts]
        return np.array([needed[number] for number in classes.of_rank], np.int64)

    def digest(self) -> bytes:
        """Returns a digest of the layouts and the senders, which determine all operations."""
        digest = hashlib.sha256()
        for classes in (self.joined.sources, self.joined.targets):
            digest.update(repr(classes.of_rank).encode())
            for layout in classes.layouts:
                for r in layout.regions:
                    digest.update(repr((r.hf, r.hf_box, r.local, r.local_box)).encode())
        for demand in (*self._crossings.demands, *self._demands):
            digest.update(repr((demand.receivers, demand.count, demand.size)).encode())
            digest.update(demand.senders.tobytes() + demand.send_counts.tobytes())
        digest.update(self._crossings.digest())
        return digest.digest()


def plan_reshard(
    sources: Sequence[RankLayout],
    targets: Sequence[RankLayout],
    itemsize: int,
    domain_size: int | None = None,
    weight_itemsize: int | None = None,
) -> Plan:
    """Plans how the target tensors are filled from the source tensors.

    Args:
        sources, targets: Layouts that each rank holds and needs; some targets may be empty.
        itemsize: Size in bytes of an element as it is sent; a value may consist of several.
        weight_itemsize: Size in bytes of a weight as it is sent, except for tensors that have a
            fixed size (wire_elements.py); None for the size of one element.

    Raises PlanError, naming tensor and elements, if a target needs elements that no source holds.
    """
    if len(sources) != len(targets):
        raise PlanError(f"{len(sources)} source layouts, but {len(targets)} target layouts")
    domain_size = domain_size or max(len(sources), 1)
    ends = (wire_layouts(one, itemsize, weight_itemsize or itemsize) for one in (sources, targets))
    return Plan(PlannedOps(join(*ends), domain_size), itemsize, domain_size, weight_itemsize)


def _elements(ops: Iterable[CopyOp]) -> int:
    return sum(volume(op.dest_box) for op in ops)


def _holder(regions: Sequence[Region], box: Box) -> Region:
    if len(regions) == 1:
        return regions[0]
    return next(r for r in regions if intersection(r.hf_box, box) == box)


def _append(ops: list[CopyOp], op: CopyOp) -> None:
    """Appends `op`, merged with the last operation if both of their ends are adjacent."""
    if ops:
        last = ops[-1]
        same = (last.stream, last.source, last.dest) == (op.stream, op.source, op.dest)
        dim = _adjacent(last.dest_box, op.dest_box) if same else None
        if dim is not None and dim == _adjacent(last.source_box, op.source_box):
            source_box = _extended(last.source_box, op.source_box, dim)
            dest_box = _extended(last.dest_box, op.dest_box, dim)
            ops[-1] = last._replace(source_box=source_box, dest_box=dest_box)
            return
    ops.append(op)


def _adjacent(one: Box, other: Box) -> int | None:
    """Returns the dim along which `other` directly follows `one`; None if they are not adjacent."""
    differing = [dim for dim, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    if len(differing) == 1 and one[differing[0]][1] == other[differing[0]][0]:
        return differing[0]
    return None


def _extended(one: Box, other: Box, dim: int) -> Box:
    return (*one[:dim], (one[dim][0], other[dim][1]), *one[dim + 1 :])
