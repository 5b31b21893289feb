"""What layers are made of is chosen by what the host has, said, and refused where it cannot be."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType

import pytest
import torch
from olmo_family import FAMILY as OLMO
from transformers import MistralConfig

from hybridrl import platform as platform_module
from hybridrl.errors import UserError
from hybridrl.models.family import resolve_family
from hybridrl.models.megatron.layers import add_weight_gradients_in_place, choose_layers
from hybridrl.platform import Platform, transformer_engine_import_fault

QWEN2 = resolve_family("qwen2", {})
GPU = Platform(torch.device("cuda", 0), "nccl")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(platform_module, "transformer_engine_import_fault", lambda: None)


def test_choice_is_transformer_engine_where_it_works(hopper: None) -> None:
    found = choose_layers("auto", QWEN2, torch.bfloat16, GPU, fp32_residual=False)
    assert (found.kind, found.fuses_norms) == ("transformer_engine", True)
    wide = choose_layers("auto", QWEN2, torch.bfloat16, GPU, fp32_residual=True)
    assert (wide.kind, wide.fuses_norms) == ("transformer_engine", False)


@pytest.mark.parametrize(
    ("family", "dtype", "reason"),
    [(QWEN2, torch.float32, "float32"), (OLMO, torch.bfloat16, "its own layer_spec")],
)
def test_choice_is_torch_for_what_transformer_engine_does_not_take(
    hopper: None, family: object, dtype: torch.dtype, reason: str
) -> None:
    found = choose_layers("auto", family, dtype, GPU, fp32_residual=False)  # type: ignore[arg-type]
    assert found.kind == "torch" and not found.fuses_norms and reason in found.said
    with pytest.raises(UserError, match=reason) as caught:
        choose_layers("transformer_engine", family, dtype, GPU, False)  # type: ignore[arg-type]
    assert caught.value.name == "train.layers" and "train.layers=auto" in caught.value.remedy


def test_choice_is_torch_for_windows(hopper: None) -> None:
    said = resolve_family("mistral", {}).shape(MistralConfig().to_dict()).torch_only
    family, where = resolve_family("mistral", {}), (torch.bfloat16, GPU, False, "none")
    found = choose_layers("auto", family, *where, torch_only=said)
    assert found.kind == "torch" and "attends within 4096 positions" in found.said
    with pytest.raises(UserError, match="attends within 4096 positions"):
        choose_layers("transformer_engine", family, *where, torch_only=said)
    assert choose_layers("auto", family, *where).kind == "transformer_engine"


def test_choice_is_torch_on_gpus_without_packed_attention(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    found = choose_layers("auto", QWEN2, torch.bfloat16, GPU, fp32_residual=False)
    assert found.kind == "torch" and "8.0" in found.said


def test_an_old_transformer_engine_is_refused_and_an_unknown_new_one_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform_module, "version", lambda name: "2.10.0")
    assert transformer_engine_import_fault() == (
        "transformer-engine 2.10.0 is refused (older than 2.11)"
    )
    monkeypatch.setattr(platform_module, "version", lambda name: "99.0")
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("pytorch"))
    assert transformer_engine_import_fault() is None


def test_only_layers_that_can_add_to_main_gradients_are_told_to() -> None:
    @dataclasses.dataclass(eq=False)
    class Fusing(torch.nn.Module):
        fuse_wgrad_accumulation: bool = False

        def __post_init__(self) -> None:
            super().__init__()

    fusing, plain = Fusing(), torch.nn.Linear(1, 1)
    add_weight_gradients_in_place(torch.nn.Sequential(plain, torch.nn.Sequential(fusing)))
    assert fusing.fuse_wgrad_accumulation and not hasattr(plain, "fuse_wgrad_accumulation")


def test_fp8_is_refused_where_layers_are_not_transformer_engines(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = choose_layers("auto", QWEN2, torch.bfloat16, GPU, False, "hybrid")
    assert chosen.kind == "transformer_engine"
    cpu = Platform(torch.device("cpu"), "gloo")
    with pytest.raises(UserError, match="no CUDA GPU") as caught:
        choose_layers("auto", QWEN2, torch.bfloat16, cpu, False, "hybrid")
    found = choose_layers("auto", QWEN2, torch.float32, cpu, False)
    assert found.said == "layers: torch, since there is no CUDA GPU"
    assert caught.value.name == "train.fp8" and "train.fp8=none" in caught.value.remedy
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(UserError, match="compute capability 8.0"):
        choose_layers("auto", QWEN2, torch.bfloat16, GPU, False, "hybrid")
    with pytest.raises(UserError, match="as set by train.layers"):
        choose_layers("torch", QWEN2, torch.bfloat16, GPU, False, "hybrid")
