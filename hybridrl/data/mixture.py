"""Prompts of several sources in fixed shares, and prompts held out of them. No torch.

Both follow from the prompts alone, so every rank agrees without asking.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from hybridrl.config.schema import DataConfig
from hybridrl.contracts.prompts import Prompt
from hybridrl.data.prompt_file import chosen, token_texts
from hybridrl.data.prompts import LoadedPrompts, Once, PromptSource, at_once, saved_count
from hybridrl.errors import DataError


class MixedPrompts(PromptSource):
    """Gives prompts of several sources, each in its own epochs.

    Of any number of prompts taken, the share of each source is that of its weight, to less than
    one prompt either way with two sources: each time the source comes that is furthest behind
    (Webster's method).

    Args:
        parts: the prompts of each source; none is empty.
        weights: of each.
        seed, shuffle, once: as of PromptSource, for each.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[Prompt]],
        weights: Sequence[float],
        *,
        seed: int,
        shuffle: bool,
        once: Once = at_once,
    ) -> None:
        self._parts = [PromptSource(part, seed=seed, shuffle=shuffle, once=once) for part in parts]
        self._weights, self._taken = tuple(weights), [0] * len(parts)
        states = [part.state()["fingerprint"] for part in self._parts]
        digest = hashlib.sha256(f"{states}{self._weights}".encode())
        self._fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def epoch(self) -> float:
        """How many times the prompts were gone through on average."""
        return sum(self._taken) / len(self)

    def take(self, num: int) -> list[Prompt]:
        """Returns the next `num` prompts."""
        return [self._next() for _ in range(num)]

    def _next(self) -> Prompt:
        behind = [
            (taken + 0.5) / weight for taken, weight in zip(self._taken, self._weights, strict=True)
        ]
        number = behind.index(min(behind))
        self._taken[number] += 1
        return self._parts[number].take(1)[0]

    def state(self) -> dict[str, int | str]:
        """Returns what `load_state` needs, as plain JSON values."""
        taken: dict[str, int | str] = {f"taken/{i}": num for i, num in enumerate(self._taken)}
        return {"fingerprint": self._fingerprint, **taken}

    def load_state(self, state: Mapping[str, int | str]) -> None:
        """Goes on where the source that returned `state` stood.

        Raises:
            DataError: that source had other prompts, other weights or another seed.
        """
        if state.get("fingerprint") != self._fingerprint:
            raise self.differs()
        self._taken = [saved_count(state, f"taken/{i}") for i in range(len(self._parts))]
        for part, taken in zip(self._parts, self._taken, strict=True):
            epoch, index = divmod(taken, len(part))
            part.load_state({**part.state(), "epoch": epoch, "index": index})


def prompt_source(
    loaded: LoadedPrompts, config: DataConfig, seed: int, once: Once = at_once
) -> PromptSource:
    """Returns the source of a run's prompts; `once` as of PromptSource.

    Raises:
        DataError: all prompts of a source that has a weight are too long.
    """
    if config.weights is None:
        return PromptSource(loaded.prompts, seed=seed, shuffle=config.shuffle, once=once)
    # Sources ascend, so the prompts of each stand together.
    ends = [bisect_left(loaded.sources, number) for number in range(len(config.weights) + 1)]
    parts = [loaded.prompts[start:end] for start, end in pairwise(ends)]
    for part, name in zip(parts, config.prompts or (), strict=True):
        if not part:
            raise DataError(
                name,
                "no prompt that is short enough",
                f"at least one, with data.weights; rows of at most {loaded.left_out.limits}",
                "Remove the source and its weight.",
            )
    return MixedPrompts(parts, config.weights, seed=seed, shuffle=config.shuffle, once=once)


def hold_out(
    loaded: LoadedPrompts, share: float, once: Once = at_once
) -> tuple[LoadedPrompts, Sequence[Prompt]]:
    """Returns the prompts to train on and those held out.

    A prompt's side follows from its tokens: equal ones stay together, as do the samples of one
    chat, and rows added later move no other.

    Args:
        once: as of PromptSource.

    Raises:
        DataError: one of the sides would be empty.
    """
    kept, held = once(partial(_sides, loaded.prompts, share))
    if not held or not kept:
        raise DataError(
            "data.eval_share",
            f"{share}, which holds out {len(held)} of {len(loaded.prompts)} prompts",
            "a share that leaves prompts on both sides",
            "Change it, or set data.eval_prompts.",
        )
    sources = array("i", (loaded.sources[place] for place in kept))
    trained = replace(loaded, prompts=chosen(loaded.prompts, kept), sources=sources)
    return trained, chosen(loaded.prompts, held)


def _sides(prompts: Sequence[Prompt], share: float) -> tuple[array[int], array[int]]:
    """Returns the places of the prompts to train on, and of those held out."""
    sides = array("q"), array("q")
    last, side = -1, False
    for place, (number, tokens) in enumerate(token_texts(prompts)):
        if number != last:  # samples of one chat, which have one number, stay together
            last, side = number, _share(tokens) < share
        sides[side].append(place)
    return sides


def _share(tokens: bytes) -> float:
    """Returns a number from 0 to 1 that follows from the text of a prompt's tokens."""
    digest = hashlib.sha256(tokens).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
