"""The experts that a transformers model chooses, layer after layer, while it computes.

transformers 5 has a router module in each layer with experts, whose output ends with the numbers of
the chosen experts, (tokens, experts of a token). Owns the hooks on them. Routers of DeepseekV3 gave
logits alone before, and the layer around them chose.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from hybridrl.contracts.blobs import Array
from hybridrl.contracts.routed_experts import experts_dtype
from hybridrl.errors import ModelError

# Of Qwen3-MoE and Mixtral.
ROUTER = re.compile(r"layers\.(\d+)\.mlp\.gate$")


class ChosenExperts:
    """Keeps what the routers of a model chose in its last forward pass. Raises ModelError without
    routers that choose.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        found: list[tuple[int, torch.nn.Module]] = []
        for name, part in model.named_modules():
            if match := ROUTER.search(name):
                found.append((int(match[1]), part))
        if not found or not all(hasattr(part, "top_k") for _, part in found):
            raise ModelError(
                "config.json: model_type",
                type(model).__name__,
                "a model whose layers have routers named mlp.gate that choose experts, to record "
                "them with rollout.engine=hf",
                "Set algorithm.router_replay=off, use another rollout engine, or a newer "
                "transformers: routers of DeepseekV3 choose in 5.19.",
            )
        self._chosen: dict[int, Tensor] = {}
        self._num_layers = len(found)
        self._dtype = experts_dtype(max(_num_experts(part) for _, part in found))
        for layer, router in found:
            router.register_forward_hook(self._keeper(layer))

    def _keeper(self, layer: int) -> Any:
        def keep(_: torch.nn.Module, __: Any, output: tuple[Tensor, ...]) -> None:
            self._chosen[layer] = output[-1]

        return keep

    def take(self, num_rows: int, length: int) -> Array:
        """Returns, once, the experts of the last forward pass, (B, L, K), on the host."""
        if len(self._chosen) != self._num_layers:
            raise RuntimeError(
                f"{len(self._chosen)} of {self._num_layers} routers told what they chose"
            )
        layers = [self._chosen[layer] for layer in sorted(self._chosen)]
        self._chosen.clear()
        # A sync point, once a pass, as that of the tokens that are drawn.
        experts = torch.cat(layers, 1).cpu().numpy().astype(self._dtype)
        return experts.reshape(num_rows, length, -1)


def _num_experts(router: torch.nn.Module) -> int:
    weight: Any = router.weight
    return int(weight.shape[0])
