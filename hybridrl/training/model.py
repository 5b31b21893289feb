"""One Megatron model over all ranks: its weights, its passes over micro-batches, and its optimizer
step.

The policy, the reference, the critic and a reward model are each one `ParallelModel`; what differs
is the head, whether it is trained, and the loss. Every method is collective over the world.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hybridrl.checkpoint.writing import ModelFiles
from hybridrl.config.schema import TrainConfig
from hybridrl.contracts.batch import TrainBatch
from hybridrl.contracts.micro_batch import MicroBatch
from hybridrl.contracts.routed_experts import ROUTED_EXPERTS
from hybridrl.hybrid_engine.engine import gather_alike
from hybridrl.hybrid_engine.planning.owned import owned_layout
from hybridrl.models.families.by_length import at_length
from hybridrl.models.family import Family, ModelShape
from hybridrl.models.inputs import ExtraInputs
from hybridrl.models.megatron.build import (
    build_chunks,
    named_parameters,
    named_weights,
    transformer_config,
    weight_buffers,
)
from hybridrl.models.megatron.layers import begin_gradients, choose_layers, shares_prompts
from hybridrl.models.megatron.router import balance, load_metrics, load_of, replayed_of, routers
from hybridrl.models.megatron.router_replay import ExpertInputs, check_layers, replay_metrics
from hybridrl.models.score_token import LAST, ScoreToken
from hybridrl.models.sources import FullWeights, TrainingShard
from hybridrl.models.trainable import (
    BackwardShares,
    backward_shares,
    frozen,
    mark,
    trained_family,
)
from hybridrl.models.weights import (
    NOTHING,
    Head,
    RankLayout,
    megatron_layout,
    megatron_layouts,
)
from hybridrl.parallel.groups import same_on_all_ranks
from hybridrl.parallel.mesh import Mesh
from hybridrl.parallel.peer_memory import PeerMemory
from hybridrl.parallel.schedule import forward_backward, forward_only
from hybridrl.training.batches.batch_plan import BatchPlan, BatchPlanner, ModelInput
from hybridrl.training.memory import TrainedModelMemory
from hybridrl.training.optimizer import (
    apply_gradients,
    gradient_norm,
    owned_ranges,
    set_step_options,
    wrap_for_training,
)
from hybridrl.training.peer_weights import PeerWeights
from hybridrl.training.trained_weights import TrainedWeights

Loss = Callable[[Any, MicroBatch], tuple[torch.Tensor, Any]]
"""Of the last chunk's output and its micro-batch: the loss, and what `accumulate` returns of it."""


@dataclass(frozen=True)
class ModelSource:
    """Which model.

    Args:
        family: describes it.
        hf_config: content of its config.json.
        dtype: that it trains in.
        family_key: what `model.family` has to say to find the family.
        directory: where its tokenizer files may lie.
        longest: tokens of the longest sequence that is computed, by which some positions go; None:
            a model that has such positions cannot be computed.
    """

    family: Family
    hf_config: Mapping[str, Any]
    dtype: torch.dtype
    family_key: str
    directory: Path
    longest: int | None = None

    @property
    def computed_config(self) -> Mapping[str, Any]:
        """The config.json of what is computed, by the trainer, engines and transformers alike."""
        return at_length(self.hf_config, self.longest)

    @property
    def files(self) -> ModelFiles:
        """What a checkpoint keeps of the model's HF directory."""
        dtype = str(self.dtype).removeprefix("torch.")
        return ModelFiles(self.hf_config, self.family_key, dtype, self.directory)

    @cached_property
    def extra_inputs(self) -> ExtraInputs | None:
        """What the model reads beside tokens."""
        make = self.family.extra_inputs
        return None if make is None else make(self.hf_config)

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        return self.family.shape(self.hf_config)


