"""Supplies router weights to engines that hold them in float32, alongside 16-bit weights.

vLLM and SGLang compute the routers of GLM-4.5 with float32 weights, whatever the model's type.
Updates write a tensor of the model's type instead, which may be the trainer's memory. Its content
is then copied to the engine's parameter in place, because CUDA graphs contain the parameter's
address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ROUTER = ".mlp.gate.weight"


@dataclass(frozen=True)
class WideRouters:
    """Routers of one engine by layout name: float32 parameters, and what updates write."""

    wide: Mapping[str, Tensor]
    narrow: Mapping[str, Tensor]

    @staticmethod
    def names(live: Mapping[str, Tensor], dtype: torch.dtype) -> frozenset[str]:
        """Returns the routers that an engine with weights of type `dtype` holds in float32."""
        if dtype == torch.float32:
            return frozenset()
        is_wide = {name: tensor.dtype == torch.float32 for name, tensor in live.items()}
        return frozenset(name for name in live if is_wide[name] and name.endswith(ROUTER))

    @staticmethod
    def of(
        live: Mapping[str, Tensor], dtype: torch.dtype, views: Mapping[str, Tensor]
    ) -> WideRouters:
        """Creates the tensors that updates write; those in `views` are the trainer's."""
        wide = {name: live[name] for name in sorted(WideRouters.names(live, dtype))}
        narrow = {
            name: views[name] if name in views else torch.empty_like(one, dtype=dtype)
            for name, one in wide.items()
        }
        return WideRouters(wide, narrow)

    @torch.no_grad()
    def widen(self) -> None:
        """Copies what updates have written to the engine's parameters."""
        for name, tensor in self.narrow.items():
            self.wide[name].copy_(tensor)

    @torch.no_grad()
    def stale(self) -> str | None:
        """Returns the name of the first parameter that differs from what was written, if any."""
        found = ((name, self.wide[name].equal(one.float())) for name, one in self.narrow.items())
        return next((name for name, is_equal in found if not is_equal), None)
