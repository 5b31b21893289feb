"""The section `algorithm` of algorithms without rollouts (demonstrations, preference pairs,
labelled responses) and of online DPO. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from hybridrl.config.needs import Needs
from hybridrl.config.section import Section

PAIR_MARGIN = "margin of the pair"
"""Column of a prompt that holds the value of `data.margin_key`."""

# Defaults of each name; docs/algorithms.md has their sources.
PAIR_PRESETS: dict[str, dict[str, Any]] = {
    "dpo": {},
    "dpo_norm": {"length_normalized": True, "beta": 5.0},
    "cdpo": {"label_smoothing": 0.1},
    "ipo": {"loss": "squared", "length_normalized": True},
    "simpo": {"reference": False, "length_normalized": True, "beta": 2.0, "target_margin": 1.0},
    "orpo": {
        "loss": "odds_ratio",
        "reference": False,
        "length_normalized": True,
        "sft_coef": 1.0,
    },
}


class SupervisedConfig(Section):
    """Knobs of every algorithm without rollouts."""

    name: str
    """Name of the algorithm."""

    @property
    def needs(self) -> Needs:
        """Needs of the algorithm: demonstrations, unless a subclass adds other feedback."""
        return Needs(rollouts=False)


class SftConfig(SupervisedConfig):
    """Supervised fine-tuning on the data's response column."""

    name: Literal["sft"] = "sft"
    """Name of the algorithm."""


class PairLossConfig(Section):
    """Loss of preference pairs, from data or samples; PAIR_PRESETS has the defaults of each name."""

    loss: Literal["sigmoid", "squared", "odds_ratio"] = "sigmoid"
    """Loss of a pair. The default 'sigmoid' is the log-likelihood of the preference, as in the DPO paper."""
    reference: bool = True
    """Whether log-probabilities are compared with those of the frozen initial weights. On by default, as in the DPO paper."""
    length_normalized: bool = False
    """Whether a response's log-probability is divided by its number of tokens. Off by default, as in the DPO paper."""
    beta: float = Field(0.1, gt=0)
    """Strength of the KL constraint; with odds_ratio, weight of that term. The default 0.1 is the DPO paper's."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed share of pairs whose sides are swapped, only with loss sigmoid. The default 0 trusts all labels."""
    target_margin: float = Field(0.0, ge=0)
    """Margin by which the better side should lead, only with loss sigmoid. The default 0 is the DPO paper's."""
    sft_coef: float = Field(0.0, ge=0)
    """Weight of the chosen side's mean negative log-likelihood. The default 0 is the DPO paper's."""

    @property
    def needs(self) -> Needs:
        """Needs of the algorithm on the data's pairs."""
        return Needs(rollouts=False, feedback="pairs", reference=self.reference, old_logps=True)

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: object) -> object:
        if isinstance(values, Mapping):
            return PAIR_PRESETS.get(str(values.get("name")), {}) | dict(values)
        return values

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for knob, value in (
            ("label_smoothing", self.label_smoothing),
            ("target_margin", self.target_margin),
        ):
            if value and self.loss != "sigmoid":
                raise ValueError(f"{knob}: 0 unless loss is sigmoid, not {value} with {self.loss}")
        if self.reference and self.loss == "odds_ratio":
            raise ValueError("reference: only false with loss odds_ratio, which needs no reference")
        return self


class DpoConfig(PairLossConfig, SupervisedConfig):
    """Direct preference optimization on the data's pairs, and the variants in PAIR_PRESETS."""

    name: Literal["dpo", "dpo_norm", "cdpo", "ipo", "simpo", "orpo"] = "dpo"
    """Name of the algorithm, which also sets the defaults of this section."""


class OnlineDpoConfig(PairLossConfig):
    """Direct preference optimization on the policy's own samples: each prompt's samples of highest
    and lowest reward form a pair.
    """

    name: Literal["online_dpo"] = "online_dpo"
    """Name of the algorithm."""
    max_resampling: int = Field(0, ge=0)
    """Rounds in which groups of equal rewards, which form no pair, are replaced by further prompts. The default 0 turns it off, so that a step may have fewer pairs."""

    @property
    def needs(self) -> Needs:
        """Needs of the algorithm: samples, from which it forms the pairs."""
        return replace(super().needs, rollouts=True)


class RewardModelConfig(SupervisedConfig):
    """A reward model from pairs (Bradley-Terry)."""

    name: Literal["reward_model"] = "reward_model"
    """Name of the algorithm."""
    margin: float = Field(0.0, ge=0)
    """Margin by which the better side should lead, added to that of data.margin_key. The default 0 is the InstructGPT paper's."""
    center_coef: float = Field(0.0, ge=0)
    """Weight of the squared sum of a pair's scores, which keeps them around 0. The default 0 is the InstructGPT paper's; 0.01 is usual."""

    @property
    def needs(self) -> Needs:
        """Needs of the algorithm: pairs, and a model with scores that is trained in place of the
        policy.
        """
        return Needs(rollouts=False, feedback="pairs", values=True, scores=True, policy=False)


class KtoConfig(SupervisedConfig):
    """Kahneman-Tversky optimization on labelled responses."""

    name: Literal["kto"] = "kto"
    """Name of the algorithm."""
    beta: float = Field(0.1, gt=0)
    """Risk aversion: a larger value lets gains saturate sooner. The default 0.1 is the paper's."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of responses labelled true. The default 1 is the paper's, for balanced classes."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of responses labelled false. The default 1 is the paper's, for balanced classes; otherwise keep desirable_weight x (number of true) / (undesirable_weight x (number of false)) within 1 to 1.5 (eq. 9)."""

    @property
    def needs(self) -> Needs:
        """Needs of the algorithm: labels, and log-probabilities of the policy and the reference."""
        return Needs(rollouts=False, feedback="labels", reference=True, old_logps=True)
