"""Finds the positions of agents' sequences that are computed as part of other sequences. No torch.

The sequences of an episode often begin with the same tokens: branches of a conversation, or a
conversation before and after its context was compacted. The episodes of a group begin with the same
prompt. A sequence that continues another sequence reads the keys of that sequence's first positions
instead of computing them again. Each position that is trained is stored by the sequence that trains
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from hybridrl.contracts.branches import NONE
from hybridrl.training.batches.packing import round_up

# Attention copies the keys and values that a sequence continues (attention.py). A unit may have at
# most this many rows of keys per position, so that the copies need little memory. With context
# parallelism, each rank makes all copies, so fewer are allowed.
KEY_ROWS_PER_POSITION = 4


def most_copied_rows(positions: int, cp: int) -> int:
    """Returns how many rows of keys a unit of this many positions may copy."""
    return (KEY_ROWS_PER_POSITION - 1) * positions // cp


@dataclass(frozen=True)
class Branches:
    """For each sequence, the earlier sequence that it continues.

    Args:
        parents: Index of the earlier sequence, or -1. It is smaller than the sequence's own index.
        shared: Number of leading positions that the two have in common, and that are not trained in
            the later sequence; 0 without an earlier one.
    """

    parents: tuple[int, ...]
    shared: tuple[int, ...]

    @staticmethod
    def of(
        samples: Sequence[int],
        sequences: Sequence[int],
        groups: Sequence[int],
        contexts: Sequence[int],
        context_lengths: Sequence[int],
        branch_of: Sequence[int],
        branch_tokens: Sequence[int],
    ) -> Branches:
        """Returns the branches of a batch from its columns.

        If a sequence has less in common with the sequences of the same sample, it continues the
        first sequence of its group that has the same context, up to the context's last token, which
        predicts the first sampled token.
        """
        places = {key: row for row, key in enumerate(zip(samples, sequences, strict=True))}
        first_with: dict[tuple[int, int, int], int] = {}
        parents, shared = [], []
        for row, sample in enumerate(samples):
            parent, tokens = places.get((sample, branch_of[row]), NONE), branch_tokens[row]
            if not 0 <= parent < row:
                parent, tokens = NONE, 0
            length = context_lengths[row]
            if contexts[row] != NONE:
                first = first_with.setdefault((groups[row], contexts[row], length), row)
                if first < row and length - 1 > tokens:
                    parent, tokens = first, length - 1
            parents.append(parent)
            shared.append(tokens)
        return Branches(tuple(parents), tuple(shared))

    @cached_property
    def roots(self) -> list[int]:
        """For each sequence, the first of the sequences that are connected with it."""
        found: list[int] = []
        for row, parent in enumerate(self.parents):
            found.append(row if parent == NONE else found[parent])
        return found

    def of_rows(self, rows: Sequence[int]) -> Branches:
        """Returns the branches among some sequences, which are numbered in the order of `rows`.

        A sequence whose parent is not among them continues the one with which it shares the most.
        """
        place = {row: number for number, row in enumerate(rows)}
        roots, connected = self.roots, dict[int, list[int]]()
        for row in rows:
            connected.setdefault(roots[row], []).append(row)
        parents, shared = [], []
        for row in rows:
            if self.parents[row] in place:
                parent, tokens = self.parents[row], self.shared[row]
            else:
                earlier = [other for other in connected[roots[row]] if other < row]
                parent, tokens = self._nearest(row, earlier)
            parents.append(place.get(parent, NONE))
            shared.append(tokens)
        return Branches(tuple(parents), tuple(shared))

    def added(self, row: int, rows: Sequence[int]) -> int:
        """Returns how many positions a sequence shares with earlier sequences `rows`."""
        if self.parents[row] in rows:
            return self.shared[row]
        return self._nearest(row, rows)[1]

    def _nearest(self, row: int, others: Sequence[int]) -> tuple[int, int]:
        """Returns which other sequence shares most, directly or through a third, and how much."""
        best, most = NONE, 0.0
        if self.parents[row] == NONE:
            return best, 0
        own = self._ancestors(row)
        for other in others:
            others_own = self._ancestors(other)
            common = max((min(own[a], others_own[a]) for a in own if a in others_own), default=0)
            if common > most:
                best, most = other, common
        return best, int(most)

    def _ancestors(self, row: int) -> dict[int, float]:
        """Returns the sequences that a sequence continues, with the shared positions of each."""
        found, most = {row: inf}, inf
        while self.parents[row] != NONE:
            most = min(most, self.shared[row])
            row = self.parents[row]
            found[row] = most
        return found


@dataclass(frozen=True)
class BranchUnit:
    """Connected sequences that are packed into the same micro-batch.

    Args:
        lengths: Number of tokens in each sequence, including padding.
        shared: For each sequence, number of leading tokens that another sequence stores.
        own: Number of positions of each sequence, including padding.
    """

    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    shared: tuple[int, ...]
    own: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.own)

    @property
    def key_rows(self) -> int:
        """Number of rows of keys that attention reads."""
        pairs = zip(self.shared, self.own, strict=True)
        return sum(shared + own for shared, own in pairs)

    @property
    def attended(self) -> int:
        """Twice the number of position pairs in which one position attends to the other."""
        pairs = zip(self.lengths, self.shared, strict=True)
        return sum(length * length - shared * shared for length, shared in pairs)


@dataclass(frozen=True)
class BranchGroup:
    """Connected sequences, which may be divided into several units.

    Args:
        lengths: Number of tokens in each sequence of the batch, including padding.
    """

    samples: Sequence[int]
    branches: Branches
    lengths: Sequence[int]
    pad_each: int

    def filled_units(self, most: int, most_key_rows: int) -> list[BranchUnit]:
        """Fills one unit after another, up to both limits and `most_copied_rows`."""
        units: list[BranchUnit] = []
        members: list[int] = []
        shared: list[int] = []
        tokens = copied = 0
        cp = max(self.pad_each // 2, 1)
        for row in self.samples:
            saved = self.branches.added(row, members)
            own = self._own(row, saved)
            positions, copies = tokens + own, copied + saved
            is_full = positions > most or positions + copies > most_key_rows
            if members and (is_full or copies > most_copied_rows(positions, cp)):
                units.append(self._unit(members, shared))
                members, shared = [], []
                saved, own = 0, self._own(row, 0)
                positions, copies = own, 0
            members.append(row)
            shared.append(saved)
            tokens, copied = positions, copies
        return [*units, self._unit(members, shared)]

    def even_units(self, most: int, most_key_rows: int) -> list[BranchUnit]:
        return self.filled_units(most, most_key_rows)

    def _own(self, row: int, shared: int) -> int:
        return round_up(self.lengths[row] - shared, self.pad_each)

    def _unit(self, members: Sequence[int], shared: Sequence[int]) -> BranchUnit:
        own = tuple(self._own(row, saved) for row, saved in zip(members, shared, strict=True))
        lengths = tuple(self.lengths[row] for row in members)
        return BranchUnit(tuple(members), lengths, tuple(shared), own)
