"""Reads and writes tensors in HF directories, rectangle by rectangle.

Invariant: in addition to the destination, at most one tensor or rectangle is in memory; while
writing, also the tensors of incomplete groups (`HfPlaces.together`). Every rank reads the headers
of all files (headers.py), so all ranks reject the same directories.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.wrapped_models import SHORT_VISUAL, VISUAL, WRAPPED_PREFIX, name_in_files
from hybridrl.errors import CheckpointError
from hybridrl.models.boxes import Box, Shape, box_view
from hybridrl.models.family import is_kept_in_fp32
from hybridrl.models.hf.directory import write_side_files
from hybridrl.models.hf.expert_files import (
    StackPlace,
    expert_stacks,
    has_transposed_stacks,
    transposed,
)
from hybridrl.models.hf.headers import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    BLOCKS,
    INDEX_FILE,
    SCALES,
    SINGLE_FILE,
    TORCH_NAMES,
    HfHeaders,
    open_shard,
)
from hybridrl.models.hf.mxfp4 import dequantized
from hybridrl.models.hf.passed_over import passed_over
from hybridrl.models.hf.stored_slices import StoredSlice, stored_name, stored_shapes
from hybridrl.models.weights import RankLayout, Region, check_tensors

MAX_SHARD_BYTES = 5 * 10**9
CARD = "README.md"  # name of model cards on the hub
_KINDS = {name: kind for kind, name in TORCH_NAMES.items()}


def stored_as(hf_name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the data type of an HF tensor in a model of type `dtype`."""
    return torch.float32 if is_kept_in_fp32(hf_name) else dtype


class HfCheckpoint(HfHeaders):
    """HF directory whose tensors can be read by rectangle; see `HfHeaders` for the errors."""

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: getattr(torch, dtype) for name, dtype in self.dtype_names.items()}


class KeptTensors:
    """The tensors in an HF directory that training passes over; exports contain them unchanged.

    Attributes:
        is_wrapped: Whether the model is the text part of a multimodal model; its tensors then have
            a prefix in files.
    """

    def __init__(self, directory: str | Path, known: Collection[str]) -> None:
        self._checkpoint = HfCheckpoint(directory)
        stored = self._checkpoint.stored_names.values()
        self.is_wrapped = any(name.startswith(WRAPPED_PREFIX) for name in stored)
        # A tower that this model passes over keeps its short prefix in files.
        self._names = {
            stored if stored.startswith(SHORT_VISUAL) else name: name
            for name in passed_over(self._checkpoint.shapes, known)
            for stored in (self._checkpoint.stored_names.get(name, name),)
        }
        names = self._names.items()
        self.shapes: dict[str, Shape] = {kept: self._checkpoint.shapes[n] for kept, n in names}
        self.dtypes = {kept: self._checkpoint.dtypes[name] for kept, name in names}

    def read(self, name: str) -> Tensor:
        """Returns one whole tensor. Raises CheckpointError if its file is missing or damaged."""
        with open_shard(self._checkpoint.files[self._names[name]], "pt") as opened:
            return opened.get_tensor(name)  # type: ignore[no-any-return]


