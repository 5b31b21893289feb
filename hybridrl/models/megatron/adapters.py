"""Adds LoRA adapters to Megatron's linear layers.

A linear layer stays the same module, with the same parameter names. It only gains the parameters
`lora_a` and `lora_b` (models/adapters/rows.py), and its output gains s B A x. Each HF projection
has its own A and B, even if Megatron fuses several projections into one layer.

With tensor parallelism, a layer's output is either sharded by rows (its input is complete), or a
sum over the ranks (its input is sharded by columns). A rank holds the same rows of B, or columns of
A, as of the weight, and a copy of the other matrix. Only activations of width `rank` are
communicated. Invariant: an adapter's output is in the same parallel state as the output to which it
is added.

Experts: expert-parallel ranks hold the adapters of their experts. With expert tensor parallelism,
the dispatcher gives all ranks of an expert the same tokens and adds up their outputs, so adapters
communicate no activations. expert_adapters.py adds adapters to layers that compute several experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from hybridrl.models.adapters.lora import Lora
from hybridrl.models.adapters.rows import GROUPED_ADAPTERS, HF_A, WEIGHT, A, B, weight_of
from hybridrl.models.boxes import Shape
from hybridrl.models.megatron.expert_adapters import add_expert_adapter, new_parameter
from hybridrl.models.megatron.frozen_linear import frozen_linear, one_matrix, scaled_product
from hybridrl.models.weights import EXPERTS, RankLayout, Region


def add_adapters(chunks: Sequence[torch.nn.Module], layout: RankLayout, lora: Lora) -> None:
    """Adds the adapters in a rank's layout to its modules; their parameters are all zero."""
    regions: dict[str, list[Region]] = {}
    for region in layout.regions:
        regions.setdefault(region.local, []).append(region)
    output_rows = _OutputRows(next(chunks[0].parameters()).device)
    for local in layout.shapes:
        module, _, name = local.rpartition(".")
        if name != B:
            continue
        chunk, _, path = module.partition("/")
        projections = [r.hf.removesuffix(f".{HF_A}") for r in regions[f"{module}.{A}"]]
        rows, places = output_rows.of(regions[weight_of(module)], projections)
        shapes = layout.shapes[f"{module}.{A}"], layout.shapes[local]
        grouped, is_grouped, index = path.rpartition(f".{GROUPED_ADAPTERS}.")
        linear = chunks[int(chunk)].get_submodule(grouped or path)
        if is_grouped:
            add_expert_adapter(linear, int(index), shapes, rows, places, lora)
        else:
            _adapt(linear, shapes, rows, places, lora, is_expert=EXPERTS in local)


class _OutputRows:
    """Finds the output rows that adapters change; layers with equal rows share the tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[tuple[tuple[int, int, int], ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def of(
        self, regions: Sequence[Region], projections: Sequence[str]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output row and the index of the projection of each row of `lora_b`."""
        named = ((region.hf.removesuffix(WEIGHT), region.local_box[0]) for region in regions)
        spans = tuple(
            (*span, projections.index(name)) for name, span in named if name in projections
        )
        if spans not in self._found:
            rows = [row for start, stop, _ in spans for row in range(start, stop)]
            places = [place for start, stop, place in spans for _ in range(start, stop)]
            self._found[spans] = (
                torch.tensor(rows, device=self._device),
                torch.tensor(places, device=self._device),
            )
        return self._found[spans]


def _adapt(
    linear: torch.nn.Module,
    shapes: tuple[Shape, Shape],
    rows: torch.Tensor,
    places: torch.Tensor,
    lora: Lora,
    is_expert: bool,
) -> None:
    """Turns a linear layer into one with adapters.

    Args:
        is_expert: Whether the layer belongs to an expert, whose group of ranks is `linear.tp_group`
            as well.
    """
    weight: Any = linear.weight
    parallel = getattr(linear, "tp_group", None)
    is_parallel = parallel is not None and parallel.size() > 1
    # Megatron's own layer, and transformer-engine's.
    is_row = hasattr(linear, "input_is_parallel") or getattr(linear, "parallel_mode", "") == "row"
    linear.__class__ = _with_adapters(type(linear))  # type: ignore[arg-type]  # a class is hashable
    self: Any = linear
    self.lora_scale, self.lora_is_on = lora.scale, True
    self.lora_group = parallel if is_parallel and not is_expert else None
    self.lora_is_row = is_row
    self.lora_rows, self.lora_places = rows, places
    self.lora_is_dense = len(rows) == weight.size(0) and shapes[0][0] == lora.rank
    self.lora_frozen = frozen_linear(linear, self.lora_group)
    for name, shape in zip((A, B), shapes, strict=True):
        is_sharded = is_parallel and (name == A) == is_row
        if is_expert:
            new = new_parameter(name, shape, weight, None if is_sharded else parallel)
        else:
            new = torch.nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=weight.device))
            set_tensor_model_parallel_attributes(new, is_sharded, 1 if name == A else 0, 1)
            # Each tensor-parallel rank computes the gradient for its part of the sequence only, so
            # Megatron sums it over these ranks, as for norms.
            new.sequence_parallel = not is_sharded  # type: ignore[attr-defined]
        linear.register_parameter(name, new)
    if hasattr(linear, "return_layernorm_output"):  # transformer-engine's norm and linear layer
        self.return_layernorm_output = True


