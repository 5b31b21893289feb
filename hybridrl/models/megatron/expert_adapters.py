"""Adds LoRA adapters to linear layers that compute several experts, such as transformer-engine's.

The layer gains a module for each expert, `adapters.N`, with the expert's `lora_a` and `lora_b`. The
adapters of the experts are computed one by one, as transformer-engine computes the experts.

With expert tensor parallelism, the ranks that share an expert have the same tokens, and the
dispatcher adds up their outputs. A rank therefore needs no activations of other ranks. If all of
them hold a matrix, each rank's gradient of it is one summand of the gradient (`new_parameter`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_pg_rank, get_pg_size

from hybridrl.models.adapters.lora import Lora
from hybridrl.models.adapters.rows import GROUPED_ADAPTERS, A, B
from hybridrl.models.boxes import Shape


def new_parameter(
    name: str, shape: Shape, weight: torch.Tensor, copied_over: Any
) -> torch.nn.Parameter:
    """Returns a parameter of an expert's adapter, all zero.

    Args:
        copied_over: Group of ranks that hold copies of the parameter; None if its parts are on
            different ranks.
    """
    new: Any = torch.nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=weight.device))
    # All ranks count their parameters in the gradient norm, except copies, which are `shared`.
    set_tensor_model_parallel_attributes(new, True, 1 if name == A else 0, 1)
    new.allreduce = False  # as for all parameters of experts (build.py, `_mark_gradients`)
    if copied_over is not None and get_pg_size(copied_over) > 1:
        new.summed_over = copied_over  # read by `finalize_summed_gradients`
        new.shared = get_pg_rank(copied_over) > 0
    return new  # type: ignore[no-any-return]  # Any, for Megatron's attributes


def add_expert_adapter(
    linear: torch.nn.Module,
    expert: int,
    shapes: tuple[Shape, Shape],
    rows: torch.Tensor,
    places: torch.Tensor,
    lora: Lora,
) -> None:
    """Adds the adapter of one expert to a layer that computes several experts.

    Args:
        linear: transformer-engine's layer, as Megatron wraps it. Experts are added in order.
        rows, places: Output rows to which the rows of `lora_b` belong, and the projection of each.
            These must be all rows, in order, and projections must have equally many.
    """
    self: Any = linear
    weight = getattr(linear, f"weight{expert}")
    if expert == 0:
        linear.__class__ = _with_adapters(type(linear))  # type: ignore[arg-type]  # hashable
        self.lora_scale, self.lora_is_on = lora.scale, True
        self.lora_num_projections = shapes[0][0] // lora.rank
        self.add_module(GROUPED_ADAPTERS, torch.nn.ModuleList())
    assert len(rows) == weight.size(0) and len(self.adapters) == expert
    # A layer with several projections is column-parallel, and a rank holds rows of its B.
    group, is_row = self._tp_group, self.lora_num_projections == 1
    adapter = torch.nn.Module()
    for name, shape in zip((A, B), shapes, strict=True):
        is_copy = (name == A) != is_row
        adapter.register_parameter(
            name, new_parameter(name, shape, weight, group if is_copy else None)
        )
    one: Any = adapter
    one.lora_rows, one.lora_places = rows, places
    self.adapters.append(adapter)


class _Added(torch.autograd.Function):
    """Adds s B A x of each expert to the experts' outputs in place; see adapters.py.

    `splits` are the numbers of rows of the experts, `factors` all A, then all B. The rows of A, and
    of B, are divided equally between the projections.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        hidden: torch.Tensor,
        splits: Sequence[int],
        num_projections: int,
        scale: float,
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        a, b = factors[: len(splits)], factors[len(splits) :]
        inner = hidden.new_empty(len(hidden), len(a[0]))
        # `data`, because autograd refuses changes of what transformer-engine's functions return.
        for expert, (x, z, y) in enumerate(_split(splits, hidden, inner, output.data)):
            torch.mm(x, a[expert].T, out=z)
            columns, of_rows = _parts(num_projections, z, y), b[expert].chunk(num_projections)
            for z_part, y_part, b_part in zip(*columns, of_rows, strict=True):
                y_part.addmm_(z_part, b_part.T, alpha=scale)
        ctx.save_for_backward(hidden, inner, *factors)
        ctx.splits, ctx.num_projections, ctx.scale = splits, num_projections, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        hidden, inner, *factors = ctx.saved_tensors
        a, b = factors[: len(ctx.splits)], factors[len(ctx.splits) :]
        grad_a, grad_b = (list(map(torch.zeros_like, one)) for one in (a, b))
        grad_hidden, grad_inner = torch.empty_like(hidden), torch.empty_like(inner)
        tensors = hidden, inner, grad, grad_hidden, grad_inner
        for expert, (x, z, g, g_x, g_z) in enumerate(_split(ctx.splits, *tensors)):
            columns = _parts(ctx.num_projections, z, g, g_z)
            of_rows = (one[expert].chunk(ctx.num_projections) for one in (b, grad_b))
            for z_part, g_part, g_z_part, b_part, g_b_part in zip(*columns, *of_rows, strict=True):
                g_z_part.copy_(g_part @ b_part).mul_(ctx.scale)
                g_b_part.copy_(g_part.T @ z_part).mul_(ctx.scale)
            torch.mm(g_z.T, x, out=grad_a[expert])
            torch.mm(g_z, a[expert], out=g_x)
        own = grad_hidden if ctx.needs_input_grad[1] else None
        return grad, own, None, None, None, *grad_a, *grad_b


