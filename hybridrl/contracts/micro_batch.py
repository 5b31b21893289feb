"""The last stage of the data contract: what one forward pass sees.

Owns the meaning of a `MicroBatch`'s fields; `collation.py` makes them from a `TrainBatch`.
Invariant: all per-position columns are of one length, and in one alignment.
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
    """A tensor for the model's forward call that nothing else reads.

    Args:
        value: The tensor.
        is_per_position: Whether its first dimension is the micro-batch's positions, so that a
            context-parallel rank takes its share; else all ranks have all of it.
    """

    value: Tensor
    is_per_position: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class MicroBatch:
    """What one forward pass sees: samples packed one after the other into S positions.

    Per-position columns are predictor-aligned: what is about token t of a sample stands at the
    position of token t - 1, the one whose output predicts it. Each sample is padded to a multiple
    that context parallelism can cut, and the whole to a multiple that sequence parallelism can
    cut, by one trailing sequence of padding. A context-parallel rank takes its share with
    `take_positions`. In the micro-batches of a reward model, whose score is read at a token itself,
    what is about token t stands at its own position, and `loss_mask_S` marks the response tokens.

    Fields: `tokens_S`, `positions_S` (position in its own sequence), `targets_S` (the next token
    of the same sample, 0 where there is none): (S,) int64; `loss_mask_S`: (S,) bool, the position
    predicts a response token; `sequence_index_S`: (S,) int64, index into `sample_indices`, -1 on
    padding; `cu_seqlens`: int32, where each padded sequence starts, trailing padding counted as a
    sequence, and at last the full S; `max_seqlen`; `sample_indices`: the batch's samples, in
    order of packing, empty when there is only padding. The columns are (S,) float32, zero outside
    `loss_mask_S`, or None; those that end in `_SK` are (S, K), `teacher_tokens_SK` int32. They are
    what losses read of a TrainBatch's columns, which have the same names with `_T` for `_S`.

    `model_inputs` are what the model alone understands, by name: of a blob with a row a token NAME,
    (S, ...), where each row stands at its token's own position, and NAME.is_there, (S,) bool, which
    positions have one; of other blobs NAME, the rows of all samples in order of packing, and
    NAME.num_rows, how many each has. A model may make others of them (models/inputs.py).

    `position_rows_SR` (S, R) int64 are the positions of each token in R dimensions, where a model
    has several; None: `positions_S` says all. A context-parallel rank has all of them: Megatron's
    rotary embedding takes its share when it turns a packed sequence.

    Where samples share their prompt, `prefix_sequences` has for each sequence the
    index of the one that it goes on from, -1 for none: the prompt without its last token is a
    sequence of its own, and each sample's begins with that last token. Positions count from the
    prompt's start, and `max_seqlen` is the longest prompt and response together. None: nothing is
    shared.

    `max_seqlen` is the longest of the padded sequences, never the token budget: Megatron's rotary
    embedding for packed sequences (rope_utils.py, `freqs.size(0) == cu_seqlens[-1]`,
    megatron-core 0.16.1) counts positions over the whole pack instead of per sequence when
    `max_seqlen` equals `cu_seqlens[-1]`, also under context parallelism. Sequences are never
    empty, so the longest equals the total only when it is the only one, and then both ways of
    counting agree; one sample and its trailing padding are two sequences, whose total is longer
    than either.
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
        """How many positions hold a token."""
        return int((self.sequence_index_S >= 0).sum())

    @property
    def labels(self) -> Tensor:
        """The tokens whose log-probabilities a model is asked for at each position: the targets,
        (S,), or beside them those of the teacher, (S, 1 + K).
        """
        if self.teacher_tokens_SK is None:
            return self.targets_S
        return torch.cat((self.targets_S[:, None], self.teacher_tokens_SK), 1)

    def require(self, name: str, needed_by: str) -> Tensor:
        """Returns the column `name`, or raises BatchError saying that `needed_by` needs it."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            here = Producer.here("the micro-batch")
            raise BatchError(
                here, name, f"came without {name}", f"the column that {needed_by} needs"
            )
        return value

    def take_positions(self, index_S: Tensor) -> MicroBatch:
        """Returns these positions of every column (a context-parallel rank's share)."""
        return self._map(lambda column_S: column_S[index_S])

    def to(self, device: torch.device | str) -> MicroBatch:
        """Returns the micro-batch with every tensor on `device`, `cu_seqlens` too."""
        moved = self._map(lambda value: value.to(device, non_blocking=True), all_inputs=True)
        rows_SR, cu_seqlens = self.position_rows_SR, self.cu_seqlens
        return replace(
            moved,
            cu_seqlens=cu_seqlens.to(device, non_blocking=True),
            position_rows_SR=None if rows_SR is None else rows_SR.to(device, non_blocking=True),
        )

    def _map(self, change: Callable[[Tensor], Tensor], all_inputs: bool = False) -> MicroBatch:
        """Returns the micro-batch with its per-position tensors changed, and all model inputs."""
        named = ((name, getattr(self, name)) for name in PER_POSITION)
        changed: dict[str, Any] = {n: change(value) for n, value in named if value is not None}
        changed["model_inputs"] = {
            name: replace(one, value=change(one.value))
            if all_inputs or one.is_per_position
            else one
            for name, one in self.model_inputs.items()
        }
        return replace(self, **changed)


PER_POSITION = tuple(f.name for f in fields(MicroBatch) if f.name.endswith(("_S", "_SK")))
"""The fields with a value, or a row, for each position."""
LOSS_COLUMNS = tuple(
    f.name for f in fields(MicroBatch) if f.default is None and f.name.endswith(("_S", "_SK"))
)
"""The columns of a batch that losses read, by their names in a MicroBatch."""
