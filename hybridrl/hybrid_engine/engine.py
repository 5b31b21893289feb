"""The 3D-HybridEngine: writes a training layout's weights into an inference engine's parameters.

A plan is a rank's list of copies: which rectangle of which training tensor goes into which
rectangle of which engine parameter (plan.py). A transport carries it out (packed.py, peer.py).

Who waits for whom: making one and `to_rollout` are collective. Whatever one rank
finds wrong while the plan is made is told to all before any raises. Invariant: a plan runs only if
it is proven to fill every parameter, by each rank for its own, and only if all hold the same plan.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

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
from hybridrl.hybrid_engine.planning.frozen import frozen_tensors, without
from hybridrl.hybrid_engine.planning.plan import Plan, PlanError, plan_reshard
from hybridrl.hybrid_engine.planning.proof import prove
from hybridrl.hybrid_engine.planning.wire import wire_views
from hybridrl.hybrid_engine.target import WeightTarget, forgets, stale_copy_of
from hybridrl.hybrid_engine.transports.packed import (
    PackedTransport,
    agree_wire_dtype,
    make_block_group,
)
from hybridrl.hybrid_engine.transports.peer import PeerTransport
from hybridrl.hybrid_engine.transports.transport import (
    Peers,
    Traffic,
    Transport,
    TransportError,
)
from hybridrl.hybrid_engine.verify import VerifyError, verify
from hybridrl.models.sources import SourceTensor, WeightSource, memory_of
from hybridrl.models.weights import RankLayout, check_tensors
from hybridrl.parallel.failure import PeerError
from hybridrl.parallel.peer_memory import PeerMemory

Alike = TypeVar("Alike", RankLayout, frozenset[str])

POLL_S = 2e-5  # how often the host looks whether the weights have arrived


@dataclass(frozen=True)
class ReshardStats:
    """What one transition to rollout did.

    Args:
        version: weight version that the engine now has.
        received_bytes, sent_bytes: over links of any kind, of this rank.
        seconds: wall time on this rank, until its parameters are complete.
        total_planned_bytes: what the plan says all ranks send together.
        total_sent_bytes, total_received_bytes: what all ranks did.
        total_node_received_bytes: of those, what came from other nodes.
        total_messages: what all ranks sent; none where they read each other's memory.
        slowest_gb_per_s: bytes received a second by the rank that took longest, 1e9 bytes a second.
        verify_seconds: spent on comparing both ends, 0 when it was not time to.
        keeps_memory: the next change of phases frees nothing: the device has memory for both.
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
    verify_seconds: float
    keeps_memory: bool

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of a step, the same on every rank."""
        return {
            "reshard/planned_bytes": float(self.total_planned_bytes),
            "reshard/sent_bytes": float(self.total_sent_bytes),
            "reshard/received_bytes": float(self.total_received_bytes),
            "reshard/node_received_bytes": float(self.total_node_received_bytes),
            "reshard/messages": float(self.total_messages),
            "reshard/gb_per_s": self.slowest_gb_per_s,
            "reshard/keeps_memory": float(self.keeps_memory),
            **({"reshard/verify_s": self.verify_seconds} if self.verify_seconds else {}),
        }


class HybridEngine:
    """Keeps an inference engine's weights equal to the policy's.

    Args:
        source: What the engine's parameters are written from in every transition.
        target: this rank's engine.
        peers: all ranks, and how they talk.
        staging_bytes: bound of the staging buffers together (`rollout.staging_mib`).
        verify_every: compare both ends of every copy each time the version is a multiple of this;
            0: never (`rollout.verify`).
        training: what the trainer holds only while it trains.
        training_weights: the trainer's weights, released once the engine has them. That frees them,
            or starts to gather them beside generation where a rank has updated only its own part.
        domain_size: ranks of one node, which are consecutive; None: all are of one.
        peer_memory: holds all ranks' source tensors, which the ranks then read where they lie.
            None: weights travel as packed messages, as they do if any is computed.
        timeout_s: longest that a transition may take, seconds (`run.collective_timeout_s`).
        engine_stays: the engine goes on while the policy trains, on ranks of its own; it stops for
            the next weights, and where its memory is asked for.

    Attributes:
        transport: what moves the weights.
        before_change: Called before memory goes to the other phase: peaks of both are told apart.

    Raises:
        PlanError: the layouts cannot be joined, the tensors are not those of the layouts, or the
            ranks do not hold the same plan; on every rank, naming the ranks concerned.
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
        self.before_change: Callable[[], object] = _nothing
        self.version = -1
        layouts, weights = source.layouts, source.tensors
        targets = gather_alike(target.layout(), peers)
        frozen = frozen_tensors(layouts, gather_alike(source.frozen, peers))
        own = layouts[peers.rank], target.layout()
        wire_dtype = agree_wire_dtype(weights, target.tensors(), peers, own)
        plans: list[Plan] = []
        error = ""
        try:
            ends = [(layouts, targets)]
            if frozen:
                ends.append((without(layouts, frozen), without(targets, frozen)))
            for sources, dests in ends:
                plans.append(plan_reshard(sources, dests, wire_dtype.itemsize, domain_size))
                prove(plans[-1], sources, dests, ranks=[peers.rank])
            check_tensors(layouts[peers.rank], _shapes(weights))
            check_tensors(targets[peers.rank], _shapes(target.tensors()))
            self._weights = wire_views(weights, own[0], wire_dtype)
            wire_views(target.tensors(), own[1], wire_dtype)
        except (PlanError, ModelError) as caught:
            error = str(caught)
        is_computed = any(not isinstance(tensor, Tensor) for tensor in weights.values())
        traits = _Traits(is_computed, *forgets(target))
        traits = _agree(error, "".join(plan.hash() for plan in plans), traits, peers)
        self._forgets = {False: traits.forgets, True: traits.forgets_kept}  # by whether it is kept
        self.plan, self._changing = plans[0], plans[-1]
        self._has_frozen = False  # what never changes, in every engine
        self._wire_dtype, self._target_layout = wire_dtype, own[1]
        self._block_group: dist.ProcessGroup | None = None
        self._kind: Literal["packed", "peer"]
        self._kind = "packed" if peer_memory is None or traits.has_computed else "peer"
        self._moved = self.plan
        self.transport: Transport = self.make_transport(self._kind)

    @property
    def keeps_memory(self) -> bool:
        """Whether the next change of phases frees nothing: the device has memory for both."""
        return self._headroom.is_enough

    def make_transport(
        self, kind: Literal["packed", "peer"], plan: Plan | None = None
    ) -> Transport:
        """Returns another transport, of all weights unless a plan is given; the caller closes it.
        Collective.

        Raises:
            ValueError: 'peer', but the engine was made without `peer_memory`.
        """
        ends = plan or self.plan, self._peers, self._weights, self._written()
        if kind == "packed":
            if self._block_group is None:
                self._block_group = make_block_group(self._peers, self._timeout_s)
            staging, block_group = self._staging_bytes, self._block_group
            return PackedTransport(*ends, staging, self._wire_dtype, block_group)
        if self._peer_memory is None:
            raise ValueError("transport 'peer' needs peer_memory, where training tensors lie")
        return PeerTransport(*ends, self._peer_memory)

    def _written(self) -> Mapping[str, Tensor]:
        """Returns the engine's parameters as they are written."""
        return wire_views(self._target.tensors(), self._target_layout, self._wire_dtype)

    def to_rollout(self, version: int | None = None, verifies: bool = False) -> ReshardStats:
        """Enters the rollout phase with the policy's weights; collective.

        Args:
            version: what the engine calls these weights; None: one more than the last time.
            verifies: whether to verify even if it is not time to.

        A loop that never says `to_train` is taken to have trained since the last transition.

        Raises:
            VerifyError: it was time to verify, and a parameter differs from its source.
            TransportError: the weights did not all arrive; the engine generates with none.
            PeerError: a rank is lost.
        """
        if self.phases.phase is Phase.ROLLOUT:
            self.to_train()
        self.phases.enter(Phase.ROLLOUT)
        self.version = self.version + 1 if version is None else version
        start = time.perf_counter()
        if self._is_awake:
            self._sleep(keeps_memory=True)  # it has had it beside this training
            self._is_awake = False
        self._free_training_memory()
        self._target.begin_update()
        with torch.no_grad():
            self._source.refresh()
        traffic = self._move()
        is_due = self._verify_every > 0 and self.version % self._verify_every == 0
        is_due, verify_seconds = is_due or verifies, 0.0
        frees = any(weights.is_freed for weights in self._training_weights)
        if frees and is_due:
            verify_seconds = self._timed_verify()
        for weights in self._training_weights:
            weights.release()
        if frees:  # before the engine takes the rest of its memory
            _give_blocks_back()
        self._target.finish_update(self.version)
        if is_due and not frees:  # what the engine did to its parameters is seen too
            verify_seconds = self._timed_verify()
        if is_due:
            self._verify_copies()
        seconds = time.perf_counter() - start - verify_seconds
        moved = (traffic.sent_bytes, traffic.received_bytes, traffic.node_received_bytes)
        own = (*moved, traffic.messages, seconds, self._headroom.spare_bytes())
        # A sync point: the sums are metrics, and no rank generates before all are complete.
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
            verify_seconds=verify_seconds,
            keeps_memory=self.keeps_memory,
        )

    def _free_training_memory(self) -> None:
        """Frees what only training needs, unless there is memory for both phases."""
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
        self.before_change()  # the engine takes what is free now

    def _move(self) -> Traffic:
        """Runs the transport and waits until this rank's parameters are complete.

        A rank that never comes must not leave this one waiting: no watchdog looks after work in
        CUDA graphs, or after copies out of peer memory.
        """
        said = f"weight version {self.version} did not arrive on rank {self._peers.rank}"
        try:
            self._choose_plan()
            traffic = self.transport.run()
            if torch.cuda.is_available():
                done, start = torch.cuda.Event(), time.monotonic()
                done.record()
                while not done.query():
                    self._peers.check()
                    if time.monotonic() - start > self._timeout_s:
                        raise RuntimeError("no answer from the device")
                    time.sleep(POLL_S)
        except torch.OutOfMemoryError:
            raise  # has its own explanation, and is of this rank
        except PeerError as error:
            if error.is_lost:  # says which rank, and why
                raise
            raise TransportError(f"{said}: {error}", error.culprit) from error
        except RuntimeError as error:
            dead = self._peers.dead_ranks()
            why = (
                f"since ranks {dead} have ended"
                if dead
                else "on time. If another rank took longer than run.collective_timeout_s="
                f"{self._timeout_s:g}, or died, its log says why"
            )
            culprit = dead[0] if len(dead) == 1 else None
            raise TransportError(f"{said} {why} ({error})", culprit) from error
        self._has_frozen = True
        return traffic

    def _choose_plan(self) -> None:
        """Makes the transport one of all weights, or of those that change; collective where it is
        another than before. One at a time: each has staging buffers.
        """
        wanted = self._changing if self._has_frozen else self.plan
        if wanted is not self._moved:
            self.transport.close()
            self._moved, self.transport = wanted, self.make_transport(self._kind, wanted)

    def send_frozen_again(self) -> None:
        """Sends frozen weights in the next transition too; for all ranks to call where they have
        changed after all, as by a checkpoint that was loaded.
        """
        self._has_frozen = False

    def _sleep(self, keeps_memory: bool) -> None:
        self._target.sleep(keeps_memory=keeps_memory)
        if self._forgets[keeps_memory]:
            self._has_frozen = False

    def close(self) -> None:
        """Ends the use of the process group; before it is destroyed."""
        self.transport.close()

    def verify(self) -> None:
        """Compares both ends of every copy; collective, in the rollout phase only.

        Raises:
            PhaseError: the trainer's weights are freed already.
            VerifyError: on every rank, naming the first parameter that differs from its source.
        """
        self.phases.require(Phase.ROLLOUT, "comparing weights")
        memory = memory_of(self._weights.values())
        if any(t.numel() and not t.untyped_storage().nbytes() for t in memory):
            raise PhaseError(
                "comparing weights needs the trainer's, which are freed by "
                "train.release_weights_in_rollout=true: compare on the way, with "
                "rollout.verify=N or to_rollout(verifies=True)"
            )
        ends = self._weights, self._written()
        verify(self.plan, self._peers, *ends, self._wire_dtype)

    def _verify_copies(self) -> None:
        """Raises VerifyError, on every rank, if an engine computes with copies of older weights."""
        stale = self._peers.gather_objects(stale_copy_of(self._target))
        for rank, name in enumerate(stale):
            if name is not None:
                raise VerifyError(
                    f"{name} of the engine on rank {rank} differs from the parameter that it is a "
                    "copy of"
                )

    def _timed_verify(self) -> float:
        """Verifies; returns the seconds that it took."""
        start = time.perf_counter()
        self.verify()
        return time.perf_counter() - start

    def to_train(self, frees_memory: bool = False) -> None:
        """Enters the training phase; the engine sleeps, and keeps unfinished requests, unless it
        stays. Its memory is freed unless there is memory for both phases (headroom.py).

        Args:
            frees_memory: frees it in any case, for what needs much memory and is rare.

        Raises:
            PhaseError: it is the training phase already.
        """
        self.phases.enter(Phase.TRAIN)
        self.before_change()
        if frees_memory:
            self._headroom.reset()
        self._is_awake = self._engine_stays and not frees_memory
        if not self._is_awake:
            self._sleep(keeps_memory=self.keeps_memory)
        # The weights may be made from the rest of the training memory.
        released = self._training if self._is_released else ()
        for memory in (*released, *self._training_weights):
            memory.restore()
        self._is_released = False

    def free_engine(self) -> None:
        """Frees the engine's memory in the training phase, if it was kept."""
        self.phases.require(Phase.TRAIN, "freeing the engine's memory")
        self._headroom.reset()
        self.before_change()
        self._sleep(keeps_memory=False)
        self._is_awake = False


