"""Which pieces an SGLang engine gives back where its memory is our own. The driver is a fake."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_driver import FakeDriver

from hybridrl.errors import UserError
from hybridrl.rollout.common import engine_memory
from hybridrl.rollout.common.engine_memory import KV_CACHE, WEIGHTS, SleepingMemory
from hybridrl.rollout.sglang.memory import EnginePools, SaverMemory, caches_of, sleeping_memory

MIB = 1 << 20


class Compiled:
    """Stands in for csrc/: a table of pieces and what was said of them."""

    def __init__(self, *rows: tuple[int, int, int]) -> None:
        self.rows = {address: [num_bytes, handle] for address, num_bytes, handle in rows}

    def engine_pieces(self) -> list[int]:
        return [one for address, rest in sorted(self.rows.items()) for one in (address, *rest)]

    def set_engine_piece(self, address: int, handle: int) -> None:
        self.rows[address][1] = handle


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An engine with two pieces of weights and one of cache, and a piece of another engine."""
    driver = FakeDriver()
    pools = {0: (0, 0), 1: (0, 7), 2: (0, 8), 3: (0, 9)}  # 0: torch's, 3: of the other engine
    owners = {10 * MIB: 1, 20 * MIB: 1, 30 * MIB: 2, 40 * MIB: 3, 50 * MIB: 1}
    rows = [(address, 4 * MIB, driver.adopt(address, 4 * MIB)) for address in owners]
    segments = [
        {
            "device": 0,
            "address": address,
            "segment_pool_id": pools[owner],
            "blocks": [
                {"address": address, "requested_size": 4 * MIB, "state": "active_allocated"}
            ],
        }
        for address, owner in [*owners.items(), (60 * MIB, 0)]
    ]
    segments[4]["blocks"][0]["state"] = "inactive"  # loading has used it
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda include_traces: segments)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(engine_memory, "DeviceMapping", lambda device: driver)
    ids = iter([pools[1], pools[2]])
    operations = Compiled(*rows)
    made = EnginePools(operations, lambda: SimpleNamespace(id=next(ids)), driver)
    with made.region(WEIGHTS):
        assert len(driver.mapped) == 5
    with made.region(KV_CACHE), made.region(KV_CACHE):
        pass
    return SimpleNamespace(driver=driver, operations=operations, pools=made)


def span(start: int, num_bytes: int) -> Any:
    return SimpleNamespace(data_ptr=lambda: start, nbytes=num_bytes)


def live(case: SimpleNamespace, **buffers: Any) -> Any:
    allocator = SimpleNamespace(get_kvcache=lambda: SimpleNamespace(**buffers))
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=allocator)
    return SimpleNamespace(scheduler=scheduler, pools=case.pools, version="sglang 0")


def memory_of(case: SimpleNamespace) -> SleepingMemory:
    engine = live(case, k_buffer=[span(30 * MIB, 2 * MIB)], v_buffer=[span(32 * MIB, 2 * MIB)])
    weights = [span(10 * MIB, 4 * MIB)], [span(20 * MIB, 4 * MIB)]
    return sleeping_memory(engine, torch.device("cpu"), *weights, 4 * MIB)


def test_an_engine_has_the_pieces_of_its_own_pools_that_hold_tensors(
    case: SimpleNamespace,
) -> None:
    pieces = case.pools.close()
    assert [(one.address // MIB, one.num_bytes, one.tag) for one in pieces] == [
        (10, 4 * MIB, WEIGHTS),
        (20, 4 * MIB, WEIGHTS),
        (30, 4 * MIB, KV_CACHE),
    ]
    assert [one.handle for one in pieces] == [case.operations.rows[p.address][1] for p in pieces]
    assert 50 * MIB not in case.driver.mapped and case.operations.rows[50 * MIB][1] == 0


def test_what_was_given_back_is_not_handed_out(case: SimpleNamespace) -> None:
    with pytest.raises(RuntimeError, match="allocates weights after"), case.pools.region(WEIGHTS):
        pass
    case.pools.close()
    with pytest.raises(RuntimeError, match="allocates kv_cache after"), case.pools.region(KV_CACHE):
        pass


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_torch_asks_for_each_piece_where_the_user_has_set_expandable_segments(
    name: str, monkeypatch: pytest.MonkeyPatch, case: SimpleNamespace
) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", told.append)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    with case.pools.region(KV_CACHE):
        assert told == []
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    with case.pools.region(KV_CACHE):
        assert told == ["expandable_segments:False"]
    assert told[1:] == ["expandable_segments:True"]


def test_sleep_and_waking_up_leave_the_allocator_the_handles_that_are_mapped(
    case: SimpleNamespace,
) -> None:
    memory = memory_of(case)

    def said() -> dict[int, int]:
        return {address // MIB: one[1] for address, one in case.operations.rows.items()}

    def mapped() -> dict[int, int]:
        return {address // MIB: one[0] for address, one in case.driver.mapped.items()}

    other, none = {40: said()[40]}, {50: 0}
    assert said() == mapped() | none and not memory.is_asleep
    for _ in range(2):
        memory.sleep()
        assert memory.is_asleep and mapped() == other
        assert said() == {10: 0, 20: 0, 30: 0} | other | none
        memory.wake_up(WEIGHTS)
        assert memory.is_asleep
        memory.wake_up(KV_CACHE)
        assert said() == mapped() | none and len(mapped()) == 4 and not memory.is_asleep
    memory.sleep()
    lent = memory.lend(8 * MIB)  # the piece with a parameter that is written in part is not lent
    assert [one.handle for one in lent] == [said()[10], said()[30]]
    memory.sleep()
    assert said() == mapped() | {20: 0} | none


@pytest.mark.parametrize("elsewhere", [None, [(60, 2)], [(29, 2)], [(33, 2)], [(40, 2)]])
def test_a_cache_that_is_not_where_it_should_be_is_refused(
    case: SimpleNamespace, elsewhere: list[tuple[int, int]] | None
) -> None:
    """Also one that lies in no piece of the engine, or in a part."""
    values = elsewhere and [span(start * MIB, size * MIB) for start, size in elsewhere]
    engine = live(case, k_buffer=[span(30 * MIB, 2 * MIB)], v_buffer=values)
    with pytest.raises(UserError, match=r"sglang.*2097152 of 4194304 bytes of KV cache.*sglang 0"):
        sleeping_memory(engine, torch.device("cpu"), [], [], 4 * MIB)


def test_caches_are_keys_and_values_or_latents_of_all_layers() -> None:
    one, two, three = (torch.zeros(size) for size in (1, 2, 3))

    def found(**buffers: Any) -> list[torch.Tensor]:
        return caches_of(live(SimpleNamespace(pools=None), **buffers).scheduler)

    assert found(k_buffer=[one, two], v_buffer=[three], kv_buffer=None) == [one, two, three]
    assert found(kv_buffer=[one, three]) == [one, three]


def test_without_pools_of_our_own_sglang_gives_memory_back() -> None:
    engine = SimpleNamespace(scheduler=None, pools=None)
    memory = sleeping_memory(engine, torch.device("cpu"), [], [], 4 * MIB)
    assert isinstance(memory, SaverMemory) and memory.lend(MIB) == []
