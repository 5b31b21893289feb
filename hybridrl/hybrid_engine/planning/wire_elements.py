"""Views tensors as elements of the size in which weights are sent.

All elements of a plan have the same size, but elements of a rank's tensors may have different
sizes. Next to 16-bit weights, a router's bias is fp32 both in training and in the engine. It is
planned, sent and verified as twice as many 16-bit elements. If the engine holds weights in FP8,
elements are bytes: an 8-bit weight is one element, a 16-bit norm two, and an fp32 scale four. The
views show the same memory, and its bits are copied without a cast. Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from hybridrl.errors import ModelError
from hybridrl.models.boxes import Box
from hybridrl.models.family import is_kept_in_fp32
from hybridrl.models.quantized import FP32, element_sizes
from hybridrl.models.weights import RankLayout, Region

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hybridrl.models.sources import SourceTensor

    AnyTensor = TypeVar("AnyTensor", Tensor, SourceTensor)


def fixed_sizes(layout: RankLayout) -> dict[str, int]:
    """Returns the bytes of an element of the local tensors whose type does not depend on the type
    of the other weights: tensors that are kept in fp32, FP8 weights and their scales.
    """
    kept = {region.local: FP32 for region in layout.regions if is_kept_in_fp32(region.hf)}
    return {**element_sizes(layout), **kept}


def wire_itemsize(layouts: Sequence[RankLayout], itemsize: int) -> int:
    """Returns the size of the elements as sent: 1 if any engine holds weights in FP8."""
    different = {id(layout): layout for layout in layouts}.values()
    return 1 if any(map(element_sizes, different)) else itemsize


def wire_layouts(
    layouts: Sequence[RankLayout], itemsize: int, weight_itemsize: int
) -> list[RankLayout]:
    """Converts the layouts to units of elements of `itemsize` bytes, as they are sent.

    A layout whose tensors all have elements of this size is not copied. Arguments that are one
    object yield one object. `weight_itemsize` is for tensors that `fixed_sizes` does not contain.
    """
    found: dict[int, RankLayout] = {}
    for layout in layouts:
        if id(layout) not in found:
            found[id(layout)] = _in_wire_elements(layout, itemsize, weight_itemsize)
    return [found[id(layout)] for layout in layouts]


def wire_views(
    tensors: Mapping[str, AnyTensor],
    layout: RankLayout,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None = None,
) -> Mapping[str, AnyTensor]:
    """Returns a rank's tensors; those of another element size become views as `dtype`, as sent.

    `weight_dtype` is the type of all tensors that `fixed_sizes` does not contain, if elements are
    sent without a cast; None if they are cast to `dtype`.

    Raises ModelError for another type, or a tensor that is computed in another element size.
    """
    sizes = {name: size for name, size in fixed_sizes(layout).items() if name in tensors}
    for name, size in sizes.items():
        if tensors[name].dtype.itemsize != size:
            raise ModelError(
                f"parameter {name}",
                tensors[name].dtype,
                "float32, whatever the model's type" if size == FP32 else f"{size}-byte elements",
                "Choose an engine version that the tests cover.",
            )
    if weight_dtype is None:
        if not sizes or dtype.itemsize >= FP32:
            return tensors
        return {name: _bits(name, t, dtype) if name in sizes else t for name, t in tensors.items()}
    for name, tensor in tensors.items():
        if name not in sizes and tensor.dtype != weight_dtype:
            raise ModelError(
                f"parameter {name}",
                tensor.dtype,
                f"{weight_dtype} with rollout.quantization=fp8, which sends weights without a cast",
                "Set model.dtype to the type of the engine.",
            )
    return {name: _bits(name, tensor, dtype) for name, tensor in tensors.items()}


def _bits(name: str, tensor: SourceTensor, dtype: torch.dtype) -> Any:
    from torch import Tensor  # the rest of the module does not need torch

    if isinstance(tensor, Tensor):
        return tensor.detach().view(dtype)
    if tensor.dtype == dtype:
        return tensor
    raise ModelError(
        f"parameter {name}",
        "a tensor that is computed slice by slice",
        "a tensor in memory, since its elements have another size than those that are sent",
        "Let the weight source compute it in `refresh`.",
    )


def _in_wire_elements(layout: RankLayout, itemsize: int, weight_itemsize: int) -> RankLayout:
    usual = weight_itemsize // itemsize
    factors = {name: max(size // itemsize, 1) for name, size in fixed_sizes(layout).items()}
    if usual == 1 and all(factor == 1 for factor in factors.values()):
        return layout

    def wide(box: Box, factor: int) -> Box:
        *others, (start, stop) = box
        return (*others, (start * factor, stop * factor))

    def changed(region: Region) -> Region:
        factor = factors.get(region.local, usual)
        if factor == 1:
            return region
        hf_box, local_box = (wide(box, factor) for box in (region.hf_box, region.local_box))
        return replace(region, hf_box=hf_box, local_box=local_box)

    return replace(
        layout,
        regions=tuple(map(changed, layout.regions)),
        shapes={n: (*s[:-1], s[-1] * factors.get(n, usual)) for n, s in layout.shapes.items()},
        padding=tuple((n, wide(box, factors.get(n, usual))) for n, box in layout.padding),
    )
