"""The section `mix`: terms of the policy's loss, whose names are also prefixes of metrics. No
torch.
"""

from __future__ import annotations

from pydantic import Field

from hybridrl.config.algorithm import AlgorithmConfig
from hybridrl.config.data import DataConfig
from hybridrl.config.section import Section


class TermConfig(Section):
    """A loss term that learns from responses in the data, in addition to the main algorithm."""

    algorithm: AlgorithmConfig
    """An algorithm without rollouts, and its knobs. Required."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Data of the term, with the same knobs as the section `data`. The term does not use the rows of that section."""
    weight: float = Field(1.0, ge=0)
    """Factor by which the term's loss is multiplied. The default, 1, gives it the weight of the main loss; 0 turns the term off."""
    prompts_per_step: int = Field(64, ge=1)
    """Number of the term's rows per step. The default, 64, is also the default of steps.prompts_per_step."""