class ParallelModel:
    """A model cut over the ranks of a mesh; its methods are collective over the world.

    Args:
        mesh: the ranks that hold it, and how it is cut over them; others have no part of it, and
            take part in what is collective.
        source: which model.
        head: 'lm' or 'value'.
        train: micro-batch budget, recompute and optimizer knobs.
    """

    def __init__(self, mesh: Mesh, source: ModelSource, head: Head, train: TrainConfig) -> None:
        world = mesh.world
        self.mesh, self.world = mesh, world
        self.source, self.head, self.train = source, head, train
        with world.all_agree("choosing what layers are made of"):
            self.layers = choose_layers(
                train.layers,
                source.family,
                source.dtype,
                world.platform,
                train.fp32_residual,
                train.fp8,
                source.shape.torch_only,
            )
        same_on_all_ranks(world, "what layers are made of", self.layers.kind, mesh.ranks)
        self._chunks: list[torch.nn.Module] = self._build() if mesh.is_member else []
        shares = shares_prompts(
            train.share_prompts,
            mesh.layout.cp,
            self.layers.kind,
            world.platform.is_cpu,
            self._chunks,
        )
        same_on_all_ranks(world, "sharing of prompts", str(shares), mesh.ranks)
        # Ranks outside know the schedule too.
        self.planner = BatchPlanner(
            mesh, source.shape, train, self.layers.kind, mesh.from_first(shares)
        )
        if source.extra_inputs is not None:
            self.planner.extra_inputs.append(source.extra_inputs)
        self.score_token: ScoreToken = LAST  # what the config.json of its exports says
        self._forward_chunks: Sequence[torch.nn.Module] = self._chunks
        self._optimizer: Any = None
        self.memory: TrainedModelMemory | None = None
        self.trained_weights: TrainedWeights | None = None
        self.num_updates = 0
        self._peer_weights: PeerWeights | None = None

    def _build(self) -> list[torch.nn.Module]:
        source, train, kind = self.source, self.train, self.layers.kind
        with self.mesh.active(), self.mesh.platform.megatron_phase():
            self.config = transformer_config(
                source.family,
                source.computed_config,
                self.mesh.layout,
                source.dtype,
                self.mesh.platform,
                train.recompute,
                train.fp32_residual,
                kind,
                train.fp8,
            )
            return build_chunks(
                source.family,
                source.computed_config,
                self.config,
                self.head,
                layers=kind,
                recompute=train.recompute,
                extra_inputs=source.extra_inputs,
            )

    def replay_experts(self) -> None:
        """Lets the model take the experts that the engine chose, of batches that have them.

        Raises:
            UserError: its layers do not know of them.
        """
        with self.world.all_agree("replaying experts"):
            check_layers(self._chunks)
        self.planner.extra_inputs.append(ExpertInputs(self.source.shape))

    def read_scores(self, token: ScoreToken) -> None:
        """Says that the values of this model are a reward model's scores.

        Args:
            token: Token of a response at which its score is read: the last one, or the one before.
        """
        self.score_token = token
        self.planner.at_own_token = token == LAST

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """The model's modules on this rank, their parameters whole."""
        self.complete_weights()
        return self._chunks

    @property
    def forward_chunks(self) -> Sequence[torch.nn.Module]:
        """What passes must call: the same in Megatron's wrappers, if the model is trained."""
        self.complete_weights()
        return self._forward_chunks

    def complete_weights(self) -> None:
        """Makes the parameters whole if a step has left that to do (`train.fuse_param_gather`).

        Raises:
            RuntimeError: they are freed until training goes on.
        """
        if self.trained_weights is not None:
            with self.mesh.active():
                self.trained_weights.complete()

    @property
    def optimizer(self) -> Any:
        """Megatron's optimizer, its state in place; None for a frozen model."""
        if self.memory is not None:
            self.memory.wait()
        return self._optimizer

    @property
    def _names(self) -> tuple[Head, bool, bool]:
        """What the names of parameters depend on, as `megatron_layout` takes it."""
        return self.head, self.layers.fuses_norms, self.layers.kind == "transformer_engine"

    def layout(self) -> RankLayout:
        """Returns which rectangles of which HF tensors this rank holds."""
        return self.layout_of(self.world.rank)

    def layout_of(self, rank: int) -> RankLayout:
        """Returns the same of any rank."""
        if rank not in self.mesh.ranks:
            return NOTHING
        return self._layout(self.source.family, self.mesh.ranks.index(rank))

    def _layout(self, family: Family, place: int) -> RankLayout:
        return megatron_layout(family, self.source.shape, self.mesh.layout, place, *self._names)

    def weight_source(self) -> FullWeights:
        """Returns what an engine may be written from right after a step; collective.

        The fp32 masters' owners have the newest weights: with `train.fuse_param_gather` each rank
        gives the parts that it has updated, and with `train.release_weights_in_rollout` no engine
        may use memory that is freed and made again from the masters.
        """
        tensors = self.weights_in_place()
        shard = None
        if not self.train.release_weights_in_rollout:
            shard = TrainingShard(self.layout(), tensors)
        unchanging = frozenset(self.frozen_weights())
        return FullWeights(self._updated_layouts(), tensors, unchanging, shard)

    def whole_weights(self) -> FullWeights:
        """Returns the weights, whole on this rank until the next step."""
        return FullWeights(self._whole_layouts(), self.weights())

    def _whole_layouts(self) -> list[RankLayout]:
        family, shape = self.source.family, self.source.shape
        parts = megatron_layouts(family, shape, self.mesh.layout, *self._names)
        of_ranks = dict(zip(self.mesh.ranks, parts, strict=True))
        return [of_ranks.get(rank, NOTHING) for rank in range(self.world.size)]

    def _updated_layouts(self) -> list[RankLayout]:
        """Returns what of each rank's tensors is new after a step, and so may be sent."""
        if not self.train.fuse_param_gather:
            return self._whole_layouts()
        ranges = owned_ranges(self._chunks, self._optimizer)
        unowned = weight_buffers(self._chunks) | self.frozen_weights()
        ranges |= {name: (0, tensor.numel()) for name, tensor in unowned.items()}
        return gather_alike(owned_layout(self.layout(), ranges), self.world)

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns this rank's parameters under their local names, whole until the next step;
        writing to them changes the model.
        """
        return named_weights(self.chunks)

    def weights_in_place(self) -> dict[str, torch.Tensor]:
        """Returns the same as they are; not collective. Where other ranks own them they may be of
        before the step, and with `train.release_weights_in_rollout` they may be freed.
        """
        return named_weights(self._chunks)

    def make_trainable(
        self, peak_learning_rate: float, peer_weights: PeerWeights | None = None
    ) -> None:
        """Adds gradient buffers and the optimizer; weights must be in place.

        Args:
            peak_learning_rate: of the schedule that `learning_rate` describes.
            peer_weights: where the parameters go; None: where Megatron allocates them.
        """
        self.peak_learning_rate = peak_learning_rate
        self._peer_weights = peer_weights
        if not self.mesh.is_member:
            if peer_weights is not None:
                peer_weights.move([])
            return
        place = self.mesh.ranks.index(self.world.rank)
        mark(named_parameters(self._chunks), self._layout(self.trained_family, place).shapes)
        begin_gradients(self._chunks, self.train.recompute)
        with self.mesh.active(), self.world.platform.megatron_phase():
            self._forward_chunks, self._optimizer = wrap_for_training(
                self._chunks,
                self.config,
                self.train,
                peak_learning_rate,
                self.mesh,
                peer_weights,
            )
        self.memory = TrainedModelMemory(
            self._forward_chunks,
            self._optimizer,
            self.weights_in_place().values(),
            self.train.offload_optimizer,
            self.world.platform.device,
            self.train.micro_batch_tokens,
        )
        self.trained_weights = TrainedWeights(
            self._forward_chunks,
            lambda: self.optimizer,
            self.train.fuse_param_gather,
            self.train.release_weights_in_rollout,
        )

    @property
    def peers(self) -> PeerMemory | None:
        """The memory in which all ranks can read the parameters, if they are in such."""
        return None if self._peer_weights is None else self._peer_weights.memory

    @property
    def frozen_parts(self) -> tuple[str, ...]:
        """The parts that are frozen although the model is trained (`train.freeze`)."""
        return self.train.freeze

    @property
    def trained_family(self) -> Family:
        """The model's family, its weight table that of what is trained."""
        return trained_family(self.source.family, self.source.shape, self.frozen_parts, self.head)

    @property
    def backward(self) -> BackwardShares:
        """What a backward pass of the model computes."""
        source = self.source
        return backward_shares(source.family, source.shape, self.frozen_parts, self.head)

    def frozen_weights(self) -> dict[str, torch.Tensor]:
        """Returns the parameters of this rank that no step changes, under their local names."""
        return {name: p.data for name, p in frozen(named_parameters(self._chunks)).items()}

    def freeze(self) -> None:
        """Makes the model forward-only."""
        mark(named_parameters(self._chunks), ())
        for chunk in self._chunks:
            chunk.eval()

    def plan(self, batch: TrainBatch, temperature: float = 1.0) -> BatchPlan:
        """Cuts a batch into this rank's micro-batches, as `BatchPlanner.plan`."""
        return self.planner.plan(batch, temperature)

    def forward_all(self, inputs: Sequence[ModelInput]) -> list[Any]:
        """Runs every micro-batch forward; outputs on the last stage, else an empty list."""
        if not self.mesh.is_member:
            return []
        with self.mesh.active():
            lengths = [one.local.num_positions for one in inputs]
            return forward_only(self.forward_chunks, inputs, lengths, _forward)

    def accumulate(
        self, inputs: Sequence[ModelInput], loss: Loss, *more: tuple[Sequence[ModelInput], Loss]
    ) -> list[Any]:
        """Runs forward and backward over every micro-batch, and `more` with losses of their own,
        into the same cleared gradients; returns the losses' extras.

        Of each micro-batch in turn Megatron's schedule calls the chunks (`_forward`), whose last
        one ends in a head (heads.py), then `loss` with the head's output, then backward.
        """
        if not self.mesh.is_member:
            return []
        chunks, passes = self.forward_chunks, [(inputs, loss), *more]
        for chunk in chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]  # Megatron's wrapper
        self._optimizer.zero_grad()  # forgets views of gradients; the state may still be on its way
        pairs = [(one, loss) for some, loss in passes for one in some]
        self._prepare_routers([one for some, _ in passes for one in some])
        assert self.memory is not None  # a model without does not learn
        most = max((one.whole.num_positions for one, _ in pairs), default=0)
        with self.mesh.active(), self.memory.watching(most):
            return forward_backward(
                chunks,
                pairs,
                [one.local.num_positions for one, _ in pairs],
                lambda chunk, pair: _forward(chunk, pair[0]),
                lambda output, pair: pair[1](output, pair[0].local),
            )

    def _prepare_routers(self, inputs: Sequence[ModelInput]) -> None:
        """Gives routers the coefficients and the denominator of their losses, the tokens of all
        replicas; collective over these.
        """
        if self.source.shape.moe is None:
            return
        losses, num_tokens = self.train.moe, 1
        if losses.aux_loss or losses.z_loss:
            count = torch.tensor(sum(one.whole.num_tokens for one in inputs), dtype=torch.float64)
            num_tokens = max(int(self.mesh.sum_over_replicas(count)), 1)
        for router in routers(self._chunks):
            router.clear()
            router.aux_loss, router.z_loss = losses.aux_loss, losses.z_loss
            router.num_step_tokens = num_tokens

    def expert_load(self) -> dict[str, float]:
        """Returns how evenly the last update used the experts, as `load_metrics`; nothing for a
        dense model. Collective over the world.
        """
        shape = self.source.shape
        if shape.moe is None:
            return {}
        load = load_of(self._chunks, shape.num_layers, shape.moe.num_experts)
        return load_metrics(self.mesh.sum_over_world(load), shape.moe.experts_per_token)

    def replays(self) -> dict[str, float]:
        """Returns what became of recorded experts in the last update, as `replay_metrics`; nothing
        where the model does not take them. Collective over the world.
        """
        shape = self.source.shape
        if shape.moe is None or not any(
            ROUTED_EXPERTS in extra.blobs for extra in self.planner.extra_inputs
        ):
            return {}
        counts = self.mesh.sum_over_world(replayed_of(self._chunks, shape.num_layers))
        return replay_metrics(counts, shape)

    def grad_norm(self) -> float:
        """Returns the accumulated gradients' global norm before clipping, as `gradient_norm`."""
        norm = 0.0
        if self.mesh.is_member:
            with self.mesh.active(), self.world.platform.megatron_phase():
                norm = gradient_norm(self.optimizer)
        return float(self.mesh.from_first(norm))

    def apply(self, learning_rate: float, grad_norm: float) -> None:
        """Takes the optimizer's step with the accumulated gradients, of this finite norm."""
        if self.mesh.is_member:
            set_step_options(self.optimizer, self.train, learning_rate)
            with self.mesh.active(), self.world.platform.megatron_phase():
                apply_gradients(self.optimizer, grad_norm)
        self._balance_routers()
        if self.trained_weights is not None:
            self.trained_weights.stepped()
        if self.memory is not None:
            self.memory.stepped()
        self.num_updates += 1

    def _balance_routers(self) -> None:
        """Moves the biases of routers by the last update's counts, of all ranks; collective over
        the world.
        """
        shape, rate = self.source.shape, self.train.moe.bias_update_rate
        if shape.moe is None or not shape.moe.has_bias or not rate:
            return
        load = load_of(self._chunks, shape.num_layers, shape.moe.num_experts)
        balance(self._chunks, self.mesh.sum_over_world(load), rate)

    def close(self) -> None:
        """Ends the training of the model: its memory is freed with the last reference to it.

        Megatron's wrapper holds autograd nodes whose hooks hold the wrapper: circles that Python's
        collector does not see. So it is emptied.
        """
        if self.memory is not None:
            self.memory.close()
        wrapped, self._forward_chunks = self._forward_chunks, self._chunks
        if self._optimizer is not None:
            for chunk in wrapped:
                vars(chunk).clear()

    def bad_gradient(self) -> str | None:
        """Returns the first of this rank's parameters whose gradient is not finite, if any."""
        for name, parameter in named_parameters(self._chunks).items():
            # A sync point, after a bad step only.
            if parameter.requires_grad and not bool(parameter.main_grad.isfinite().all()):  # type: ignore[attr-defined]
                return name
        return None


def _forward(chunk: torch.nn.Module, one: ModelInput) -> Any:
    config: Any = chunk.config
    has_routers = config.num_moe_experts is not None
    rows_SR = one.local.position_rows_SR
    return chunk(
        input_ids=one.local.tokens_S[None],
        position_ids=one.local.positions_S[None] if rows_SR is None else rows_SR.T[:, None],
        attention_mask=None,
        labels=one.head,  # Megatron hands it to the head untouched (models/megatron/heads.py)
        packed_seq_params=one.packed,
        padding_mask=(one.local.sequence_index_S < 0)[None] if has_routers else None,
    )
