"""Which replica generates which groups, by the work that they are expected to be. No torch.

Pure, and fed with what every rank has (the prompts, and lengths of gathered responses), so all
ranks come to the same division without asking each other. Whole groups only: the samples of a
prompt share its prefix, and a reward may look at all of them.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Mapping, Sequence

from hybridrl.contracts.prompts import Prompt

PROMPT_TOKEN_WORK = 0.1
"""Work of a prompt token, in response tokens; it counts once a group, as its samples share it.

Prompt tokens are computed thousands at a time, while each response token waits for a pass over all
weights: engines serve about ten times as many of them a second. The exact value matters little,
because prompts of one source differ less in length than responses do.
"""
SHARE_OF_NEWEST = 0.5
"""Weight of the newest mean length of a prompt's responses; the rest is what came before."""


class ResponseLengths:
    """Expects of a prompt what its responses were like: an exponential average of their length.

    A prompt is known by its tokens, so training and evaluation prompts can meet here.
    """

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def observe(self, prompt: Prompt, mean_tokens: float) -> None:
        """Takes in the mean number of tokens of the responses that a prompt just got."""
        key = _key(prompt)
        before = self._means.get(key, mean_tokens)
        self._means[key] = before + SHARE_OF_NEWEST * (mean_tokens - before)

    def expected(self, prompts: Sequence[Prompt], unknown: float) -> list[float]:
        """Returns the expected tokens of one response to each prompt: for a prompt without
        responses so far the mean over the others, or `unknown` where there are none.
        """
        if self._means:
            unknown = math.fsum(self._means.values()) / len(self._means)
        return [self._means.get(_key(prompt), unknown) for prompt in prompts]

    def state(self) -> dict[str, float]:
        """Returns what `load_state` needs, as plain JSON values."""
        return dict(self._means)

    def load_state(self, state: Mapping[str, float]) -> None:
        """Expects what the object that returned `state` expected."""
        self._means = dict(state)


def group_work(prompt: Prompt, response_tokens: float, num_samples: int) -> float:
    """Returns the work of a prompt's samples, in response tokens."""
    return num_samples * response_tokens + PROMPT_TOKEN_WORK * len(prompt.tokens)


def spread(work: Sequence[float], num_replicas: int) -> list[list[int]]:
    """Gives the largest remaining group to the replica with the least work so far; returns the
    groups of each replica, largest first: begun last, a long one would run alone.

    A replica was the least loaded when it got its last group, so the work of any two differs by at
    most one group's; the longest takes at most 4/3 of the best division (Graham 1969, SIAM J. Appl.
    Math. 17(2), 416-429).
    """
    replicas: list[list[int]] = [[] for _ in range(num_replicas)]
    least = [(0.0, number) for number in range(num_replicas)]
    for group in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        load, number = least[0]
        replicas[number].append(group)
        heapq.heapreplace(least, (load + work[group], number))
    return replicas


def _key(prompt: Prompt) -> str:
    return hashlib.blake2b(str(prompt.tokens).encode(), digest_size=8).hexdigest()
