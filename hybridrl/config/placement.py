"""The section `placement`: the ranks and the layout of each model of a run. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from hybridrl.config.section import Section
from hybridrl.errors import UserError

HOW_RANKS_ARE_WRITTEN = "all, 3, 0-3, first:2, last:2, node:0, gpu:H100, or several, joined by ','"
PART = re.compile(r"all|(?:first|last):\d+|node:\d+(?:-\d+)?|gpu:[^,]+|\d+(?:-\d+)?")
REWARD = "reward "  # prefix of the role of each reward model


def _as_text(value: object) -> object:
    if value is None:
        return None
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    text = str(value) if isinstance(value, int) else value
    if isinstance(value, bool) or not isinstance(text, str):
        raise PydanticCustomError("ranks", HOW_RANKS_ARE_WRITTEN)
    parts = [part.strip() for part in text.split(",")]
    if not all(PART.fullmatch(part) for part in parts):
        raise PydanticCustomError("ranks", HOW_RANKS_ARE_WRITTEN)
    return ",".join(parts)


Ranks = Annotated[str | None, BeforeValidator(_as_text)]
"""Ranks, in the configuration's syntax."""

OWN_AXES = ("tp", "pp", "cp", "ep", "etp")
"""Parallel sizes that can be set for each role."""


class RankSet(Section):
    """A set of ranks."""

    ranks: Ranks = None
    """Ranks: 0-3, first:2, last:2, node:0, gpu:H100, or several of these, joined by ','. The default is all ranks for policy and rollout, and the policy's ranks for all other models, so that no rank is idle."""
    mixed_gpus: bool = False
    """Whether these ranks may have different kinds of GPUs. Off by default, because all ranks would wait for the slowest GPU."""


class RoleRanks(RankSet):
    """A set of ranks, and the layout of a model on them."""

    tp: int | None = Field(None, ge=1)
    """Tensor parallel size. The default is train.tp, because one layout usually suits all models."""
    pp: int | None = Field(None, ge=1)
    """Pipeline parallel size. The default is train.pp, because one layout usually suits all models."""
    cp: int | None = Field(None, ge=1)
    """Context parallel size. The default is train.cp, because one layout usually suits all models."""
    ep: int | None = Field(None, ge=1)
    """Expert parallel size. The default is train.ep, because one layout usually suits all models."""
    etp: int | None = Field(None, ge=1)
    """Expert tensor parallel size. The default is train.etp, because one layout usually suits all models."""


def _as_section(value: object) -> object:
    """Accepts a rank list in place of a section whose only key is `ranks`."""
    return {"ranks": value} if isinstance(value, str | int | list) else value


