"""One physical memory for an engine and for gradients: who maps what, and when it is given back.

No device: the driver is a fake.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_driver import FakeDriver
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.hybrid_engine.memory.lending import LentMemory, Piece, choose
from hybridrl.loop.ledger import Entry, entries, table
from hybridrl.loop.rollout_setup import is_mostly_frozen
from hybridrl.models.sources import FullWeights
from hybridrl.platform import Platform
from hybridrl.rollout.engine import Holding
from hybridrl.training.memory import TrainedModelMemory

MIB = 1 << 20


def pieces_of(driver: FakeDriver, *sizes: int) -> list[Piece]:
    return [Piece(driver.create(size), size) for size in sizes]


@given(st.lists(st.integers(1, 100), max_size=12), st.integers(0, 400))
def test_choose_reaches_what_is_wanted_with_no_piece_too_many(
    sizes: list[int], wanted: int
) -> None:
    chosen = choose(sizes, wanted)
    assert len(set(chosen)) == len(chosen)
    total = sum(sizes[index] for index in chosen)
    assert total >= wanted or len(chosen) == len(sizes)
    for index in chosen:
        assert total - sizes[index] < wanted, "one could be left out"


def test_choose_ends_with_the_smallest_that_is_enough() -> None:
    assert choose([10, 300, 40, 20], 315) == [1, 3]
    assert choose([10, 300, 40, 20], 0) == []
    assert sorted(choose([10, 30], 100)) == [0, 1]


def test_lent_memory_needs_no_call_at_a_change_of_phases_if_it_is_all_lent() -> None:
    driver = FakeDriver()
    pieces = pieces_of(driver, 4 * MIB, 2 * MIB)
    lent = LentMemory(driver, 5 * MIB, pieces)
    assert driver.mapped == {
        lent.address: (pieces[0].handle, 4 * MIB),
        lent.address + 4 * MIB: (pieces[1].handle, 2 * MIB),
    }
    assert driver.allowed == set(driver.mapped)
    assert lent.num_lent_bytes == 5 * MIB
    driver.calls.clear()
    for _ in range(3):
        lent.restore()
        lent.release()
    assert not driver.calls and len(driver.mapped) == 2


def test_lent_memory_has_own_memory_only_while_training() -> None:
    driver = FakeDriver()
    lent = LentMemory(driver, 7 * MIB, pieces_of(driver, 4 * MIB))
    assert lent.num_lent_bytes == 4 * MIB
    for _ in range(3):
        assert sum(driver.sizes.values()) == 4 * MIB
        lent.restore()
        assert sum(driver.sizes.values()) == 8 * MIB
        assert lent.address + 4 * MIB in driver.allowed
        driver.calls.clear()
        lent.release()
        assert driver.calls == ["wait", "release"]


@pytest.mark.parametrize("sizes", [(), (4 * MIB,), (8 * MIB,)])
@pytest.mark.parametrize("is_restored", [False, True])
def test_lent_memory_gives_all_back_that_is_its_own(
    sizes: tuple[int, ...], is_restored: bool
) -> None:
    driver = FakeDriver()
    lent = LentMemory(driver, 7 * MIB, pieces_of(driver, *sizes))
    if is_restored:
        lent.restore()
    lent.close()
    lent.close()
    assert not driver.mapped and not driver.reserved
    assert list(driver.sizes.values()) == list(sizes)  # these their lender releases


class Buffer:
    """Has what is asked of Megatron's buffer of gradients."""

    def __init__(self, num_elements: int) -> None:
        self.grad_data = torch.zeros(num_elements)
        self.param_data = torch.zeros(num_elements, dtype=torch.bfloat16)
        self.grad_data_size = 0

    def offload(self) -> None:
        """As Megatron's `offload_to_cpu` of gradients."""
        self.grad_data_size = self.grad_data.numel()
        self.grad_data.untyped_storage().resize_(0)


def trained_model(*sizes: int) -> tuple[TrainedModelMemory, list[Buffer]]:
    """Returns the memory of a model whose buffers have so many elements, the last of experts."""
    buffers = [Buffer(size) for size in sizes]

    def offload(synchronize: bool, empty_cache: bool) -> None:
        for buffer in buffers:
            buffer.offload()

    chunk = SimpleNamespace(
        buffers=buffers[:-1], expert_parallel_buffers=buffers[-1:], offload_grad_buffers=offload
    )
    optimizer = SimpleNamespace(chained_optimizers=[])
    return TrainedModelMemory([chunk], optimizer, [], torch.device("cpu"), 8), buffers


