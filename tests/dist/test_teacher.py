"""The head of given tokens, and the teacher's likeliest, in every layout against transformers.

The checks are in teacher_worker.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch import run_ranks
from tiny_models import SIZES, tiny_model
from transformers import Qwen2Config, Qwen2ForCausalLM

WORKER = str(Path(__file__).with_name("teacher_worker.py"))
TWO_RANKS = ("2,1,1,1", "1,2,1,1", "1,1,2,1", "1,1,1,1", "1,2,1,2", "2,1,1,1,shared")
FOUR_RANKS = ("4,1,1,1", "2,2,1,1", "2,1,2,1")
MORE_TOKENS = 70  # in the teacher's embedding: at TP4 another rank than the student's holds some


def save_models(folder: Path, student: str) -> None:
    """Writes a student of a family and, as its teacher, a wider qwen2."""
    tiny_model(student).save_pretrained(folder / "student")
    sizes = {**SIZES, "hidden_size": 96, "vocab_size": SIZES["vocab_size"] + MORE_TOKENS}
    teacher = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=False))
    generator = torch.Generator().manual_seed(7)
    for name, parameter in teacher.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise * 0.1 + (1.0 if "norm" in name else 0.0)
    teacher.save_pretrained(folder / "teacher")


@pytest.mark.dist
def test_two_ranks_say_what_transformers_says(tmp_path: Path) -> None:
    save_models(tmp_path, "llama")  # its output weights are its embedding
    run_ranks(2, WORKER, [str(tmp_path), *TWO_RANKS], timeout_s=300)


@pytest.mark.dist
def test_four_ranks_say_what_transformers_says(tmp_path: Path) -> None:
    save_models(tmp_path, "qwen3")
    run_ranks(4, WORKER, [str(tmp_path), *FOUR_RANKS], timeout_s=300)
