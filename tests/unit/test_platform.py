"""What is set before CUDA starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import random

from hybridrl.config.load import load_config_dict
from hybridrl.config.schema import Config
from hybridrl.debug.step_replay import replay_rank
from hybridrl.loop.trainer import Trainer
from hybridrl.platform import Platform, keep_compiled_kernels, start_kernels_in_order

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(
    ("tp", "cp", "own", "expected"),
    [
        (1, 1, None, None),
        (2, 1, None, "1"),
        (1, 2, None, "1"),
        (2, 2, "8", "8"),
        (1, 1, "8", "8"),
    ],
)
def test_one_hardware_queue_for_tensor_and_context_parallel_unless_set(
    monkeypatch: pytest.MonkeyPatch, tp: int, cp: int, own: str | None, expected: str | None
) -> None:
    monkeypatch.setenv(NAME, own or "")  # so that it is restored
    if own is None:
        monkeypatch.delenv(NAME)
    start_kernels_in_order(tp, cp)
    assert os.environ.get(NAME) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "u/.triton/cache"),
        ({"TRITON_HOME": "t"}, "t/.triton/cache"),
        ({"TORCHINDUCTOR_CACHE_DIR": "i"}, "i/triton"),
        ({"TRITON_CACHE_DIR": "mine", "TRITON_HOME": "t"}, "mine"),
        ({"TRITON_HOME": "file"}, None),  # where no folder can be made
    ],
)
def test_compiled_kernels_are_kept_where_triton_looks_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], expected: str | None
) -> None:
    (tmp_path / "file").write_text("")
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in ({"HOME": "u"} | variables).items():
        monkeypatch.setenv(name, str(tmp_path / value))
    keep_compiled_kernels()
    found = os.environ.get("TRITON_CACHE_DIR")
    assert found == (None if expected is None else str(tmp_path / expected))


def replayed(config: Config) -> None:
    replay_rank(config, Path("none"))


@pytest.mark.parametrize("start", [Trainer, replayed])
def test_hardware_queues_are_chosen_before_the_device_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, start: object
) -> None:
    monkeypatch.setenv(NAME, "")
    monkeypatch.delenv(NAME)

    class Looked(Exception):
        pass

    def detect() -> Platform:
        assert os.environ[NAME] == "1"
        raise Looked

    monkeypatch.setattr(Platform, "detect", staticmethod(detect))
    config = load_config_dict(
        {"run": {"name": "a"}, "model": {}, "algorithm": {"name": "grpo"}, "train": {"tp": 2}}
    )
    with pytest.raises(Looked):
        start(config)  # type: ignore[operator]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron's own tracker stays on GPUs")
def test_a_tracker_that_was_asked_for_before_is_replaced_on_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"):
        monkeypatch.setattr(random, name, getattr(random, name))  # so that it is restored
    random.initialize_rng_tracker(force_reset=True)
    platform = Platform.detect()
    platform.activate()
    tracker = random.get_cuda_rng_tracker()
    tracker.add("any", 1)  # of CUDA's, an error without CUDA
    platform.activate()
    assert random.get_cuda_rng_tracker() is tracker
