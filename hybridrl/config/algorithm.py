"""The section `algorithm`: one class of knobs per algorithm, chosen by `algorithm.name`. No torch."""

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
    """Knobs shared by all algorithms with rollouts: per-token objective, loss averaging, KL to a reference, entropy bonus, length penalty."""

    name: str
    """Name of the algorithm."""
    objective: Literal[
        "clip", "ratio", "sequence_clip", "geometric_mean", "cispo", "sapo", "plain"
    ] = "clip"
    """Objective that is maximised for each token. The default, 'clip', is the clipped surrogate from the PPO paper."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """Lower clipping bound: the ratio is clipped at 1 - clip_low (with geometric_mean, its logarithm at -clip_low). The default, 0.2, is the PPO paper's value."""
    clip_high: float = Field(0.2, gt=0)
    """Upper clipping bound: the ratio is clipped at 1 + clip_high (with geometric_mean, its logarithm at clip_high). The default, 0.2, equals clip_low, as in the PPO paper."""
    dual_clip: float | None = Field(None, gt=1)
    """Upper bound on the ratio for tokens with a negative advantage; requires objective clip. Off by default; the dual-clip paper uses 3."""
    sapo_tau_positive: float = Field(1.0, gt=0)
    """Temperature of SAPO's gate for positive advantages. The default, 1, is the SAPO paper's value."""
    sapo_tau_negative: float = Field(1.05, gt=0)
    """Temperature of SAPO's gate for negative advantages. The default, 1.05, is the SAPO paper's value; it exceeds 1 because tokens with negative advantages need a stronger decay."""
    aggregate: Literal["token_mean", "sequence_mean", "fixed"] = "token_mean"
    """How token losses are averaged. 'token_mean' averages over all tokens. 'sequence_mean' averages over the tokens of each response and then over the responses. 'fixed' divides each response's sum by fixed_length. The default, 'token_mean', gives every token the same weight."""
    fixed_length: float = Field(1.0, gt=0)
    """Divisor of each response's summed loss when aggregate is 'fixed'. The default, 1, keeps the sum over tokens, as in the papers; set it to rollout.max_new_tokens to normalise by the longest response."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the reference model. The default, 0, turns the KL off and saves the memory that the reference model would need."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Term to which the KL is added: 'loss' or 'reward'. The default is 'loss', as in the GRPO paper."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL. The default, 'k3', is the GRPO paper's; it is unbiased and never negative."""
    kl_target: float | None = Field(None, gt=0)
    """Target KL to the reference, in nats per response; kl_coef is adjusted after each step to reach it. By default kl_coef is constant; the authors of the controller use 6."""
    kl_horizon: int = Field(10_000, ge=1)
    """Number of responses within which the adaptive kl_coef can change by at most a factor of e^0.2. The default, 10000, is the value used by the controller's authors."""
    kl_importance_weighted: bool = False
    """Whether the KL in the loss is multiplied by the ratio, which makes the gradient of k1 and k3 unbiased. Off by default, as in the GRPO paper."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus. The default, 0, turns the bonus off, because sampling at temperature 1 explores enough."""
    overlong_max_tokens: int | None = Field(None, ge=1)
    """Response length at which the penalty on the reward reaches 1. Only sampled tokens count, not observations. By default length is not penalised; DAPO uses 20480."""
    overlong_buffer_tokens: int = Field(4096, ge=1)
    """Number of tokens before overlong_max_tokens over which the penalty increases linearly from 0 to 1. The default, 4096, is the DAPO paper's value."""
    correction: CorrectionConfig = CorrectionConfig()
    """Correction for the difference between the engine's and the trainer's probabilities. Off by default; see the knobs of this subsection."""
    router_replay: Literal["off", "rollout"] = "off"
    """Whether the trainer reuses the engine's choice of experts (mixture-of-experts models only). With 'rollout', old log-probabilities and updates use the experts that the engine chose for each token. The default, 'off', saves the memory of these choices: for each token, one or two bytes per chosen expert and layer."""

    sampling_replay: Literal["off", "rollout"] = "off"
    """Whether the trainer computes probabilities over the tokens that the engine could draw. With 'rollout', each sampled token carries the tokens that temperature, rollout.top_k and rollout.top_p kept, and old, new and reference log-probabilities, entropies and gradients are those of the softmax over these tokens; rollout.top_k must be set. The default, 'off', computes over the whole vocabulary, which is right without top-k and top-p."""
    score_centering: bool = False
    """Whether the mean score under the engine's distribution is subtracted from each token's gradient, which cancels a bias where engine and trainer compute different probabilities. Off by default, as in the papers of the algorithms; each sampled token then carries its 64 most probable tokens, 520 bytes."""

    @property
    def needs(self) -> Needs:
        """Needs of all policy gradients: a reference and old log-probabilities if KL keys use them."""
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

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: object) -> object:
        if isinstance(values, Mapping):
            return (PRESETS | CRITIC_PRESETS).get(str(values.get("name")), {}) | dict(values)
        return values

    @field_validator("router_replay", "sampling_replay", mode="before")
    @classmethod
    def _read_off(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads `off` as false

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        longest, buffer = self.overlong_max_tokens, self.overlong_buffer_tokens
        if longest is not None and buffer > longest:
            raise ValueError(
                f"overlong_buffer_tokens: at most overlong_max_tokens ({longest}), instead of {buffer}"
            )
        if self.dual_clip is not None and self.objective != "clip":
            raise ValueError(f"dual_clip: null, because objective is {self.objective}, not clip")
        if self.kl_importance_weighted and self.kl_in != "loss":
            raise ValueError(
                f"kl_importance_weighted: false, because kl_in is {self.kl_in}, not loss"
            )
        if self.objective == "plain" and self.correction.proximal == "behaviour":
            raise ValueError("correction.proximal: old, because objective plain has no ratio")
        if self.score_centering:
            correction = self.correction
            if correction.needs_whole_sequences or correction.reject != "none":
                raise ValueError(
                    "score_centering: false, because correction.weight or correction.reject is about "
                    "more than a token's weight"
                )
            if correction.proximal == "behaviour":
                raise ValueError("score_centering: false, because correction.proximal is behaviour")
            if self.objective in ("sequence_clip", "geometric_mean"):
                raise ValueError(
                    f"score_centering: false, because objective {self.objective} weights whole "
                    "responses"
                )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError(
                "kl_target: null unless kl_coef, the initial weight of the KL, is above 0"
            )
        return self


def with_default_weight(section: PolicyGradientConfig) -> PolicyGradientConfig:
    """Returns the section with token-level importance weights (TIS), unless it sets its own.

    TIS weights each token separately, because the product of ratios over a response of several
    weight versions has unbounded variance.
    """
    given = section.correction.model_fields_set
    if {"weight", "proximal"} & given:
        return section
    correction = section.correction.model_copy(update={"weight": "token"})
    return section.model_copy(update={"correction": correction})


class GrpoConfig(PolicyGradientConfig):
    """GRPO and the variants in PRESETS: the samples of a prompt are compared with each other, so no critic is needed."""

    name: GroupRelativeName = "grpo"
    """Name of the algorithm, which also sets the defaults of this section."""
    baseline: Literal["group_mean", "leave_one_out", "length_weighted", "pass_at_k", "greedy"] = (
        "group_mean"
    )
    """Baseline that is subtracted from each reward. The default, 'group_mean', is the GRPO paper's."""
    normalize_std: bool = True
    """Whether a group's advantages are divided by their standard deviation. On by default, as in the GRPO paper."""
    whiten_advantages: bool = False
    """Whether advantages are scaled to mean 0 and standard deviation 1 over the batch's tokens (with normalize_parts, over its samples). Off by default, as in the GRPO paper."""
    rescale_informative: bool = False
    """Whether advantages are scaled up to compensate for uninformative groups: the factor is the number of all samples divided by the number of samples in groups whose advantages are not all 0. Off by default, as in the GRPO paper."""
    pass_k: int = Field(4, ge=1)
    """Number of samples k in pass@k; requires baseline pass_at_k. The default, 4, is the smallest value in the paper, which uses 4, 8 and 16."""
    pass_reward: float = 0.5
    """Smallest reward of a sample that counts as passed; requires baseline pass_at_k. The default, 0.5, lies between wrong (0) and right (1)."""
    cov_clip_fraction: float = Field(0.0, ge=0, lt=1)
    """Fraction of all tokens whose gradient is dropped because their covariance is high. The default, 0, turns this off; the paper uses 2e-4."""
    cov_clip_low: float = 1.0
    """Smallest covariance that counts as high. The default, 1, is the value used by the paper's authors."""
    cov_clip_high: float = 5.0
    """Largest covariance that counts as high. The default, 5, is the value used by the paper's authors."""
    cov_kl_fraction: float = Field(0.0, ge=0, lt=1)
    """Fraction of all tokens, those with the highest covariance, that are penalised for moving away from the old policy. The default, 0, turns this off; the paper uses 2e-4 for 32B models and 2e-3 for 7B models."""
    cov_kl_coef: float = Field(1.0, ge=0)
    """Penalty per nat for the tokens that cov_kl_fraction selects. The default, 1, is the value used by the paper's authors."""
    normalize_parts: bool = False
    """Whether each part of the reward is normalised within the group before the parts are added. Off by default: only the sum is normalised, as in the GRPO paper."""
    part_weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each part of the reward, by the part's name; requires normalize_parts. By default every part has weight 1."""
    max_resampling: int = Field(0, ge=0)
    """Maximum number of rounds in which groups whose advantages are all 0, for example because all rewards are equal, are replaced by groups of new prompts. The default, 0, turns this off; DAPO repeats until no such group is left."""

    @property
    def needs(self) -> Needs:
        """The shared needs, and several samples per prompt or a greedy response."""
        needs = super().needs
        return replace(
            needs,
            old_logps=needs.old_logps or self.finds_covariance,
            greedy=self.baseline == "greedy",
            group_samples=max(2, self.min_samples),
        )

    @property
    def finds_covariance(self) -> bool:
        """Whether tokens are selected by the covariance between advantage and log-probability."""
        return max(self.cov_clip_fraction, self.cov_kl_fraction) > 0

    @property
    def min_samples(self) -> int:
        if self.baseline == "pass_at_k":
            return max(2, self.pass_k)
        return 1 if self.baseline == "greedy" else 2

    @model_validator(mode="after")
    def _check_comparison(self) -> Self:
        if self.cov_clip_fraction > 0 and self.cov_kl_fraction > 0:
            raise ValueError("cov_kl_fraction: 0, because cov_clip_fraction is also above 0")
        if self.part_weights and not self.normalize_parts:
            raise ValueError("part_weights: no value unless normalize_parts is true")
        if self.normalize_parts:
            if self.baseline not in ("group_mean", "leave_one_out"):
                raise ValueError(f"normalize_parts: false, because baseline is {self.baseline}")
            if self.overlong_max_tokens is not None or (self.kl_coef and self.kl_in == "reward"):
                raise ValueError(
                    "normalize_parts: false, because the penalties of overlong_max_tokens and "
                    "kl_in=reward are not parts of the reward"
                )
        if self.max_resampling and self.baseline == "greedy":
            raise ValueError(
                "max_resampling: 0, because baseline greedy does not compare the samples of a group"
            )
        return self


class ReinforceConfig(PolicyGradientConfig):
    """REINFORCE++: whitens advantages over the whole batch, so one sample per prompt is enough."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    """Name of the algorithm."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Where the KL is added: 'loss' or 'reward'. The default, 'reward', subtracts a penalty from each token's reward, as in the paper."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL. The default, 'k1', is the paper's."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token. The default, 1, suits a single reward at the end of the response."""


class PpoConfig(PolicyGradientConfig):
    """Proximal policy optimization (PPO) with a critic and generalised advantage estimation, and the variants in CRITIC_PRESETS."""

    name: Literal["ppo", "vapo"] = "ppo"
    """Name of the algorithm, which also sets the defaults of this section."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Where the KL is added: 'loss' or 'reward'. The default, 'reward', subtracts a penalty from each token's reward, so the critic learns to predict it too."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL. The default, 'k1', is the plain log-ratio, which is unbiased as part of a reward."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token. The default, 1, suits a single reward at the end of the response."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation: a smaller lambda means less variance but more bias. The default, 0.95, is the PPO paper's value."""
    gae_length_alpha: float | None = Field(None, gt=0)
    """Alpha of the length-dependent lambda 1 - 1 / (alpha * length), which replaces gae_lambda in the policy's advantages. Off by default; VAPO uses 0.05."""
    critic_gae_lambda: float | None = Field(None, ge=0, le=1)
    """Lambda used to compute the critic's targets. The default is the policy's lambda, as in PPO; VAPO uses 1."""
    value_clip: float = Field(0.2, gt=0)
    """Clipping bound for the critic: how far a predicted value may move from its value at the start of the step. The default, 0.2, equals the default of clip_low and clip_high."""
    whiten_advantages: bool = True
    """Whether advantages are scaled to mean 0 and standard deviation 1 over the batch. On by default, so that one learning rate works for different tasks."""
    critic_warmup_steps: int = Field(0, ge=0)
    """Number of steps at the start of the run that train only the critic. The default is 0, because a critic initialised from the policy's weights learns quickly."""
    positive_lm_coef: float = Field(0.0, ge=0)
    """Weight of an additional loss term: the negative log-likelihood of samples that pass (see pass_reward). The default, 0, turns the term off; VAPO uses 0.1."""
    pass_reward: float = 0.5
    """Smallest reward of a sample that counts as passed; only used with positive_lm_coef. The default, 0.5, lies between wrong (0) and right (1)."""

    @property
    def needs(self) -> Needs:
        """Needs of the algorithm: a critic, in addition to the shared needs."""
        return replace(super().needs, values=True)


class OnPolicyDistillationConfig(PolicyGradientConfig, SampledTokensConfig):
    """Learns from the teacher's log-probabilities of sampled tokens, and optionally from a reward."""

    name: Literal["on_policy_distillation"] = "on_policy_distillation"
    """Name of the algorithm."""

    @property
    def needs(self) -> Needs:
        """The shared needs, and the teacher's and the policy's log-probabilities."""
        return replace(super().needs, teacher=True, old_logps=True)

    @model_validator(mode="after")
    def _check_reward(self) -> Self:
        if self.overlong_max_tokens is not None and self.reward_coef == 0:
            raise ValueError("overlong_max_tokens: no value unless reward_coef is above 0")
        return self


class CustomAlgorithmConfig(Section):
    """An algorithm that you implement in your own package."""

    name: str = Field(pattern=DOTTED_PATH)
    """Dotted path 'package.module:Class' of a subclass of Algorithm."""
    options: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments for the class's constructor. By default the class's own defaults apply."""

    @property
    def needs(self) -> None:
        """None, because only the class declares its needs (`algorithms/__init__.py:needs_of`)."""
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
    """Returns the name closest to a misspelt one, preferring anagrams; None if none is close."""
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
