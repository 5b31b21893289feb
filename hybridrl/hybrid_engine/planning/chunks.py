"""Splits a plan's streams into exchanges that fit into the staging buffers. Pure, no torch.

Every stream is spread evenly over the same number of chunks, so that all links are busy in every
exchange. Sender and receiver derive the content of a message from the sizes of the streams and from
their own operations. A rank forwards received data in the next exchange, while the next chunk
arrives. Invariant: in one exchange no rank sends or receives more than the capacity, and no rank
sends more than one message to the same peer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from hybridrl.hybrid_engine.planning.plan import CopyOp, Plan, PlanError, Stream
from hybridrl.models.boxes import moved, sizes, span_boxes, volume, whole

# Streams are split at multiples of a power of two, of at most MAX_GRAIN elements, so that parts
# stay aligned; smaller streams are not split. Rounding up increases the elements that a rank sends
# or receives by at most the capacity divided by SLACK.
MAX_GRAIN = 1 << 16
SLACK = 8


@dataclass(frozen=True)
class Part:
    """The elements of one stream that one message contains.

    `pieces` are this rank's operations in order, or parts of them; empty if the rank forwards
    elements from the previous exchange.
    """

    stream: Stream
    elements: int
    pieces: tuple[CopyOp, ...]


@dataclass(frozen=True)
class Exchange:
    """One rank's messages in one exchange: for each peer, the parts of the message in order."""

    sends: dict[int, list[Part]] = field(default_factory=dict)
    receives: dict[int, list[Part]] = field(default_factory=dict)


def schedule_exchanges(
    plan: Plan,
    rank: int,
    capacity_bytes: int,
    direct: Collection[CopyOp] = (),
    direct_elements: Mapping[Stream, int] | None = None,
) -> list[Exchange]:
    """Returns a rank's messages in every exchange; all ranks have the same number of exchanges.

    Args:
        capacity_bytes: Maximum that a rank sends, and that it receives, in one exchange.
        direct, direct_elements: The rank's operations that bypass the staging buffers, and the
            number of elements that bypass them in each stream, including streams of other ranks.

    Raises PlanError if the capacity is too small for one element of each of a rank's streams.
    """
    gone = direct_elements or {}
    streams = {s: n - gone.get(s, 0) for s, n in plan.streams.items() if n > gone.get(s, 0)}
    num_chunks, grain = _division(streams, plan.itemsize, capacity_bytes)
    is_passed_on = any(len(stream.route) > 1 for stream in streams)
    exchanges = [Exchange() for _ in range(num_chunks + is_passed_on)]
    lines = _lines(plan, streams, rank, direct)
    for stream, line in lines.items():
        chunks = range(num_chunks + 1)
        edges = [streams[stream] * i // num_chunks // grain * grain for i in chunks]
        edges[-1] = streams[stream]
        spans = [(i, start, stop) for i, (start, stop) in enumerate(pairwise(edges))]
        for sender, receiver in stream.hops:
            if rank not in (sender, receiver):
                continue
            is_late = sender != stream.source
            for chunk, start, stop in spans:
                if start == stop:
                    continue
                exchange = exchanges[chunk + is_late]
                pieces = () if is_late and rank == sender else line.cut(start, stop)
                peer, messages = (
                    (receiver, exchange.sends) if rank == sender else (sender, exchange.receives)
                )
                messages.setdefault(peer, []).append(Part(stream, stop - start, tuple(pieces)))
    return exchanges


def _division(streams: Mapping[Stream, int], itemsize: int, capacity_bytes: int) -> tuple[int, int]:
    """Returns the number of chunks, and the grain at multiples of which streams are split."""
    if not streams:
        return 0, 1
    hops = [(*hop, elements) for stream, elements in streams.items() for hop in stream.hops]
    senders, receivers, totals = np.array(hops, np.int64).T
    capacity = capacity_bytes // itemsize
    most = int(max(np.bincount(senders).max(), np.bincount(receivers).max()))
    if most > capacity:
        raise PlanError(
            f"staging has {capacity_bytes} bytes per direction, but a rank's {most} streams "
            f"need at least {most * itemsize}: raise rollout.staging_mib"
        )
    grain = min(1 << max(capacity // (SLACK * most), 1).bit_length() - 1, MAX_GRAIN)

    def fits(num_chunks: int) -> bool:
        parts = np.minimum(totals, -(-totals // num_chunks) + grain - 1)
        return max(np.bincount(ends, parts).max() for ends in (senders, receivers)) <= capacity

    most_chunks = range(1, int(totals.max()) + 1)
    return most_chunks[bisect_left(most_chunks, True, key=fits)], grain


@dataclass(frozen=True)
class _Line:
    """A stream's operations in order; `stops` has the number of elements up to the end of each."""

    ops: Sequence[CopyOp]
    stops: Sequence[int]

    def cut(self, start: int, stop: int) -> Iterator[CopyOp]:
        """Yields the operations between two elements of the stream, splitting them if needed."""
        for number in range(bisect_right(self.stops, start), len(self.ops)):
            op = self.ops[number]
            first = self.stops[number] - volume(op.dest_box)
            if first >= stop:
                return
            span = max(start - first, 0), min(stop, self.stops[number]) - first
            shape = sizes(op.dest_box)
            for box in span_boxes(shape, *span):
                yield op._replace(
                    source_box=moved(box, whole(shape), op.source_box),
                    dest_box=moved(box, whole(shape), op.dest_box),
                )


def _lines(
    plan: Plan, streams: Mapping[Stream, int], rank: int, direct: Collection[CopyOp]
) -> dict[Stream, _Line]:
    """Returns the streams that a rank sends, forwards or receives, in the order of `streams`."""
    own = [stream for stream in streams if rank in (stream.source, *stream.route)]
    found: dict[Stream, list[CopyOp]] = {stream: [] for stream in own}
    for op in plan.ops[rank]:
        if op.source_rank != rank and op not in direct:
            found[op.stream].append(op)
    for dest in dict.fromkeys(stream.route[0] for stream in own if stream.source == rank):
        for op in plan.ops_between(rank, dest):
            if op.route[0] == dest and op not in direct:
                found[op.stream].append(op)
    lines = {}
    for stream, ops in found.items():
        # All ranks of a route receive the same slices of the source, but may list them in different
        # orders.
        ops.sort(key=lambda op: (op.source, op.source_box))
        lines[stream] = _Line(ops, list(accumulate(volume(op.dest_box) for op in ops)))
        if lines[stream].stops[-1:] != [streams[stream]]:
            raise PlanError(f"rank {rank}: {stream} differs in size from its operations")
    return lines
