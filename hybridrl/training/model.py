"""One Megatron model distributed over ranks: its weights, passes and optimizer step.

The policy, the reference, the critic and a reward model are each a `ParallelModel`; they differ in
their heads, their losses, and whether they are trained. All public methods are collective over the
world unless their docstrings say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
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
from hybridrl.models.adapters.base_reference import BaseReference
from hybridrl.models.adapters.lora import Lora
from hybridrl.models.adapters.rows import (
    A,
    base_of,
    is_adapter,
    num_active_adapter_parameters,
    only_adapters,
    weight_of,
)
from hybridrl.models.families.by_length import at_length
from hybridrl.models.family import Family, ModelShape
from hybridrl.models.inputs import ExtraInputs
from hybridrl.models.likely_inputs import LikelyInputs
from hybridrl.models.megatron.adapters import adapted_rows, adapters_off, add_adapters
from hybridrl.models.megatron.build import (
    build_chunks,
    named_parameters,
    named_weights,
    transformer_config,
    weight_buffers,
)
from hybridrl.models.megatron.delta_kernels import choose_rule
from hybridrl.models.megatron.delta_net import set_rule
from hybridrl.models.megatron.exact import compute_exactly
from hybridrl.models.megatron.layers import begin_gradients, choose_layers, shares_prompts
from hybridrl.models.megatron.mtp import next_token_layers
from hybridrl.models.megatron.packed_exactly import EngineKernels
from hybridrl.models.megatron.router import balance, load_metrics, load_of, replayed_of, routers
from hybridrl.models.megatron.router_replay import ExpertInputs, check_layers, replay_metrics
from hybridrl.models.megatron.shared_weights import shareable, take_weights, without_memory
from hybridrl.models.megatron.te_attention import ChosenCalls, choose_calls, set_prefix_kernel
from hybridrl.models.score_token import LAST, ScoreToken
from hybridrl.models.sources import FullWeights, TrainingShard, WeightSource
from hybridrl.models.trainable import (
    BackwardShares,
    backward_shares,
    frozen,
    frozen_names,
    mark,
    trained_family,
)
from hybridrl.models.weights import (
    NOTHING,
    Head,
    RankLayout,
    megatron_layout,
    megatron_layouts,
    of_names,
)
from hybridrl.parallel.groups import same_on_all_ranks
from hybridrl.parallel.mesh import Mesh
from hybridrl.parallel.peer_memory import PeerMemory
from hybridrl.parallel.schedule import forward_backward, forward_only
from hybridrl.training.adapter_weights import (
    AdapterWeights,
    MergedTensor,
    MergedWeights,
    merged_tensors,
)
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
"""Computes the loss and an extra result from the last chunk's output and its micro-batch."""


@dataclass(frozen=True)
class ModelSource:
    """A model's architecture, data type and files.

    Args:
        family_key: Value of `model.family` that selects this family.
        directory: Directory with the model's tokenizer files, if any.
        longest: Length of the longest sequence in tokens, needed if rotary positions depend on it
            (by_length.py).
        base: Reference to the model without adapters; None if it has none.
        passed_over: Reference to the HF directory with tensors that training does not load; None if
            there are none, or if the model is not exported.
        trains_mtp: Whether the layer for multi-token prediction is part of the model.
    """

    family: Family
    hf_config: Mapping[str, Any]
    dtype: torch.dtype
    family_key: str
    directory: Path
    longest: int | None = None
    base: BaseReference | None = None
    passed_over: BaseReference | None = None
    trains_mtp: bool = False

    @property
    def computed_config(self) -> Mapping[str, Any]:
        """config.json for which trainer and engines compute the same rotary positions."""
        return at_length(self.hf_config, self.longest)

    @property
    def files(self) -> ModelFiles:
        return ModelFiles(
            hf_config=self.hf_config,
            family=self.family_key,
            dtype=str(self.dtype).removeprefix("torch."),
            side_files=self.directory,
            lora=self.family.lora,
            base=self.base,
            passed_over=self.passed_over,
            trains_mtp=self.trains_mtp,
        )

    @cached_property
    def extra_inputs(self) -> ExtraInputs | None:
        make = self.family.extra_inputs
        return None if make is None else make(self.hf_config, self.directory)

    @property
    def shape(self) -> ModelShape:
        """Dimensions of the model, as engines hold it."""
        return self.family.shape(self.hf_config)


