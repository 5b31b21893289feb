"""The section `algorithm` of distillation: what is learned from a teacher, a larger or better model
with the same tokens. No torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hybridrl.config.needs import Needs
from hybridrl.config.section import Section
from hybridrl.config.supervised import SupervisedConfig


class TaughtConfig(Section):
    """What learns from a teacher."""

    teacher: str
    """HF directory or hub name[@revision] of the teacher, frozen, with the policy's tokens. No default: it is what is learned."""


class TopTokensConfig(TaughtConfig):
    """What learns the teacher's distribution over its likeliest tokens."""

    top_k: int = Field(64, ge=1)
    """Tokens of the teacher, the likeliest in each place, that are learned one by one; the others together are one more. 64: language models leave little to the rest, and a token costs 512 bytes."""


class DistillationConfig(TopTokensConfig, SupervisedConfig):
    """Learns the teacher's distributions along the data's responses."""

    name: Literal["distillation"] = "distillation"
    """Selects distillation on the data's responses."""

    @property
    def needs(self) -> Needs:
        """What the algorithm needs: the teacher's likeliest tokens on the data's responses."""
        return Needs(rollouts=False, teacher_top=self.top_k)


class GkdConfig(TopTokensConfig):
    """Learns the teacher's distributions along the policy's own responses."""

    name: Literal["gkd"] = "gkd"
    """Selects distillation by distributions on sampled responses."""

    @property
    def needs(self) -> Needs:
        """What the algorithm needs: the teacher's likeliest tokens on samples."""
        return Needs(teacher_top=self.top_k)


class SampledTokensConfig(TaughtConfig):
    """What learns from the teacher's log-probabilities of the tokens that the policy sampled."""

    gamma: float = Field(0.0, ge=0, le=1)
    """Discount of what the teacher says of later tokens. 0: each token is taught by itself, with far less variance; 1 is the gradient of the responses' KL."""
    reward_coef: float = Field(0.0, ge=0)
    """Weight of the group-relative advantage of the reward, as grpo has it, beside the teacher's. 0: the teacher alone, and no reward is needed."""
