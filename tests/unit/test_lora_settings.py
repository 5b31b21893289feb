"""Bad adapters and bad settings of adapters: one message each, before ranks start."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from hybridrl.checkpoint.saved_adapters import SavedAdapters, adapters_state, check_adapters
from hybridrl.config.load import load_config_dict
from hybridrl.config.lora import LoraConfig
from hybridrl.config.rules_lora import lora_section_rules
from hybridrl.config.schema import ModelConfig
from hybridrl.config.wrapped_models import text_part
from hybridrl.errors import CheckpointError
from hybridrl.models.adapters.base_reference import BaseReference, base_directory, weights_digest
from hybridrl.models.adapters.lora import Lora
from hybridrl.models.adapters.peft_directory import check_peft, read_peft
from hybridrl.models.adapters.peft_files import write_peft
from hybridrl.models.adapters.rows import adapted, only_adapters
from hybridrl.models.adapters.settings import base_notice, lora_rules
from hybridrl.models.family import ModelShape, MoeShape, read_model, resolve_family
from hybridrl.models.hf.directory import read_config
from hybridrl.models.weights import hf_shapes
from hybridrl.training.adapter_weights import MergedTensor

FAMILY = resolve_family("qwen2", {})
SHAPE = ModelShape(2, 32, 4, 2, 8, 48, 64, qkv_bias=True)
LORA = Lora(4, 8.0, ("q_proj", "down_proj"))
BASE = BaseReference("org/model@" + "a" * 40, None, None, "0" * 64)
VALID: dict[str, Any] = {
    "run": {"name": "a"},
    "model": {"init": "m"},
    "algorithm": {"name": "grpo"},
    "steps": {"samples_per_prompt": 8},
}


@pytest.fixture
def peft(tmp_path: Path) -> Path:
    shapes = hf_shapes(only_adapters(adapted(FAMILY, LORA)), SHAPE)
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    write_peft(tmp_path / "peft", tensors, LORA, BASE)
    return tmp_path / "peft"


def said(section: LoraConfig, shape: ModelShape = SHAPE) -> str:
    (error,) = lora_rules(section, FAMILY, shape)
    return str(error)


def test_written_directory_is_accepted(peft: Path) -> None:
    assert not list(lora_rules(LoraConfig(path=str(peft)), FAMILY, SHAPE))
    content = json.loads((peft / "adapter_config.json").read_text())
    assert content["base_model_name_or_path"] == "org/model"
    assert content["revision"] == "a" * 40
    assert content["target_modules"] == ["down_proj", "q_proj"]


def test_adapters_of_models_with_images_are_those_of_the_decoder(tmp_path: Path) -> None:
    """PEFT reads the directory; the tower, whose layers have the same names, has no adapters."""
    from peft import PeftModel

    model = tiny_model("qwen2_5_vl", seed=0)
    model.config.save_pretrained(tmp_path)
    family, shape = read_model(None, read_config(tmp_path))
    lora = Lora(4, 8.0)
    shapes = hf_shapes(only_adapters(adapted(family, lora)), shape)
    tensors = {name: torch.rand(size) for name, size in shapes.items()}
    write_peft(tmp_path / "peft", tensors, lora, BASE, is_wrapped=True)
    found = read_peft(tmp_path / "peft")
    check_peft(found, shapes)
    assert found.lora.targets == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj") + (
        ("up_proj", "v_proj")
    )
    peft = PeftModel.from_pretrained(model, tmp_path / "peft")
    held = {name: one for name, one in peft.named_parameters() if "lora_" in name}
    assert len(held) == len(shapes) and not any("visual" in name for name in held)
    for name, stored in found.stored_names.items():
        assert torch.equal(held[stored.replace(".weight", ".default.weight")], tensors[name])


@pytest.mark.parametrize(
    ("base", "path", "is_other"),
    [
        ("org/model", "org/model", False),
        ("org/Model", f"other/model@{'a' * 40}", False),
        ("org/model", "/data/model/", False),
        (f"/cache/models--org--model/snapshots/{'b' * 40}", "org/model", False),
        ("runs/a/hf", "/moved/runs/a/hf", False),
        ("runs/a/hf", "runs/b/hf", True),
        ("org/model", "org/model-instruct", True),
        ("org/model-7b@main", "/data/model", True),
        (None, "org/model", False),
        ("", "org/model", False),
        ("org/model", None, True),  # random weights of another architecture's file
    ],
)
def test_adapters_of_another_base_are_announced(
    peft: Path, base: str | None, path: str | None, is_other: bool
) -> None:
    file = peft / "adapter_config.json"
    content = json.loads(file.read_text()) | {"base_model_name_or_path": base, "revision": None}
    file.write_text(json.dumps(content))
    model = ModelConfig(path=path) if path else ModelConfig(init="folder/other.json")
    section = LoraConfig(path=str(peft))
    assert not list(lora_rules(section, FAMILY, SHAPE))
    notice = base_notice(section, model)
    assert (notice is not None) == is_other
    if notice is not None:
        assert f"trained on {base}" in notice and str(path or model.init) in notice
    assert base_notice(LoraConfig(rank=4), model) is None


def test_two_tensors_with_one_name_are_refused(peft: Path) -> None:
    """Otherwise, the one that is stored later would win."""
    file = peft / "adapter_model.safetensors"
    tensors = load_file(file)
    stored = next(iter(tensors))
    other = stored.replace(".model.layers.", ".model.language_model.layers.")
    save_file({**tensors, other: tensors[stored].clone()}, file)
    with pytest.raises(CheckpointError) as refused:
        read_peft(peft)
    assert stored in str(refused.value) and other in str(refused.value)
    assert "one tensor" in str(refused.value)


def test_part_that_the_model_lacks_is_named() -> None:
    tied = replace(SHAPE, tied_embeddings=True)
    full = LoraConfig(rank=4, full=("head",))
    (error,) = lora_rules(full, FAMILY, tied)
    assert "lora.full: got head" in str(error) and "name embeddings" in str(error)
    assert not list(lora_rules(full, FAMILY, replace(SHAPE, tied_embeddings=False)))


def test_unknown_target_and_large_rank_are_refused() -> None:
    text = said(LoraConfig(rank=4, targets=("q_porj",)))
    assert "lora.targets: got q_porj" in text and "Did you mean 'q_proj'?" in text
    assert "1 to 16, the smaller dimension of k_proj" in said(LoraConfig(rank=17))


def test_layers_with_an_output_per_head_limit_the_rank_only_by_name() -> None:
    model = Path(__file__).parents[2] / "examples" / "recipes" / "models" / "qwen3.5-0.8b"
    config = text_part(json.loads((model / "config.json").read_text()))
    family, shape = read_model(None, config)
    assert not list(lora_rules(LoraConfig(rank=32), family, shape))
    named = LoraConfig(rank=32, targets=("in_proj_b", "q_proj"))
    (error,) = lora_rules(named, family, shape)
    assert "1 to 16, the smaller dimension of in_proj_b" in str(error)


def test_experts_are_a_target_of_models_that_have_them() -> None:
    assert "this model has no experts" in said(LoraConfig(rank=4, targets=("experts",)))
    shape, mixture = replace(SHAPE, moe=MoeShape(8, 2, 12)), resolve_family("qwen3_moe", {})
    section = LoraConfig(rank=12, targets=("all-linear", "experts"))
    assert not list(lora_rules(section, mixture, shape))
    (error,) = lora_rules(section.model_copy(update={"rank": 13}), mixture, shape)
    assert "1 to 12, the smaller dimension of gate_proj in an expert" in str(error)
    (error,) = lora_rules(LoraConfig(rank=4, targets=("expert",)), mixture, shape)
    assert "Did you mean 'experts'?" in str(error)
    (error,) = lora_rules(LoraConfig(rank=4, targets=("gate_proj",)), mixture, shape)
    assert "lora.targets: got gate_proj; allowed: all-linear, experts, q_proj" in str(error)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("use_dora", True, "use_dora: got true"),
        ("bias", "all", 'bias: got "all"'),
        ("rank_pattern", {"q_proj": 2}, "rank_pattern: got"),
        ("modules_to_save", ["lm_head"], "modules_to_save: got"),
        ("peft_type", "LOHA", 'peft_type: got "LOHA"'),
        ("r", 0, "r: got 0"),
        ("r", 8, "shape (4, "),
        ("target_modules", ["q_proj"], "down_proj"),
    ],
)
def test_unsupported_option_of_an_adapter_is_named(
    peft: Path, key: str, value: object, message: str
) -> None:
    file = peft / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    assert message in said(LoraConfig(path=str(peft)))


def _rename(tensors: dict[str, torch.Tensor]) -> None:
    name = next(iter(tensors))
    tensors[name + ".absmax"] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_rename, "a quantized tensor"),
        (lambda tensors: tensors.popitem(), "got nothing"),
        (lambda tensors: tensors.update(score=torch.ones(1)), "an unknown tensor"),
    ],
)
def test_tensors_of_another_kind_are_named(
    peft: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    file = peft / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    assert message in said(LoraConfig(path=str(peft)))


def test_adapter_of_another_model_and_missing_files_are_named(peft: Path) -> None:
    section = LoraConfig(path=str(peft))
    assert "trained on another model" in said(section, replace(SHAPE, hidden_size=64))
    (peft / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors is missing" in said(section)
    (peft / "adapter_config.json").unlink()
    assert "lora.path: got" in said(section)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["lora.rank=4", "train.freeze=[embeddings]"], "train.freeze"),
        (["lora.rank=4", "train.fuse_param_gather=true"], "train.fuse_param_gather"),
        (
            ["lora.rank=4", "train.release_weights_in_rollout=true"],
            "train.release_weights_in_rollout",
        ),
        (["lora.rank=4", "placement.reference.tp=2"], "placement.reference"),
        (["lora.rank=4", "lora.full=[heads]"], "lora.full"),
        (["lora.alpha=4"], "lora.alpha"),
        (["lora.targets=[q_proj]"], "lora.targets"),
        (["lora.rank=4", "lora.targets=[]"], "lora.targets"),
        (["lora.path=x", "lora.rank=4"], "lora.rank"),
        (["lora.path=x", "lora.targets=[q_proj]"], "lora.targets"),
        (["checkpoint.export_hf=peft"], "checkpoint.export_hf"),
        (["lora.rank=4", "lora.full=[norms]", "checkpoint.export_hf=peft"], "checkpoint.export_hf"),
        (
            ["lora.rank=4", "algorithm.name=ppo", "checkpoint.export_hf=peft"],
            "checkpoint.export_hf",
        ),
    ],
)
def test_knobs_that_contradict_lora_are_named(overrides: list[str], key: str) -> None:
    config = load_config_dict(VALID, overrides)
    assert [error.name for error in lora_section_rules(config)] == [key]


def saved(lora: Lora = LORA, base: BaseReference = BASE) -> SavedAdapters:
    text = json.dumps(adapters_state(lora, base)["lora"])
    return SavedAdapters.model_validate(json.loads(text))


def test_checkpoint_of_the_same_adapters_is_accepted() -> None:
    check_adapters(None, None, None, Path("c"))
    check_adapters(saved(), LORA, BASE, Path("c"))
    moved = replace(BASE, path="/elsewhere")
    check_adapters(saved(), LORA, moved, Path("c"))


@pytest.mark.parametrize(
    ("before", "lora", "base", "message"),
    [
        (None, LORA, BASE, "no LoRA adapters; allowed: LoRA adapters, as this run has it"),
        (saved(), None, None, "got LoRA adapters; allowed: no LoRA adapters"),
        (saved(), replace(LORA, rank=2), BASE, "lora.rank of c: got 4; allowed: 2"),
        (saved(), replace(LORA, alpha=2.0), BASE, "lora.alpha of c: got 8.0; allowed: 2.0"),
        (saved(), replace(LORA, targets=("q_proj",)), BASE, "lora.targets of c: got down_proj, q_"),
        (saved(), replace(LORA, rslora=True), BASE, "lora.rslora of c: got False"),
        (saved(), replace(LORA, full=("norms",)), BASE, "lora.full of c: got nothing"),
        (saved(), LORA, replace(BASE, digest="1" * 64), "got digest 111111111111"),
    ],
)
def test_checkpoint_of_other_adapters_is_refused(
    before: SavedAdapters | None, lora: Lora | None, base: BaseReference | None, message: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_adapters(before, lora, base, Path("c"))
    assert message in str(caught.value)


def test_base_model_is_found_by_its_digest(tmp_path: Path) -> None:
    for name in ("old", "other"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.full((3,), float(len(name)))}, tmp_path / name / "model.safetensors")
    base = BaseReference(str(tmp_path / "old"), None, None, weights_digest(tmp_path / "old"))
    assert base_directory(base) == tmp_path / "old"
    (tmp_path / "old").rename(tmp_path / "new")
    assert base_directory(base, tmp_path / "new") == tmp_path / "new"
    with pytest.raises(CheckpointError, match=r"with --base"):
        base_directory(base)
    with pytest.raises(CheckpointError, match="got digest"):
        base_directory(base, tmp_path / "other")


@pytest.mark.parametrize(("scale", "least", "most"), [(1e-5, 0.9, 1.1), (10.0, 0.0, 0.01)])
def test_rounding_takes_small_updates_and_leaves_large_ones(
    scale: float, least: float, most: float
) -> None:
    torch.manual_seed(0)
    weight, a, b = torch.randn(12, 16).bfloat16(), torch.randn(4, 16), torch.randn(12, 2)
    rows, places = torch.arange(12), torch.arange(12) % 2
    tensor = MergedTensor(weight, a.bfloat16(), b.bfloat16(), rows, places, scale)
    lost, total = tensor.rounding()
    assert least <= (lost / total) ** 0.5 <= most
    exact = replace(tensor, weight=weight.float())
    merged = exact.compute(((0, 12), (0, 16)))
    assert not torch.equal(merged, exact.weight) and torch.equal(exact.weight, weight.float())
    assert exact.rounding()[0] < 1e-4 * total
