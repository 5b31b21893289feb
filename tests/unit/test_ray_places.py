"""Ranks on Ray's nodes: their order, and what stands in their variables."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.cli import cluster
from hybridrl.cli.ray_actors import Place
from hybridrl.cli.ray_launch import connect, counts, in_order, rank_variables
from hybridrl.errors import UserError


def place(node: str, *gpus: str) -> Place:
    return Place(node, f"10.0.0.{node}", gpus, "1", True)


def test_ranks_of_a_node_are_consecutive_and_in_the_order_of_gpus() -> None:
    given = [place("2", "10"), place("1", "0"), place("2", "9"), place("1", "1")]
    order = in_order(given)
    assert order == [2, 0, 1, 3]
    places = [given[index] for index in order]
    assert counts(places) == [2, 2]
    found = rank_variables(places, 3)
    assert found == {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert rank_variables(places, 0)["CUDA_VISIBLE_DEVICES"] == "9,10"
    on_cpu = [place("1"), place("2")]
    assert rank_variables(on_cpu, 1) == {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize("address", ["ray://host:10001", "local", ""])
def test_addresses_of_no_cluster_are_refused_at_once(address: str) -> None:
    with pytest.raises(UserError, match="--ray.*ray start --head"):
        connect(address)


def test_an_address_where_nobody_listens_is_refused_at_once() -> None:
    pytest.importorskip("ray")
    with pytest.raises(UserError, match="--ray.*ray start --head"):
        connect("127.0.0.1:1")


def test_the_layout_that_is_judged_on_ray_is_the_one_that_is_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places = [place("1"), place("2")]
    job = SimpleNamespace(world_size=2, places=places, close=lambda: None)
    judged: list[Any] = []
    monkeypatch.setattr(cluster, "RayJob", lambda *_: job)
    monkeypatch.setattr(cluster, "default_world_size", lambda *_: 2)
    monkeypatch.setattr(cluster, "laid_out", lambda config, size: ((config, size), []))
    monkeypatch.setattr(cluster, "validate_training", lambda config, *_: judged.append(config))
    monkeypatch.setattr(cluster, "run_folder", lambda _: tmp_path)
    monkeypatch.setattr(cluster, "launch_run", lambda *_: 0)
    asked = SimpleNamespace(run=SimpleNamespace(max_restarts=0))
    run: Any = SimpleNamespace(config=asked, fits=None, resume="newest", arguments=[])
    assert cluster._on_ray(run, "auto", None, False) == 0
    assert judged == [(asked, 2)]
