"""What `rollout.transport` stands for, and what is said where peers cannot be reached."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.config.load import load_config_dict
from hybridrl.config.schema import Config
from hybridrl.errors import UserError
from hybridrl.parallel import peer_memory
from hybridrl.training.peer_weights import PeerWeights, peer_weights


def config(transport: str, *, releases: bool = False) -> Config:
    return load_config_dict(
        {
            "run": {"name": "x"},
            "model": {"init": "x"},
            "algorithm": {"name": "grpo"},
            "rollout": {"transport": transport},
            "train": {"release_weights_in_rollout": releases},
        }
    )


def world(kind: str, size: int = 2) -> Any:
    """A world of two ranks, of which the other finds nothing wrong."""
    return SimpleNamespace(
        size=size,
        timeout_s=1.0,
        platform=SimpleNamespace(device=torch.device(kind, 0), is_cpu=kind == "cpu"),
        gather_objects=lambda own: [own, ""],
    )


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What keeps this rank from its peers."""
    found = {"reason": "", "failure": ""}
    monkeypatch.setattr(peer_memory, "why_unreachable", lambda *_: found["reason"])
    monkeypatch.setattr(peer_memory, "why_unusable", lambda *_: found["failure"])
    return found


@pytest.mark.parametrize(
    ("transport", "kind", "size", "releases", "is_peer"),
    [
        ("auto", "cuda", 2, False, True),
        ("auto", "cuda", 1, False, False),
        ("auto", "cuda", 2, True, False),
        ("auto", "cpu", 2, False, False),
        ("packed", "cuda", 2, False, False),
        ("peer", "cuda", 2, False, True),
        ("peer", "cpu", 2, False, True),
        ("peer", "cpu", 1, False, False),
    ],
)
def test_auto_takes_peer_memory_where_gpus_reach_each_other(
    reachable: dict[str, str],
    transport: str,
    kind: str,
    size: int,
    releases: bool,
    is_peer: bool,
) -> None:
    said: list[str] = []
    found = peer_weights(config(transport, releases=releases), world(kind, size), said.append)
    assert isinstance(found, PeerWeights) == is_peer
    assert said == []


@pytest.mark.parametrize("why", ["reason", "failure"])
def test_where_a_peer_is_out_of_reach_auto_says_so_once_and_peer_is_refused(
    reachable: dict[str, str], why: str
) -> None:
    reachable[why] = "GPU 0 cannot read the memory of GPUs [1]"
    said: list[str] = []
    assert peer_weights(config("auto"), world("cuda"), said.append) is None
    assert said == [
        "weights are sent as packed messages: rank 0: GPU 0 cannot read the memory of GPUs [1]"
    ]
    with pytest.raises(UserError) as caught:
        peer_weights(config("peer"), world("cuda"), said.append)
    for part in ("rollout.transport", "peer", "packed or auto", "rank 0: GPU 0 cannot read"):
        assert part in str(caught.value)
    assert len(said) == 1


def test_reasons_why_peers_are_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, hosts = torch.device("cuda", 1), [peer_memory.host_id()] * 4
    assert "over 2 hosts" in peer_memory.why_unreachable(gpu, [*hosts[:3], "another"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "CUDA_VISIBLE_DEVICES" in peer_memory.why_unreachable(gpu, hosts)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: other != 3)
    assert peer_memory.why_unreachable(gpu, hosts) == "GPU 1 cannot read the memory of GPUs [3]"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(peer_memory, "_has_atomics", lambda one, other: other != 0)
    assert "no atomics on the memory of GPUs [0]" in peer_memory.why_unreachable(gpu, hosts)
    monkeypatch.setattr(peer_memory, "_has_atomics", lambda one, other: True)
    assert peer_memory.why_unreachable(gpu, hosts) == ""
