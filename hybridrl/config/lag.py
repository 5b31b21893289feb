"""What follows from `steps.max_policy_lag`: prompts under way, rules, identity. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hybridrl.config.algorithm import CustomAlgorithmConfig, GrpoConfig, PolicyGradientConfig
from hybridrl.config.supervised import OnlineDpoConfig
from hybridrl.errors import UserError

if TYPE_CHECKING:
    from hybridrl.config.schema import Config

KEY = "steps.max_policy_lag"


def num_in_flight(config: Config) -> int:
    """Returns the prompts that are under way while a step generates: `rollout.in_flight`, or half a
    step's more than a step's, rounded up.
    """
    given, per_step = config.rollout.in_flight, config.steps.prompts_per_step
    return per_step + (per_step + 1) // 2 if given is None else given


def lag_identity(config: Config) -> dict[str, Any]:
    """Returns the knobs of `rollout` on which the samples of a run depend if it has a lag."""
    if not config.steps.max_policy_lag:
        return {}
    return {"in_flight": num_in_flight(config), "at_lag_bound": config.rollout.at_lag_bound}


def no_lag(config: Config) -> UserError:
    """Returns the error of an algorithm that cannot learn from samples of older weights."""
    name, lag = config.algorithm.name, config.steps.max_policy_lag
    reason = "whose loss has no ratio to the policy that sampled"
    remedy = f"Set {KEY}=0, or use another algorithm, such as grpo."
    if isinstance(config.algorithm, CustomAlgorithmConfig):
        reason = "whose needs do not say allows_lag"
        remedy = f"Set {KEY}=0, or allows_lag=True in its needs if its loss corrects for the lag."
    return UserError(KEY, lag, f"0 with algorithm {name}, {reason}", remedy)


def lag_rules(config: Config) -> Iterator[UserError]:
    """Rules of samples that may be of older weights than those that learn from them."""
    lag, rollout, needs = config.steps.max_policy_lag, config.rollout, config.algorithm.needs
    if not lag:
        for key, is_set in (
            ("in_flight", rollout.in_flight is not None),
            ("at_lag_bound", rollout.at_lag_bound != "finish"),
        ):
            if is_set:
                allowed = f"nothing with {KEY}=0, where a step has its own prompts alone"
                value = getattr(rollout, key)
                yield UserError(
                    f"rollout.{key}", value, allowed, f"Remove it, or set {KEY} above 0."
                )
        return
    if needs is not None and not needs.rollouts:
        allowed = f"0 with algorithm {config.algorithm.name}, which has the data's responses"
        yield UserError(KEY, lag, allowed, f"Set {KEY}=0.")
        return
    if needs is not None and not needs.allows_lag:
        yield no_lag(config)
        return
    per_step, most = config.steps.prompts_per_step, config.steps.prompts_per_step * (lag + 1)
    if not per_step <= num_in_flight(config) <= most:
        yield UserError(
            "rollout.in_flight",
            num_in_flight(config),
            f"from steps.prompts_per_step = {per_step} to {most}, the prompts of {lag + 1} steps: "
            f"more could not all be learned from within {KEY}={lag}",
            "Change it, or leave it out.",
        )
    yield from _combination_rules(config, lag)


def _combination_rules(config: Config, lag: int) -> Iterator[UserError]:
    algorithm = config.algorithm
    if config.environment.name is not None:
        yield UserError(
            KEY,
            lag,
            f"0 with environment.name={config.environment.name}: an environment under way cannot "
            "move to another rank with its response",
            f"Set {KEY}=0.",
        )
    if isinstance(algorithm, GrpoConfig | OnlineDpoConfig) and algorithm.max_resampling > 0:
        yield UserError(
            "algorithm.max_resampling",
            algorithm.max_resampling,
            f"0 with {KEY}={lag}: a step takes the groups that are complete, and has no further "
            "rounds",
            f"Set algorithm.max_resampling=0, or {KEY}=0.",
        )
    if isinstance(algorithm, PolicyGradientConfig):
        correction = algorithm.correction
        if correction.weight == "none" and correction.proximal == "old":
            yield UserError(
                "algorithm.correction.weight",
                "none",
                f"token, sequence or geometric with {KEY}={lag}, or correction.proximal=behaviour: "
                "samples of older weights would count as the policy's own",
                "Leave it out, for token.",
            )
