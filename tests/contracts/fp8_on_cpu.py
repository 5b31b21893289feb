"""Lets vLLM on CPUs start with FP8 weights, computed by stand-ins for its kernels.

vLLM's own kernels need GPUs, or CPUs with AMX. Linear layers use this package's product. Experts
multiply by dequantized weights, and leave activations in bf16. All else is vLLM's: parameters,
loaders and processing after loading.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrl.rollout.common import packaged_engine
from hybridrl.rollout.common.cpu_experts import experts_forward
from hybridrl.rollout.vllm import arguments, fp8


def dequantized(weight: Tensor, scales: Tensor) -> Tensor:
    """Returns weights in fp32; dims before the last two are batches."""
    wide = scales.repeat_interleave(128, -2).repeat_interleave(128, -1)
    rows, columns = weight.shape[-2:]
    return weight.float() * wide[..., :rows, :columns]


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Replaces vLLM's kernels and lifts the refusal of FP8 on CPUs."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm import BlockScaledMMLinearKernel as block
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.platforms import PlatformEnum

    class CutlassFp8BlockScaledMMKernel(block.Fp8BlockScaledMMLinearKernel):
        def __init__(self, config: Any) -> None:
            self.config = config

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, None]:
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, None]:
            return True, None

        def apply_block_scaled_mm(self, *args: Any, **keywords: Any) -> Tensor:
            raise NotImplementedError

    def apply(kernel: Any, output: Tensor, hidden_states: Tensor, **inputs: Any) -> None:
        found = experts_forward(
            hidden_states.float(),
            dequantized(inputs["w1"], kernel.w1_scale),
            dequantized(inputs["w2"], kernel.w2_scale),
            inputs["topk_weights"],
            inputs["topk_ids"],
            inputs["expert_map"],
        )
        output.copy_(found.to(output.dtype))

    cpu, kernel = PlatformEnum.CPU, CutlassFp8BlockScaledMMKernel
    patch.setitem(linear._POSSIBLE_FP8_BLOCK_KERNELS, cpu, [kernel])
    known = linear._LINEAR_BACKEND_KERNEL_MAP
    patch.setitem(known, "cutlass", {*known["cutlass"], kernel})
    experts = cpu_moe.CPUExpertsFp8
    patch.setattr(experts, "_supports_current_device", staticmethod(lambda: True))
    patch.setattr(experts, "apply", apply)
    patch.setattr(cpu_moe, "prepare_fp8_moe_layer_for_cpu", lambda *weights: weights)
    patch.setattr(packaged_engine, "cpu_rules", lambda *values: ())
    patch.setattr(fp8, "EXPERTS", "CPU")
    assert arguments.LINEAR_BACKEND == "cutlass"


def quantized_model(model: Any, names: Any) -> None:
    """Replaces weights of a transformers model by what FP8 leaves of them."""
    for name, parameter in model.named_parameters():
        if name in names or ".mlp.experts." in name:
            with torch.no_grad():
                parameter.copy_(rounded(parameter))


def rounded(weight: Tensor) -> Tensor:
    """Returns weights rounded to FP8 with a power of two for each block of 128 x 128."""
    rows, columns = weight.shape[-2:]
    blocks = weight.unflatten(-1, (columns // 128, 128)).unflatten(-3, (rows // 128, 128))
    largest = blocks.abs().double().amax((-3, -1), keepdim=True)
    scales = torch.exp2(torch.ceil(torch.log2(largest / 448))).float()
    found = (blocks / scales).to(torch.float8_e4m3fn).float() * scales
    return found.flatten(-2).flatten(-3, -2)
