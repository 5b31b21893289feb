"""Both ways of copying blocks queue the same work, and the peer transport's waits are enough.

No device: what would be given to the driver is carried out on host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hybridrl.kernels import copy_engine
from hybridrl.kernels.copy_engine import BlockCopies, CompiledBlockCopies, block_table

from hybridrl.hybrid_engine.transports.peer import PeerTransport

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Timeline:
    """What is queued on streams, in the order in which the host queues it."""

    events: list[tuple[str, ...]] = field(default_factory=list)

    def stream(self, name: str) -> FakeStream:
        return FakeStream(name, self)

    def before(self, wanted: str) -> set[str]:
        """Returns all work that has ended when this work begins."""
        known: dict[str, set[str]] = {}
        for kind, stream, what in self.events:
            done = known.setdefault(stream, set())
            if kind == "wait":
                done |= known.get(what, set())
            elif what == wanted:
                return set(done)
            else:
                done.add(what)
        raise AssertionError(f"{wanted} was never queued")


@dataclass
class FakeStream:
    """Has what both ways ask of a stream."""

    name: str
    timeline: Timeline

    @property
    def cuda_stream(self) -> int:
        return sum(ord(letter) << 8 * i for i, letter in enumerate(self.name[:6]))

    def wait_stream(self, other: FakeStream) -> None:
        self.timeline.events.append(("wait", self.name, other.name))


def copy(dests: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
    for dest, source, size in zip(dests, sources, sizes, strict=True):
        ctypes.memmove(dest, source, size)


@pytest.fixture
def pairs() -> Pairs:
    """Blocks of several types and sizes, one inside a larger tensor."""
    around = torch.zeros(6, 8)
    return [
        (torch.arange(12, dtype=torch.int64), torch.zeros(12, dtype=torch.int64)),
        (torch.randn(2, 8), around[3:5]),
        (torch.randn(7).bfloat16(), torch.zeros(7).bfloat16()),
    ]


def compiled(pairs: Pairs, timeline: Timeline) -> Callable[..., None]:
    """The compiled way, its operation as csrc/block_copies.cpp reads its arguments."""
    names = {timeline.stream(name).cuda_stream: name for name in ("one", "other", "third")}

    def queue_blocks(table: torch.Tensor, stream: int, first: list[int], then: list[int]) -> None:
        assert table.dtype == torch.int64 and table.is_contiguous() and table.shape[0] == 3
        flat, count = table.flatten().tolist(), table.shape[1]
        assert len(first) % 2 == len(then) % 2 == 0
        for i in range(0, len(first), 2):
            timeline.events.append(("wait", names[first[i]], names[first[i + 1]]))
        if count:
            copy(flat[:count], flat[count : 2 * count], flat[2 * count :])
            timeline.events.append(("work", names[stream], f"{count} blocks"))
        for i in range(0, len(then), 2):
            timeline.events.append(("wait", names[then[i]], names[then[i + 1]]))

    return CompiledBlockCopies(pairs, queue_blocks).run


def by_ctypes(
    pairs: Pairs, timeline: Timeline, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """The way without a compiler, its driver's function as cuda.h describes it."""
    names = {timeline.stream(name).cuda_stream: name for name in ("one", "other", "third")}

    def call(dests: Any, sources: Any, sizes: Any, count: Any, *rest: Any) -> int:
        copy(list(dests), list(sources), list(sizes))
        assert count.value == len(dests) == len(sources) == len(sizes)
        timeline.events.append(("work", names[rest[-1].value], f"{count.value} blocks"))
        return 0

    monkeypatch.setattr(copy_engine, "_batch_call", lambda: (call, ()))
    return BlockCopies(pairs).run


@pytest.mark.parametrize("way", ["compiled", "ctypes"])
@pytest.mark.parametrize("is_empty", [False, True])
def test_blocks_arrive_between_the_waits(
    way: str, is_empty: bool, pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = Timeline()
    one, other, third = map(timeline.stream, ("one", "other", "third"))
    used = [] if is_empty else pairs
    sources = [source.clone() for source, _ in pairs]
    run = compiled(used, timeline) if way == "compiled" else by_ctypes(used, timeline, monkeypatch)
    run(one, [(one, other), (third, other)], [(other, one)])
    queued = [] if is_empty else [("work", "one", "3 blocks")]
    assert timeline.events == [
        ("wait", "one", "other"),
        ("wait", "third", "other"),
        *queued,
        ("wait", "other", "one"),
    ]
    for expected, (source, dest) in zip(sources, pairs, strict=True):
        assert torch.equal(source, expected)
        assert torch.equal(dest, expected) != is_empty


@pytest.mark.parametrize(
    ("source", "dest"),
    [
        (torch.zeros(4, 6).t(), torch.zeros(6, 4)),
        (torch.zeros(4, 6), torch.zeros(4, 8)[:, :6]),
        (torch.zeros(4), torch.zeros(4, dtype=torch.float64)),
    ],
)
def test_what_is_no_block_is_refused(source: torch.Tensor, dest: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="both must be contiguous and of equal size"):
        block_table([(source, dest)])


def test_a_refusal_of_the_driver_is_raised(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_engine, "_batch_call", lambda: (lambda *_: 1, ()))
    with pytest.raises(RuntimeError, match="3 blocks: CUDA error 1"):
        BlockCopies(pairs).run(Timeline().stream("one"))


def test_the_peer_transport_waits_for_what_it_needs_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeline = Timeline()
    engines, beside, current = map(timeline.stream, ("engines", "beside", "current"))
    active = [current]

    class Batch:
        num_launches = 1

        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, stream: Any, first: Any = (), then: Any = ()) -> None:
            for waiting, awaited in first:
                waiting.wait_stream(awaited)
            timeline.events.append(("work", stream.name, self.name))
            for waiting, awaited in then:
                waiting.wait_stream(awaited)

    def kernel(name: str) -> Callable[[], None]:
        return lambda: timeline.events.append(("work", active[-1].name, name))

    @contextmanager
    def on(stream: FakeStream) -> Any:
        active.append(stream)
        yield
        active.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    transport: Any = object.__new__(PeerTransport)
    transport._engines, transport._beside = engines, beside
    transport._batches = [Batch(name) for name in ("to staging", "direct", "last")]
    transport._local, transport._unpack = kernel("local"), kernel("unpack")
    kernel("before")()
    transport._run_blocks()
    kernel("after")()
    assert timeline.before("to staging") == timeline.before("local") == {"before"}
    assert timeline.before("direct") == {"before", "to staging"}
    assert timeline.before("unpack") == {"before", "to staging"}
    assert timeline.before("last") == {"before", "to staging", "direct", "unpack"}
    all_work = {"before", "to staging", "direct", "local", "unpack", "last"}
    assert timeline.before("after") == all_work


def test_graphs_of_a_sync_are_made_before_its_barrier() -> None:
    """To make one waits for the device, which would wait at the barrier for a rank that is lost."""
    did: list[str] = []
    transport: Any = object.__new__(PeerTransport)
    transport._prepare = lambda: did.append("prepared")
    work = SimpleNamespace(capture=lambda: did.append("captured"))
    transport._repeated = [work, work]
    transport._cut_up = lambda: did.append("barrier and cut-up")
    transport._run_blocks = lambda: did.append("blocks")
    transport._plan = SimpleNamespace(streams=["one"])
    transport._memory = SimpleNamespace(barrier=lambda: did.append("barrier"))
    transport._traffic = "traffic"
    assert transport.run() == "traffic"
    assert did == [
        "prepared",
        *["captured"] * 2,
        "barrier and cut-up",
        "blocks",
        "barrier",
    ]
