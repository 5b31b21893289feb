"""Texts of many rows of numbers at once, as Python writes tuples: "(3, 5)", "(3,)", "()". No torch.

What a run's identity is a digest of are such texts; writing them one by one took 20 s of each rank
for a million prompts. Each number's text stands in a table, in 8 bytes with what follows it; the
cells of many rows are joined, and the bytes that are left over taken out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

MOST_IN_TABLE = 1_000_000  # 6 digits and what separates them are the 8 bytes of a cell
FEWEST = 8  # of the numbers that are written, for one of the table: fewer are not worth one


class TupleTexts:
    """Writes rows of numbers.

    Args:
        largest: of the numbers; others are written too, one by one.
        num: of numbers that will be written, about; None: many.
    """

    def __init__(self, largest: int, num: int | None = None) -> None:
        self._num = largest + 1
        is_worth_it = num is None or num >= FEWEST * self._num
        has_table = is_worth_it and 0 < self._num <= MOST_IN_TABLE
        self._cells = _cells(self._num) if has_table else None

    def __call__(self, numbers: NDArray[np.int32], lengths: NDArray[np.int64]) -> list[bytes]:
        """Returns the text of each row.

        Args:
            numbers: of all rows, one after the other.
            lengths: of each row.
        """
        if self._cells is None or not len(lengths) or not self._has_all(numbers, lengths):
            rows = np.split(numbers, np.cumsum(lengths)[:-1]) if len(lengths) else []
            return [str(tuple(row.tolist())).encode() for row in rows]
        places = numbers.astype(np.int64)
        places[np.cumsum(lengths) - 1] += self._num
        joined = self._cells[places].tobytes().translate(None, b"\0")
        texts = joined.split(b"\n")[:-1]
        return [b"(%b)" % text if b"," in text else b"(%b,)" % text for text in texts]

    def _has_all(self, numbers: NDArray[np.int32], lengths: NDArray[np.int64]) -> bool:
        return bool(lengths.min() > 0 and numbers.min() >= 0 and numbers.max() < self._num)


def _cells(num: int) -> NDArray[np.uint64]:
    """Returns of each number its text within a row, then of each its text at a row's end."""
    texts = [b"%d, " % number for number in range(num)]
    texts += [b"%d\n" % number for number in range(num)]
    return np.array(texts, "S8").view(np.uint64)


def runs(lengths: NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Yields where runs of rows begin and end that have together at most so many numbers, or are
    one row.
    """
    ends, start = np.cumsum(lengths), 0
    while start < len(lengths):
        before = int(ends[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield start, end
        start = end
