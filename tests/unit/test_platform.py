"""What is set before CUDA starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import random

from hybridrl.config.load import load_config_dict
from hybridrl.config.schema import Config
from hybridrl.debug.replay import replay_rank
from hybridrl.loop.loop import Trainer
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
    ("own", "home", "expected"),
    [
        (None, None, "/u/.triton/cache"),
        (None, "/t", "/t/.triton/cache"),
        ("/mine", "/t", "/mine"),
    ],
)
def test_compiled_kernels_are_kept_where_triton_looks_for_them(
    monkeypatch: pytest.MonkeyPatch, own: str | None, home: str | None, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/u")
    for name, value in (("TRITON_CACHE_DIR", own), ("TRITON_HOME", home)):
        monkeypatch.setenv(name, value or "")  # so that it is restored
        if value is None:
            monkeypatch.delenv(name)
    keep_compiled_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == expected


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
