"""File format for a mini-batch and everything needed to repeat its optimizer step.

In a safetensors file, columns, prompt tokens and the random states of all ranks are tensors, and
everything else is JSON in a tensor of bytes, because a header is limited to 100 MB. Each distinct
prompt is stored once. Reading the file executes no code. A checkpoint provides the weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from yaml import YAMLError, safe_load

from hybridrl.contracts.batch import LENGTHS, BatchError, Blob, Producer, Prompt, TrainBatch
from hybridrl.contracts.checks import columns_of
from hybridrl.contracts.prompts import contents_from_bytes, contents_to_bytes
from hybridrl.contracts.routed_experts import ROUTED_EXPERTS
from hybridrl.errors import DataError

FILE_NAME = re.compile(r"step_\d{6,}_update_\d{3,}\.safetensors")
_FORMAT = {"hybridrl": "replay 4"}  # metadata in the safetensors header
_OLD_FORMAT = {"hybridrl": "replay 3"}  # without images; routed experts are a column, not a blob
_TOKENS = ("tokens", "response_tokens", "rejected_tokens")
_PART, _RNG, _COLUMN, _PROMPTS, _TOLD = "reward_parts.", "rng.", "column.", "prompts.", "told"
_TERM, _BLOB, _CONTENTS, _OLD_EXPERTS = "term.", "blob.", "contents", "routed_experts_TK"


class _BatchContent(BaseModel, extra="forbid"):
    producer: Producer
    prompts: list[tuple[int, str, dict[str, Any]]]


class _Content(BaseModel, extra="forbid"):
    step: int = Field(ge=1)
    update: int = Field(ge=0)
    reason: str
    config: str
    batch: _BatchContent
    terms: dict[str, _BatchContent]


def file_name(step: int, update: int) -> str:
    """Returns the name of the file. Names sort by step and match FILE_NAME."""
    return f"step_{step:06d}_update_{update:03d}.safetensors"


@dataclass(frozen=True)
class SavedBatch:
    """A mini-batch, from all ranks, whose optimizer step was skipped."""

    batch: TrainBatch
    step: int  # number of the training step, from 1; `update`: of its optimizer step, from 0
    update: int
    reason: str
    config: str  # configuration of the run as YAML
    rng: Sequence[Mapping[str, torch.Tensor]]  # random states of each rank, before the passes
    # Mini-batches for the additional terms of the policy's loss.
    terms: Mapping[str, TrainBatch] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Writes the file under a temporary name, and renames it when it is complete."""
        tensors, batch_json = _parts(self.batch)
        content: dict[str, Any] = {
            "step": self.step,
            "update": self.update,
            "reason": self.reason,
            "config": self.config,
            "batch": batch_json,
            "terms": {},
        }
        for name, batch in self.terms.items():
            term_tensors, content["terms"][name] = _parts(batch)
            tensors |= {f"{_TERM}{name}.{key}": value for key, value in term_tensors.items()}
        for rank, states in enumerate(self.rng):
            tensors |= {f"{_RNG}{rank}.{name}": value for name, value in states.items()}
        text = bytearray(json.dumps(content, default=str), "ascii")
        tensors[_TOLD] = torch.frombuffer(text, dtype=torch.uint8)
        partial = path.with_name(path.name + ".partial")
        whole = {name: value.contiguous().clone() for name, value in tensors.items()}
        try:
            save_file(whole, partial, _FORMAT)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)  # frees the space of an incomplete file

    @staticmethod
    def read(path: Path) -> SavedBatch:
        """Reads a file. Raises DataError if it is damaged, or its format is unknown."""
        try:
            with safe_open(path, "pt") as file:
                if file.metadata() not in (_FORMAT, _OLD_FORMAT):
                    raise ValueError(f"its header contains {file.metadata()}, not {_FORMAT}")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return _assembled(tensors)
        except (
            OSError,
            SafetensorError,
            KeyError,
            ValueError,  # pydantic and json raise subclasses
            TypeError,  # too many or too few columns
            BatchError,
            YAMLError,
        ) as error:
            raise DataError(
                "--replay",
                f"{path} ({type(error).__name__}: {error})",
                "a file in a run's replay folder, from this version of hybridrl",
                "Pass the file that the message about the skipped step names.",
            ) from error


def _assembled(tensors: Mapping[str, torch.Tensor]) -> SavedBatch:
    content = _Content.model_validate(json.loads(tensors[_TOLD].numpy().tobytes()))
    if not isinstance(safe_load(content.config), dict):
        raise ValueError("its configuration has no sections")
    states = _starting(tensors, _RNG)
    ranks = {name.split(".")[0] for name in states}
    if ranks != {str(rank) for rank in range(len(ranks))}:
        raise ValueError(f"random states of the ranks {sorted(ranks)}")
    return SavedBatch(
        batch=_batch(tensors, content.batch),
        step=content.step,
        update=content.update,
        reason=content.reason,
        config=content.config,
        rng=[_starting(states, f"{rank}.") for rank in range(len(ranks))],
        terms={
            name: _batch(_starting(tensors, f"{_TERM}{name}."), term)
            for name, term in content.terms.items()
        },
    )


