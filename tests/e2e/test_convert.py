"""HF -> Megatron (TP2 PP2, with experts EP2) -> HF on the command line gives back the input, bit
for bit.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import run
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import FAMILIES, WITH_EXPERTS, tiny_model
from transformers import AutoModelForCausalLM

from hybridrl.models.family import is_kept_in_fp32


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    "name",
    [
        name if name == "deepseek_v3" else pytest.param(name, marks=pytest.mark.full)
        for name in (*FAMILIES, "phi3", "phi4mini", "olmo2", "glm4", *WITH_EXPERTS)
    ],
)
def test_convert_there_and_back_is_bitwise_the_input(name: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if name in ("qwen2", "deepseek_v3") else torch.float32
    shard = "50KB" if name == "qwen2" else "5GB"
    model = tiny_model(name).to(dtype)
    for buffer in (b for n, b in model.named_buffers() if is_kept_in_fp32(n)):
        buffer.data = torch.rand(buffer.shape)
    model.save_pretrained(tmp_path / "hf", max_shard_size=shard)
    expected = tensors_of(tmp_path / "hf")
    further: dict[str, torch.Tensor] = {}
    if name == "deepseek_v3":  # a layer that predicts further tokens, and is passed over
        further = {f"model.layers.4.{n}.weight": torch.rand(3) for n in ("eh_proj", "enorm")}
        further["visual.patch.weight"] = torch.rand(2, 5).half()
        save_file({**expected, **further}, tmp_path / "hf" / "model.safetensors")
    run(
        "convert",
        tmp_path / "hf",
        tmp_path / "megatron",
        "--to",
        "megatron",
        "--tp",
        "2",
        "--pp",
        "2",
    )
    run("convert", tmp_path / "megatron", tmp_path / "back", "--to", "hf")
    found = tensors_of(tmp_path / "back")
    assert found.keys() == expected.keys() | further.keys()
    for tensor, kept in further.items():
        assert found[tensor].dtype == kept.dtype and torch.equal(found[tensor], kept)
    for tensor in expected:
        stored = torch.float32 if is_kept_in_fp32(tensor) else dtype
        assert found[tensor].dtype == expected[tensor].dtype == stored
        assert torch.equal(found[tensor], expected[tensor]), tensor
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    original = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written == original
    if further:  # which come from the directory of the model, wherever it is now
        (tmp_path / "hf").rename(tmp_path / "moved")
        arguments = "convert", tmp_path / "megatron", tmp_path / "again", "--to", "hf"
        assert "with --base" in run(*arguments, expect=2)
        run(*arguments, "--base", tmp_path / "moved")
        again = tensors_of(tmp_path / "again")
        assert all(torch.equal(again[tensor], found[tensor]) for tensor in found)
        (tmp_path / "moved").rename(tmp_path / "hf")
    # transformers takes the result, and computes the same with it.
    tokens = torch.arange(1, 12)[None]
    models = [
        AutoModelForCausalLM.from_pretrained(tmp_path / f, dtype=dtype) for f in ("hf", "back")
    ]
    with torch.no_grad():
        first, second = (model(tokens).logits for model in models)
    assert torch.equal(first, second)
