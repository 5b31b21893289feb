"""Rules between the section `lora` and other knobs. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.placement import RoleRanks
from hybridrl.config.schema import Config, LoraConfig
from hybridrl.errors import UserError


def lora_section_rules(config: Config) -> Iterator[UserError]:
    lora, train = config.lora, config.train
    if config.checkpoint.export_hf == "peft":
        yield from _peft_rules(config)
    if not lora.is_on:
        for key, value in _given(lora, "alpha", "targets", "rslora", "full"):
            allowed = "nothing without lora.rank"
            yield UserError(f"lora.{key}", value, allowed, "Set lora.rank, such as 32.")
        return
    if lora.path is not None:
        for key, value in _given(lora, "rank", "alpha", "targets", "rslora"):
            allowed = "nothing with lora.path, whose adapter_config.json determines it"
            yield UserError(f"lora.{key}", value, allowed, f"Remove lora.{key}.")
    elif not lora.targets and not lora.full:
        allowed = "at least one target, unless lora.full names parts: otherwise nothing is trained"
        yield UserError("lora.targets", "[]", allowed, "Remove lora.targets, or name layers.")
    for name in lora.full:
        if name not in ("embeddings", "head", "norms"):
            allowed = "embeddings, head, norms"
            yield UserError("lora.full", name, allowed, "Correct the name, or remove it.")
    if lora.shares_reference and config.placement.reference != RoleRanks():
        found = "ranks or sizes"
        allowed = "nothing with lora, whose reference is the policy's own model"
        yield UserError("placement.reference", found, allowed, "Remove placement.reference.")
    off: dict[str, object] = {
        "train.freeze": ", ".join(train.freeze or ()),
        "train.fuse_param_gather": train.fuse_param_gather,
        "train.release_weights_in_rollout": train.release_weights_in_rollout,
        "train.moe.bias_update_rate": train.moe.bias_update_rate,
    }
    reasons = {
        "train.freeze": "nothing with lora, which trains only adapters and lora.full",
        "train.moe.bias_update_rate": "0 with lora, which leaves routers unchanged",
    }
    for key, value in off.items():
        if value:
            allowed = reasons.get(key, "false with lora, whose frozen weights stay in memory")
            yield UserError(key, value, allowed, f"Remove {key}.")


def _peft_rules(config: Config) -> Iterator[UserError]:
    key, remedy = "checkpoint.export_hf", "Set checkpoint.export_hf=true."
    needs = config.algorithm.needs
    if not config.lora.is_on:
        yield UserError(key, "peft", "true or false without lora", remedy)
    elif config.lora.full:
        allowed = "true or false with lora.full, because PEFT's format holds adapters alone"
        yield UserError(key, "peft", allowed, remedy)
    elif needs is not None and (needs.values or needs.scores):
        allowed = "true or false with a value head, because PEFT's format holds adapters alone"
        yield UserError(key, "peft", allowed, remedy)


def _given(lora: LoraConfig, *keys: str) -> Iterator[tuple[str, object]]:
    for key in keys:
        value = getattr(lora, key)
        if value != LoraConfig.model_fields[key].default:
            yield key, ", ".join(value) if isinstance(value, tuple) else value
