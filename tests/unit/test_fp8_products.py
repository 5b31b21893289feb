"""Products of tokens and FP8 weights choose a way by their number of tokens; stand-ins replace
vLLM's kernel, which needs a GPU (tests/gpu/fp8_engine.py runs it)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrl import ops
from hybridrl.rollout.common import torch_operations
from hybridrl.rollout.vllm.fp8 import multiply_unrounded_tokens

FEW = 4  # tokens for which the unrounded product counts as measured, for weights of SIZES
SIZES = (256, 128)


class Fp8LinearMethod:
    """Stand-in for vLLM's method: its `apply` must no longer run where ours is installed."""

    def __init__(self) -> None:
        self.fp8_linear = Kernel()

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.new_full((*x.shape[:-1], len(layer.weight)), 7.0)


class Kernel:
    """Stand-in for vLLM's kernel. It quantizes with a scale for each token."""

    def __init__(self) -> None:
        self.rows: list[int] = []  # of calls
        self.quant_fp8 = self

    def forward_cuda(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        assert rows.dim() == 2 and rows.is_contiguous()
        scales = rows.float().abs().amax(1, keepdim=True) / 448
        return (rows.float() / scales).to(torch.float8_e4m3fn), scales

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        self.rows.append(len(A))
        return ops.fp8_product((A.float() * As).bfloat16(), B, Bs)


def model(sizes: tuple[int, int] = SIZES) -> torch.nn.Linear:
    """Returns a layer as vLLM makes it, with random FP8 weights."""
    layer: Any = torch.nn.Linear(1, 1, bias=False)
    layer.weight.requires_grad = False
    layer.weight.data = torch.randn(sizes).to(torch.float8_e4m3fn)
    layer.weight_scale_inv = torch.tensor([[0.5], [2.0]]).repeat(sizes[0] // 256, sizes[1] // 128)
    layer.quant_method = Fp8LinearMethod()
    found: torch.nn.Linear = layer
    return found


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(
        ops, "fp8_product_fits", lambda num, weight: num <= FEW and tuple(weight.shape) == SIZES
    )
    monkeypatch.setattr(torch_operations, "_engines", [])
    torch.manual_seed(0)
    yield


def gap(found: Tensor, x: Tensor, layer: Any) -> float:
    wide = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
    wanted = x.float() @ (layer.weight.float() * wide).T
    assert found.shape == wanted.shape and found.dtype == torch.bfloat16
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("compiles", [False, True])
def test_only_few_tokens_are_multiplied_without_rounding(compiles: bool) -> None:
    layer: Any = model()
    multiply_unrounded_tokens(layer, max_batch=FEW)
    method = layer.quant_method

    def twice(x: Tensor, bias: Tensor | None = None) -> Tensor:
        found: Tensor = method.apply(layer, x, bias)
        return found + found

    call: Any = torch.compile(twice, backend="aot_eager", fullgraph=True) if compiles else twice
    for shape in ((1,), (FEW,), (2, 2), (FEW + 1,), (3, 2), (2, 3, 500)):
        x = torch.randn(*shape, SIZES[1] + 8).bfloat16()[..., : SIZES[1]]  # not contiguous
        num, before = x[..., 0].numel(), len(method.fp8_linear.rows)
        error = gap(call(x) / 2, x, layer)
        assert method.fp8_linear.rows[before:] == ([num] if num > FEW else [])
        assert error < 0.004 if num <= FEW else 0.01 < error < 0.06, (shape, error)
        bias = torch.randn(SIZES[0]).bfloat16()
        assert torch.equal(call(x, bias), 2 * (call(x) / 2 + bias))


@torch.no_grad()
@pytest.mark.parametrize(("max_batch", "sizes"), [(FEW + 1, SIZES), (256, SIZES), (1, (512, 128))])
def test_engines_with_larger_batches_or_other_sizes_keep_their_product(
    max_batch: int, sizes: tuple[int, int]
) -> None:
    layer: Any = model(sizes)
    multiply_unrounded_tokens(layer, max_batch=max_batch)
    assert type(layer.quant_method) is Fp8LinearMethod
    assert torch.all(layer.quant_method.apply(layer, torch.zeros(2, SIZES[1])) == 7)


def test_a_later_engine_without_measured_sizes_leaves_the_product_of_an_earlier_one() -> None:
    layer: Any = model()
    multiply_unrounded_tokens(layer, max_batch=FEW)
    multiply_unrounded_tokens(model((512, 128)), max_batch=FEW)
    multiply_unrounded_tokens(model(), max_batch=256)
    x = torch.randn(FEW + 1, SIZES[1]).bfloat16()
    assert gap(layer.quant_method.apply(layer, x), x, layer) < 0.06
    assert layer.quant_method.fp8_linear.rows == [FEW + 1]
