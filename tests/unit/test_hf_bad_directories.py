"""HF directories that are damaged or of another model: errors that name the file or tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from hybridrl.errors import CheckpointError, ModelError
from hybridrl.models.family import resolve_family
from hybridrl.models.hf.shards import allocate, load_hf, read_config
from hybridrl.models.weights import hf_shapes, megatron_layout
from hybridrl.parallel.layout import TrainLayout

INDEX = "model.safetensors.index.json"
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


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(tmp_path, max_shard_size="8KB")
    assert (tmp_path / INDEX).exists()
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


def _edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _shard_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


@pytest.mark.parametrize("rank", [0, 1])
def test_hf_missing_shard_is_named_on_every_rank(sharded: Path, rank: int) -> None:
    shard = _shard_of(sharded, "model.layers.0.mlp.up_proj.weight")
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}: got nothing"):
        _load(sharded, rank)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("keep", [4, 200, 4000])
def test_hf_truncated_file_is_named_on_every_rank(single: Path, rank: int, keep: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="model.safetensors: got a damaged file"):
        _load(single, rank)


def test_hf_file_of_garbage_is_named(sharded: Path) -> None:
    shard = _shard_of(sharded, "model.norm.weight")
    shard.write_bytes(b"\xff" * 500)
    with pytest.raises(CheckpointError, match=f"{shard.name}: got a damaged file"):
        _load(sharded)


def test_hf_missing_tensor_is_named(single: Path) -> None:
    _edit(single, lambda tensors: tensors.pop("model.layers.1.self_attn.k_norm.weight"))
    with pytest.raises(
        CheckpointError, match="model.layers.1.self_attn.k_norm.weight.*got nothing"
    ):
        _load(single)


def test_hf_extra_tensor_is_named(single: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    _edit(single, lambda tensors: tensors.update({name: torch.zeros(16)}))
    with pytest.raises(CheckpointError, match=f"{name}.*no tensor of this name"):
        _load(single, rank=1)


def test_hf_layer_too_many_is_named(single: Path) -> None:
    _edit_config(single, num_hidden_layers=4, layer_types=None)
    with pytest.raises(CheckpointError, match="model.layers.2.*got nothing"):
        _load(single)


def test_hf_wrong_shape_is_named(single: Path) -> None:
    _edit_config(single, intermediate_size=64)
    with pytest.raises(CheckpointError, match=r"mlp.*shape \(32, 16\).*shape \(64, 16\)"):
        _load(single)


def test_hf_tensor_of_integers_is_named(single: Path) -> None:
    name = "model.norm.weight"
    _edit(single, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(CheckpointError, match="model.norm.weight.*got I8; allowed: F32, F16, BF16"):
        _load(single)


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


def test_hf_untied_weights_for_a_tied_config_need_the_embedding(single: Path) -> None:
    _edit_config(single, tie_word_embeddings=True)
    _edit(single, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    with pytest.raises(CheckpointError, match="model.embed_tokens.weight"):
        _load(single)


def test_hf_unknown_architecture_is_named(single: Path) -> None:
    _edit_config(single, architectures=["MambaForCausalLM"])
    with pytest.raises(ModelError, match="MambaForCausalLM.*ForCausalLM of .*Qwen3,"):
        _load(single)


def test_hf_directory_without_weights_is_named(single: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights.*model.safetensors.index.json"):
        _load(single)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_hf_bad_index_is_named(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=f"{INDEX}: got unreadable"):
        _load(sharded)


def test_hf_index_that_points_elsewhere_is_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    name = "model.norm.weight"
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][name] = next(f for f in files if f != index["weight_map"][name])
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{name}: got nothing in"):
        _load(sharded)


def test_hf_bad_config_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config.json: got No such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{'single': 1}")
    with pytest.raises(CheckpointError, match="config.json: got text that is not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="config.json: got list"):
        read_config(tmp_path)
    (tmp_path / "other.json").write_text('{"a": 1}')
    assert read_config(tmp_path / "other.json") == {"a": 1}
