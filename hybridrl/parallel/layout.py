"""Computes the coordinates of each rank in a training or rollout layout. Pure; no torch.

A training layout arranges all ranks in a grid with the axes tp, cp, dp and pp. `order` lists the
axes from the fastest-varying to the slowest, as in Megatron's `initialize_model_parallel`, so both
assign the same coordinates. For expert weights only, the ranks of a pipeline stage are divided a
second time, along the axes etp, ep and edp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from operator import mul

from hybridrl.config.rules import ORDER_AXES

AXES = tuple(axis for axis in ORDER_AXES if axis != "ep")
DEFAULT_ORDER = "-".join(ORDER_AXES)


@dataclass(frozen=True)
class Coordinates:
    """The position of one rank on every axis of a training layout."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ExpertCoordinates:
    """A rank's expert-tensor, expert and expert-data-parallel ranks, and its pipeline stage."""

    etp: int
    ep: int
    edp: int
    pp: int


EXPERT_AXES: dict[str, str] = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
"""Axis of the expert layout for each name in `TrainLayout.order`."""


@dataclass(frozen=True)
class TrainLayout:
    """Tensor, pipeline, virtual-pipeline, context and data parallel sizes over `world_size` ranks.

    Args:
        world_size: A multiple of `tp * pp * cp`; the quotient is the data-parallel size.
        ep: Number of parts into which the set of experts in a layer is divided.
        vpp: Number of model chunks per pipeline stage; 1 if there is no virtual pipeline.
        order: Axes from the fastest-varying to the slowest, in Megatron's notation.
        etp: Number of parts into which each expert is split; `ep * etp` must divide the number of
            ranks in a pipeline stage.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    order: str = DEFAULT_ORDER
    etp: int = 1

    def __post_init__(self) -> None:
        if sorted(self.order.split("-")) != sorted(ORDER_AXES):
            raise ValueError(f"order={self.order!r} must name each of {', '.join(ORDER_AXES)} once")
        if self.world_size % (self.tp * self.pp * self.cp):
            raise ValueError(
                f"tp*pp*cp = {self.tp}*{self.pp}*{self.cp} does not divide "
                f"the world of {self.world_size} ranks"
            )
        if (self.world_size // self.pp) % (self.ep * self.etp):
            raise ValueError(
                f"ep*etp = {self.ep}*{self.etp} does not divide "
                f"the {self.world_size // self.pp} ranks of a pipeline stage"
            )

    @property
    def dp(self) -> int:
        """Data-parallel size: number of model replicas."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Expert-data-parallel size: number of ranks with the same part of the same experts."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def size(self, axis: str) -> int:
        """Returns the number of ranks along an axis of the dense or the expert layout."""
        dense = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        return (dense | {"etp": self.etp, "ep": self.ep, "edp": self.edp})[axis]

    @cached_property
    def _grid(self) -> dict[Coordinates, int]:
        order = [axis for axis in self.order.split("-") if axis != "ep"]
        strides = self._strides(order)
        return {
            Coordinates(*position): sum(strides[a] * i for a, i in zip(AXES, position, strict=True))
            for position in product(*(range(self.size(a)) for a in AXES))
        }

    @cached_property
    def _coordinates(self) -> tuple[Coordinates, ...]:
        by_rank = {rank: where for where, rank in self._grid.items()}
        return tuple(by_rank[rank] for rank in range(self.world_size))

    @cached_property
    def _expert_coordinates(self) -> tuple[ExpertCoordinates, ...]:
        axes = [EXPERT_AXES[axis] for axis in self.order.split("-") if axis in EXPERT_AXES]
        # The slowest axis comes first, because `product` varies the last one fastest.
        grid = product(*(range(self.size(axis)) for axis in reversed(axes)))
        found = tuple(
            ExpertCoordinates(**dict(zip(reversed(axes), place, strict=True))) for place in grid
        )
        if any(at.pp != where.pp for at, where in zip(found, self._coordinates, strict=True)):
            raise ValueError(
                f"order={self.order!r} assigns a rank's experts to another pipeline "
                f"stage; put pp last"
            )
        return found

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Returns the coordinates that Megatron assigns to `rank` in the expert layout.

        Raises ValueError if experts and dense weights of a rank are on different pipeline stages.
        """
        return self._expert_coordinates[rank]

    def gathers_tokens(self, experts_per_token: int, rank: int = 0) -> bool:
        """Whether the ranks that share experts with `rank` can gather tokens instead of routing.

        First, all of them must be tensor-parallel ranks of one replica, which hold shares of the
        same micro-batch. Second, gathering must send each token at most as often as routing, which
        sends it once per selected expert. `models/megatron/dispatch.py` makes the same decision
        from process groups. If `ep * etp` divides `tp`, the result is the same for all ranks.
        """
        if self.ep * self.etp == 1:
            return True
        if self.ep > experts_per_token or self.ep * self.etp > self.tp:
            return False
        # Use strides, because the layout search does not compute coordinates for most layouts.
        axes = self.order.split("-")
        dense = self._strides([axis for axis in axes if axis != "ep"])["tp"]
        strides = self._strides([EXPERT_AXES[axis] for axis in axes if axis in EXPERT_AXES])
        ep, etp = strides["ep"], strides["etp"]
        first = rank - rank // ep % self.ep * ep - rank // etp % self.etp * etp
        sharing = [first + i * ep + j * etp for i in range(self.ep) for j in range(self.etp)]
        # Compare the first ranks of their tensor-parallel groups.
        return len({other - other // dense % self.tp * dense for other in sharing}) == 1

    def _strides(self, axes: Sequence[str]) -> dict[str, int]:
        """Returns the distance between neighbours along each axis; the first varies fastest."""
        products = accumulate((self.size(axis) for axis in axes), mul, initial=1)
        return dict(zip(axes, products, strict=False))

    def experts(self, rank: int, num_experts: int) -> range:
        """Returns the global indices of the experts that `rank` holds in each layer."""
        if num_experts % self.ep:
            raise ValueError(f"num_experts={num_experts} is not a multiple of ep = {self.ep}")
        count = num_experts // self.ep
        first = self.expert_coordinates(rank).ep * count
        return range(first, first + count)

    def coordinates(self, rank: int) -> Coordinates:
        return self._coordinates[rank]

    def rank_at(self, *, tp: int, cp: int, dp: int, pp: int) -> int:
        return self._grid[Coordinates(tp, cp, dp, pp)]

    def groups(self, axis: str) -> list[list[int]]:
        found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for rank, where in enumerate(self._coordinates):
            rest = tuple(getattr(where, a) for a in AXES if a != axis)
            found.setdefault(rest, []).append((getattr(where, axis), rank))
        return [[rank for _, rank in sorted(members)] for members in found.values()]

    def chunk_sizes(self, num_layers: int) -> list[int]:
        """Returns the number of layers in each of the `pp * vpp` model chunks, in layer order.

        If the layers cannot be divided evenly, some chunks have one layer less. The last chunk is
        the first to have fewer layers, because it also computes the logits; then the first chunk,
        because it contains the embedding; then the other chunks, from the end.

        Raises ValueError if there are fewer layers than chunks.
        """
        chunks = self.pp * self.vpp
        if num_layers < chunks:
            raise ValueError(f"num_layers={num_layers} is below pp*vpp = {self.pp}*{self.vpp}")
        smaller = [chunks - 1, 0, *range(chunks - 2, 0, -1)][: -num_layers % chunks]
        most = -(-num_layers // chunks)
        return [most - (chunk in smaller) for chunk in range(chunks)]

    def layers(self, pp_rank: int, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Returns the global indices of the layers in each model chunk of a pipeline stage.

        Chunk v of stage p has number `v * pp + p`, as in Megatron's interleaved schedule.
        """
        sizes = self.chunk_sizes(num_layers)
        stops = list(accumulate(sizes))
        own = range(pp_rank, len(sizes), self.pp)
        return tuple(tuple(range(stops[c] - sizes[c], stops[c])) for c in own)


