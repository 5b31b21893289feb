"""Defines the data contract: the stages of a step's data as frozen types that check their values.

    Prompt -> Rollout -> RolloutBatch -> ScoredBatch -> TrainBatch -> MicroBatch

A batch of B samples is ragged and flat: `tokens_T` concatenates the prompt and response tokens of
all samples, and `lengths_B` and `prompt_lengths_B` contain their lengths. Entry t of a per-token
column describes token t, given the earlier tokens of the same sample; it is zero for tokens that
were not sampled (prompts, and what an environment inserted). Blobs are ragged arrays that only some
models understand (blobs.py). Batches are on the CPU, so that no check waits for a device. A
`MicroBatch` packs several samples and is moved to the device.

Invariant: every instance of these types has passed all checks and never changes.

Every rank has the per-sample columns (B,) for all samples of a step. Per-token columns (T,) and
blobs cover only the H samples whose tokens are on this rank; if `holders` is None, H = B. R is the
number of sampled tokens. With agents, a sample may consist of several sequences
(`SampleSequences`): B then counts sequences, and the rows of a sample have the same number, group
and reward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from hybridrl.contracts.checks import (
    FLAG,
    INTEGER,
    LENGTHS,
    NO_MASK,
    NUMBER,
    RESPONSE,
    TOKEN,
    TOKEN_FLAG,
    WIDE_RESPONSE,
    WIDE_TOKENS,
    BatchError,
    Producer,
    check,
    check_lengths,
    check_observed,
    check_observed_counts,
    columns_of,
    holds,
)
from hybridrl.contracts.holders import Holders
from hybridrl.contracts.micro_batch import MicroBatch
from hybridrl.contracts.prompts import Content, Prompt, Rollout, in_gaps
from hybridrl.contracts.ragged import (
    Blob,
    check_blob,
    flatten,
    observed_mask,
    rollout_columns,
    row_places,
    starts_of,
)
from hybridrl.contracts.response_contents import RESPONSE_CONTENTS, without_contents

__all__ = [
    "GREEDY",
    "LENGTHS",
    "UNRELATED",
    "BatchError",
    "Blob",
    "MicroBatch",
    "Producer",
    "Prompt",
    "Rollout",
    "RolloutBatch",
    "SampleSequences",
    "SampleValues",
    "ScoredBatch",
    "TrainBatch",
]

UNRELATED = "unrelated"
"""Reward part that is 1 for responses to an unrelated prompt; training ignores these responses."""
GREEDY = "greedy"
"""Reward part with the reward of the greedy response to the same prompt; not a term of the sum."""


@dataclass(frozen=True, eq=False)
class SampleSequences:
    """Maps values of E samples to values of B sequences, and back.

    Most samples are one sequence of tokens. A sample from an agent may consist of several, such as
    the conversations of subagents, or a conversation before and after its context was compacted.
    They are consecutive in a batch. Rewards, advantages and metrics have one value per sample;
    models and losses read sequences.

    `counts_E` are the numbers of sequences of each sample, (E,) int64; None if all are 1.
    """

    counts_E: Tensor | None

    @staticmethod
    def of(sample_ids_B: Tensor, sequence_B: Tensor | None) -> SampleSequences:
        if sequence_B is None:
            return SampleSequences(None)
        return SampleSequences(sample_ids_B.unique_consecutive(return_counts=True)[1])

    @cached_property
    def last_E(self) -> Tensor:
        """Index of the last sequence of each sample; do not call if `counts_E` is None."""
        assert self.counts_E is not None
        return self.counts_E.cumsum(0) - 1

    def of_samples(self, value_B: Tensor) -> Tensor:
        """Returns the value of each sample's last sequence: (E,)."""
        return value_B if self.counts_E is None else value_B[self.last_E]

    def summed(self, value_B: Tensor) -> Tensor:
        """Returns the sum over each sample's sequences, in the dtype of the values: (E,)."""
        if self.counts_E is None:
            return value_B
        index_B = torch.repeat_interleave(self.counts_E)
        zeros_E = torch.zeros(len(self.counts_E), dtype=value_B.dtype)
        return zeros_E.index_add(0, index_B, value_B)

    def of_sequences(self, value_E: Tensor) -> Tensor:
        """Returns each sample's value for all its sequences: (B,)."""
        return value_E if self.counts_E is None else value_E.repeat_interleave(self.counts_E)

    def part_sizes(self, sizes: list[int]) -> list[int]:
        """Returns the number of sequences in consecutive parts with these numbers of samples."""
        if self.counts_E is None:
            return sizes
        return [int(part_E.sum()) for part_E in self.counts_E.split(sizes)]


