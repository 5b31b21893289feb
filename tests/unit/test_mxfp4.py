"""MXFP4 files of GPT-OSS, against transformers' own dequantization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_tensors import allocate
from safetensors.torch import load_file, save_file
from tiny_models import slices_of
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hybridrl.errors import CheckpointError, ModelError
from hybridrl.models.boxes import box_view
from hybridrl.models.family import read_model
from hybridrl.models.hf.directory import read_config
from hybridrl.models.hf.exported_config import exported_config
from hybridrl.models.hf.mxfp4 import dequantized
from hybridrl.models.hf.shards import HfCheckpoint, load_hf
from hybridrl.models.weights import hf_shapes, megatron_layout
from hybridrl.parallel.layout import TrainLayout

CONFIG = GptOssConfig(
    vocab_size=101,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=4,
    num_experts_per_tok=2,
    pad_token_id=0,
)
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def test_dequantized_numbers_are_those_of_transformers_bit_by_bit() -> None:
    """For every byte and every scale whose numbers are finite."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16)
    found = dequantized(blocks, scales)
    expected = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found.view(torch.int16), expected.contiguous().view(torch.int16))


def _quantized(folder: Path) -> dict[str, Tensor]:
    """Writes a directory as OpenAI publishes it; returns the tensors of the same in 16 bits."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(folder)
    stored, expected = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for name in list(stored):
        if not name.endswith(("gate_up_proj", "down_proj")):
            expected[name] = stored[name]
            continue
        num_experts, num_columns, num_rows = stored.pop(name).shape
        shape = num_experts, num_rows, num_columns // 32
        stored[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(110, 130, shape, dtype=torch.uint8)
        packed = stored[f"{name}_blocks"], stored[f"{name}_scales"]
        expected[name] = convert_moe_packed_tensors(*packed)
    # Blocks and scales in different files, as a shard may end between them.
    scales = {name for name in stored if name.endswith("_scales")}
    files = {name: f"model-{1 + (name in scales)}.safetensors" for name in stored}
    for file in set(files.values()):
        part = {n: tensor for n, tensor in stored.items() if files[n] == file}
        save_file(part, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    _change(folder, quantization_config=MXFP4)
    return expected


def _change(folder: Path, **changes: Any) -> None:
    text = json.dumps(read_config(folder) | changes)
    (folder / "config.json").write_text(text)


def test_quantized_directory_is_read_in_every_layout(tmp_path: Path) -> None:
    expected = _quantized(tmp_path)
    hf_config = read_config(tmp_path)
    family, shape = read_model(None, hf_config)
    shapes = hf_shapes(family, shape)
    wanted = slices_of(expected, shapes)
    assert set(HfCheckpoint(tmp_path).dtypes.values()) == {torch.bfloat16}
    for layout in (TrainLayout(1), TrainLayout(4, tp=2, ep=2, pp=2)):
        for rank in range(layout.world_size):
            own = megatron_layout(family, shape, layout, rank)
            tensors = allocate(own, torch.bfloat16)
            load_hf(tmp_path, own, tensors, shapes)
            for region in own.regions:
                found = box_view(tensors[region.local], region.local_box)
                part = box_view(wanted[region.hf], region.hf_box)
                assert torch.equal(found, part.reshape(found.shape)), region
    assert "quantization_config" not in exported_config(hf_config, "lm", None)
    assert "quantization_config" not in family.for_engines(hf_config)


def test_damaged_or_foreign_quantized_files_are_refused(tmp_path: Path) -> None:
    _quantized(tmp_path)
    hf_config = read_config(tmp_path)
    with pytest.raises(ModelError, match="quant_method: got fp8"):
        read_model(None, {**hf_config, "quantization_config": {"quant_method": "fp8"}})
    file = tmp_path / "model-2.safetensors"
    scales = load_file(file)
    save_file({name: one[..., :1].contiguous() for name, one in scales.items()}, file)
    with pytest.raises(CheckpointError, match="_blocks.*shape \\(4, 64, 2, 16\\)"):
        HfCheckpoint(tmp_path)
