"""Divides a batch into a rank's micro-batches, and combines their results into columns.

Collective over the world. Assigns samples to ranks. The assignment depends only on sample lengths
and the model's shape, so each rank knows the samples of all ranks. A rank receives the tokens that
it needs but does not hold.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from hybridrl.config.schema import TrainConfig
from hybridrl.contracts.batch import RolloutBatch, TrainBatch
from hybridrl.contracts.micro_batch import MicroBatch
from hybridrl.metrics.flops import attention_length
from hybridrl.models.family import ModelShape
from hybridrl.models.inputs import PREDICTS, ExtraInputs
from hybridrl.models.megatron.attention import PackedSequences, SharedPrompts, at_angles
from hybridrl.models.megatron.context_parallel import context_positions
from hybridrl.models.megatron.heads import HeadInput
from hybridrl.models.megatron.layers import LayerKind
from hybridrl.parallel.exchange import Route, bring
from hybridrl.parallel.groups import same_on_all_ranks
from hybridrl.parallel.mesh import Mesh
from hybridrl.training.batches.branches import Branches
from hybridrl.training.batches.collation import micro_batch, unpack
from hybridrl.training.batches.packing import (
    FP8_TOKENS,
    Schedule,
    even_sizes,
    round_up,
    schedule_hash,
)
from hybridrl.training.batches.prompt_sharing import (
    ScheduleInputs,
    schedule_lookups,
    schedule_samples,
    shared_tokens,
)


@dataclass(frozen=True)
class ModelInput:
    """One micro-batch, prepared as input for this rank's part of a model.

    Args:
        whole: The complete micro-batch, on the CPU.
        local: This context-parallel rank's positions of the micro-batch, on the rank's device.
        held_S: Index of each local position in the whole micro-batch.
    """

    whole: MicroBatch
    local: MicroBatch
    held_S: Tensor
    head: HeadInput
    packed: PackedSequences

    def expand(self, local_S: Tensor) -> Tensor:
        """Returns local results at their positions in the whole micro-batch, zeros elsewhere."""
        whole_S = torch.zeros(self.whole.num_positions, *local_S.shape[1:])
        whole_S[self.held_S] = local_S.detach().float().cpu()
        return whole_S


@dataclass(frozen=True)
class BatchPlan:
    """A batch that is divided into this rank's micro-batches.

    Args:
        here: The same batch, with the tokens that this rank's micro-batches need.
        inputs: This rank's micro-batches; empty on ranks outside the mesh.
        result_ranks_BW: (B, W) bool; for each sample, the ranks that compute its results on the
            last stage.
    """

    batch: TrainBatch
    here: TrainBatch
    inputs: list[ModelInput]
    mesh: Mesh
    result_ranks_BW: Tensor

    def column(self, outputs: Sequence[Tensor], *width: int) -> Tensor:
        """Combines the last stage's per-position results into a column of the batch; collective.

        Each rank receives the values for those samples whose tokens it holds.

        Args:
            outputs: One (S_local,) tensor per micro-batch on last-stage ranks; empty on other
                ranks.
            width: K if the tensors are (S_local, K); the column is then (T, K).
        """
        here, mesh = self.here, self.mesh
        column_T = torch.zeros(here.num_tokens, *width)
        if mesh.reports:
            pairs = zip(self.inputs, outputs, strict=True)
            wholes = [one.expand(output) for one, output in pairs]
            column_T = unpack([one.whole for one in self.inputs], wholes, here)
        if self.batch.holders is None:
            return mesh.sum_over_world(column_T)
        if mesh.reports and mesh.layout.cp > 1:
            column_T = mesh.sum_over_context(column_T)
        ways = self.result_ranks_BW, self.batch.holders.by_rank_BW
        return Route(here.lengths_B, *ways, mesh.world, here.rows_H)(column_T)


def mini_batch_sizes(batch: RolloutBatch, number: int) -> list[int]:
    """Returns the numbers of rows of mini-batches that have similar numbers of whole samples."""
    counts_E = batch.sequences.counts_E
    num_samples = batch.num_samples if counts_E is None else len(counts_E)
    return batch.sequences.part_sizes(even_sizes(num_samples, number))


class BatchPlanner:
    """Divides batches into micro-batches for one model.

    Args:
        shares_prompts: Whether consecutive samples with the same prompt store the prompt's tokens
            only once.
        shares_branches: Whether agents' sequences store the tokens with which several of them
            begin only once.

    Attributes:
        extra_inputs: Model inputs in addition to tokens; blobs that none of these inputs needs are
            not sent.
        at_own_token: Whether the result at a position is about that token, as a reward model's
            scores are, rather than about the next token.
    """

    def __init__(
        self,
        mesh: Mesh,
        shape: ModelShape,
        train: TrainConfig,
        layers: LayerKind,
        shares_prompts: bool,
        shares_branches: bool = False,
    ) -> None:
        self.mesh, self.shares_prompts = mesh, shares_prompts
        self.shares_branches = shares_branches
        self._shape, self._train, self._layers = shape, train, layers
        self.extra_inputs: list[ExtraInputs] = []
        self.at_own_token = False
        self._pad_each = 2 * mesh.layout.cp if mesh.layout.cp > 1 else 1

    def training_ranks(self, batch: TrainBatch, num_parts: int = 1) -> Tensor:
        """Returns the ranks that train each sample of `num_parts` mini-batches, (B, W) bool."""
        return self._on_ranks(self._schedule(batch, self._branches(batch), num_parts))

    def shared_tokens(self, batch: TrainBatch, is_lookup: bool = False) -> list[int]:
        """Returns how many leading tokens of each sample are computed as part of another sample.

        The numbers differ between updates and lookups of log-probabilities (`is_lookup`).
        """
        if not self.shares_prompts:
            return [0] * len(batch.lengths_B)
        num_parts = 1 if batch.holders is None else batch.holders.num_parts
        branches = self._branches(batch)
        assignments = self._schedule(batch, branches, num_parts, is_lookup)
        if branches is not None:
            found = [0] * len(batch.lengths_B)
            for micro in chain.from_iterable(assignments):
                for sample, shared in zip(micro, branches.of_rows(micro).shared, strict=True):
                    found[sample] = shared
            return found
        return shared_tokens(
            assignments, batch.prompt_group_B.tolist(), batch.prompt_lengths_B.tolist()
        )

    def plan(self, batch: TrainBatch, temperature: float = 1.0) -> BatchPlan:
        """Divides a batch into this rank's micro-batches, and fetches missing tokens.

        All ranks compute the same schedule, and verify this by comparing hashes before any pass.

        Args:
            batch: Batch with the same samples on all ranks; a rank may hold the tokens of only some
                samples.

        Raises RuntimeError if schedules differ, DataError if a sample is longer than a micro-batch.
        """
        batch = batch.with_blobs([name for extra in self.extra_inputs for name in extra.blobs])
        holders, world = batch.holders, self.mesh.world
        # With a single mini-batch, lookups and updates have the same schedule.
        num_parts = 1 if holders is None else holders.num_parts
        branches = self._branches(batch)
        assignments = self._schedule(batch, branches, num_parts, is_lookup=True)
        same_on_all_ranks(world, "the micro-batch schedule", schedule_hash(assignments))
        wanted_BW, here = self._on_ranks(assignments), batch
        if holders is not None and bool((wanted_BW & ~holders.by_rank_BW).any()):
            here = bring(batch, wanted_BW, world)
        where = self.mesh.where
        mine = [] if where is None else assignments[where.dp]
        inputs = [self._input(here, indices, branches, temperature) for indices in mine]
        return BatchPlan(batch, here, inputs, self.mesh, self._on_ranks(assignments, reports=True))

    def _input(
        self,
        batch: TrainBatch,
        indices: Sequence[int],
        branches: Branches | None,
        temperature: float,
    ) -> ModelInput:
        layout, where = self.mesh.layout, self.mesh.place
        pad_total = layout.tp * self._pad_each * (1 if self._train.fp8 == "none" else FP8_TOKENS)
        positions = [extra for extra in self.extra_inputs if extra.num_position_rows]
        whole = micro_batch(
            batch,
            indices,
            self._pad_each,
            pad_total,
            self.shares_prompts,
            self.at_own_token,
            positions[0] if positions else None,
            branches,
        )
        prepared = [extra.prepare(whole, batch) for extra in self.extra_inputs]
        whole = replace(whole, model_inputs=dict(ChainMap(*map(dict, prepared))))
        starts = tuple(whole.cu_seqlens.tolist())
        index_S = context_positions(starts, layout.cp, where.cp)
        local = whole if layout.cp == 1 else whole.take_positions(index_S)
        device = self.mesh.platform.device
        # Computed on the host, because nonzero is a sync point on a GPU.
        rows_N = local.loss_mask_S.nonzero()[:, 0].to(device, non_blocking=True)
        local = local.to(device)
        # transformer-engine reads the bounds on the device; torch's layers read them on the host.
        bounds = local if self._layers == "transformer_engine" else whole
        shared = None
        if whole.prefix_sequences is not None:
            # The first position of a sequence is the length of the prompt that it continues.
            prefix_lengths = whole.positions_S[whole.cu_seqlens[:-1].long()].tolist()
            shared = SharedPrompts(
                starts,
                whole.prefix_sequences,
                tuple(prefix_lengths),
                local.positions_S,
                layout.cp,
                where.cp,
            )
        angle_rows = None
        if positions and layout.cp > 1:
            angle_rows = at_angles(index_S, starts[-1], layout.cp, where.cp).to(device)
        packed = PackedSequences.of(
            bounds.cu_seqlens,
            whole.max_seqlen,
            shared,
            {name: one.value for name, one in local.model_inputs.items()}
            | {PREDICTS: local.loss_mask_S},
            has_own_angles=bool(positions),
            angle_rows=angle_rows,
        )
        head = HeadInput.of(local, rows_N, temperature)
        return ModelInput(whole, local, index_S, head, packed)

    def _schedule(
        self, batch: TrainBatch, branches: Branches | None, num_parts: int, is_lookup: bool = False
    ) -> Schedule:
        """Returns all ranks' micro-batches. Except in a lookup, none spans two mini-batches."""
        layout, schedule = self.mesh.layout, schedule_lookups if is_lookup else schedule_samples
        prompt_lengths = None
        if self.shares_prompts and branches is None:
            prompt_lengths = tuple(batch.prompt_lengths_B.tolist())
        inputs = ScheduleInputs(
            lengths=tuple(round_up(n, self._pad_each) for n in batch.lengths_B.tolist()),
            groups=tuple(batch.prompt_group_B.tolist()),
            prompt_lengths=prompt_lengths,
            part_sizes=tuple(mini_batch_sizes(batch, num_parts)),
            num_ranks=layout.dp,
            token_budget=self._train.micro_batch_tokens,
            multiple=layout.pp if layout.vpp > 1 else 1,
            attention_length=attention_length(self._shape),
            pad_each=self._pad_each,
            branches=branches,
        )
        return schedule(inputs)

    def _branches(self, batch: RolloutBatch) -> Branches | None:
        columns = (batch.sequence_B, batch.branch_of_B, batch.branch_tokens_B, batch.context_B)
        if not self.shares_branches or any(column is None for column in columns):
            return None
        sequences, branch_of, branch_tokens, contexts = (
            column.tolist() for column in columns if column is not None
        )
        return Branches.of(
            batch.sample_ids_B.tolist(),
            sequences,
            batch.group_B.tolist(),
            contexts,
            batch.prompt_lengths_B.tolist(),
            branch_of,
            branch_tokens,
        )

    def _on_ranks(self, assignments: Schedule, reports: bool = False) -> Tensor:
        """Returns the ranks that compute each sample, or report its results; (B, W) bool."""
        mesh, num_samples = self.mesh, sum(len(micro) for micros in assignments for micro in micros)
        found_BW = torch.zeros(num_samples, mesh.world.size, dtype=torch.bool)
        for place, rank in enumerate(mesh.ranks):
            at = mesh.layout.coordinates(place)
            if not reports or (at.tp, at.cp, at.pp) == (0, 0, mesh.layout.pp - 1):
                found_BW[list(chain.from_iterable(assignments[at.dp])), rank] = True
        return found_BW
