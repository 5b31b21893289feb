"""Rules for models in engines: adapters that they hold, recurrent layers and FP8 weights. No torch.

An engine holds all adapters, or all except those of experts, or none. It receives weights into
which the others are merged, so requests for other adapters need an engine that holds all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from hybridrl.config.roles import trains_policy
from hybridrl.config.rules_experts import replays
from hybridrl.config.rules_placement import LIKE_POLICY, parallel_sizes
from hybridrl.config.rules_quantization import CACHE, WEIGHTS
from hybridrl.config.schema import Config, RolloutConfig, TrainConfig
from hybridrl.errors import ModelError, UserError
from hybridrl.models.adapters.rows import adapted, base_of, without_expert_adapters
from hybridrl.models.adapters.settings import lora_of, lora_rules
from hybridrl.models.adapters.slots import slot_rules
from hybridrl.models.family import Family, ModelShape, bias_rule
from hybridrl.models.mixers import DeltaShape, MixerShape, mixer_rules
from hybridrl.models.mtp import mtp_rules
from hybridrl.models.quantized import BLOCK, engine_cut, split_blocks, trainer_cut
from hybridrl.models.trainable import freeze_rules, frozen_names
from hybridrl.models.weights import Head
from hybridrl.rollout.registry import ENGINES, offered_engines


def held_family(engine: str, family: Family, shape: ModelShape) -> Family:
    """Returns the policy's family with only the adapters that the engine holds."""
    if not any(_violations(engine, family, shape)):
        return family
    held = without_expert_adapters(family)
    return base_of(family) if any(_violations(engine, held, shape)) else held


def merging_notice(engine: str, family: Family, shape: ModelShape) -> str | None:
    """Returns a sentence that names the adapters merged for the engine, and why, if any."""
    reason = next(_violations(engine, family, shape), None)
    if reason is None:
        return None
    of_experts = " of experts" if held_family(engine, family, shape).lora is not None else ""
    return f"the engine generates with merged weights{of_experts} ({reason})"


def merged_transport_rules(
    rollout: RolloutConfig, family: Family, shape: ModelShape
) -> Iterator[UserError]:
    """Yields an error for transport "peer" with merged weights, which no rank stores."""
    if rollout.transport != "peer":
        return
    for reason in _violations(rollout.engine, family, shape):
        allowed = f"auto or packed here, because the engine receives merged weights: {reason}"
        yield UserError("rollout.transport", "peer", allowed, "Set rollout.transport=auto.")


def _violations(engine: str, family: Family, shape: ModelShape) -> Iterator[str]:
    traits = ENGINES[engine]
    if family.lora is None:
        return
    if not traits.takes_adapters:
        yield f"the {engine} engine takes no adapters"
    elif traits.has_fused_parameters:
        for error in slot_rules(family, shape, traits.adapts_direct_latents):
            yield f"{error.name}: {error.allowed}"


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
        # Experts are recorded by cache slot, but these models have several kinds of slots.
        yield UserError(
            "algorithm.router_replay",
            "rollout",
            f"off with {engine} and a model that has {shape.mixer.name}",
            "Set algorithm.router_replay=off, or rollout.engine=hf.",
        )


def patch_rules(engine: str, shape: ModelShape) -> Iterator[UserError]:
    """Yields an error if an engine's vision tower does not read patches of a model's size."""
    vision, traits = shape.vision, ENGINES[engine]
    if vision is None or vision.kind not in traits.patch_sizes:
        return
    size, allowed = prod(vision.tensors["patch_embed.proj.weight"][1:]), traits.patch_sizes
    if size != allowed[vision.kind]:
        yield UserError(
            "model's vision_config: numbers in a patch",
            size,
            f"{allowed[vision.kind]} with rollout.engine={engine}, as in published models",
            "Choose another model, or set rollout.engine=vllm or rollout.engine=hf.",
        )


def _takes(engine: str, mixer: MixerShape) -> bool:
    """Whether an engine supports a mixer. Engines with their own layers support only delta nets."""
    traits = ENGINES[engine]
    is_known = isinstance(mixer, DeltaShape) or not traits.has_fused_parameters
    return traits.takes_recurrent_layers and is_known


