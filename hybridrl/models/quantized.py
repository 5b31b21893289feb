"""Block-wise FP8 weights: which weights an engine holds in 8 bits, and where their scales are.

A quantized weight is float8_e4m3fn. Every block of 128 x 128 elements has one fp32 scale, a power
of two. The scales of the HF tensor `X.weight` form a tensor `X.weight_scale_inv`, as in the
checkpoints of DeepSeek-V3. A weight is its element times the scale of its block. Blocks are blocks
of the HF tensor. Trainer and engine may therefore shard it differently, as long as no rank holds
part of a block. Pure data, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hybridrl.errors import ModelError
from hybridrl.models.boxes import Box, Shape, intersection, moved, show, sizes
from hybridrl.models.cuts import Cut, fused_cut, megatron_cut, plain_cut
from hybridrl.models.family import Family, ModelShape, Row
from hybridrl.models.weights import RankLayout, Region, hf_shapes

BLOCK = 128
SCALES = "_scale_inv"
FP8, FP32 = 1, 4  # bytes of an element of a quantized weight, and of a scale
_KINDS = ("qkv", "gate_up", "column", "row")


def is_scale(hf_name: str) -> bool:
    return hf_name.endswith(SCALES)


def is_quantized(row: Row) -> bool:
    """Whether engines hold a row's weights in FP8: those of the layers' projections and experts.
    Routers, gates of shared experts, norms, embeddings and the output layer keep the model's type.
    """
    return row.stage == "layer" and row.kind in _KINDS and len(row.shapes[0]) == 2


@lru_cache(64)
def split_family(family: Family, shape: ModelShape) -> tuple[Family, Family]:
    rows = family.rows(shape)
    own = tuple(row for row in rows if is_quantized(row))
    others = tuple(row for row in rows if not is_quantized(row))
    return replace(family, rows=lambda _: own), replace(family, rows=lambda _: others)


@lru_cache(16)
def quantized_shapes(family: Family, shape: ModelShape) -> Mapping[str, Shape]:
    return hf_shapes(split_family(family, shape)[0], shape)


def quantized_bytes(num_elements: int) -> int:
    return num_elements * FP8 + num_elements // BLOCK**2 * FP32


def with_scale_shapes(
    shapes: Mapping[str, Shape], quantized: Mapping[str, Shape]
) -> dict[str, Shape]:
    scales = {f"{name}{SCALES}": _num_blocks(size, BLOCK) for name, size in quantized.items()}
    return {**shapes, **scales}


def unquantized_modules(family: Family, shape: ModelShape) -> list[str]:
    """Returns the HF names of the linear layers that keep the model's type."""
    names = [
        part.format(L=layer).removesuffix(".weight")
        for row in family.rows(shape)
        for part in row.parts
        if len(row.shapes[0]) == 2 and not is_quantized(row) and part.endswith(".weight")
        for layer in row.layers_of(shape)
    ]
    return [*dict.fromkeys(names)]


@dataclass(frozen=True)
class ScaledPart:
    """A rectangle of a local weight whose scales are one rectangle of a local tensor of scales.

    Args:
        row, column: Distance of the rectangle's first element from the first element of the block
            of `scales[0, 0]`.
    """

    box: Box
    scales: str
    row: int
    column: int


def engine_scales(
    layout: RankLayout, quantized: Mapping[str, Shape], block: int = BLOCK
) -> RankLayout:
    """Returns an engine's layout with the scales of its quantized weights. A parameter `X.weight`
    has `X.weight_scale_inv`, and `w13_weight/3` has `w13_weight_scale_inv/3`.

    Raises ModelError if a part of a parameter does not consist of whole blocks.
    """
    regions: list[Region] = []
    shapes: dict[str, Shape] = {}
    for region in layout.regions:
        if region.hf not in quantized:
            continue
        stem, slash, index = region.local.partition("/")
        name, size = f"{stem}{SCALES}{slash}{index}", layout.shapes[region.local]
        hf_box = _in_blocks(region.hf_box, quantized[region.hf], region, block)
        local_box = _in_blocks(region.local_box, size, region, block)
        regions.append(Region(f"{region.hf}{SCALES}", hf_box, name, local_box))
        shapes[name] = _num_blocks(size, block)
    return replace(layout, regions=(*layout.regions, *regions), shapes={**layout.shapes, **shapes})


