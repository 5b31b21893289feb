"""Weight source of engines that hold weights in block-wise FP8.

Each rank quantizes the slices that it sends, so that only 8-bit weights and scales are sent.
`refresh` computes the scales and keeps them in memory. Weights are quantized while messages are
packed; the whole quantized tensor never exists on the trainer's side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hybridrl import ops
from hybridrl.hybrid_engine.transports.transport import AddressWatch
from hybridrl.models.boxes import Box, Shape, box_view, intersection, moved
from hybridrl.models.quantized import ScaledPart, trainer_scales
from hybridrl.models.sources import ComputedSlice, SourceTensor, TrainingShard, WeightSource
from hybridrl.models.weights import RankLayout


@dataclass(frozen=True)
class QuantizedTensor:
    """The bits of a weight's float8_e4m3fn elements, uint8; a `BatchedTensor`.

    Args:
        parts: Parts of the weight; together they contain all of it.
        scales: Scales of blocks by name.
    """

    weight: Tensor
    parts: Sequence[ScaledPart]
    scales: Mapping[str, Tensor]
    block: int = ops.BLOCK

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @cached_property
    def inputs(self) -> Sequence[Tensor]:
        return self.weight, *(self.scales[name] for name in {part.scales for part in self.parts})

    def compute(self, box: Box) -> Tensor:
        (first, last), (left, right) = box
        found = torch.empty((last - first, right - left), dtype=self.dtype, device=self.device)
        self.copies([(ComputedSlice(self, box), found)], self.device, None).run()
        return found

    @staticmethod
    def copies(
        slices: Sequence[tuple[ComputedSlice, Tensor]], device: torch.device, programs: int | None
    ) -> ops.Copies:
        """Returns copies that write the bits of slices of such tensors to their places."""
        pairs: list[tuple[ops.Tiles, Tensor]] = []
        block = ops.BLOCK
        for one, place in slices:
            tensor = one.tensor
            assert isinstance(tensor, QuantizedTensor)
            block = tensor.block
            pairs += tensor.tiles(one.box, place)
        return ops.quantized_copies(pairs, device, programs, block)

    def tiles(self, box: Box, place: Tensor) -> list[tuple[ops.Tiles, Tensor]]:
        """Returns the rectangles within `box`, each of one part, with their views of `place`."""
        found = []
        origin = tuple((0, 0) for _ in box)
        for part in self.parts:
            inside = intersection(part.box, box)
            if inside is not None:
                dest = box_view(place, moved(inside, box, origin))
                found.append((self.tiles_in(part, inside), dest))
        return found

    def tiles_in(self, part: ScaledPart, inside: Box) -> ops.Tiles:
        (first, last), (left, right) = inside
        (top, _), (start, _) = part.box
        row, column = part.row + first - top, part.column + left - start
        rows = slice(row // self.block, -(-(row + last - first) // self.block))
        columns = slice(column // self.block, -(-(column + right - left) // self.block))
        scales = self.scales[part.scales][rows, columns]
        weight = box_view(self.weight, inside)
        return ops.Tiles(weight, scales, row % self.block, column % self.block)


class QuantizedWeights:
    """A `WeightSource` that quantizes the projections and experts of another source.

    Args:
        source: Weights in 16 bits, in memory.

    Raises ModelError, naming the parameter, if a rank holds only part of a block.
    """

    def __init__(
        self,
        source: WeightSource,
        rank: int,
        quantized: Mapping[str, Shape],
        block: int = ops.BLOCK,
    ) -> None:
        self._source = source
        with_scales: dict[int, RankLayout] = {}
        for layout in source.layouts:
            if id(layout) not in with_scales:
                with_scales[id(layout)], _ = trainer_scales(layout, quantized, block)
        self._layouts = [with_scales[id(layout)] for layout in source.layouts]
        own = source.layouts[rank]
        _, self._parts = trainer_scales(own, quantized, block)
        names = dict.fromkeys(part.scales for parts in self._parts.values() for part in parts)
        shapes = {name: self._layouts[rank].shapes[name] for name in names}
        device = next((one.device for one in source.tensors.values()), torch.device("cpu"))
        # One buffer, so that all scales are computed together.
        sizes = [rows * columns for rows, columns in shapes.values()]
        self._maxima = torch.zeros(sum(sizes), device=device)
        self._all_scales = torch.ones_like(self._maxima)
        maxima, scales = (
            dict(zip(shapes, flat.split(sizes), strict=True))
            for flat in (self._maxima, self._all_scales)
        )
        self._scales = {name: scales[name].view(shape) for name, shape in shapes.items()}
        self._raised = {name: maxima[name].view(shape) for name, shape in shapes.items()}
        self._bits: dict[str, QuantizedTensor] = {}
        self._searched: list[QuantizedTensor] = []
        for name, parts in self._parts.items():
            weight = source.tensors[name]
            if not isinstance(weight, Tensor):
                raise ValueError(f"{name} is computed slice by slice, so it cannot be quantized")
            self._bits[name] = QuantizedTensor(weight, parts, self._scales, block)
            self._searched.append(QuantizedTensor(weight, parts, self._raised, block))
        self._watch = AddressWatch({name: one.weight for name, one in self._bits.items()})
        self._block = block

    @property
    def layouts(self) -> Sequence[RankLayout]:
        return self._layouts

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """This rank's tensors by local name: quantized weights, scales, and other weights."""
        return {**self._source.tensors, **self._bits, **self._scales}

    @property
    def frozen(self) -> frozenset[str]:
        """Local names of tensors that never change, and of their scales."""
        frozen = self._source.frozen
        of_frozen = (self._parts[name] for name in frozen if name in self._parts)
        return frozen | {part.scales for parts in of_frozen for part in parts}

    @property
    def shard(self) -> TrainingShard | None:
        """The trainer's parameters, of which an engine uses those that it holds in 16 bits."""
        return self._source.shard

    @torch.no_grad()
    def refresh(self) -> None:
        self._source.refresh()
        if self._watch.look_again():
            tiles = [one.tiles_in(part, part.box) for one in self._searched for part in one.parts]
            self._search = ops.block_maxima(tiles, self._maxima.device, self._block)
        self._maxima.zero_()
        self._search.run()
        self._all_scales.copy_(ops.power_of_two_scales(self._maxima))