def load_hf(
    directory: str | Path,
    layout: RankLayout,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    *,
    missing_ok: Collection[str] = (),
) -> frozenset[str]:
    """Reads a rank's part of an HF checkpoint into the rank's tensors, cast to their types.

    Args:
        tensors: Local tensors by the layout's names. They are written in place; padding is set to
            zero.
        shapes: Shape of every HF tensor of the model, as returned by `hf_shapes`; the directory
            must contain exactly these tensors.
        missing_ok: HF tensors that may be absent (such as a critic's `score.weight`) and are then
            left unchanged.

    Returns:
        The names among `missing_ok` that were absent.

    Raises CheckpointError, naming file or tensor, for any that is missing, unexpected, damaged or
    of the wrong shape; ModelError if `tensors` do not match the layout.
    """
    check_tensors(layout, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    checkpoint = HfCheckpoint(directory)
    checkpoint.check(shapes, missing_ok)
    absent = frozenset(name for name in shapes if stored_name(name) not in checkpoint.shapes)
    with torch.no_grad():
        for name, box in layout.padding:
            box_view(tensors[name], box).zero_()
        for file in sorted(set(checkpoint.files.values())):
            regions = [r for r in layout.regions if checkpoint.files.get(stored_name(r.hf)) == file]
            if not regions:
                continue
            with ExitStack() as stack:
                reader = _Reader(checkpoint, stack)
                for region in regions:
                    read = reader.read(region.hf, region.hf_box)
                    box_view(tensors[region.local], region.local_box).copy_(read)
            _refuse_non_finite(file, regions, tensors)
    return absent


class _Reader:
    """Reads rectangles of a checkpoint's tensors, and keeps files open until `stack` closes."""

    def __init__(self, checkpoint: HfCheckpoint, stack: ExitStack) -> None:
        self._checkpoint, self._stack = checkpoint, stack
        self._opened: dict[Path, Any] = {}

    def read(self, hf: str, box: Box) -> Tensor:
        """Returns a rectangle of the tensor that an HF coordinate names."""
        if (stacked := self._checkpoint.in_stacks.get(hf)) is not None:
            found = self._slice(stacked.stack, stacked.box(box))[0]
            return found.T if stacked.is_transposed else found
        place = StoredSlice.of(hf)
        if place.name in self._checkpoint.quantized:
            return self._dequantized(place, box)
        read = self._slice(place.name, place.box(box))
        if place.index is not None:
            read = read[0]
        return read.T if place.is_transposed else read

    def _dequantized(self, place: StoredSlice, box: Box) -> Tensor:
        """Reads whole blocks of the rows. MXFP4 stores matrices transposed (mxfp4.py)."""
        assert place.index is not None
        rows, columns = box if place.is_transposed else box[::-1]
        expert = place.index, place.index + 1
        packed = 0, self._checkpoint.shapes[place.name][1] // BLOCK_SIZE
        blocks = self._slice(f"{place.name}{BLOCKS}", (expert, rows, packed, (0, BLOCK_BYTES)))[0]
        scales = self._slice(f"{place.name}{SCALES}", (expert, rows, packed))[0]
        read = dequantized(blocks, scales)[:, slice(*columns)]
        return read if place.is_transposed else read.T

    def _slice(self, name: str, box: Box) -> Tensor:
        file = self._checkpoint.files[name]
        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(open_shard(file, "pt"))
        part = self._opened[file].get_slice(self._checkpoint.stored_names.get(name, name))
        read: Tensor = part[tuple(slice(start, stop) for start, stop in box)]
        return read


def _refuse_non_finite(
    file: Path, regions: Sequence[Region], tensors: Mapping[str, Tensor]
) -> None:
    """Raises CheckpointError if a file contains a NaN or an infinity.

    The sum of a tensor with such an element is never finite, so only tensors with a non-finite sum
    are examined further (sums of finite elements may also overflow). All sums are copied from the
    device in one transfer.
    """
    views = [box_view(tensors[region.local], region.local_box) for region in regions]
    sums = torch.stack([view.sum() for view in views]).tolist()
    for region, view, total in zip(regions, views, sums, strict=True):
        if math.isfinite(total) or bool(view.isfinite().all()):
            continue
        places = (~view.isfinite()).nonzero()
        index = places[0].tolist()
        at = [i + start for i, (start, _) in zip(index, region.hf_box, strict=True)]
        raise CheckpointError(
            f"tensor {region.hf} in {file}",
            f"{float(view[tuple(index)])} at {at}, one of {len(places)} such elements",
            f"numbers that are finite in {str(view.dtype).removeprefix('torch.')}",
            "Download or export the weights again.",
        )


class HfPlaces:
    """Computes the offsets of tensors in the files of an HF directory from their shapes.

    Args:
        shapes: Shape of every HF tensor of the model, in file order. Slices of one tensor
            (stored_slices.py) are written to one tensor.
        dtype: Stored type, except for tensors kept in fp32.
        max_shard_bytes: Maximum size of a file; only a single larger tensor may exceed it.
        kept: Tensors to write in addition, with their own types.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        max_shard_bytes: int,
        config: Mapping[str, Any],
        kept: KeptTensors | None = None,
    ) -> None:
        stored = stored_shapes(shapes)
        self._stacked: dict[str, StackPlace] = {}
        # For a stack and an expert: the expert's part of the stack, and the matrices that it
        # contains so far.
        self._incomplete: dict[tuple[str, int], tuple[Tensor, set[str]]] = {}
        if has_transposed_stacks(config):
            # transformers treats square stacks as not transposed.
            self._stacked, stacks = expert_stacks(
                stored, lambda _, plain: plain != transposed(plain)
            )
            plain = {name: shape for name, shape in stored.items() if name not in self._stacked}
            stored = {**plain, **stacks}
        dtypes = {name: stored_as(name, dtype) for name in stored}
        if kept is not None:
            shapes, stored = {**shapes, **kept.shapes}, {**stored, **kept.shapes}
            dtypes |= kept.dtypes
        self._shapes, self._stored, self._dtypes = dict(shapes), stored, dtypes
        is_wrapped = kept is not None and kept.is_wrapped
        is_wrapped |= any(name.startswith(VISUAL) for name in shapes)
        others = () if kept is None else kept.shapes
        # Name of each tensor in the files.
        self._names = {
            name: name_in_files(name, config) if is_wrapped and name not in others else name
            for name in stored
        }
        shards: list[list[str]] = [[]]
        filled = 0
        for name, shape in stored.items():
            num_bytes = torch.Size(shape).numel() * dtypes[name].itemsize
            if shards[-1] and filled + num_bytes > max_shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(name)
            filled += num_bytes
        total = len(shards)
        files = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
        files = [SINGLE_FILE] if total == 1 else files
        # For each file: the header, and the size of the tensors in bytes.
        self._headers: dict[str, tuple[bytes, int]] = {}
        self._offsets: dict[str, tuple[str, int]] = {}
        for file, names in zip(files, shards, strict=True):
            self._lay_out(file, names)

    def _lay_out(self, file: str, names: Sequence[str]) -> None:
        """Builds a file's header, with which tensors can be written one at a time."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts, end = {}, 0
        for name in names:
            starts[name] = end
            dtype = self._dtypes[name]
            end += torch.Size(self._stored[name]).numel() * dtype.itemsize
            header[self._names[name]] = {
                "dtype": _KINDS[_dtype_name(dtype)],
                "shape": list(self._stored[name]),
                "data_offsets": [starts[name], end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        head = len(text).to_bytes(8, "little") + text
        self._headers[file] = head, end
        self._offsets.update({name: (file, len(head) + start) for name, start in starts.items()})

    def create(self, directory: Path) -> None:
        """Writes the index, and creates every file with its header and final length."""
        for file, (head, num_bytes) in self._headers.items():
            with (directory / file).open("wb") as opened:
                opened.write(head)
                opened.truncate(len(head) + num_bytes)
        if len(self._headers) > 1:
            weight_map = {self._names[name]: file for name, (file, _) in self._offsets.items()}
            size = sum(num_bytes for _, num_bytes in self._headers.values())
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def together(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """Returns the tensors in groups that one process must write; most groups are one tensor."""
        groups: dict[object, list[str]] = {}
        for name in names:
            stacked = self._stacked.get(name)
            key = name if stacked is None else (stacked.stack, stacked.expert)
            groups.setdefault(key, []).append(name)
        return [tuple(group) for group in groups.values()]

    def write(self, directory: Path, name: str, tensor: Tensor) -> tuple[str, ...]:
        """Writes one tensor, cast to its stored type, after `create`.

        Several processes may write different tensors at the same time, if one of them writes all
        tensors of each group (`together`). A group is written when its last tensor is passed.

        Returns:
            The names of the tensors that are now in the file.
        """
        if tuple(tensor.shape) != self._shapes[name]:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, announced {self._shapes[name]}")
        if (stacked := self._stacked.get(name)) is not None:
            return self._write_stacked(directory, name, stacked, tensor)
        place = StoredSlice.of(name)
        data = tensor.detach().to(device="cpu", dtype=self._dtypes[place.name])
        data = (data.T if place.is_transposed else data).contiguous()
        self._write_at(directory, place.name, place.index or 0, data)
        return (name,)

    def _write_stacked(
        self, directory: Path, name: str, place: StackPlace, tensor: Tensor
    ) -> tuple[str, ...]:
        """Collects an expert's matrices of a stack, and writes them when they are complete.

        Transposed matrices interleave in each row of the file. Together, they are one range of it;
        a single matrix would have to be inserted into rows that are already written.
        """
        key = place.stack, place.expert
        if key not in self._incomplete:
            shape, dtype = self._stored[place.stack][1:], self._dtypes[place.stack]
            self._incomplete[key] = torch.empty(shape, dtype=dtype), set()
        part, names = self._incomplete[key]
        matrix = tensor.detach().to(part.dtype)
        matrix = (matrix.T if place.is_transposed else matrix).contiguous()
        _, *box = place.box(((0, tensor.size(0)), (0, tensor.size(1))))
        box_view(part, tuple(box)).copy_(matrix)
        names.add(name)
        if sum(math.prod(self._shapes[one]) for one in names) < part.numel():
            return ()
        del self._incomplete[key]
        self._write_at(directory, place.stack, place.expert, part)
        return tuple(names)

    def _write_at(self, directory: Path, name: str, index: int, data: Tensor) -> None:
        """Writes the part with this index of a stored tensor; all parts have the same size."""
        file, offset = self._offsets[name]
        with (directory / file).open("r+b") as opened:
            opened.seek(offset + index * data.nbytes)
            opened.write(data.reshape(-1).view(torch.uint8).numpy().data)


class HfWriter:
    """Writes an HF directory one tensor at a time, and renames it when it is complete.

    Use it as a context manager: normal exit completes the directory, and an exception removes what
    was written. Tensors may be written in any order. Other processes that can access the `partial`
    directory may write some tensors with `HfPlaces.write`.

    Args:
        dtype: Stored type, except for tensors kept in fp32.
        max_shard_bytes: Maximum size of a file; only a single larger tensor may exceed it.

    Raises CheckpointError if the directory exists and is not empty.
    """

    def __init__(
        self,
        directory: str | Path,
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        config: Mapping[str, Any],
        *,
        side_files: Path | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        card: str | None = None,
        kept: KeptTensors | None = None,
    ) -> None:
        self.directory = Path(directory)
        if self.directory.exists() and (
            not self.directory.is_dir() or any(self.directory.iterdir())
        ):
            raise CheckpointError(
                str(self.directory),
                "a directory that is not empty" if self.directory.is_dir() else "a file",
                "a new or empty directory",
                "Choose another directory or remove this one.",
            )
        self._missing = {*shapes, *(() if kept is None else kept.shapes)}
        self._places = HfPlaces(shapes, dtype, max_shard_bytes, config, kept)
        self.partial = self.directory.with_name(f".{self.directory.name}.{os.getpid()}.partial")
        self.partial.mkdir(parents=True)
        try:
            write_side_files(self.partial, config, _dtype_name(dtype), side_files)
            if card is not None:
                (self.partial / CARD).write_text(card, encoding="utf-8")
            self._places.create(self.partial)
        except BaseException:
            shutil.rmtree(self.partial)
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        self.wrote(self._places.write(self.partial, name, tensor))

    def wrote(self, names: Collection[str]) -> None:
        """Records that other processes have written these tensors."""
        self._missing.difference_update(names)

    def complete(self) -> None:
        """Renames the directory to its final name; all tensors must have been written."""
        if self._missing:
            raise ValueError(f"never written: {sorted(self._missing)[:3]}")
        for file in self.partial.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        self.partial.rename(self.directory)

    def discard(self) -> None:
        """Removes the partial directory, unless it was completed."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def __enter__(self) -> HfWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.complete()
        finally:
            self.discard()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