Place = tuple[int, int]
"""Index of a rank's replica in a rollout layout, and its tensor-parallel rank in the replica."""


@dataclass(frozen=True)
class RolloutLayout:
    """Assigns each rank to an engine replica and to a tensor-parallel rank in the replica.

    Args:
        assignment: Unique place of each rank; None for a rank without an engine.
        experts: Experts of each rank of the world, ascending, the same in all layers. None if whole
            experts are assigned to ranks in order.
    """

    tp: int
    assignment: tuple[Place | None, ...]
    experts: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        places = [place for place in self.assignment if place is not None]
        expected = set(product(range(self.replicas), range(self.tp)))
        if not places or len(places) % self.tp or set(places) != expected:
            raise ValueError(
                f"assignment {self.assignment} must name each (replica, tp_rank) "
                f"of {self.replicas} x {self.tp} once"
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, place in enumerate(self.assignment) if place is not None)

    @property
    def replicas(self) -> int:
        return len(self.ranks) // self.tp

    def place(self, rank: int) -> Place:
        """Returns the place of a rank that has an engine; raises ValueError if it has none."""
        place = self.assignment[rank]
        if place is None:
            raise ValueError(f"rank {rank} has no engine; ranks with engines: {self.ranks}")
        return place

    def tp_rank(self, rank: int) -> int | None:
        place = self.assignment[rank]
        return None if place is None else place[1]

    def experts_of(self, rank: int) -> tuple[int, ...] | None:
        """Returns the experts on a rank; None if experts are assigned to ranks in order."""
        return None if self.experts is None else self.experts[rank]

    @staticmethod
    def consecutive(world_size: int, tp: int) -> RolloutLayout:
        """Returns the layout in which each replica consists of consecutive ranks."""
        return RolloutLayout(tp, tuple(divmod(rank, tp) for rank in range(world_size)))

    def on(self, ranks: Sequence[int], world_size: int) -> RolloutLayout:
        places = dict(zip(ranks, self.assignment, strict=True))
        assignment = tuple(places.get(rank) for rank in range(world_size))
        if self.experts is None:
            return RolloutLayout(self.tp, assignment)
        experts = dict(zip(ranks, self.experts, strict=True))
        dealt = tuple(experts.get(rank, ()) for rank in range(world_size))
        return RolloutLayout(self.tp, assignment, dealt)
