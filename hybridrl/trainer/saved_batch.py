"""A mini-batch as a file, with what it takes to compute its optimizer step again.

One safetensors file: the batch's columns and every rank's random states as tensors, the rest as
JSON in the header. Nothing in it is executed when it is read. The weights are not in it: they are a
checkpoint's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hybridrl.batch import Producer, Prompt, TrainBatch
from hybridrl.errors import DataError

HEADER = "hybridrl"  # key of the JSON in the header
_LENGTHS = ("lengths_B", "prompt_lengths_B")
_PART, _RNG, _COLUMN = "reward_parts.", "rng.", "column."


@dataclass(frozen=True)
class SavedBatch:
    """A mini-batch whose optimizer step was skipped.

    Args:
        batch: all samples of the mini-batch, of all ranks, with the columns of its losses.
        step: number of the step, from 1.
        update: number of the optimizer step within it, from 0.
        reason: what was not finite.
        config: the run's, as YAML.
        rng: the random states of each rank before the passes.
    """

    batch: TrainBatch
    step: int
    update: int
    reason: str
    config: str
    rng: Sequence[Mapping[str, torch.Tensor]]

    @property
    def file_name(self) -> str:
        """Ordered as steps are."""
        return f"step_{self.step:06d}_update_{self.update:03d}.safetensors"

    def write(self, path: Path) -> None:
        """Writes the file; it has its name only when it is complete."""
        batch = self.batch
        tensors = {_COLUMN + name: value for name, value in batch.columns().items()}
        tensors |= {_COLUMN + name: getattr(batch, name) for name in _LENGTHS}
        tensors |= {_PART + name: value for name, value in batch.reward_parts.items()}
        for rank, states in enumerate(self.rng):
            tensors |= {f"{_RNG}{rank}.{name}": value for name, value in states.items()}
        content = {
            "step": self.step,
            "update": self.update,
            "reason": self.reason,
            "config": self.config,
            "producer": asdict(batch.producer),
            "prompts": [asdict(prompt) for prompt in batch.prompts],
        }
        # Of a prompt's other columns, which no loss reads, JSON may lack the type.
        header = json.dumps(content, default=str)
        partial = path.with_name(path.name + ".partial")
        whole = {name: value.contiguous().clone() for name, value in tensors.items()}
        save_file(whole, partial, {HEADER: header})
        partial.rename(path)

    @staticmethod
    def read(path: Path) -> SavedBatch:
        """Reads such a file.

        Raises:
            DataError: it is none.
        """
        try:
            with safe_open(path, "pt") as file:
                content = json.loads((file.metadata() or {})[HEADER])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise DataError(
                "--replay",
                f"{path} ({type(error).__name__}: {error})",
                "a file of a run's replay folder",
                "Give the file that the message about the skipped step names.",
            ) from error
        batch = TrainBatch(
            prompts=tuple(_prompt(found) for found in content["prompts"]),
            producer=Producer(**content["producer"]),
            reward_parts=_starting(tensors, _PART),
            **_starting(tensors, _COLUMN),
        )
        states = _starting(tensors, _RNG)
        ranks = 1 + max((int(name.split(".")[0]) for name in states), default=-1)
        rng = [_starting(states, f"{rank}.") for rank in range(ranks)]
        step, update, reason = content["step"], content["update"], content["reason"]
        return SavedBatch(batch, step, update, reason, content["config"], rng)


def _starting(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}


def _prompt(found: dict[str, object]) -> Prompt:
    tokens = ("tokens", "response_tokens", "rejected_tokens")
    as_tuples = {n: tuple(v) if isinstance(v := found[n], list) else None for n in tokens}
    return Prompt(**{**found, **as_tuples})  # type: ignore[arg-type]
