"""An engine's buffers for an adapter: their names, their rank, and rules for adapters in engines.

An engine with fused projections keeps A and B of each projection in two buffers, called slots. Each
fused layer has one pair of slots for each of its projections, so `qkv_proj` has three pairs. B
already contains the scale. Pure data, no torch.

Invariant: all elements of a slot that belong to no adapter are 0, because the engine multiplies
them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hybridrl.errors import UserError
from hybridrl.models.adapters.lora import EXPERTS, Lora
from hybridrl.models.adapters.rows import HF_B, adapts_experts, only_adapters
from hybridrl.models.family import Family, ModelShape

SLOT_A, SLOT_B = "lora_a_stacked", "lora_b_stacked"  # vLLM's names
POLICY = "policy"
"""Name of the adapter that weight transfers write, and that requests use by default."""
SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM allows for its slots."""
COPIED = "kv_b_proj"
"""Layer that engines with latent attention copy before they decode, without its adapter."""
DIRECT = ("q_proj", "kv_a_proj_with_mqa")
"""First layers of latent attention if queries are computed directly from the input."""


@dataclass(frozen=True)
class EngineSlots:
    """Slots that an engine must have.

    Args:
        rank: Rank of the slots; at least the adapters' rank.
        layers: Last parts of the names of the engine's adapted layers, e.g. `qkv_proj`.
        adapters: Names of the engine's adapters, each of which has its own slots.
    """

    rank: int
    layers: tuple[str, ...]
    adapters: tuple[str, ...] = (POLICY,)

    @staticmethod
    def of(lora: Lora, names: Iterable[str], others: Sequence[str] = ()) -> EngineSlots:
        slots = (name.partition(f".{SLOT_A}.") for name in names)
        layers = {layer.rpartition(".")[2] for layer, found, _ in slots if found}
        return EngineSlots(slot_rank(lora), tuple(sorted(layers)), (POLICY, *others))


def is_slot(name: str) -> bool:
    """Whether an engine's tensor is a slot of an adapter, by its name in the layout."""
    return f".{SLOT_A}." in name or f".{SLOT_B}." in name


def slot_rank(lora: Lora) -> int:
    """Returns the rank of an engine's slots. Raises UserError if no slot is large enough."""
    allowed = [rank for rank in SLOT_RANKS if rank >= lora.rank]
    if not allowed:
        raise UserError(
            "lora.rank",
            lora.rank,
            f"at most {SLOT_RANKS[-1]} in a rollout engine with adapters",
            "Lower lora.rank, or set rollout.engine=hf.",
        )
    return allowed[0]


def slot_rules(
    family: Family, shape: ModelShape, adapts_direct_latents: bool
) -> Iterator[UserError]:
    """Yields the reasons why an engine with fused projections cannot hold a family's adapters."""
    if family.lora is None:
        return
    try:
        slot_rank(family.lora)
    except UserError as error:
        yield error
    if shape.mixer is not None:
        # vLLM 0.26 and 0.32 divide the projections of delta nets in different ways for adapters.
        yield UserError(
            "lora.targets",
            ", ".join(family.lora.targets),
            f"no adapters next to the weights of a model with {shape.mixer.name}",
            "Set rollout.engine=hf.",
        )
    rows = only_adapters(family).rows(shape)
    targets = [
        part.removesuffix(f".{HF_B}").rpartition(".")[2]
        for row in rows
        if not row.num_experts
        for part in row.parts
        if part.endswith(HF_B)
    ]
    reasons: dict[str, str] = {}
    if shape.latent is not None:
        reasons = {COPIED: "engines decode with copies of its weight"}
        if not shape.latent.query_rank and not adapts_direct_latents:
            reasons |= dict.fromkeys(DIRECT, "the engine has no slots for them")
    found = [name for name in dict.fromkeys(targets) if name in reasons]
    if found:
        others = ", ".join(name for name in dict.fromkeys(targets) if name not in reasons)
        yield UserError(
            "lora.targets",
            ", ".join(family.lora.targets),
            f"targets without {' and '.join(found)}, because {reasons[found[0]]}",
            f"Set lora.targets to others, of {others}; or set rollout.engine=hf.",
        )
    if adapts_experts(family, shape):
        yield UserError(
            "lora.targets",
            ", ".join(family.lora.targets),
            f"targets without {EXPERTS}, for which the engine has no slots",
            f"Remove {EXPERTS} from lora.targets; or set rollout.engine=hf.",
        )
