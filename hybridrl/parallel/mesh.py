"""A set of ranks with a training layout over them, and Megatron's process groups for it.

Megatron keeps the groups of a process in one place, the globals of its `parallel_state`, and reads
them while a model is built, in its passes and in its optimizer's steps. Where models lie on
different ranks, or are cut differently on the same ones, each needs groups of its own: a Mesh makes
them with Megatron's own code, keeps them, and puts them in that place for as long as its model
works (`active`). A rank outside a mesh takes part in making it, and holds no part of its models.
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
    """Ranks that hold models together, and how these are cut over them.

    Making one is collective over the world.

    Args:
        world: all ranks.
        layout: training layout over `ranks`, by their places in it.
        ranks: of the world, ascending; None: all.
        others: meshes of the same world that are there already.

    Attributes:
        where: this rank's place in the layout; None: it is outside.

    Raises:
        UserError: the process may not open as many files as the groups take.
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
            raise ValueError(f"a layout over {layout.world_size} ranks for ranks {self.ranks}")
        is_member = world.rank in self.ranks
        self._place = self.ranks.index(world.rank) if is_member else None
        self.where: Coordinates | None = None
        if self._place is not None:
            self.where = layout.coordinates(self._place)
        # Groups of different ranks on different ranks would wait for each other without end.
        same_on_all_ranks(world, "the training layout", f"{layout} on {self.ranks}")
        self._check_descriptors([mesh.layout for mesh in others])
        self._group = None if self.is_whole_world else self._new_group()
        self._groups: dict[str, Any] = {}
        with _kept_groups():
            self._make_groups()
            if is_member:
                self._check_groups()
                self._connect()
            self._groups = _globals()
        if not others or (is_member and not any(mesh.is_member for mesh in others)):
            _set(self._groups)  # outside of `active` Megatron finds those of the first mesh

    @property
    def platform(self) -> Platform:
        """Device and backend of this rank."""
        return self.world.platform

    @property
    def is_member(self) -> bool:
        """Whether this rank is one of the mesh's."""
        return self._place is not None

    @property
    def is_whole_world(self) -> bool:
        """Whether all ranks are of the mesh."""
        return len(self.ranks) == self.world.size

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage, where losses are computed."""
        return self.where is not None and self.where.pp == self.layout.pp - 1

    @property
    def reports(self) -> bool:
        """Whether this rank contributes loss sums: last stage, first tensor-parallel rank."""
        return self.where is not None and self.is_last_stage and self.where.tp == 0

    @property
    def place(self) -> Coordinates:
        """This rank's place in the layout.

        Raises:
            RuntimeError: it is outside.
        """
        if self.where is None:
            raise RuntimeError(f"rank {self.world.rank} is not one of {self.ranks}")
        return self.where

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Lets Megatron work with this mesh's groups inside; costs nothing where it does already.

        What Megatron itself changes inside (the virtual pipeline stage that is at work) is kept.
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
        """Makes a module of Megatron that gathers objects from the whole world do so from the
        mesh's ranks.
        """
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
        """Returns the sum of `values` over all ranks of the world, those outside too, on the CPU;
        collective over the world.
        """
        self.meet("what other ranks compute")
        return self.world.sum_over_world(values)

    def sum_over_context(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `values` over this rank's context-parallel group, on the CPU."""
        on_device = values.to(self.platform.device, copy=True)
        with self.active():
            group = parallel_state.get_context_parallel_group()
        dist.all_reduce(on_device, group=group)
        return on_device.cpu()

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `values`, on the CPU, over this rank's data-parallel group."""
        summed = values.clone()
        with self.active():
            group = parallel_state.get_data_parallel_group_gloo()
        dist.all_reduce(summed, group=group)
        return summed

    def meet(self, what: str) -> None:
        """Waits for the ranks of the mesh where some are outside: these have nothing to compute,
        and the wait in a collective of tensors is bounded.
        """
        if not self.is_whole_world:
            self.world.arrive(what)

    def from_first(self, value: Any) -> Any:
        """Returns, on all ranks of the world, what the mesh's first rank gives; collective. Where
        all ranks are of the mesh each returns its own: these are the same.
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

    def _new_group(self) -> dist.ProcessGroup | None:
        timeout = datetime.timedelta(seconds=self.world.timeout_s)
        return dist.new_group(list(self.ranks), backend="gloo", timeout=timeout)

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
        # Megatron sends between pipeline stages by the ranks that it has noted.
        for name, value in _globals().items():
            if "_RANKS" in name and value is not None:
                setattr(parallel_state, name, _mapped(value, self.ranks))

    def _connect(self) -> None:
        """Uses the groups that training uses once.

        NCCL connects ranks at a group's first use. All of them must take part, if it is not a
        message between two on its own, and may then begin with what is between some; and the engine
        sees how much memory is left.
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
        """Refuses to go on when Megatron placed this rank elsewhere than our layout did."""
        megatron = Coordinates(
            tp=parallel_state.get_tensor_model_parallel_rank(),
            cp=parallel_state.get_context_parallel_rank(),
            dp=parallel_state.get_data_parallel_rank(),
            pp=parallel_state.get_pipeline_model_parallel_rank(),
        )
        if megatron != self.where:
            raise RuntimeError(
                f"rank {self.world.rank}: Megatron stands at {megatron}, the layout at {self.where}"
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
                f"rank {self.world.rank}: Megatron has experts {of_experts}, the layout {wanted}"
            )


