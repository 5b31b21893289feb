"""The 3D-HybridEngine: writes a training layout's weights into an inference engine's parameters.

A plan (plan.py) lists each rank's copies, each from a rectangle of a training tensor to a rectangle
of an engine parameter. A transport (packed.py, peer.py) executes the plan.

Who waits for whom: the constructor and `to_rollout` are collective. If one rank finds an error
while planning, all ranks learn of it before any of them raises. Invariant: a plan is executed only
if each rank has proven that the plan fills all of its parameters, and only if all ranks computed
the same plan.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.memory.headroom import Headroom
from hybridrl.hybrid_engine.memory.phases import (
    Phase,
    PhaseError,
    PhaseSwitch,
    TrainingMemory,
    TrainingWeights,
)
from hybridrl.hybrid_engine.planning.owned import frozen_tensors, without
from hybridrl.hybrid_engine.planning.plan import Plan, PlanError, plan_reshard
from hybridrl.hybrid_engine.planning.proof import prove
from hybridrl.hybrid_engine.planning.wire_elements import wire_itemsize, wire_views
from hybridrl.hybrid_engine.transports.packed import (
    PackedTransport,
    agree_wire_dtype,
    make_block_group,
)
from hybridrl.hybrid_engine.transports.peer import PeerTransport
from hybridrl.hybrid_engine.transports.transport import Peers, Traffic, Transport, TransportError
from hybridrl.hybrid_engine.verify import VerifyError, verify
from hybridrl.models.sources import SourceTensor, WeightSource, memory_of
from hybridrl.models.weights import RankLayout, check_tensors
from hybridrl.parallel.failure import PeerError
from hybridrl.parallel.peer_memory import PeerMemory

Alike = TypeVar("Alike", RankLayout, frozenset[str])

POLL_S = 2e-5  # how often the host polls whether the weights have arrived


class WeightTarget(Protocol):
    """An inference engine's live parameters on this rank, writable in place."""

    def layout(self) -> RankLayout:
        """Returns which parts of the HF checkpoint this rank's parameters contain."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Returns the engine's live parameters by their names in the layout, to write to."""

    def begin_update(self) -> None:
        """Makes the parameters writable; until `finish_update` the engine does not generate."""

    def sleep(self, keeps_memory: bool = False) -> None:
        """Stops generation until the next update has finished.

        With `keeps_memory`, weights and caches stay allocated instead of being freed for training.
        """

    def finish_update(self, version: int) -> None:
        """Declares a new version of all parameters, and clears caches that depend on them."""


@runtime_checkable
class ForgettingTarget(WeightTarget, Protocol):
    """A target whose parameters can lose their content while it sleeps."""

    def forgets_weights(self, keeps_memory: bool) -> bool:
        """Returns whether `sleep(keeps_memory)` loses parameters; constant during a run."""


@runtime_checkable
class CopyingTarget(WeightTarget, Protocol):
    """A target that computes with copies of some parameters; `finish_update` updates the copies."""

    def stale_copy(self) -> str | None:
        """Returns the name of the first copy that differs from its parameter, or None."""


@dataclass(frozen=True)
class ReshardStats:
    """Measurements of one transition to rollout. Totals are sums over all ranks.

    Args:
        seconds: Wall time until this rank's parameters are complete, without verification.
        total_node_received_bytes: The part of `total_received_bytes` that came from other nodes.
        slowest_gb_per_s: Receive rate of the rank that took longest, in 1e9 bytes per second.
        transfer_seconds: Time until the weights had arrived, on the slowest rank; the rest of
            `seconds` is spent on waking the engine and on waiting for other ranks.
    """

    version: int
    received_bytes: int
    sent_bytes: int
    seconds: float
    total_planned_bytes: int
    total_sent_bytes: int
    total_received_bytes: int
    total_node_received_bytes: int
    total_messages: int
    slowest_gb_per_s: float
    transfer_seconds: float
    verify_seconds: float
    keeps_memory: bool

    def metrics(self) -> dict[str, float]:
        """Returns the metrics to log for a step; they are equal on all ranks."""
        return {
            "reshard/planned_bytes": float(self.total_planned_bytes),
            "reshard/sent_bytes": float(self.total_sent_bytes),
            "reshard/received_bytes": float(self.total_received_bytes),
            "reshard/node_received_bytes": float(self.total_node_received_bytes),
            "reshard/messages": float(self.total_messages),
            "reshard/gb_per_s": self.slowest_gb_per_s,
            "reshard/transfer_s": self.transfer_seconds,
            "reshard/keeps_memory": float(self.keeps_memory),
            **({"reshard/verify_s": self.verify_seconds} if self.verify_seconds else {}),
        }


