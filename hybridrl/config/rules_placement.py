"""Rules between the section `placement`, the models of a run and their shapes. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hybridrl.config.placement import (
    REWARD,
    Machines,
    Place,
    Placement,
    RoleRanks,
    named_roles,
    place,
    shown,
)
from hybridrl.config.roles import reward_models, run_models
from hybridrl.config.schema import Config
from hybridrl.errors import UserError

AUTO_ORDER = "auto"  # value of `train.order`
LIKE_POLICY = ("reference", "critic")  # other roles have another shape
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def placed(config: Config, machines: Machines) -> tuple[Placement, list[UserError]]:
    train = config.train
    sizes = Place((), train.tp, train.pp, train.cp, train.ep, train.vpp, train.etp)
    return place(config.placement, sizes, machines)


def parallel_sizes(
    config: Config, axis: str, roles: Collection[str] | None = None
) -> dict[str, int]:
    """Returns the size of an axis such as `cp` in `train` and where `placement` sets it, by key.

    Args:
        roles: Roles whose sections in `placement` are read; None for all.
    """
    found: dict[str, int] = {f"train.{axis}": getattr(config.train, axis)}
    for role, (key, given) in named_roles(config.placement).items():
        if isinstance(given, RoleRanks) and (roles is None or role in roles):
            size = getattr(given, axis)
            found |= {} if size is None else {f"{key}.{axis}": size}
    return found


def placement_rules(
    config: Config, placement: Placement, shape: Mapping[str, Any]
) -> Iterator[UserError]:
    """Yields the violations of rules on the roles that the section sets, in a valid placement."""
    lacking = _missing_roles(config)
    for role, (key, given) in named_roles(config.placement).items():
        if role in lacking:
            value = given.ranks or "a layout"
            yield UserError(key, value, f"no value {lacking[role]}", f"Remove {key}.")
        elif isinstance(given, RoleRanks):
            yield from _size_rules(key, placement.of(role))
            if role in LIKE_POLICY:
                yield from _own_cut_rules(config, key, given, shape)


def _missing_roles(config: Config) -> dict[str, str]:
    """Returns roles that the run lacks, except those that a user's algorithm may need."""
    section, needs = config.algorithm, config.algorithm.needs
    lacking: dict[str, str] = {}
    served = reward_models(config)
    for name in config.placement.rewards:
        if name not in served:
            known = f"only {', '.join(served)} has one" if served else "no scorer has one"
            lacking[REWARD + name] = f"for a scorer that has no reward model; {known}"
    if needs is None:
        return lacking
    terms = [term.algorithm.needs for term in config.terms().values()]
    models = run_models(config, needs, [term for term in terms if term is not None])
    for role in ("reference", "critic", "teacher"):
        if not getattr(models, f"has_{role}"):
            lacking[role] = f"with algorithm {section.name}, which has no {role}"
    return lacking


