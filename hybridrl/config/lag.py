"""What follows from `steps.max_policy_lag`: prompts under way, rules, identity. No torch."""

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
# Of a step's samples, that go on with the next weights where a lag of 2 or more lets them.
UNFINISHED_AT_UPDATE = 0.2


def num_in_flight(config: Config) -> int:
    """Returns the prompts that are under way while a step generates: `rollout.in_flight`, or half a
    step's more than a step's, rounded up.
    """
    given, per_step = config.rollout.in_flight, config.steps.prompts_per_step
    return per_step + (per_step + 1) // 2 if given is None else given


def requests_under_way(config: Config, num_replicas: int) -> int:
    """Returns the samples that an engine replica has at most at a time, if they are dealt evenly:
    those of a step's prompts, or with a lag of all that are under way.
    """
    steps = config.steps
    prompts = num_in_flight(config) if steps.max_policy_lag else steps.prompts_per_step
    return -(-prompts * steps.samples_per_prompt // num_replicas)


def generates_ahead(config: Config, placement: Placement) -> bool:
    """Returns whether engines generate while the policy trains: there is a lag, and no model of the
    run is on a rank with an engine.
    """
    return config.steps.max_policy_lag > 0 and not _models_beside_engines(placement)


def max_unfinished(config: Config) -> int:
    """Returns how many samples may be unfinished where engines that generate ahead pause for the
    next weights.
    """
    share, steps = config.rollout.unfinished_at_update, config.steps
    if share is None:
        share = 0.0 if steps.max_policy_lag == 1 else UNFINISHED_AT_UPDATE
    return int(share * steps.prompts_per_step * steps.samples_per_prompt)


def _models_beside_engines(placement: Placement) -> dict[str, Place]:
    """Returns the models that have a rank in common with an engine, by role."""
    places = {"policy": placement.policy, **placement.named}
    return {role: one for role, one in places.items() if {*one.ranks} & {*placement.rollout}}


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
            ("unfinished_at_update", rollout.unfinished_at_update is not None),
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


def lag_placement_rules(config: Config, placement: Placement) -> Iterator[UserError]:
    """Rules of a lag where models are on ranks of their own.

    Args:
        config: of the run.
        placement: of it, without errors of its own.
    """
    lag, given = config.steps.max_policy_lag, config.placement
    if not lag:
        return
    shared = _models_beside_engines(placement)
    has_own = len(placement.policy.ranks) < placement.num_ranks
    if has_own and given.rollout.ranks is None:
        yield UserError(
            "placement.rollout.ranks",
            "none, which is all",
            f"ranks without the policy with {KEY}={lag}, for engines that generate while it trains "
            f"on {given.policy.ranks}; or all, where nothing runs side by side",
            "Name them.",
        )
    elif shared and "policy" not in shared:
        role = next(iter(shared))
        key, one = named_roles(given)[role]
        yield UserError(
            f"{key}.ranks",
            one.ranks,
            f"ranks without an engine with {KEY}={lag}: engines generate on {given.rollout.ranks} "
            "all the time, and give no memory to other models",
            f"Give {key} other ranks.",
        )
    elif shared and config.rollout.unfinished_at_update is not None:
        yield UserError(
            "rollout.unfinished_at_update",
            config.rollout.unfinished_at_update,
            "nothing where engines and training share ranks: they take turns",
            "Remove it, or set placement.policy and placement.rollout apart.",
        )
