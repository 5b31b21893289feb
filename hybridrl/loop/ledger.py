"""Memory ledger: device memory of each part of a run on this rank, by phase. It is printed when a
run starts and with every out-of-memory error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hybridrl.errors import DeviceMemoryError
from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.parallel.groups import PeerError
from hybridrl.platform import Platform
from hybridrl.rollout.build import EngineAdapter
from hybridrl.rollout.engine import Holding
from hybridrl.training.model import ParallelModel

REMEDIES = (
    "activations (lower train.micro_batch_tokens or set train.recompute=full), each GPU's share of "
    "the model (raise train.tp or train.pp), the optimizer (train.optimizer_memory=host), weights "
    "during rollout (train.release_weights_in_rollout=true), or the KV cache (lower "
    "rollout.max_batch or rollout.max_new_tokens)"
)


@dataclass(frozen=True)
class Entry:
    """A line of the ledger: a number of bytes, and the phases in which they are on the device."""

    name: str
    num_bytes: int
    in_training: bool = True
    in_rollout: bool = True


class MemoryLedger:
    """Tracks the parts of the run on this rank's device; parts not built yet are absent or None."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.models: dict[str, ParallelModel] = {}
        self.engine: EngineAdapter | None = None
        self.hybrid_engine: HybridEngine | None = None

    def table(self) -> str:
        """Returns the ledger as text: the memory in use after the next switch of phases."""
        engine = {} if self.engine is None else self.engine.memory()
        keeps_memory = self.hybrid_engine is not None and self.hybrid_engine.keeps_memory
        return table(entries(self.models, engine, keeps_memory), self._platform)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Replaces out-of-memory errors by DeviceMemoryError with the ledger and remedies."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            is_explained = isinstance(error, DeviceMemoryError | PeerError)
            if is_explained or "out of memory" not in text.lower():
                raise
            first = text.strip().splitlines()[0]
            raise DeviceMemoryError(f"{first}\n{self.table()}\nReduce {REMEDIES}.") from error


def entries(
    models: Mapping[str, ParallelModel], engine: Mapping[str, Holding], keeps_memory: bool = False
) -> list[Entry]:
    """Returns an entry for each part, including memory that will be allocated later. With
    `keeps_memory`, switches of phases free no memory (`HybridEngine.keeps_memory`).
    """
    found = []
    for role, model in models.items():
        if (memory := model.memory) is None:
            found.append(
                Entry(f"{role} weights", _num_bytes(_own(model, model.weights_in_place())))
            )
        else:
            stays = not model.train.release_weights_in_rollout
            name = "weights" if model.lora is None else "trained weights (lora)"
            found.append(Entry(f"{role} {name}", memory.weight_bytes(), in_rollout=stays))
            if kept := _num_bytes(_own(model, model.frozen_weights())):
                found.append(Entry(f"{role} frozen weights", kept))
            state, _ = memory.state_bytes()
            lent = memory.lent_bytes
            if lent:  # if phases free no memory, the engine's entry includes this memory
                name = f"{role} gradients, lent by engine"
                found.append(Entry(name, lent, not keeps_memory, in_rollout=False))
            if held := memory.gradient_bytes() - lent:
                found.append(Entry(f"{role} gradients", held, in_rollout=keeps_memory))
            if state:
                found.append(Entry(f"{role} optimizer", state))
            if on_host := memory.host_bytes:
                name = f"{role} optimizer, in host memory"
                found.append(Entry(name, on_host, in_training=False, in_rollout=False))
        if model.borrowed:  # already listed with the policy
            found.append(Entry(f"{role} frozen weights, the policy's", 0, False, False))
    for name, part in engine.items():
        if part.num_bytes:
            # Shared memory is already listed with the model.
            is_own = not part.is_shared
            stays = (part.stays or keeps_memory) and is_own
            found.append(Entry(f"engine {name}", part.num_bytes, stays, is_own))
    return found


def table(found: list[Entry], platform: Platform) -> str:
    """Returns the ledger and the device's own numbers as text, in GiB or, below 1 GiB, in MiB."""
    sums = [sum(e.num_bytes for e in found if _phases(e)[number]) for number in range(2)]
    unit, size = ("GiB", 2**30) if max(sums) >= 2**30 else ("MiB", 2**20)
    lines = [f"{f'memory of this rank, {unit}':34}{'training':>10}{'rollout':>10}"]
    for entry in found:
        shown = f"{entry.num_bytes / size:.2f}"
        cells = [shown if there else "-" for there in _phases(entry)]
        lines.append(f"{entry.name:34}" + "".join(f"{cell:>10}" for cell in cells))
    lines.append(f"{'sum':34}" + "".join(f"{total / size:>10.2f}" for total in sums))
    if not platform.is_cpu:
        free, total = torch.cuda.mem_get_info()
        held = torch.cuda.memory_reserved()
        used = torch.cuda.memory_allocated()
        lines.append(
            f"now: {_gib(free)} of {_gib(total)} GiB free; torch reserves {_gib(held)}, of which "
            f"tensors use {_gib(used)} (peak in this phase: "
            f"{_gib(torch.cuda.max_memory_allocated())})"
        )
    return "\n".join(lines)


def _phases(entry: Entry) -> tuple[bool, bool]:
    return entry.in_training, entry.in_rollout


def _own(model: ParallelModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in model.borrowed}


def _num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Returns the total bytes of the tensors' storages. A shared storage counts once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors.values()}
    return sum(storages.values())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"
