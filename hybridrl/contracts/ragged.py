"""Stores rows of different lengths (tokens, versions, blobs) in flat tensors, sample by sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridrl.contracts.blobs import KINDS, Blobs
from hybridrl.contracts.branches import branches_of
from hybridrl.contracts.checks import BatchError, Producer, check_blob_type, check_rollouts
from hybridrl.contracts.prompts import Prompt, Rollout


def observed_mask(prompts: Sequence[Prompt], masks: Sequence[Sequence[bool]]) -> Tensor:
    """Returns whether each token is an observation, (T,) bool, from flags of response tokens."""
    return flatten([(False,) * len(p.tokens) for p in prompts], masks)[0].bool()


def flatten(
    prompts: Iterable[Sequence[int]], responses: Iterable[Sequence[int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the flat tokens, the sample lengths and the prompt lengths, all int64."""
    pairs = list(zip(prompts, responses, strict=True))
    tokens = np.fromiter(chain.from_iterable(chain.from_iterable(pairs)), np.int64)
    lengths_B = torch.tensor([len(p) + len(r) for p, r in pairs], dtype=torch.int64)
    return (
        torch.from_numpy(tokens),
        lengths_B,
        torch.tensor([len(p) for p, _ in pairs], dtype=torch.int64),
    )


def starts_of(num_rows_H: Tensor) -> Tensor:
    """Returns the first row of each sample, followed by the number of rows: (H + 1,) int64."""
    return torch.nn.functional.pad(num_rows_H.cumsum(0), (1, 0))


def row_places(num_rows_H: Tensor, places_N: Tensor) -> Tensor:
    """Returns the indices in a flat column of all rows of some samples, one after another.

    Sample i of the column has num_rows_H[i] rows; `places_N` are the wanted samples.
    """
    num_N = num_rows_H[places_N]
    shift_N = (num_rows_H.cumsum(0) - num_rows_H)[places_N] - (num_N.cumsum(0) - num_N)
    # numpy is twice as fast as torch here.
    index = np.repeat(shift_N.numpy(), num_N.numpy())
    index += np.arange(len(index))
    return torch.from_numpy(index)


def token_versions(rollouts: Sequence[Rollout]) -> Tensor | None:
    """Returns each token's version, 0 on prompts: (T,) int64. None if each response has one."""
    if not any(rollout.versions for rollout in rollouts):
        return None
    versions: list[int] = []
    counts: list[int] = []
    for rollout in rollouts:
        runs = rollout.versions or ((rollout.version, len(rollout.tokens)),)
        versions += [0, *(version for version, _ in runs)]
        counts += [len(rollout.prompt.tokens), *(count for _, count in runs)]
    return torch.from_numpy(np.repeat(np.array(versions, np.int64), counts))


def repeated_versions(versions_B: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor) -> Tensor:
    """Returns the result of `token_versions` for samples that have one version each."""
    repeats = torch.stack([prompt_lengths_B, lengths_B - prompt_lengths_B], 1).flatten()
    values = torch.stack([torch.zeros_like(versions_B), versions_B], 1).flatten()
    return torch.repeat_interleave(values, repeats)


@dataclass(frozen=True, eq=False)
class Blob:
    """Rows (N, ...) of one kind for this rank's samples, and all samples' numbers of rows (B,)."""

    values_N: Tensor
    num_rows_B: Tensor


def joined_blobs(of_samples: Sequence[Blobs]) -> dict[str, Blob]:
    """Joins samples' blobs; a missing blob has no rows. Raises ValueError if rows do not fit."""
    found = {}
    for name in {name: None for blobs in of_samples for name in blobs}:
        arrays = [blobs[name] for blobs in of_samples if name in blobs]
        for other in arrays[1:]:
            if (other.shape[1:], other.dtype) != (arrays[0].shape[1:], arrays[0].dtype):
                first = f"{arrays[0].shape[1:]} {arrays[0].dtype}"
                second = f"{other.shape[1:]} {other.dtype}"
                raise ValueError(f"blob {name} has rows of type {first} and of type {second}")
        num_rows = [len(blobs[name]) if name in blobs else 0 for blobs in of_samples]
        found[name] = Blob(torch.from_numpy(np.concatenate(arrays)), torch.tensor(num_rows))
    return found


