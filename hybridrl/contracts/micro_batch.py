"""Defines the last stage of the data contract: the input to one forward pass.

Owns the meaning of the fields in `MicroBatch`; `collation.py` fills them from a `TrainBatch`.
Invariant: all per-position columns have the same length and alignment.
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
    """A tensor, or an object on the host, that is read only by the model's forward call.

    If it `is_per_position`, each context-parallel rank takes its slice of the first dimension.
    Otherwise, every rank has the whole tensor.
    """

    value: Any
    is_per_position: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class MicroBatch:
    """Input to one forward pass: samples packed one after another into S positions.

    Per-position columns are aligned to the predictor: the entry for token t of a sample is at the
    position of token t - 1, whose output predicts it. Each sample is padded to a length that
    context parallelism can split evenly, and one trailing sequence of padding makes the total
    divisible for sequence parallelism. `take_positions` gives a context-parallel rank its slice. In
    micro-batches of a reward model, whose score is read at the token itself, the entry for token t
    is at its own position, and `loss_mask_S` marks the response tokens.

    Attributes:
        positions_S: Position of the token within its sequence, (S,) int64.
        targets_S: Next token in the same sample, or 0 if there is none, (S,) int64.
        loss_mask_S: Whether the position predicts a response token, (S,) bool.
        sequence_index_S: Index into `sample_indices`, or -1 on padding, (S,) int64.
        cu_seqlens: Start of each padded sequence, with the trailing padding, followed by S; int32.
        max_seqlen: Length of the longest padded sequence (see below).
        sample_indices: Batch indices of the packed samples, in order; empty if there is only
            padding.
        prefix_sequences: For each sequence, the index of the sequence that it continues, or -1.
            None if samples share no prompts. A shared prompt without its last token forms a
            separate sequence, and each of its samples begins with the last prompt token. Positions
            are counted from the start of the prompt, and `max_seqlen` is the maximum length of a
            prompt plus its response. A sequence of an agent continues the first positions of
            another sequence.
        position_rows_SR: Positions of each token in R dimensions, (S, R) int64, for models with
            multi-dimensional positions, else None. Context-parallel ranks have all rows, because
            Megatron's rotary embedding selects the rank's slice when it rotates a packed sequence.
        model_inputs: Inputs that only the model understands, by name. A blob with one row per token
            becomes NAME, (S, ...), with each row at its token's own position, and NAME.is_there,
            (S,) bool, which marks the positions that have a row. Any other blob becomes NAME, the
            rows of all samples in packing order, and NAME.num_rows, their number per sample. A
            model may transform these inputs (models/inputs.py).

    The other columns are (S,) float32 and zero outside `loss_mask_S`, or None; those with the
    suffix `_SK` are (S, K), and `teacher_tokens_SK` is int32. They are columns of a TrainBatch,
    with `_S` instead of `_T`.

    `max_seqlen` is never the token budget: if it equals `cu_seqlens[-1]`, Megatron's rotary
    embedding for packed sequences (rope_utils.py, `freqs.size(0) == cu_seqlens[-1]`, megatron-core
    0.16.1) counts positions over the whole pack instead of per sequence. The longest sequence is as
    long as the pack only if it is the only one, and then both ways of counting agree: sequences are
    never empty, and trailing padding counts as one.
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
    loss_weights_S: Tensor | None = None
    teacher_tokens_SK: Tensor | None = None
    teacher_logp_SK: Tensor | None = None

    @property
    def num_positions(self) -> int:
        """Number of positions: S, or after `take_positions`, the number in this rank's slice."""
        return len(self.tokens_S)

    @property
    def num_tokens(self) -> int:
        return int((self.sequence_index_S >= 0).sum())

    @property
    def labels(self) -> Tensor:
        """Tokens whose log-probabilities each position yields: (S,), with a teacher (S, 1 + K)."""
        if self.teacher_tokens_SK is None:
            return self.targets_S
        return torch.cat((self.targets_S[:, None], self.teacher_tokens_SK), 1)

    def require(self, name: str, needed_by: str) -> Tensor:
        """Returns the column `name`. If it is None, raises BatchError that names `needed_by`."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            here = Producer.here("the micro-batch")
            raise BatchError(here, name, f"has no {name}", f"the column that {needed_by} needs")
        return value

    def take_positions(self, index_S: Tensor) -> MicroBatch:
        """Returns the slice for a context-parallel rank: every column at these positions."""
        return self._map(lambda column_S: column_S[index_S])

    def to(self, device: torch.device | str) -> MicroBatch:
        """Returns the micro-batch with all tensors on `device`, including `cu_seqlens`."""
        moved = self._map(lambda value: value.to(device, non_blocking=True), all_inputs=True)
        rows_SR, cu_seqlens = self.position_rows_SR, self.cu_seqlens
        return replace(
            moved,
            cu_seqlens=cu_seqlens.to(device, non_blocking=True),
            position_rows_SR=None if rows_SR is None else rows_SR.to(device, non_blocking=True),
        )

    def _map(self, change: Callable[[Tensor], Tensor], all_inputs: bool = False) -> MicroBatch:
        named = ((name, getattr(self, name)) for name in PER_POSITION)
        changed: dict[str, Any] = {n: change(value) for n, value in named if value is not None}
        changed["model_inputs"] = {
            name: replace(tensor, value=change(tensor.value))
            if tensor.is_per_position or (all_inputs and isinstance(tensor.value, Tensor))
            else tensor
            for name, tensor in self.model_inputs.items()
        }
        return replace(self, **changed)


PER_POSITION = tuple(f.name for f in fields(MicroBatch) if f.name.endswith(("_S", "_SK")))
"""Names of the fields that have one value or one row per position."""
LOSS_COLUMNS = tuple(
    f.name for f in fields(MicroBatch) if f.default is None and f.name.endswith(("_S", "_SK"))
)
"""Names of the MicroBatch columns that losses read."""
