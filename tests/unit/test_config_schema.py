"""Every knob is frozen in knobs.txt, described, and strict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from hybridrl.config.algorithm import GrpoConfig, OnPolicyDistillationConfig, PpoConfig
from hybridrl.config.distillation import GkdConfig
from hybridrl.config.load import knobs, load_config_dict
from hybridrl.config.schema import (
    Config,
    DataConfig,
    DpoConfig,
    KtoConfig,
    OnlineDpoConfig,
    TermConfig,
    TrainConfig,
)
from hybridrl.errors import ConfigError

MINIMAL: dict[str, Any] = {
    "run": {"name": "a"},
    "model": {"init": "m"},
    "algorithm": {"name": "grpo"},
}


def test_knobs_equal_the_frozen_list() -> None:
    frozen = (Path(__file__).parent / "knobs.txt").read_text().split()
    assert knobs() == frozen, "a knob was added or removed: is it needed? then change knobs.txt"


def sections() -> list[type[BaseModel]]:
    config = load_config_dict(MINIMAL)
    members = [type(getattr(config, name)) for name in Config.model_fields if name != "mix"]
    own = [OnlineDpoConfig, TermConfig, OnPolicyDistillationConfig, GkdConfig]
    return [*members, PpoConfig, DpoConfig, KtoConfig, *own]


def test_every_knob_says_what_it_is_and_why_its_default() -> None:
    for section in sections():
        for name, field in section.model_fields.items():
            text = field.description or ""
            assert text.endswith("."), f"{section.__name__}.{name} has no description"
            if not field.is_required() and name != "name":
                assert text.count(". ") + text.count("; ") >= 1, f"{section.__name__}.{name}: why?"


def test_config_is_frozen() -> None:
    config = load_config_dict(MINIMAL)
    with pytest.raises(ValidationError):
        config.train.tp = 2  # type: ignore[misc]


def test_algorithm_is_chosen_by_name() -> None:
    config = load_config_dict({**MINIMAL, "algorithm": {"name": "ppo", "gamma": 0.9}})
    assert isinstance(config.algorithm, PpoConfig)
    assert config.algorithm.gamma == 0.9
    assert config.algorithm.kl_in == "reward"
    assert GrpoConfig().kl_in == "loss"


def test_a_name_brings_its_defaults_which_the_config_may_change() -> None:
    simpo = load_config_dict({**MINIMAL, "algorithm": {"name": "simpo", "beta": 2.5}}).algorithm
    assert isinstance(simpo, DpoConfig)
    assert (simpo.beta, simpo.target_margin, simpo.reference) == (2.5, 1.0, False)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (
            {"name": "ipo", "label_smoothing": 0.1},
            "algorithm.label_smoothing: got .*; allowed: 0, because loss is .*, not sigmoid",
        ),
        (
            {"name": "orpo", "target_margin": 1.0},
            "algorithm.target_margin: got .*; allowed: 0, because loss is .*, not sigmoid",
        ),
        (
            {"name": "orpo", "reference": True},
            "algorithm.reference: got .*; allowed: false, because loss odds_ratio",
        ),
        ({"name": "dpo", "label_smoothing": 0.5}, r"algorithm\.label_smoothing"),
        ({"name": "kto", "beta": 0.0}, r"algorithm\.beta"),
    ],
)
def test_preference_knobs_that_do_not_go_together(algorithm: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config_dict({**MINIMAL, "algorithm": algorithm})


def test_algorithm_may_be_the_users_own() -> None:
    own = {"name": "my.module:Best", "options": {"beta": 2}}
    config = load_config_dict({**MINIMAL, "algorithm": own})
    assert config.algorithm.model_dump() == own


def test_one_file_and_a_list_of_files_are_both_paths() -> None:
    assert DataConfig.model_validate({"prompts": "a.jsonl"}).prompts == ("a.jsonl",)
    assert DataConfig.model_validate({"prompts": ["a", "b"]}).prompts == ("a", "b")
    for wrong in (False, [1], {"a": "b"}):
        with pytest.raises(ValidationError, match="a path or a list of paths"):
            DataConfig.model_validate({"prompts": wrong})


@pytest.mark.parametrize(
    "values",
    [
        {"tp": "2"},
        {"tp": True},
        {"tp": 2.0},
        {"tp": 0},
        {"learning_rate": float("nan")},
        {"learning_rate": "1e-6 "},
        {"recompute": "some"},
    ],
)
def test_values_of_another_type_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrainConfig.model_validate(values)


def test_run_name_cannot_leave_its_folder() -> None:
    for name in ("../up", "a/b", "", ".hidden"):
        with pytest.raises(ConfigError, match=r"run\.name"):
            load_config_dict({**MINIMAL, "run": {"name": name}})


@pytest.mark.parametrize(
    ("given", "steps"),
    [(3, (3,)), ("3-5", (3, 4, 5)), ([7, "1-2", 2], (1, 2, 7)), ([], ())],
)
def test_steps_to_profile_are_a_step_a_range_or_a_list(given: Any, steps: tuple[int, ...]) -> None:
    run = load_config_dict({**MINIMAL, "run": {"name": "a", "profile": given}}).run
    assert run.profile == steps


@pytest.mark.parametrize("given", ["x", "5-3", 0, -1, True, "3-", 1.5, None])
def test_other_steps_to_profile_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"run\.profile"):
        load_config_dict({**MINIMAL, "run": {"name": "a", "profile": given}})
