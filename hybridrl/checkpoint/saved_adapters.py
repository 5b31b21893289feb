"""LoRA settings and original model in a checkpoint's `state.json`. No torch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hybridrl.errors import CheckpointError
from hybridrl.models.adapters.base_reference import BaseReference, other_base
from hybridrl.models.adapters.lora import Lora

RESTORE = (
    "Set it as it was; or convert the checkpoint with `hybridrl convert --to hf` and start from "
    "the result with model.path."
)


class SavedBase(BaseModel):
    """The model from which training began; see `BaseReference`."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    path: str | None = None
    init: str | None = None
    seed: int | None = None
    digest: str = Field(pattern="[0-9a-f]{64}")

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.path is None and (self.init is None or self.seed is None):
            raise ValueError("a path, or init and seed")
        return self

    @property
    def reference(self) -> BaseReference:
        return BaseReference(self.path, self.init, self.seed, self.digest)


class SavedAdapters(BaseModel):
    """Settings of the adapters in a checkpoint; see `Lora`."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    rank: int = Field(ge=1)
    alpha: float = Field(allow_inf_nan=False)
    targets: list[str]
    rslora: bool = False
    full: list[str] = []
    base: SavedBase

    @property
    def lora(self) -> Lora:
        return Lora(self.rank, self.alpha, tuple(self.targets), self.rslora, tuple(self.full))


def adapters_state(lora: Lora | None, base: BaseReference | None) -> dict[str, Any]:
    """Returns the part of `state.json` that describes adapters; empty without adapters."""
    if lora is None:
        return {}
    assert base is not None
    return {"lora": {**asdict(lora), "base": asdict(base)}}


def check_passed_over(saved: SavedBase | None, current: BaseReference | None, folder: Path) -> None:
    """Raises CheckpointError if the checkpoint's run exports other tensors unchanged than this run.
    `saved` and `current` are the models with these tensors; None if there are none.
    """
    if saved is None or (current is not None and saved.digest == current.digest):
        return
    remedy = "Set model.path to the model from which training began."
    if current is not None:
        raise other_base(current.named, current.digest, saved.reference, remedy)
    what = "tensors that training passes over, such as MTP layers"
    allowed = f"{what}, as in {saved.path}, for {folder}"
    raise CheckpointError("model.path", f"a model without {what}", allowed, remedy)


def check_adapters(
    saved: SavedAdapters | None, lora: Lora | None, base: BaseReference | None, folder: Path
) -> None:
    """Raises CheckpointError unless run and checkpoint have the same adapters and base model."""
    if saved is None and lora is None:
        return
    if saved is None or lora is None:
        has, lacks = "LoRA adapters", "no LoRA adapters"
        remedy = "Remove the section lora" if saved is None else "Set the section lora as it was"
        raise CheckpointError(
            f"section lora of {folder}",
            lacks if saved is None else has,
            f"{has if saved is None else lacks}, as this run has it",
            f"{remedy}; or convert the checkpoint with `hybridrl convert --to hf` and start from "
            "the result with model.path.",
        )
    before = saved.lora
    for key in ("rank", "alpha", "targets", "rslora", "full"):
        found, wanted = getattr(before, key), getattr(lora, key)
        if isinstance(found, tuple):
            found, wanted = (", ".join(sorted(names)) or "nothing" for names in (found, wanted))
        if found != wanted:
            raise CheckpointError(
                f"lora.{key} of {folder}", found, f"{wanted}, as this run has it", RESTORE
            )
    assert base is not None
    reference = saved.base.reference
    if reference.digest != base.digest:
        remedy = "Set model.path to the model that the adapters were trained on."
        raise other_base(base.named, base.digest, reference, remedy)