class _Added(torch.autograd.Function):
    """Adds s B h to a linear layer's output in place; h is A x.

    A sum out of place would copy the output first. Nothing needs the output before the sum, because
    the gradients of a linear layer do not depend on its output.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        inner: torch.Tensor,
        b: torch.Tensor,
        places: tuple[torch.Tensor, torch.Tensor] | None,
        scale: float,
    ) -> torch.Tensor:
        """Args:
        output: (..., outputs).
        inner: A x of all projections, (..., projections x rank).
        b: (rows, rank).
        places: Output row and projection of each row of b; None if b is (outputs, rank) and there
            is one projection.
        """
        matrix = b if places is None else one_matrix(b, places, output.size(-1), inner.size(-1))
        ctx.save_for_backward(inner, matrix)
        ctx.places, ctx.rank, ctx.scale = places, b.size(1), scale
        # `data`, because autograd refuses changes of what transformer-engine's functions return.
        _rows(output.data).addmm_(_rows(inner), matrix.T, alpha=scale)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        inner, matrix = ctx.saved_tensors
        rows = grad.reshape(-1, grad.size(-1))
        grad_inner = grad_b = None
        if ctx.needs_input_grad[1]:
            grad_inner = scaled_product(rows, matrix, ctx.scale).view_as(inner)
        if ctx.needs_input_grad[2]:
            grad_b = scaled_product(rows.T, _rows(inner), ctx.scale)
            if ctx.places is not None:
                grad_b = grad_b.view(matrix.size(0), -1, ctx.rank)[ctx.places]
        return grad, grad_inner, grad_b, None, None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, tensor.size(-1))


@cache
def _with_adapters(base: type) -> type:
    """Returns a subclass of a linear layer's class that adds the adapters' output."""

    class Adapted(base):  # type: ignore[misc, valid-type]
        def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.lora_frozen is not None and self.lora_is_on and not (args or kwargs):
                trained = (self.weight, *([] if self.bias is None else [self.bias]))
                if not torch.is_grad_enabled() or not any(one.requires_grad for one in trained):
                    return self.lora_frozen(
                        self, hidden, self.lora_a, self.lora_b, self._lora_where(), self.lora_scale
                    )
            found = super().forward(hidden, *args, **kwargs)
            if not isinstance(found, tuple):
                return self.with_lora(hidden, found) if self.lora_is_on else found
            output, bias = found[0], found[1]
            if getattr(self, "return_layernorm_output", False):
                # ((output, normalized), None) without a bias, (output, bias, normalized) with one.
                output, hidden = found[0] if bias is None else (found[0], found[2])
            return (self.with_lora(hidden, output) if self.lora_is_on else output), bias

        def with_lora(self, hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
            inner = torch.nn.functional.linear(hidden, self.lora_a)
            if self.lora_group is not None and self.lora_is_row:
                inner = reduce_scatter_to_sequence_parallel_region(inner, group=self.lora_group)
            elif self.lora_group is not None:
                inner = gather_from_sequence_parallel_region(
                    inner, tensor_parallel_output_grad=True, group=self.lora_group
                )
            return _Added.apply(output, inner, self.lora_b, self._lora_where(), self.lora_scale)

        def _lora_where(self) -> tuple[torch.Tensor, torch.Tensor] | None:
            return None if self.lora_is_dense else (self.lora_rows, self.lora_places)

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> dict[str, Any]:
            found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            if (group := getattr(self, "tp_group", None)) is None:  # latent attention's down proj
                return found
            found |= make_sharded_tensors_for_checkpoint(
                {name: getattr(self, name) for name in (A, B)},
                prefix,
                {A: 1} if self.lora_is_row else {B: 0},
                sharded_offsets,
                tp_group=group,
                dp_cp_group=metadata["dp_cp_group"],
            )
            if prefix.endswith("linear_fc1.") and len(self.lora_places) == self.weight.size(0):
                # B has rows of gate and up, which are sharded separately. Megatron's feed-forward
                # layer does this for the weight.
                found[prefix + B] = apply_swiglu_sharded_factory(found[prefix + B], sharded_offsets)
            return found

    Adapted.__name__, Adapted.__qualname__ = base.__name__, base.__qualname__
    return Adapted


def adapted_rows(chunks: Sequence[torch.nn.Module]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns the rows and projections of each adapter's B, by local name of its module."""
    return {
        f"{index}/{name}": (part.lora_rows, part.lora_places)
        for index, chunk in enumerate(chunks)
        for name, part in _named_with(chunk, "lora_rows")
    }


def _named_with(chunk: torch.nn.Module, attribute: str) -> Iterator[tuple[str, Any]]:
    for name, part in chunk.named_modules():
        if hasattr(part, attribute):
            yield name, part


@contextmanager
def adapters_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Computes without adapters in this context."""
    adapted = [part for chunk in chunks for _, part in _named_with(chunk, "lora_is_on")]
    for part in adapted:
        part.lora_is_on = False
    try:
        yield
    finally:
        for part in adapted:
            part.lora_is_on = True
