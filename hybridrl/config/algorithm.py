"""The section `algorithm`: one set of knobs for each algorithm, chosen by its name. No torch.

Those without rollouts, and online DPO, are in supervised.py, those that learn from a teacher in
distillation.py.
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
    """What the algorithms with rollouts share: the objective of a token, the mean over tokens, KL
    to a reference, entropy, the penalty on length.
    """

    name: str
    """Selects the algorithm."""
    objective: Literal[
        "clip", "ratio", "sequence_clip", "geometric_mean", "cispo", "sapo", "plain"
    ] = "clip"
    """What is maximised at a token. 'clip': the clipped surrogate of the PPO paper."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """Ratio may fall to 1 - clip_low (its logarithm to -clip_low for geometric_mean). 0.2: the value of the PPO paper."""
    clip_high: float = Field(0.2, gt=0)
    """Ratio may rise to 1 + clip_high (its logarithm to clip_high for geometric_mean). 0.2: symmetric, as in the PPO paper."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound on the ratio at negative advantages, objective clip only. None: off; 3 is the paper's."""
    sapo_tau_positive: float = Field(1.0, gt=0)
    """Temperature of sapo's gate at positive advantages. 1: the paper's."""
    sapo_tau_negative: float = Field(1.05, gt=0)
    """Temperature of sapo's gate at negative advantages. 1.05: the paper's; they need the stronger decay."""
    aggregate: Literal["token_mean", "sequence_mean", "fixed"] = "token_mean"
    """Mean over all tokens, over each response's and then over responses, or a sum over tokens by a fixed length. 'token_mean': a token counts the same everywhere."""
    fixed_length: float = Field(1.0, gt=0)
    """Tokens that a response counts as with aggregate fixed. 1: the sum over tokens that the formulas have; rollout.max_new_tokens makes it a mean."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference. 0: off, which also saves the reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL enters. 'loss': as in the GRPO paper."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL. 'k3': unbiased and never negative, as in the GRPO paper."""
    kl_target: float | None = Field(None, gt=0)
    """KL to the reference, nats a response, towards which kl_coef is adapted after each step. None: kl_coef is fixed; 6 is of the authors of the controller."""
    kl_horizon: int = Field(10_000, ge=1)
    """Responses over which the adaptive kl_coef changes by a factor of e^0.2 at most. 10000: the value of the authors."""
    kl_importance_weighted: bool = False
    """Multiply the KL in the loss by the ratio, which makes the gradient of k1 and k3 unbiased. False: as in the GRPO paper."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus. 0: sampling at temperature 1 explores enough."""
    overlong_max_tokens: int | None = Field(None, ge=1)
    """Length from which a response's reward is lowered by 1, in tokens that the policy sampled, without observations. None: no penalty on length; DAPO's is 20480."""
    overlong_buffer_tokens: int = Field(4096, ge=1)
    """Tokens before overlong_max_tokens over which the penalty grows. 4096: as in the DAPO paper."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction between the engine and the trainer. All of it is off; see there."""
    router_replay: Literal["off", "rollout"] = "off"
    """Mixtures of experts: 'rollout' computes old log-probabilities and the update with the experts that the engine chose for each token. 'off': a byte a layer, expert and token is saved."""

    @property
    def needs(self) -> Needs:
        """What the algorithm needs: the reference for its KL, which as a part of the reward, or to
        adapt its weight, is measured at the policy before the update.
        """
        is_measured = self.kl_target is not None or (self.kl_coef > 0 and self.kl_in == "reward")
        return Needs(reference=self.kl_coef > 0, old_logps=is_measured, allows_lag=True)

    @property
    def needs_whole_sequences(self) -> bool:
        """Whether the loss has to see all tokens of a response at once, so that train.cp is 1."""
        return (
            self.aggregate == "sequence_mean"
            or self.objective in ("sequence_clip", "geometric_mean")
            or self.correction.needs_whole_sequences
        )

    @field_validator("router_replay", mode="before")
    @classmethod
    def _read_off(cls, value: object) -> object:
        return "off" if value is False else value  # what YAML reads `off` as

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
                "correction.proximal: old with objective plain, which has no ratio, not behaviour"
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("kl_target: only with kl_coef above 0, from which it starts")
        return self


def with_default_weight(section: PolicyGradientConfig) -> PolicyGradientConfig:
    """Returns a section whose objective is corrected for samples of older weights: where neither a
    weight nor the proximal policy is set, tokens are weighted (TIS). A token's weights are known
    one by one, and a product over a response that several versions made varies without bound.
    """
    given = section.correction.model_fields_set
    if {"weight", "proximal"} & given:
        return section
    correction = section.correction.model_copy(update={"weight": "token"})
    return section.model_copy(update={"correction": correction})


