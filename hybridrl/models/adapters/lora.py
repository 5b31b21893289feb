"""Settings of LoRA adapters. Pure data, no torch.

Hu et al. 2021, "LoRA": a linear layer computes W x + s B A x. W stays as it is; only A (rank, in)
and B (out, rank) are trained.
"""

from __future__ import annotations

from dataclasses import dataclass

ALL_LINEAR = "all-linear"
"""Target that stands for every linear layer of the decoder layers, except routers and experts."""
EXPERTS = "experts"
"""Target that stands for the three projections of every expert, each with its own adapter."""


@dataclass(frozen=True)
class Lora:
    """LoRA adapters of a model.

    Args:
        alpha: Numerator of the scale s.
        targets: Linear layers that have an adapter: last parts of their HF names such as `q_proj`,
            ALL_LINEAR, or EXPERTS. Only EXPERTS selects the projections of experts.
        rslora: Whether the scale is alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski 2023,
            "rsLoRA", section 3.2).
        full: Names of parts that are trained completely, in addition to the adapters: embeddings,
            head, norms.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)
    rslora: bool = False
    full: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
