"""How tensors that are kept in fp32 travel with elements of a narrower type, bit by bit.

A plan counts elements of one size. A router's bias is fp32 beside weights of 16 bit on both sides,
so it is planned, moved and verified as twice as many elements of the narrower type: views of the
same memory, which nothing casts. Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from hybridrl.errors import ModelError
from hybridrl.models.boxes import Box
from hybridrl.models.family import is_kept_in_fp32
from hybridrl.models.weights import RankLayout, Region

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hybridrl.models.sources import SourceTensor

    AnyTensor = TypeVar("AnyTensor", Tensor, SourceTensor)

FP32_BYTES = 4


def kept_tensors(layout: RankLayout) -> frozenset[str]:
    """Returns the names of the local tensors that are kept in fp32."""
    return frozenset(region.local for region in layout.regions if is_kept_in_fp32(region.hf))


def wire_layouts(layouts: Sequence[RankLayout], itemsize: int) -> list[RankLayout]:
    """Returns the layouts in elements of `itemsize` bytes; what changes in none stays the object.

    Args:
        layouts: of all ranks; equal ones may be one object, and stay so.
        itemsize: bytes of one element on the wire.
    """
    found: dict[int, RankLayout] = {}
    for layout in layouts:
        if id(layout) not in found:
            found[id(layout)] = _in_wire_elements(layout, FP32_BYTES // itemsize)
    return [found[id(layout)] for layout in layouts]


def wire_views(
    tensors: Mapping[str, AnyTensor], layout: RankLayout, dtype: torch.dtype
) -> Mapping[str, AnyTensor]:
    """Returns the tensors as a transport moves them: those kept in fp32 as elements of `dtype`.

    Args:
        tensors: of one rank, by local name.
        layout: of the same rank.
        dtype: the type on the wire.

    Raises:
        ModelError: one of them is not in fp32, or has no memory; names it.
    """
    kept = kept_tensors(layout) & tensors.keys()
    for name in kept:
        if tensors[name].dtype.itemsize != FP32_BYTES:
            raise ModelError(
                f"parameter {name}",
                tensors[name].dtype,
                "float32, whatever the model's type",
                "Choose an engine version that the tests cover.",
            )
    if not kept or dtype.itemsize >= FP32_BYTES:
        return tensors
    return {name: _bits(name, t, dtype) if name in kept else t for name, t in tensors.items()}


def _bits(name: str, tensor: SourceTensor, dtype: torch.dtype) -> Tensor:
    from torch import Tensor  # the rest of the module needs none

    if not isinstance(tensor, Tensor):
        raise ModelError(
            f"parameter {name}",
            "a tensor that is computed slice by slice",
            "a tensor in memory, since it is kept in fp32",
            "Let the weight source compute it in `refresh`.",
        )
    return tensor.view(dtype)


def _in_wire_elements(layout: RankLayout, factor: int) -> RankLayout:
    kept = kept_tensors(layout)
    if factor <= 1 or not kept:
        return layout

    def wide(box: Box) -> Box:
        ((start, stop),) = box
        return ((start * factor, stop * factor),)

    def changed(region: Region) -> Region:
        if region.local not in kept:
            return region
        return replace(region, hf_box=wide(region.hf_box), local_box=wide(region.local_box))

    return replace(
        layout,
        regions=tuple(map(changed, layout.regions)),
        shapes={n: (s[0] * factor,) if n in kept else s for n, s in layout.shapes.items()},
        padding=tuple((n, wide(box) if n in kept else box) for n, box in layout.padding),
    )