def _split(splits: Sequence[int], *tensors: torch.Tensor) -> zip[tuple[torch.Tensor, ...]]:
    """Yields the rows of each expert in all tensors."""
    return zip(*(tensor.split(list(splits)) for tensor in tensors), strict=True)


def _parts(num_projections: int, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    return [tensor.chunk(num_projections, dim=1) for tensor in tensors]


@cache
def _with_adapters(base: type) -> type:
    """Returns a subclass of a class of grouped linear layers that adds the adapters' outputs."""

    class Adapted(base):  # type: ignore[misc, valid-type]
        def forward(self, hidden: torch.Tensor, m_splits: list[int]) -> Any:
            output, bias = super().forward(hidden, m_splits)
            if not self.lora_is_on:
                return output, bias
            factors = [getattr(one, name) for name in (A, B) for one in self.adapters]
            options = m_splits, self.lora_num_projections, self.lora_scale
            return _Added.apply(output, hidden, *options, *factors), bias

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> dict[str, Any]:
            """Returns the sharded tensors, with the keys of experts that are separate modules."""
            found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            groups, num_local = self._pg_collection, len(self.adapters)
            is_row = self.lora_num_projections == 1
            for index, adapter in enumerate(self.adapters):
                expert = get_pg_rank(groups.ep) * num_local + index
                of_all = len(sharded_offsets), expert, get_pg_size(groups.ep) * num_local
                offsets = (*sharded_offsets, of_all)
                tensors = make_sharded_tensors_for_checkpoint(
                    {name: getattr(adapter, name) for name in (A, B)},
                    prefix,
                    {A: 1} if is_row else {B: 0},
                    offsets,
                    tp_group=self._tp_group,
                    dp_cp_group=metadata["dp_cp_group"],
                )
                if not is_row:
                    tensors[prefix + B] = apply_swiglu_sharded_factory(tensors[prefix + B], offsets)
                for name in (A, B):
                    tensor = tensors[prefix + name]
                    tensor.replica_id = (*tensor.replica_id[:2], get_pg_rank(groups.expt_dp))
                    found[f"{prefix}{GROUPED_ADAPTERS}.{index}.{name}"] = tensor
            return found

    Adapted.__name__, Adapted.__qualname__ = base.__name__, base.__qualname__
    return Adapted
