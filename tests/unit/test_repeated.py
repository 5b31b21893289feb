"""Repeated work, and when its tables are made anew; a graph is what its calls say of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hybridrl.hybrid_engine.transports.transport import AddressWatch, Repeated

CUDA = torch.device("cuda", 0)


class Owner:
    """Has work that is repeated, as a transport has."""

    def __init__(self, happened: list[str], device: torch.device = CUDA, name: str = "queued"):
        self._happened, self._name = happened, name
        self.work = Repeated(self._queue, device)

    def _queue(self) -> None:
        self._happened.append(self._name)


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host did, in order."""
    events: list[str] = []

    class Graph:
        def replay(self) -> None:
            events.append("replayed")

    @contextmanager
    def capture(graph: Graph, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"  # or other threads' questions would end it
        events.append("begun")
        yield
        events.append("captured")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("waited"))
    return events


def test_work_is_a_graph_from_the_second_time_on(happened: list[str]) -> None:
    owner = Owner(happened)
    work = owner.work
    for _ in range(3):
        work.run()
    assert happened == ["queued", "begun", "queued", "captured", "replayed", "replayed"]
    work.close()
    work.close()
    assert happened[6:] == ["waited"]  # a graph may not go while the device runs it


def test_without_a_gpu_work_is_done_each_time(happened: list[str]) -> None:
    owner = Owner(happened, torch.device("cpu"))
    for _ in range(3):
        owner.work.run()
    owner.work.close()
    assert happened == ["queued"] * 3


def test_tensors_have_moved_once_after_each_move() -> None:
    alone, whole = torch.zeros(4), torch.zeros(64)
    views = {str(i): whole[16 * i : 16 * (i + 1)] for i in range(4)}
    places = AddressWatch({"alone": alone}, views, {})
    found = [places.look_again(), places.look_again()]
    alone.data = torch.zeros(4)
    found += [places.look_again(), places.look_again()]
    kept = torch.zeros(1 << 20)  # so that the storage cannot come back to where it was
    storage: Any = whole.untyped_storage()
    storage.resize_(1 << 22)
    found += [places.look_again(), places.look_again()]
    assert found == [True, False] * 3 and kept.numel()


def test_tensors_that_have_left_a_storage_are_watched_by_themselves() -> None:
    whole = torch.zeros(64)
    views = {str(i): whole[16 * i : 16 * (i + 1)] for i in range(4)}
    places = AddressWatch(views)
    assert places.look_again()
    for name in views:  # one of them is the one that is asked
        views[name].data = torch.zeros(16)
    assert places.look_again() and not places.look_again()
    for name in views:
        views[name].data = torch.zeros(16)
        assert places.look_again() and not places.look_again()


def test_a_tensor_that_another_one_replaces_has_moved() -> None:
    tensors = {"one": torch.zeros(16), "other": torch.zeros(16)}
    places = AddressWatch(tensors)
    assert places.look_again()
    tensors["one"] = tensors["one"] + 1
    assert places.look_again() and not places.look_again()


def test_an_empty_tensor_says_nothing_of_its_storage() -> None:
    whole = torch.zeros(64)
    places = AddressWatch({"whole": whole, "none": whole[64:]})
    assert places.look_again() and not places.look_again()
    kept = torch.zeros(1 << 20)
    storage: Any = whole.untyped_storage()
    storage.resize_(1 << 22)
    assert places.look_again() and not places.look_again() and kept.numel()
    assert AddressWatch({}).look_again()


def test_work_does_not_keep_its_owner_alive(happened: list[str]) -> None:
    """An export makes a transport for every few tensors, which go with it."""
    owner = Owner(happened)
    owner.work.run()
    gone = weakref.ref(owner)
    gc.disable()
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()


def test_the_experts_of_a_mixture_are_asked_by_the_tensor() -> None:
    class Counting(torch.Tensor):
        asked = 0

        def data_ptr(self) -> int:
            Counting.asked += 1
            return super().data_ptr()

    whole = torch.zeros(6400)
    views = {str(i): whole[100 * i :][:100].as_subclass(Counting) for i in range(64)}
    places = AddressWatch(views)
    places.look_again()
    Counting.asked = 0
    assert not places.look_again()
    assert Counting.asked == 1


def test_graphs_are_made_before_work_that_waits_for_other_ranks(happened: list[str]) -> None:
    """To make one waits for the device, and a device that waits for a lost rank does not end."""
    owners = [Owner(happened, CUDA, name) for name in ("barrier", "local")]
    for _ in range(2):
        for owner in owners:
            owner.work.capture()
        for owner in owners:
            owner.work.run()
    first, made = ["barrier", "local"], ["begun", "barrier", "captured", "begun", "local"]
    assert happened == [*first, *made, "captured", "replayed", "replayed"]
