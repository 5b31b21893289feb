"""Rules between an algorithm's knobs and the knobs of other sections. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.algorithm import PolicyGradientConfig
from hybridrl.config.needs import Needs
from hybridrl.config.schema import Config, GrpoConfig, KtoConfig, PpoConfig, RewardModelConfig
from hybridrl.errors import MISSING, UserError

GREEDY = "greedy"  # batch.GREEDY: name of the reward part that baseline greedy adds


def supervised_rules(config: Config, needs: Needs) -> Iterator[UserError]:
    steps, algorithm = config.steps, config.algorithm
    if steps.samples_per_prompt != 1:
        allowed = f"1 with algorithm {algorithm.name}, which uses responses from the data"
        yield config.refused("steps.samples_per_prompt", allowed, "Set steps.samples_per_prompt=1.")
    if needs.feedback is not None and steps.updates_per_step > 1:
        reason = "whose gradient is computed at the start of the step"
        allowed = f"1 with algorithm {algorithm.name}, {reason}"
        remedy = "Set steps.updates_per_step=1, and lower steps.prompts_per_step."
        yield config.refused("steps.updates_per_step", allowed, remedy)
    if config.data.margin_key is not None and not isinstance(algorithm, RewardModelConfig):
        remedy = "Remove data.margin_key, or use reward_model."
        yield config.refused("data.margin_key", f"no value with algorithm {algorithm.name}", remedy)
    if not needs.policy:
        for key in ("fuse_param_gather", "release_weights_in_rollout"):
            if getattr(config.train, key):
                allowed = f"false with algorithm {algorithm.name}, which does not train a policy"
                yield UserError(f"train.{key}", "true", allowed, f"Set train.{key}=false.")
    if isinstance(algorithm, KtoConfig) and steps.prompts_per_step < 2:
        allowed = (
            "2 or more with algorithm kto, which estimates the KL from responses to other prompts"
        )
        yield config.refused("steps.prompts_per_step", allowed, "Set steps.prompts_per_step=32.")


def unread_rules(algorithm: PolicyGradientConfig) -> Iterator[UserError]:
    """Yields the knobs that are set although the values of other knobs make them ineffective."""
    read_with = {
        "objective": {
            "clip_low": {"clip", "sequence_clip", "geometric_mean", "cispo"},
            "clip_high": {"clip", "sequence_clip", "geometric_mean", "cispo"},
            "sapo_tau_positive": {"sapo"},
            "sapo_tau_negative": {"sapo"},
        },
        "aggregate": {"fixed_length": {"fixed"}},
        "baseline": {"pass_k": {"pass_at_k"}, "pass_reward": {"pass_at_k"}},
    }
    given = [name for name, field in type(algorithm).model_fields.items() if field.is_required()]
    usual = type(algorithm)(**{key: getattr(algorithm, key) for key in {*given, "name"}})
    for key, knobs in read_with.items():
        for knob, wanted in knobs.items():
            if not {key, knob} <= set(type(algorithm).model_fields):
                continue
            value, other = getattr(algorithm, knob), getattr(algorithm, key)
            if other not in wanted and value != getattr(usual, knob):
                allowed = f"no value with algorithm.{key}={other}"
                able = " or ".join(sorted(wanted))
                remedy = f"Remove algorithm.{knob}, or set algorithm.{key} to {able}."
                yield UserError(f"algorithm.{knob}", value, allowed, remedy)


def policy_gradient_rules(config: Config, algorithm: PolicyGradientConfig) -> Iterator[UserError]:
    yield from unread_rules(algorithm)
    if algorithm.needs_whole_sequences and config.train.cp > 1:
        keys = ("objective", "aggregate", "correction.weight", "correction.reject")
        *given, last = (f"algorithm.{key}={config.value(f'algorithm.{key}')}" for key in keys)
        reason = "because this loss needs all tokens of a response on one rank"
        remedy = "Set train.cp=1, or choose a per-token objective, aggregate and correction."
        yield config.refused("train.cp", f"1 with {', '.join(given)} and {last}, {reason}", remedy)
    if algorithm.objective == "plain" and config.steps.updates_per_step > 1:
        allowed = "1 with algorithm.objective=plain, which assumes on-policy samples"
        remedy = "Set steps.updates_per_step=1, or algorithm.objective=clip."
        yield config.refused("steps.updates_per_step", allowed, remedy)
    longest = config.rollout.max_new_tokens
    alpha = algorithm.gae_length_alpha if isinstance(algorithm, PpoConfig) else None
    if alpha is not None and alpha * longest <= 1:
        reason = "lambda, which is 1 - 1 / (alpha * length), is 0 for all responses"
        yield config.refused(
            "algorithm.gae_length_alpha",
            f"above 1 / rollout.max_new_tokens = {1 / longest:.3g}: otherwise {reason}, and "
            f"advantages depend only on the critic",
            "Set algorithm.gae_length_alpha to 20 divided by the typical response length, which "
            "gives a lambda of 0.95.",
        )
    if isinstance(algorithm, GrpoConfig):
        yield from _group_rules(config, algorithm)


def _group_rules(config: Config, algorithm: GrpoConfig) -> Iterator[UserError]:
    weights = {name: one.weight for name, one in config.reward.scorers().items()}
    if algorithm.normalize_parts and not algorithm.part_weights and set(weights.values()) != {1.0}:
        reason = f"the reward's weights {weights} have no effect when its parts are normalised"
        allowed = f"one weight per part, because {reason}"
        remedy = f"Set algorithm.part_weights={weights}, or other weights."
        yield UserError("algorithm.part_weights", MISSING, allowed, remedy)
    if (algorithm.baseline == "greedy" or algorithm.normalize_parts) and GREEDY in weights:
        reason = "which reserves this name for the reward of greedy responses"
        allowed = f"another name with algorithm {algorithm.name}, {reason}"
        yield UserError("reward.functions", f"one named {GREEDY!r}", allowed, "Rename that scorer.")
    if algorithm.cov_kl_fraction > 0 and config.steps.updates_per_step == 1:
        allowed = (
            f"2 or more with algorithm.cov_kl_fraction={algorithm.cov_kl_fraction:g} (algorithm "
            f"{algorithm.name}), which penalises the distance from the policy at the start of the "
            f"step: it is 0 at the first update"
        )
        remedy = "Set steps.updates_per_step=2, or use clip_cov."
        yield UserError("steps.updates_per_step", 1, allowed, remedy)
