"""Plans of runs with LoRA: memory, traffic and times of adapters on frozen weights."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config.load import load_config_dict
from hybridrl.config.source import read_model_config
from hybridrl.models.adapters.lora import Lora
from hybridrl.models.adapters.rows import adapted, base_of, is_adapter
from hybridrl.models.family import read_model
from hybridrl.models.trainable import synced_family
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.host_gpus import Host
from hybridrl.rollout.registry import ENGINES
from hybridrl.services.planner.alike import fullest_rank, memory_alike
from hybridrl.services.planner.choose import search, search_with_adapters
from hybridrl.services.planner.hardware import GIB, ClusterFile, assume
from hybridrl.services.planner.phase_memory import role_models
from hybridrl.services.planner.plan_report import plan_report
from hybridrl.services.planner.plan_text import plan_text
from hybridrl.services.planner.planned_models import planned_models
from hybridrl.services.planner.search_report import search_report, search_text

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "benchmarks" / "models" / "qwen2.5-7b.json"
H100 = ClusterFile(gpu_memory_gib=79.2)
ADAPTERS = 80_740_352  # parameters of rank 32 on all linear layers of Qwen2.5 7B
BASE = 7_615_616_512
EMBEDDINGS = 2 * 152_064 * 3584
NORMS_AND_BIASES = 57 * 3584 + 28 * (3584 + 2 * 512)
LORA = "lora.rank=32"


def config_of(*overrides: str, engine: str = "vllm", algorithm: str = "grpo") -> Any:
    sections = {
        "run": {"name": "a"},
        "model": {"init": str(MODEL), "dtype": "bfloat16"},
        "algorithm": {"name": algorithm, "kl_coef": 0.01},
        "rollout": {"engine": engine, "max_new_tokens": 512},
        "data": {"max_prompt_tokens": 256},
        "steps": {"prompts_per_step": 32, "samples_per_prompt": 8},
        "train": {"micro_batch_tokens": 8192},
    }
    return load_config_dict(sections, list(overrides))


def plan(*overrides: str, world: int = 1, **more: str) -> dict[str, Any]:
    report, violations = plan_report(config_of(*overrides, **more), world, H100, Host())
    assert violations == []
    return report


def test_only_adapters_have_gradients_and_optimizer_states_and_the_base_is_held_once() -> None:
    full, lora = plan(), plan(LORA)
    # Full training: 18 bytes a parameter and the reference's 2. The activations are equal.
    less = full["memory"]["train_peak_bytes"] - lora["memory"]["train_peak_bytes"]
    assert less == 20 * BASE - (2 * BASE + 18 * ADAPTERS)
    assert full["fits"] is False and lora["fits"] is True
    assert lora["trained"] == f"{ADAPTERS:,} of {BASE + ADAPTERS:,} parameters (lora)"
    assert lora["memory"]["checkpoint_copy_bytes"] < 15 * ADAPTERS * 1.1 + GIB


def test_the_reference_needs_time_but_no_memory() -> None:
    with_reference, without = plan(LORA), plan(LORA, "algorithm.kl_coef=0")
    for key in ("train_peak_bytes", "rollout_peak_bytes"):
        assert with_reference["memory"][key] == without["memory"][key]
    scoring = [one["step"]["phases_s"]["scoring"] for one in (with_reference, without)]
    assert scoring[0] > scoring[1]
    assert "the reference is the policy without adapters" in plan_text(with_reference)


def test_a_critic_adds_only_its_adapters() -> None:
    alone, both = plan(LORA), plan(LORA, algorithm="ppo")
    peaks = "train_peak_bytes", "rollout_peak_bytes"
    more = {key: both["memory"][key] - alone["memory"][key] for key in peaks}
    assert more["train_peak_bytes"] == 18 * ADAPTERS
    assert more["rollout_peak_bytes"] == 14 * ADAPTERS  # without gradients
    found = {"shares_frozen_weights": True, "own_bytes": 2 * ADAPTERS}
    assert both["lora"]["roles"]["critic"] == found
    text = "the critic uses the policy's frozen weights; its other weights: 161 MB"
    assert text in plan_text(both)


def test_a_critic_in_another_layout_is_a_second_model() -> None:
    knobs = LORA, "train.tp=2", "rollout.tp=2"
    alike, apart = (
        plan(*knobs, *more, world=2, algorithm="ppo") for more in ((), ("placement.critic.tp=1",))
    )
    more = apart["memory"]["train_peak_bytes"] - alike["memory"]["train_peak_bytes"]
    assert more >= 2 * BASE
    assert "the critic is a second model" in plan_text(apart)
    assert "the critic uses the policy's frozen weights" in plan_text(alike)


def test_a_reference_copies_only_the_parts_that_are_trained_completely() -> None:
    whole = "lora.full=[embeddings,head]"
    with_reference, without = plan(LORA, whole), plan(LORA, whole, "algorithm.kl_coef=0")
    for key in ("train_peak_bytes", "rollout_peak_bytes"):
        more = with_reference["memory"][key] - without["memory"][key]
        assert more == 2 * EMBEDDINGS
    assert with_reference["lora"]["roles"]["reference"]["own_bytes"] == 2 * EMBEDDINGS


def test_an_engine_that_holds_adapters_shares_the_base_and_receives_adapters_alone() -> None:
    report = plan(LORA)
    assert report["lora"]["adapter_bytes"] == report["lora"]["sync_bytes"] == 2 * ADAPTERS
    assert report["lora"]["once_receive_bytes"] == [0]
    assert report["reshard"]["local_bytes"] == [2 * ADAPTERS]
    assert report["reshard"]["alias_bytes"] == plan()["reshard"]["alias_bytes"]
    assert "each sync sends the adapters, 161 MB per engine" in plan_text(report)


def test_other_engines_receive_the_adapted_weights_and_share_nothing(monkeypatch) -> None:
    without = replace(ENGINES["sglang"], takes_adapters=False)
    monkeypatch.setitem(ENGINES, "sglang", without)
    report = plan(LORA, engine="sglang")
    assert report["lora"]["engine_holds_adapters"] is False
    assert report["lora"]["sync_bytes"] == 2 * (BASE - EMBEDDINGS - NORMS_AND_BIASES)
    assert report["reshard"]["alias_bytes"] == [0]
    held = report["memory"]["rollout_peak_bytes"] - plan(LORA)["memory"]["rollout_peak_bytes"]
    shared = plan(LORA)["reshard"]["alias_bytes"][0]
    assert held == shared - 2 * ADAPTERS
    assert "merged weights" in plan_text(report)


def test_ranks_receive_the_base_once_if_they_do_not_train_it() -> None:
    report = plan(LORA, "train.pp=2", "rollout.tp=1", world=2)
    assert min(report["lora"]["once_receive_bytes"]) > 0.4 * 2 * BASE
    assert max(report["reshard"]["receive_bytes"]) < 2 * ADAPTERS


LAYERS = 4
EXPERTS = LAYERS * 128  # experts of Qwen3 30B-A3B, of width 768 in layers of width 2048
OF_EXPERTS = EXPERTS * 3 * 8 * (2048 + 768)
OF_ATTENTION = LAYERS * 8 * (3 * 2048 + 4096 + 2 * 512 + 4096 + 2048)
MIXTURE = ("lora.rank=8", "lora.targets=[all-linear, experts]")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides for adapters on a few layers of Qwen3 30B-A3B."""
    content = json.loads((MODEL.parent / "qwen3-30b-a3b.json").read_text())
    file = tmp_path_factory.mktemp("mixture") / "config.json"
    file.write_text(json.dumps(content | {"num_hidden_layers": LAYERS}))
    return f"model.init={file}", *MIXTURE


