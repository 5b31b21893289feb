"""Views fp32 tensors as elements of the narrower type in which weights are sent.

All elements of a plan have the same size. Weights have 16 bits, but a router's bias is fp32 both in
training and in the engine. The bias is planned, sent and verified as twice as many 16-bit elements:
as a view of the same memory, whose bits are copied without a cast. Pure, no torch.
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
    """Converts the layouts to units of elements of `itemsize` bytes. Layouts without fp32 tensors
    need no conversion and are not copied.

    Args:
        layouts: Layouts of all ranks. Layouts that are one object here are one object in the
            result.
        itemsize: Size in bytes of an element as it is sent.
    """
    found: dict[int, RankLayout] = {}
    for layout in layouts:
        if id(layout) not in found:
            found[id(layout)] = _in_wire_elements(layout, FP32_BYTES // itemsize)
    return [found[id(layout)] for layout in layouts]


def wire_views(
    tensors: Mapping[str, AnyTensor], layout: RankLayout, dtype: torch.dtype
) -> Mapping[str, AnyTensor]:
    """Returns the tensors; tensors that are kept in fp32 are viewed as elements of `dtype`.

    Args:
        tensors: Tensors of one rank, by local name.
        layout: Layout of the same rank.
        dtype: Type in which elements are sent.

    Raises:
        ModelError: A tensor that must be fp32 has another type, or is computed slice by slice.
            Names the tensor.
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
    from torch import Tensor  # the rest of the module does not need torch

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
