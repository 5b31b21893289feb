"""The self-test of an engine's weight layout, before the first weights arrive.

Names, shapes and dtypes are those of the layout; and the engine's own loader, given HF tensors
whose every element says where it belongs, puts them where the layout has them. A table that swaps
gate and up, or orders q, k and v otherwise than this version of the engine, is refused. Messages
name the parameter.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.planning.wire import kept_tensors
from hybridrl.models.boxes import Shape, show
from hybridrl.models.weights import RankLayout

Loader = Callable[[Iterable[tuple[str, Tensor]]], object]
"""Takes (HF name, whole HF tensor) pairs and writes this rank's parts into its parameters."""

# Codes of two dims are joined to 16 * row + column: exact in bfloat16, whose integers end at 256.
CODES = 16


def check_parameters(layout: RankLayout, live: Mapping[str, Tensor], engine: str) -> None:
    """Raises ModelError unless the engine's parameters are just those of the layout, of one dtype
    but for those that are kept in fp32. `engine` is its name and version.
    """
    for name in sorted(layout.shapes.keys() | live.keys()):
        expected = layout.shapes.get(name)
        found = tuple(live[name].shape) if name in live else None
        if expected != found:
            raise _refusal(name, _shape(found), _shape(expected), engine)
    kept = kept_tensors(layout)
    for name in sorted(kept):
        if live[name].dtype != torch.float32:
            raise _refusal(name, live[name].dtype, "float32, whatever the others are", engine)
    dtypes = {name: tensor.dtype for name, tensor in live.items() if name not in kept}
    wanted = dtypes[next(iter(layout.shapes))]
    for name, dtype in dtypes.items():
        if dtype != wanted:
            raise _refusal(name, dtype, f"{wanted}, as the others", engine)


def check_placement(
    layout: RankLayout,
    live: Mapping[str, Tensor],
    hf_shapes: Mapping[str, Shape],
    load: Loader,
    engine: str,
) -> None:
    """Lets the engine load coded HF tensors and checks that each region holds its part of them.

    Overwrites the parameters. Looks at the first and the last layer and outside of layers: those
    between are made alike. Raises ModelError that names the first parameter whose content lies
    elsewhere.
    """
    looked_at = _first_and_last_layer(hf_shapes)
    like = live[next(iter(layout.shapes))]
    load((name, coded(name, hf_shapes[name], like)) for name in looked_at)
    for region in layout.regions:
        if region.hf not in looked_at:
            continue
        part = live[region.local][_slices(region.local_box)]
        expected = coded(region.hf, hf_shapes[region.hf], like)[_slices(region.hf_box)]
        if not torch.equal(part, expected.to(part.dtype)):
            raise _refusal(
                f"{region.local}{show(region.local_box)}",
                "something else, by the engine's own loader",
                f"{region.hf}{show(region.hf_box)}, by the weight table",
                engine,
            )


def coded(name: str, shape: Shape, like: Tensor) -> Tensor:
    """Returns a tensor like `like` whose elements depend on the name and on their own row and
    column.
    """
    code = torch.zeros((), dtype=like.dtype, device=like.device)
    for dim, size in enumerate(shape):
        # A multiplicative hash; its top bits depend on all of index, dim and name.
        index = torch.arange(size, device=like.device) + zlib.crc32(f"{dim}/{name}".encode())
        bits = (index * 2654435761 % (1 << 32)) >> 28
        code = CODES * code[..., None] + bits.to(like.dtype) if dim else bits.to(like.dtype)
    return code


def _first_and_last_layer(hf_shapes: Mapping[str, Shape]) -> dict[str, None]:
    """Returns the names outside of layers and those of the first and the last layer, in order."""
    layers = {name: _layer(name) for name in hf_shapes}
    numbers = [layer for layer in layers.values() if layer is not None]
    kept = {None, min(numbers), max(numbers)} if numbers else {None}
    return dict.fromkeys(name for name, layer in layers.items() if layer in kept)


def _layer(name: str) -> int | None:
    return next((int(word) for word in name.split(".") if word.isdigit()), None)


def _slices(box: Iterable[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _shape(shape: Shape | None) -> str:
    return "no such parameter" if shape is None else f"shape {shape}"


def _refusal(name: str, found: object, expected: object, engine: str) -> ModelError:
    return ModelError(
        f"engine parameter {name}",
        f"{found} in {engine}",
        f"{expected}",
        "The weight table does not describe this engine: install a version that the tests cover, "
        "or set rollout.engine=hf.",
    )
