"""Samples of older weights: rules, what corrects for them, and the identity of a run."""

from __future__ import annotations

import pytest
from test_config_rules import SHAPE, VALID

from hybridrl.config.identity import identity, identity_violations
from hybridrl.config.lag import generates_ahead, max_unfinished, num_in_flight
from hybridrl.config.load import load_config_dict
from hybridrl.config.placement import Machines
from hybridrl.config.rules import check
from hybridrl.config.rules_placement import placed
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError

LAG = "steps.max_policy_lag=1"
ONE_SAMPLE = "steps.samples_per_prompt=1"


def load(*overrides: str) -> Config:
    return load_config_dict(VALID, overrides)


@pytest.mark.parametrize(
    "name",
    ["grpo", "rloo", "remax", "gspo", "ppo", "vapo", "reinforce_pp", "cispo", "dr_grpo", "kl_cov"],
)
def test_algorithms_with_a_ratio_are_corrected_for_lag_by_default(name: str) -> None:
    more = ["steps.updates_per_step=2"] if name == "kl_cov" else []
    config = load(f"algorithm.name={name}", LAG, *more)
    assert check(config, 8, SHAPE) == []
    assert config.algorithm.correction.weight == "token"  # type: ignore[union-attr]
    assert config.algorithm.correction.max == 2  # type: ignore[union-attr]
    without = load(f"algorithm.name={name}", *more)
    assert without.algorithm.correction.weight == "none"  # type: ignore[union-attr]


@pytest.mark.parametrize("given", ["weight=sequence", "proximal=behaviour"])
def test_a_correction_that_is_set_stays(given: str) -> None:
    config = load(LAG, f"algorithm.correction.{given}")
    key, _, value = given.partition("=")
    assert getattr(config.algorithm.correction, key) == value  # type: ignore[union-attr]
    assert check(config, 8, SHAPE) == []


def test_half_a_step_more_than_a_step_is_in_flight() -> None:
    assert num_in_flight(load(LAG)) == 96
    assert num_in_flight(load(LAG, "steps.prompts_per_step=3")) == 5
    assert num_in_flight(load(LAG, "rollout.in_flight=128")) == 128
    assert check(load(LAG, "steps.prompts_per_step=1"), 8, SHAPE) == []


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        ([LAG, "rollout.in_flight=63"], "rollout.in_flight", "from steps.prompts_per_step = 64 to"),
        ([LAG, "rollout.in_flight=129"], "rollout.in_flight", "to 128, the prompts of 2 steps"),
        (["rollout.in_flight=64"], "rollout.in_flight", "no value with steps.max_policy_lag=0"),
        (["rollout.at_lag_bound=drop"], "rollout.at_lag_bound", "no value with"),
        ([LAG, "algorithm.name=sft", ONE_SAMPLE], "steps.max_policy_lag", "which does not sample"),
        ([LAG, "algorithm.name=dpo", ONE_SAMPLE], "steps.max_policy_lag", "which does not sample"),
        (
            [LAG, "algorithm.name=online_dpo"],
            "steps.max_policy_lag",
            "does not use the ratio to the behaviour policy",
        ),
        (
            [LAG, "algorithm.name=gkd", "algorithm.teacher=t"],
            "steps.max_policy_lag",
            "does not use",
        ),
        ([LAG, "algorithm.correction.weight=none"], "algorithm.correction.weight", "older weights"),
    ],
)
def test_a_lag_that_cannot_be_is_refused_by_one_message(
    overrides: list[str], key: str, said: str
) -> None:
    found = check(load(*overrides), 8, SHAPE)
    assert [one.name for one in found] == [key]
    assert said in str(found[0])


APART = ("placement.policy=0-3", "placement.rollout=4-7")


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (
            [LAG, "placement.policy=0-3"],
            "placement.rollout.ranks",
            "ranks without the policy, so that engines",
        ),
        (
            [LAG, *APART, "placement.reference=4-7", "algorithm.kl_coef=0.1"],
            "placement.reference.ranks",
            "engines on 4-7 generate continuously",
        ),
        (["rollout.unfinished_at_update=0.5"], "rollout.unfinished_at_update", "no value with"),
        (
            [LAG, "rollout.unfinished_at_update=0.5"],
            "rollout.unfinished_at_update",
            "they take turns",
        ),
    ],
)
def test_a_placement_in_which_nothing_can_be_generated_ahead_is_refused(
    overrides: list[str], key: str, said: str
) -> None:
    found = check(load(*overrides), 8, SHAPE)
    assert [one.name for one in found] == [key]
    assert said in str(found[0])


def test_engines_apart_generate_ahead_with_a_lag_alone() -> None:
    def is_ahead(*overrides: str) -> bool:
        config = load(*overrides)
        assert check(config, 8, SHAPE) == []
        return generates_ahead(config, placed(config, Machines(8))[0])

    assert is_ahead(LAG, *APART)
    assert not is_ahead(*APART) and not is_ahead(LAG)
    assert not is_ahead(LAG, "placement.policy=0-3", "placement.rollout=2-7")
    reference = "placement.policy=0-1", "placement.reference=2-3", "placement.rollout=4-7"
    assert is_ahead(LAG, *reference, "algorithm.kl_coef=0.1")


def test_with_a_longer_lag_a_part_of_the_samples_goes_on_with_new_weights() -> None:
    assert max_unfinished(load(LAG)) == 0
    assert max_unfinished(load("steps.max_policy_lag=2")) == 102  # a fifth of 64 x 8
    assert max_unfinished(load(LAG, "rollout.unfinished_at_update=0.5")) == 256


@pytest.mark.parametrize("override", ["steps.max_policy_lag=-1", "rollout.in_flight=0"])
def test_negative_numbers_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0].rpartition(".")[2]):
        load(override)


def test_the_lag_and_what_is_in_flight_belong_to_a_run() -> None:
    saved = identity(load(LAG))
    assert identity_violations(saved, load(LAG, "rollout.in_flight=96")) == []
    for other, key in (
        ((LAG, "rollout.in_flight=100"), "rollout.in_flight"),
        ((LAG, "rollout.at_lag_bound=drop"), "rollout.at_lag_bound"),
        (("steps.max_policy_lag=2",), "steps.max_policy_lag"),
    ):
        assert [one.name for one in identity_violations(saved, load(*other))] == [key]