class HybridEngine:
    """Keeps an inference engine's weights equal to the policy's.

    Args:
        staging_bytes: Maximum total size of the staging buffers (`rollout.staging_mib`).
        verify_every: Weight versions that are multiples of this number are verified; 0 for none
            (`rollout.verify`).
        training_weights: The trainer's weights, released once they have been copied to the engine.
            Releasing frees them, or, if each rank has updated only its own shard, starts an
            all-gather that overlaps generation.
        domain_size: Number of consecutive ranks on one node; None if all ranks are on one node.
        peer_memory: Memory that contains the source tensors of all ranks, so that ranks can read
            them directly. Without it, or if any source tensor is computed on the fly, weights are
            sent in packed messages.
        timeout_s: Time limit of a transition in seconds (`run.collective_timeout_s`).
        engine_stays: Whether the engine keeps generating while the policy trains on other ranks.
            The engine then pauses only to receive new weights, or when its memory is needed.

    Attributes:
        before_change: Function that is called before each phase change, so that the peak memory of
            each phase can be measured separately.

    Raises PlanError on every rank, naming the affected ranks, if some rank cannot be filled.
    """

    def __init__(
        self,
        source: WeightSource,
        target: WeightTarget,
        peers: Peers,
        *,
        staging_bytes: int,
        verify_every: int = 0,
        training: Sequence[TrainingMemory] = (),
        training_weights: Sequence[TrainingWeights] = (),
        domain_size: int | None = None,
        peer_memory: PeerMemory | None = None,
        timeout_s: float = 1800.0,
        engine_stays: bool = False,
    ) -> None:
        self._engine_stays, self._is_awake = engine_stays, False
        self._source, self._target, self._peers = source, target, peers
        self._verify_every, self._training = verify_every, training
        self._training_weights = training_weights
        self._staging_bytes, self._peer_memory = staging_bytes, peer_memory
        self._timeout_s = timeout_s
        self.phases = PhaseSwitch()
        self._headroom, self._is_released = Headroom(), False
        self.before_change: Callable[[], object] = lambda: None
        self.version = -1
        layouts, weights = source.layouts, source.tensors
        targets = gather_alike(target.layout(), peers)
        frozen = frozen_tensors(layouts, gather_alike(source.frozen, peers))
        own = layouts[peers.rank], target.layout()
        wire_dtype = agree_wire_dtype(weights, target.tensors(), peers, own)
        self._weight_dtype: torch.dtype | None = None
        weight_itemsize = wire_dtype.itemsize
        if wire_itemsize(targets, weight_itemsize) < weight_itemsize:
            self._weight_dtype, wire_dtype = wire_dtype, torch.uint8
        plans: list[Plan] = []
        error = ""
        try:
            ends = [(layouts, targets)]
            if frozen:
                ends.append((without(layouts, frozen), without(targets, frozen)))
            for sources, dests in ends:
                plans.append(
                    plan_reshard(
                        sources,
                        dests,
                        wire_dtype.itemsize,
                        domain_size,
                        weight_itemsize=weight_itemsize,
                    )
                )
                prove(plans[-1], sources, dests, ranks=[peers.rank])
            check_tensors(layouts[peers.rank], _shapes(weights))
            check_tensors(targets[peers.rank], _shapes(target.tensors()))
            self._weights = wire_views(weights, own[0], wire_dtype, self._weight_dtype)
            wire_views(target.tensors(), own[1], wire_dtype, self._weight_dtype)
        except (PlanError, ModelError) as caught:
            error = str(caught)
        is_computed = any(not isinstance(tensor, Tensor) for tensor in weights.values())
        traits = _Traits(is_computed, *_forgets(target))
        traits = _agree(error, "".join(plan.hash() for plan in plans), traits, peers)
        self._forgets = {False: traits.forgets, True: traits.forgets_kept}  # key: `keeps_memory`
        self.plan, self._changing = plans[0], plans[-1]
        self._has_frozen = False  # whether all engines have received the frozen weights
        self._wire_dtype, self._target_layout = wire_dtype, own[1]
        self._block_group: dist.ProcessGroup | None = None
        self._kind: Literal["packed", "peer"]
        self._kind = "packed" if peer_memory is None or traits.has_computed else "peer"
        self._moved = self.plan
        self.transport: Transport = self.make_transport(self._kind)

    @property
    def keeps_memory(self) -> bool:
        """Whether the next phase change frees no memory, because both phases fit on the device."""
        return self._headroom.is_enough

    def make_transport(
        self, kind: Literal["packed", "peer"], plan: Plan | None = None
    ) -> Transport:
        """Returns a new transport, by default for all weights; collective. The caller closes it."""
        ends = plan or self.plan, self._peers, self._weights, self._written()
        if kind == "packed":
            if self._block_group is None:
                self._block_group = make_block_group(self._peers, self._timeout_s)
            staging, block_group = self._staging_bytes, self._block_group
            return PackedTransport(*ends, staging, self._wire_dtype, block_group)
        if self._peer_memory is None:
            raise ValueError(
                "transport 'peer' needs `peer_memory`, which holds the training tensors"
            )
        return PeerTransport(*ends, self._peer_memory)

    def _written(self) -> Mapping[str, Tensor]:
        return wire_views(
            self._target.tensors(), self._target_layout, self._wire_dtype, self._weight_dtype
        )

    def to_rollout(self, version: int | None = None, verifies: bool = False) -> ReshardStats:
        """Enters the rollout phase with the policy's weights; collective.

        Calls `to_train` first if the caller has not.

        Args:
            version: Version number of these weights; None for the previous version plus 1.
            verifies: Whether to verify this version even if it is not due.

        Raises VerifyError, PeerError, or TransportError: the engine must then not generate.
        """
        if self.phases.phase is Phase.ROLLOUT:
            self.to_train()
        self.phases.enter(Phase.ROLLOUT)
        self.version = self.version + 1 if version is None else version
        start = time.perf_counter()
        if self._is_awake:
            self._sleep(keeps_memory=True)  # the engine kept its memory during this training phase
            self._is_awake = False
        self._free_training_memory()
        self._target.begin_update()
        with torch.no_grad():
            self._source.refresh()
        began = time.perf_counter()
        traffic = self._move()
        transfer_seconds = time.perf_counter() - began
        is_due = self._verify_every > 0 and self.version % self._verify_every == 0
        is_due, verify_seconds = is_due or verifies, 0.0
        frees = any(weights.is_freed for weights in self._training_weights)
        if frees and is_due:
            verify_seconds = self._timed_verify()
        for weights in self._training_weights:
            weights.release()
        if frees:  # before the engine allocates the rest of its memory
            _give_blocks_back()
        self._target.finish_update(self.version)
        if is_due and not frees:  # also finds changes that the engine made to its parameters
            verify_seconds = self._timed_verify()
        if is_due:
            self._verify_copies()
        seconds = time.perf_counter() - start - verify_seconds
        moved = (traffic.sent_bytes, traffic.received_bytes, traffic.node_received_bytes)
        times = seconds, self._headroom.spare_bytes(), transfer_seconds
        own = (*moved, traffic.messages, *times)
        # A sync point: the ranks exchange their metrics, and no rank generates before all have
        # received the weights.
        ranks = self._peers.gather_objects(own)
        self._headroom.decide([rank[5] for rank in ranks])
        slowest = max(ranks, key=lambda rank: rank[4])
        return ReshardStats(
            version=self.version,
            received_bytes=traffic.received_bytes,
            sent_bytes=traffic.sent_bytes,
            seconds=seconds,
            total_planned_bytes=sum(self._moved.send_bytes),
            total_sent_bytes=sum(rank[0] for rank in ranks),
            total_received_bytes=sum(rank[1] for rank in ranks),
            total_node_received_bytes=sum(rank[2] for rank in ranks),
            total_messages=sum(rank[3] for rank in ranks),
            slowest_gb_per_s=slowest[1] / max(slowest[4], 1e-9) / 1e9,
            transfer_seconds=max(rank[6] for rank in ranks),
            verify_seconds=verify_seconds,
            keeps_memory=self.keeps_memory,
        )

    def _free_training_memory(self) -> None:
        """Frees memory that only training needs, unless both phases fit on the device."""
        frees = any(weights.is_freed for weights in self._training_weights)
        growth = max((memory.growth_bytes for memory in self._training), default=0)
        may_stay = not frees and all(memory.may_stay for memory in self._training)
        self._headroom.measure_training(may_stay, growth)
        if self._headroom.is_enough:
            return
        for memory in self._training:
            memory.release()
        self._is_released = True
        _give_blocks_back()
        self._headroom.measure_freed()
        self.before_change()  # before the engine allocates the freed memory

    def _move(self) -> Traffic:
        """Runs the transport and waits, because NCCL's watchdog sees no graphs or peer copies."""
        summary = f"weight version {self.version} did not arrive on rank {self._peers.rank}"
        try:
            self._choose_plan()
            traffic = self.transport.run()
            if torch.cuda.is_available():
                done, start = torch.cuda.Event(), time.monotonic()
                done.record()
                while not done.query():
                    self._peers.check()
                    if time.monotonic() - start > self._timeout_s:
                        raise RuntimeError("the device did not finish copying the weights")
                    time.sleep(POLL_S)
        except torch.OutOfMemoryError:
            raise  # its message explains the cause
        except PeerError as error:
            if error.is_lost:  # the error names the rank and the reason
                raise
            raise TransportError(f"{summary}: {error}", error.culprit) from error
        except RuntimeError as error:
            dead = self._peers.dead_ranks()
            why = (
                f"because ranks {dead} have ended"
                if dead
                else "on time. If another rank took longer than run.collective_timeout_s="
                f"{self._timeout_s:g}, or failed, the log of that rank says why"
            )
            culprit = dead[0] if len(dead) == 1 else None
            raise TransportError(f"{summary} {why} ({error})", culprit) from error
        self._has_frozen = True
        return traffic

    def _choose_plan(self) -> None:
        """Chooses the plan. Only one transport exists at a time, as each has staging buffers."""
        wanted = self._changing if self._has_frozen else self.plan
        if wanted is not self._moved:
            self.transport.close()
            self._moved, self.transport = wanted, self.make_transport(self._kind, wanted)

    def send_frozen_again(self) -> None:
        """Makes the next transition send frozen weights again; call on all ranks if
        they changed.
        """
        self._has_frozen = False

    def _sleep(self, keeps_memory: bool) -> None:
        self._target.sleep(keeps_memory=keeps_memory)
        if self._forgets[keeps_memory]:
            self._has_frozen = False

    def close(self) -> None:
        self.transport.close()

    def verify(self) -> None:
        """Compares source and destination of every copy in the rollout phase; collective.

        Raises VerifyError on every rank, PhaseError if the trainer's weights are already freed.
        """
        self.phases.require(Phase.ROLLOUT, "comparing weights")
        memory = memory_of(self._weights.values())
        if any(t.numel() and not t.untyped_storage().nbytes() for t in memory):
            raise PhaseError(
                "comparing weights needs the trainer's weights, which "
                "train.release_weights_in_rollout=true has freed. Verify during the transition: "
                "set rollout.verify=N or call to_rollout(verifies=True)"
            )
        ends = self._weights, self._written()
        verify(self.plan, self._peers, *ends, self._wire_dtype)

    def _verify_copies(self) -> None:
        """Raises VerifyError on every rank if an engine computes with outdated copies."""
        target = self._target
        own = target.stale_copy() if isinstance(target, CopyingTarget) else None
        stale = self._peers.gather_objects(own)
        for rank, name in enumerate(stale):
            if name is not None:
                raise VerifyError(
                    f"{name} of the engine on rank {rank} differs from the parameter that it copies"
                )

    def _timed_verify(self) -> float:
        start = time.perf_counter()
        self.verify()
        return time.perf_counter() - start

    def to_train(self, frees_memory: bool = False) -> None:
        """Enters the training phase. The engine keeps its unfinished requests.

        The engine goes to sleep unless it keeps generating on separate ranks. Its memory is freed
        unless both phases fit on the device (headroom.py), or with `frees_memory`, for rare work
        that needs much memory.
        """
        self.phases.enter(Phase.TRAIN)
        self.before_change()
        if frees_memory:
            self._headroom.reset()
        self._is_awake = self._engine_stays and not frees_memory
        if not self._is_awake:
            self._sleep(keeps_memory=self.keeps_memory)
        # Restoring the weights may need the other training memory, which is restored first.
        released = self._training if self._is_released else ()
        for memory in (*released, *self._training_weights):
            memory.restore()
        self._is_released = False

    def free_engine(self) -> None:
        """Frees the engine's memory during the training phase, if the engine kept it."""
        self.phases.require(Phase.TRAIN, "freeing the engine's memory")
        self._headroom.reset()
        self.before_change()
        self._sleep(keeps_memory=False)
        self._is_awake = False