def test_adapters_of_experts_are_counted_and_merged_for_engines_without_slots_for_them(
    mixture: tuple[str, ...],
) -> None:
    report, violations = plan_report(config_of(*mixture, "train.ep=4"), 4, H100, Host())
    assert violations == []
    lora, alone = report["lora"], "lora.targets=[experts]"
    assert lora["adapter_bytes"] == 2 * (OF_EXPERTS + OF_ATTENTION)
    merged = 2 * EXPERTS * 3 * 2048 * 768
    assert lora["sync_bytes"] == merged + 2 * OF_ATTENTION
    assert lora["engine_holds_adapters"] is True
    text = plan_text(report)
    assert "each sync sends adapters and merged weights" in text
    assert "merged weights of experts (lora.targets: targets without experts" in text
    held = plan(*mixture, "train.ep=4", engine="hf", world=4)
    assert held["lora"]["sync_bytes"] == held["lora"]["adapter_bytes"] == lora["adapter_bytes"]
    assert held["lora"]["merging"] is None
    config = config_of(*mixture)
    models, _ = planned_models(config)
    assert models is not None
    known = read_model(None, read_model_config(config.model))
    policy = role_models(config, models, *known)[0]
    assert policy.adapter_params == OF_EXPERTS + OF_ATTENTION
    assert policy.active_adapter_params == OF_EXPERTS * 8 // 128 + OF_ATTENTION  # 8 a token
    only = plan(*mixture, alone, "train.ep=4", world=4)
    assert only["lora"]["adapter_bytes"] == 2 * OF_EXPERTS
    assert only["lora"]["sync_bytes"] == merged
    assert only["lora"]["engine_holds_adapters"] is False


