"""Code that the vLLM and SGLang adapters share: runs an installed package's engine in this process.

All tensor-parallel ranks of a replica make the same calls of `submit`, `step`, `begin_update` and
`finish_update`; replicas are independent. Owns the requests, the order of an update (stop, write,
clear the cache) and the memory that is released while the policy trains. Adapters start their
package and pass requests to it. Invariant: a request can continue from only its prompt and tokens.
The package's state may be dropped between any two calls, because the random number for the next
token depends only on the request's seed and the position.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.config.wrapped_models import name_in_files
from hybridrl.errors import ModelError, UserError
from hybridrl.hybrid_engine.memory.alias import is_view
from hybridrl.hybrid_engine.memory.lending import Piece
from hybridrl.hybrid_engine.planning.expert_maps import ExpertTensors, with_experts
from hybridrl.hybrid_engine.planning.wire_elements import fixed_sizes
from hybridrl.models.adapters.rows import base_of
from hybridrl.models.adapters.slots import POLICY, EngineSlots, is_slot, slot_rules
from hybridrl.models.boxes import Box, Shape, box_view
from hybridrl.models.family import Family, ModelShape
from hybridrl.models.quantized import engine_scales, quantized_shapes, with_scale_shapes
from hybridrl.models.sources import TrainingShard
from hybridrl.models.weights import RankLayout, fused_layout, hf_shapes
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.rollout.build import EngineInputs
from hybridrl.rollout.common.agreement import TokenAgreement
from hybridrl.rollout.common.engine_memory import KV_CACHE, WEIGHTS, SleepingMemory
from hybridrl.rollout.common.groups import replica_members
from hybridrl.rollout.common.installed_package import changed_parts_explained
from hybridrl.rollout.common.live_weights import free_bytes, live_tensors, share
from hybridrl.rollout.common.sampling import no_logprob
from hybridrl.rollout.common.scheme import check_parameters, check_placement
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.common.weight_copies import LatentCopies, WideRouters, set_epsilon
from hybridrl.rollout.engine import Holding, QueuedEngine, Request, unknown_adapter
from hybridrl.rollout.model_rules import cpu_rules
from hybridrl.rollout.registry import ENGINES, engine_package


@dataclass(frozen=True, kw_only=True)
class StartInputs:
    """Inputs to start a package's engine on this rank."""

    settings: EngineSettings
    shape: ModelShape
    layout: RolloutLayout
    rank: int
    device: torch.device
    version: str  # name and version of the package, for messages
    members: list[int]  # global ranks of the replica, in tensor-parallel order
    weight_bytes: int  # bytes of this rank's parameters and of its adapter's slots
    slots: EngineSlots | None = None  # slots of the adapters; None if the engine has none

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"


@dataclass(frozen=True, kw_only=True)
class StartedPackage:
    """A started package, with its module and the gloo group of the replica's ranks."""

    model: torch.nn.Module
    tp_group: dist.ProcessGroup
    version: str


class LiveAdapters(Protocol):
    """The LoRA adapters in a started package."""

    def tensors(self, name: str) -> Mapping[str, Tensor]:
        """Returns the memory of an adapter's slots by names of the package's modules."""

    def check(self) -> None:
        """Raises RuntimeError if the package has dropped or moved an adapter."""


