"""Starts vLLM with FP8 weights that updates write in place.

Pins the kernels, because some repack weights after loading, which updates could then not write.
Updates write scales that are powers of two, which suit all kernels, with or without DeepGEMM.

If a step has few tokens, they are multiplied by FP8 weights without being rounded to FP8, for the
sizes that were measured (kernels/fp8_linear.py). vLLM's kernels quantize the inputs of every
product, which then takes longer than FP8 weights save: with Qwen2.5-7B and 64 requests of 1.5k to
2k tokens, a step took 7.2 ms, with bf16 weights 6.7 ms (one H200). With unrounded tokens it took
6.84 ms, and with bf16 weights 6.67 ms (another H200).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hybridrl import ops
from hybridrl.errors import ModelError, UserError
from hybridrl.rollout.common.process_state import replaced
from hybridrl.rollout.common.torch_operations import multiply_many_tokens_by
from hybridrl.rollout.vllm.arguments import LINEAR_BACKEND

# The environment that suits each kernel of LINEAR_BACKEND. Without DeepGEMM, activations have fp32
# scales in all layers. With it, they have powers of two, like weights.
ENVIRONMENT = {
    "cutlass": {"VLLM_USE_DEEP_GEMM": "0", "VLLM_USE_DEEP_GEMM_E8M0": "0"},
    "triton": {"VLLM_USE_DEEP_GEMM": "0", "VLLM_USE_DEEP_GEMM_E8M0": "0"},
    "deep_gemm": {"VLLM_USE_DEEP_GEMM": "1", "VLLM_USE_DEEP_GEMM_E8M0": "1"},
}
# Kernels that read `weight` and `weight_scale_inv` as updates write them.
KERNELS = {
    "cutlass": "CutlassFp8BlockScaledMMKernel",
    "triton": "TritonFp8BlockScaledMMKernel",
    "deep_gemm": "DeepGemmFp8BlockScaledMMKernel",
}
EXPERTS = "TRITON"  # backend of experts, as arguments.py pins it
LEAST_CAPABILITY = (9, 0)  # compute capability that these kernels need: Hopper
# Parameters of attention that exist until vLLM has processed them.
CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")


def is_cache_scale(name: str) -> bool:
    """Whether a parameter is a scale of attention, which vLLM reads only when it loads weights."""
    return name.rpartition(".")[2] in CACHE_SCALES


def choose_kernels(device: torch.device) -> None:
    """Sets the pinned kernels' variables before vLLM is imported; UserError for too old GPUs."""
    os.environ.update(ENVIRONMENT[LINEAR_BACKEND])
    check_gpu(device, "rollout.quantization", "none")


def check_gpu(device: torch.device, knob: str, off: str) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        raise UserError(
            knob,
            f"fp8 on {torch.cuda.get_device_name(device)}",
            f"{off} on GPUs older than Hopper",
            f"Set {knob}={off}.",
        )


def check_kernels(model: torch.nn.Module, version: str) -> None:
    """Raises ModelError, with the layer's name, for other kernels or another environment."""
    from vllm import envs

    for name, value in ENVIRONMENT[LINEAR_BACKEND].items():
        if getattr(envs, name) != bool(int(value)):
            raise _other_kernel(name, getattr(envs, name), value, version)
    num_layers = 0
    for name, part in model.named_modules():
        method: Any = getattr(part, "quant_method", None)
        kind = type(method).__name__
        if kind == "Fp8LinearMethod":
            found, wanted = type(method.fp8_linear).__name__, KERNELS[LINEAR_BACKEND]
        elif kind == "Fp8MoEMethod":
            found, wanted = method.fp8_backend.name, EXPERTS
        else:
            continue
        num_layers += 1
        if found != wanted:
            raise _other_kernel(name, found, wanted, version)
    if not num_layers:
        raise _other_kernel(type(model).__name__, "no FP8 layers", "FP8 layers", version)


def _other_kernel(name: str, found: object, wanted: str, version: str) -> ModelError:
    return ModelError(
        f"rollout.quantization: {name}",
        f"{found} in {version}",
        wanted,
        "Install a version that `hybridrl check` calls tested, unset vLLM's environment variables, "
        "or set rollout.quantization=none.",
    )


@contextlib.contextmanager
def before_processing(prepare: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Calls `prepare` with vLLM's new module before vLLM processes its weights for kernels, after
    which FP8 parameters have no loaders. Marks scales of attention as missing from the checkpoint,
    because random ones would saturate an FP8 cache.
    """
    from vllm.model_executor.model_loader import base_loader

    process = base_loader.process_weights_after_loading

    def prepare_and_process(model: torch.nn.Module, *args: Any, **keywords: Any) -> None:
        with torch.inference_mode(False), torch.no_grad():
            prepare(model)
            for name, parameter in model.named_parameters():
                if is_cache_scale(name):
                    parameter.fill_(-1.0)
                elif parameter.dtype == torch.float8_e4m3fn:
                    parameter.view(torch.uint8).zero_()  # `prepare` may leave NaN
        process(model, *args, **keywords)

    with replaced(base_loader, "process_weights_after_loading", prepare_and_process):
        yield


def multiply_unrounded_tokens(model: torch.nn.Module, max_batch: int) -> None:
    """Makes linear layers with FP8 weights multiply few tokens without rounding them, if that was
    measured for a weight's sizes and `max_batch` tokens. Engines with a larger `max_batch` are left
    as they are: they would mostly use vLLM's product, but without the fusions of torch.compile.
    """
    kinds: dict[type, type] = {}
    kernel: Any = None
    part: Any
    for part in model.modules():
        method: Any = getattr(part, "quant_method", None)
        kind = type(method)
        if kind.__name__ == "Fp8LinearMethod" and ops.fp8_product_fits(max_batch, part.weight):
            kernel = method.fp8_linear  # all layers have the same kernel and types
            kinds.setdefault(kind, type(kind.__name__, (kind,), {"apply": _apply}))
            method.__class__ = kinds[kind]

    def product(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        # Inside torch.compile, vLLM quantizes with operations that the compiler fuses. Here they
        # would run in several launches; `forward_cuda` is vLLM's kernel for the same.
        codes, code_scales = kernel.quant_fp8.forward_cuda(rows.contiguous())
        y: Tensor = kernel.apply_block_scaled_mm(A=codes, B=weight, As=code_scales, Bs=scales)
        return y

    if kernel is not None:  # otherwise an earlier engine in this process keeps its product
        multiply_many_tokens_by(product)


def _apply(method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Replaces `apply` of vLLM's method. x has shape (..., inputs)."""
    y: Tensor = torch.ops.hybridrl.fp8_linear(x, layer.weight, layer.weight_scale_inv)
    return y if bias is None else y + bias
