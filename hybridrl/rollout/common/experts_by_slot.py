"""Stores the experts that an engine's routers chose, indexed by slot in the KV cache.

A token's experts are stored at the slot of its keys. The experts are therefore valid as long as the
keys, even for prompts that are computed in chunks or found in the prefix cache, and for preempted
requests. The slots are read before a request loses them and before the weights change. The buffer
has one row per slot, and one byte per expert (two bytes for 256 experts or more).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from hybridrl.contracts.blobs import Array
from hybridrl.contracts.routed_experts import ONE_BYTE, experts_dtype
from hybridrl.errors import ModelError
from hybridrl.models.family import ModelShape
from hybridrl.rollout.engine import RunningRequest

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")  # layer number in names of modules


class ExpertsBySlot:
    """Stores the experts of each slot of a live engine's KV cache.

    Must be created before graphs are captured, because the buffer's address must not change. Raises
    ModelError if `found`, the layers with observable routers, are not the layers with experts.
    `num_slots` includes slots for padding tokens.
    """

    def __init__(
        self,
        engine: str,
        shape: ModelShape,
        num_slots: int,
        device: torch.device,
        found: Iterable[int],
    ) -> None:
        if shape.moe is None:
            raise ValueError("the model has no experts")
        self._engine, self._num_experts = engine, shape.moe.num_experts
        self.layers = tuple(n for n in range(shape.num_layers) if shape.has_experts(n))
        if sorted(found) != list(self.layers):
            raise unfit(
                engine,
                f"routers in layers {', '.join(map(str, sorted(found))) or 'none'}",
                "a model with an observable router in each layer with experts: "
                f"{', '.join(map(str, self.layers))}",
            )
        self.dtype = torch.uint8 if self._num_experts < ONE_BYTE else torch.int16
        self._nothing = torch.iinfo(self.dtype).max  # no expert has this number
        size = num_slots, len(self.layers), shape.moe.experts_per_token
        self._by_slot = torch.full(size, self._nothing, dtype=self.dtype, device=device)

    def write(self, slots_T: Tensor, index: int, experts_TK: Tensor) -> None:
        """Stores the experts that the layer `layers[index]` chose for the tokens at these slots."""
        self._by_slot[slots_T, index] = experts_TK.to(self.dtype)

    def write_all(self, slots_T: Tensor, experts_TLK: Tensor) -> None:
        self._by_slot[slots_T] = experts_TLK

    def read(self, slots_T: Tensor) -> Array:
        """Returns the experts at slots, (T, layers * K); RuntimeError if a slot has none."""
        # A sync point: once per finished request, and once for all requests that are removed
        # together.
        found = self._by_slot[slots_T.to(self._by_slot.device)].flatten(1).cpu()
        if bool((found == self._nothing).any()):
            raise RuntimeError(
                f"{self._engine} recorded no experts for some of {len(found)} tokens"
            )
        experts: Array = found.numpy().astype(experts_dtype(self._num_experts))
        return experts

    def record(self, rows: Sequence[RunningRequest], slots: Sequence[Tensor]) -> None:
        """Records experts for the next positions of each request, at these positions' `slots`."""
        if not rows:
            return
        experts = self.read(torch.cat(list(slots)))
        ends = np.cumsum([len(one) for one in slots])[:-1]
        for row, part in zip(rows, np.split(experts, ends), strict=True):
            row.record(row.num_recorded(), part)

    def forget(self) -> None:
        self._by_slot.fill_(self._nothing)


def unfit(engine: str, value: str, allowed: str) -> ModelError:
    return ModelError(
        "config.json",
        value,
        f"{allowed}, to record experts with rollout.engine={engine}",
        "Set algorithm.router_replay=off, or rollout.engine=hf.",
    )
