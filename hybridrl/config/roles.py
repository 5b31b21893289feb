"""Which models a run holds, derived once for `hybridrl plan` and the trainer. No torch.

Owns how the needs of algorithms and the section `reward` become models. Building them is the
trainer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hybridrl.config.needs import Needs
from hybridrl.config.reward import SERVED
from hybridrl.config.schema import Config, ModelConfig


@dataclass(frozen=True)
class RunModels:
    """The models of a run. There is always a policy.

    Args:
        trains_policy: else the policy is frozen.
        has_reference: the policy's first weights, frozen.
        has_critic: a trained model of the policy's shape.
        has_teacher: the frozen model that `algorithm.teacher` names.
        reward_models: frozen models that score samples, by their scorers' names.
    """

    trains_policy: bool
    has_reference: bool
    has_critic: bool
    has_teacher: bool
    reward_models: Mapping[str, ModelConfig]


def run_models(config: Config, needs: Needs, terms: Iterable[Needs]) -> RunModels:
    """Returns the models of a training run.

    Args:
        config: of the run.
        needs: of its algorithm.
        terms: needs of the further terms of the policy's loss.
    """
    return RunModels(
        trains_policy=needs.policy,
        has_reference=needs.reference or any(term.reference for term in terms),
        has_critic=needs.values,
        has_teacher=needs.has_teacher,
        reward_models=reward_models(config) if needs.rollouts else {},
    )


def trains_policy(config: Config) -> bool:
    """Whether a run trains a language model; if not, it trains a reward model."""
    needs = config.algorithm.needs
    return needs is None or needs.policy


def reward_models(config: Config) -> dict[str, ModelConfig]:
    """Returns the models that the section `reward` names, by the names of their scorers."""
    found = {}
    for name, scorer in config.reward.scorers().items():
        path = scorer.options.get("path")
        if scorer.function == SERVED and isinstance(path, str):
            found[name] = ModelConfig(path=path, dtype=config.model.dtype, tokenizer=path)
    return found
