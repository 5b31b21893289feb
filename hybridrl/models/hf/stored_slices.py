"""HF coordinates that are slices of a larger tensor in the files of a model.

Some models store all experts of a layer in one tensor. A weight table names the part of one expert:
`NAME[i]` is element i of tensor NAME along dim 0, and `NAME[i].T` is this element, a matrix,
transposed. Only code that reads or writes files, or passes HF tensors to a library, needs the
tensors as they are stored; everything else handles a slice as it handles a tensor. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hybridrl.models.boxes import Box, Shape

_SLICE = re.compile(r"(?P<name>[^\[\]]+)\[(?P<index>\d+)\](?P<transposed>\.T)?")


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """Where the files store a tensor of the weight table.

    Args:
        index: Index along its dim 0; None if the whole tensor is meant.
        is_transposed: Whether the stored matrix is the transpose.
    """

    name: str
    index: int | None = None
    is_transposed: bool = False

    @staticmethod
    def of(hf: str) -> StoredSlice:
        """Returns the stored tensor, and the slice of it, that an HF coordinate names."""
        found = _SLICE.fullmatch(hf)
        if found is None:
            return StoredSlice(hf)
        return StoredSlice(found["name"], int(found["index"]), found["transposed"] is not None)

    def box(self, box: Box) -> Box:
        """Returns the rectangle of the stored tensor that holds a rectangle of the slice."""
        if self.index is None:
            return box
        return ((self.index, self.index + 1), *(box[::-1] if self.is_transposed else box))

    def shape(self, shape: Shape, num_slices: int) -> Shape:
        if self.index is None:
            return shape
        return (num_slices, *(shape[::-1] if self.is_transposed else shape))


def stored_name(hf: str) -> str:
    return StoredSlice.of(hf).name


def stored_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Returns the shapes of the tensors that the files contain."""
    counts = slice_counts(shapes)
    found: dict[str, Shape] = {}
    for hf, shape in shapes.items():
        place = StoredSlice.of(hf)
        found[place.name] = place.shape(shape, counts[place.name])
    return found


def slice_counts(names: Iterable[str]) -> dict[str, int]:
    """Returns the number of slices of each stored tensor; 1 for a tensor without slices."""
    found: dict[str, int] = {}
    for hf in names:
        name = stored_name(hf)
        found[name] = found.get(name, 0) + 1
    return found