def quantized_model_rules(
    rollout: RolloutConfig, train: TrainConfig, family: Family, shape: ModelShape
) -> Iterator[UserError]:
    """Yields the reasons why engines cannot hold a model's weights or its KV cache in FP8, or why
    the trainer cannot multiply by blocks of FP8 weights. `family` has no adapters.
    """
    found = _unsupported_part(shape)
    for key, is_on, off in (
        (WEIGHTS, rollout.quantization == "fp8", "none"),
        (CACHE, rollout.kv_cache_dtype == "fp8", "auto"),
    ):
        if is_on and found is not None:
            yield UserError(key, "fp8", f"{off} with models with {found}", f"Set {key}={off}.")
    is_engine = rollout.quantization == "fp8" and found is None
    trained = trainer_cut(shape, train.tp, train.etp), train.tp * train.etp
    for knob, value, is_on, sizes, (cut, tp) in (
        (
            WEIGHTS,
            "fp8",
            is_engine,
            "rollout.tp",
            (engine_cut(shape, rollout.tp, rollout.ep), rollout.tp),
        ),
        (WEIGHTS, "fp8", is_engine, "train.tp and train.etp", trained),
        ("train.fp8", "blockwise", train.fp8 == "blockwise", "train.tp", trained),
    ):
        if not is_on:
            continue
        try:
            name, size = next(split_blocks(family, shape, cut, tp), (None, 0))
        except ModelError:
            return  # other rules report that the size does not divide a dimension
        if name is not None:
            yield UserError(
                knob,
                f"{value} ({name} has a part of {size} rows or columns)",
                f"none unless all parts of the weights are multiples of {BLOCK} with this {sizes}",
                f"Choose a smaller {sizes} (for experts, whole ones: rollout.ep and train.ep), or "
                f"set {knob}=none.",
            )


def cpu_rules(quantization: str, kv_cache_dtype: str, is_cpu: bool) -> Iterator[UserError]:
    """Yields errors if an engine on a host without GPUs should use FP8."""
    for key, value, off in ((WEIGHTS, quantization, "none"), (CACHE, kv_cache_dtype, "auto")):
        if is_cpu and value != off:
            allowed = f"{off} on a host without GPUs"
            yield UserError(key, value, allowed, f"Set {key}={off}, or use GPUs.")


def _unsupported_part(shape: ModelShape) -> str | None:
    if shape.latent is not None:
        return "latent attention, whose engines compute with 16-bit copies of weights"
    if shape.vision is not None:
        return "a vision tower"
    if shape.mixer is not None:
        return "recurrent layers"
    if shape.activation == "clamped_swiglu" or shape.attention_sinks:
        return "clamped experts or attention sinks"
    return None


def hybrid_layout_rules(config: Config, shape: ModelShape) -> Iterator[UserError]:
    """Yields why a hybrid model cannot have the layouts of the policy and of models like it."""
    tp_sizes, cp_sizes = (parallel_sizes(config, axis, LIKE_POLICY) for axis in ("tp", "cp"))
    yield from mixer_rules(shape.mixer, {**tp_sizes, "rollout.tp": config.rollout.tp}, cp_sizes)


def policy_rules(
    config: Config, family: Family, shape: ModelShape, hf_config: Mapping[str, Any]
) -> list[UserError]:
    """Returns the violations of a configuration whose policy has this family and config.json."""
    train, rollout, lora = config.train, config.rollout, lora_of(config.lora)
    has_policy = trains_policy(config)
    head: Head = "lm" if has_policy else "value"
    found = [
        *bias_rule(train.moe.bias_update_rate, family, shape),
        *hybrid_layout_rules(config, shape),
        *mtp_rules(train, has_policy, lora is not None, family, shape, hf_config),
        *hybrid_rules(rollout.engine, replays(config), shape),
        *patch_rules(rollout.engine, shape),
        *freeze_rules(frozen_names(train.freeze, shape), family, shape, head),
        *lora_rules(config.lora, family, shape),
        *quantized_model_rules(rollout, train, family, shape),
    ]
    return found or [*merged_transport_rules(rollout, adapted(family, lora), shape)]
