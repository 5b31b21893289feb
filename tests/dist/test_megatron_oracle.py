"""Moves between training layouts against Megatron's own, checked in megatron_oracle_worker.py."""

from __future__ import annotations

from pathlib import Path

import megatron.core
import pytest
import torch
from launch import run_ranks
from packaging.version import Version
from tiny_models import FAMILIES, SIZES, tiny_model
from transformers import Qwen2Config, Qwen2ForCausalLM

# Divisible by four ranks, as large models are: in each layout a rank's share is the same size.
EVEN = SIZES | {"num_key_value_heads": 4, "vocab_size": 256}
WORKER = str(Path(__file__).with_name("megatron_oracle_worker.py"))


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="moves over gloo, between models on the CPU")
@pytest.mark.skipif(
    Version(megatron.core.__version__) >= Version("0.17"),
    reason="Megatron's own pins memory (resharding/copy_services/gloo_copy_service.py, 0.19)",
)
def test_moves_between_training_layouts_equal_megatrons_own_to_the_bit(tmp_path: Path) -> None:
    for name in FAMILIES:
        tiny_model(name).save_pretrained(tmp_path / name)
    Qwen2ForCausalLM(Qwen2Config(**EVEN)).save_pretrained(tmp_path / "even")
    run_ranks(4, WORKER, [str(tmp_path)], timeout_s=300)