@dataclass(frozen=True, eq=False, kw_only=True)
class SampleValues:
    """Values of a batch per sample: lengths summed over its sequences, `finished_B` of the last."""

    sample_ids_B: Tensor
    group_B: Tensor
    reward_B: Tensor
    reward_parts: Mapping[str, Tensor]
    response_lengths_B: Tensor
    finished_B: Tensor

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids_B)


@dataclass(frozen=True, eq=False, kw_only=True)
class RolloutBatch:
    """B sampled responses with their prompts.

    Attributes:
        sample_ids_B: Number of each sample, unique in the run. Consecutive sequences of the same
            sample have the same number.
        group_B: Index of the prompt within the step; samples for the same prompt have the same
            index.
        behaviour_logp_T: Log-probabilities during sampling, (T,) float32.
        versions_B: Version of the weights that sampled the response; the oldest of several.
        finished_B: Whether the response ended with a stop token, not at a limit.
        observed_T: Whether the token came from an environment, (T,) bool; None without
            environments.
        versions_T: Version that sampled each token, (T,) int64; None if each sample has only one
            version.
        num_observed_B: Number of observed tokens in each response; set only together with
            `holders`.
        sequence_B: Index of each sequence among the sequences of its sample; None without agents,
            because every sample is then one sequence. With agents, each sequence has its own
            context in place of the prompt's tokens; `prompt_lengths_B` counts these tokens.
        branch_of_B: `sequence_B` of the earlier sequence of the same sample that begins like this
            sequence, or -1; None without agents.
    """

    prompts: tuple[Prompt, ...]
    sample_ids_B: Tensor = field(metadata=holds(INTEGER))
    group_B: Tensor = field(metadata=holds(INTEGER))
    tokens_T: Tensor = field(metadata=holds(TOKEN))
    lengths_B: Tensor
    prompt_lengths_B: Tensor
    behaviour_logp_T: Tensor = field(metadata=holds(RESPONSE))
    versions_B: Tensor = field(metadata=holds(INTEGER))
    finished_B: Tensor = field(metadata=holds(FLAG))
    producer: Producer
    observed_T: Tensor | None = field(default=None, metadata=holds(TOKEN_FLAG))
    versions_T: Tensor | None = field(default=None, metadata=holds(TOKEN))
    num_observed_B: Tensor | None = field(default=None, metadata=holds(INTEGER))
    sequence_B: Tensor | None = field(default=None, metadata=holds(INTEGER))
    branch_of_B: Tensor | None = field(default=None, metadata=holds(INTEGER))
    branch_tokens_B: Tensor | None = field(default=None, metadata=holds(INTEGER))
    context_B: Tensor | None = field(default=None, metadata=holds(INTEGER))
    holders: Holders | None = None
    blobs: Mapping[str, Blob] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_lengths()
        for name, value in self.columns().items():
            self._check_column(name, value, self.producer)
        for name, blob in self.blobs.items():
            check_blob(name, blob, self.lengths_B, self.rows_H, self.producer)
        if bool(self.tokens_T.lt(0).any()):
            got = f"returned the token {int(self.tokens_T.min())}"
            raise BatchError(self.producer, "tokens_T", got, "token ids of at least 0")

    def _check_lengths(self) -> None:
        has_contexts, producer = self.sequence_B is not None, self.producer
        check_lengths(self.prompts, self.lengths_B, self.prompt_lengths_B, has_contexts, producer)
        counts_B = self.num_observed_B
        if counts_B is not None:
            most_B, has_holders = self.lengths_B - self.prompt_lengths_B, self.holders is not None
            check_observed_counts(counts_B, most_B, has_holders, producer)
        if self.observed_T is None:
            return
        if counts_B is not None:
            found_B = torch.bincount(self.sample_index_T[self.observed_T], minlength=len(counts_B))
            if not torch.equal(found_B[self.rows_H], counts_B[self.rows_H]):
                got = "returned counts that differ from those in observed_T"
                expected = "the number of observed tokens of each response"
                raise BatchError(producer, "num_observed_B", got, expected)
        sizes = self.lengths_H, self.of_held(self.prompt_lengths_B)
        check_observed(self.observed_T, *sizes, producer)

    def _check_column(self, name: str, value: object, producer: Producer) -> None:
        column = columns_of(type(self))[name]
        size = self.num_tokens if column.per_token else self.num_samples
        mask_T = self.response_mask_T if column.response_only else NO_MASK
        check(value, name, column, size, producer, mask_T)

    def columns(self) -> dict[str, Tensor]:
        """Returns all columns that are set, by name."""
        found = ((name, getattr(self, name)) for name in columns_of(type(self)))
        return {name: value for name, value in found if value is not None}

    @classmethod
    def from_rollouts(
        cls, rollouts: Sequence[Rollout], groups: Sequence[int], producer: Producer
    ) -> RolloutBatch:
        """Builds a batch from rollouts. `groups[i]` is the prompt index of rollout i."""
        return RolloutBatch(**rollout_columns(rollouts, groups, producer))

    @property
    def num_samples(self) -> int:
        """Number of samples, B; with agents, the number of sequences."""
        return len(self.prompts)

    @cached_property
    def sequences(self) -> SampleSequences:
        return SampleSequences.of(self.sample_ids_B, self.sequence_B)

    @property
    def prompt_group_B(self) -> Tensor:
        """Index of each row's prompt: rows with the same index begin with the same tokens. With
        agents, the contexts of all rows differ; `branch_of_B` says what they have in common.
        """
        return self.group_B if self.sequence_B is None else torch.arange(self.num_samples)

    @cached_property
    def rows_H(self) -> Tensor:
        """Indices of the samples whose tokens are on this rank, in ascending order: (H,) int64."""
        return torch.arange(self.num_samples) if self.holders is None else self.holders.rows_H

    @property
    def lengths_H(self) -> Tensor:
        """Number of tokens in each sample on this rank: (H,) int64."""
        return self.of_held(self.lengths_B)

    @property
    def response_lengths_H(self) -> Tensor:
        """Number of sampled tokens in each sample on this rank: (H,) int64; the sum is R."""
        return self.of_held(self.response_lengths_B)

    @cached_property
    def num_tokens(self) -> int:
        """Number of prompt and response tokens on this rank, T."""
        return int(self.lengths_H.sum())

    @cached_property
    def response_lengths_B(self) -> Tensor:
        """Number of sampled tokens in each sample, without observations: (B,) int64."""
        lengths_B = self.lengths_B - self.prompt_lengths_B
        if self.num_observed_B is not None:
            return lengths_B - self.num_observed_B
        if self.observed_T is None:
            return lengths_B
        observed_N = self.sample_index_T[self.observed_T]
        return lengths_B - torch.bincount(observed_N, minlength=self.num_samples)

    @property
    def observed_lengths_B(self) -> Tensor:
        """Number of observed tokens (from an environment) in each response: (B,) int64."""
        return self.lengths_B - self.prompt_lengths_B - self.response_lengths_B

    @cached_property
    def offsets(self) -> Tensor:
        """Start in `tokens_T` of each sample on this rank, followed by T: (H + 1,) int64."""
        return starts_of(self.lengths_H)

    @cached_property
    def sample_index_T(self) -> Tensor:
        """For each token, the batch index of its sample: (T,) int64."""
        return torch.repeat_interleave(self.rows_H, self.lengths_H)

    @cached_property
    def response_mask_T(self) -> Tensor:
        """Whether each token is learned, because it was sampled or demonstrated: (T,) bool."""
        starts_H = self.offsets[:-1] + self.of_held(self.prompt_lengths_B)
        starts_T = torch.repeat_interleave(starts_H, self.lengths_H)
        mask_T = torch.arange(self.num_tokens) >= starts_T
        return mask_T if self.observed_T is None else mask_T & ~self.observed_T

    def contents_of(self, sample: int) -> tuple[Content, ...]:
        """Returns the contents of a sample on this rank, at their places among its tokens."""
        # The sequences of agents do not begin with the prompt of their row.
        found = self.prompts[sample].contents if self.sequence_B is None else ()
        blob = self.blobs.get(RESPONSE_CONTENTS)
        if blob is None:
            return found
        place_1 = self.places_of(torch.tensor([sample]))
        rows_N = row_places(self.of_held(blob.num_rows_B), place_1)
        saved = blob.values_N[rows_N].numpy()
        return found + without_contents({RESPONSE_CONTENTS: saved})[1]

    def of_held(self, value_B: Tensor) -> Tensor:
        """Selects the values of a per-sample column for the samples on this rank: (H,)."""
        return value_B if self.holders is None else value_B[self.rows_H]

    def completed(self, value_H: Tensor) -> Tensor:
        """Returns all samples' values, given those of this rank; collective with `holders`."""
        return value_H if self.holders is None else self.holders.completed(value_H)

    def places_of(self, index_N: Tensor) -> Tensor:
        """Returns the index of each sample among the samples on this rank, (N,); -1 if absent."""
        if self.holders is None:
            return index_N
        places_B = torch.full((self.num_samples,), -1)
        places_B[self.rows_H] = torch.arange(len(self.rows_H))
        return places_B[index_N]

    def token_places(self, places_N: Tensor) -> Tensor:
        """Returns the places in `tokens_T` of the samples `places_N` on this rank, in order."""
        return row_places(self.lengths_H, places_N)

    def join_columns(self, producer: Producer, **columns: Tensor) -> Self:
        """Returns a batch with columns added or replaced. Errors name `producer`."""
        allowed = columns_of(type(self))
        for name, value in columns.items():
            if name not in allowed:
                near = get_close_matches(name, allowed, 1)
                remedy = f"Did you mean {near[0]}?" if near else ""
                raise BatchError(
                    producer, name, "returned an unknown column", ", ".join(allowed), remedy
                )
            self._check_column(name, value, producer)
        if not columns.keys().isdisjoint({"tokens_T", "observed_T", "num_observed_B"}):
            return replace(self, **columns)  # type: ignore[arg-type]
        return self._with(**columns)

    def with_blobs(self, names: Collection[str] = ()) -> Self:
        """Returns a batch that keeps only the blobs in `names`."""
        if self.blobs.keys() <= set(names):
            return self
        return self._with(blobs={n: blob for n, blob in self.blobs.items() if n in names})

    def join_blob(self, producer: Producer, name: str, blob: Blob) -> Self:
        """Returns a batch with a blob added or replaced. Errors name `producer`."""
        check_blob(name, blob, self.lengths_B, self.rows_H, producer)
        return self._with(blobs={**self.blobs, name: blob})

    def require_blob(self, name: str, needed_by: str) -> Blob:
        """Returns the blob `name`. If it is missing, raises BatchError that names `needed_by`."""
        if name not in self.blobs:
            got = f"returned a batch without {name}"
            raise BatchError(self.producer, name, got, f"the blob that {needed_by} needs")
        return self.blobs[name]

    def _with(self, **checked: Any) -> Self:
        # The other fields were checked before. Cached properties depend only on lengths and
        # observations, which this method does not change.
        batch = copy(self)
        batch.__dict__.update(checked)
        return batch

    def select(self, indices: Sequence[int] | Tensor) -> Self:
        """Returns a batch with the samples at `indices`, in this order."""
        index_B = torch.as_tensor(indices, dtype=torch.int64)
        if index_B.ndim != 1 or bool(((index_B < 0) | (index_B >= self.num_samples)).any()):
            got = f"was asked for the samples {index_B.tolist()}"
            raise BatchError(
                self.producer, "indices", got, f"a list of indices from 0 to {self.num_samples - 1}"
            )
        places_N = self.places_of(index_B)
        held_N = places_N[places_N >= 0]
        token_index_T = self.token_places(held_N)
        declared = columns_of(type(self))
        chosen: dict[str, Any] = {
            name: value[token_index_T if declared[name].per_token else index_B]
            for name, value in self.columns().items()
        }
        chosen["blobs"] = {
            name: Blob(
                blob.values_N[row_places(self.of_held(blob.num_rows_B), held_N)],
                blob.num_rows_B[index_B],
            )
            for name, blob in self.blobs.items()
        }
        chosen |= self._select_parts(index_B)
        chosen["prompts"] = tuple(self.prompts[i] for i in index_B.tolist())
        chosen |= {name: getattr(self, name)[index_B] for name in LENGTHS}
        if self.holders is not None:
            chosen["holders"] = self.holders.select(index_B)
        return replace(self, **chosen)

    def split(self, parts: int | Sequence[int]) -> list[Self]:
        """Splits into consecutive parts: `parts` equal ones, or parts with the given sizes."""
        num = self.num_samples
        sizes = [num // max(parts, 1)] * parts if isinstance(parts, int) else list(parts)
        if sum(sizes) != num or min(sizes, default=0) < 1:
            got = f"was asked to split {num} samples into {parts}"
            expected = "non-empty parts that add up to all samples"
            raise BatchError(self.producer, "parts", got, expected)
        starts = np.cumsum([0, *sizes]).tolist()
        return [self.select(range(a, b)) for a, b in zip(starts, starts[1:], strict=False)]

    @classmethod
    def concat(cls, batches: Sequence[Self]) -> Self:
        if not batches:
            raise BatchError(
                Producer.here("concat"), "batches", "was given no batch", "at least 1 batch"
            )
        first = batches[0]
        for batch in batches[1:]:
            if type(batch) is not type(first) or batch._column_names() != first._column_names():
                got = f"returned a {type(batch).__name__} with {sorted(batch._column_names())}"
                expected = f"a {type(first).__name__} with {sorted(first._column_names())}"
                raise BatchError(batch.producer, "batches", got, expected)
        names = [*first.columns(), *LENGTHS]
        joined: dict[str, Any] = {n: torch.cat([getattr(b, n) for b in batches]) for n in names}
        joined["blobs"] = {
            name: Blob(
                torch.cat([batch.blobs[name].values_N for batch in batches]),
                torch.cat([batch.blobs[name].num_rows_B for batch in batches]),
            )
            for name in first.blobs
        }
        joined |= first._concat_parts(batches)
        joined["prompts"] = tuple(chain.from_iterable(b.prompts for b in batches))
        if first.holders is not None:
            joined["holders"] = Holders.concat([b.holders for b in batches if b.holders])
        return replace(first, **joined)

    def _column_names(self) -> set[str]:
        other = {f"blobs.{name}" for name in self.blobs}
        return {*self.columns(), *other, *(("holders",) if self.holders is not None else ())}

    def _select_parts(self, index_B: Tensor) -> dict[str, Any]:
        return {}

    def _concat_parts(self, batches: Sequence[Any]) -> dict[str, Any]:
        return {}

    def _fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def scored(
        self, reward_B: Tensor, reward_parts: Mapping[str, Tensor], producer: Producer
    ) -> ScoredBatch:
        for name, value in {"reward_B": reward_B, **reward_parts}.items():
            check(value, name, NUMBER, self.num_samples, producer, NO_MASK)
        return ScoredBatch(**self._fields(), reward_B=reward_B, reward_parts=dict(reward_parts))


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoredBatch(RolloutBatch):
    """A RolloutBatch with rewards `reward_B`, (B,) float32, and their terms `reward_parts`."""

    reward_B: Tensor = field(metadata=holds(NUMBER))
    reward_parts: dict[str, Tensor]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self.reward_parts.items():
            check(value, name, NUMBER, self.num_samples, self.producer, NO_MASK)

    def _column_names(self) -> set[str]:
        return super()._column_names() | {f"reward_parts.{name}" for name in self.reward_parts}

    def _select_parts(self, index_B: Tensor) -> dict[str, Any]:
        return {"reward_parts": {n: part_B[index_B] for n, part_B in self.reward_parts.items()}}

    def _concat_parts(self, batches: Sequence[Any]) -> dict[str, Any]:
        return {
            "reward_parts": {
                n: torch.cat([b.reward_parts[n] for b in batches]) for n in self.reward_parts
            }
        }

    def by_sample(self) -> SampleValues:
        """Returns the values that have one entry per sample, in the order of the batch."""
        ways = self.sequences
        return SampleValues(
            sample_ids_B=ways.of_samples(self.sample_ids_B),
            group_B=ways.of_samples(self.group_B),
            reward_B=ways.of_samples(self.reward_B),
            reward_parts={n: ways.of_samples(part_B) for n, part_B in self.reward_parts.items()},
            response_lengths_B=ways.summed(self.response_lengths_B),
            finished_B=ways.of_samples(self.finished_B),
        )

    def with_parts(self, parts: Mapping[str, Tensor]) -> Self:
        for name, value in parts.items():
            check(value, name, NUMBER, self.num_samples, self.producer, NO_MASK)
        return self._with(reward_parts={**self.reward_parts, **parts})

    def to_train(self, producer: Producer, **columns: Tensor) -> TrainBatch:
        """Returns a TrainBatch with these columns. `join_columns` can add further columns later."""
        return TrainBatch(**ScoredBatch._fields(self)).join_columns(producer, **columns)


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainBatch(ScoredBatch):
    """A ScoredBatch with the columns that losses read, (T,) float32 unless stated otherwise.

    Attributes:
        old_logp_T: Log-probabilities from the policy at the start of the step.
        reference_logp_T, teacher_logp_T: Those from the frozen reference model and the teacher.
        values_T: Value of the state in which token t was sampled. For a reward model, the score at
            token t.
        term_weights_T: Per-token weights of an additional loss term that the algorithm defines.
        loss_weights_T: Per-token weights of the loss; None if the loss derives them from the
            lengths of sequences.
        teacher_tokens_TK: The K tokens that the teacher considers most probable at the place of
            token t, (T, K) int32.

    Roles set `old_logp_T`, `reference_logp_T`, `values_T` and the teacher columns. The algorithm's
    method `advantages` sets the other columns. To add a column, add a field here. If a loss reads
    the column, also add it to MicroBatch.
    """

    old_logp_T: Tensor | None = field(default=None, metadata=holds(RESPONSE))
    reference_logp_T: Tensor | None = field(default=None, metadata=holds(RESPONSE))
    values_T: Tensor | None = field(default=None, metadata=holds(RESPONSE))
    advantages_T: Tensor | None = field(default=None, metadata=holds(RESPONSE))
    returns_T: Tensor | None = field(default=None, metadata=holds(RESPONSE))
    term_weights_T: Tensor | None = field(default=None, metadata=holds(RESPONSE))
    loss_weights_T: Tensor | None = field(default=None, metadata=holds(RESPONSE))
    teacher_logp_T: Tensor | None = field(default=None, metadata=holds(RESPONSE))
    teacher_tokens_TK: Tensor | None = field(default=None, metadata=holds(WIDE_TOKENS))
    teacher_logp_TK: Tensor | None = field(default=None, metadata=holds(WIDE_RESPONSE))

    @classmethod
    def supervised(cls, prompts: Sequence[Prompt], producer: Producer) -> TrainBatch:
        for prompt in prompts:
            if not prompt.response_tokens:
                got = f"returned prompt {prompt.prompt_id} without a response"
                raise BatchError(producer, "response_tokens", got, "at least 1 response token")
        tokens_T, lengths_B, prompt_lengths_B = flatten(
            [p.tokens for p in prompts], [p.response_tokens or () for p in prompts]
        )
        given = [in_gaps(len(p.response_tokens or ()), p.response_gaps) for p in prompts]
        has_gaps = any(p.response_gaps for p in prompts)
        return TrainBatch(
            prompts=tuple(prompts),
            sample_ids_B=torch.arange(len(prompts)),
            group_B=torch.arange(len(prompts)),
            tokens_T=tokens_T,
            lengths_B=lengths_B,
            prompt_lengths_B=prompt_lengths_B,
            behaviour_logp_T=torch.zeros(len(tokens_T)),
            versions_B=torch.zeros(len(prompts), dtype=torch.int64),
            finished_B=torch.ones(len(prompts), dtype=torch.bool),
            producer=producer,
            reward_B=torch.zeros(len(prompts)),
            reward_parts={},
            observed_T=observed_mask(prompts, given) if has_gaps else None,
        )

    def require(self, name: str, needed_by: str) -> Tensor:
        """Returns the column `name`. If it is None, raises BatchError that names `needed_by`."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            got = f"returned a batch without {name}"
            raise BatchError(self.producer, name, got, f"the column that {needed_by} needs")
        return value