class Meshes:
    """The meshes of a run, made as roles ask for them; models that lie alike share one.

    Args:
        world: all ranks.
        placement: where models lie.
        layout: of the policy, over its ranks.
    """

    def __init__(self, world: World, placement: Placement, layout: TrainLayout) -> None:
        self.world, self.placement, self._layout = world, placement, layout
        self._made: dict[Place, Mesh] = {}
        self.of("policy")  # the first: its groups are Megatron's where no mesh is active

    def of(self, role: str) -> Mesh:
        """Returns the mesh of a role's models; collective over the world where it is new."""
        place = self.placement.of(role)
        if place not in self._made:
            layout = self._layout
            if self._made:
                sizes = place.tp, place.pp, place.cp, place.ep, place.vpp
                layout = TrainLayout(len(place.ranks), *sizes, etp=place.etp)
            others = list(self._made.values())
            self._made[place] = Mesh(self.world, layout, place.ranks, others)
        return self._made[place]

    @property
    def name(self) -> str:
        """Names the layouts; random states of a checkpoint go on in the same ones only."""
        return ", ".join(
            layout_name(mesh.layout)
            + ("" if mesh.is_whole_world else f" on ranks {shown(mesh.ranks)}")
            for mesh in self._made.values()
        )


def layout_name(layout: TrainLayout) -> str:
    """Returns a training layout in words."""
    dense = f"{layout.order} tp{layout.tp} cp{layout.cp} dp{layout.dp} pp{layout.pp}"
    experts = f" ep{layout.ep} etp{layout.etp}" if layout.ep * layout.etp > 1 else ""
    return f"{dense} vpp{layout.vpp}{experts}"


def _expert_tensor_size(layout: TrainLayout) -> int:
    """Returns the size that Megatron is given.

    It lays out experts for dense models too, and where pp is not the last axis takes only as many
    expert-data-parallel ranks as data-parallel ones. Such an order is refused for experts.
    """
    is_pp_last = layout.pp == 1 or layout.order.endswith("pp")
    return layout.etp if is_pp_last else layout.tp


def _globals() -> dict[str, Any]:
    """Returns what Megatron keeps of a process's groups."""
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
    """Lets Megatron make groups as if there were none; puts back afterwards what there was."""
    before = _globals()
    _set({name: {} if isinstance(value, dict) else None for name, value in before.items()})
    try:
        yield
    finally:
        _set(before)


@contextlib.contextmanager
def _world_of(ranks: Sequence[int], place: int | None) -> Iterator[None]:
    """Makes Megatron's code that makes groups see `ranks` as the whole world, and this rank at its
    place among them; -1, which is in no group, where it is outside.
    """
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
    """Returns the ranks at these places, which may be lists of lists."""
    if places is None:
        return None
    return [
        _mapped(place, ranks) if isinstance(place, list | tuple) else ranks[place]
        for place in places
    ]
