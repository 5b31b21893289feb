"""Saves and restores the random states of a rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def rng_file(rank: int) -> str:
    return f"rng_rank_{rank}.safetensors"


def rng_state() -> dict[str, torch.Tensor]:
    """Returns this rank's random states from torch and Megatron. Does not wait for the GPU."""
    states = {f"tracker.{k}": v.clone() for k, v in get_cuda_rng_tracker().get_states().items()}
    states["torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(states: Mapping[str, torch.Tensor]) -> bool:
    """Restores states from `rng_state`; returns False, without effect, if the device
    type differs.
    """
    if _kinds(states) != _kinds(rng_state()):
        return False
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    prefix = "tracker."
    get_cuda_rng_tracker().set_states(
        {k.removeprefix(prefix): v for k, v in states.items() if k.startswith(prefix)}
    )
    return True


def _kinds(states: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (state.dtype, state.shape) for name, state in states.items()}
