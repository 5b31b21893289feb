"""The models of a run, derived from algorithms' needs and the section `reward`. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hybridrl.config.needs import Needs
from hybridrl.config.reward import SERVED
from hybridrl.config.schema import Config, ModelConfig


@dataclass(frozen=True)
class RunModels:
    """Models of a run in addition to the policy; `reward_models` by their scorers' names."""

    trains_policy: bool
    has_reference: bool
    has_critic: bool
    has_teacher: bool
    reward_models: Mapping[str, ModelConfig]


def run_models(config: Config, needs: Needs, terms: Iterable[Needs]) -> RunModels:
    """Returns the models for the needs of a run's algorithm and of its additional loss terms."""
    return RunModels(
        trains_policy=needs.policy,
        has_reference=needs.reference or any(term.reference for term in terms),
        has_critic=needs.values,
        has_teacher=needs.has_teacher,
        reward_models=reward_models(config) if needs.rollouts else {},
    )


def trains_policy(config: Config) -> bool:
    """Whether a run trains a language model; otherwise it trains a reward model."""
    needs = config.algorithm.needs
    return needs is None or needs.policy


def reward_models(config: Config) -> dict[str, ModelConfig]:
    found = {}
    for name, scorer in config.reward.scorers().items():
        path = scorer.options.get("path")
        if scorer.function == SERVED and isinstance(path, str):
            found[name] = ModelConfig(path=path, dtype=config.model.dtype, tokenizer=path)
    return found
