"""Estimates from scored samples: means with standard errors, pass@k, majority vote. No torch.

The unit is the prompt: samples of one prompt are not independent of each other, so that every
standard error is that of a mean over prompts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean over prompts, and its standard error; None where there are fewer than 2 prompts."""

    value: float
    stderr: float | None

    def __str__(self) -> str:
        return f"{self.value:.4f}" + ("" if self.stderr is None else f" ± {self.stderr:.4f}")


def mean_of(values: Sequence[float]) -> Estimate:
    """Returns the mean of one value a prompt, with its standard error: the values' standard
    deviation, with one degree of freedom less, over the root of their number.
    """
    num = len(values)
    mean = math.fsum(values) / num
    if num < 2:
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (num - 1)
    return Estimate(mean, math.sqrt(variance / num))


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Returns the unbiased estimate of the probability that one of k samples is right:
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    Args:
        num_samples: n, samples of one prompt.
        num_right: c, those of them that are right.
        k: 1 to n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
        raise ValueError(f"pass@{k} of {num_right} right ones among {num_samples} samples")
    subsets = math.comb(num_samples, k)
    return (subsets - math.comb(num_samples - num_right, k)) / subsets


def majority_score(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """Returns what the answer that most samples of one prompt give scores.

    Of several answers that are given equally often each counts alike, as if one were drawn. Equal
    answers have equal scores; where a scorer disagrees, the mean counts.

    Args:
        answers: of each sample, in a form in which equal ones are equal texts; None: it gives none,
            and does not vote.
        scores: of each sample, from 0 to 1.

    Returns:
        A score from 0 to 1; 0 where no sample gives an answer.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    found = []
    for answer, count in votes.items():
        if count == most:
            pairs = zip(answers, scores, strict=True)
            found.append(math.fsum(score for one, score in pairs if one == answer) / count)
    return math.fsum(found) / len(found)
