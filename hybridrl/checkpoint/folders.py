"""Finds checkpoint folders, and checks whether a checkpoint is complete and undamaged. No torch.

The newest checkpoint in a run folder is the one that was written last, not the one with the most
steps: after a user has loaded step 10 and continued to train, the old checkpoints of steps 20 and
30 are no longer part of the run's history.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hybridrl.checkpoint.manifest import (
    MANIFEST,
    Ancestor,
    Manifest,
    check_sizes,
    damaged,
    read_listed,
    read_manifest,
    verify_all,
)
from hybridrl.checkpoint.saved_adapters import SavedAdapters, SavedBase
from hybridrl.config.files import parse_json
from hybridrl.errors import CheckpointError

STEP_FOLDER = re.compile(r"step_(\d{1,18})")
PARTIAL, REPLACED = ".partial", ".replaced"
STATE = "state.json"
HF_FILES = "hf"
EXPORTS = "exports"  # folder in a run folder, with a folder step_N for each exported checkpoint
FileFormat = Literal["hf", "megatron", "peft"]  # output of `hybridrl convert`
HF_FORMAT: Final = "hf"
PEFT_FORMAT: Final = "peft"


class SavedState(BaseModel):
    """Content of `state.json`: the state of a run except its weights."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    step: int | None = Field(None, ge=0)  # None for only weights, as from `hybridrl convert`
    prompts: dict[str, Any] = {}  # positions in the prompts of the run and of other loss terms
    mix: dict[str, Any] = {}
    rollouts: dict[str, Any] = {}  # rollouts in progress, and expected response lengths
    algorithm: dict[str, float] = {}  # state of adaptive algorithms
    evaluations: dict[str, dict[str, float]] = {}  # by step, also of held-out rows
    seconds: float = Field(0.0, ge=0, allow_inf_nan=False)  # training time so far, in seconds
    num_updates: dict[str, int] = {}  # number of optimizer steps taken by each trained model
    freeze: list[str] = []  # `train.freeze`; frozen weights have no optimizer state
    lora: SavedAdapters | None = None  # if set, only trained weights are saved
    passed_over: SavedBase | None = None  # origin of tensors exported unchanged
    trains_mtp: bool = False  # whether the policy contains the layer for multi-token prediction
    layout: str  # random states are restored only in the same layout of ranks
    family: str  # value of `model.family` that is needed to load the weights
    dtype: Literal["float32", "bfloat16", "float16"]  # dtype of the policy's weights
    # Response token at which a reward model's score is read; missing in older checkpoints.
    score_token: Literal["last", "before_last"] = "before_last"

    @field_validator("evaluations", mode="before")
    @classmethod
    def _of_format_1(cls, evaluations: Any) -> Any:
        """Converts results of older versions, which did not separate accuracy from reward."""
        if not isinstance(evaluations, dict):
            return evaluations
        return {
            step: {"reward": found, "accuracy": found} if isinstance(found, float) else found
            for step, found in evaluations.items()
        }

    @model_validator(mode="after")
    def _check_run(self) -> Self:
        if self.step is not None and not self.prompts.get("fingerprint"):
            raise ValueError("prompts: must contain the run's position with a fingerprint")
        if any(count < 0 for count in self.num_updates.values()):
            raise ValueError("num_updates: counts must not be negative")
        return self


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder, its manifest, and the manifest's digest."""

    folder: Path
    manifest: Manifest
    digest: str

    @staticmethod
    def open(folder: Path) -> Checkpoint:
        """Reads the manifest. Raises CheckpointError if it is damaged."""
        return Checkpoint(folder, *read_manifest(folder))

    @property
    def ancestor(self) -> Ancestor | None:
        """Entry for this checkpoint in later manifests; None if it contains only weights."""
        step = self.manifest.step
        return None if step is None else Ancestor(step=step, order=self.manifest.order)

    def check(self) -> SavedState:
        """Checks all file sizes, verifies the HF files and the state, and returns the state. Raises
        CheckpointError that names the file that is missing, truncated, damaged or malformed.
        """
        check_sizes(self.folder, self.manifest)
        for name in self.manifest.files:
            if name.startswith(HF_FILES + "/"):
                read_listed(self.folder, name, self.manifest)
        return self.read_state()

    def read_state(self) -> SavedState:
        """Reads and verifies `state.json`. Raises CheckpointError if it is damaged."""
        content, file = read_listed(self.folder, STATE, self.manifest), self.folder / STATE
        try:
            return SavedState.model_validate(parse_json(content))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            found = f"{key}: {first['input']!r:.80}" if key else first["msg"]
            allowed = first["msg"] if key else "the state of a run"
            raise damaged(file, found, allowed) from None
        except ValueError as error:
            raise damaged(file, str(error), "a JSON object") from None