def _load_as_in_files(
    load: Any, hf_config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    load((name_in_files(name, hf_config), tensor) for name, tensor in tensors)


class ExpertRecorder(Protocol):
    """Records the experts that routers choose; `forget` drops them when weights change."""

    def forget(self) -> None: ...


Live = TypeVar("Live", bound=StartedPackage)
Recorder = TypeVar("Recorder", bound=ExpertRecorder)


class PackagedEngine(QueuedEngine, ABC, Generic[Live, Recorder]):
    """Implements `RolloutEngine` and `WeightTarget` with one rank's part of a package's engine.

    Construction and `close` are collective over the ranks that have an engine. An engine parameter
    with the same content as a trainer parameter in `shard` uses its memory; `shared` has their
    names.

    Raises:
        UserError: The package is missing, does not suit the host, or cannot run this model on it.
        ModelError: A parameter does not match the weight table; names the first wrong one.
        ValueError: The ranks of a replica do not ascend.
        RuntimeError: There is no process group, or an engine of another layout is still open.
    """

    copies: ClassVar[LatentCopies]
    _live: Live
    _runs_ahead: bool  # whether a step is scheduled before the previous step's tokens are known
    _cache_bytes: int

    @classmethod
    def build(cls, inputs: EngineInputs) -> Any:
        """Builds this rank's part of a replica; collective over the ranks that have an engine."""
        return cls(
            settings=EngineSettings.of(inputs),
            family=inputs.family,
            layout=inputs.layout,
            rank=inputs.rank,
            device=inputs.device,
            shard=inputs.shard,
        )

    def __init__(
        self,
        settings: EngineSettings,
        family: Family,
        layout: RolloutLayout,
        rank: int,
        device: str | torch.device = "cpu",
        shard: TrainingShard | None = None,
    ) -> None:
        super().__init__()
        self._device = torch.device(device)
        self._settings, self._family, self._shard = settings, family, shard
        self._shape = family.shape(settings.hf_config)
        package, is_cpu = engine_package(self.name), self._device.type == "cpu"
        assert package is not None
        for violation in package.model_rules(self._shape, settings.dtype, is_cpu):
            raise violation
        for violation in slot_rules(family, self._shape, ENGINES[self.name].adapts_direct_latents):
            raise violation
        for violation in cpu_rules(settings.quantization, settings.kv_cache_dtype, is_cpu):
            raise violation
        self._placement, self._rank = layout, rank
        self._base_layout = self._weight_layout(base_of(family))
        self._layout = self._base_layout if family.lora is None else self._weight_layout(family)
        version, members = package.installed_version(is_cpu), replica_members(layout, rank)
        if not dist.is_initialized():
            raise RuntimeError("create a process group first, then the engine")
        itemsize: int = getattr(torch, settings.dtype).itemsize
        sizes = fixed_sizes(self._layout)
        self._inputs = StartInputs(
            settings=settings,
            shape=self._shape,
            layout=layout,
            rank=rank,
            device=self._device,
            version=version,
            members=members,
            weight_bytes=sum(
                sizes.get(name, itemsize) * math.prod(shape)
                for name, shape in self._layout.shapes.items()
            ),
            slots=None
            if family.lora is None
            else EngineSlots.of(family.lora, self._layout.shapes, settings.adapters),
        )
        self._adapters: LiveAdapters | None = None
        self._experts: Recorder | None = None
        self._keeps_memory = False
        self._memory: SleepingMemory | None = None
        # Raised only after the package has started on all ranks, because a starting package cannot
        # be stopped.
        self._refusals: list[ModelError] = []
        self._is_placement_checked = False
        self._views: dict[str, Tensor] = {}
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        self._routers = WideRouters({}, {})
        before = free_bytes(self._device)
        support = package.support(is_cpu)
        with changed_parts_explained(version, support):
            self._start()
        if self._refusals:
            self.close()
            raise self._refusals[0]
        self._tensors = live_tensors(self._live.model, self._layout_name)
        self._tensors |= self._routers.narrow
        if self.adapters:
            self._tensors |= self.adapter_tensors(POLICY)
        self._unused = list(_parts(self._layout.padding, self._tensors))
        # Layers that the package repacked after loading no longer share memory.
        self.shared = frozenset(
            name for name, tensor in self._tensors.items() if is_view(name, tensor, self._views)
        )
        ahead = int(self._runs_ahead and not settings.eager)
        self._agreement = TokenAgreement.over(self._live.tp_group, settings.timeout_s, ahead)
        if self._device.type != "cpu":
            try:
                self._memory = self._own_memory()
            except UserError:
                self.close()
                raise
        self.sleep()  # a run begins with the training phase
        self._kept_bytes = before - free_bytes(self._device)

    # Implemented by adapters

    @staticmethod
    @abstractmethod
    def _layout_name(name: str) -> str | None:
        """Returns a parameter's name in the layout; None if it is a copy of others."""

    @staticmethod
    def _padded(layout: RankLayout) -> RankLayout:
        """Returns the layout with the elements that the package adds to parameters."""
        return layout

    @abstractmethod
    def _start(self) -> None:
        """Starts the package, with `_prepare`; sets `_live`, `_runs_ahead` and `_cache_bytes`."""

    @abstractmethod
    def _settle(self, model: torch.nn.Module) -> None:
        """Repairs a new module before its parameters are compared. Raises ModelError."""

    @abstractmethod
    def _own_memory(self) -> SleepingMemory:
        """Returns the memory of weights and KV cache on a GPU; UserError if it is not
        releasable.
        """

    @abstractmethod
    def _request_rules(self, request: Request) -> Iterable[ValueError]:
        """Yields the reasons why the package cannot generate a response to a request."""

    @abstractmethod
    def _decode(self) -> tuple[list[str], list[int]]:
        """Passes queued requests to the package and runs one step. Returns the names of the
        requests for which tokens were drawn, and one token for each, which the replica's ranks
        compare.
        """

    @abstractmethod
    def _take_drawn(self) -> None:
        """Copies all drawn tokens into `_rows`."""

    @abstractmethod
    def _record_running(self) -> None:
        """Records the experts chosen so far, before new weights compute the remaining tokens."""

    @abstractmethod
    def _drop_running(self) -> None:
        """Removes all requests from the package; they remain in `_rows`."""

    @abstractmethod
    def _forget_cache(self) -> None:
        """Drops cached keys and values that older weights computed."""

    @abstractmethod
    def close(self) -> None:
        """Shuts down the engine; collective over the ranks that have one."""

    # Used by adapters

    def _weight_layout(self, family: Family) -> RankLayout:
        _, tp_rank = self._placement.place(self._rank)
        tp, ep = self._placement.tp, self._settings.ep
        layout = self._padded(fused_layout(family, self._shape, tp, tp_rank, ep))
        experts = self._placement.experts_of(self._rank)
        if experts is not None:
            if not ENGINES[self.name].takes_expert_maps:
                raise ValueError(f"the {self.name} engine assigns experts in order, not by a map")
            layout = with_experts(layout, ExpertTensors(family, self._shape), experts)
        return engine_scales(layout, self._quantized())

    def _quantized(self) -> Mapping[str, Shape]:
        if self._settings.quantization == "none":
            return {}
        return quantized_shapes(base_of(self._family), self._shape)

    def _prepare(self, model: torch.nn.Module) -> None:
        """Checks a module and shares its memory, before the package uses or measures the module."""
        layout, latent = self._base_layout, self._shape.latent
        version = self._inputs.version
        try:
            tensors, wide = self._checked_parameters(model)
            if not self._is_placement_checked:
                self._check_placement(model, tensors)
            # Padding starts as random numbers. Only the first and the last layer's was overwritten
            # by the check.
            for name, box in layout.padding:
                box_view(tensors[name], box).zero_()
            if latent is not None:
                self.copies.check(model, latent, self._shape.num_layers, version)
        except ModelError as error:
            self._refusals.append(error)
        else:
            set_epsilon(model)
            self._views = share(model, self._shard, layout, self._layout_name, wide)
            self._routers = WideRouters.of(tensors, self._dtype, self._views)

    def _prepare_loading(self, model: torch.nn.Module) -> None:
        """Checks where a new module's loader puts weights, before the package processes them. Must
        precede `_prepare` if parameters then lose their loaders, as FP8 weights do in vLLM.
        """
        try:
            tensors, _ = self._checked_parameters(model)
            self._check_placement(model, tensors)
        except ModelError as error:
            self._refusals.append(error)
        self._is_placement_checked = True

    def _checked_parameters(
        self, model: torch.nn.Module
    ) -> tuple[dict[str, Tensor], frozenset[str]]:
        """Returns a module's parameters, compared with the layout, and the names of wide ones."""
        self._settle(model)
        tensors = live_tensors(model, self._layout_name)
        wide = WideRouters.names(tensors, self._dtype)
        check_parameters(self._base_layout, tensors, self._inputs.version, wide)
        return tensors, wide

    def _check_placement(self, model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
        load_files: Any = model.load_weights
        load = load_files
        if self._shape.vision is not None:  # files use other tensor names
            load = partial(_load_as_in_files, load_files, self._settings.hf_config)
        shapes = hf_shapes(base_of(self._family), self._shape)
        shapes = with_scale_shapes(shapes, self._quantized())
        dealt = [self._placement.experts_of(rank) or () for rank in self._inputs.members]
        experts = [expert for own in dealt for expert in own] or None
        check_placement(self._base_layout, tensors, shapes, load, self._inputs.version, experts)

    def _prepare_adapter(self, model: torch.nn.Module, slots: Mapping[str, Tensor]) -> None:
        """Checks a module's parameters again, with the slots that the package has added."""
        tensors = {**live_tensors(model, self._layout_name), **self._named_slots(slots)}
        try:
            wide = self._routers.wide
            check_parameters(self._layout, tensors, self._inputs.version, wide)
        except ModelError as error:
            self._refusals.append(error)

    def _named_slots(self, slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self._layout_name(name) or name: slot for name, slot in slots.items()}

    def _record_with(self, make: Callable[[], Recorder]) -> Recorder | None:
        if self._settings.records_experts and not self._refusals:
            try:
                self._experts = make()
            except ModelError as error:
                self._refusals.append(error)
        return self._experts

    def _written_parameters(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the parameters that an update writes completely, and the padded ones, which it
        writes only in part. Leaves out parameters in the trainer's memory. Slots count as complete,
        because `begin_update` clears the parts that an update does not write; other adapters' slots
        are kept.
        """
        padded = {name for name, _ in self._layout.padding if not is_slot(name)}
        own = {name: t for name, t in self._tensors.items() if name not in self.shared}
        whole = [tensor for name, tensor in own.items() if name not in padded]
        return whole, [tensor for name, tensor in own.items() if name in padded]

    def _check_logps(self, logps: Sequence[float], number_of: Callable[[int], int | None]) -> None:
        """Raises the error of `no_logprob` for an invalid value of a request that still runs."""
        if math.isfinite(sum(logps)) and max(logps) <= 0:
            return
        for place, logp in enumerate(logps):
            if not -math.inf < logp <= 0 and (number := number_of(place)) is not None:
                raise no_logprob(self.name, logp, number, self._version, self._tensors)

    # WeightTarget

    def layout(self) -> RankLayout:
        return self._layout

    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the engine's adapters, the policy's first; empty if it has none."""
        return () if self._inputs.slots is None else self._inputs.slots.adapters

    def adapter_tensors(self, name: str) -> Mapping[str, Tensor]:
        """Returns an adapter's slots by the policy's names in the layout; KeyError if unknown."""
        if self._adapters is None or name not in self.adapters:
            raise KeyError(f"the engine has no adapter {name!r}, only {list(self.adapters)}")
        return self._named_slots(self._adapters.tensors(name))

    def stale_copy(self) -> str | None:
        """Returns the name of the first copy that differs from its source weights, if any."""
        return self.copies.stale(self._live.model) or self._routers.stale()

    def sleep(self, keeps_memory: bool = False) -> None:
        """Stops generation and releases weights and KV cache; running requests keep their tokens.

        The addresses stay reserved, so parameters and CUDA graphs are valid again after the next
        update. Memory lent to training stays mapped. On CPU no memory is released.
        """
        self._stop_generation()
        self._keeps_memory = keeps_memory
        if not keeps_memory and self._memory is not None:
            self._memory.sleep()

    def lend(self, num_bytes: int, keeps_weights: bool = False) -> list[Piece]:
        return [] if self._memory is None else self._memory.lend(num_bytes, keeps_weights)

    def forgets_weights(self, keeps_memory: bool) -> bool:
        """Whether `sleep` loses the weights; training always overwrites lent ones."""
        memory = self._memory
        return memory is not None and (not keeps_memory or memory.lends_weights)

    def released_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.released_bytes

    def begin_update(self) -> None:
        """Stops generation and maps the weights; running requests keep their tokens."""
        self._stop_generation()
        if self._memory is not None:
            self._memory.wake_up(WEIGHTS)
        if self._unused:  # their memory may have been released, and lent to training
            with torch.inference_mode():
                torch._foreach_zero_(self._unused)

    def finish_update(self, version: int) -> None:
        """Maps the KV cache, and allows generation with weights `version`."""
        if self._adapters is not None:
            self._adapters.check()
        if self._memory is not None:
            self._memory.wake_up(KV_CACHE)
            self._memory.clear_lent()  # training uses lent memory even if all memory stays mapped
        self._forget_cache()
        if self._experts is not None:
            self._experts.forget()
        if self._shape.latent is not None:
            self.copies.absorb(self._live.model)
        self._routers.widen()
        super().finish_update(version)

    def _stop_generation(self) -> None:
        self._agreement.settle(is_last=True)
        self._is_updating = True
        self._take_drawn()
        self._record_running()
        for row in self._rows.values():
            row.drop_unsettled()
        self._drop_running()

    # RolloutEngine

    def memory(self) -> dict[str, Holding]:
        """Returns the bytes used on this rank, by purpose."""
        never_sleeps = self._device.type == "cpu" or self._keeps_memory
        sizes = {name: tensor.nbytes for name, tensor in self._tensors.items()}
        shared_bytes = sum(sizes[name] for name in self.shared)
        return {
            "weights": Holding(sum(sizes.values()) - shared_bytes, never_sleeps),
            "weights shared with the trainer": Holding(shared_bytes, is_shared=True),
            "KV cache": Holding(self._cache_bytes, never_sleeps),
            "graphs and workspace": Holding(self._kept_bytes, stays=True),
        }

    @property
    def model(self) -> torch.nn.Module:
        return self._live.model

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; ValueError if an id is in use or the package cannot generate it."""
        for request in requests:
            for violation in (
                *unknown_adapter(request, self.adapters),
                *self._request_rules(request),
            ):
                raise violation
        super().submit(requests)

    def step(self) -> None:
        """Runs one step of the package; TokensDifferError if ranks drew different tokens before."""
        self._check_weights()
        self._agreement.settle()
        if not self._rows:
            return
        self._agreement.report(*self._decode())
        if not self._rows:
            self._agreement.settle(is_last=True)

    def pending(self) -> list[Request]:
        self._take_drawn()
        self._record_running()
        return super().pending()

    def clear(self) -> None:
        self._agreement.settle(is_last=True)
        if self._rows:
            self._drop_running()
        super().clear()


def _parts(padding: Iterable[tuple[str, Box]], tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yields the parts of slots that no adapter fills."""
    for name, box in padding:
        if is_slot(name):
            yield box_view(tensors[name], box)
