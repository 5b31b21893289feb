"""On which ranks each model of a run lies, and how it is cut there. No torch.

Owns the section `placement`, how its ranks are written, and what they are for a number of ranks and
the machines under them (`place`). Without the section all models share all ranks.
"""

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
REWARD = "reward "  # before a reward model's name, where roles are named


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
"""Ranks as a user writes them."""

OWN_AXES = ("tp", "pp", "cp", "ep", "etp")
"""Sizes that a role's place may have of its own."""


class RankSet(Section):
    """Some ranks."""

    ranks: Ranks = None
    """0-3, first:2, last:2, node:0, gpu:H100, or several, joined by ','. None: for policy and rollout all, for another model the policy's; so nothing is idle."""
    mixed_gpus: bool = False
    """The ranks' GPUs may be of several kinds. False: the slowest sets the pace, so it is not done by accident."""


class RoleRanks(RankSet):
    """Some ranks, and how a model is cut over them."""

    tp: int | None = Field(None, ge=1)
    """Tensor parallel size. None: train.tp; most models are cut alike."""
    pp: int | None = Field(None, ge=1)
    """Pipeline parallel size. None: train.pp; most models are cut alike."""
    cp: int | None = Field(None, ge=1)
    """Context parallel size. None: train.cp; most models are cut alike."""
    ep: int | None = Field(None, ge=1)
    """Expert parallel size. None: train.ep; most models are cut alike."""
    etp: int | None = Field(None, ge=1)
    """Expert tensor parallel size. None: train.etp; most models are cut alike."""


def _as_section(value: object) -> object:
    """Lets ranks alone stand for a section that names nothing else."""
    return {"ranks": value} if isinstance(value, str | int | list) else value


