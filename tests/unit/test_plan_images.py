"""Planned cost of images: FLOPs and memory of vision towers, as torch counts them, and tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hybridrl.config.load import load_config_dict
from hybridrl.config.schema import Config
from hybridrl.config.wrapped_models import text_part
from hybridrl.models.family import read_model
from hybridrl.models.vision.shape import VisionShape
from hybridrl.models.vision.tower import build_tower
from hybridrl.parallel.host_gpus import Host, LocalGpu
from hybridrl.parallel.layout import TrainLayout
from hybridrl.services.planner.image_costs import (
    image_tokens,
    image_work,
    stored_bytes,
    tower_work,
)
from hybridrl.services.planner.micro_batch_sizes import (
    Lengths,
    largest_micro_batch,
    usual_micro_batches,
)
from hybridrl.services.planner.plan_report import plan_report
from hybridrl.services.planner.plan_text import plan_text
from hybridrl.services.planner.times import packs
from hybridrl.training.batches.packing import schedule
from hybridrl.training.batches.prompt_sharing import Unit, make_units

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
NAMES = ("qwen3-vl-4b", "qwen2.5-vl-7b")
SIDE = 16  # patches per row and column of an image
GIB = 2**30


def content_of(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text())
    return content


def thin(name: str) -> VisionShape:
    """Returns a published tower with fewer blocks, one of which attends to the whole image."""
    content = content_of(name)
    changes = {"depth": 3, "deepstack_visual_indexes": [1], "fullatt_block_indexes": [1]}
    content["vision_config"] |= {k: v for k, v in changes.items() if k in content["vision_config"]}
    _, shape = read_model(None, text_part(content))
    assert shape.vision is not None
    return shape.vision


def run(tower: torch.nn.Module, vision: VisionShape) -> Any:
    weight: Any = dict(tower.named_parameters())["patch_embed.proj.weight"]
    pixels = torch.randn(SIDE**2, weight[0].numel(), dtype=weight.dtype)
    return tower(pixels, grid_thw=torch.tensor([[1, SIDE, SIDE]]), return_dict=True)


@pytest.mark.parametrize("name", NAMES)
def test_towers_cost_what_torch_counts(name: str) -> None:
    vision, stored = thin(name), dict[int, torch.UntypedStorage]()
    tower = build_tower(vision, torch.bfloat16, torch.device("cpu"))
    for parameter in tower.parameters():
        torch.nn.init.constant_(parameter, 0.01)  # costs do not depend on values
    own = {parameter.untyped_storage().data_ptr() for parameter in tower.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            stored[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run(tower, vision)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:  # whose products are counted
        run(tower, vision)
    num_tokens = SIDE**2 // vision.merge_size**2
    work = tower_work(vision, num_tokens, num_tokens)
    assert work.flops == pytest.approx(counter.get_total_flops(), rel=0.01)
    kept = sum(storage.nbytes() for storage in stored.values())
    # The first layer and the mergers, which are not counted, are a large share of so few blocks.
    assert stored_bytes(vision, num_tokens, itemsize=2) == pytest.approx(kept, rel=0.3)


@pytest.mark.parametrize("dp", (1, 2))
@pytest.mark.parametrize("budget", (4096, 8192, 32768))
@pytest.mark.parametrize("shares", (True, False))
def test_an_image_counts_once_for_each_micro_batch_that_has_its_prompt(
    folder: Path, dp: int, budget: int, shares: bool
) -> None:
    """As training packs the samples of an update, 32 prompts x 8 of various lengths."""
    given = f"train.micro_batch_tokens={budget}", f"train.share_prompts={shares}"
    config = config_of(folder, *given, "layout.mean_response_tokens=192")
    shape = read_model(None, text_part(content_of("qwen3-vl-4b")))[1]
    rng = random.Random(0)
    lengths = [1152 + rng.randint(128, 256) for _ in range(256)]
    units = [Unit((sample,), 0, (length,)) for sample, length in enumerate(lengths)]
    if shares:
        prompts = [sample // 8 for sample in range(256)]
        units = [*make_units(prompts, [1152] * 256, lengths, dp, budget, 0, 1)]
    tokens, attended = [unit.tokens for unit in units], [unit.attended for unit in units]
    dealt = schedule(tokens, dp, budget, 1, attended=attended, attention_length=0)
    computed = sum(
        len({sample // 8 for unit in micro for sample in units[unit].samples})
        for micro in chain.from_iterable(dealt)
    )
    found = packs(config, shape, Lengths.of(config), dp, 1, budget)
    assert shape.vision is not None
    planned = found.tower.flops / tower_work(shape.vision, 1024, 1024).flops
    # Training splits more groups than plans assume, to fill micro-batches.
    assert planned * dp == pytest.approx(computed, rel=0.3 if shares else 0.1)


def test_several_images_of_a_prompt_do_not_attend_to_each_other(folder: Path) -> None:
    vision = thin("qwen3-vl-4b")
    sizes = ("data.max_prompt_tokens=4200", "layout.mean_image_tokens=4096")
    work = image_work(config_of(folder, *sizes), vision, 3, 8)
    assert work == tower_work(vision, 3 * 4096, 1024)


def config_of(folder: Path, *overrides: str) -> Config:
    return load_config_dict(
        {
            "run": {"name": "images", "dir": str(folder)},
            "model": {"init": str(folder)},
            "train": {"micro_batch_tokens": 8192},
            "rollout": {"engine": "vllm", "max_new_tokens": 256},
            "algorithm": {"name": "grpo"},
            "data": {"max_prompt_tokens": 1152},
            "steps": {"prompts_per_step": 32, "samples_per_prompt": 8},
        },
        list(overrides),
    )


def plan(folder: Path, *overrides: str) -> Mapping[str, Any]:
    config, host = config_of(folder, *overrides), Host(1, LocalGpu("NVIDIA H200", 140 * GIB))
    report, violations = plan_report(config, 1, host=host)
    assert not violations, violations
    return report


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text((MODELS / "qwen3-vl-4b.json").read_text())
    rules = {"patch_size": 16, "image_processor_type": "Qwen2VLImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(rules))
    return tmp_path


def test_plans_count_the_vision_tower(folder: Path) -> None:
    vision = thin("qwen3-vl-4b")
    whole, text = plan(folder), plan(folder, "layout.mean_image_tokens=0")
    smaller = plan(folder, "layout.mean_image_tokens=256")
    for phase in ("generation", "update"):
        times = [one["step"]["phases_s"][phase] for one in (text, smaller, whole)]
        assert times == sorted(times) and times[0] < times[1] < times[2]
    assert whole["images"]["tokens_per_prompt"] == 1024
    assert whole["images"]["tower_bytes"] == pytest.approx(2 * 0.4153e9, rel=1e-3)
    (line,) = (line for line in plan_text(dict(smaller)).splitlines() if line.startswith("images"))
    assert "256 tokens of images (layout.mean_image_tokens)" in line
    trained = plan(folder, "train.freeze=[]")
    assert trained["step"]["phases_s"]["update"] > whole["step"]["phases_s"]["update"]
    peak = "usual_train_peak_bytes"
    # Its gradients and optimizer state, 16 bytes for each of 0.4 G parameters, and activations.
    assert trained["memory"][peak] - whole["memory"][peak] > 0.4e9 * 16
    assert (
        plan(folder, "layout.mean_image_tokens=0", "train.freeze=[]")["memory"][peak]
        < (trained["memory"][peak])
    )

    def tokens(*overrides: str) -> int:
        content = {"model": {"init": "x"}, "algorithm": {"name": "grpo"}}
        config = load_config_dict(content | {"run": {"name": "a"}}, list(overrides))
        return image_tokens(config, vision)

    assert tokens("data.max_prompt_tokens=4096") == 1024
    assert tokens("data.max_prompt_tokens=4096", "data.max_image_pixels=4096") == 4
    assert tokens("data.max_prompt_tokens=300") == 300
    assert tokens("layout.mean_image_tokens=7") == 7


LATER = "layout.mean_response_image_tokens"


@pytest.mark.parametrize(
    ("given", "who"),
    (
        (("environment.name=own_environments:Pictures",), "the environment"),
        (("agent.function=own_agents:seeing",), "agents"),
    ),
)
def test_plans_count_images_of_later_turns_if_their_number_is_known(
    folder: Path, given: tuple[str, ...], who: str
) -> None:
    """Each sample has its own: its engine computes them, and each micro-batch for each sample."""
    (folder / "chat_template.jinja").write_text("{{ messages }}")  # which agents need
    most = *given, "rollout.max_new_tokens=2048", "train.micro_batch_tokens=16384"
    unknown, none = plan(folder, *most), plan(folder, *most, f"{LATER}=0")
    known, more = (plan(folder, *most, f"{LATER}={number}") for number in (512, 1024))
    assert unknown["step"]["phases_s"] == none["step"]["phases_s"]
    for phase in ("generation", "update"):
        times = [one["step"]["phases_s"][phase] for one in (none, known, more)]
        assert times[0] < times[1] < times[2]
    peak = "usual_train_peak_bytes"
    assert none["memory"][peak] < known["memory"][peak] < more["memory"][peak]
    lines = [
        [line for line in plan_text(dict(one)).splitlines() if "images" in line]
        for one in (unknown, none, known)
    ]
    assert [line for line in lines[0] if line not in lines[1]] == [
        f"         images that {who} may show are not counted: set {LATER}, the mean number of a "
        "response's tokens that belong to them"
    ]
    assert f"a response has 512 ({LATER})" in lines[2][0] and len(lines[2]) == 1


def test_images_of_later_turns_count_for_each_sample_of_a_micro_batch(folder: Path) -> None:
    given = "environment.name=own_environments:Pictures", "rollout.max_new_tokens=1024"
    config = config_of(folder, *given, "layout.mean_image_tokens=256", f"{LATER}=512")
    shape, one = read_model(None, text_part(content_of("qwen3-vl-4b")))[1], TrainLayout(1)
    found = {size.image_tokens for size in usual_micro_batches(config, shape, one)}
    # A unit has the prompt of 1,152 tokens and 4 of its 8 responses of 1,024 tokens.
    assert found == {256 + 4 * 512}
    largest = largest_micro_batch(config, shape, one)
    assert largest.image_tokens == largest.positions >= max(found)
    assert shape.vision is not None
    work = packs(config, shape, Lengths.of(config), dp=1, cp=1, budget=8192).tower
    of_prompts = packs(
        config_of(folder, *given, "layout.mean_image_tokens=256"),
        *(shape, Lengths.of(config), 1, 1, 8192),
    ).tower
    shown = tower_work(shape.vision, 32 * 8 * 512, 512)
    assert work.flops - of_prompts.flops == pytest.approx(shown.flops)
    assert work.traffic - of_prompts.traffic == pytest.approx(shown.traffic)


def test_no_image_of_later_turns_is_missed_without_environments_that_could_show_one(
    folder: Path,
) -> None:
    for given in ((), ("environment.name=calculator",)):
        report = plan(folder, *given)
        assert report["images"]["not_counted"] is None
        assert "may show" not in plan_text(dict(report))


def test_plans_refuse_fewer_pixels_than_the_processor_makes(folder: Path) -> None:
    file = folder / "preprocessor_config.json"
    sizes = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes))
    given = "data.max_image_pixels=65535", "rollout.engine=hf"
    report, (error,) = plan_report(config_of(folder, *given), 1)
    allowed = "65536, the processor's smallest size, or more"
    assert error.name == "data.max_image_pixels" and error.allowed == allowed
    assert plan(folder, "data.max_image_pixels=65536")["images"]["tokens_per_prompt"] == 64
    # Also with a file as model.init, next to which the processor's files are.
    config = config_of(folder, *given, f"model.init={folder / 'config.json'}")
    assert [one.name for one in plan_report(config, 1)[1]] == ["data.max_image_pixels"]