def _nothing() -> None:
    """Nobody measures memory."""


def _give_blocks_back() -> None:
    """Returns what torch's allocator keeps of freed memory: the engine maps its own beside torch.

    The next update allocates it again, once.
    """
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _shapes(tensors: Mapping[str, SourceTensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def gather_alike(own: Alike, peers: Peers) -> list[Alike]:
    """Returns every rank's layout, or set of names; each different one is sent once, by the first
    rank that has it, and is one object.
    """
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
    """What is so if it is so on any rank.

    Args:
        has_computed: Whether a source tensor is computed when it is sent.
        forgets: Whether an engine's weights lose their content in a sleep that frees its memory.
        forgets_kept: Whether they do in a sleep that keeps it.
    """

    has_computed: bool
    forgets: bool
    forgets_kept: bool


def _agree(error: str, plan_hash: str, traits: _Traits, peers: Peers) -> _Traits:
    """Returns the traits of all ranks; raises PlanError on every rank if any has an error, or plans
    unlike rank 0's.
    """
    outcomes = peers.gather_objects((error, plan_hash, traits))
    for rank, (found, _, _) in enumerate(outcomes):
        if found:
            raise PlanError(f"rank {rank}: {found}")
    differing = [rank for rank, (_, other, _) in enumerate(outcomes) if other != outcomes[0][1]]
    if differing:
        raise PlanError(f"ranks {differing} made another plan than rank 0: their layouts differ")
    return _Traits(*map(any, zip(*(own for _, _, own in outcomes), strict=True)))
