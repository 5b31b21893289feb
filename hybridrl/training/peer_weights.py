"""Moves a model's parameters into memory that the other ranks on the node can read.

Megatron keeps the trained parameters of a model in flat buffers. After the data-parallel wrapper
has created the buffers, and before the optimizer creates views of them, each buffer is moved into
the rank's peer memory, which has the same size on all ranks. Frozen parameters and router biases
are moved one by one. The memory also has room for s B of each LoRA adapter, which engines receive
in place of B (adapter_weights.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybridrl.config.schema import Config
from hybridrl.errors import UserError
from hybridrl.models.adapters.rows import B
from hybridrl.models.megatron.build import named_parameters, weight_buffers
from hybridrl.models.trainable import frozen
from hybridrl.parallel import peer_memory
from hybridrl.parallel.groups import World
from hybridrl.parallel.peer_memory import PeerMemory
from hybridrl.training.memory import flat_buffers
from hybridrl.training.staging import aligned


class PeerWeights:
    """Memory for one model's parameters, readable by all ranks.

    Attributes:
        memory: The memory; None before `move`.
        scaled: Room for s B of each adapter on this rank, by the local name of B.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.memory: PeerMemory | None = None
        self.scaled: dict[str, torch.Tensor] = {}

    def move(self, wrapped: Sequence[Any]) -> None:
        """Moves the weights inside Megatron's data-parallel wrappers into peer memory; collective.

        Raises OSError or RuntimeError if memory for a second copy is missing or cannot be shared.
        """
        buffers = flat_buffers(wrapped)
        parameters = named_parameters(wrapped)
        alone = [*weight_buffers(wrapped).values(), *frozen(parameters).values()]
        scaled = {
            _unwrapped(name): one for name, one in parameters.items() if name.endswith(f".{B}")
        }
        starts, size = [], 0
        for tensor in (*(buffer.param_data for buffer in buffers), *alone, *scaled.values()):
            starts.append(size)
            size += aligned(tensor.nbytes)
        most = int(self._world.max_over_world(torch.tensor(size, dtype=torch.float64)))
        device, timeout_s = self._world.platform.device, self._world.timeout_s
        self.memory = peer_memory.allocate(most, device, timeout_s, self._world)
        own = self.memory.of(self._world.rank)
        for buffer, start in zip(buffers, starts, strict=False):
            _move(buffer, own[start : start + buffer.param_data.nbytes])
        for tensor, start in zip(alone, starts[len(buffers) :], strict=False):
            tensor.data = _room(own, start, tensor).copy_(tensor.data)
        first = len(starts) - len(scaled)
        for (name, tensor), start in zip(scaled.items(), starts[first:], strict=True):
            self.scaled[name] = _room(own, start, tensor)


def peer_weights(config: Config, world: World, notify: Callable[[str], None]) -> PeerWeights | None:
    """Returns peer memory for the policy's weights; None if they are sent as messages. Collective.

    Args:
        notify: Function that is called with the reason if 'auto' does not select 'peer'.

    Raises UserError on every rank if `rollout.transport` is 'peer' but memory is not accessible.
    """
    wanted = config.rollout.transport
    if wanted == "packed" or world.size == 1:
        return None
    # With adapters, a sync is small. Peer memory was not measured on GPUs with them. FP8 weights
    # are quantized while they are packed.
    is_unsuited = config.lora.is_on or config.rollout.quantization == "fp8"
    if wanted == "auto" and (config.train.release_weights_in_rollout or is_unsuited):
        return None
    if wanted == "auto" and world.platform.is_cpu:
        return None  # peer memory is not faster on CPU
    device, hosts = world.platform.device, world.gather_objects(peer_memory.host_id())
    reasons = world.gather_objects(peer_memory.why_unreachable(device, hosts))
    if not any(reasons):
        reasons = world.gather_objects(peer_memory.why_unusable(device, world.timeout_s, world))
    found = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
    if not found:
        return PeerWeights(world)
    if wanted == "peer":
        raise UserError(
            "rollout.transport",
            "peer",
            "packed or auto here",
            f"Set rollout.transport=auto. {found[0]}.",
        )
    notify(f"weights are sent as packed messages: {found[0]}")
    return None


def _unwrapped(name: str) -> str:
    chunk, _, path = name.partition("/")
    while path.startswith("module."):
        path = path.removeprefix("module.")
    return f"{chunk}/{path}"


def _room(own: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    return own[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _move(buffer: Any, place: torch.Tensor) -> None:
    """Moves a buffer's parameters into `place`, and redirects all of Megatron's views of them."""
    moved = place.view(buffer.param_data.dtype)
    moved.copy_(buffer.param_data)
    buffer.param_data = moved
    for bucket in buffer.buckets:
        bucket.param_data = moved[bucket.offset : bucket.offset + bucket.param_data.numel()]
    for parameter, (start, stop, _) in buffer.param_index_map.items():
        parameter.data = moved[start:stop].view(parameter.shape)
