"""Which pieces of an engine sleep, wake up and are lent to training. The driver is a fake."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from fake_driver import FakeDriver

from hybridrl.hybrid_engine.memory.lending import LentMemory
from hybridrl.rollout.common.engine_memory import KV_CACHE, WEIGHTS, EngineMemory, blocks_in_use
from hybridrl.rollout.vllm.memory import Allocation
from hybridrl.rollout.vllm.start import caches_of

MIB = 1 << 20
BASE = 1 << 30


@dataclass
class Span:
    """Has what is asked of a parameter: where it lies."""

    start: int
    nbytes: int

    def data_ptr(self) -> int:
        return self.start


class Case:
    """Pieces as vLLM keeps them, mapped, with a place for each handle."""

    def __init__(self, *parts: tuple[str, int, float, float], padded: int = 0) -> None:
        """parts: tag, MiB, and MiB of its start that are in use, and those of them that a parameter
        or a cache has. The last `padded` parts have parameters that updates write in part.
        """
        self.driver = FakeDriver()
        self.handles = (ctypes.c_uint64 * len(parts))()
        self.pieces, blocks, tensors = [], [], []
        for number, (tag, mib, used, covered) in enumerate(parts):
            address, size = BASE + number * 1024 * MIB, mib * MIB
            self.handles[number] = self.driver.adopt(address, size)
            place = ctypes.addressof(self.handles) + 8 * number
            self.pieces.append(Allocation(address, size, tag, place, SimpleNamespace()))
            blocks += [(address, address + int(used * MIB))] if used else []
            tensors.append(Span(address, int(covered * MIB)))
        self.blocks = blocks
        end = len(parts) - padded
        self.memory = EngineMemory(self.driver, self.pieces, blocks, tensors[:end], tensors[end:])  # type: ignore[arg-type]
        self.driver.calls.clear()

    def mapped(self) -> list[int]:
        """Indices of pieces that are mapped where vLLM has them, to the handles it keeps."""
        found = []
        for number, piece in enumerate(self.pieces):
            if piece.address in self.driver.mapped:
                assert self.driver.mapped[piece.address] == (piece.handle, piece.num_bytes)
                assert piece.address in self.driver.allowed
                found.append(number)
            assert getattr(piece.record, "is_asleep", False) == (number not in found)
        return found


PARTS = (
    (WEIGHTS, 40, 40.0, 40.0),
    (WEIGHTS, 20, 18.0, 18.0),
    (WEIGHTS, 20, 19.0, 18.0),  # in its 19th MiB is something that no update writes
    (KV_CACHE, 30, 28.5, 28.5),
)


def test_engine_sleeps_as_a_whole_and_wakes_up_by_tag() -> None:
    case = Case(*PARTS)
    for _ in range(3):
        assert case.mapped() == [0, 1, 2, 3]
        case.memory.sleep()
        assert case.mapped() == [] and not case.driver.sizes
        case.memory.sleep()  # of a sleeping engine nothing is given back twice
        case.memory.wake_up(WEIGHTS)
        assert case.mapped() == [0, 1, 2]
        case.memory.wake_up(KV_CACHE)


@pytest.mark.parametrize("tag", [WEIGHTS, KV_CACHE])
def test_what_lies_beside_weights_and_caches_keeps_its_content(tag: str) -> None:
    """vLLM 0.26 has tables of addresses beside the cache; without them kernels write anywhere."""
    case = Case((WEIGHTS, 40, 40.0, 40.0), (tag, 20, 19.0, 18.0), (KV_CACHE, 30, 30.0, 30.0))

    def table() -> torch.Tensor:
        return case.driver.tensor(case.pieces[1].address + 18 * MIB, MIB)

    for turn in range(1, 4):
        table().fill_(turn)  # it changes while the engine is awake
        case.memory.sleep()
        case.memory.sleep()  # reads nothing: there is no memory to read
        case.memory.wake_up(WEIGHTS)
        case.memory.wake_up(KV_CACHE)
        assert table().eq(turn).all()
    table().fill_(9)
    case.memory.wake_up(WEIGHTS)  # of an engine that is awake: an update while nothing sleeps
    case.memory.wake_up(KV_CACHE)
    assert table().eq(9).all()


def test_a_piece_that_is_mostly_something_else_stays() -> None:
    case = Case((WEIGHTS, 40, 40.0, 19.0), (KV_CACHE, 30, 30.0, 30.0))
    case.memory.sleep()
    assert case.mapped() == [0] and "tensor 1" not in case.driver.calls
    assert [one.num_bytes for one in case.memory.lend(60 * MIB)] == [30 * MIB]


def test_a_piece_without_tensors_is_given_back_once_and_for_good() -> None:
    case = Case((WEIGHTS, 40, 40.0, 40.0), (WEIGHTS, 20, 0.0, 0.0), (KV_CACHE, 30, 30.0, 30.0))
    for _ in range(2):
        assert case.mapped() == [0, 2]
        case.memory.sleep()
        assert case.mapped() == [] and not case.driver.sizes
        case.memory.wake_up(WEIGHTS)
        case.memory.wake_up(KV_CACHE)
    case.memory.sleep()
    assert [one.num_bytes for one in case.memory.lend(90 * MIB)] == [40 * MIB, 30 * MIB]


def test_a_padded_parameter_sleeps_and_is_neither_kept_nor_lent() -> None:
    case = Case((WEIGHTS, 40, 40.0, 40.0), (WEIGHTS, 30, 30.0, 30.0), padded=1)
    case.memory.sleep()
    assert case.mapped() == [] and case.driver.calls == ["wait", "release", "release"]
    assert [one.num_bytes for one in case.memory.lend(70 * MIB)] == [40 * MIB]


@pytest.mark.parametrize(
    ("wanted", "lent"),
    # Piece 2 holds a tensor that no update writes.
    [(0, []), (10, [1]), (35, [0]), (60, [0, 1]), (61, [0, 1, 3]), (500, [0, 1, 3])],
)
def test_engine_lends_weights_that_updates_write_and_then_the_cache(
    wanted: int, lent: list[int]
) -> None:
    case = Case(*PARTS)
    used = [40.0, 18.0, 19.0, 28.5]  # MiB of tensors
    assert case.memory.released_bytes == 0
    case.memory.sleep()
    assert case.memory.released_bytes == sum(used) * MIB
    found = case.memory.lend(wanted * MIB)
    asleep = sum(size for number, size in enumerate(used) if number not in lent)
    assert case.memory.released_bytes == asleep * MIB
    assert case.mapped() == lent
    assert sorted(piece.handle for piece in found) == sorted(case.pieces[i].handle for i in lent)
    assert case.memory.lends_weights == bool(found)


def test_engine_that_keeps_weights_lends_only_its_cache() -> None:
    case = Case(*PARTS)
    case.memory.sleep()
    (found,) = case.memory.lend(500 * MIB, keeps_weights=True)
    assert found.handle == case.pieces[3].handle and not case.memory.lends_weights


def test_lent_pieces_are_the_same_memory_in_both_phases_and_the_rest_comes_and_goes() -> None:
    case = Case(*PARTS)
    case.memory.sleep()
    lent = LentMemory(case.driver, 75 * MIB, case.memory.lend(75 * MIB))
    handles = [case.pieces[i].handle for i in (0, 1, 3)]
    least = sum(case.driver.sizes.values())
    for _ in range(100):
        lent.release()
        case.memory.wake_up(WEIGHTS)
        case.memory.wake_up(KV_CACHE)
        assert case.mapped() == [0, 1, 2, 3]
        case.driver.calls.clear()
        case.memory.clear_lent()
        assert case.driver.calls == [f"tensor {handles[2]}"]  # the cache's, weights are written
        case.memory.sleep()
        lent.restore()
        assert [case.pieces[i].handle for i in (0, 1, 3)] == handles
        assert case.mapped() == [0, 1, 3] and sum(case.driver.sizes.values()) == least
    lent.close()
    assert set(case.driver.mapped) == {case.pieces[i].address for i in (0, 1, 3)}


def test_overlapping_and_interrupted_parameters_are_not_taken_for_covering() -> None:
    case = Case((WEIGHTS, 2, 2.0, 2.0), (WEIGHTS, 20, 16.0, 0.0))
    begin = case.pieces[1].address
    gap = [Span(begin, 10 * MIB), Span(begin, 11 * MIB), Span(begin + 12 * MIB, 4 * MIB)]
    whole = [*gap, Span(begin + 10 * MIB, 3 * MIB)]
    for spans, lent in ((gap, []), (whole, [20 * MIB])):
        memory = EngineMemory(case.driver, case.pieces[1:], case.blocks, spans)  # type: ignore[arg-type]
        memory.sleep()
        assert [one.num_bytes for one in memory.lend(20 * MIB)] == lent
        memory.wake_up(WEIGHTS)


def test_engine_does_not_lend_what_it_uses() -> None:
    case = Case(*PARTS)
    with pytest.raises(RuntimeError, match="only while it sleeps"):
        case.memory.lend(MIB)


def test_blocks_in_use_are_those_of_this_device_that_hold_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = ("active_allocated", "inactive", "active_pending_free")
    segments = [
        {
            "device": device,
            "address": start,
            "blocks": [
                {"address": start + 100 * i, "size": 100, "requested_size": 90 + i, "state": state}
                for i, state in enumerate(states)
            ],
        }
        for device, start in ((0, 1000), (1, 2000), (1, 3000))
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda include_traces: segments)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert blocks_in_use() == [(2000, 2090), (2200, 2292), (3000, 3090), (3200, 3292)]


def test_caches_are_whole_and_counted_once() -> None:
    first, second, third = (torch.zeros(size) for size in (16, 32, 8))
    layers = [first[4:].view(3, 4), [second[:16], second[16:]], [third]]
    found = caches_of(SimpleNamespace(kv_caches=layers))
    assert [(one.data_ptr(), one.nbytes, one.dtype) for one in found] == [
        (one.data_ptr(), one.nbytes, torch.uint8) for one in (first, second, third)
    ]


def test_many_parameters_are_looked_through_once() -> None:
    """Of a mixture each expert is a parameter: 40,000 of them are found in a moment."""
    size = 2 * MIB
    case = Case((WEIGHTS, 40, 40.0, 0.0))
    begin, count = case.pieces[0].address, 40_000
    parts = [Span(begin + i * (size // 1000), size // 1000) for i in range(count)]
    blocks = [(one.start, one.start + one.nbytes) for one in parts if one.start < begin + 40 * MIB]
    began = time.perf_counter()
    memory = EngineMemory(case.driver, case.pieces, blocks, parts)  # type: ignore[arg-type]
    assert time.perf_counter() - began < 2.0
    memory.sleep()
    assert [one.num_bytes for one in memory.lend(40 * MIB)] == [40 * MIB]
