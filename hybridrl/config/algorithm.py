"""The section `algorithm`: one class of knobs per algorithm, chosen by `algorithm.name`. No torch.

supervised.py has the algorithms without rollouts and online DPO; distillation.py has those that
learn from a teacher.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal, Self, get_args

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from hybridrl.config.correction import CorrectionConfig
from hybridrl.config.distillation import DistillationConfig, GkdConfig, SampledTokensConfig
from hybridrl.config.needs import Needs
from hybridrl.config.presets import CRITIC_PRESETS, PRESETS
from hybridrl.config.section import Section
from hybridrl.config.supervised import (
    PAIR_PRESETS,
    DpoConfig,
    KtoConfig,
    OnlineDpoConfig,
    RewardModelConfig,
    SftConfig,
)

DOTTED_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
GroupRelativeName = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "gmpo", "cispo", "sapo", "clip_cov",
    "kl_cov", "rloo", "reinforce_pp_baseline", "remax", "opo", "gpg", "pass_at_k", "gdpo",
]  # fmt: skip

ALGORITHM_NAMES = (
    *("grpo", "ppo", "sft", "reinforce_pp"),
    *(*PRESETS, *CRITIC_PRESETS, *PAIR_PRESETS, "kto", "reward_model", "online_dpo"),
    *("on_policy_distillation", "distillation", "gkd"),
)


class PolicyGradientConfig(Section):
    """Knobs of every algorithm with rollouts: objective per token, mean over tokens, KL to a
    reference, entropy, length penalty.
    """

    name: str
    """Name of the algorithm."""
    objective: Literal[
        "clip", "ratio", "sequence_clip", "geometric_mean", "cispo", "sapo", "plain"
    ] = "clip"
    """Objective that is maximised per token. The default 'clip' is the clipped surrogate of the PPO paper."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """The ratio may fall to 1 - clip_low (for geometric_mean, its logarithm to -clip_low). The default 0.2 is the PPO paper's."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio may rise to 1 + clip_high (for geometric_mean, its logarithm to clip_high). The default 0.2 is symmetric, as in the PPO paper."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound on the ratio at negative advantages, only with objective clip. Off by default; the paper uses 3."""
    sapo_tau_positive: float = Field(1.0, gt=0)
    """Temperature of SAPO's gate at positive advantages. The default 1 is the paper's."""
    sapo_tau_negative: float = Field(1.05, gt=0)
    """Temperature of SAPO's gate at negative advantages. The default 1.05 is the paper's; negative advantages need the stronger decay."""
    aggregate: Literal["token_mean", "sequence_mean", "fixed"] = "token_mean"
    """How token losses are averaged: 'token_mean' over all tokens, 'sequence_mean' over each response's tokens and then over responses, 'fixed' as each response's sum divided by fixed_length. The default 'token_mean' weighs every token alike."""
    fixed_length: float = Field(1.0, gt=0)
    """Tokens that aggregate 'fixed' divides a response's sum by. The default 1 keeps the sum over tokens of the papers' formulas; rollout.max_new_tokens makes it a mean."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference. The default 0 turns it off and saves the memory of the reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL is added: 'loss' or 'reward'. The default 'loss' is the GRPO paper's."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL. The default 'k3' is unbiased and never negative, as in the GRPO paper."""
    kl_target: float | None = Field(None, gt=0)
    """KL to the reference, in nats per response, towards which kl_coef is adapted after each step. By default kl_coef is fixed; the authors of the controller use 6."""
    kl_horizon: int = Field(10_000, ge=1)
    """Responses over which the adaptive kl_coef changes by at most a factor of e^0.2. The default 10000 is the authors'."""
    kl_importance_weighted: bool = False
    """Whether the KL in the loss is multiplied by the ratio, which makes the gradient of k1 and k3 unbiased. Off by default, as in the GRPO paper."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus. The default 0 turns it off, because sampling at temperature 1 explores enough."""
    overlong_max_tokens: int | None = Field(None, ge=1)
    """Response length, in sampled tokens without observations, from which the reward is lowered by 1. By default length is not penalised; DAPO uses 20480."""
    overlong_buffer_tokens: int = Field(4096, ge=1)
    """Tokens before overlong_max_tokens over which the penalty grows from 0 to 1. The default 4096 is the DAPO paper's."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction between the engine and the trainer. All of it is off by default; see its knobs."""
    router_replay: Literal["off", "rollout"] = "off"
    """For mixtures of experts: 'rollout' computes old log-probabilities and the update with the experts that the engine chose for each token. The default 'off' saves a byte per layer, expert and token."""

    @property
    def needs(self) -> Needs:
        """Needs of the algorithm: the reference if the KL has a weight, and log-probabilities of
        the policy before the update if the KL is part of the reward or adapts its weight.
        """
        is_measured = self.kl_target is not None or (self.kl_coef > 0 and self.kl_in == "reward")
        return Needs(reference=self.kl_coef > 0, old_logps=is_measured, allows_lag=True)

    @property
    def needs_whole_sequences(self) -> bool:
        """Whether the loss needs all tokens of a response on one rank, so that train.cp must be 1."""
        return (
            self.aggregate == "sequence_mean"
            or self.objective in ("sequence_clip", "geometric_mean")
            or self.correction.needs_whole_sequences
        )

    @field_validator("router_replay", mode="before")
    @classmethod
    def _read_off(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads `off` as false

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        longest, buffer = self.overlong_max_tokens, self.overlong_buffer_tokens
        if longest is not None and buffer > longest:
            raise ValueError(
                f"overlong_buffer_tokens: at most overlong_max_tokens = {longest}, not {buffer}"
            )
        if self.dual_clip is not None and self.objective != "clip":
            raise ValueError(f"dual_clip: only with objective clip, not {self.objective}")
        if self.kl_importance_weighted and self.kl_in != "loss":
            raise ValueError(f"kl_importance_weighted: only with kl_in loss, not {self.kl_in}")
        if self.objective == "plain" and self.correction.proximal == "behaviour":
            raise ValueError(
                "correction.proximal: old with objective plain, which has no ratio; not behaviour"
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("kl_target: only with kl_coef above 0, the initial weight")
        return self


def with_default_weight(section: PolicyGradientConfig) -> PolicyGradientConfig:
    """Returns the section with token-level importance weights (TIS), unless it sets a weight or the
    proximal policy.

    The default applies to samples of older weights. It is per token because a product of ratios
    over a response that several weight versions sampled has unbounded variance.
    """
    given = section.correction.model_fields_set
    if {"weight", "proximal"} & given:
        return section
    correction = section.correction.model_copy(update={"weight": "token"})
    return section.model_copy(update={"correction": correction})


class GrpoConfig(PolicyGradientConfig):
    """Compares the samples of one prompt with each other, without a critic: GRPO and the variants
    in PRESETS.
    """

    name: GroupRelativeName = "grpo"
    """Name of the algorithm, which also sets the defaults of this section."""
    baseline: Literal["group_mean", "leave_one_out", "length_weighted", "pass_at_k", "greedy"] = (
        "group_mean"
    )
    """Baseline that is subtracted from a reward. The default 'group_mean' is the GRPO paper's."""
    normalize_std: bool = True
    """Whether a group's advantages are divided by their standard deviation. On by default, as in the GRPO paper."""
    whiten_advantages: bool = False
    """Whether advantages are scaled to mean 0 and standard deviation 1 over the batch's tokens (with normalize_parts, over its samples). Off by default, as in the GRPO paper."""
    rescale_informative: bool = False
    """Whether advantages are multiplied by the number of samples over the number of samples in groups whose advantages are not all 0. Off by default, as in the GRPO paper."""
    pass_k: int = Field(4, ge=1)
    """The k of baseline pass_at_k. The default 4 is the smallest of the paper's 4, 8 and 16."""
    pass_reward: float = 0.5
    """Reward from which a sample passes, only with baseline pass_at_k. The default 0.5 is between wrong (0) and right (1)."""
    cov_clip_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the tokens whose gradient is dropped because of a high covariance. The default 0 turns it off; the paper uses 2e-4."""
    cov_clip_low: float = 1.0
    """Smallest covariance that counts as high. The default 1 is the authors'."""
    cov_clip_high: float = 5.0
    """Largest covariance that counts as high. The default 5 is the authors'."""
    cov_kl_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the tokens, taken by highest covariance, that are penalised for moving away from the old policy. The default 0 turns it off; the paper uses 2e-4 for 32B and 2e-3 for 7B."""
    cov_kl_coef: float = Field(1.0, ge=0)
    """Penalty per nat for the tokens of cov_kl_fraction. The default 1 is the authors'."""
    normalize_parts: bool = False
    """Whether each part of the reward is compared within the group separately before the parts are added. Off by default: the sum is compared, as in the GRPO paper."""
    part_weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each part of the reward by name, only with normalize_parts. By default every part has weight 1."""
    max_resampling: int = Field(0, ge=0)
    """Rounds in which groups whose advantages are all 0, such as those of equal rewards, are replaced by further prompts. The default 0 turns it off; DAPO repeats until no such group is left."""

    @property
    def needs(self) -> Needs:
        """Needs of the algorithm: groups to compare or greedy responses, in addition to the shared
        needs.
        """
        needs = super().needs
        return replace(
            needs,
            old_logps=needs.old_logps or self.finds_covariance,
            greedy=self.baseline == "greedy",
            group_samples=max(2, self.min_samples),
        )

    @property
    def finds_covariance(self) -> bool:
        """Whether tokens are chosen by the covariance of advantage and log-probability."""
        return max(self.cov_clip_fraction, self.cov_kl_fraction) > 0

    @property
    def min_samples(self) -> int:
        """Smallest number of samples per prompt."""
        if self.baseline == "pass_at_k":
            return max(2, self.pass_k)
        return 1 if self.baseline == "greedy" else 2

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: object) -> object:
        if isinstance(values, Mapping):
            return PRESETS.get(str(values.get("name")), {}) | dict(values)
        return values

    @model_validator(mode="after")
    def _check_comparison(self) -> Self:
        if self.cov_clip_fraction > 0 and self.cov_kl_fraction > 0:
            raise ValueError("cov_kl_fraction: 0 with cov_clip_fraction above 0; choose one")
        if self.part_weights and not self.normalize_parts:
            raise ValueError("part_weights: only with normalize_parts true")
        if self.normalize_parts:
            if self.baseline not in ("group_mean", "leave_one_out"):
                raise ValueError(f"normalize_parts: not with baseline {self.baseline}")
            if self.overlong_max_tokens is not None or (self.kl_coef and self.kl_in == "reward"):
                raise ValueError(
                    "normalize_parts: only without overlong_max_tokens and with kl_in loss, "
                    "because their penalties are not parts of the reward"
                )
        if self.max_resampling and self.baseline == "greedy":
            raise ValueError(
                "max_resampling: 0 with baseline greedy, which does not compare groups"
            )
        return self


class ReinforceConfig(PolicyGradientConfig):
    """REINFORCE++: one sample per prompt is enough; advantages are whitened over the whole batch."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    """Name of the algorithm."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Where the KL is added: 'loss' or 'reward'. The default 'reward' is a penalty per token, as in the paper."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL. The default 'k1' is the paper's."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token. The default 1 suits a reward that comes once, at the end."""


class PpoConfig(PolicyGradientConfig):
    """Proximal policy optimization with a critic and generalised advantage estimation, and the
    variants in CRITIC_PRESETS.
    """

    name: Literal["ppo", "vapo"] = "ppo"
    """Name of the algorithm, which also sets the defaults of this section."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Where the KL is added: 'loss' or 'reward'. The default 'reward' is a penalty per token that the critic learns too."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL. The default 'k1' is the plain log-ratio, which is unbiased inside a reward."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token. The default 1 suits a reward that comes once, at the end."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation, which trades bias for variance. The default 0.95 is the PPO paper's."""
    gae_length_alpha: float | None = Field(None, gt=0)
    """Alpha of a length-dependent lambda for the policy, 1 - 1 / (alpha length), in place of gae_lambda. Off by default; VAPO uses 0.05."""
    critic_gae_lambda: float | None = Field(None, ge=0, le=1)
    """Lambda of the critic's targets. By default it is the policy's, as in PPO; VAPO uses 1."""
    value_clip: float = Field(0.2, gt=0)
    """Largest distance of a value from its old value in a step. The default 0.2 equals that of the ratio."""
    whiten_advantages: bool = True
    """Whether advantages are scaled to mean 0 and standard deviation 1 over the batch. On by default, so that learning rates carry over between tasks."""
    critic_warmup_steps: int = Field(0, ge=0)
    """Number of first steps that train only the critic. The default is 0, because a critic that starts from the policy's weights learns fast."""
    positive_lm_coef: float = Field(0.0, ge=0)
    """Weight of the negative log-likelihood of samples that pass, which is added to the loss. The default 0 turns it off; VAPO uses 0.1."""
    pass_reward: float = 0.5
    """Reward from which a sample passes, only with positive_lm_coef. The default 0.5 is between wrong (0) and right (1)."""

    @property
    def needs(self) -> Needs:
        """Needs of the algorithm: a critic, in addition to the shared needs."""
        return replace(super().needs, values=True)

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: object) -> object:
        if isinstance(values, Mapping):
            return CRITIC_PRESETS.get(str(values.get("name")), {}) | dict(values)
        return values


class OnPolicyDistillationConfig(PolicyGradientConfig, SampledTokensConfig):
    """Learns from the teacher's log-probabilities of sampled tokens, and optionally from a reward."""

    name: Literal["on_policy_distillation"] = "on_policy_distillation"
    """Name of the algorithm."""

    @property
    def needs(self) -> Needs:
        """Needs of the algorithm: the teacher's and the policy's log-probabilities of the samples,
        in addition to the shared needs.
        """
        return replace(super().needs, teacher=True, old_logps=True)

    @model_validator(mode="after")
    def _check_reward(self) -> Self:
        if self.overlong_max_tokens is not None and self.reward_coef == 0:
            raise ValueError("overlong_max_tokens: only with reward_coef above 0")
        return self


class CustomAlgorithmConfig(Section):
    """An algorithm in your own package."""

    name: str = Field(pattern=DOTTED_PATH)
    """Dotted path 'package.module:Class' of an Algorithm."""
    options: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of the class. By default the class's own defaults apply."""

    @property
    def needs(self) -> None:
        """None, since only the class knows its needs; `algorithms/__init__.py:needs_of` imports it."""
        return None


def _algorithm_tag(value: object) -> str | None:
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
    if not isinstance(name, str):
        return None
    if name in get_args(GroupRelativeName):
        return "grpo"
    if name in CRITIC_PRESETS:
        return "ppo"
    if name in PAIR_PRESETS:
        return "dpo"
    if name in ALGORITHM_NAMES:
        return name
    return "custom" if ":" in name else None


def nearest_algorithm(name: str) -> str | None:
    """Returns the algorithm that a misspelt name most likely means; None if none is close. An
    anagram comes first.
    """
    given = name.lower()
    swapped = (known for known in ALGORITHM_NAMES if sorted(known) == sorted(given))
    close = difflib.get_close_matches(given, ALGORITHM_NAMES, n=1, cutoff=0.3)
    return next(swapped, None) or next(iter(close), None)


AlgorithmConfig = Annotated[
    Annotated[SftConfig, Tag("sft")]
    | Annotated[DpoConfig, Tag("dpo")]
    | Annotated[KtoConfig, Tag("kto")]
    | Annotated[OnlineDpoConfig, Tag("online_dpo")]
    | Annotated[RewardModelConfig, Tag("reward_model")]
    | Annotated[GrpoConfig, Tag("grpo")]
    | Annotated[ReinforceConfig, Tag("reinforce_pp")]
    | Annotated[PpoConfig, Tag("ppo")]
    | Annotated[OnPolicyDistillationConfig, Tag("on_policy_distillation")]
    | Annotated[DistillationConfig, Tag("distillation")]
    | Annotated[GkdConfig, Tag("gkd")]
    | Annotated[CustomAlgorithmConfig, Tag("custom")],
    Discriminator(_algorithm_tag),
]