def _as_sections(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    return {name: _as_section(one) for name, one in value.items()}


OnRanks = Annotated[RankSet, BeforeValidator(_as_section)]
Role = Annotated[RoleRanks, BeforeValidator(_as_section)]
Roles = Annotated[dict[str, RoleRanks], BeforeValidator(_as_sections)]


class PlacementConfig(Section):
    """Which ranks each model is on. Without a word of it all models share all ranks."""

    policy: OnRanks = RankSet()
    """The trained policy, cut as `train` says. All: so nothing is idle."""
    rollout: OnRanks = RankSet()
    """The engines, cut as `rollout` says. All: so nothing is idle."""
    reference: Role = RoleRanks()
    """The reference. As the policy: it is the same model."""
    critic: Role = RoleRanks()
    """The critic. As the policy: both train at the same time."""
    teacher: Role = RoleRanks()
    """The teacher of a distillation. As the policy: so nothing is idle."""
    rewards: Roles = Field(default_factory=dict)
    """Reward models, by their scorers' names. None of a name: where the policy is; they share its memory."""


@dataclass(frozen=True)
class Machines:
    """What is under the ranks.

    Args:
        num_ranks: of the world.
        ranks_per_node: of one node, which are consecutive; None: it is not known.
        gpus: name of each rank's GPU; None: they are not known, or there are none.
    """

    num_ranks: int
    ranks_per_node: int | None = None
    gpus: Sequence[str] | None = None


@dataclass(frozen=True)
class Place:
    """Where a model lies.

    Args:
        ranks: of the world, ascending.
        tp, pp, cp, ep, vpp, etp: sizes of its layout over them.
    """

    ranks: tuple[int, ...]
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    etp: int = 1


@dataclass(frozen=True)
class Placement:
    """Where every model of a run lies.

    Args:
        num_ranks: of the world.
        policy: of the trained policy.
        rollout: ranks of the engines, ascending.
        named: of the roles that the section names beside them.
    """

    num_ranks: int
    policy: Place
    rollout: tuple[int, ...]
    named: Mapping[str, Place] = field(default_factory=dict)

    def of(self, role: str) -> Place:
        """Returns where a role's model lies: where the policy does, unless told otherwise."""
        return self.named.get(role, self.policy)

    @property
    def is_shared(self) -> bool:
        """Whether all models and engines share all ranks, cut alike."""
        places = {self.policy, *self.named.values()}
        everyone = tuple(range(self.num_ranks))
        return len(places) == 1 and self.policy.ranks == self.rollout == everyone


def named_roles(section: PlacementConfig) -> dict[str, tuple[str, RankSet]]:
    """Returns the key and the content of each role of which a section says something."""
    found: dict[str, tuple[str, RankSet]] = {}
    for role in ("policy", "rollout", "reference", "critic", "teacher"):
        given: RankSet = getattr(section, role)
        if given != type(given)():  # what a run folder's config.yaml says of others too
            found[role] = f"placement.{role}", given
    for name, given in section.rewards.items():
        found[REWARD + name] = f"placement.rewards.{name}", given
    return found


def least_ranks(section: PlacementConfig) -> int:
    """Returns how many ranks there must be for those that a section names."""
    least = 1
    for _, given in named_roles(section).values():
        for part in (given.ranks or "all").split(","):
            kind, _, number = part.rpartition(":")
            if part == "all" or kind in ("node", "gpu"):
                continue
            least = max(least, int(number) if kind else int(number.split("-")[-1]) + 1)
    return least


def asks_for(section: PlacementConfig, *kinds: str) -> bool:
    """Whether a section names ranks by what is under them: "node:", "gpu:" or either."""
    texts = [given.ranks or "" for _, given in named_roles(section).values()]
    return any(kind in text for text in texts for kind in kinds)


def place(
    section: PlacementConfig, train: Place, machines: Machines
) -> tuple[Placement, list[UserError]]:
    """Returns where the models lie, and what is wrong with it.

    Args:
        section: of the configuration.
        train: sizes of the policy's layout; its ranks do not matter.
        machines: under the ranks.
    """
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
        found_idle = f"nothing on ranks {shown(idle)} of {machines.num_ranks}"
        allowed = "a model or an engine on every rank"
        remedy = "Give them to a role, or start fewer ranks."
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
    """Returns the ranks that a text names, ascending, or what is wrong with it."""
    found: set[int] = set()
    for part in text.split(","):
        ranks = _ranks_of(key, part, machines)
        if isinstance(ranks, UserError):
            return (), [ranks]
        found |= set(ranks)
    size = machines.num_ranks
    if beyond := sorted(rank for rank in found if rank >= size):
        return (), [
            UserError(
                key,
                text,
                f"ranks 0 to {size - 1} of the {size} that there are",
                f"Leave out rank {beyond[0]}, or start more ranks.",
            )
        ]
    if not found:
        allowed = "at least one rank for each role that is named"
        return (), [UserError(key, text, allowed, "Name one, or remove the role.")]
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
            return UserError(key, part, f"at most the {size} ranks", "Name fewer.")
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
        return UserError(key, part, "ranks where it is not known which share a node", remedy)
    first, _, last = number.partition("-")
    nodes, num_nodes = range(int(first), int(last or first) + 1), -(-machines.num_ranks // each)
    if nodes and nodes[-1] >= num_nodes:
        allowed = f"nodes 0 to {num_nodes - 1}, of {each} ranks each"
        return UserError(key, part, allowed, "Name another node.")
    return range(nodes.start * each, nodes.stop * each)


def _ranks_of_gpus(key: str, part: str, name: str, machines: Machines) -> Sequence[int] | UserError:
    if machines.gpus is None:
        remedy = "Name ranks or nodes; a plan knows GPUs on a host that has one for each rank."
        return UserError(key, part, "ranks where the kinds of GPUs are not known", remedy)
    found = [rank for rank, gpu in enumerate(machines.gpus) if name.lower() in gpu.lower()]
    if not found:
        kinds = ", ".join(sorted(set(machines.gpus)))
        return UserError(key, part, f"a part of a name of {kinds}", "Name a GPU that is there.")
    return found


def _unlike_gpus(
    key: str, given: RankSet, ranks: Sequence[int], machines: Machines
) -> Iterator[UserError]:
    kinds = sorted({machines.gpus[rank] for rank in ranks}) if machines.gpus is not None else []
    if len(kinds) > 1 and not given.mixed_gpus:
        yield UserError(
            f"{key}.ranks",
            f"{given.ranks}, which have {' and '.join(kinds)}",
            "GPUs of one kind: the slowest sets the pace",
            f"Choose with gpu:NAME, or set {key}.mixed_gpus=true.",
        )


def shown(ranks: Sequence[int]) -> str:
    """Returns ascending ranks as a user writes them: 0-3,6."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
