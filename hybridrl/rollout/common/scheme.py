"""Tests an engine's weight layout before the first weights arrive.

Compares names, shapes and dtypes with the layout. Then passes HF tensors whose elements encode
their own position to the engine's loader, and checks that the loader copies the elements to the
positions that the layout states. The test detects a weight table that swaps gate and up, or that
orders q, k and v differently from the installed engine. Error messages name the parameter.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.planning.wire_elements import fixed_sizes
from hybridrl.models.boxes import Shape, box_view, show
from hybridrl.models.hf.stored_slices import StoredSlice, slice_counts
from hybridrl.models.quantized import SCALES, is_scale
from hybridrl.models.weights import RankLayout

Loader = Callable[[Iterable[tuple[str, Tensor]]], object]
"""Takes (HF name, whole HF tensor) pairs and copies this rank's parts of them to its parameters."""

# Row and column codes are combined to 16 * row + column, which is below 256 and thus exact in
# bfloat16.
CODES = 16
FP8 = torch.float8_e4m3fn


def check_parameters(
    layout: RankLayout, live: Mapping[str, Tensor], engine: str, wide: Collection[str] = ()
) -> None:
    """Raises ModelError unless an engine has exactly the layout's parameters, all of one dtype
    except those kept in fp32 (`wide`: WideRouters), FP8 weights and their scales.
    """
    for name in sorted(layout.shapes.keys() | live.keys()):
        expected = layout.shapes.get(name)
        found = tuple(live[name].shape) if name in live else None
        if expected != found:
            raise _refusal(name, _shape(found), _shape(expected), engine)
    fixed = fixed_sizes(layout)
    for name, size in sorted(fixed.items()):
        required = FP8 if size == FP8.itemsize else torch.float32
        if live[name].dtype != required:
            raise _refusal(name, live[name].dtype, required, engine)
        if not live[name].is_contiguous():
            raise _refusal(name, "strides", "contiguous elements", engine)
    dtypes = {name: tensor.dtype for name, tensor in live.items() if name not in {*fixed, *wide}}
    wanted = dtypes[next(iter(layout.shapes))]
    for name, dtype in dtypes.items():
        if dtype != wanted:
            raise _refusal(name, dtype, f"{wanted}, as for the other parameters", engine)


def check_placement(
    layout: RankLayout,
    live: Mapping[str, Tensor],
    hf_shapes: Mapping[str, Shape],
    load: Loader,
    engine: str,
    experts: Sequence[int] | None = None,
) -> None:
    """Loads HF tensors of marker values, and checks that each region contains the expected slice.

    Uses the engine's own loader and overwrites the parameters. Checks the first and the last layer,
    and parameters outside of layers. Raises ModelError, which names the first wrong parameter.

    Args:
        experts: Experts of all ranks of the replica, one rank after another; None if they are in
            order. Loaders of models that stack experts cut the stacks in order.
    """
    looked_at = _first_and_last_layer(hf_shapes)
    like = live[next(iter(layout.shapes))]
    load(_stored(looked_at, hf_shapes, like, experts))
    for region in layout.regions:
        if region.hf not in looked_at:
            continue
        part = box_view(live[region.local], region.local_box)
        whole = coded(region.hf, hf_shapes[region.hf], _type_of(region.hf, hf_shapes, like))
        expected = box_view(whole, region.hf_box)
        if part.dtype == FP8:  # codes include NaN, which equals no number
            part, expected = part.view(torch.uint8), expected.view(torch.uint8)
        if not torch.equal(part, expected.to(part.dtype)):
            raise _refusal(
                f"{region.local}{show(region.local_box)}",
                "other elements, according to the engine's own loader",
                f"{region.hf}{show(region.hf_box)}, according to the weight table",
                engine,
            )


def _stored(
    names: Iterable[str],
    hf_shapes: Mapping[str, Shape],
    like: Tensor,
    experts: Sequence[int] | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields the coded tensors as a checkpoint stores them: slices of one tensor are stacked."""
    counts, slices = slice_counts(hf_shapes), dict[str, list[Tensor]]()
    for name in names:
        tensor = coded(name, hf_shapes[name], _type_of(name, hf_shapes, like))
        place = StoredSlice.of(name)
        if place.index is None:
            yield name, tensor
            continue
        members = slices.setdefault(place.name, [])
        members.append(tensor.T if place.is_transposed else tensor)
        if len(members) == counts[place.name]:
            order = range(len(members)) if experts is None else experts
            yield place.name, torch.stack([members[expert] for expert in order])
            del slices[place.name]


def coded(name: str, shape: Shape, like: Tensor) -> Tensor:
    """Returns a tensor whose elements, or FP8 bits, encode the name and their row and column."""
    if like.dtype == FP8:
        return coded(name, shape, like.to(torch.float32)).to(torch.uint8).view(FP8)
    code = torch.zeros((), dtype=like.dtype, device=like.device)
    for dim, size in enumerate(shape):
        # A multiplicative hash whose top bits depend on index, dim and name.
        index = torch.arange(size, device=like.device) + zlib.crc32(f"{dim}/{name}".encode())
        bits = (index * 2654435761 % (1 << 32)) >> 28
        code = CODES * code[..., None] + bits.to(like.dtype) if dim else bits.to(like.dtype)
    return code


def _type_of(name: str, hf_shapes: Mapping[str, Shape], like: Tensor) -> Tensor:
    """Returns an empty tensor with an HF tensor's type: FP8, fp32 for scales, or that of `like`."""
    dtype = like.dtype
    if is_scale(name):
        dtype = torch.float32
    elif f"{name}{SCALES}" in hf_shapes:
        dtype = FP8
    return torch.empty(0, dtype=dtype, device=like.device)


def _first_and_last_layer(hf_shapes: Mapping[str, Shape]) -> dict[str, None]:
    """Returns the names of tensors outside of layers and in the first and last layer, in order."""
    layers = {name: _layer(name) for name in hf_shapes}
    numbers = [layer for layer in layers.values() if layer is not None]
    kept = {None, min(numbers), max(numbers)} if numbers else {None}
    return dict.fromkeys(name for name, layer in layers.items() if layer in kept)


def _layer(name: str) -> int | None:
    return next((int(word) for word in name.split(".") if word.isdigit()), None)


def _shape(shape: Shape | None) -> str:
    return "no such parameter" if shape is None else f"shape {shape}"


def _refusal(name: str, found: object, expected: object, engine: str) -> ModelError:
    return ModelError(
        f"engine parameter {name}",
        f"{found} in {engine}",
        f"{expected}",
        "The weight table does not describe this engine. Install a version that `hybridrl check` "
        "calls tested, or set rollout.engine=hf.",
    )
