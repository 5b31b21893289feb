"""Chooses the implementation of the gated delta rule: torch's, or flash-linear-attention's kernels.

The kernels (package flash-linear-attention, fla) are much faster on GPUs. Their gradients are not
always right: with Triton from 3.4 to below 3.7.1, Hopper GPUs compute wrong gradients of decays and
step sizes, while the forward pass is right (fla issue 640). New versions refuse such hosts unless
tilelang and nvcc are installed; old versions say nothing. So each process compares outputs, states
and all gradients with torch's at the start, on its own device, and uses the kernels only if they
agree.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from hybridrl.errors import UserError
from hybridrl.models.megatron.delta_rule import DeltaInputs, DeltaRule, Sequences, delta_rule
from hybridrl.models.mixers import DeltaShape, MixerShape
from hybridrl.platform import Platform

# Sequences of one token, around the size of a chunk, and of several chunks.
CHECKED_LENGTHS = (1, 63, 64, 65, 200)
# Largest norm of an error, relative to the norm of the reference. bf16 rounds inputs and products
# to 3 digits; wrong gradients differ in the first.
TOLERANCE = 0.03
NUM_CHECKED_KEYS = 2


@dataclass(frozen=True)
class ChosenRule:
    """The selected implementation; the same on all ranks.

    Args:
        rule: The implementation.
        said: Log line that names it and the reason; empty if there was nothing to choose.
    """

    rule: DeltaRule
    said: str

    @property
    def name(self) -> str:
        """Name of the implementation."""
        return "torch" if self.rule is delta_rule else "fla"


def choose_rule(
    wanted: Literal["auto", "torch", "fla"],
    mixer: MixerShape | None,
    dtype: torch.dtype,
    platform: Platform,
) -> ChosenRule:
    """Selects the implementation of the gated delta rule on this host.

    Args:
        wanted: `train.delta_rule`.
        mixer: The model's recurrent modules.
        dtype: Data type of the model.
        platform: Platform on which the model runs.

    Raises:
        UserError: flash-linear-attention is requested but cannot be used.
    """
    if not isinstance(mixer, DeltaShape):
        return ChosenRule(delta_rule, "")
    if wanted == "torch":
        return ChosenRule(delta_rule, "gated delta rule: torch, as set by train.delta_rule")
    if platform.is_cpu:
        fault: str | None = "the model runs on the CPU"
    elif importlib.util.find_spec("fla") is None:
        fault = "flash-linear-attention is not installed"
    else:
        fault = _fla_fault(mixer.key_dim, mixer.value_dim, dtype, platform.device)
    if fault is None:
        said = "gated delta rule: flash-linear-attention, whose gradients agree with torch's"
        return ChosenRule(fla_rule, said)
    if wanted == "fla":
        remedy = f"Set train.delta_rule=auto: {fault}."
        raise UserError("train.delta_rule", wanted, "auto or torch here", remedy)
    return ChosenRule(delta_rule, f"gated delta rule: torch, since {fault}")


def fla_rule(
    inputs: DeltaInputs,
    sequences: Sequences,
    state_NGKV: torch.Tensor | None = None,
    wants_states: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes the rule with flash-linear-attention; see `DeltaRule`."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    shared = inputs.value_TGV.size(1) // inputs.key_THK.size(1)
    query, key = (
        one.repeat_interleave(shared, 1)[None] for one in (inputs.query_THK, inputs.key_THK)
    )
    output, states = chunk_gated_delta_rule(
        query,
        key,
        inputs.value_TGV[None].contiguous(),
        g=inputs.decay_TG[None],
        beta=inputs.beta_TG[None].to(query.dtype),
        initial_state=state_NGKV,
        output_final_state=wants_states,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=sequences.cu_seqlens,
    )
    return output[0].float(), states


@lru_cache(8)
def _fla_fault(
    key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Returns why flash-linear-attention cannot be used on this device, or None."""
    try:
        return gradient_fault(fla_rule, key_dim, value_dim, dtype, device)
    # fla and Triton raise many kinds of errors for hosts that they do not support.
    except Exception as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        return f"flash-linear-attention failed: {first[0][:200]}"


def gradient_fault(
    rule: DeltaRule, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Compares outputs, final states and gradients of a rule with those of torch's reference.

    Args:
        rule: Implementation to check.
        key_dim, value_dim: Sizes of the model's heads.
        dtype: Data type of queries, keys and values.
        device: Device of the tensors.

    Returns:
        The first result that differs, and by how much; None if all agree.
    """
    expected, found = (
        _results(one, key_dim, value_dim, dtype, device) for one in (delta_rule, rule)
    )
    for name, reference in expected.items():
        error = float((found[name] - reference).norm() / reference.norm())
        if not error <= TOLERANCE:  # also if it is not a number
            return f"{name} differs from torch's by {error:.1%}, more than {TOLERANCE:.0%}"
    return None


def _results(
    rule: DeltaRule, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Returns outputs, final states and gradients of a rule for fixed inputs, by name, in fp32."""
    generator = torch.Generator().manual_seed(0)
    num_tokens, keys, values = sum(CHECKED_LENGTHS), NUM_CHECKED_KEYS, 2 * NUM_CHECKED_KEYS

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = {
        "query": noise(num_tokens, keys, key_dim).to(dtype),
        "key": noise(num_tokens, keys, key_dim).to(dtype),
        "value": noise(num_tokens, values, value_dim).to(dtype),
        "decay": -0.1 * noise(num_tokens, values).abs(),
        "beta": noise(num_tokens, values).sigmoid(),
        "initial state": noise(len(CHECKED_LENGTHS), values, key_dim, value_dim),
    }
    on_device = {name: one.to(device).requires_grad_() for name, one in inputs.items()}
    *tokens, state = on_device.values()
    with torch.enable_grad():
        output, final = rule(
            DeltaInputs(*tokens), Sequences(CHECKED_LENGTHS, device), state, wants_states=True
        )
        assert final is not None
        weights = (noise(*output.shape).to(device), noise(*final.shape).to(device))
        loss = (weights[0] * output).sum() + (weights[1] * final).sum()
        gradients = torch.autograd.grad(loss, list(on_device.values()))
    found = {"the output": output.detach(), "the final state": final.detach()}
    found |= {
        f"the gradient of the {name}": gradient
        for name, gradient in zip(on_device, gradients, strict=True)
    }
    return {name: one.float() for name, one in found.items()}
