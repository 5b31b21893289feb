"""The section `lora`: low-rank adapters that are trained instead of the weights. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hybridrl.config.lists import Texts
from hybridrl.config.section import Section


class LoraConfig(Section):
    """Low-rank adapters (LoRA) on the model's linear layers. Off unless `rank` or `path` is set."""

    rank: int | None = Field(None, ge=1)
    """Rank of the adapters. By default there are no adapters, and all weights are trained. Rank 32 learns as fast as full training in most RL runs (Schulman et al. 2025, "LoRA Without Regret")."""
    alpha: float | None = Field(None, gt=0)
    """Numerator of the adapters' scale, alpha / rank. The default, 32, lets the same learning rate suit every rank; about ten times the rate of full training is a good start."""
    targets: Texts = ("all-linear",)
    """Linear layers that have an adapter: last parts of HF names such as q_proj. The default, all-linear, is every linear layer of the decoder except routers and experts, because adapters on attention alone learn less. `experts` adds adapters to the three projections of every expert; they are many, so choose a rank of 4 to 8 then."""
    rslora: bool = False
    """Whether the scale is alpha / sqrt(rank). Off by default, as in PEFT."""
    dropout: Literal[0] = 0
    """Dropout before the adapters. Only 0, the default, is allowed, because with dropout the trainer's log-probabilities would differ from the engine's."""
    path: str | None = None
    """PEFT directory whose adapters are the initial ones; it also determines rank, alpha, targets and rslora. By default A is random and B is zero, so that training starts from the model itself."""
    full: Texts = ()
    """Parts that are trained completely, in addition to the adapters: embeddings, head, norms. By default only adapters are trained, so that checkpoints and weight transfers contain nothing else."""

    @property
    def is_on(self) -> bool:
        return self.rank is not None or self.path is not None

    @property
    def shares_reference(self) -> bool:
        """Whether the reference is the policy without its adapters; false with `full` parts."""
        return self.is_on and not self.full
