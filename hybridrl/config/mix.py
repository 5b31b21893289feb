"""The section `mix`: further terms of the policy's loss, each with its own algorithm and data. No
torch.

A mapping by name, as `reward.functions`: a name is the term's in metrics, and can be overridden on
the command line (`mix.sft.weight=0.1`).
"""

from __future__ import annotations

from pydantic import Field

from hybridrl.config.algorithm import AlgorithmConfig
from hybridrl.config.data import DataConfig
from hybridrl.config.section import Section


class TermConfig(Section):
    """A term that learns from the data's own responses, beside the main algorithm."""

    algorithm: AlgorithmConfig
    """An algorithm without rollouts, with its knobs. No default: it says what the term is."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Its rows, as in the section data; they are other rows than the main ones."""
    weight: float = Field(1.0, ge=0)
    """What its loss is multiplied by. 1: as much as the main loss; 0: the term is left out."""
    prompts_per_step: int = Field(64, ge=1)
    """Rows of it a step. 64: as many as steps.prompts_per_step has."""
