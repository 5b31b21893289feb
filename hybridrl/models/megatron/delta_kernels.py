"""Chooses the implementation of the gated delta rule: torch's, or hybridrl's Triton kernels.

The kernels are much faster on GPUs. A compiler can get their gradients wrong without any message:
Triton from 3.4 to below 3.7.1 does so on Hopper for kernels of flash-linear-attention (its issue
640). So each process compares outputs, states and all gradients with torch's at the start, with the
model's heads and on its own device, and uses the kernels only if they agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from hybridrl import ops
from hybridrl.errors import UserError
from hybridrl.models.megatron.delta_rule import (
    DeltaInputs,
    DeltaRule,
    Sequences,
    causal_convolution,
    delta_rule,
    of_length_1,
)
from hybridrl.models.mixers import DeltaShape, MixerShape
from hybridrl.platform import Platform

# Sequences of one token, around the size of a chunk, and of several chunks.
CHECKED_LENGTHS = (1, 63, 64, 65, 200)
# Largest norm of an error, relative to the norm of the reference. bf16 rounds inputs and products
# to 3 digits; wrong gradients differ in the first.
TOLERANCE = 0.03


@dataclass(frozen=True)
class ChosenRule:
    """The selected implementation; the same on all ranks.

    Args:
        said: Log line that names it and the reason; empty if there was nothing to choose.
    """

    rule: DeltaRule
    said: str

    @property
    def name(self) -> str:
        return "torch" if self.rule is delta_rule else "triton"


def choose_rule(
    wanted: Literal["auto", "torch", "triton"],
    mixer: MixerShape | None,
    tp: int,
    dtype: torch.dtype,
    platform: Platform,
) -> ChosenRule:
    """Selects this host's gated delta rule; UserError if requested kernels cannot be used."""
    if not isinstance(mixer, DeltaShape):
        return ChosenRule(delta_rule, "")
    if wanted == "torch":
        return ChosenRule(delta_rule, "gated delta rule: torch, as set by train.delta_rule")
    if platform.is_cpu:
        fault: str | None = "the model runs on the CPU"
    else:
        fault = _kernel_fault(mixer, tp, dtype, platform.device)
    if fault is None:
        said = "gated delta rule: Triton kernels, whose gradients agree with torch's"
        return ChosenRule(kernel_rule, said)
    if wanted == "triton":
        remedy = f"Set train.delta_rule=auto: {fault}."
        raise UserError("train.delta_rule", wanted, "auto or torch here", remedy)
    return ChosenRule(delta_rule, f"gated delta rule: torch, since {fault}")


def kernel_rule(
    inputs: DeltaInputs,
    sequences: Sequences,
    state_NGKV: torch.Tensor | None = None,
    wants_states: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes the rule with hybridrl's Triton kernels; see `DeltaRule`."""
    dtype = inputs.value_TGV.dtype
    query_THK = of_length_1(inputs.query_THK) * inputs.query_THK.size(-1) ** -0.5
    output_TGV, final_NGKV = ops.gated_delta_rule(
        query_THK.to(dtype),
        of_length_1(inputs.key_THK).to(dtype),
        inputs.value_TGV,
        inputs.decay_TG,
        inputs.beta_TG,
        sequences.chunks,
        state_NGKV,
    )
    return output_TGV.float(), final_NGKV if wants_states else None


@lru_cache(8)
def _kernel_fault(
    sizes: DeltaShape, tp: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    if (unsupported := ops.delta_rule_fault(sizes.key_dim, sizes.value_dim, dtype)) is not None:
        return unsupported
    try:
        fault = gradient_fault(kernel_rule, sizes, tp, dtype, device)
        return fault or convolution_fault(sizes, tp, dtype, device)
    # Triton raises many kinds of errors for devices that it does not support.
    except Exception as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        return f"the kernels failed: {first[0][:200]}"


def gradient_fault(
    rule: DeltaRule, sizes: DeltaShape, tp: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Returns the first result or gradient that differs from torch's, and by how much, or None."""
    expected, found = (_results(one, sizes, tp, dtype, device) for one in (delta_rule, rule))
    for name, reference in expected.items():
        error = float((found[name] - reference).norm() / reference.norm())
        if not error <= TOLERANCE:  # true for NaN, too
            return f"{name} differs from torch's by {error:.1%}, more than {TOLERANCE:.0%}"
    return None


def convolution_fault(
    sizes: DeltaShape, tp: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    generator, lengths = torch.Generator().manual_seed(1), CHECKED_LENGTHS[:4]
    channels, num_before = sizes.convolved // tp, sizes.kernel - 1
    shapes = (
        (sum(lengths), channels),
        (channels, sizes.kernel),
        (len(lengths), num_before, channels),
    )
    inputs = [torch.randn(size, generator=generator).to(device, dtype) for size in shapes]
    weight_TC = torch.randn(shapes[0], generator=generator).to(device, dtype)
    number_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    since_T = torch.cat([torch.arange(length) for length in lengths])
    left_T = torch.tensor(lengths)[number_T] - 1 - since_T
    places = (number_T.int().to(device), since_T.int().to(device), left_T.int().to(device))

    def in_torch(
        channels_TC: torch.Tensor, weight_CK: torch.Tensor, before_NPC: torch.Tensor
    ) -> torch.Tensor:
        parts = zip(before_NPC, channels_TC.split(lengths), strict=True)
        return torch.cat([causal_convolution(torch.cat(part), weight_CK) for part in parts])

    def in_kernels(
        channels_TC: torch.Tensor, weight_CK: torch.Tensor, before_NPC: torch.Tensor
    ) -> torch.Tensor:
        return ops.causal_convolution(channels_TC, weight_CK, places, before_NPC)

    results = []
    with torch.enable_grad():
        for compute in (in_torch, in_kernels):
            own = [one.clone().requires_grad_() for one in inputs]
            output = compute(*own)
            results.append([output, *torch.autograd.grad(output, own, weight_TC.to(output.dtype))])
    names = ("output", "gradient of the channels", "gradient of the weights", "gradient of prompts")
    for name, expected, found in zip(names, *results, strict=True):
        error = float((found.float() - expected.float()).norm() / expected.float().norm())
        if not error <= TOLERANCE:
            return f"the convolution's {name} differs from torch's by {error:.1%}"
    return None


def _results(
    rule: DeltaRule, sizes: DeltaShape, tp: int, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    num_tokens, keys, values = sum(CHECKED_LENGTHS), sizes.key_heads // tp, sizes.value_heads // tp

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = {
        "query": noise(num_tokens, keys, sizes.key_dim).to(dtype),
        "key": noise(num_tokens, keys, sizes.key_dim).to(dtype),
        "value": noise(num_tokens, values, sizes.value_dim).to(dtype),
        "decay": -0.1 * noise(num_tokens, values).abs(),
        "beta": noise(num_tokens, values).sigmoid(),
        "initial state": noise(len(CHECKED_LENGTHS), values, sizes.key_dim, sizes.value_dim),
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
