"""Levels of the optimizer state: which one `auto` takes, what is refused, and what plans print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridrl.cli.eval import evaluated_config
from hybridrl.config.identity import check_run_folder, run_folder, saved_config, write_config
from hybridrl.config.load import load_config_dict
from hybridrl.config.rules import check
from hybridrl.config.rules_optimizer import gradient_rules, is_written_from_copies, level_name
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.parallel.host_gpus import Host
from hybridrl.services.planner.choose import chosen_values, needs_choice, with_layout
from hybridrl.services.planner.hardware import ClusterFile
from hybridrl.services.planner.plan_report import plan_report
from hybridrl.services.planner.plan_text import plan_text

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
H200, H100 = ClusterFile(gpu="H200"), ClusterFile(gpu="H100")


def config_of(model: str, *overrides: str, **more: Any) -> Config:
    sections = {
        "run": {"name": "a"},
        "model": {"init": str(MODELS / f"qwen2.5-{model}.json"), "dtype": "bfloat16"},
        "algorithm": {"name": "grpo", "kl_coef": 0.0},
        "train": {"recompute": "full"},
        "rollout": {"engine": "vllm", "max_new_tokens": 512, "max_batch": 64},
        "steps": {"prompts_per_step": 8, "samples_per_prompt": 8},
        "data": {"max_prompt_tokens": 256},
        **more,
    }
    return load_config_dict(sections, list(overrides))


@pytest.mark.parametrize(
    ("model", "world", "cluster", "overrides", "level"),
    [
        ("1.5b", 1, H200, (), "auto"),  # stays, and means device
        ("7b", 1, H200, (), "auto"),
        ("7b", 1, H100, (), "host"),
        ("7b", 2, H100, (), "low_precision"),
        ("14b", 1, H200, (), "host"),
        ("32b", 2, H200, ("train.tp=2", "rollout.tp=2"), "host"),
        ("14b", 1, H200, ("train.optimizer_memory=device",), "device"),
        ("14b", 1, H200, ("train.adam_beta2=0.999",), "auto"),
        ("1.5b", 1, H200, ("train.gradient_dtype=bfloat16",), "low_precision"),
        ("32b", 1, H100, (), "host"),  # does not fit either, and needs the least
    ],
)
def test_auto_takes_the_first_level_that_fits(
    model: str, world: int, cluster: ClusterFile, overrides: tuple[str, ...], level: str
) -> None:
    config = config_of(model, *overrides)
    found = with_layout(config, world, Host(), cluster)
    assert found.train.optimizer_memory == level
    assert chosen_values(found) == {"train.optimizer_memory": level}
    report, violations = plan_report(found, world, cluster)
    assert violations == []
    used = {"auto": "device"}.get(level, level)
    assert report["optimizer"]["level"] == used
    fits = {one["level"]: one["fits"] for one in report["optimizer"]["levels"]}
    assert used in fits
    if fits[used] and level != "device":
        assert not any(fits[name] for name in list(fits)[: list(fits).index(used)])


def test_layout_search_prefers_levels_that_round_less() -> None:
    config = config_of("7b", layout="auto")
    chosen = with_layout(config, 4, Host(), H200)
    assert chosen.train.optimizer_memory == "device"
    assert "train.optimizer_memory" in chosen.layout.chosen_keys
    small = with_layout(config_of("14b", layout="auto"), 1, Host(), H200)
    assert small.train.optimizer_memory == "host"


def test_a_plan_prints_the_level_and_what_it_costs() -> None:
    config = with_layout(config_of("14b"), 1, Host(), H200)
    report, _ = plan_report(config, 1, H200)
    text = plan_text(report, is_full=False)
    assert report["fits"] is True
    assert "optimizer host: 16-bit remainders" in text and "6 bytes per parameter" in text
    levels = {one["level"]: one for one in report["optimizer"]["levels"]}
    host, peaks = levels["host"], {n: one["train_peak_bytes"] for n, one in levels.items()}
    assert f"host: at most {peaks['host'] / 2**30:.1f} GiB of a GPU in training, 82.5 GiB" in text
    assert f"device: at most {peaks['device'] / 2**30:.1f} GiB of a GPU in training" in text
    # 12 or 6 bytes for each of 14.77 G parameters, and less memory for pieces than for passes.
    assert peaks["device"] - peaks["host"] == pytest.approx(12 * 14.77e9, rel=0.001)
    assert peaks["low_precision"] - peaks["host"] == pytest.approx(6 * 14.77e9, rel=0.001)
    assert host["step_s"] == pytest.approx(6 * 14.77e9 / 46e9, rel=0.01)
    assert report["memory"]["checkpoint_copy_bytes"] == 0


def test_start_up_holds_the_weights_twice() -> None:
    config = config_of("14b", "train.optimizer_memory=host", "train.gradient_dtype=bfloat16")
    report, _ = plan_report(config, 1, H200)
    assert report["verdict"]["phase"] == "start-up"
    assert report["verdict"]["estimate_bytes"] == pytest.approx(6 * 14.77e9, rel=0.01)


def test_without_gpus_nothing_is_chosen() -> None:
    config = config_of("14b", "rollout.engine=hf")
    assert not needs_choice(config, 1, has_gpus=False) and needs_choice(config, 1, has_gpus=True)
    assert with_layout(config, 1, Host()) is config


@pytest.mark.parametrize(
    ("overrides", "key", "part"),
    [
        (("model.dtype=float32",), "train.optimizer_memory", "bf16 weights with remainders"),
        (("train.release_weights_in_rollout=true",), "train.optimizer_memory", "rebuilds"),
        (("train.adam_beta2=0.999",), "train.adam_beta2", "at most 0.99"),
        (("train.adam_beta1=0.995",), "train.adam_beta1", "at most 0.99"),
    ],
)
@pytest.mark.parametrize("level", ["low_precision", "host"])
def test_levels_that_a_run_cannot_have_are_refused(
    level: str, overrides: tuple[str, ...], key: str, part: str
) -> None:
    config = config_of("1.5b", f"train.optimizer_memory={level}", *overrides)
    (error,) = check(config, 1)
    assert error.name == key and part in error.allowed, error
    fixed = config.with_values({"train.optimizer_memory": "device"})
    assert check(fixed, 1, default_dtype="bfloat16") == []


def test_bf16_gradients_need_a_level_without_fp32_copies() -> None:
    config = config_of("1.5b", "train.gradient_dtype=bfloat16", "train.optimizer_memory=device")
    (error,) = check(config, 1)
    assert error.name == "train.gradient_dtype" and "low_precision" in error.remedy


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.dtype=float32",),
        ("train.adam_beta2=0.999",),
        ("train.release_weights_in_rollout=true",),
    ],
)
def test_bf16_gradients_are_refused_where_no_level_allows_them(overrides: tuple[str, ...]) -> None:
    config = config_of("1.5b", "train.gradient_dtype=bfloat16", *overrides)
    (error,) = check(config, 1)
    assert error.name == "train.gradient_dtype" and "low_precision" not in error.remedy
    found = with_layout(config, 1, Host(), H200)
    assert [one.name for one in check(found, 1)] == ["train.gradient_dtype"]


def test_bf16_gradients_are_refused_if_nothing_chose_a_level() -> None:
    config = config_of("1.5b", "train.gradient_dtype=bfloat16")
    assert check(config, 1, default_dtype="bfloat16") == []
    assert [one.name for one in gradient_rules(config)] == ["train.gradient_dtype"]
    chosen = with_layout(config, 1, Host(), H200)
    assert list(gradient_rules(chosen)) == []


def saved_of_earlier_version(offloads: bool, config: Config) -> None:
    """Writes the run's config.yaml as a version with `train.offload_optimizer` did."""
    run_folder(config).mkdir()
    write_config(config)
    file = run_folder(config) / "config.yaml"
    content = yaml.safe_load(file.read_text())
    del content["train"]["optimizer_memory"]
    content["train"]["offload_optimizer"] = offloads
    keys = [one for one in content["layout"]["chosen_keys"] if one != "train.optimizer_memory"]
    content["layout"]["chosen_keys"] = keys and [*keys, "train.offload_optimizer"]
    file.write_text(yaml.safe_dump(content))


