"""HF directories that are damaged or of another model: errors that name the file or tensor."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from layout_tensors import allocate
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from hybridrl.errors import CheckpointError
from hybridrl.models.family import resolve_family
from hybridrl.models.hf.directory import read_config
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.weights import hf_shapes, megatron_layout
from hybridrl.parallel.layout import TrainLayout

CONFIG = Qwen3Config(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(tmp_path)
    return tmp_path


def _load(folder: Path, rank: int = 0, dtype: torch.dtype = torch.float32) -> None:
    hf_config = read_config(folder)
    family = resolve_family(None, hf_config)
    shape = family.shape(hf_config)
    layout = megatron_layout(family, shape, TrainLayout(2, pp=2), rank)
    load_hf(folder, layout, allocate(layout, dtype), hf_shapes(family, shape))


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("keep", [4, 200, 4000])
def test_hf_truncated_file_is_named_on_every_rank(single: Path, rank: int, keep: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="model.safetensors: got a damaged file"):
        _load(single, rank)


def test_hf_missing_tensor_is_named(single: Path) -> None:
    _edit(single, lambda tensors: tensors.pop("model.layers.1.self_attn.k_norm.weight"))
    with pytest.raises(CheckpointError, match="model.layers.1.self_attn.k_norm.weight.*is missing"):
        _load(single)


def test_hf_extra_tensor_is_named(single: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    _edit(single, lambda tensors: tensors.update({name: torch.zeros(16)}))
    with pytest.raises(CheckpointError, match=f"{name}.*no tensor with this name"):
        _load(single, rank=1)


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        (torch.float32, float("nan"), "nan at [3, 5], one of 2 such elements; allowed: numbers"),
        (torch.float32, float("-inf"), "-inf at [3, 5], one of 2"),
        (torch.bfloat16, float("inf"), "inf at [3, 5], one of 2"),
        # Larger than the largest number of bfloat16, which it is rounded to.
        (torch.bfloat16, 3.4e38, "inf at [3, 5], one of 2 such elements"),
    ],
)
def test_hf_tensor_that_is_not_finite_is_named(
    single: Path, dtype: torch.dtype, value: float, expected: str
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][3, 5] = tensors[name][7, 2] = value

    _edit(single, spoil)
    _load(single, rank=0, dtype=dtype)  # of the other layer
    with pytest.raises(CheckpointError, match=re.escape(f"{name} in ")) as caught:
        _load(single, rank=1, dtype=dtype)
    assert expected in str(caught.value)


def test_hf_tensor_whose_sum_overflows_is_taken(single: Path) -> None:
    _edit(single, lambda tensors: tensors["model.norm.weight"].fill_(3e38))
    _load(single, rank=1)
