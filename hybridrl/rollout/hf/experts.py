"""Records the experts that a transformers model chooses in a forward pass.

In transformers 5 the last item of a router's output has the chosen experts, (tokens, K). Before
5.19, DeepseekV3 routers returned only logits; the enclosing MoE layer selected the experts.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridrl.contracts.blobs import Array
from hybridrl.contracts.routed_experts import experts_dtype
from hybridrl.errors import ModelError

# Name of the routers in Qwen3-MoE and Mixtral, and in GPT-OSS.
ROUTER = re.compile(r"layers\.(\d+)\.mlp\.(?:gate|router)$")


class ChosenExperts:
    """Stores the experts chosen in a model's last forward pass; ModelError without such routers."""

    def __init__(self, model: torch.nn.Module) -> None:
        found: list[tuple[int, torch.nn.Module]] = []
        for name, part in model.named_modules():
            if match := ROUTER.search(name):
                found.append((int(match[1]), part))
        if not found or not all(hasattr(part, "top_k") for _, part in found):
            raise ModelError(
                "config.json: model_type",
                type(model).__name__,
                "a model whose layers have routers, named mlp.gate or mlp.router, that choose "
                "experts, to record them with rollout.engine=hf",
                "Set algorithm.router_replay=off, use another rollout engine, or a newer "
                "transformers: since 5.19, DeepseekV3 routers choose experts.",
            )
        self._chosen: dict[int, Tensor] = {}
        self._num_layers = len(found)
        weights: list[Any] = [part.weight for _, part in found]
        self._dtype = experts_dtype(max(len(weight) for weight in weights))
        for layer, router in found:
            router.register_forward_hook(partial(self._keep, layer))

    def _keep(self, layer: int, _: torch.nn.Module, __: Any, output: tuple[Tensor, ...]) -> None:
        self._chosen[layer] = output[-1]

    def take(self, num_rows: int, length: int) -> Array:
        """Returns the last forward pass's experts, (B, L, K) on the host, and clears them."""
        if len(self._chosen) != self._num_layers:
            raise RuntimeError(
                f"{len(self._chosen)} of {self._num_layers} routers reported their experts"
            )
        layers = [self._chosen[layer] for layer in sorted(self._chosen)]
        self._chosen.clear()
        # A sync point, once per forward pass, like the sync point for drawn tokens.
        experts = torch.cat(layers, 1).cpu().numpy().astype(self._dtype)
        return experts.reshape(num_rows, length, -1)