def test_gradients_lie_one_after_the_other_in_lent_memory_and_stay_there() -> None:
    driver, placed = FakeDriver(), []
    memory, buffers = trained_model(300, 100, 1 << 20)
    num_bytes = memory.gradient_bytes()
    assert num_bytes == 1536 + 512 + (4 << 20)  # each begins at a multiple of 512
    lent = LentMemory(driver, num_bytes, pieces_of(driver, 4 * MIB))
    memory.release()
    memory.move_gradients_to(lent, lambda *args: placed.append(args))
    start = lent.address
    expected = [(start, 1200), (start + 1536, 400), (start + 2048, 4 << 20)]
    assert [(address, size) for _, address, size in placed] == expected
    assert all(one is b.grad_data for (one, *_), b in zip(placed, buffers, strict=True))
    assert memory.lent_bytes == 4 * MIB and not any(b.grad_data_size for b in buffers)
    for _ in range(3):
        memory.restore()
        assert sum(driver.sizes.values()) == 6 * MIB  # 2 MiB for the rest
        assert memory.unseen_bytes == 2 * MIB
        memory.release()
        assert sum(driver.sizes.values()) == 4 * MIB and memory.unseen_bytes == 0
    assert all(b.grad_data.untyped_storage().nbytes() == 0 for b in buffers)  # none of torch's
    memory.close()
    assert placed[3:] == [(b.grad_data, 0, 0) for b in buffers]
    assert not driver.mapped and memory.lent_bytes == 0


def test_gradients_that_are_in_use_are_not_laid_anew() -> None:
    driver = FakeDriver()
    memory, _ = trained_model(300, 100)
    lent = LentMemory(driver, memory.gradient_bytes(), pieces_of(driver, 4 * MIB))
    with pytest.raises(RuntimeError, match="only be moved while they are released"):
        memory.move_gradients_to(lent, lambda *_: None)


def test_gradients_without_a_lender_are_freed_and_made_anew() -> None:
    memory, buffers = trained_model(300, 100)
    for _ in range(2):
        memory.release()
        assert all(b.grad_data.untyped_storage().nbytes() == 0 for b in buffers)
        memory.restore()
        assert [b.grad_data.untyped_storage().nbytes() for b in buffers] == [1200, 400]


@pytest.mark.parametrize("keeps_memory", [False, True])
def test_ledger_counts_lent_memory_once(keeps_memory: bool) -> None:
    driver = FakeDriver()
    memory, _ = trained_model(MIB, MIB)
    memory.release()
    lent = LentMemory(driver, memory.gradient_bytes(), pieces_of(driver, 6 * MIB))
    memory.move_gradients_to(lent, lambda *_: None)
    train = SimpleNamespace(release_weights_in_rollout=False)
    model = SimpleNamespace(memory=memory, train=train, frozen_weights=dict, lora=None, borrowed=())
    models: Any = {"policy": model}
    engine = {"weights": Holding(6 * MIB)}
    found = entries(models, engine, keeps_memory)
    gradients = sum(e.num_bytes for e in found if "gradients" in e.name and e.in_training)
    held = sum(e.num_bytes for e in found if "engine weights" in e.name and e.in_training)
    # 8 MiB of gradients, 6 of them in the engine's 6.
    assert gradients + held == 8 * MIB
    in_rollout = sum(e.num_bytes for e in found if "gradients" in e.name and e.in_rollout)
    assert in_rollout == (2 * MIB if keeps_memory else 0)


def test_table_is_in_a_unit_in_which_small_models_are_not_0() -> None:
    cpu = Platform(torch.device("cpu"), "gloo")
    small = table([Entry("policy weights", 3 * MIB, in_rollout=False)], cpu).splitlines()
    assert "MiB" in small[0] and small[1].split()[-2:] == ["3.00", "-"]
    large = table([Entry("policy weights", 3 << 30)], cpu).splitlines()
    assert "GiB" in large[0] and large[-1].split() == ["sum", "3.00", "3.00"]


@pytest.mark.parametrize(
    ("frozen", "keeps"), [((), False), (("small",), False), (("large",), True)]
)
def test_engine_keeps_weights_that_are_mostly_frozen(frozen: tuple[str, ...], keeps: bool) -> None:
    tensors = {"small": torch.zeros(2, 3), "large": torch.zeros(3, 4)}
    assert is_mostly_frozen(FullWeights([], tensors, frozenset(frozen))) is keeps
