"""Places a training layout on a set of ranks, and owns Megatron's process groups for it.

Megatron stores a process's groups in global variables of its `parallel_state`. Megatron reads these
variables while it builds a model, in forward and backward passes, and in optimizer steps. Models on
different ranks or with different layouts need different groups. A Mesh therefore creates its groups
with Megatron's code, stores them, and installs them in these variables while its model runs
(`active`). A rank outside a mesh participates in the mesh's creation, but holds no part of its
models.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hybridrl.config.placement import Place, Placement, shown
from hybridrl.parallel.descriptors import shortage
from hybridrl.parallel.groups import World, same_on_all_ranks
from hybridrl.parallel.layout import Coordinates, ExpertCoordinates, TrainLayout
from hybridrl.parallel.view import View
from hybridrl.platform import Platform


class Mesh:
    """A set of ranks that jointly hold models in one training layout.

    Creating a mesh is collective over the world. `others` are existing meshes.

    Attributes:
        where: This rank's coordinates in the layout; None if it is outside the mesh.

    Raises UserError if the limit on open files is too low for the groups.
    """

    def __init__(
        self,
        world: World,
        layout: TrainLayout,
        ranks: Sequence[int] | None = None,
        others: Sequence[Mesh] = (),
    ) -> None:
        self.world, self.layout = world, layout
        self.ranks = tuple(range(world.size) if ranks is None else ranks)
        if len(self.ranks) != layout.world_size or list(self.ranks) != sorted(set(self.ranks)):
            raise ValueError(
                f"the layout has {layout.world_size} ranks, but the mesh has ranks {self.ranks}"
            )
        is_member = world.rank in self.ranks
        self._place = self.ranks.index(world.rank) if is_member else None
        self.where: Coordinates | None = None
        if self._place is not None:
            self.where = layout.coordinates(self._place)
        # If ranks disagreed on a group's members, they would wait for each other forever.
        same_on_all_ranks(world, "the training layout", f"{layout} on {self.ranks}")
        self._check_descriptors([mesh.layout for mesh in others])
        self._group: dist.ProcessGroup | None = None
        if not self.is_whole_world:
            timeout = datetime.timedelta(seconds=world.timeout_s)
            self._group = dist.new_group(list(self.ranks), backend="gloo", timeout=timeout)
        self._groups: dict[str, Any] = {}
        with _kept_groups():
            self._make_groups()
            if is_member:
                self._check_groups()
                self._connect()
            self._groups = _globals()
        if not others or (is_member and not any(mesh.is_member for mesh in others)):
            _set(self._groups)  # Megatron uses these groups outside of `active`

    @property
    def platform(self) -> Platform:
        return self.world.platform

    @property
    def is_member(self) -> bool:
        return self._place is not None

    @property
    def is_whole_world(self) -> bool:
        return len(self.ranks) == self.world.size

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage, which computes losses."""
        return self.where is not None and self.where.pp == self.layout.pp - 1

    @property
    def reports(self) -> bool:
        """Whether this rank contributes loss sums, in the last stage at tensor-parallel rank 0."""
        return self.where is not None and self.is_last_stage and self.where.tp == 0

    @property
    def place(self) -> Coordinates:
        """This rank's coordinates in the layout; raises RuntimeError if it is outside the mesh."""
        if self.where is None:
            raise RuntimeError(f"rank {self.world.rank} is not in the mesh of ranks {self.ranks}")
        return self.where

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Installs this mesh's groups in Megatron's global variables during a `with` block.

        Entering is cheap if they are installed. If Megatron changes a variable meanwhile (the
        current virtual pipeline stage), the changed value is installed the next time.
        """
        before = _globals()
        if all(before[name] is value for name, value in self._groups.items()):
            yield
            return
        _set(self._groups)
        try:
            yield
        finally:
            self._groups = _globals()
            _set(before)

    @contextlib.contextmanager
    def as_world(self, module: ModuleType) -> Iterator[None]:
        """Context manager: a Megatron module gathers objects only from the ranks of this mesh."""
        if self.is_whole_world:
            yield
            return
        distributed, seen, group = View(dist), View(torch), self._group
        distributed.get_world_size = lambda: len(self.ranks)
        distributed.all_gather_object = partial(dist.all_gather_object, group=group)
        seen.distributed = distributed
        module.torch = seen  # type: ignore[attr-defined]
        try:
            yield
        finally:
            module.torch = torch  # type: ignore[attr-defined]

    def sum_over_world(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `values` over the whole world, on the CPU; collective over it."""
        self.meet("computation on other ranks")
        return self.world.sum_over_world(values)

    def sum_over_context(self, values: torch.Tensor) -> torch.Tensor:
        on_device = values.to(self.platform.device, copy=True)
        with self.active():
            group = parallel_state.get_context_parallel_group()
        dist.all_reduce(on_device, group=group)
        return on_device.cpu()

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        summed = values.clone()
        with self.active():
            group = parallel_state.get_data_parallel_group_gloo()
        dist.all_reduce(summed, group=group)
        return summed

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's (picklable) `value`, in rank order; collective over the mesh."""
        if self._group is None:
            return self.world.gather_objects(value)
        found: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(found, value, group=self._group)
        return found

    def meet(self, what: str) -> None:
        """Waits for all ranks of the world, unless all are in the mesh.

        Idle ranks outside the mesh might otherwise exceed the next collective's timeout.
        """
        if not self.is_whole_world:
            self.world.arrive(what)

    def from_first(self, value: Any) -> Any:
        """Returns the `value` of the mesh's first rank on all ranks of the world; collective.

        If the mesh contains all ranks, their values must be equal, and none is sent.
        """
        if self.is_whole_world:
            return value
        return self.world.broadcast_object(value, self.ranks[0])

    def _check_descriptors(self, others: Sequence[TrainLayout]) -> None:
        lacking = None
        if self.world.size > 1:
            lacking = shortage(self.world.size, [*others, self.layout], self.platform.is_cpu)
        for error in self.world.gather_objects(lacking):
            if error is not None:
                raise error

    def _make_groups(self) -> None:
        layout = self.layout
        with _world_of(self.ranks, self._place):
            parallel_state.initialize_model_parallel(
                layout.tp,
                layout.pp,
                layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=_expert_tensor_size(layout),
                order=layout.order,
                distributed_timeout_minutes=self.world.timeout_s / 60,  # type: ignore[arg-type]  # a timedelta takes it
                create_gloo_process_groups=True,
            )
        # Pipeline stages address each other by the ranks in Megatron's global variables.
        for name, value in _globals().items():
            if "_RANKS" in name and value is not None:
                setattr(parallel_state, name, _mapped(value, self.ranks))

    def _connect(self) -> None:
        """Runs one collective in each of the groups that training uses.

        NCCL connects all ranks of a group at its first use, but training might begin with a message
        between two of them. Also, connections must have their memory before the engine measures
        what is free.
        """
        if self.platform.is_cpu:  # gloo has connected already
            return
        groups = [
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_context_parallel_group(),
            parallel_state.get_data_parallel_group(),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_model_parallel_group(),
        ]
        if self.layout.ep * self.layout.etp > 1:
            groups += [
                parallel_state.get_expert_model_parallel_group(),
                parallel_state.get_expert_tensor_parallel_group(),
                parallel_state.get_expert_data_parallel_group(),
                parallel_state.get_expert_tensor_and_model_parallel_group(),
                parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
            ]
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(torch.zeros(1, device=self.platform.device), group=group)

    def _check_groups(self) -> None:
        """Raises an error if Megatron and the layout assign different coordinates to this rank."""
        megatron = Coordinates(
            tp=parallel_state.get_tensor_model_parallel_rank(),
            cp=parallel_state.get_context_parallel_rank(),
            dp=parallel_state.get_data_parallel_rank(),
            pp=parallel_state.get_pipeline_model_parallel_rank(),
        )
        if megatron != self.where:
            raise RuntimeError(
                f"rank {self.world.rank} is {megatron} in Megatron, but {self.where} in the layout"
            )
        if self.layout.ep * self.layout.etp == 1 or self._place is None:
            return
        of_experts = ExpertCoordinates(
            etp=parallel_state.get_expert_tensor_parallel_rank(),
            ep=parallel_state.get_expert_model_parallel_rank(),
            edp=parallel_state.get_expert_data_parallel_rank(),
            pp=parallel_state.get_pipeline_model_parallel_rank(),
        )
        if of_experts != (wanted := self.layout.expert_coordinates(self._place)):
            raise RuntimeError(
                f"rank {self.world.rank} is {of_experts} in Megatron, but {wanted} in the layout"
            )


