"""Mixes prompts from several sources in fixed proportions, and holds out prompts. No torch.

Both depend only on the prompts, the config and the seed, so all ranks agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from hybridrl.config.schema import DataConfig
from hybridrl.contracts.prompts import Prompt
from hybridrl.data.prompt_files import select_prompts, shares
from hybridrl.data.prompts import LoadedPrompts, PromptSource, saved_count
from hybridrl.errors import DataError


class MixedPrompts(PromptSource):
    """Supplies prompts from several sources, each with separate epochs, in proportion to the
    weights.

    The next prompt always comes from the source that is furthest behind its share (Webster's
    method); with two sources, the deviation is less than one prompt.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[Prompt]],
        weights: Sequence[float],
        *,
        seed: int,
        shuffle: bool,
    ) -> None:
        self._parts = [PromptSource(part, seed=seed, shuffle=shuffle) for part in parts]
        self._weights, self._taken = tuple(weights), [0] * len(parts)
        states = [part.state()["fingerprint"] for part in self._parts]
        self._fingerprint = f"2:{self._joined(states)}"

    def _joined(self, fingerprints: Sequence[int | str]) -> str:
        text = f"{[*fingerprints]}{self._weights}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def older_fingerprint(self) -> str:
        return self._joined([part.older_fingerprint() for part in self._parts])

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def epoch(self) -> float:
        return sum(self._taken) / len(self)

    def take(self, num: int) -> list[Prompt]:
        return [self._next() for _ in range(num)]

    def _next(self) -> Prompt:
        behind = [
            (taken + 0.5) / weight for taken, weight in zip(self._taken, self._weights, strict=True)
        ]
        number = behind.index(min(behind))
        self._taken[number] += 1
        return self._parts[number].take(1)[0]

    def state(self) -> dict[str, int | str]:
        taken: dict[str, int | str] = {f"taken/{i}": num for i, num in enumerate(self._taken)}
        return {"fingerprint": self._fingerprint, **taken}

    def load_state(self, state: Mapping[str, int | str]) -> None:
        """As in `PromptSource`; different weights are an error, too."""
        self._check(state)
        self._taken = [saved_count(state, f"taken/{i}") for i in range(len(self._parts))]
        for part, taken in zip(self._parts, self._taken, strict=True):
            epoch, index = divmod(taken, len(part))
            part.load_state({**part.state(), "epoch": epoch, "index": index})


def prompt_source(loaded: LoadedPrompts, config: DataConfig, seed: int) -> PromptSource:
    """Creates the source of prompts. DataError if all prompts of a weighted source are too long."""
    if config.weights is None:
        return PromptSource(loaded.prompts, seed=seed, shuffle=config.shuffle)
    # `sources` is in ascending order, so the prompts of each source are contiguous.
    ends = np.searchsorted(loaded.sources, np.arange(len(config.weights) + 1)).tolist()
    parts = [loaded.prompts[start:end] for start, end in pairwise(ends)]
    for part, name in zip(parts, config.prompts or (), strict=True):
        if not part:
            raise DataError(
                name,
                "no prompt that is short enough",
                f"at least 1 prompt per weighted source; rows of at most {loaded.left_out.limits}",
                "Remove the source and its weight.",
            )
    return MixedPrompts(parts, config.weights, seed=seed, shuffle=config.shuffle)


def hold_out(loaded: LoadedPrompts, share: float) -> tuple[LoadedPrompts, Sequence[Prompt]]:
    """Splits prompts into a training part and a held-out part.

    A prompt's tokens and images decide, so equal prompts stay together, and added rows move no
    other prompt. All samples of one chat go to the same part. If a small share would leave a part
    empty, that part gets the prompt nearest to the limit. Raises DataError if all prompts are
    equal, or come from one chat.
    """
    numbers, values = shares(loaded.prompts)
    # The samples of a chat share one number and are contiguous; the first sample decides.
    _, first, samples = np.unique(numbers, return_index=True, return_inverse=True)
    value_of_chat = values[first]
    lowest, highest = value_of_chat.min(), value_of_chat.max()
    if lowest == highest:
        raise DataError(
            "data.eval_share",
            f"{share} of {len(loaded.prompts)} equal prompts",
            "at least 2 different prompts, one to train on and one to evaluate on",
            "Add rows, or set data.eval_prompts and data.eval_share=0.",
        )
    limit = np.clip(share, np.nextafter(lowest, 1), highest)
    is_held = (value_of_chat < limit)[samples]
    kept, held = np.flatnonzero(~is_held), np.flatnonzero(is_held)
    trained = select_prompts(loaded.prompts, kept)
    sources = loaded.sources[kept]
    return replace(loaded, prompts=trained, sources=sources), select_prompts(loaded.prompts, held)
