"""The section `algorithm` of distillation from a teacher, a larger or better model with the same
tokens. No torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hybridrl.config.needs import Needs
from hybridrl.config.section import Section
from hybridrl.config.supervised import SupervisedConfig


class TaughtConfig(Section):
    """Knobs of every algorithm that learns from a teacher."""

    teacher: str
    """HF directory or hub name[@revision] of the frozen teacher, which must have the policy's tokens. It has no default: every distillation has its own teacher."""


class TopTokensConfig(TaughtConfig):
    """Knobs of algorithms that learn the teacher's distribution over its likeliest tokens."""

    top_k: int = Field(64, ge=1)
    """Number of the teacher's likeliest tokens per position that are learned one by one; all other tokens count as one more. The default 64 leaves little probability to the others and costs 512 bytes per position."""


class DistillationConfig(TopTokensConfig, SupervisedConfig):
    """Learns the teacher's distributions on the data's responses."""

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
    """Discount of the teacher's signal for later tokens. With the default 0 each token is taught by itself, which has far less variance; 1 gives the gradient of the responses' KL."""
    reward_coef: float = Field(0.0, ge=0)
    """Weight of the reward's group-relative advantage, as in grpo, which is added to the teacher's signal. With the default 0 only the teacher counts, and no reward is needed."""
