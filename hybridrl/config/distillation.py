"""The section `algorithm` for distillation from a teacher with the same vocabulary. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hybridrl.config.needs import Needs
from hybridrl.config.section import Section
from hybridrl.config.supervised import SupervisedConfig


class TaughtConfig(Section):
    """Knobs of every algorithm that learns from a teacher."""

    teacher: str
    """HF directory or hub name[@revision] of the frozen teacher, which must have the same vocabulary as the policy. There is no default."""


class TopTokensConfig(TaughtConfig):
    """Knobs of algorithms that learn the teacher's distribution over its likeliest tokens."""

    top_k: int = Field(64, ge=1)
    """Number of most likely tokens at each position whose teacher probabilities are learned individually; all other tokens are merged into one class. With the default, 64, that class has little probability, and each position takes 512 bytes."""


class DistillationConfig(TopTokensConfig, SupervisedConfig):
    """Learns the teacher's distributions on responses from the data."""

    name: Literal["distillation"] = "distillation"
    """Name of the algorithm."""

    @property
    def needs(self) -> Needs:
        """Needs of the algorithm: the teacher's likeliest tokens on the data's responses."""
        return Needs(rollouts=False, teacher_top=self.top_k)


class GkdConfig(TopTokensConfig):
    """Learns the teacher's distributions on the policy's own responses."""

    name: Literal["gkd"] = "gkd"
    """Name of the algorithm."""

    @property
    def needs(self) -> Needs:
        """Needs of the algorithm: the teacher's likeliest tokens on samples."""
        return Needs(teacher_top=self.top_k)


class SampledTokensConfig(TaughtConfig):
    """Knobs of algorithms that learn from the teacher's log-probabilities of sampled tokens."""

    gamma: float = Field(0.0, ge=0, le=1)
    """Discount of the teacher's signal for later tokens. With the default, 0, each token learns only from its own signal, which has far less variance; 1 gives the exact gradient of the KL over whole responses."""
    reward_coef: float = Field(0.0, ge=0)
    """Weight of the group-relative advantage of the reward (as in grpo) that is added to the teacher's signal. With the default, 0, the policy learns only from the teacher, and no reward is needed."""