def _as_sections(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    return {name: _as_section(one) for name, one in value.items()}


OnRanks = Annotated[RankSet, BeforeValidator(_as_section)]
Role = Annotated[RoleRanks, BeforeValidator(_as_section)]
Roles = Annotated[dict[str, RoleRanks], BeforeValidator(_as_sections)]


class PlacementConfig(Section):
    """Placement of each model. By default all models share all ranks."""

    policy: OnRanks = RankSet()
    """Ranks of the trained policy; its layout is set in `train`. The default is all ranks, so that no rank is idle."""
    rollout: OnRanks = RankSet()
    """Ranks of the engines; their layout is set in `rollout`. The default is all ranks, so that no rank is idle."""
    reference: Role = RoleRanks()
    """Ranks and layout of the reference model. The default is the policy's ranks and layout, because both have the same shape."""
    critic: Role = RoleRanks()
    """Ranks and layout of the critic. The default is the policy's ranks and layout, because both are trained in the same phase."""
    teacher: Role = RoleRanks()
    """Ranks and layout of the teacher (distillation). The default is the policy's ranks and layout, so that no rank is idle."""
    rewards: Roles = Field(default_factory=dict)
    """Ranks and layout of each reward model, by its scorer's name. The default is the policy's ranks and layout, so that no rank is idle."""


@dataclass(frozen=True)
class Machines:
    """Hardware of the ranks. A node's ranks are consecutive.

    `ranks_per_node` is None if unknown. `gpus` has each rank's GPU; None if unknown or on CPU.
    """

    num_ranks: int
    ranks_per_node: int | None = None
    gpus: Sequence[str] | None = None


@dataclass(frozen=True)
class Place:
    """Global ranks, ascending, and layout of one model."""

    ranks: tuple[int, ...]
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    etp: int = 1


@dataclass(frozen=True)
class Placement:
    """Ranks and layout of every model. `rollout` has engines' ranks, `named` the
    section's roles.
    """

    num_ranks: int
    policy: Place
    rollout: tuple[int, ...]
    named: Mapping[str, Place] = field(default_factory=dict)

    def of(self, role: str) -> Place:
        """Returns the place of a role's model. Default: the policy's place."""
        return self.named.get(role, self.policy)

    @property
    def is_shared(self) -> bool:
        """Whether all models and engines share all ranks, and all models have the same layout."""
        places = {self.policy, *self.named.values()}
        everyone = tuple(range(self.num_ranks))
        return len(places) == 1 and self.policy.ranks == self.rollout == everyone


def named_roles(section: PlacementConfig) -> dict[str, tuple[str, RankSet]]:
    """Returns the key and section of each role that the configuration sets."""
    found: dict[str, tuple[str, RankSet]] = {}
    for role in ("policy", "rollout", "reference", "critic", "teacher"):
        given: RankSet = getattr(section, role)
        if given != type(given)():  # config.yaml in a run folder contains defaults too
            found[role] = f"placement.{role}", given
    for name, given in section.rewards.items():
        found[REWARD + name] = f"placement.rewards.{name}", given
    return found


def least_ranks(section: PlacementConfig) -> int:
    """Returns the smallest number of ranks for which every rank named in the section exists."""
    least = 1
    for _, given in named_roles(section).values():
        for part in (given.ranks or "all").split(","):
            kind, _, number = part.rpartition(":")
            if part == "all" or kind in ("node", "gpu"):
                continue
            least = max(least, int(number) if kind else int(number.split("-")[-1]) + 1)
    return least


def asks_for(section: PlacementConfig, *kinds: str) -> bool:
    """Whether any rank list in the section uses one of `kinds`, such as "node:" or "gpu:"."""
    texts = [given.ranks or "" for _, given in named_roles(section).values()]
    return any(kind in text for text in texts for kind in kinds)


def place(
    section: PlacementConfig, train: Place, machines: Machines
) -> tuple[Placement, list[UserError]]:
    """Returns the placement of the models and its violations. `train` has the policy's layout."""
    everyone, errors = tuple(range(machines.num_ranks)), list[UserError]()
    given, ranks = named_roles(section), dict[str, tuple[int, ...]]()
    for role, (key, one) in given.items():
        if one.ranks is None:
            continue
        found, wrong = _resolved(f"{key}.ranks", one.ranks, machines)
        errors += wrong or _unlike_gpus(key, one, found, machines)
        if not wrong:
            ranks[role] = found
    policy = _sized(train, ranks.get("policy", everyone))
    named: dict[str, Place] = {}
    for role, (_, one) in given.items():
        if isinstance(one, RoleRanks):
            sizes = {axis: getattr(one, axis) for axis in OWN_AXES}
            named[role] = _sized(train, ranks.get(role, policy.ranks), sizes)
    placed = Placement(machines.num_ranks, policy, ranks.get("rollout", everyone), named)
    used = {*policy.ranks, *placed.rollout, *(r for p in named.values() for r in p.ranks)}
    idle = [rank for rank in everyone if rank not in used]
    if idle and not errors:
        found_idle = f"no model or engine on ranks {shown(idle)} of {machines.num_ranks}"
        allowed = "a model or an engine on every rank"
        remedy = "Place a role on them, or start fewer ranks."
        errors.append(UserError("placement", found_idle, allowed, remedy))
    return placed, errors


def _sized(
    train: Place, ranks: tuple[int, ...], sizes: Mapping[str, int | None] | None = None
) -> Place:
    given = {axis: size for axis, size in (sizes or {}).items() if size is not None}
    axes = {axis: given.get(axis, getattr(train, axis)) for axis in OWN_AXES}
    vpp = train.vpp if axes["pp"] == train.pp else 1
    return Place(ranks, **axes, vpp=vpp)


def _resolved(key: str, text: str, machines: Machines) -> tuple[tuple[int, ...], list[UserError]]:
    found: set[int] = set()
    for part in text.split(","):
        ranks = _ranks_of(key, part, machines)
        if isinstance(ranks, UserError):
            return (), [ranks]
        found |= set(ranks)
    size = machines.num_ranks
    if beyond := sorted(rank for rank in found if rank >= size):
        allowed = f"ranks 0 to {size - 1}, because the run has {size} ranks"
        remedy = f"Remove rank {beyond[0]}, or start more ranks."
        return (), [UserError(key, text, allowed, remedy)]
    if not found:
        allowed = "at least one rank for each named role"
        remedy = "Name a rank, or remove the role from placement."
        return (), [UserError(key, text, allowed, remedy)]
    return tuple(sorted(found)), []


def _ranks_of(key: str, part: str, machines: Machines) -> Sequence[int] | UserError:
    size, (kind, _, number) = machines.num_ranks, part.rpartition(":")
    if part == "all":
        return range(size)
    if not kind:
        first, _, last = number.partition("-")
        return range(int(first), int(last or first) + 1)
    if kind in ("first", "last"):
        if int(number) > size:
            return UserError(key, part, f"at most {size}, the number of ranks", "Name fewer ranks.")
        return range(int(number)) if kind == "first" else range(size - int(number), size)
    if kind == "node":
        return _ranks_of_nodes(key, part, number, machines)
    return _ranks_of_gpus(key, part, number, machines)


def _ranks_of_nodes(
    key: str, part: str, number: str, machines: Machines
) -> Sequence[int] | UserError:
    each = machines.ranks_per_node
    if each is None:
        remedy = "Name ranks, or start with torchrun, which sets LOCAL_WORLD_SIZE."
        return UserError(
            key, part, "rank numbers, because the ranks of each node are unknown", remedy
        )
    first, _, last = number.partition("-")
    nodes, num_nodes = range(int(first), int(last or first) + 1), -(-machines.num_ranks // each)
    if nodes and nodes[-1] >= num_nodes:
        allowed = f"nodes 0 to {num_nodes - 1}, with {each} ranks each"
        return UserError(key, part, allowed, "Name another node.")
    return range(nodes.start * each, nodes.stop * each)


def _ranks_of_gpus(key: str, part: str, name: str, machines: Machines) -> Sequence[int] | UserError:
    if machines.gpus is None:
        remedy = "Name ranks or nodes, or plan on a host with one GPU per rank."
        return UserError(key, part, "ranks or nodes, because the GPUs are unknown", remedy)
    found = [rank for rank, gpu in enumerate(machines.gpus) if name.lower() in gpu.lower()]
    if not found:
        kinds = ", ".join(sorted(set(machines.gpus)))
        return UserError(key, part, f"a part of a GPU's name: {kinds}", "Name one of these GPUs.")
    return found


def _unlike_gpus(
    key: str, given: RankSet, ranks: Sequence[int], machines: Machines
) -> Iterator[UserError]:
    kinds = sorted({machines.gpus[rank] for rank in ranks}) if machines.gpus is not None else []
    if len(kinds) > 1 and not given.mixed_gpus:
        found = f"{given.ranks}, which have {' and '.join(kinds)}"
        allowed = "GPUs of one kind, because all ranks would wait for the slowest GPU"
        remedy = f"Select ranks with gpu:NAME, or set {key}.mixed_gpus=true."
        yield UserError(f"{key}.ranks", found, allowed, remedy)


def shown(ranks: Sequence[int]) -> str:
    """Returns ascending ranks in the configuration's syntax, such as 0-3,6."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
