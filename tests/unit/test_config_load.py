"""Reading YAML and overrides: what is wrong is named, all at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridrl.config.identity import (
    check_run_folder,
    identity_violations,
)
from hybridrl.config.identity import identity as identity_of
from hybridrl.config.load import changed_yaml, knobs, load_config, load_config_dict, to_yaml
from hybridrl.config.other_systems import OTHER_SYSTEMS
from hybridrl.errors import ConfigError, UserError

MINIMAL: dict[str, Any] = {
    "run": {"name": "a"},
    "model": {"init": "m"},
    "algorithm": {"name": "grpo"},
}


def violations(content: dict[str, Any], *overrides: str) -> dict[str, UserError]:
    with pytest.raises(ConfigError) as caught:
        load_config_dict(content, overrides)
    return {violation.name: violation for violation in caught.value.violations}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_file_with_overrides_is_read(tmp_path: Path) -> None:
    text = (
        "run: {name: a}\nmodel: {init: m}\nalgorithm: {name: grpo}\ntrain: {learning_rate: 1e-4}\n"
    )
    config = load_config(
        write(tmp_path / "c.yaml", text),
        ["train.tp=2", "data.prompts=[a.jsonl, b.jsonl]", "model.dtype=bfloat16", "train.tp=4"],
    )
    assert config.train.learning_rate == 1e-4
    assert config.train.tp == 4
    assert config.data.prompts == ("a.jsonl", "b.jsonl")
    assert config.model.dtype == "bfloat16"


def test_override_keeps_text_that_yaml_would_drop_as_a_comment() -> None:
    config = load_config_dict(MINIMAL, [r"reward.extract=#### (-?\d+)"])
    assert config.reward.extract == r"#### (-?\d+)"


def test_override_null_resets_an_optional_knob() -> None:
    assert load_config_dict(MINIMAL, ["model.init=null", "model.path=p"]).model.init is None


def test_overrides_do_not_change_the_callers_mapping() -> None:
    load_config_dict(MINIMAL, ["run.name=b", "train.tp=2"])
    assert MINIMAL["run"] == {"name": "a"}
    assert "train" not in MINIMAL


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("train.learning_rte", "train.learning_rate"),
        ("train.lr", "train.learning_rate"),
        ("trian.tp", "train"),
        ("train.temperature", "rollout.temperature"),
        ("algorithm.clip_lo", "algorithm.clip_low"),
        ("steps.samples_per_promt", "steps.samples_per_prompt"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    found = violations(MINIMAL, f"{key}=1")
    named = key if nearest.count(".") else key.split(".")[0]
    assert list(found) == [named]
    assert f"'{nearest}'" in found[named].remedy
    assert str(found[named]).startswith(f"{named}: unknown key. {found[named].remedy}")


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("rollout.n", "'steps.samples_per_prompt'"),
        ("actor_rollout_ref.rollout.n", "'steps.samples_per_prompt'"),
        ("num_generations", "'steps.samples_per_prompt'"),
        ("algorithm.beta", "'algorithm.kl_coef'"),
        ("rollout.tensor_model_parallel_size", "'rollout.tp'"),
        ("train.megatron.tensor_model_parallel_size", "'train.tp'"),
        ("train.bf16", "'model.dtype'"),
        ("train.batch_size", "'steps.prompts_per_step'"),
        ("rollout.max_completion_length", "'rollout.max_new_tokens'"),
        ("algorithm.ppo_epochs", "'steps.updates_per_step'"),
        ("rollout.gpu_memory_utilization", "'rollout.gpu_memory_share'"),
        ("algorithm.loss_agg_mode", "'algorithm.aggregate'"),
        ("trainer.nnodes", "Remove it: torchrun"),
        ("algorithm.kl_ctrl.kl_coef", "'algorithm.kl_coef'"),
        ("actor_rollout_ref.model.lora_rank", "Remove it; docs/guides/coming_from.md"),
        ("algorithm.kl_ctrl.type", "Remove it; docs/guides/coming_from.md"),
        ("+trainer.nnodes", "Remove it: torchrun"),
        ("+train.learning_rte", "Did you mean 'train.learning_rate'?"),
    ],
)
def test_a_name_of_another_system_is_translated(key: str, ours: str) -> None:
    found = violations(MINIMAL, f"{key}=1")
    assert len(found) == 1 and ours in next(iter(found.values())).remedy


def test_each_key_of_another_systems_section_is_translated() -> None:
    section = {"rollout": {"n": 8, "name": "vllm"}, "actor": {"optim": {"lr": 1e-6}, "odd": 1}}
    found = violations({**MINIMAL, "actor_rollout_ref": section})
    prefix = "actor_rollout_ref."
    told = {key.removeprefix(prefix): error.remedy for key, error in found.items()}
    assert told.keys() == {"rollout.n", "rollout.name", "actor.optim.lr", "actor.odd"}
    assert "'rollout.engine'" in told["rollout.name"]
    assert "'train.learning_rate'" in told["actor.optim.lr"]
    assert "coming_from.md" in told["actor.odd"]


def test_names_of_other_systems_lead_to_knobs_that_exist() -> None:
    sections = {key.partition(".")[0] for key in knobs()}
    known = {re.sub(r"^algorithm\[\w+\]", "algorithm", key) for key in knobs()} | sections
    for system, names in OTHER_SYSTEMS.items():
        for name, ours in names.items():
            assert ours.keys or ours.note, f"{system}: {name}"
            assert set(ours.keys) <= known | {"reward.functions"}, f"{system}: {name}"


@pytest.mark.parametrize("name", ["gropo", "gpro", "GRPO"])
def test_unknown_algorithm_names_the_nearest(name: str) -> None:
    found = violations({**MINIMAL, "algorithm": {"name": name}})["algorithm.name"]
    assert f"'{name}'" in str(found) and "grpo, ppo, sft" in str(found)
    assert found.remedy == "Did you mean 'grpo'?"


def test_the_engine_of_tests_is_accepted_and_not_offered() -> None:
    assert load_config_dict(MINIMAL, ["rollout.engine=scripted"]).rollout.engine == "scripted"
    said = str(violations(MINIMAL, "rollout.engine=vlm")["rollout.engine"])
    assert "'hf', 'vllm' or 'sglang'" in said and "scripted" not in said


@pytest.mark.parametrize("name", [{"name": "grpo"}, ["grpo"], 3])
def test_a_name_of_an_algorithm_that_is_no_word_is_refused_by_its_key(name: object) -> None:
    found = violations({**MINIMAL, "algorithm": {"name": name}})["algorithm.name"]
    assert f"got {name}" in str(found)


def test_missing_algorithm_is_named() -> None:
    found = violations({"run": {"name": "a"}, "model": {}, "algorithm": {}})
    assert "algorithm.name" in found


def test_all_violations_are_reported_at_once() -> None:
    content = {
        "run": {"name": "a", "seeds": 1},
        "modell": {"init": "m"},
        "algorithm": {"name": "grpo", "clip_low": 2},
        "train": {"tp": "two", "recompute": "half"},
        "reward": 3,
    }
    found = violations(content, "rollout.top_p=2", "nonsense", "steps.num_steps=-1")
    assert set(found) == {
        "run.seeds",
        "modell",
        "model",
        "algorithm.clip_low",
        "train.tp",
        "train.recompute",
        "reward",
        "rollout.top_p",
        "override",
        "steps.num_steps",
    }
    assert found["train.recompute"].allowed == "'none', 'selective' or 'full'"
    assert "'half'" in str(found["train.recompute"])
    message = str(ConfigError(list(found.values())))
    assert len(message.splitlines()) == len(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: [a\nmodel: b", "c.yaml:2"),
        ("run: {name: a}\nrun: {name: b}", "c.yaml"),
        ("", "an empty file"),
        ("- a\n- b", "list"),
        ("run: ${nowhere.x}", "c.yaml"),
    ],
)
def test_file_that_is_no_config_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(write(tmp_path / "c.yaml", text))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.yaml")


def test_yaml_of_a_config_reads_back_equal(tmp_path: Path) -> None:
    config = load_config_dict(
        MINIMAL, ["data.prompts=a", "train.adam_eps=1e-9", "steps.num_steps=3"]
    )
    assert load_config(write(tmp_path / "c.yaml", to_yaml(config))) == config


def test_errors_as_json_have_the_four_fields() -> None:
    error = ConfigError([UserError("a.b", 3, "1 or 2", "Change it.")])
    assert error.as_json() == [
        {"key": "a.b", "value": "3", "allowed": "1 or 2", "remedy": "Change it."}
    ]


@pytest.mark.parametrize(
    "override",
    [
        "model.init=other",
        "algorithm.kl_coef=0.1",
        "data.prompts=b.jsonl",
        "reward.function=m:f",
        "steps.prompts_per_step=2",
        "steps.samples_per_prompt=2",
        "steps.updates_per_step=2",
        "run.seed=1",
    ],
)
def test_identity_changes_with(override: str) -> None:
    before, after = load_config_dict(MINIMAL), load_config_dict(MINIMAL, [override])
    assert identity_of(before) != identity_of(after)
    assert [v.name for v in identity_violations(identity_of(before), after)] == [
        override.split("=")[0]
    ]


def test_a_resumed_run_with_other_adapters_names_only_what_was_set() -> None:
    plain, lora = load_config_dict(MINIMAL), load_config_dict(MINIMAL, ["lora.rank=4"])
    for before, after in ((plain, lora), (lora, plain)):
        assert [v.name for v in identity_violations(identity_of(before), after)] == ["lora.rank"]


@pytest.mark.parametrize(
    "override",
    [
        "train.tp=2",
        "train.micro_batch_tokens=99",
        "rollout.engine=vllm",
        "steps.num_steps=7",
        "log.console=false",
        "checkpoint.every=3",
        "data.eval_prompts=e.jsonl",
        "run.dir=elsewhere",
    ],
)
def test_identity_stays_with(override: str) -> None:
    before, after = load_config_dict(MINIMAL), load_config_dict(MINIMAL, [override])
    assert identity_of(before) == identity_of(after)
    assert identity_violations(identity_of(before), after) == []


def test_run_folder_of_another_identity_is_refused(tmp_path: Path) -> None:
    here = f"run.dir={tmp_path}"
    before = load_config_dict(MINIMAL, [here])
    check_run_folder(before)
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "config.yaml", to_yaml(before))
    check_run_folder(load_config_dict(MINIMAL, [here, "steps.num_steps=3"]))
    with pytest.raises(ConfigError, match=r"run\.seed: got 4; allowed: 0"):
        check_run_folder(load_config_dict(MINIMAL, [here, "run.seed=4"]))


def test_faults_of_a_term_are_named_in_full() -> None:
    term = "mix={sft: {algorithm: {name: ALGORITHM}, data: {prompts: a}}}"

    def said(*overrides: str, name: str = "dpo") -> str:
        with pytest.raises(ConfigError) as caught:
            load_config_dict(MINIMAL, [term.replace("ALGORITHM", name), *overrides])
        return str(caught.value)

    assert "mix.sft.algorithm.name: got 'dpoo'" in said(name="dpoo") and "'dpo'?" in said(
        name="dpoo"
    )
    text = said("mix.sft.algorithm.betta=1")
    assert "mix.sft.algorithm.betta" in text and "Did you mean 'mix.sft.algorithm.beta'?" in text
    assert "mix.sft.algorithm.beta: got -1" in said("mix.sft.algorithm.beta=-1")
    text = said("mix.sft.wieght=1")
    assert "mix.sft.wieght" in text and "Did you mean 'mix.sft.weight'?" in text
    assert "mix.sft.data.promts" in said("mix.sft.data.promts=a")
    assert "mix.sft.weight: got -0.5" in said("mix.sft.weight=-0.5")
    assert "mix.other.algorithm is missing" in said("mix.other.weight=1")
    assert "mix.algorithm.weight: got -1" in said("mix.algorithm={weight: -1}")
    assert "reward.functions.algorithm.weight: got 'x'" in said(
        "reward.functions.algorithm.weight=x"
    )
    assert "accuracy, reward, majority are reserved" in said("reward.functions.accuracy.weight=1")


def test_a_run_belongs_to_its_terms() -> None:
    term = "mix={sft: {algorithm: {name: sft}, data: {prompts: a}}}"
    plain, mixed = load_config_dict(MINIMAL), load_config_dict(MINIMAL, [term])
    other = load_config_dict(MINIMAL, [term, "mix.sft.weight=0.5"])
    assert identity_of(plain) != identity_of(mixed)
    found = identity_violations(identity_of(mixed), other)
    assert [(one.name, one.value) for one in found] == [("mix.sft.weight", "0.5")]
    assert {one.name for one in identity_violations(identity_of(plain), mixed)} == {
        f"mix.sft.{key}" for key in ("algorithm", "data", "weight", "prompts_per_step")
    }
    assert load_config_dict(yaml.safe_load(to_yaml(mixed))) == mixed


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "ppo", "sft", "kto"])
def test_changed_yaml_lists_what_differs_from_the_defaults(name: str) -> None:
    overrides = [f"algorithm.name={name}", "train.tp=2", "eval.pass_k=[]", "run.seed=0"]
    config = load_config_dict(MINIMAL, [*overrides, "data.prompts='a${oc.env:X,b}.jsonl'"])
    text = changed_yaml(config)
    content = yaml.safe_load(text)
    assert load_config_dict(content, ["data.prompts='a${oc.env:X,b}.jsonl'"]) == config
    assert content["train"] == {"tp": 2} and content["algorithm"] == {"name": name}
    assert "eval" not in content and content["run"] == {"name": "a"} and "${oc.env:X,b}" in text


def test_missing_sections_are_named_with_what_to_write() -> None:
    found = violations({"train": {"tp": 1}})
    assert set(found) == {"run.name", "model", "algorithm"}
    assert "run.name=VALUE" in found["run.name"].remedy
    assert str(found["model"]).startswith("model is missing; allowed: a section with keys.")
    assert "Did you mean" not in str(violations({**MINIMAL, "algorithm": {}})["algorithm.name"])