def step_folders(root: Path) -> dict[int, Path]:
    """Returns the checkpoint folders under `root` by step, ascending; CheckpointError for a file in
    place of a folder. A `.replaced` folder counts only if the folder without the suffix is missing.
    """
    if not root.is_dir():
        if root.exists():
            raise _in_the_way(root)
        return {}
    found: dict[int, Path] = {}
    replaced: dict[int, Path] = {}
    for path in root.iterdir():
        if match := STEP_FOLDER.fullmatch(path.name.removesuffix(REPLACED)):
            if path.name.endswith(REPLACED):
                replaced[int(match[1])] = path
                continue
            if not path.is_dir():
                raise _in_the_way(path)
            found[int(match[1])] = path
    return dict(sorted({**replaced, **found}.items()))


def newest_checkpoint(root: Path) -> Path | None:
    """Returns the newest checkpoint under `root`; an unreadable one is ranked by its step."""
    return next(newest_first(root), None)


def newest_first(root: Path) -> Iterator[Path]:
    """Yields the checkpoints under `root`, beginning with the checkpoint written last."""
    opened: dict[Path, tuple[int, int]] = {}
    unreadable: list[tuple[int, Path]] = []
    for step, folder in step_folders(root).items():
        try:
            opened[folder] = (Checkpoint.open(folder).manifest.order, step)
        except CheckpointError:
            unreadable.append((step, folder))
    ordered = sorted(opened, key=lambda folder: opened[folder], reverse=True)
    newest_step = opened[ordered[0]][1] if ordered else -1
    later = [folder for step, folder in sorted(unreadable, reverse=True) if step > newest_step]
    yield from later
    yield from ordered
    yield from (folder for _, folder in sorted(unreadable, reverse=True) if folder not in later)


def find_checkpoint(path: Path) -> Path:
    """Returns `path`, or the newest checkpoint if it is a run folder; CheckpointError if none."""
    if (path / MANIFEST).is_file() or STEP_FOLDER.fullmatch(path.name):
        return path
    for root in (path, path / "checkpoints"):
        newest = newest_checkpoint(root)
        if newest is not None:
            return newest
    raise CheckpointError(
        str(path),
        "no checkpoint",
        "a run folder or a checkpoints/step_N folder",
        "Check the path, or train with checkpoint.every set.",
    )


def open_checkpoint(path: Path) -> tuple[Checkpoint, SavedState]:
    """Opens and checks a checkpoint, or a run's newest; errors name an undamaged one."""
    folder = find_checkpoint(path)
    try:
        checkpoint = Checkpoint.open(folder)
        return checkpoint, checkpoint.check()
    except CheckpointError as error:
        raise with_remedy(error, folder) from None


def check_family(named: str, allowed: str | None, folder: Path) -> None:
    """Raises CheckpointError if a checkpoint refers to code that the user has not allowed: loading
    a family `package.module:FAMILY` imports the module, which could run untrusted code.
    """
    if ":" in named and named != allowed:
        raise CheckpointError(
            str(folder / STATE),
            f"family {named}, which is code outside hybridrl",
            "a family of hybridrl, or the family that --family names",
            f"If you trust it, add --family {named}.",
        )


def newest_whole(
    root: Path, other_than: Path, notify: Callable[[str], None] = lambda text: None
) -> Path | None:
    """Returns the newest other undamaged checkpoint; tells `notify` which ones it verifies."""
    for folder in newest_first(root):
        if folder.name == other_than.name:
            continue
        notify(f"verifying {folder}")
        try:
            checkpoint = Checkpoint.open(folder)
            checkpoint.check()
            verify_all(folder, checkpoint.manifest)
        except CheckpointError:
            continue
        return folder
    return None


def with_remedy(
    error: CheckpointError, folder: Path, notify: Callable[[str], None] = lambda text: None
) -> CheckpointError:
    """Adds the name of an undamaged checkpoint to the error for a damaged checkpoint."""
    whole = newest_whole(folder.parent, folder, notify) if STEP_FOLDER.match(folder.name) else None
    if whole is not None:
        remedy = (
            f"The newest undamaged checkpoint in the same folder is {whole}: train with "
            "--resume previous to continue from it."
        )
    else:
        remedy = "The same folder contains no undamaged checkpoint. Restore the file from a backup."
    return CheckpointError(error.name, error.value, error.allowed, remedy)


def _in_the_way(path: Path) -> CheckpointError:
    return CheckpointError(
        str(path), "a file", "a folder, which hybridrl creates here", f"Move {path} away."
    )
