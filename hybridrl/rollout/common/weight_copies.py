"""Repairs latent attention in vLLM and SGLang: copies of weights, and epsilons of norms.

For decoding, an engine splits and transposes `kv_b_proj`, the up-projection of keys and values,
into two copies. This module updates them in place whenever the weight changes, because CUDA graphs
contain their addresses.

vLLM and SGLang also compute the routers of GLM-4.5 with float32 weights, whatever the model's type.
Updates write a tensor of the model's type instead, which may be the trainer's memory, and its
content is copied to the engine's parameter in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridrl.errors import ModelError
from hybridrl.models.families.latent import LATENT_EPS
from hybridrl.models.family import LatentShape

LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")


@dataclass(frozen=True)
class LatentCopies:
    """Attributes of a package's attention layers: the copies, and the number N of heads on this
    rank.

    `keys` has shape (N, P, L), `values` has shape (N, L, V). The layer's `kv_b_proj.weight` has
    shape (N * (P + V), L): for each head, P rows for its key, then V rows for its value.
    `qk_nope_head_dim` is P.
    """

    keys: str
    values: str
    num_heads: str

    def check(
        self, model: torch.nn.Module, latent: LatentShape, num_layers: int, version: str
    ) -> None:
        """Raises ModelError unless every layer has the tensors that other methods would skip."""
        copies, norms = len(list(self._copies(model))), len(list(_norms(model)))
        per_layer = 1 + (latent.query_rank > 0)
        for found, expected, what in (
            (copies, 2 * num_layers, f"{self.keys} and {self.values}"),
            (norms, per_layer * num_layers, f"norms of latents, {' and '.join(LATENT_NORMS)}"),
        ):
            if found != expected:
                raise ModelError(
                    "rollout.engine",
                    f"{found} tensors in {version}",
                    f"{expected} in {num_layers} layers: {what}",
                    "Install a version that `hybridrl check` calls tested, or set "
                    "rollout.engine=hf.",
                )

    def is_copy(self, name: str) -> bool:
        """Whether a parameter is a copy; in some versions copies are plain attributes."""
        return name.rpartition(".")[2] in (self.keys, self.values)

    @torch.no_grad()
    def absorb(self, model: torch.nn.Module) -> None:
        """Updates every layer's copies of the up-projection."""
        for _, copy, source in self._copies(model):
            copy.copy_(source)

    @torch.no_grad()
    def stale(self, model: torch.nn.Module) -> str | None:
        """Returns the name of the first copy that differs from its source, if any."""
        made = self._copies(model)
        return next((name for name, copy, source in made if not copy.equal(source)), None)

    def _copies(self, model: torch.nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yields each copy's name, the copy, and the view of the weight from which it is copied."""
        for name, layer in model.named_modules():
            found = getattr(layer, self.keys, None), getattr(layer, self.values, None)
            if not all(isinstance(copy, Tensor) for copy in found):
                continue
            attention: Any = layer
            weight = attention.kv_b_proj.weight
            heads = weight.view(getattr(attention, self.num_heads), -1, weight.size(-1))
            size = attention.qk_nope_head_dim
            yield f"{name}.{self.keys}", getattr(attention, self.keys), heads[:, :size]
            values = heads[:, size:].transpose(1, 2)
            yield f"{name}.{self.values}", getattr(attention, self.values), values


def set_epsilon(model: torch.nn.Module) -> None:
    """Gives the norms of latents their own epsilon; must run before graphs are captured."""
    for norm in _norms(model):
        norm.variance_epsilon = LATENT_EPS


def _norms(model: torch.nn.Module) -> Iterator[Any]:
    for name, part in model.named_modules():
        if name.endswith(LATENT_NORMS) and hasattr(part, "variance_epsilon"):
            yield part


ROUTER = ".mlp.gate.weight"


@dataclass(frozen=True)
class WideRouters:
    """An engine's routers by layout name: float32 parameters, and the tensors updates write."""

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
