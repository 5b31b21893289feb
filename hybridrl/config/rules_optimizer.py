"""Rules for the optimizer, and the levels of `train.optimizer_memory`. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridrl.config.schema import Config, TrainConfig
from hybridrl.errors import UserError

# Each step changes a moment by 1 - beta of its size or more. bf16 keeps 8 bits, so that changes of
# less than 1/256 may be lost to rounding.
MAX_BF16_BETA = 0.99


@dataclass(frozen=True)
class OptimizerLevel:
    """A level of `train.optimizer_memory`, with its bytes of state per 16-bit parameter."""

    state_bytes: int
    on_host: bool = False

    @property
    def is_low_precision(self) -> bool:
        """Whether moments are bf16, and masters are stored as weights with remainders."""
        return self.state_bytes < LEVELS["device"].state_bytes


LEVEL_KEY = "train.optimizer_memory"
LEVELS = {
    "device": OptimizerLevel(4 + 2 * 4),
    "low_precision": OptimizerLevel(2 + 2 * 2),
    "host": OptimizerLevel(2 + 2 * 2, on_host=True),
}
"""Levels from the fastest to the one that needs the least GPU memory."""


def level_name(train: TrainConfig) -> str:
    """Returns the level of the optimizer state. `auto` is 'device' where nothing chose a level."""
    return "device" if train.optimizer_memory == "auto" else train.optimizer_memory


def level_of(train: TrainConfig) -> OptimizerLevel:
    """Returns the properties of the level of the optimizer state; see `level_name`."""
    return LEVELS[level_name(train)]


def is_written_from_copies(config: Config) -> bool:
    """Whether checkpoints during training are written from copies in host memory.

    An export reads the weights, and a state in host memory is written without a second copy.
    """
    section = config.checkpoint
    is_saved = bool(section.every or section.every_s)
    is_on_host = level_of(config.train).on_host
    return is_saved and section.asynchronous and not section.export_hf and not is_on_host


def lower_levels(config: Config) -> list[str]:
    """Returns the levels that need less GPU memory than the configured level, the fastest first."""
    names = list(LEVELS)
    return names[names.index(level_name(config.train)) + 1 :]


def allowed_levels(config: Config) -> list[str]:
    """Returns the configured level, or those that 'auto' may choose on GPUs, fastest first."""
    if config.train.optimizer_memory != "auto":
        return [config.train.optimizer_memory]
    levels = ({LEVEL_KEY: name} for name in LEVELS)
    allowed = (
        one for one in levels if not list(optimizer_rules(config.with_values(one), "bfloat16"))
    )
    return [one[LEVEL_KEY] for one in allowed] or ["device"]


def gradient_rules(config: Config, can_lower: bool = False) -> Iterator[UserError]:
    """Yields the violated rule for the type of gradients at level 'device', or 'auto' unchosen."""
    if config.train.gradient_dtype != "bfloat16" or level_name(config.train) != "device":
        return
    remedy = "Set train.gradient_dtype=float32."
    if can_lower:
        remedy = "Set train.optimizer_memory=low_precision, or train.gradient_dtype=float32."
    allowed = (
        "float32 with train.optimizer_memory=device, whose step would copy all gradients to fp32"
    )
    yield UserError("train.gradient_dtype", "bfloat16", allowed, remedy)


def muon_rules(config: Config) -> Iterator[UserError]:
    train = config.train
    if train.optimizer != "muon":
        return
    if level_of(train).is_low_precision:
        allowed = "device with train.optimizer=muon, whose momentum is fp32 and on the GPU"
        remedy = "Set train.optimizer_memory=device, or train.optimizer=adamw."
        yield UserError(LEVEL_KEY, train.optimizer_memory, allowed, remedy)
    if config.lora.is_on:
        reason = "the product of two orthogonal adapters is not an orthogonal update of the weight"
        allowed = f"adamw with LoRA, because {reason}"
        remedy = "Set train.optimizer=adamw, or remove the section lora to train the weights."
        yield UserError("train.optimizer", "muon", allowed, remedy)


def optimizer_rules(config: Config, default_dtype: str) -> Iterator[UserError]:
    """Yields violated rules for the level of the optimizer state and the type of gradients."""
    train, key = config.train, LEVEL_KEY
    level = train.optimizer_memory
    yield from muon_rules(config)
    lower = {LEVEL_KEY: "low_precision"}
    can_lower = level_of(train).is_low_precision or not any(
        optimizer_rules(config.with_values(lower), default_dtype)
    )
    if level == "device" or (level == "auto" and not can_lower):
        yield from gradient_rules(config, can_lower)
    if not level_of(train).is_low_precision:
        return
    dtype = default_dtype if config.model.dtype == "auto" else config.model.dtype
    if dtype == "float32":
        reason = "because low precision stores fp32 masters as bf16 weights with remainders"
        allowed = f"device with float32 weights, {reason}"
        remedy = "Set model.dtype=bfloat16, or train.optimizer_memory=device."
        yield UserError(key, level, allowed, remedy)
    if train.release_weights_in_rollout:
        reason = "which rebuilds weights from fp32 masters"
        allowed = f"device with train.release_weights_in_rollout=true, {reason}"
        remedy = "Set train.release_weights_in_rollout=false, or train.optimizer_memory=device."
        yield UserError(key, level, allowed, remedy)
    for name in ("adam_beta1", "adam_beta2"):
        if getattr(train, name) > MAX_BF16_BETA:
            reason = "whose bf16 moments cannot represent smaller changes"
            allowed = f"at most {MAX_BF16_BETA} with train.optimizer_memory={level}, {reason}"
            remedy = f"Lower train.{name}, or set train.optimizer_memory=device."
            yield UserError(f"train.{name}", getattr(train, name), allowed, remedy)