@pytest.mark.parametrize("offloads", [True, False])
def test_runs_of_earlier_versions_keep_their_layout_and_level(
    offloads: bool, tmp_path: Path
) -> None:
    config = config_of("1.5b", layout="auto", run={"name": "a", "dir": str(tmp_path)})
    chosen = with_layout(config, 4, Host(), H200)
    other = chosen.with_values({"train.micro_batch_tokens": 1234})  # not what a search chooses
    saved_of_earlier_version(offloads, other)
    level = "host" if offloads else "device"
    saved = saved_config(config)
    assert saved is not None and level_name(saved.train) == level
    again = with_layout(config, 4, Host(), H200)
    assert again.train.micro_batch_tokens == 1234 and again.train.optimizer_memory == level
    check_run_folder(config)
    evaluated, _ = evaluated_config(tmp_path / "a", [])
    assert level_name(evaluated.train) == level
    with pytest.raises(ConfigError, match="train.optimizer_memory=host"):
        evaluated_config(tmp_path / "a", ["train.offload_optimizer=true"])


def test_a_saved_level_that_is_refused_now_is_dropped(tmp_path: Path) -> None:
    config = config_of("1.5b", "train.adam_beta2=0.999", run={"name": "a", "dir": str(tmp_path)})
    saved_of_earlier_version(True, config)
    saved = saved_config(config)
    assert saved is not None and saved.train.optimizer_memory == "auto"