class Meshes:
    """The meshes of a run, created on demand. Models with the same placement share a mesh."""

    def __init__(self, world: World, placement: Placement, layout: TrainLayout) -> None:
        self.world, self.placement, self._layout = world, placement, layout
        self._made: dict[Place, Mesh] = {}
        self.of("policy")  # first, so that Megatron uses the policy's groups if no mesh is active

    def of(self, role: str) -> Mesh:
        """Returns the mesh for a role's models; collective over the world if it is new."""
        place = self.placement.of(role)
        if place not in self._made:
            layout = self._layout
            if self._made:
                layout = TrainLayout(
                    len(place.ranks),
                    tp=place.tp,
                    pp=place.pp,
                    cp=place.cp,
                    ep=place.ep,
                    vpp=place.vpp,
                    etp=place.etp,
                )
            others = list(self._made.values())
            self._made[place] = Mesh(self.world, layout, place.ranks, others)
        return self._made[place]

    @property
    def name(self) -> str:
        """Text that identifies all meshes' layouts; random states are restored only in these."""
        return ", ".join(
            layout_name(mesh.layout)
            + ("" if mesh.is_whole_world else f" on ranks {shown(mesh.ranks)}")
            for mesh in self._made.values()
        )


def layout_name(layout: TrainLayout) -> str:
    dense = f"{layout.order} tp{layout.tp} cp{layout.cp} dp{layout.dp} pp{layout.pp}"
    experts = f" ep{layout.ep} etp{layout.etp}" if layout.ep * layout.etp > 1 else ""
    return f"{dense} vpp{layout.vpp}{experts}"


