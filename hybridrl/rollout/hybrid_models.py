"""Rules for models with recurrent layers: which engines support them, and with which options. No
torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.errors import UserError
from hybridrl.models.family import ModelShape
from hybridrl.models.mixers import DeltaShape, MixerShape
from hybridrl.rollout.registry import ENGINES, offered_engines


def hybrid_rules(engine: str, records_experts: bool, shape: ModelShape) -> Iterator[UserError]:
    """Yields an error if an engine cannot generate with a model's recurrent layers."""
    if shape.mixer is None:
        return
    traits = ENGINES[engine]
    if not _takes(engine, shape.mixer):
        known = [name for name in offered_engines() if _takes(name, shape.mixer)]
        allowed = f"{' or '.join(known)} with a model that has {shape.mixer.name}"
        yield UserError("rollout.engine", engine, allowed, "Choose one of these engines.")
    elif records_experts and traits.has_fused_parameters:
        # Experts are recorded by slots of the cache, of which these models have several kinds.
        yield UserError(
            "algorithm.router_replay",
            "rollout",
            f"off with {engine} and a model that has {shape.mixer.name}",
            "Set algorithm.router_replay=off, or rollout.engine=hf.",
        )


def _takes(engine: str, mixer: MixerShape) -> bool:
    """Whether an engine has recurrent layers; engines' own layers are only gated delta nets."""
    traits = ENGINES[engine]
    is_known = isinstance(mixer, DeltaShape) or not traits.has_fused_parameters
    return traits.takes_recurrent_layers and is_known