def _size_rules(key: str, found: Place) -> Iterator[UserError]:
    num, product = len(found.ranks), found.tp * found.pp * found.cp
    if num % product:
        sizes = f"{found.tp} * {found.pp} * {found.cp} = {product}"
        allowed = f"a divisor of its {num} ranks, {shown(found.ranks)}"
        given = f"{key}.tp, .pp or .cp (by default the sizes in `train`)"
        remedy = f"Set {given}, or give it other ranks."
        yield UserError(f"{key}: tp * pp * cp", sizes, allowed, remedy)
    else:
        yield from expert_grid_rules(key, num // found.pp, found.ep, found.etp)


def expert_grid_rules(
    key: str, num_ranks: int, ep: int, etp: int, ranks: str = ""
) -> Iterator[UserError]:
    """Yields violated rules on distributing experts over the `num_ranks` of a pipeline stage."""
    if num_ranks % (ep * etp):
        product = f"{ep} * {etp} = {ep * etp}"
        yield UserError(
            f"{key}.ep * {key}.etp" if etp > 1 else f"{key}.ep",
            product if etp > 1 else ep,
            f"a divisor of the {num_ranks} ranks of a pipeline stage",
            f"Change {key}.ep" + (f" or {key}.etp" if etp > 1 else "") + ranks + ".",
        )


def expert_rules(
    key: str, ep: int, etp: int, order: str, pp: int, shape: Mapping[str, Any]
) -> Iterator[UserError]:
    """Yields violated rules on distributing and splitting experts; `order` as in train."""
    experts = num_experts(shape)
    if not experts:
        for axis, size in (("ep", ep), ("etp", etp)):
            if shape and size > 1:
                allowed = "1 with a dense model, which has no experts"
                yield UserError(f"{key}.{axis}", size, allowed, f"Set {key}.{axis}=1.")
        return
    if experts % ep:
        allowed = f"a divisor of the model's {experts} experts"
        yield UserError(f"{key}.ep", ep, allowed, f"Change {key}.ep.")
    width = shape.get("moe_intermediate_size", shape.get("intermediate_size"))
    if isinstance(width, int) and width % etp:
        allowed = f"a divisor of the {width} feed-forward units of an expert"
        yield UserError(f"{key}.etp", etp, allowed, f"Change {key}.etp.")
    if pp > 1 and order != AUTO_ORDER and not order.endswith("pp"):
        allowed = f"an order that ends with pp, because a model with experts has {key}.pp={pp}"
        remedy = f"Set train.order={AUTO_ORDER}, or put pp last."
        yield UserError("train.order", repr(order), allowed, remedy)


def num_experts(shape: Mapping[str, Any]) -> int:
    """Returns the number of experts per layer in a config.json; 0 for a dense model."""
    return next((shape[key] for key in EXPERT_KEYS if isinstance(shape.get(key), int)), 0)


def cut_rules(config: Config, role: str, shape: Mapping[str, Any]) -> Iterator[UserError]:
    """Yields violated rules on splitting a role's model with sizes of `placement` or `train`."""
    train = config.train
    key, given = named_roles(config.placement).get(role, ("", RoleRanks()))
    own = given if isinstance(given, RoleRanks) else RoleRanks()
    yield from _own_cut_rules(config, key, own, shape)
    if own.pp is None:
        yield from layer_rules("train.pp * train.vpp", train.pp * train.vpp, shape)
    if own.tp is None:
        yield from split_rules("train.tp", train.tp, shape)
    if own.ep is None and own.etp is None and num_experts(shape):
        yield from expert_rules("train", train.ep, train.etp, train.order, train.pp, shape)


def _own_cut_rules(
    config: Config, key: str, given: RoleRanks, shape: Mapping[str, Any]
) -> Iterator[UserError]:
    train = config.train
    if given.pp is not None:
        vpp = train.vpp if given.pp == train.pp else 1
        chunks, product = given.pp * vpp, f"{given.pp} * {vpp} = {given.pp * vpp}"
        yield from layer_rules(f"{key}.pp", chunks, shape, product if vpp > 1 else "")
    if given.tp is not None:
        yield from split_rules(f"{key}.tp", given.tp, shape)
    if given.ep is not None or given.etp is not None:
        ep, etp, pp = given.ep or train.ep, given.etp or train.etp, given.pp or train.pp
        yield from expert_rules(key, ep, etp, AUTO_ORDER, pp, shape)


def layer_rules(
    key: str, chunks: int, shape: Mapping[str, Any], shown: str = ""
) -> Iterator[UserError]:
    """Yields the violation if there are too few layers for `chunks` (`shown` in the message)."""
    layers = shape.get("num_hidden_layers")
    if isinstance(layers, int) and layers < chunks:
        allowed = f"at most the model's {layers} layers"
        yield UserError(key, shown or chunks, allowed, f"Change {key.replace(' * ', ' or ')}.")


def split_rules(key: str, tp: int, shape: Mapping[str, Any]) -> Iterator[UserError]:
    """Yields the violations of rules on splitting a layer over `tp` ranks."""
    heads, kv_heads = shape.get("num_attention_heads"), shape.get("num_key_value_heads")
    units = shape.get("intermediate_size")
    for name, size in (("attention heads", heads), ("feed-forward units", units)):
        if isinstance(size, int) and size % tp:
            yield UserError(key, tp, f"a divisor of the model's {size} {name}", f"Change {key}.")
    if isinstance(kv_heads, int) and kv_heads % tp and tp % kv_heads:
        allowed = f"a divisor or a multiple of the model's {kv_heads} key/value heads"
        yield UserError(key, tp, allowed, f"Change {key}.")
