"""Divides groups among replicas by their expected work. All ranks compute the same division. Groups
are not split: their samples share a prefix, and a reward may compare them. No torch.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Mapping, Sequence

from hybridrl.contracts.prompts import Prompt

PROMPT_TOKEN_WORK = 0.1
"""Cost of a prompt token relative to a response token. A group's prompt is counted once, because
all samples share it.

Engines compute thousands of prompt tokens together, but need a pass over all weights for each
response token: they process about ten times as many prompt tokens per second. The exact value
matters little, because prompts of one source differ less in length than responses do.
"""
SHARE_OF_NEWEST = 0.5
"""Weight of a prompt's latest mean response length in the prompt's exponential average."""


class ResponseLengths:
    """Predicts response lengths by an exponential average over a prompt's earlier responses. A
    prompt is identified by its tokens, so training and evaluation share predictions.
    """

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def observe(self, prompt: Prompt, mean_tokens: float) -> None:
        """Records the mean number of tokens in the latest responses to a prompt."""
        key = _key(prompt)
        before = self._means.get(key, mean_tokens)
        self._means[key] = before + SHARE_OF_NEWEST * (mean_tokens - before)

    def expected(self, prompts: Sequence[Prompt], unknown: float) -> list[float]:
        """Returns the expected tokens per response to each prompt; new prompts get the mean."""
        if self._means:
            unknown = math.fsum(self._means.values()) / len(self._means)
        return [self._means.get(_key(prompt), unknown) for prompt in prompts]

    def state(self) -> dict[str, float]:
        return dict(self._means)

    def load_state(self, state: Mapping[str, float]) -> None:
        self._means = dict(state)


def group_work(prompt: Prompt, response_tokens: float, num_samples: int) -> float:
    """Returns the work for all samples of a prompt, measured in response tokens."""
    return num_samples * response_tokens + PROMPT_TOKEN_WORK * len(prompt.tokens)


def spread(
    work: Sequence[float], num_replicas: int, begun: Mapping[int, float] | None = None
) -> list[list[int]]:
    """Repeatedly assigns the largest remaining group to the replica with the least work.

    Returns the groups of each replica, largest first, because a large group that starts last would
    run alone. `begun` is work that replicas already have. Without it, the work of any two replicas
    differs by at most one group, and the slowest takes at most 4/3 of the time in the best possible
    division (Graham 1969, SIAM J. Appl. Math. 17(2), 416-429).
    """
    replicas: list[list[int]] = [[] for _ in range(num_replicas)]
    least = [((begun or {}).get(number, 0.0), number) for number in range(num_replicas)]
    heapq.heapify(least)
    for group in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        load, number = least[0]
        replicas[number].append(group)
        heapq.heapreplace(least, (load + work[group], number))
    return replicas


def _key(prompt: Prompt) -> str:
    return hashlib.blake2b(prompt.input_key.encode(), digest_size=8).hexdigest()
