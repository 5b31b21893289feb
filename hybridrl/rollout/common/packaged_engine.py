"""An installed package's engine inside this process: what the adapters of vLLM and SGLang share.

Owns the requests, the order of an update (stop, write, forget the cache) and the memory that is
given back while the policy trains. An adapter owns how its package starts and takes requests.

Who waits for whom: all tensor-parallel ranks of a replica make the same calls of `submit`, `step`,
`begin_update` and `finish_update`; replicas are independent. Invariant: a request continues from
its prompt and its tokens whenever the package's own state is dropped, which can happen between any
two calls: what it draws next depends on its seed and its position alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.errors import ModelError, UserError
from hybridrl.hybrid_engine.memory.lending import Piece
from hybridrl.models.family import Family, ModelShape
from hybridrl.models.sources import TrainingShard
from hybridrl.models.weights import RankLayout, hf_shapes
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.rollout.build import EngineInputs
from hybridrl.rollout.common.agreement import TokenAgreement
from hybridrl.rollout.common.engine_memory import KV_CACHE, WEIGHTS, SleepingMemory
from hybridrl.rollout.common.latent_copies import LatentCopies, set_epsilon
from hybridrl.rollout.common.live_weights import (
    check_live,
    free_bytes,
    live_tensors,
    share,
    still_shared,
    weight_holdings,
)
from hybridrl.rollout.common.sampling import no_logprob
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.common.stops import TokenTexts
from hybridrl.rollout.engine import Completion, Holding, Request, RunningRequest, new_rows


@dataclass(frozen=True, kw_only=True)
class StartedPackage:
    """A started engine of a package: its module on this rank, the gloo group of the replica, and
    the package's name and version for messages.
    """

    model: torch.nn.Module
    tp_group: dist.ProcessGroup
    version: str


class ExpertRecorder(Protocol):
    """Records which experts routers chose."""

    def forget(self) -> None:
        """Forgets all: the weights change."""


Live = TypeVar("Live", bound=StartedPackage)
Recorder = TypeVar("Recorder", bound=ExpertRecorder)


class PackagedEngine(ABC, Generic[Live, Recorder]):
    """Implements `RolloutEngine` and `WeightTarget` over one rank's part of a package's engine.

    Construction and `close` are collective over the ranks that have an engine. Parameters of
    `shard`, the trainer's on this rank, that hold what an engine parameter holds become that
    parameter, and `shared` names them.

    Raises:
        UserError: The package is missing or does not fit, cannot run this model here, or has other
            parameters than the weight table (names the first).
    """

    name: ClassVar[str]
    copies: ClassVar[LatentCopies]
    _live: Live
    _runs_ahead: bool  # a step is scheduled before the tokens of the one before it are known
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
        self._device = torch.device(device)
        self._settings, self._family, self._shard = settings, family, shard
        self._shape = family.shape(settings.hf_config)
        for violation in self._model_rules(self._shape, self._device.type == "cpu"):
            raise violation
        self._layout = self._layout_of(layout, rank)
        self._rows: dict[int, RunningRequest] = {}  # unfinished requests in order of arrival
        self._finished: list[Completion] = []
        self._experts: Recorder | None = None
        self._version, self._is_updating, self._keeps_memory = -1, True, False
        self.token_texts: TokenTexts | None = None
        self._memory: SleepingMemory | None = None
        # A refusal is raised once the package has started, on all ranks alike: only then can it be
        # stopped.
        self._refusals: list[ModelError] = []
        self._views: dict[str, Tensor] = {}
        before = free_bytes(self._device)
        self._start(layout, rank)
        if self._refusals:
            self.close()
            raise self._refusals[0]
        self._tensors = live_tensors(self._live.model, self._layout_name)
        self.shared = still_shared(self._views, self._tensors)
        ahead = int(self._runs_ahead and not settings.eager)
        self._agreement = TokenAgreement.over(self._live.tp_group, settings.timeout_s, ahead)
        if self._device.type != "cpu":
            try:
                self._memory = self._own_memory()
            except UserError:
                self.close()
                raise
        self.sleep()  # a run begins in the training phase
        self._kept_bytes = before - free_bytes(self._device)

    # What an adapter does

    @staticmethod
    @abstractmethod
    def _model_rules(shape: ModelShape, is_cpu: bool) -> Iterable[UserError]:
        """Yields why the package cannot run a model here."""

    @abstractmethod
    def _layout_of(self, layout: RolloutLayout, rank: int) -> RankLayout:
        """Returns what this rank's part of a replica holds."""

    @staticmethod
    @abstractmethod
    def _layout_name(name: str) -> str | None:
        """Returns the layout's name of a parameter of the package; None if it is a copy."""

    @abstractmethod
    def _start(self, layout: RolloutLayout, rank: int) -> None:
        """Starts the package: sets `_live`, `_runs_ahead` and `_cache_bytes`, and has `_prepare`
        called.
        """

    @abstractmethod
    def _settle(
        self, model: torch.nn.Module, version: str, layout: RolloutLayout, rank: int
    ) -> None:
        """Repairs a new module before its parameters are compared. Raises ModelError."""

    @abstractmethod
    def _own_memory(self) -> SleepingMemory:
        """Returns the memory of weights and KV cache on a GPU. Raises UserError."""

    @abstractmethod
    def _request_rules(self, request: Request) -> Iterable[ValueError]:
        """Yields why the package cannot generate what a request asks for."""

    @abstractmethod
    def _decode(self) -> tuple[list[str], list[int]]:
        """Hands queued requests to the package and lets it take one step.

        Returns:
            What was drawn, for the agreement of ranks: names of requests, and a token of each.
        """

    @abstractmethod
    def _take_drawn(self) -> None:
        """Puts all tokens that were drawn into `_rows`."""

    @abstractmethod
    def _record_running(self) -> None:
        """Records the experts of what was computed so far: other weights may compute the rest."""

    @abstractmethod
    def _drop_running(self) -> None:
        """Takes all requests from the package; `_rows` keeps them."""

    @property
    @abstractmethod
    def _is_generating(self) -> bool:
        """Whether the package has requests."""

    @abstractmethod
    def _forget_cache(self) -> None:
        """Drops keys and values of older weights."""

    @abstractmethod
    def close(self) -> None:
        """Ends the engine; collective over the ranks that have one."""

    # What adapters use

    def _prepare(
        self, model: torch.nn.Module, version: str, layout: RolloutLayout, rank: int
    ) -> None:
        """Compares and shares the parameters of a new module, before the package measures memory
        and captures graphs.
        """
        latent, shapes = self._shape.latent, hf_shapes(self._family, self._shape)
        try:
            self._settle(model, version, layout, rank)
            check_live(model, self._layout, shapes, version, self._layout_name)
            if latent is not None:
                self.copies.check(model, latent, self._shape.num_layers, version)
        except ModelError as error:
            self._refusals.append(error)
        else:
            set_epsilon(model)
            self._views = share(model, self._shard, self._layout, self._layout_name)

    def _record_with(self, make: Callable[[], Recorder]) -> Recorder | None:
        """Makes what records experts, where they are recorded."""
        if self._settings.records_experts and not self._refusals:
            try:
                self._experts = make()
            except ModelError as error:
                self._refusals.append(error)
        return self._experts

    def _check_logps(self, logps: Sequence[float], number_of: Callable[[int], int | None]) -> None:
        """Raises `no_logprob` where a value is no log-probability, unless `number_of` finds no
        request at its place.
        """
        if math.isfinite(sum(logps)) and max(logps) <= 0:  # the sum is finite if all of them are
            return
        for place, logp in enumerate(logps):
            if not -math.inf < logp <= 0 and (number := number_of(place)) is not None:
                raise no_logprob(self.name, logp, number, self._version, self._tensors)

    # WeightTarget

    def layout(self) -> RankLayout:
        """Returns what of the HF checkpoint each of this rank's fused parameters holds."""
        return self._layout

    def tensors(self) -> Mapping[str, Tensor]:
        """Returns the live parameters, which generation reads; written in place, never replaced."""
        return self._tensors

    def stale_copy(self) -> str | None:
        """Returns the first copy of a parameter that is not of its present weights, if any."""
        return self.copies.stale(self._live.model)

    def sleep(self, keeps_memory: bool = False) -> None:
        """Stops generation and gives weights and KV cache back; running requests keep their tokens.

        The addresses stay reserved, so parameters and CUDA graphs are valid again after the next
        update. Lent memory stays. On CPU nothing is given back.
        """
        self._stop_generation()
        self._keeps_memory = keeps_memory
        if not keeps_memory and self._memory is not None:
            self._memory.sleep()

    def lend(self, num_bytes: int) -> list[Piece]:
        """Lends memory to training, as `lending.MemoryLender`."""
        return [] if self._memory is None else self._memory.lend(num_bytes)

    def forgets_weights(self, keeps_memory: bool) -> bool:
        """Returns whether weights lose their content in such a sleep, as `ForgettingTarget`: what
        is lent is overwritten even where memory stays.
        """
        memory = self._memory
        return memory is not None and (not keeps_memory or memory.lent_bytes > 0)

    def released_bytes(self) -> int:
        """Returns what has no memory now, as `lending.MemoryLender`."""
        return 0 if self._memory is None else self._memory.released_bytes

    def begin_update(self) -> None:
        """Stops generation and maps the weights; running requests keep their tokens."""
        self._stop_generation()
        if self._memory is not None:
            self._memory.wake_up(WEIGHTS)

    def finish_update(self, version: int) -> None:
        """Maps the KV cache and allows generation with the weights `version`."""
        if self._memory is not None:
            self._memory.wake_up(KV_CACHE)
            self._memory.clear_lent()  # training has used it, be the engine asleep or only stopped
        self._forget_cache()
        if self._experts is not None:
            self._experts.forget()
        if self._shape.latent is not None:  # in other models it would look for copies in vain
            self.copies.absorb(self._live.model)
        self._version = version
        self._is_updating = False

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
        """Returns bytes on this rank by what they are for. On GPUs, what the engine keeps while it
        sleeps is measured.
        """
        never_sleeps = self._device.type == "cpu" or self._keeps_memory
        return weight_holdings(self._tensors, self.shared, never_sleeps) | {
            "KV cache": Holding(self._cache_bytes, never_sleeps),
            "graphs and workspace": Holding(self._kept_bytes, stays=True),
        }

    @property
    def version(self) -> int:
        """The version of the weights; -1 before the first update."""
        return self._version

    @property
    def has_unfinished(self) -> bool:
        """Whether a submitted request is not finished yet."""
        return bool(self._rows)

    @property
    def model(self) -> torch.nn.Module:
        """This rank's live module, to be looked at and not to be changed."""
        return self._live.model

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests. Raises ValueError if an id is held, or the package cannot generate such
        a response.
        """
        for request in requests:
            for violation in self._request_rules(request):
                raise violation
        rows = new_rows(self._rows.values(), requests, self.token_texts)
        self._rows.update((row.request.request_id, row) for row in rows)

    def step(self) -> None:
        """Hands queued requests to the package and lets it take one step. Raises TokensDifferError
        if the ranks of this replica drew different tokens in an earlier step.
        """
        if self._is_updating:
            raise RuntimeError(
                f"the {self.name} engine has no complete weights: finish_update() first"
            )
        self._agreement.settle()
        if not self._rows:
            return
        self._agreement.report(*self._decode())
        if not self._rows:
            self._agreement.settle(is_last=True)

    def collect(self) -> list[Completion]:
        """Returns, once, what finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def pending(self) -> list[Request]:
        """Returns the unfinished requests with the tokens they have."""
        self._take_drawn()
        self._record_running()
        return [row.so_far() for row in self._rows.values()]

    def clear(self) -> None:
        """Drops all requests, and responses that were not collected."""
        self._agreement.settle(is_last=True)
        if self._is_generating:
            self._drop_running()
        self._rows.clear()
        self._finished.clear()