def _expert_tensor_size(layout: TrainLayout) -> int:
    """Returns the expert tensor-parallel size to pass to Megatron.

    Megatron creates expert groups even for dense models. If pp is not the last axis, it requires
    that the expert-data and data-parallel sizes are equal. For models with experts, the layout
    rejects such an order.
    """
    is_pp_last = layout.pp == 1 or layout.order.endswith("pp")
    return layout.etp if is_pp_last else layout.tp


def _globals() -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and name.isupper()
    }


def _set(groups: Mapping[str, Any]) -> None:
    for name, value in groups.items():
        setattr(parallel_state, name, value)


@contextlib.contextmanager
def _kept_groups() -> Iterator[None]:
    before = _globals()
    _set({name: {} if isinstance(value, dict) else None for name, value in before.items()})
    try:
        yield
    finally:
        _set(before)


@contextlib.contextmanager
def _world_of(ranks: Sequence[int], place: int | None) -> Iterator[None]:
    """Makes Megatron create groups as if `ranks` were the world; `place` is this rank's or None."""
    if len(ranks) == dist.get_world_size():
        yield
        return
    distributed, seen = View(dist), View(torch)
    distributed.get_world_size = lambda group=None: len(ranks)
    distributed.get_rank = lambda group=None: -1 if place is None else place

    def new_group(ranks: Sequence[int] | None = None, **keywords: Any) -> Any:
        return dist.new_group(_mapped(ranks, members), **keywords)

    members, distributed.new_group, seen.distributed = ranks, new_group, distributed
    parallel_state.torch = seen
    try:
        yield
    finally:
        parallel_state.torch = torch


def _mapped(places: Any, ranks: Sequence[int]) -> Any:
    """Maps indices to ranks. Indices may be in nested lists."""
    if places is None:
        return None
    return [
        _mapped(place, ranks) if isinstance(place, list | tuple) else ranks[place]
        for place in places
    ]
