"""Finding an algorithm by name or dotted path, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.algorithms import ALGORITHMS, make_algorithm
from hybridrl.algorithms.base import CriticAlgorithm, Needs
from hybridrl.config.algorithm import ALGORITHM_NAMES, PolicyGradientConfig, ReinforceConfig
from hybridrl.config.schema import (
    CustomAlgorithmConfig,
    DpoConfig,
    GrpoConfig,
    KtoConfig,
    OnlineDpoConfig,
    PpoConfig,
    SftConfig,
)
from hybridrl.errors import UserError

MODULE = """
from hybridrl.algorithms.base import Needs

class Mine:
    name = "mine"
    needs = Needs()
    def __init__(self, scale=1.0):
        self.scale = scale
    def advantages(self, batch): return batch
    def denominator(self, batch): return 1.0
    def loss(self, logp_S, entropy_S, micro, denominator): return None

class Lossless:
    name = "lossless"
    needs = Needs(values=True)
    def advantages(self, batch): return batch
    def denominator(self, batch): return 1.0
"""


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    (tmp_path / "own_algorithms.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_the_table_holds_the_names_of_the_schema():
    assert sorted(ALGORITHMS) == sorted(ALGORITHM_NAMES)


def test_every_name_has_its_formula_and_its_defaults_in_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    text, _ = page.split("## Learning")  # where names have what they reached
    for name in ALGORITHMS:
        assert text.count(f"\n| `{name}` |") == 2, name


@pytest.mark.parametrize(
    ("config", "needs"),
    [
        (SftConfig(), Needs(rollouts=False)),
        (DpoConfig(), Needs(False, "pairs", reference=True, old_logps=True)),
        (DpoConfig(name="simpo"), Needs(False, "pairs", old_logps=True)),
        (DpoConfig(name="orpo"), Needs(False, "pairs", old_logps=True)),
        (KtoConfig(), Needs(False, "labels", reference=True, old_logps=True)),
        (OnlineDpoConfig(), Needs(feedback="pairs", reference=True, old_logps=True)),
        (OnlineDpoConfig(reference=False), Needs(feedback="pairs", old_logps=True)),
        (GrpoConfig(), Needs()),
        (GrpoConfig(kl_coef=0.1), Needs(reference=True)),
        (GrpoConfig(kl_coef=0.1, kl_in="reward"), Needs(reference=True, old_logps=True)),
        (GrpoConfig(name="gspo"), Needs()),
        (GrpoConfig(name="clip_cov"), Needs(old_logps=True)),
        (GrpoConfig(name="kl_cov"), Needs(old_logps=True)),
        (GrpoConfig(name="remax"), Needs(greedy=True)),
        (GrpoConfig(name="gdpo"), Needs()),
        (GrpoConfig(kl_coef=0.1, kl_target=6.0), Needs(reference=True, old_logps=True)),
        (PpoConfig(name="vapo"), Needs(values=True)),
        (GrpoConfig(name="rloo", kl_coef=0.1), Needs(reference=True, old_logps=True)),
        (ReinforceConfig(), Needs()),
        (ReinforceConfig(kl_coef=0.1), Needs(reference=True, old_logps=True)),
        (PpoConfig(), Needs(values=True)),
        (PpoConfig(kl_coef=0.1, kl_in="loss"), Needs(values=True, reference=True)),
        (PpoConfig(kl_coef=0.1), Needs(values=True, reference=True, old_logps=True)),
    ],
)
def test_an_algorithm_needs_no_more_than_its_settings_use(config, needs):
    algorithm = make_algorithm(config)
    # All that have a ratio to the policy that sampled can be corrected for older weights.
    needs = replace(needs, allows_lag=isinstance(config, PolicyGradientConfig))
    assert algorithm.needs == needs
    assert algorithm.name == config.name
    assert isinstance(algorithm, CriticAlgorithm) == needs.values


def test_a_dotted_path_gets_its_options(own_package):
    config = CustomAlgorithmConfig(name="own_algorithms:Mine", options={"scale": 3.0})
    assert make_algorithm(config).scale == 3.0


@pytest.mark.parametrize(
    ("options", "key", "allowed"),
    [
        ({"clip_hihg": 0.3}, "algorithm.options.clip_hihg", "the knobs of GrpoConfig"),
        ({"clip_low": "much"}, "algorithm.options.clip_low", "number"),
    ],
)
def test_wrong_options_of_a_class_with_a_section_are_named(monkeypatch, options, key, allowed):
    def mine(**section: object) -> object:  # as the guide to own parts writes it
        return make_algorithm(GrpoConfig(**section))

    monkeypatch.setattr("hybridrl.algorithms.imported", lambda path: mine)
    with pytest.raises(UserError) as caught:
        make_algorithm(CustomAlgorithmConfig(name="own:mine", options=options))
    assert (caught.value.name, caught.value.allowed) == (key, allowed)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("no_such_module:Mine", {}, "no_such_module"),
        ("own_algorithms:Other", {}, "Other"),
        ("own_algorithms:Mine", {"scales": 1}, "scales"),
        ("own_algorithms:Lossless", {}, "It has no loss, value_loss"),
    ],
)
def test_a_dotted_path_that_gives_no_algorithm_is_an_error(own_package, name, options, reason):
    with pytest.raises(UserError, match=reason) as caught:
        make_algorithm(CustomAlgorithmConfig(name=name, options=options))
    assert caught.value.name == "algorithm.name"
    assert caught.value.value == name
