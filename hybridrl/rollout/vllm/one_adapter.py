"""Computes an engine's only adapter with dense products, instead of vLLM's kernels for many
adapters.

vLLM's kernels sort tokens by adapter and split small products over the GPU with atomic additions.
With one adapter, cuBLAS and one kernel (kernels/adapters.py) take less time. Tokens of requests
without the adapter are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridrl import ops

SLOT = 0  # of the only adapter

_library = torch.library.Library("hybridrl", "FRAGMENT")
_library.define("add_adapter(Tensor(a!) y, Tensor x, Tensor a, Tensor[] bs, Tensor slots) -> ()")


def _add_adapter(y: Tensor, x: Tensor, a: Tensor, bs: Sequence[Tensor], slots: Tensor) -> None:
    ops.add_adapter(y, x, a, bs, slots[: x.size(0)], SLOT)


for _device in ("CUDA", "CPU"):
    _library.impl("add_adapter", _add_adapter, _device)
_library.impl("add_adapter", lambda *_: None, "Meta")


class OneAdapter:
    """The adapter of one layer, in the place of vLLM's `punica_wrapper`.

    Args:
        layer: A linear layer that vLLM has wrapped. Its A slots move to contiguous memory, so that
            one product computes those of all projections.
        wrapper: The layer's own wrapper, which knows which tokens use the adapter.
    """

    def __init__(self, layer: Any, wrapper: Any) -> None:
        first = layer.lora_a_stacked[0]
        num_slots, _, rank, num_inputs = first.shape
        together = first.new_zeros(num_slots, len(layer.lora_a_stacked), rank, num_inputs)
        layer.lora_a_stacked = together.split(1, dim=1)
        self.a = together[SLOT].flatten(0, 1)
        self.bs = [slots[SLOT, 0] for slots in layer.lora_b_stacked]
        self.slots = wrapper._token_lora_indices

    def add_lora_linear(self, y: Tensor, x: Tensor, *_: Any, **__: Any) -> None:
        """Adds B (A x) to y, in place; y has shape (tokens, outputs), x (tokens, inputs)."""
        torch.ops.hybridrl.add_adapter(y, x, self.a, self.bs, self.slots)


def compute_densely(model: torch.nn.Module) -> None:
    """Makes the linear layers that vLLM has wrapped compute with `OneAdapter`, for an engine that
    has one adapter.
    """
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    for layer in model.modules():
        if isinstance(layer, BaseLinearLayerWithLoRA):
            layer.punica_wrapper = OneAdapter(layer, layer.punica_wrapper)
