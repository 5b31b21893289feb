"""The section `algorithm` without rollouts, and for online DPO. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from hybridrl.config.needs import Needs
from hybridrl.config.section import Section

PAIR_MARGIN = "margin of the pair"
"""Name under which a prompt stores its value of the column `data.margin_key`."""

# Defaults for each name; docs/algorithms.md gives their sources.
PAIR_PRESETS: dict[str, dict[str, Any]] = {
    "dpo": {},
    "dpo_norm": {"length_normalized": True, "beta": 5.0},
    "cdpo": {"label_smoothing": 0.1},
    "ipo": {"loss": "squared", "length_normalized": True},
    "simpo": {"reference": False, "length_normalized": True, "beta": 2.0, "target_margin": 1.0},
    "orpo": {"loss": "odds_ratio", "reference": False, "length_normalized": True, "sft_coef": 1.0},
}


class SupervisedConfig(Section):
    """Knobs of every algorithm without rollouts."""

    name: str
    """Name of the algorithm."""

    @property
    def needs(self) -> Needs:
        """Needs of the algorithm: demonstrations, unless a subclass needs other feedback."""
        return Needs(rollouts=False)


class SftConfig(SupervisedConfig):
    """Supervised fine-tuning on the data's response column."""

    name: Literal["sft"] = "sft"
    """Name of the algorithm."""


class PairLossConfig(Section):
    """Loss for preference pairs from data or samples; the defaults for each name are in PAIR_PRESETS."""

    loss: Literal["sigmoid", "squared", "odds_ratio"] = "sigmoid"
    """Loss for a pair. The default, 'sigmoid', is the negative log-likelihood of the preference, as in the DPO paper."""
    reference: bool = True
    """Whether the policy's log-probabilities are taken relative to the frozen initial weights. On by default, as in the DPO paper."""
    length_normalized: bool = False
    """Whether a response's log-probability is divided by its number of tokens. Off by default, as in the DPO paper."""
    beta: float = Field(0.1, gt=0)
    """Strength of the KL constraint; with loss odds_ratio, weight of the odds-ratio term. The default, 0.1, is the DPO paper's value."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed fraction of pairs whose chosen and rejected responses are swapped by mistake; requires loss sigmoid. The default, 0, trusts all labels."""
    target_margin: float = Field(0.0, ge=0)
    """Margin by which the chosen response should be preferred; requires loss sigmoid. The default is 0, as in the DPO paper."""
    sft_coef: float = Field(0.0, ge=0)
    """Weight of an additional loss term: the mean negative log-likelihood of the chosen response. The default is 0, as in the DPO paper."""

    @property
    def needs(self) -> Needs:
        """Needs of the algorithm if the pairs come from the data."""
        return Needs(rollouts=False, feedback="pairs", reference=self.reference, old_logps=True)

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: object) -> object:
        if isinstance(values, Mapping):
            return PAIR_PRESETS.get(str(values.get("name")), {}) | dict(values)
        return values

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for knob in ("label_smoothing", "target_margin"):
            if getattr(self, knob) and self.loss != "sigmoid":
                raise ValueError(f"{knob}: 0, because loss is {self.loss}, not sigmoid")
        if self.reference and self.loss == "odds_ratio":
            raise ValueError("reference: false, because loss odds_ratio needs no reference model")
        return self


class DpoConfig(PairLossConfig, SupervisedConfig):
    """Direct preference optimization (DPO) on pairs from the data, and the variants in PAIR_PRESETS."""

    name: Literal["dpo", "dpo_norm", "cdpo", "ipo", "simpo", "orpo"] = "dpo"
    """Name of the algorithm, which also sets the defaults of this section."""


class OnlineDpoConfig(PairLossConfig):
    """Direct preference optimization on the policy's own samples: for each prompt, the samples with the highest and the lowest reward form a pair."""

    name: Literal["online_dpo"] = "online_dpo"
    """Name of the algorithm."""
    max_resampling: int = Field(0, ge=0)
    """Maximum number of rounds in which groups whose rewards are all equal, which yield no pair, are replaced by groups of new prompts. The default, 0, turns this off; a step may then have fewer pairs than prompts."""

    @property
    def needs(self) -> Needs:
        """Needs of the algorithm: samples, from which the pairs are formed."""
        return replace(super().needs, rollouts=True)


class RewardModelConfig(SupervisedConfig):
    """Trains a reward model on preference pairs (Bradley-Terry)."""

    name: Literal["reward_model"] = "reward_model"
    """Name of the algorithm."""
    margin: float = Field(0.0, ge=0)
    """Margin by which the score of the chosen response should be higher, in addition to the margin in data.margin_key. The default is 0, as in the InstructGPT paper."""
    center_coef: float = Field(0.0, ge=0)
    """Weight of an additional loss term, the squared sum of a pair's two scores, which keeps scores near 0. The default is 0, as in the InstructGPT paper; 0.01 is common."""

    @property
    def needs(self) -> Needs:
        """Needs of the algorithm: pairs, and a model with scores that is trained as a critic."""
        return Needs(rollouts=False, feedback="pairs", values=True, scores=True, policy=False)


class KtoConfig(SupervisedConfig):
    """Kahneman-Tversky optimization on labelled responses."""

    name: Literal["kto"] = "kto"
    """Name of the algorithm."""
    beta: float = Field(0.1, gt=0)
    """Risk aversion: the larger the value, the sooner gains saturate. The default, 0.1, is the KTO paper's value."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of responses labelled true. The default, 1, is the KTO paper's value for balanced classes."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of responses labelled false. The default, 1, is the KTO paper's value for balanced classes; for other data keep desirable_weight x (number of true) / (undesirable_weight x (number of false)) within 1 to 1.5 (eq. 9)."""

    @property
    def needs(self) -> Needs:
        """Needs of the algorithm: labels, and log-probabilities of the policy and the reference."""
        return Needs(rollouts=False, feedback="labels", reference=True, old_logps=True)
