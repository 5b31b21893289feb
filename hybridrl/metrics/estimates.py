"""Computes estimates from scored samples: means with standard errors, pass@k, majority vote. Does
not import torch.

Standard errors are computed over prompts, because samples for the same prompt are not independent.
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
        """Returns the estimate as text with this number of decimal places."""
        error = "" if self.stderr is None else f" ± {self.stderr:.{digits}f}"
        return f"{self.value:.{digits}f}{error}"


def mean_of(values: Sequence[float]) -> Estimate:
    """Returns the mean of the values, one per prompt, and its standard error: the sample standard
    deviation (with n - 1 degrees of freedom) divided by sqrt(n).
    """
    num = len(values)
    mean = math.fsum(values) / num
    if num < 2:
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (num - 1)
    return Estimate(mean, math.sqrt(variance / num))


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Returns an unbiased estimate of the probability that at least one of k samples is right: 1 -
    C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    Args:
        num_samples: n, the number of samples of one prompt.
        num_right: c, the number of right samples among them.
        k: Number from 1 to n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
        raise ValueError(f"pass@{k} with {num_right} right of {num_samples} samples")
    subsets = math.comb(num_samples, k)
    return (subsets - math.comb(num_samples - num_right, k)) / subsets


def majority_score(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """Returns the score of the most frequent answer to one prompt.

    If several answers are equally frequent, their scores are averaged. If equal answers have
    different scores, these scores are averaged too.

    Args:
        answers: Normalised answer of each sample, so that equal answers are equal texts. None for a
            sample without an answer, which does not vote.
        scores: Score of each sample, from 0 to 1.

    Returns:
        A score from 0 to 1; 0 if no sample has an answer.
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