class ParallelModel:
    """A model distributed across the ranks of a mesh.

    Args:
        mesh: Ranks that hold the model, and its layout. Other ranks hold no part of it but must
            join collective calls.
        lender: Model on the same mesh whose frozen weights this model uses where both have the
            same weights. This model then trains only its adapters, `lora.full` and a value head.

    Attributes:
        shares_weights: Whether there is a `lender`.
        borrowed: Local names of the parameters on this rank that belong to `lender`.
    """

    def __init__(
        self,
        mesh: Mesh,
        source: ModelSource,
        head: Head,
        train: TrainConfig,
        lender: ParallelModel | None = None,
    ) -> None:
        world = mesh.world
        self.mesh, self.world = mesh, world
        self.source, self.head, self.train = source, head, train
        self.shape = replace(source.shape, has_mtp=source.trains_mtp and head == "lm")
        with world.all_agree("choosing the library of the layers"):
            self.layers = choose_layers(
                train.layers,
                source.family,
                source.dtype,
                world.platform,
                train.fp32_residual,
                train.fp8,
                source.shape.torch_only,
            )
            self.delta_rule = choose_rule(
                train.delta_rule, source.shape.mixer, mesh.layout.tp, source.dtype, world.platform
            )
        same_on_all_ranks(world, "the library of the layers", self.layers.kind, mesh.ranks)
        same_on_all_ranks(world, "the gated delta rule", self.delta_rule.name, mesh.ranks)
        self.shares_weights = lender is not None
        self.borrowed: frozenset[str] = frozenset()
        self._chunks: list[torch.nn.Module] = self._build(lender) if mesh.is_member else []
        # The layer for multi-token prediction needs the token after each prompt.
        shares = not self.shape.has_mtp and shares_prompts(
            train.share_prompts, self.layers.kind, world.platform.is_cpu, self._chunks
        )
        same_on_all_ranks(world, "sharing of prompts", str(shares), mesh.ranks)
        self.prompt_calls = ChosenCalls(False)
        if shares and self._chunks and self.layers.kind == "transformer_engine":
            layout, device = mesh.layout, world.platform.device
            self.prompt_calls = choose_calls(source.shape, layout.tp, layout.cp, device)
        same_on_all_ranks(
            world, "attention to shared prompts", str(self.prompt_calls.uses_two), mesh.ranks
        )
        if self.prompt_calls.uses_two:
            set_prefix_kernel(self._chunks)
        # Ranks outside the mesh also compute the schedule.
        self.planner = BatchPlanner(
            mesh,
            source.shape,
            train,
            self.layers.kind,
            mesh.from_first(shares),
            # Recurrent layers of any stage need their state after these positions, which they
            # have only at the end of a sequence.
            mesh.from_first(shares and source.shape.mixer is None),
        )
        if source.extra_inputs is not None:
            self.planner.extra_inputs.append(source.extra_inputs)
        self.score_token: ScoreToken = LAST  # written to config.json of exports
        self._forward_chunks: Sequence[torch.nn.Module] = self._chunks
        self._optimizer: Any = None
        self.memory: TrainedModelMemory | None = None
        self.trained_weights: TrainedWeights | None = None
        self.num_updates = 0
        self._peer_weights: PeerWeights | None = None

    def _build(self, lender: ParallelModel | None) -> list[torch.nn.Module]:
        source, train, kind = self.source, self.train, self.layers.kind
        tp = self.mesh.layout.tp
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
            num_vocab_rows = source.shape.padded_vocab(tp) // tp
            with nullcontext() if lender is None else without_memory(num_vocab_rows):
                chunks = build_chunks(
                    source.family,
                    source.computed_config,
                    self.config,
                    self.head,
                    layers=kind,
                    recompute=train.recompute,
                    extra_inputs=source.extra_inputs,
                    has_mtp=self.shape.has_mtp,
                )
            if lender is not None:
                self.borrowed = self._shareable(lender)
                device = self.mesh.platform.device
                take_weights(chunks, lender.chunks, self.borrowed, device)
            if self.lora is not None:
                add_adapters(chunks, self.layout(), self.lora)
            set_rule(chunks, self.delta_rule.rule, self.delta_rule.name == "triton")
            return chunks

    def _shareable(self, lender: ParallelModel) -> frozenset[str]:
        assert lender.mesh is self.mesh and lender.layers.kind == self.layers.kind
        trained = self._layout(self.trained_family, self._place).shapes if self.lora else ()
        return shareable(self.base_layout(), lender.base_layout(), trained, lender.frozen_weights())

    def match_engine(
        self,
        attend: Callable[..., torch.Tensor] | None = None,
        kernels: EngineKernels | None = None,
    ) -> None:
        """Makes forward passes compute the same bits as the engine (`numerics.match`).

        Args:
            attend: The engine's attention on CPU; see `compute_exactly`.
            kernels: The engine's operations on GPUs; None on CPU.

        Raises UserError if the model has a module that cannot.
        """
        with self.world.all_agree("replacing operations by exact ones"):
            compute_exactly(self._chunks, attend, kernels)

    def replay_experts(self) -> None:
        """Makes the model reuse the engine's recorded experts; UserError if a layer cannot."""
        with self.world.all_agree("replaying experts"):
            check_layers(self._chunks)
        self.planner.extra_inputs.append(ExpertInputs(self.source.shape))

    def use_likely_tokens(self, is_support: bool, is_centered: bool, num_likely: int) -> None:
        """Makes the head use the tokens that the engine recorded; arguments of LikelyInputs."""
        num_tokens = self.source.shape.vocab_size
        inputs = LikelyInputs(num_tokens, is_support, is_centered, num_likely)
        self.planner.extra_inputs.append(inputs)

    def read_scores(self, token: ScoreToken) -> None:
        self.score_token = token
        self.planner.at_own_token = token == LAST

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """This rank's modules of the model, with complete parameters."""
        self.complete_weights()
        return self._chunks

    @property
    def forward_chunks(self) -> Sequence[torch.nn.Module]:
        """Modules to call: Megatron's wrappers for a trained model, otherwise `chunks`."""
        self.complete_weights()
        return self._forward_chunks

    def complete_weights(self) -> None:
        """Gathers the parameters if the last step postponed it; RuntimeError if they are freed."""
        if self.trained_weights is not None:
            with self.mesh.active():
                self.trained_weights.complete()

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    @property
    def _names(self) -> tuple[Head, bool, bool]:
        return self.head, self.layers.fuses_norms, self.layers.kind == "transformer_engine"

    def layout(self) -> RankLayout:
        """Returns the layout of this rank; not collective."""
        return self.layout_of(self.world.rank)

    def base_layout(self) -> RankLayout:
        if not self.mesh.is_member:
            return NOTHING
        return self._layout(base_of(self.source.family), self._place)

    def own_layout(self) -> RankLayout:
        """Returns the layout of `own_weights`; not collective."""
        layout = self.base_layout()
        return of_names(layout, layout.shapes.keys() - self.borrowed)

    def adapter_layout(self) -> RankLayout:
        layout = self.layout()
        return of_names(layout, set(filter(is_adapter, layout.shapes)))

    def adapter_weights(self) -> dict[str, torch.Tensor]:
        return {name: one for name, one in self.weights().items() if is_adapter(name)}

    def without_adapters(self) -> AbstractContextManager[None]:
        """Returns a context manager, in which the model computes without its adapters."""
        return adapters_off(self._chunks)

    def base_weights(self) -> dict[str, torch.Tensor]:
        """Returns this rank's parameters without its adapters; like `weights` otherwise."""
        return {name: one for name, one in self.weights().items() if not is_adapter(name)}

    def own_weights(self) -> dict[str, torch.Tensor]:
        """Like `weights`, but without adapters and without the `borrowed` parameters."""
        found = self.base_weights().items()
        return {name: one for name, one in found if name not in self.borrowed}

    def layout_of(self, rank: int) -> RankLayout:
        """Returns the layout of any rank; not collective."""
        if rank not in self.mesh.ranks:
            return NOTHING
        return self._layout(self.source.family, self.mesh.ranks.index(rank))

    @property
    def _place(self) -> int:
        return self.mesh.ranks.index(self.world.rank)

    def _layout(self, family: Family, place: int) -> RankLayout:
        return megatron_layout(family, self.shape, self.mesh.layout, place, *self._names)

    def weight_source(self, held: Family | None = None) -> WeightSource:
        """Returns the weights from which an engine is updated immediately after a step.

        Args:
            held: The model's family with only those LoRA adapters that the engine holds. They are
                sent as such, and the others are merged into the weights. By default, all are
                merged.

        With `train.fuse_param_gather`, each rank provides only the parts that it updated. With
        `train.release_weights_in_rollout`, engines cannot use the training shard in place, because
        its memory is freed.
        """
        if self.lora is not None:
            if held is None or held.lora is None:
                return self.whole_weights()
            return self._adapter_weights(held)
        tensors = self.weights_in_place()
        shard = None
        if not self.train.release_weights_in_rollout:
            shard = TrainingShard(self.layout(), tensors)
        unchanging = frozenset(self.frozen_weights())
        return FullWeights(self._updated_layouts(), tensors, unchanging, shard)

    def whole_weights(self) -> WeightSource:
        """Returns the weights, which stay complete on this rank until the next step.

        LoRA adapters are merged into them.
        """
        family = self.source.family
        if family.lora is None:
            return FullWeights(self._whole_layouts(family), self.weights())
        rows = adapted_rows(self._chunks)
        tensors = merged_tensors(self.weights(), rows, family.lora.scale)
        unchanging = frozenset(self._unchanging()) - set(map(weight_of, rows))
        return MergedWeights(self._whole_layouts(base_of(family)), tensors, unchanging)

    def _unchanging(self) -> dict[str, torch.Tensor]:
        return self.frozen_weights() | weight_buffers(self._chunks)

    @torch.no_grad()
    def merging_loss(self) -> float | None:
        """Returns the norm of the error of rounding merged weights, divided by that of s B A, over
        all adapted layers; None if there are no adapters or their update is zero. Collective.
        """
        if self.lora is None:
            return None
        found = (0.0, 0.0)
        for tensor in self.whole_weights().tensors.values():
            if isinstance(tensor, MergedTensor):
                lost, total = tensor.rounding()
                found = (found[0] + lost, found[1] + total)
        all_lost, all_total = map(sum, zip(*self.world.gather_objects(found), strict=True))
        return float((all_lost / all_total) ** 0.5) if all_total else None

    def adapters(self) -> FullWeights:
        layouts = self._whole_layouts(only_adapters(self.source.family))
        return FullWeights(layouts, self.adapter_weights())

    def _adapter_weights(self, held: Family) -> AdapterWeights:
        assert held.lora is not None
        weights, layouts = self.weights(), self._whole_layouts(held)
        names = layouts[self.world.rank].shapes
        rows = adapted_rows(self._chunks)
        others = {name: where for name, where in rows.items() if f"{name}.{A}" not in names}
        tensors = merged_tensors(weights, others, held.lora.scale)
        tensors |= {
            name: one for name, one in weights.items() if is_adapter(name) and name in names
        }
        merged = set(map(weight_of, others))
        changing = {name for name in names if not is_adapter(name)} - self._unchanging().keys()
        # The engine cannot use weights into which adapters are merged in place.
        shared = {name: one for name, one in self.base_weights().items() if name not in merged}
        shard = TrainingShard(of_names(self.base_layout(), shared), shared)
        room = {} if self._peer_weights is None else self._peer_weights.scaled
        every = frozenset(changing | merged)
        return AdapterWeights(layouts, tensors, held.lora.scale, every, shard, room)

    def _whole_layouts(self, family: Family) -> list[RankLayout]:
        parts = megatron_layouts(family, self.shape, self.mesh.layout, *self._names)
        by_rank = dict(zip(self.mesh.ranks, parts, strict=True))
        return [by_rank.get(rank, NOTHING) for rank in range(self.world.size)]

    def _updated_layouts(self) -> list[RankLayout]:
        """Returns, for each rank, the layout of the tensor parts that a step updates there."""
        if not self.train.fuse_param_gather:
            return self._whole_layouts(self.source.family)
        ranges = owned_ranges(self._chunks, self._optimizer)
        unowned = weight_buffers(self._chunks) | self.frozen_weights()
        ranges |= {name: (0, tensor.numel()) for name, tensor in unowned.items()}
        return gather_alike(owned_layout(self.layout(), ranges), self.world)

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns this rank's parameters by local name; they stay complete until the next step.

        Writing to these tensors changes the model.
        """
        return named_weights(self.chunks)

    def weights_in_place(self) -> dict[str, torch.Tensor]:
        """Returns this rank's parameters by local name in their current state; not collective.

        Parts that other ranks own may not yet contain the last step's update, and with
        `train.release_weights_in_rollout` the memory may be freed.
        """
        return named_weights(self._chunks)

    def make_trainable(
        self, peak_learning_rate: float, peer_weights: PeerWeights | None = None
    ) -> None:
        """Adds gradient buffers and the optimizer; the weights must already be loaded.

        Args:
            peer_weights: Shared memory for the parameters; by default, Megatron allocates ordinary
                memory.
        """
        self.peak_learning_rate = peak_learning_rate
        self._peer_weights = peer_weights
        if not self.mesh.is_member:
            if peer_weights is not None:
                peer_weights.move([])
            return
        self.mark_trained()
        begin_gradients(self._chunks, self.train.recompute)
        with self.mesh.active(), self.world.platform.megatron_phase():
            self._forward_chunks, self._optimizer = wrap_for_training(
                self._chunks,
                self.config,
                self.train,
                peak_learning_rate,
                self.mesh,
                self.layout_of,
                peer_weights,
            )
        self.memory = TrainedModelMemory(
            self._forward_chunks,
            self._optimizer,
            self.weights_in_place().values(),
            self.world.platform.device,
            self.train.micro_batch_tokens,
        )
        self.trained_weights = TrainedWeights(
            self._forward_chunks,
            lambda: self.optimizer,
            self.train.fuse_param_gather,
            self.train.release_weights_in_rollout,
        )

    def mark_trained(self) -> None:
        """Marks the trained parameters, the only ones in checkpoints of a model with adapters."""
        if self.mesh.is_member:
            trained = self._layout(self.trained_family, self._place).shapes
            mark(named_parameters(self._chunks), trained)

    @property
    def peers(self) -> PeerMemory | None:
        """Peer memory with the parameters; None if they are in ordinary memory."""
        return None if self._peer_weights is None else self._peer_weights.memory

    @property
    def frozen_parts(self) -> tuple[str, ...]:
        return frozen_names(self.train.freeze, self.source.shape)

    @property
    def lora(self) -> Lora | None:
        """Settings of the model's LoRA adapters; None if it has none."""
        return self.source.family.lora

    @property
    def active_adapter_params(self) -> int:
        source = self.source
        return num_active_adapter_parameters(source.family, source.shape) if self.lora else 0

    @property
    def base(self) -> BaseReference | None:
        return self.source.base

    @property
    def passed_over(self) -> BaseReference | None:
        return self.source.passed_over

    @property
    def trains_mtp(self) -> bool:
        return self.shape.has_mtp

    @property
    def trained_family(self) -> Family:
        """Family of the model, with a weight table that contains only the trained parameters."""
        return trained_family(self.source.family, self.shape, self.frozen_parts, self.head)

    @property
    def backward(self) -> BackwardShares:
        """Fractions of the backward pass that the model needs, for FLOP counts."""
        source = self.source
        return backward_shares(source.family, source.shape, self.frozen_parts, self.head)

    def frozen_weights(self) -> dict[str, torch.Tensor]:
        """Returns this rank's frozen parameters by local name; not collective."""
        return {name: p.data for name, p in frozen(named_parameters(self._chunks)).items()}

    def freeze(self) -> None:
        mark(named_parameters(self._chunks), ())
        for chunk in self._chunks:
            chunk.eval()

    def plan(self, batch: TrainBatch, temperature: float = 1.0) -> BatchPlan:
        return self.planner.plan(batch, temperature)

    def forward_all(self, inputs: Sequence[ModelInput]) -> list[Any]:
        """Runs forward over all micro-batches; returns the outputs on the last stage only."""
        if not self.mesh.is_member:
            return []
        with self.mesh.active():
            lengths = [one.local.num_positions for one in inputs]
            return forward_only(self.forward_chunks, inputs, lengths, _forward)

    def accumulate(
        self, inputs: Sequence[ModelInput], loss: Loss, *more: tuple[Sequence[ModelInput], Loss]
    ) -> list[Any]:
        """Runs forward and backward over all micro-batches; returns the loss functions' results.

        For each micro-batch, Megatron's schedule calls the chunks (`_forward`), the last of which
        ends in a head (heads.py). The schedule then passes the head's output to `loss`, and runs
        backward.

        Args:
            *more: Further micro-batches with their own loss functions; all gradients are added up.
        """
        if not self.mesh.is_member:
            return []
        chunks, passes = self.forward_chunks, [(inputs, loss), *more]
        for chunk in chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]  # Megatron's wrapper
        self._optimizer.zero_grad()  # drops references to gradients; keeps the optimizer state
        pairs = [(one, loss) for some, loss in passes for one in some]
        self._prepare_routers([one for some, _ in passes for one in some])
        self._prepare_mtp([one for some, _ in passes for one in some])
        assert self.memory is not None  # the model is trainable
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
        """Sets coefficients and token counts of the routers' losses; collective over replicas."""
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

    def _prepare_mtp(self, inputs: Sequence[ModelInput]) -> None:
        """Sets the coefficient and divisor of the loss of MTP; collective over the replicas."""
        if not self.shape.has_mtp:
            return
        targets = sum(int(one.whole.loss_mask_S.sum()) for one in inputs)
        count = torch.tensor(targets, dtype=torch.float64)
        num_targets = max(int(self.mesh.sum_over_replicas(count)), 1)
        for layer in next_token_layers(self._chunks):
            layer.clear()
            layer.coefficient, layer.num_step_targets = self.train.mtp_coef, num_targets

    def mtp_loss(self) -> dict[str, float]:
        """Returns the last loss of MTP, nats per target token; empty without MTP. Collective."""
        if not self.shape.has_mtp:
            return {}
        found = torch.zeros(2, dtype=torch.float64)
        for layer in next_token_layers(self._chunks) if self.mesh.reports else ():
            if layer.loss is not None:
                found += layer.loss.double().cpu()  # a sync point, once per update
        total, count = self.world.sum_over_world(found).tolist()
        return {"mtp/loss": total / max(count, 1)}

    def expert_load(self) -> dict[str, float]:
        """Returns the expert load in the last update (`load_metrics`); empty for a dense model."""
        shape = self.source.shape
        if shape.moe is None:
            return {}
        load = load_of(self._chunks, shape.num_layers, shape.moe.num_experts)
        return load_metrics(self.mesh.sum_over_world(load), shape.moe.experts_per_token)

    def replays(self) -> dict[str, float]:
        """Returns the `replay_metrics` for the last update; empty without router replay."""
        shape = self.source.shape
        if shape.moe is None or not any(
            ROUTED_EXPERTS in extra.blobs for extra in self.planner.extra_inputs
        ):
            return {}
        counts = self.mesh.sum_over_world(replayed_of(self._chunks, shape.num_layers))
        return replay_metrics(counts, shape)

    def grad_norm(self) -> float:
        norm = 0.0
        if self.mesh.is_member:
            with self.mesh.active(), self.world.platform.megatron_phase():
                norm = gradient_norm(self.optimizer)
        return float(self.mesh.from_first(norm))

    def apply(self, learning_rate: float, grad_norm: float) -> None:
        """Takes an optimizer step with the accumulated gradients; `grad_norm` must be finite."""
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
        shape, rate = self.source.shape, self.train.moe.bias_update_rate
        if shape.moe is None or not shape.moe.has_bias or not rate:
            return
        load = load_of(self._chunks, shape.num_layers, shape.moe.num_experts)
        balance(self._chunks, self.mesh.sum_over_world(load), rate)

    def close(self) -> None:
        """Ends training; its memory is freed when nothing references the model any more.

        Megatron's wrapper references autograd nodes whose hooks reference the wrapper. Python's
        garbage collector cannot detect this cycle, so the wrapper's attributes are cleared here.
        """
        if self.memory is not None:
            self.memory.close()
        wrapped, self._forward_chunks = self._forward_chunks, self._chunks
        if self._optimizer is not None:
            for chunk in wrapped:
                vars(chunk).clear()

    def bad_gradient(self) -> str | None:
        """Returns this rank's first parameter with a non-finite gradient; not collective."""
        for name, parameter in named_parameters(self._chunks).items():
            # A sync point, reached only after a bad step.
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
        labels=one.head,  # Megatron passes `labels` unchanged to the head (heads.py)
        packed_seq_params=one.packed,
        padding_mask=(one.local.sequence_index_S < 0)[None] if has_routers else None,
    )
