"""Engines with an adapter over two processes; the checks are in lora_engine_worker.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks
from packaged import PACKAGED

WORKER = str(Path(__file__).with_name("lora_engine_worker.py"))


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("engine", PACKAGED)
def test_an_engine_split_over_ranks_generates_with_its_adapter_as_peft_does(engine: str) -> None:
    run_ranks(2, WORKER, [engine], timeout_s=300)