def test_a_run_that_continues_keeps_its_level(tmp_path: Path) -> None:
    config = config_of("1.5b", run={"name": "a", "dir": str(tmp_path)})
    assert with_layout(config, 1, Host(), H200).train.optimizer_memory == "auto"
    run_folder(config).mkdir()
    write_config(config.with_values({"train.optimizer_memory": "low_precision"}))
    assert with_layout(config, 1, Host(), H200).train.optimizer_memory == "low_precision"


def test_the_former_knob_is_named_with_its_successor_and_ignored_where_it_was_off() -> None:
    with pytest.raises(ConfigError, match="train.optimizer_memory=host"):
        config_of("1.5b", "train.offload_optimizer=true")
    assert config_of("1.5b", "train.offload_optimizer=false") == config_of("1.5b")


def test_a_state_on_the_host_is_written_without_copies() -> None:
    assert is_written_from_copies(config_of("1.5b"))
    assert is_written_from_copies(config_of("1.5b", "train.optimizer_memory=low_precision"))
    assert not is_written_from_copies(config_of("1.5b", "train.optimizer_memory=host"))
    assert not is_written_from_copies(config_of("1.5b", "checkpoint.export_hf=true"))


@pytest.mark.parametrize(
    ("overrides", "key", "part"),
    [
        (("train.optimizer_memory=host",), "train.optimizer_memory", "momentum is fp32"),
        (("train.optimizer_memory=low_precision",), "train.optimizer_memory", "momentum is fp32"),
        (("train.gradient_dtype=bfloat16",), "train.gradient_dtype", "float32"),
        (("lora.rank=8",), "train.optimizer", "adamw with LoRA"),
    ],
)
def test_what_muon_cannot_have_is_refused(overrides: tuple[str, ...], key: str, part: str) -> None:
    config = config_of("1.5b", "train.optimizer=muon", *overrides)
    (error,) = check(config, 1, default_dtype="bfloat16")
    assert error.name == key and part in error.allowed, error


def test_a_plan_with_muon_counts_one_moment_of_matrices() -> None:
    reports, found = {}, {}
    for name in ("adamw", "muon"):
        config = with_layout(config_of("7b", f"train.optimizer={name}"), 1, Host(), H200)
        # The level that fits is the only one that Muon has.
        assert config.train.optimizer_memory == "auto"
        reports[name], violations = plan_report(config, 1, H200)
        assert violations == []
        found[name] = reports[name]["memory"]["train_peak_bytes"]
    # Embeddings, head and norms keep two moments; the head is not tied.
    matrices = 7.616e9 - 2 * 152064 * 3584
    assert found["adamw"] - found["muon"] == pytest.approx(4 * matrices, rel=0.001)
    steps = {name: report["step"]["phases_s"]["update"] for name, report in reports.items()}
    assert 0.2 < steps["muon"] - steps["adamw"] < 2.0, steps
    text = plan_text(reports["muon"], is_full=False)
    assert "optimizer muon: fp32 masters and fp32 momentum on the GPU, 8 bytes per" in text
    assert "of a matrix; AdamW for others, 12 bytes" in text
    assert "optimizer " not in plan_text(reports["adamw"], is_full=False)


def test_muon_is_chosen_no_lower_level_and_keeps_its_run_folder(tmp_path: Path) -> None:
    run = {"name": "a", "dir": str(tmp_path)}
    config = config_of("14b", "train.optimizer=muon", run=run)
    assert with_layout(config, 1, Host(), H200).train.optimizer_memory == "auto"
    run_folder(config).mkdir()
    write_config(config)
    check_run_folder(config)
    with pytest.raises(ConfigError, match="train.optimizer: got 'adamw'"):
        check_run_folder(config.with_values({"train.optimizer": "adamw"}))