def _parts(batch: TrainBatch) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {_COLUMN + name: value for name, value in batch.columns().items()}
    tensors |= {_COLUMN + name: getattr(batch, name) for name in LENGTHS}
    tensors |= {_PART + name: value for name, value in batch.reward_parts.items()}
    for name, blob in batch.blobs.items():
        tensors |= {f"{_BLOB}{name}": blob.values_N, f"{_BLOB}{name}.num_rows": blob.num_rows_B}
    prompts, index = _distinct(batch.prompts)
    tensors[_PROMPTS + "index"] = torch.tensor(index)
    for name in _TOKENS:
        tensors |= _flat(_PROMPTS + name, [getattr(prompt, name) for prompt in prompts])
    cells = [contents_to_bytes(prompt.contents) for prompt in prompts]
    if any(cells):
        joined = np.frombuffer(b"".join(cells), np.uint8).copy()
        tensors[_PROMPTS + _CONTENTS] = torch.from_numpy(joined)
        tensors[f"{_PROMPTS}{_CONTENTS}.lengths"] = torch.tensor([len(cell) for cell in cells])
    return tensors, {
        "producer": asdict(batch.producer),
        "prompts": [_about(prompt) for prompt in prompts],
    }


def _batch(tensors: Mapping[str, torch.Tensor], content: _BatchContent) -> TrainBatch:
    tokens = zip(*(_ragged(tensors, _PROMPTS + name) for name in _TOKENS), strict=True)
    cells = [b""] * len(content.prompts)
    if _PROMPTS + _CONTENTS in tensors:
        whole = tensors[_PROMPTS + _CONTENTS].numpy().tobytes()
        lengths = _integers(tensors, f"{_PROMPTS}{_CONTENTS}.lengths")
        ends = list(accumulate(lengths))
        cells = [whole[end - num : end] for end, num in zip(ends, lengths, strict=True)]
    distinct = [
        Prompt(
            number, text, own or (), columns, response, rejected, contents=contents_from_bytes(cell)
        )
        for (number, text, columns), (own, response, rejected), cell in zip(
            content.prompts, tokens, cells, strict=True
        )
    ]
    index = _integers(tensors, _PROMPTS + "index")
    if index and not 0 <= min(index) <= max(index) < len(distinct):
        raise ValueError(f"a sample of prompt {min(index)} or {max(index)} of {len(distinct)}")
    columns: dict[str, Any] = _starting(tensors, _COLUMN)
    saved, num_rows = _starting(tensors, _BLOB), ".num_rows"
    blobs = {
        name: Blob(values, saved[name + num_rows])
        for name, values in saved.items()
        if not name.endswith(num_rows)
    }
    if (experts_TK := columns.pop(_OLD_EXPERTS, None)) is not None:
        num_rows_B = columns["lengths_B"] - 1
        is_last_T = torch.zeros(len(experts_TK), dtype=torch.bool)
        is_last_T[columns["lengths_B"].cumsum(0) - 1] = True
        blobs[ROUTED_EXPERTS] = Blob(experts_TK[~is_last_T], num_rows_B)
    if unknown := columns.keys() - columns_of(TrainBatch).keys() - set(LENGTHS):
        raise ValueError(f"unknown columns {sorted(unknown)}")
    return TrainBatch(
        prompts=tuple(distinct[number] for number in index),
        producer=content.producer,
        reward_parts=_starting(tensors, _PART),
        blobs=blobs,
        **columns,
    )


def _about(prompt: Prompt) -> tuple[int, str, dict[str, object]]:
    return prompt.prompt_id, prompt.text, dict(prompt.columns)


def _distinct(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[int]]:
    places: dict[object, int] = {}
    found: list[Prompt] = []
    index: list[int] = []
    for prompt in prompts:
        # Columns that no loss reads may have types that JSON does not support.
        about = json.dumps(_about(prompt), default=str)
        key = (about, prompt.contents, *(getattr(prompt, name) for name in _TOKENS))
        if key not in places:
            places[key] = len(found)
            found.append(prompt)
        index.append(places[key])
    return found, index


def _flat(name: str, rows: Sequence[Sequence[int] | None]) -> dict[str, torch.Tensor]:
    """Concatenates rows of integers. Returns the tensor and the lengths, -1 for None."""
    lengths = [-1 if row is None else len(row) for row in rows]
    values = list(chain.from_iterable(row or () for row in rows))
    return {
        name: torch.tensor(values, dtype=torch.int64),
        f"{name}.lengths": torch.tensor(lengths, dtype=torch.int64),
    }


def _ragged(tensors: Mapping[str, torch.Tensor], name: str) -> list[tuple[int, ...] | None]:
    """Splits a tensor into rows by their lengths; the inverse of `_flat`."""
    values, lengths = _integers(tensors, name), _integers(tensors, f"{name}.lengths")
    if min(lengths, default=0) < -1 or sum(max(n, 0) for n in lengths) != len(values):
        raise ValueError(f"{name}: the lengths do not add up to its {len(values)} numbers")
    ends = accumulate(max(n, 0) for n in lengths)
    return [
        None if n < 0 else tuple(values[end - n : end])
        for n, end in zip(lengths, ends, strict=True)
    ]


def _integers(tensors: Mapping[str, torch.Tensor], name: str) -> list[int]:
    found = tensors[name]
    if found.dtype != torch.int64 or found.ndim != 1:
        raise ValueError(f"{name}: {found.dtype} of shape {tuple(found.shape)}, not a row of int64")
    numbers: list[int] = found.tolist()
    return numbers


def _starting(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
