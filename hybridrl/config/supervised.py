"""The section `algorithm` of what learns from the data's own responses, demonstrations, preference
pairs, labelled responses, and from pairs that are sampled. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from hybridrl.config.needs import Needs
from hybridrl.config.section import Section

PAIR_MARGIN = "margin of the pair"
"""The column of a prompt that has what `data.margin_key` names."""

# What each name sets where the config says nothing; docs/algorithms.md has the source of each.
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
    """What the algorithms without rollouts share."""

    name: str
    """Selects the algorithm."""

    @property
    def needs(self) -> Needs:
        """What the algorithm needs: demonstrations, unless a kind of feedback is added."""
        return Needs(rollouts=False)


class SftConfig(SupervisedConfig):
    """Supervised fine-tuning on the data's response column."""

    name: Literal["sft"] = "sft"
    """Selects supervised fine-tuning."""


class PairLossConfig(Section):
    """The loss of a pair, whoever made it; PAIR_PRESETS has what names set."""

    loss: Literal["sigmoid", "squared", "odds_ratio"] = "sigmoid"
    """Loss of a pair. 'sigmoid': the log-likelihood of the preference, as in the DPO paper."""
    reference: bool = True
    """Compare log-probabilities with those of the frozen first weights. True: as in the DPO paper."""
    length_normalized: bool = False
    """Divide a response's log-probability by its tokens. False: as in the DPO paper."""
    beta: float = Field(0.1, gt=0)
    """Strength of the KL constraint; the weight of the term with odds_ratio. 0.1: the value of the DPO paper."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs whose sides are assumed to be swapped, loss sigmoid only. 0: labels are right."""
    target_margin: float = Field(0.0, ge=0)
    """By how much the better side should lead, loss sigmoid only. 0: as in the DPO paper."""
    sft_coef: float = Field(0.0, ge=0)
    """Weight of the chosen side's mean negative log-likelihood. 0: as in the DPO paper."""

    @property
    def needs(self) -> Needs:
        """What the algorithm needs on the data's pairs."""
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
            raise ValueError("reference: only false with loss odds_ratio, which compares odds")
        return self


class DpoConfig(PairLossConfig, SupervisedConfig):
    """Direct preference optimization on the data's pairs, and what PAIR_PRESETS makes of it."""

    name: Literal["dpo", "dpo_norm", "cdpo", "ipo", "simpo", "orpo"] = "dpo"
    """Selects the algorithm, and with it the defaults of this section."""


class OnlineDpoConfig(PairLossConfig):
    """Direct preference optimization on pairs of the policy's own samples: of each prompt's, those
    of the highest and the lowest reward.
    """

    name: Literal["online_dpo"] = "online_dpo"
    """Selects online DPO."""
    max_resampling: int = Field(0, ge=0)
    """Rounds in which groups of equal rewards, which make no pair, are replaced by further prompts. 0: off, a step then has fewer pairs."""

    @property
    def needs(self) -> Needs:
        """What the algorithm needs: samples, of which it makes the pairs."""
        return replace(super().needs, rollouts=True)


class RewardModelConfig(SupervisedConfig):
    """A reward model from pairs (Bradley-Terry)."""

    name: Literal["reward_model"] = "reward_model"
    """Selects reward-model training."""
    margin: float = Field(0.0, ge=0)
    """By how much the better side should lead, beside data.margin_key. 0: as in the InstructGPT paper."""
    center_coef: float = Field(0.0, ge=0)
    """Weight of the squared sum of a pair's scores, which keeps them around 0. 0: as in the InstructGPT paper; 0.01 is usual."""

    @property
    def needs(self) -> Needs:
        """What the algorithm needs: pairs, and scores of a model that is trained in place of the
        policy.
        """
        return Needs(rollouts=False, feedback="pairs", values=True, scores=True, policy=False)


class KtoConfig(SupervisedConfig):
    """Kahneman-Tversky optimization on labelled responses."""

    name: Literal["kto"] = "kto"
    """Selects KTO."""
    beta: float = Field(0.1, gt=0)
    """Risk aversion: how soon gains saturate. 0.1: the paper's."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of responses labelled true. 1: the paper's, balanced classes."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of responses labelled false. 1: the paper's; else keep desirable_weight x (number of true) / (undesirable_weight x (number of false)) within 1 to 1.5 (eq. 9)."""

    @property
    def needs(self) -> Needs:
        """What the algorithm needs: labels, and what policy and reference say of the responses."""
        return Needs(rollouts=False, feedback="labels", reference=True, old_logps=True)
