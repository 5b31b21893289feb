"""Estimates from scored samples: means with standard errors, pass@k, majority vote. No torch.

Standard errors are over prompts, because samples for the same prompt are not independent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean over prompts, and its standard error (None if there are fewer than 2 prompts)."""

    value: float
    stderr: float | None

    def __str__(self) -> str:
        return self.shown(4)

    def shown(self, digits: int) -> str:
        error = "" if self.stderr is None else f" ± {self.stderr:.{digits}f}"
        return f"{self.value:.{digits}f}{error}"


def mean_of(values: Sequence[float]) -> Estimate:
    """Returns the mean over prompts, and its standard error: std (n - 1) / sqrt(n)."""
    num = len(values)
    mean = math.fsum(values) / num
    if num < 2:
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (num - 1)
    return Estimate(mean, math.sqrt(variance / num))


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Returns an unbiased estimate of the probability that at least one of k samples is right.

    1 - C(n - c, k) / C(n, k) for c right samples of n (Chen et al. 2021, arXiv 2107.03374, eq. 1).
    """
    if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
        raise ValueError(f"pass@{k} with {num_right} right of {num_samples} samples")
    subsets = math.comb(num_samples, k)
    return (subsets - math.comb(num_samples - num_right, k)) / subsets


def majority_score(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """Returns the score, from 0 to 1, of the most frequent answer to one prompt.

    Scores of several equally frequent answers, and of equal answers, are averaged. None is a sample
    without an answer, which does not vote; 0 if no sample has one. Equal answers are equal texts.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    found = []
    for answer, count in votes.items():
        if count == most:
            pairs = zip(answers, scores, strict=True)
            found.append(math.fsum(score for other, score in pairs if other == answer) / count)
    return math.fsum(found) / len(found)
