"""What a launcher and its ranks do to know their number and their layout."""

from __future__ import annotations

from typing import Any

import pytest

from hybridrl.config.load import load_config_dict
from hybridrl.services.launch import pinning

CONFIG: dict[str, Any] = {
    "run": {"name": "a"},
    "model": {"init": "m"},
    "algorithm": {"name": "grpo"},
    "train": {"tp": 2},
}


def test_only_a_choice_of_the_layout_asks_which_gpus_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every rank of `bench rollout` calls it, and nvidia-smi takes seconds on some hosts."""

    def ask() -> Any:
        raise AssertionError("the GPUs were listed")

    monkeypatch.setattr(pinning, "local_host", ask)
    monkeypatch.setattr(pinning, "num_local_gpus", lambda: 8, raising=False)
    config = load_config_dict(CONFIG)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert pinning.laid_out(config, None) == (config, [], 8)
    assert pinning.laid_out(config, 4) == (config, [], 4)
    monkeypatch.delenv("RANK")
    fixed = load_config_dict({**CONFIG, "train": {"tp": 2, "optimizer_memory": "device"}})
    assert pinning.laid_out(fixed, 2) == (fixed, [], 2)
