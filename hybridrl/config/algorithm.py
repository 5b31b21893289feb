"""The section `algorithm`: one set of knobs for each algorithm, chosen by its name. No torch.

Owns also `Section`, what all sections of the schema are: frozen, strict, closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

ALGORITHM_NAMES = ("grpo", "ppo", "sft")
DOTTED_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


class Section(BaseModel):
    """A frozen group of knobs; an unknown key or a value of another type is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class SftConfig(Section):
    """Supervised fine-tuning on the data's response column."""

    name: Literal["sft"] = Field("sft", description="Selects supervised fine-tuning.")


class PolicyGradientConfig(Section):
    """The knobs that GRPO and PPO share: clipping, KL to a reference, entropy."""

    clip_low: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="Ratio may fall to 1 - clip_low. 0.2: the value of the PPO paper.",
    )
    clip_high: float = Field(
        0.2,
        gt=0,
        description="Ratio may rise to 1 + clip_high. 0.2: symmetric, as in the PPO paper.",
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the KL to the reference. 0: off, which also saves the reference model.",
    )
    entropy_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the entropy bonus. 0: sampling at temperature 1 explores enough.",
    )


class GrpoConfig(PolicyGradientConfig):
    """Group relative policy optimization: no critic, advantages from the samples of one prompt."""

    name: Literal["grpo"] = Field("grpo", description="Selects GRPO.")
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="Where the KL enters. 'loss': as in the GRPO paper."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="Estimator of the KL. 'k3': unbiased and never negative, as in the GRPO paper.",
    )
    normalize_std: bool = Field(
        True,
        description="Divide a group's advantages by their deviation. True: as in the GRPO paper.",
    )


class PpoConfig(PolicyGradientConfig):
    """Proximal policy optimization: a critic and generalised advantage estimation."""

    name: Literal["ppo"] = Field("ppo", description="Selects PPO.")
    kl_in: Literal["loss", "reward"] = Field(
        "reward",
        description="Where the KL enters. 'reward': a per-token penalty that the critic learns too.",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k1",
        description="Estimator of the KL. 'k1': the plain log-ratio, unbiased inside a reward.",
    )
    gamma: float = Field(
        1.0, ge=0, le=1, description="Discount a token. 1: the reward comes once, at the end."
    )
    gae_lambda: float = Field(
        0.95, ge=0, le=1, description="GAE's bias-variance trade. 0.95: the value of the PPO paper."
    )
    value_clip: float = Field(
        0.2,
        gt=0,
        description="How far a value may move from its old one in a step. 0.2: the same as the ratio's.",
    )
    whiten_advantages: bool = Field(
        True,
        description="Scale advantages to mean 0, deviation 1 over the batch. True: learning rates carry over.",
    )
    critic_warmup_steps: int = Field(
        0,
        ge=0,
        description="First steps that train the critic alone. 0: a critic from the policy's weights learns fast.",
    )


class CustomAlgorithmConfig(Section):
    """An algorithm in the user's own package."""

    name: str = Field(
        pattern=DOTTED_PATH, description="Dotted path 'package.module:Class' of an Algorithm."
    )
    options: dict[str, object] = Field(
        default_factory=dict, description="Keyword arguments of the class. Empty: its own defaults."
    )


def _algorithm_tag(value: object) -> str | None:
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
    if name in ALGORITHM_NAMES:
        return str(name)
    return "custom" if isinstance(name, str) and ":" in name else None


AlgorithmConfig = Annotated[
    Annotated[SftConfig, Tag("sft")]
    | Annotated[GrpoConfig, Tag("grpo")]
    | Annotated[PpoConfig, Tag("ppo")]
    | Annotated[CustomAlgorithmConfig, Tag("custom")],
    Discriminator(_algorithm_tag),
]
