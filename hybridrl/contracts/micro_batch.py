"""The last stage of the data contract: the input of one forward pass.

Owns the meaning of a `MicroBatch`'s fields; `collation.py` builds them from a `TrainBatch`.
Invariant: all per-position columns have the same length and the same alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from hybridrl.contracts.checks import BatchError, Producer


@dataclass(frozen=True, eq=False)
class ModelTensor:
    """A tensor that only the model's forward call reads.

    Args:
        value: The tensor.
        is_per_position: Whether its first dimension is the micro-batch's positions, so that a
            context-parallel rank takes its share; otherwise every rank has the whole tensor.
    """

    value: Tensor
    is_per_position: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class MicroBatch:
    """Input of one forward pass: samples packed one after the other into S positions.

    Per-position columns are aligned to the predictor: the entry for token t of a sample is at the
    position of token t - 1, whose output predicts it. Each sample is padded to a multiple that
    context parallelism can cut, and the whole to a multiple that sequence parallelism can cut, by
    one trailing sequence of padding. A context-parallel rank takes its share with `take_positions`.
    In micro-batches of a reward model, whose score is read at the token itself, the entry for token
    t is at its own position, and `loss_mask_S` marks the response tokens.

    Attributes:
        tokens_S: Token ids, (S,) int64.
        positions_S: Position of the token in its own sequence, (S,) int64.
        targets_S: Next token of the same sample, or 0 if there is none, (S,) int64.
        loss_mask_S: Whether the position predicts a response token, (S,) bool.
        sequence_index_S: Index into `sample_indices`, -1 on padding, (S,) int64.
        cu_seqlens: Start of each padded sequence, trailing padding included, then S; int32.
        max_seqlen: Length of the longest padded sequence (see below).
        sample_indices: Indices in the batch of the packed samples, in order; empty if there is only
            padding.
        prefix_sequences: Where samples share their prompt, the index of the sequence that each
            sequence continues, or -1; None if nothing is shared. The prompt without its last token
            is a sequence, and each of its samples begins with that last token. Positions count from
            the prompt's start, and `max_seqlen` is the longest prompt and response together.
        position_rows_SR: Positions of each token in R dimensions, (S, R) int64, for models that
            have several; None if `positions_S` is enough. A context-parallel rank has all of them:
            Megatron's rotary embedding takes its share when it rotates a packed sequence.
        model_inputs: Inputs that only the model understands, by name. A blob with one row per token
            gives NAME, (S, ...), with each row at its token's own position, and NAME.is_there, (S,)
            bool, which marks positions that have a row. Other blobs give NAME, the rows of all
            samples in order of packing, and NAME.num_rows, the number of rows of each sample. A
            model may transform them (models/inputs.py).

    The other columns are (S,) float32, zero outside `loss_mask_S`, or None; those that end in `_SK`
    are (S, K), and `teacher_tokens_SK` is int32. They are the columns of a TrainBatch that losses
    read, with `_S` in place of `_T`.

    `max_seqlen` is the longest of the padded sequences, never the token budget: Megatron's rotary
    embedding for packed sequences (rope_utils.py, `freqs.size(0) == cu_seqlens[-1]`, megatron-core
    0.16.1) counts positions over the whole pack instead of per sequence when `max_seqlen` equals
    `cu_seqlens[-1]`, also under context parallelism. Sequences are never empty, so the longest
    equals the total only when it is the only one, and then both ways of counting agree. One sample
    and its trailing padding are two sequences, whose total is longer than either.
    """

    tokens_S: Tensor
    positions_S: Tensor
    targets_S: Tensor
    loss_mask_S: Tensor
    sequence_index_S: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    sample_indices: tuple[int, ...]
    prefix_sequences: tuple[int, ...] | None = None
    position_rows_SR: Tensor | None = None
    model_inputs: Mapping[str, ModelTensor] = field(default_factory=dict)
    old_logp_S: Tensor | None = None
    reference_logp_S: Tensor | None = None
    behaviour_logp_S: Tensor | None = None
    advantages_S: Tensor | None = None
    returns_S: Tensor | None = None
    values_S: Tensor | None = None
    term_weights_S: Tensor | None = None
    teacher_tokens_SK: Tensor | None = None
    teacher_logp_SK: Tensor | None = None

    @property
    def num_positions(self) -> int:
        """S, or this rank's share of it after `take_positions`."""
        return len(self.tokens_S)

    @property
    def num_tokens(self) -> int:
        """Number of positions that hold a token."""
        return int((self.sequence_index_S >= 0).sum())

    @property
    def labels(self) -> Tensor:
        """Tokens whose log-probabilities the model returns at each position: the targets, (S,), or
        the targets followed by the teacher's tokens, (S, 1 + K).
        """
        if self.teacher_tokens_SK is None:
            return self.targets_S
        return torch.cat((self.targets_S[:, None], self.teacher_tokens_SK), 1)

    def require(self, name: str, needed_by: str) -> Tensor:
        """Returns the column `name`; raises BatchError, naming `needed_by`, if it is None."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            here = Producer.here("the micro-batch")
            raise BatchError(here, name, f"has no {name}", f"the column that {needed_by} needs")
        return value

    def take_positions(self, index_S: Tensor) -> MicroBatch:
        """Returns a context-parallel rank's share: every column at these positions."""
        return self._map(lambda column_S: column_S[index_S])

    def to(self, device: torch.device | str) -> MicroBatch:
        """Returns the micro-batch with every tensor on `device`, including `cu_seqlens`."""
        moved = self._map(lambda value: value.to(device, non_blocking=True), all_inputs=True)
        rows_SR, cu_seqlens = self.position_rows_SR, self.cu_seqlens
        return replace(
            moved,
            cu_seqlens=cu_seqlens.to(device, non_blocking=True),
            position_rows_SR=None if rows_SR is None else rows_SR.to(device, non_blocking=True),
        )

    def _map(self, change: Callable[[Tensor], Tensor], all_inputs: bool = False) -> MicroBatch:
        """Returns the micro-batch with `change` applied to its per-position tensors, and to all
        model inputs if `all_inputs`.
        """
        named = ((name, getattr(self, name)) for name in PER_POSITION)
        changed: dict[str, Any] = {n: change(value) for n, value in named if value is not None}
        changed["model_inputs"] = {
            name: replace(tensor, value=change(tensor.value))
            if all_inputs or tensor.is_per_position
            else tensor
            for name, tensor in self.model_inputs.items()
        }
        return replace(self, **changed)


PER_POSITION = tuple(f.name for f in fields(MicroBatch) if f.name.endswith(("_S", "_SK")))
"""Names of the fields that have a value, or a row, for each position."""
LOSS_COLUMNS = tuple(
    f.name for f in fields(MicroBatch) if f.default is None and f.name.endswith(("_S", "_SK"))
)
"""Names in a MicroBatch of the columns that losses read."""
