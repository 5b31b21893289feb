"""Settings that depend on `steps.max_policy_lag`: prompts in flight, rules, identity. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hybridrl.config.algorithm import CustomAlgorithmConfig, PolicyGradientConfig
from hybridrl.config.placement import named_roles
from hybridrl.errors import UserError

if TYPE_CHECKING:
    from hybridrl.config.placement import Place, Placement
    from hybridrl.config.schema import Config

KEY = "steps.max_policy_lag"
# Fraction of a step's samples that may be unfinished at an update if the lag is 2 or more.
UNFINISHED_AT_UPDATE = 0.2


def num_in_flight(config: Config) -> int:
    """Returns the number of prompts in flight: `rollout.in_flight`, or 1.5 times that of a step."""
    given, per_step = config.rollout.in_flight, config.steps.prompts_per_step
    return per_step + (per_step + 1) // 2 if given is None else given


def requests_under_way(config: Config, num_replicas: int) -> int:
    """Returns the largest number of concurrent samples per replica in an even distribution."""
    steps = config.steps
    prompts = num_in_flight(config) if steps.max_policy_lag else steps.prompts_per_step
    return -(-prompts * steps.samples_per_prompt // num_replicas)


def generates_ahead(config: Config, placement: Placement) -> bool:
    """Whether engines generate while the policy trains: with a lag, on ranks without a model."""
    return config.steps.max_policy_lag > 0 and not _models_beside_engines(placement)


def max_unfinished(config: Config) -> int:
    """Returns how many samples may be unfinished when engines ahead of training take weights."""
    share, steps = config.rollout.unfinished_at_update, config.steps
    if share is None:
        share = 0.0 if steps.max_policy_lag == 1 else UNFINISHED_AT_UPDATE
    return int(share * steps.prompts_per_step * steps.samples_per_prompt)


def _models_beside_engines(placement: Placement) -> dict[str, Place]:
    places = {"policy": placement.policy, **placement.named}
    engines = {*placement.rollout}
    return {role: place for role, place in places.items() if engines & {*place.ranks}}


def lag_identity(config: Config) -> dict[str, Any]:
    """Returns the knobs of `rollout` that affect which samples a run with a lag generates."""
    if not config.steps.max_policy_lag:
        return {}
    return {"in_flight": num_in_flight(config), "at_lag_bound": config.rollout.at_lag_bound}


def no_lag(config: Config) -> UserError:
    """Returns the error for an algorithm that cannot learn from samples of older weights."""
    name, lag = config.algorithm.name, config.steps.max_policy_lag
    reason = "whose loss does not use the ratio to the behaviour policy"
    remedy = f"Set {KEY}=0, or use another algorithm, such as grpo."
    if isinstance(config.algorithm, CustomAlgorithmConfig):
        reason = "whose class does not set allows_lag in its needs"
        own = "set allows_lag=True in the class's needs if its loss corrects for the lag"
        remedy = f"Set {KEY}=0; or {own}."
    return UserError(KEY, lag, f"0 with algorithm {name}, {reason}", remedy)


def lag_rules(config: Config) -> Iterator[UserError]:
    lag, rollout, needs = config.steps.max_policy_lag, config.rollout, config.algorithm.needs
    if not lag:
        for key, is_set in (
            ("in_flight", rollout.in_flight is not None),
            ("at_lag_bound", rollout.at_lag_bound != "finish"),
            ("unfinished_at_update", rollout.unfinished_at_update is not None),
        ):
            if is_set:
                allowed = f"no value with {KEY}=0: every prompt then finishes in its step"
                value = getattr(rollout, key)
                yield UserError(
                    f"rollout.{key}", value, allowed, f"Remove rollout.{key}, or set {KEY} above 0."
                )
        return
    if needs is not None and not needs.rollouts:
        allowed = f"0 with algorithm {config.algorithm.name}, which does not sample"
        yield UserError(KEY, lag, allowed, f"Set {KEY}=0.")
        return
    if needs is not None and not needs.allows_lag:
        yield no_lag(config)
        return
    per_step, most = config.steps.prompts_per_step, config.steps.prompts_per_step * (lag + 1)
    if not per_step <= num_in_flight(config) <= most:
        bounds = f"from steps.prompts_per_step = {per_step} to {most}"
        reason = f"with more, some samples would exceed {KEY}={lag}"
        allowed = f"{bounds}, the prompts of {lag + 1} steps: {reason}"
        remedy = "Change or remove rollout.in_flight."
        yield UserError("rollout.in_flight", num_in_flight(config), allowed, remedy)
    if isinstance(config.algorithm, PolicyGradientConfig):
        correction = config.algorithm.correction
        if correction.weight == "none" and correction.proximal == "old":
            able = (
                f"token, sequence or geometric with {KEY}={lag}, or correction.proximal=behaviour"
            )
            reason = "with neither, samples from older weights would be treated as on-policy"
            allowed = f"{able}: {reason}"
            remedy = "Remove algorithm.correction.weight; with a lag, its default is token."
            yield UserError("algorithm.correction.weight", "none", allowed, remedy)


def lag_placement_rules(config: Config, placement: Placement) -> Iterator[UserError]:
    """Yields the violations of rules between `steps.max_policy_lag` and a valid placement."""
    lag, given = config.steps.max_policy_lag, config.placement
    if not lag:
        return
    shared = _models_beside_engines(placement)
    has_own = len(placement.policy.ranks) < placement.num_ranks
    if has_own and given.rollout.ranks is None:
        found = "all ranks (the default)"
        allowed = (
            f"with {KEY}={lag} and the policy on {given.policy.ranks}: ranks without the policy, "
            f"so that engines generate while it trains; or an explicit `all`, so that both take "
            f"turns"
        )
        yield UserError("placement.rollout.ranks", found, allowed, "Set placement.rollout.ranks.")
    elif shared and "policy" not in shared:
        role = next(iter(shared))
        key, section = named_roles(given)[role]
        reason = f"engines on {given.rollout.ranks} generate continuously and never free memory"
        allowed = f"ranks without an engine, with {KEY}={lag}: {reason}"
        yield UserError(f"{key}.ranks", section.ranks, allowed, f"Give {key} other ranks.")
    elif shared and config.rollout.unfinished_at_update is not None:
        allowed = "no value if engines and training share ranks, because then they take turns"
        remedy = "or give placement.policy and placement.rollout different ranks."
        remedy = f"Remove rollout.unfinished_at_update, {remedy}"
        yield config.refused("rollout.unfinished_at_update", allowed, remedy)
