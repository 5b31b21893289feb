"""The section `mix`: further terms of the policy's loss, each with its own algorithm and data. No
torch.

Terms are named, as in `reward.functions`: the name appears in metrics and in overrides
(`mix.sft.weight=0.1`).
"""

from __future__ import annotations

from pydantic import Field

from hybridrl.config.algorithm import AlgorithmConfig
from hybridrl.config.data import DataConfig
from hybridrl.config.section import Section


class TermConfig(Section):
    """A term that learns from the data's responses, in addition to the main algorithm."""

    algorithm: AlgorithmConfig
    """An algorithm without rollouts, with its knobs. It has no default."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Sources and columns of the term, as in the section data. Its rows are separate from the main ones."""
    weight: float = Field(1.0, ge=0)
    """Factor of the term's loss. The default 1 weighs it like the main loss; 0 leaves the term out."""
    prompts_per_step: int = Field(64, ge=1)
    """Rows of the term per step. The default 64 equals that of steps.prompts_per_step."""
