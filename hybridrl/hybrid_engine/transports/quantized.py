"""Quantizes the parameters that an engine holds as block FP8, while they are written.

Such a parameter is float8_e4m3fn and has a float32 scale for each 128 x 128 block (ops.BLOCK). It
is quantized from elements of the wire dtype, so that every transport writes the same bits. A scale
depends on all elements of its block. If every operation on a parameter covers whole blocks and can
read its source in place, in the wire dtype, it is quantized directly. Otherwise the parameter is
gathered in a scratch buffer and quantized from there. Parameters share the scratch buffer in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl import ops
from hybridrl.hybrid_engine.planning.chunks import Exchange
from hybridrl.hybrid_engine.planning.plan import CopyOp, PlanError
from hybridrl.models.boxes import Box, Shape, volume
from hybridrl.models.hf.shards import box_view

FP8 = torch.float8_e4m3fn
SENT_AS = torch.bfloat16  # counts as a quantized parameter's type where the wire's is agreed upon
ALIGNED = 16  # elements at whose multiples parameters lie in a scratch: the kernel moves that many


class Fill(NamedTuple):
    """What fills a rectangle of a parameter.

    Args:
        source: view to read, of the rectangle's shape.
        box: the rectangle.
        lane: of `ops.rectangle_copies`; sources of one peer share a lane.
    """

    source: Tensor
    box: Box
    lane: int


def check_scales(
    ops_of_rank: Sequence[CopyOp], dests: Mapping[str, Tensor], scales: Mapping[str, Tensor]
) -> None:
    """Checks that a rank's quantized parameters can be written.

    Args:
        ops_of_rank: the rank's operations.
        dests: its destination tensors by name.
        scales: of the quantized ones.

    Raises:
        PlanError: names the parameter.
    """
    written = dict.fromkeys(dests, 0)
    for op in ops_of_rank:
        written[op.dest] += volume(op.dest_box)
    for name in sorted(scales.keys() | {name for name, t in dests.items() if t.dtype == FP8}):
        dest, own = dests.get(name), scales.get(name)
        if dest is None or own is None or dest.dtype != FP8:
            found = dest if dest is None else dest.dtype
            raise PlanError(
                f"{name}: parameter {found}, scales {own if own is None else own.dtype}: a "
                f"parameter of {FP8} needs scales, and no other has any; mend the engine's "
                "scales()"
            )
        shape = blocks_shape(tuple(dest.shape))
        if dest.dim() < 2 or own.dtype != torch.float32 or tuple(own.shape) != shape:
            raise PlanError(
                f"{name} of shape {tuple(dest.shape)}: scales of {own.dtype}, shape "
                f"{tuple(own.shape)}: must be float32, one for each {ops.BLOCK} x {ops.BLOCK} "
                f"block, {shape}; other kinds of quantization are not offered"
            )
        if written[name] != dest.numel():
            raise PlanError(
                f"{name}: {dest.numel() - written[name]} elements of a quantized parameter have no "
                "counterpart in the checkpoint, but count in their blocks' scales: hold padded "
                "parameters in bfloat16"
            )


def blocks_shape(shape: Shape) -> Shape:
    """Returns the shape of the scales of a parameter of `shape`."""
    return (*shape[:-2], *(-(-size // ops.BLOCK) for size in shape[-2:]))


def blocks_of(box: Box) -> Box:
    """Returns the rectangle of the scales of the blocks that a parameter's rectangle touches."""
    touched = ((start // ops.BLOCK, -(-stop // ops.BLOCK)) for start, stop in box[-2:])
    return (*box[:-2], *touched)


def is_whole(box: Box, shape: Shape) -> bool:
    """Whether a rectangle consists of whole blocks of a parameter of `shape`."""
    return all(
        start % ops.BLOCK == 0 and (stop % ops.BLOCK == 0 or stop == size)
        for (start, stop), size in zip(box[-2:], shape[-2:], strict=True)
    )


class Quantization:
    """Fills quantized parameters out of sources that can all be read where they lie.

    Args:
        fills: of each parameter, which tile it.
        dests, scales: by parameter.
        wire_dtype: sources are cast to it before they are quantized.
        device: of the parameters.
        programs: as of `ops.rectangle_copies`.
    """

    def __init__(
        self,
        fills: Mapping[str, Sequence[Fill]],
        dests: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        wire_dtype: torch.dtype,
        device: torch.device,
        programs: int | None = None,
    ) -> None:
        straight: list[tuple[Tensor, Tensor, Tensor]] = []
        lanes: list[int] = []
        gathered: list[str] = []
        for name, own in fills.items():
            shape = tuple(dests[name].shape)
            if all(p.source.dtype == wire_dtype and is_whole(p.box, shape) for p in own):
                views = ((box_view(dests[name], p.box), p) for p in own)
                straight += [
                    (p.source, dest, box_view(scales[name], blocks_of(p.box))) for dest, p in views
                ]
                lanes += [p.lane for p in own]
            else:
                gathered.append(name)
        self._steps = [ops.quantized_copies(straight, device, lanes, programs)]
        sizes = {name: _aligned(dests[name].numel()) for name in gathered}
        self._scratch = torch.empty(max(sizes.values(), default=0), dtype=wire_dtype, device=device)
        for names in _groups(sizes, len(self._scratch)):
            places, stop = {}, 0
            for name in names:
                places[name] = _place(self._scratch, stop, dests[name])
                stop += sizes[name]
            pairs = [(p.source, box_view(places[n], p.box)) for n in names for p in fills[n]]
            lanes = [p.lane for n in names for p in fills[n]]
            triples = [(places[name], dests[name], scales[name]) for name in names]
            self._steps.append(ops.rectangle_copies(pairs, device, lanes, programs))
            self._steps.append(ops.quantized_copies(triples, device, programs=programs))

    @property
    def num_launches(self) -> int:
        """Kernels that a run starts."""
        return sum(step.num_launches for step in self._steps)

    @property
    def table_bytes(self) -> int:
        """Device memory of tables, and of the scratch: the largest gathered parameter's."""
        return self._scratch.nbytes + sum(step.table_bytes for step in self._steps)

    def run(self) -> None:
        """Fills all, on the device's current stream."""
        for step in self._steps:
            step.run()


class Arrivals:
    """Where quantized parameters that come in messages are gathered, and when they are complete.

    A parameter has its place in the scratch from the exchange that brings its first piece to the
    one that brings its last, in which it is quantized.

    Args:
        exchanges: this rank's.
        dests, scales: by parameter.
        wire_dtype: of the scratch.
        device: likewise.

    Attributes:
        landings: of each parameter, the scratch in its shape.
        extra_bytes: device memory of the scratch.
    """

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        dests: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        wire_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._dests, self._scales, self._device = dests, scales, device
        spans: dict[str, tuple[int, int]] = {}
        for number, exchange in enumerate(exchanges):
            for part in chain(*exchange.receives.values()):
                for name in {op.dest for op in part.pieces} & scales.keys():
                    spans[name] = spans.get(name, (number, number))[0], number
        starts, size = share_scratch(spans, {n: _aligned(dests[n].numel()) for n in spans})
        scratch = torch.empty(size, dtype=wire_dtype, device=device)
        self.extra_bytes = scratch.nbytes
        self.landings = {name: _place(scratch, starts[name], dests[name]) for name in spans}
        self._complete: dict[int, list[str]] = {}
        for name, (_, last) in spans.items():
            self._complete.setdefault(last, []).append(name)

    def complete(self, number: int) -> dict[str, Tensor]:
        """Returns the landings of the parameters whose last pieces an exchange brings."""
        return {name: self.landings[name] for name in self._complete.get(number, [])}

    def quantizing(self, landings: Mapping[str, Tensor], programs: int | None) -> ops.Copies:
        """Returns what quantizes these parameters, once they are complete."""
        triples = [(place, self._dests[n], self._scales[n]) for n, place in landings.items()]
        return ops.quantized_copies(triples, self._device, programs=programs)


def share_scratch(
    spans: Mapping[str, tuple[int, int]], sizes: Mapping[str, int]
) -> tuple[dict[str, int], int]:
    """Places buffers in one scratch; those that are in use at the same time do not overlap.

    Args:
        spans: first and last exchange in which each is in use, both included.
        sizes: elements of each.

    Returns:
        The start of each, and the size of the scratch, as first fit finds them.
    """
    starts: dict[str, int] = {}
    live: list[str] = []
    for name in sorted(spans, key=lambda name: spans[name]):
        live = sorted((n for n in live if spans[n][1] >= spans[name][0]), key=starts.__getitem__)
        start = 0
        for other in live:
            if start + sizes[name] <= starts[other]:
                break
            start = starts[other] + sizes[other]
        starts[name] = start
        live.append(name)
    return starts, max((starts[name] + sizes[name] for name in starts), default=0)


def _groups(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Yields the names in order, as many at a time as `most` holds."""
    group: list[str] = []
    for name, size in sizes.items():
        if group and sum(sizes[n] for n in group) + size > most:
            yield group
            group = []
        group.append(name)
    if group:
        yield group


def _place(scratch: Tensor, start: int, like: Tensor) -> Tensor:
    return scratch[start : start + like.numel()].view(like.shape)


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNED) * ALIGNED