class GrpoConfig(PolicyGradientConfig):
    """The samples of one prompt are compared with each other, without a critic: GRPO, and what
    PRESETS makes of it.
    """

    name: GroupRelativeName = "grpo"
    """Selects the algorithm, and with it the defaults of this section."""
    baseline: Literal["group_mean", "leave_one_out", "length_weighted", "pass_at_k", "greedy"] = (
        "group_mean"
    )
    """What a reward is compared with. 'group_mean': as in the GRPO paper."""
    normalize_std: bool = True
    """Divide a group's advantages by their deviation. True: as in the GRPO paper."""
    whiten_advantages: bool = False
    """Scale advantages to mean 0, deviation 1 over the batch's tokens, with normalize_parts its samples. False: as in the GRPO paper."""
    rescale_informative: bool = False
    """Multiply advantages by samples / samples of groups whose advantages are not all 0. False: as in the GRPO paper."""
    pass_k: int = Field(4, ge=1)
    """The k of baseline pass_at_k. 4: the least of the paper's 4, 8 and 16."""
    pass_reward: float = 0.5
    """Reward from which a sample passes, baseline pass_at_k only. 0.5: between wrong, 0, and right, 1."""
    cov_clip_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the tokens that lose their gradient for a high covariance. 0: off; 2e-4 is the paper's."""
    cov_clip_low: float = 1.0
    """Smallest covariance that counts as high. 1: the value of the authors."""
    cov_clip_high: float = 5.0
    """Largest covariance that counts as high. 5: the value of the authors."""
    cov_kl_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the tokens, those of highest covariance, that pay for moving away from the old policy. 0: off; 2e-4 is the paper's for 32B, 2e-3 for 7B."""
    cov_kl_coef: float = Field(1.0, ge=0)
    """What these pay a nat. 1: the value of the authors."""
    normalize_parts: bool = False
    """Compare each part of the reward by itself, then add. False: the sum is compared, as in the GRPO paper."""
    part_weights: dict[str, float] = Field(default_factory=dict)
    """Weights of the compared parts by name, with normalize_parts. Empty: 1 for every part."""
    max_resampling: int = Field(0, ge=0)
    """Rounds in which groups whose advantages are all 0, as those of equal rewards, are replaced by further prompts. 0: off; DAPO samples on until there are none."""

    @property
    def needs(self) -> Needs:
        """What the algorithm needs beside that: groups to compare, or greedy responses."""
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
        """Samples that a prompt needs at least."""
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
                    "normalize_parts: without overlong_max_tokens and with kl_in loss, "
                    "for what they take from the reward is no part of it"
                )
        if self.max_resampling and self.baseline == "greedy":
            raise ValueError("max_resampling: 0 with baseline greedy, which compares no group")
        return self


class ReinforceConfig(PolicyGradientConfig):
    """REINFORCE++: one sample a prompt is enough; advantages are whitened over the whole batch."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    """Selects REINFORCE++."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Where the KL enters. 'reward': a penalty a token, as in the paper."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL. 'k1': as in the paper."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount a token. 1: the reward comes once, at the end."""


class PpoConfig(PolicyGradientConfig):
    """Proximal policy optimization: a critic and generalised advantage estimation; and what
    CRITIC_PRESETS makes of it.
    """

    name: Literal["ppo", "vapo"] = "ppo"
    """Selects the algorithm, and with it the defaults of this section."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Where the KL enters. 'reward': a per-token penalty that the critic learns too."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL. 'k1': the plain log-ratio, unbiased inside a reward."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount a token. 1: the reward comes once, at the end."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """GAE's bias-variance trade. 0.95: the value of the PPO paper."""
    gae_length_alpha: float | None = Field(None, gt=0)
    """The policy's lambda as 1 - 1 / (alpha length), in place of gae_lambda. None: off; VAPO's is 0.05."""
    critic_gae_lambda: float | None = Field(None, ge=0, le=1)
    """Lambda of the critic's targets. None: the policy's, as in PPO; VAPO's is 1."""
    value_clip: float = Field(0.2, gt=0)
    """How far a value may move from its old one in a step. 0.2: the same as the ratio's."""
    whiten_advantages: bool = True
    """Scale advantages to mean 0, deviation 1 over the batch. True: learning rates carry over."""
    critic_warmup_steps: int = Field(0, ge=0)
    """First steps that train the critic alone. 0: a critic from the policy's weights learns fast."""
    positive_lm_coef: float = Field(0.0, ge=0)
    """Weight of the negative log-likelihood of the samples that pass, beside the objective. 0: off; VAPO's is 0.1."""
    pass_reward: float = 0.5
    """Reward from which a sample passes, positive_lm_coef only. 0.5: between wrong, 0, and right, 1."""

    @property
    def needs(self) -> Needs:
        """What the algorithm needs beside that: a critic."""
        return replace(super().needs, values=True)

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: object) -> object:
        if isinstance(values, Mapping):
            return CRITIC_PRESETS.get(str(values.get("name")), {}) | dict(values)
        return values


class OnPolicyDistillationConfig(PolicyGradientConfig, SampledTokensConfig):
    """The teacher's log-probabilities of sampled tokens, and beside them a reward."""

    name: Literal["on_policy_distillation"] = "on_policy_distillation"
    """Selects on-policy distillation."""

    @property
    def needs(self) -> Needs:
        """What the algorithm needs beside that: what teacher and policy say of the samples."""
        return replace(super().needs, teacher=True, old_logps=True)

    @model_validator(mode="after")
    def _check_reward(self) -> Self:
        if self.overlong_max_tokens is not None and self.reward_coef == 0:
            raise ValueError("overlong_max_tokens: only with reward_coef above 0")
        return self


class CustomAlgorithmConfig(Section):
    """An algorithm in the user's own package."""

    name: str = Field(pattern=DOTTED_PATH)
    """Dotted path 'package.module:Class' of an Algorithm."""
    options: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of the class. Empty: its own defaults."""

    @property
    def needs(self) -> None:
        """None: only the class knows; `algorithms/__init__.py:needs_of` imports it and asks."""
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
    """Returns the algorithm that a misspelt name means: one of the same letters, else the closest;
    None if none is close.
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