@pytest.mark.parametrize(
    ("engine", "targets"),
    [("vllm", "[all-linear, experts]"), ("vllm", "[experts]"), ("hf", "[all-linear, experts]")],
)
def test_a_search_counts_adapters_of_experts_as_a_plan_does(
    engine: str, targets: str, mixture: tuple[str, ...]
) -> None:
    more = ("rollout.tp=4", "rollout.ep=4") if engine == "vllm" else ()
    sizes = "train.ep=4", f"lora.targets={targets}", *more
    check_search(config_of(*mixture, *sizes, engine=engine))


@pytest.mark.parametrize(
    ("engine", "algorithm"),
    [("vllm", "grpo"), ("sglang", "grpo"), ("hf", "grpo"), ("vllm", "ppo")],
)
@pytest.mark.parametrize(
    "sizes",
    [("train.tp=2", "rollout.tp=2"), ("train.pp=2", "rollout.tp=1"), ("train.tp=4",)],
)
def test_a_search_counts_the_memory_that_a_plan_counts(
    sizes: tuple[str, ...], engine: str, algorithm: str
) -> None:
    sizes = tuple(one for one in sizes if engine != "hf" or one.startswith("train"))
    check_search(config_of(LORA, *sizes, engine=engine, algorithm=algorithm))


def check_search(config: Any) -> None:
    report, violations = plan_report(config, 4, H100, Host())
    assert violations == []
    models, _ = planned_models(config)
    assumed, _ = assume(H100, 4, Host())
    assert models is not None and assumed is not None
    roles = role_models(config, models, *read_model(None, read_model_config(config.model)))
    memory = memory_alike(config, fullest_rank(config, roles, 4), 4, assumed)
    assert memory.train == report["memory"]["train_peak_bytes"]
    assert memory.rollout == report["memory"]["rollout_peak_bytes"]
    assert memory.saved > 0


def test_an_update_with_adapters_takes_less_time_and_generation_more() -> None:
    full, lora = (plan(*one)["step"]["phases_s"] for one in ((), (LORA,)))
    assert 0.6 < lora["update"] / full["update"] < 0.75  # at best 4 of 6 FLOPs
    assert lora["reshard"] < full["reshard"]
    # Full training has so little room for requests that it decodes them in turn.
    roomy = ClusterFile(gpu_memory_gib=300)
    times = [
        plan_report(config_of(*one), 1, roomy, Host())[0]["step"]["phases_s"]["generation"]
        for one in ((), (LORA,))
    ]
    assert 1.0 < times[1] / times[0] < 1.5


def test_search_proposes_adapters_where_nothing_else_fits() -> None:
    config = config_of("train.optimizer_memory=device")
    result, assumed = search(config, 1, Host(), H100)
    assert not result.best
    found = search_with_adapters(config, 1, Host(), H100)
    assert found is not None and found.best.found.spare_bytes > 0
    assert found.full.most_bytes > found.best.found.most_bytes + 16 * BASE
    text = search_text(search_report(result, assumed, 1.0, (), None, found))
    assert "another training method fits: LoRA with lora.rank=32" in text
    assert "full training in the same layout would need" in text
    assert search_with_adapters(config_of(LORA), 1, Host(), H100) is None
    assert search_with_adapters(config_of("train.freeze=[embeddings]"), 1, Host(), H100) is None
    result, _ = search(config_of(LORA), 1, Host(), H100)
    assert result.best


@pytest.mark.parametrize("full", [(), ("head", "norms")])
def test_synced_weights_are_the_trained_and_those_that_adapters_change(
    full: tuple[str, ...],
) -> None:
    base, shape = read_model(None, read_model_config(config_of().model))
    family = adapted(base, Lora(8, 8.0, ("q_proj", "down_proj"), full=full))
    held = hf_shapes(synced_family(family, shape, family), shape)
    merged = hf_shapes(synced_family(family, shape, base_of(family)), shape)
    assert {name for name in held if is_adapter(name)} == {
        name for name in hf_shapes(family, shape) if is_adapter(name)
    }
    assert not any(map(is_adapter, merged)) and merged.keys() <= hf_shapes(base, shape).keys()
    assert {name for name in merged if "layers.3." in name and "norm" not in name} == {
        f"model.layers.3.{part}.weight"
        for part in (
            *(f"self_attn.{one}_proj" for one in "qkv"),  # one parameter of the trainer
            "mlp.down_proj",
        )
    }
    others = {name for name in held if not is_adapter(name)}
    assert others == {name for name in merged if "norm" in name or "lm_head" in name}
    assert bool(others) == bool(full)
    assert synced_family(base_of(family), shape, base_of(family)) is base_of(family)
    assert sum(map(prod, held.values())) < sum(map(prod, merged.values()))