def blobs_of(rollouts: Sequence[Rollout], who: Producer) -> dict[str, Blob]:
    for name in {name: None for rollout in rollouts for name in rollout.blobs}:
        first = next(rollout.blobs[name] for rollout in rollouts if name in rollout.blobs)
        check_blob_type(name, first.dtype.name, first.ndim, who)
        for rollout in rollouts:
            num_tokens = len(rollout.prompt.tokens) + len(rollout.tokens)
            array, num = rollout.blobs.get(name), KINDS[name].num_rows(num_tokens)
            if array is None:
                is_right, got = num is None, "no blob"
            else:
                is_right = (array.shape[1:], array.dtype) == (first.shape[1:], first.dtype)
                is_right = is_right and num in (None, len(array))
                got = f"{array.shape} {array.dtype}"
            if not is_right:
                rows = "any number of" if num is None else num
                allowed = f"{rows} rows of {first.shape[1:]} {first.dtype}"
                got = f"returned {got} for sample {rollout.sample_id}"
                raise BatchError(who, name, got, allowed)
    return joined_blobs([rollout.blobs for rollout in rollouts])


def check_blob(
    name: str, blob: Blob, lengths_B: Tensor, rows_H: Tensor, producer: Producer
) -> None:
    """Raises BatchError unless a blob fits its kind and the batch, whose rows are `rows_H`."""
    values_N, num_rows_B = blob.values_N, blob.num_rows_B
    check_blob_type(name, str(values_N.dtype).removeprefix("torch."), values_N.ndim, producer)
    kind = KINDS[name]
    is_right = num_rows_B.dtype == torch.int64 and num_rows_B.shape == lengths_B.shape
    if is_right and kind.rows != "any":
        is_right = torch.equal(num_rows_B, lengths_B - int(kind.rows == "input"))
    if not is_right or bool((num_rows_B < 0).any()):
        got = f"returned the row counts {num_rows_B.tolist()[:8]}"
        expected = (
            f"one count for each of {len(lengths_B)} samples, with rows per sample: {kind.rows}"
        )
        raise BatchError(producer, name, got, expected)
    num = int(num_rows_B[rows_H].sum())
    if len(values_N) != num or values_N.device.type != "cpu" or values_N.requires_grad:
        got = f"returned {tuple(values_N.shape)} on {values_N.device}"
        raise BatchError(producer, name, got, f"{num} rows on cpu without a gradient")


def rollout_columns(
    rollouts: Sequence[Rollout], groups: Sequence[int], producer: Producer
) -> dict[str, Any]:
    """Returns a RolloutBatch's fields; rollout i answers prompt `groups[i]`. Raises BatchError."""
    check_rollouts(rollouts, groups, producer)
    logps = ([0.0] * len(r.prompt.tokens) + list(r.logps) for r in rollouts)
    finished, observed_T = [r.finish_reason == "stop" for r in rollouts], None
    sequences = [r.sequence for r in rollouts if r.sequence is not None]
    if sequences and len(sequences) != len(rollouts):
        got = f"returned {len(sequences)} of {len(rollouts)} rollouts with a sequence number"
        raise BatchError(producer, "sequence_B", got, "a number for all rollouts or for none")
    blobs = blobs_of(rollouts, producer)
    if sequences:
        branches_BN = torch.tensor(branches_of(rollouts), dtype=torch.int64)
    if any(r.observed is not None for r in rollouts):
        masks = [r.observed or (False,) * len(r.tokens) for r in rollouts]
        observed_T = observed_mask([r.prompt for r in rollouts], masks)
    tokens_T, lengths_B, prompt_lengths_B = flatten(
        [r.prompt.tokens for r in rollouts], [r.tokens for r in rollouts]
    )
    return dict(
        prompts=tuple(r.prompt for r in rollouts),
        sample_ids_B=torch.tensor([r.sample_id for r in rollouts], dtype=torch.int64),
        group_B=torch.tensor(list(groups), dtype=torch.int64),
        tokens_T=tokens_T,
        lengths_B=lengths_B,
        prompt_lengths_B=prompt_lengths_B,
        behaviour_logp_T=torch.from_numpy(np.fromiter(chain.from_iterable(logps), np.float32)),
        versions_B=torch.tensor([r.version for r in rollouts], dtype=torch.int64),
        finished_B=torch.tensor(finished, dtype=torch.bool),
        producer=producer,
        observed_T=observed_T,
        versions_T=token_versions(rollouts),
        sequence_B=torch.tensor(sequences, dtype=torch.int64) if sequences else None,
        branch_of_B=branches_BN[:, 0] if sequences else None,
        branch_tokens_B=branches_BN[:, 1] if sequences else None,
        context_B=branches_BN[:, 2] if sequences else None,
        blobs=blobs,
    )