def trainer_scales(
    layout: RankLayout, quantized: Mapping[str, Shape], block: int = BLOCK
) -> tuple[RankLayout, Mapping[str, Sequence[ScaledPart]]]:
    """Returns a trainer's layout with the scales that it computes, and each weight's parts.

    A rank may store a block's rows in several places, because Megatron interleaves the rows of
    queries, keys and values. It must hold all of them.

    Raises ModelError, naming the parameter, if a rank holds only part of a block.
    """
    held: dict[tuple[str, str], list[Region]] = {}
    for region in layout.regions:
        if region.hf in quantized:
            held.setdefault((region.local, region.hf), []).append(region)
    regions: list[Region] = []
    shapes: dict[str, Shape] = {}
    parts: dict[str, list[ScaledPart]] = {}
    for (local, hf), own in held.items():
        for box in _joined(own):
            name = f"{local}{SCALES}.{len(parts.setdefault(local, []))}"
            inside = [one for one in own if intersection(one.hf_box, box)]
            blocks = _in_blocks(box, quantized[hf], inside[0], block)
            shapes[name] = sizes(blocks)
            regions.append(
                Region(f"{hf}{SCALES}", blocks, name, tuple((0, n) for n in sizes(blocks)))
            )
            for one in inside:
                (row, _), (column, _) = moved(one.hf_box, box, tuple((0, 0) for _ in box))
                parts[local].append(ScaledPart(one.local_box, name, row, column))
    full = replace(layout, regions=(*layout.regions, *regions), shapes={**layout.shapes, **shapes})
    return full, parts


def element_sizes(layout: RankLayout) -> dict[str, int]:
    """Returns the bytes of an element of local tensors that have scales, and of the scales."""
    quantized = {r.hf.removesuffix(SCALES) for r in layout.regions if is_scale(r.hf)}
    if not quantized:
        return {}
    return {
        region.local: FP32 if is_scale(region.hf) else FP8
        for region in layout.regions
        if is_scale(region.hf) or region.hf in quantized
    }


def split_blocks(
    family: Family, shape: ModelShape, cut: Callable[[Row, int], Cut], tp: int
) -> Iterator[tuple[str, int]]:
    """Yields the HF names and sizes of pieces of quantized weights that are not whole blocks."""
    for row in family.rows(shape):
        if not is_quantized(row):
            continue
        name = row.parts[0].format(L=row.layers_of(shape)[0], E=0)
        bad = {size for one in row.shapes for size in one if size % BLOCK}
        for tp_rank in range(tp):
            for _, start, stop in _joined_runs(cut(row, tp_rank)):
                bad |= {size for size in (start, stop - start) if size % BLOCK}
        yield from ((name, size) for size in sorted(bad))


def engine_cut(shape: ModelShape, tp: int, ep: int) -> Callable[[Row, int], Cut]:

    def cut(row: Row, tp_rank: int) -> Cut:
        if row.num_experts:
            return plain_cut(row, tp // ep, tp_rank % (tp // ep), "rollout.ep")
        return fused_cut(row, shape, tp, tp_rank)

    return cut


def trainer_cut(shape: ModelShape, tp: int, etp: int) -> Callable[[Row, int], Cut]:

    def cut(row: Row, tp_rank: int) -> Cut:
        if row.num_experts:
            return plain_cut(row, etp, tp_rank % etp, "train.etp")
        return megatron_cut(row, shape, tp, tp_rank)

    return cut


def _joined_runs(cut: Cut) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    for part, start, stop in sorted(cut.runs):
        if found and found[-1][0] == part and found[-1][2] == start:
            found[-1] = part, found[-1][1], stop
        else:
            found.append((part, start, stop))
    return found


def _joined(regions: Iterable[Region]) -> list[Box]:
    found: list[Box] = []
    for box in sorted(region.hf_box for region in regions):
        if found and found[-1][1:] == box[1:] and found[-1][0][1] == box[0][0]:
            found[-1] = ((found[-1][0][0], box[0][1]), *box[1:])
        else:
            found.append(box)
    return found


def _in_blocks(box: Box, shape: Shape, region: Region, block: int) -> Box:
    for (start, stop), size in zip(box, shape, strict=True):
        if start % block or (stop % block and stop != size):
            raise ModelError(
                f"{region.local}{show(region.local_box)}",
                f"{region.hf}{show(box)}",
                f"whole blocks of {block} x {block} elements",
                "Choose other tensor-parallel sizes, or set rollout.quantization=none.",
            )
    return tuple((start // block, -(-stop // block)) for start, stop in box)


def _num_blocks(shape: Shape, block: int) -> Shape:
    return tuple(-(-size // block) for size in shape)
