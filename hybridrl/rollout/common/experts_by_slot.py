"""The experts that an engine's routers chose, kept by the places of the KV cache.

A choice is written where the token's keys lie, so what holds for keys holds for choices: prompts in
pieces or found in the prefix cache, preempted requests. Choices are read before a request loses its
place and before the weights change. The buffer has a row for each token of the KV cache, a byte a
choice (two from 256 experts on).
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

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")  # in names of modules


class ExpertsBySlot:
    """Holds the experts of each slot, a token's place in the KV cache of one live engine.

    Made before graphs are captured: it lies at a fixed address. `found` are the layers whose
    routers can be listened to; slots of tokens that pad a batch count in `num_slots`.

    Raises:
        ModelError: `found` are not the layers with experts.
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
                "a model whose routers can be listened to, one in each layer with experts: "
                f"{', '.join(map(str, self.layers))}",
            )
        self.dtype = torch.uint8 if self._num_experts < ONE_BYTE else torch.int16
        self._nothing = torch.iinfo(self.dtype).max  # no expert has this number
        size = num_slots, len(self.layers), shape.moe.experts_per_token
        self._by_slot = torch.full(size, self._nothing, dtype=self.dtype, device=device)

    def write(self, slots_T: Tensor, index: int, experts_TK: Tensor) -> None:
        """Keeps what the layer `layers[index]` chose for the tokens of these slots."""
        self._by_slot[slots_T, index] = experts_TK.to(self.dtype)

    def write_all(self, slots_T: Tensor, experts_TLK: Tensor) -> None:
        """Keeps what all `layers` chose for the tokens of these slots."""
        self._by_slot[slots_T] = experts_TLK

    def read(self, slots_T: Tensor) -> Array:
        """Returns the experts of these slots, (T, layers * experts a token); raises RuntimeError if
        one has none.
        """
        # A sync point: once for a request that ends, once for all that are taken out together.
        found = self._by_slot[slots_T.to(self._by_slot.device)].flatten(1).cpu()
        if bool((found == self._nothing).any()):
            raise RuntimeError(f"{self._engine} told no experts for a part of {len(found)} tokens")
        experts: Array = found.numpy().astype(experts_dtype(self._num_experts))
        return experts

    def record(self, rows: Sequence[RunningRequest], slots: Sequence[Tensor]) -> None:
        """Records the experts of further positions of requests, which lie in these slots."""
        if not rows:
            return
        experts = self.read(torch.cat(list(slots)))
        ends = np.cumsum([len(one) for one in slots])[:-1]
        for row, part in zip(rows, np.split(experts, ends), strict=True):
            row.record(row.num_recorded(), part)

    def forget(self) -> None:
        """Forgets all: the weights change."""
        self._by_slot.fill_(self._nothing)


def unfit(engine: str, value: str, allowed: str) -> ModelError:
    """Returns the refusal of a model or cache whose experts an engine cannot record."""
    return ModelError(
        "config.json",
        value,
        f"{allowed}, to record experts with rollout.engine={engine}",
        "Set algorithm.router_replay=off, or rollout.engine=hf.",
    )