def _give_blocks_back() -> None:
    """Returns cached blocks of torch's allocator to the driver, for the engine's own allocator."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _shapes(tensors: Mapping[str, SourceTensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def gather_alike(own: Alike, peers: Peers) -> list[Alike]:
    """Returns all ranks' layouts or names. Equal ones become one object, which one rank sends."""
    digests = peers.gather_objects(hashlib.sha256(repr(_content(own)).encode()).hexdigest())
    found = {
        digest: peers.broadcast_object(own, digests.index(digest))
        for digest in dict.fromkeys(digests)
    }
    return [found[digest] for digest in digests]


def _content(own: RankLayout | frozenset[str]) -> object:
    if isinstance(own, RankLayout):
        return own.regions, sorted(own.shapes.items()), own.padding
    return sorted(own)


class _Traits(NamedTuple):
    """Properties of a rank; the job has a property if any rank has it.

    `has_computed`: a source tensor is computed while it is sent. `forgets`: the engine loses its
    weights in a sleep that frees its memory. `forgets_kept`: it loses them even in a sleep that
    keeps its memory.
    """

    has_computed: bool
    forgets: bool
    forgets_kept: bool


def _forgets(target: WeightTarget) -> tuple[bool, bool]:
    """Returns whether a target loses its weights in a sleep that frees, or that keeps, memory."""
    if not isinstance(target, ForgettingTarget):
        return False, False
    return target.forgets_weights(keeps_memory=False), target.forgets_weights(keeps_memory=True)


def _agree(error: str, plan_hash: str, traits: _Traits, peers: Peers) -> _Traits:
    """Returns the job's traits. Raises PlanError on all ranks if one failed or if plans differ."""
    outcomes = peers.gather_objects((error, plan_hash, traits))
    for rank, (found, _, _) in enumerate(outcomes):
        if found:
            raise PlanError(f"rank {rank}: {found}")
    differing = [rank for rank, (_, other, _) in enumerate(outcomes) if other != outcomes[0][1]]
    if differing:
        raise PlanError(
            f"ranks {differing} made a different plan than rank 0, because their layouts differ"
        )
    return _Traits(*map(any, zip(*(own for _, _, own in outcomes), strict=True)))
