"""Rewards for the form of a response: patterns, tags and length. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridrl.errors import UserError
from hybridrl.rewards.answers import compile_pattern


class Regex:
    """Rewards responses that match a regular expression. `.` matches line breaks only with (?s). If
    `whole`, it must match the whole response, ignoring white space at both ends.
    """

    runs = "process"  # a pattern may take exponential time on some responses

    def __init__(
        self, pattern: str, whole: bool = False, match: float = 1.0, no_match: float = 0.0
    ) -> None:
        self._pattern, self._whole = compile_pattern("reward.options.pattern", pattern), whole
        self._scores = (float(no_match), float(match))

    def __call__(self, prompt: str, response: str, columns: Mapping[str, object]) -> float:
        if self._whole:
            return self._scores[self._pattern.fullmatch(response.strip()) is not None]
        return self._scores[self._pattern.search(response) is not None]


class Format:
    """Share of tags that occur exactly once as <tag>...</tag>; 0 if the tags are out of order, or
    text is outside of them, unless it is allowed there (`outside`).
    """

    def __init__(self, tags: Sequence[str] = ("think", "answer"), outside: bool = False) -> None:
        if isinstance(tags, str) or not tags or not all(isinstance(t, str) and t for t in tags):
            raise UserError(
                "reward.options.tags", repr(tags), "a list of names", "Set tags: [think, answer]."
            )
        self._tags, self._outside = tuple(tags), outside

    def __call__(self, prompt: str, response: str, columns: Mapping[str, object]) -> float:
        spans = []
        for tag in self._tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if response.count(opening) == 1 and response.count(closing) == 1:
                spans.append((response.index(opening), response.index(closing) + len(closing)))
        if any(end <= start for start, end in spans):
            return 0.0
        if any(a[1] > b[0] for a, b in zip(spans, spans[1:], strict=False)):
            return 0.0
        outside = response
        for start, end in reversed(spans):
            outside = outside[:start] + outside[end:]
        if not self._outside and outside.strip():
            return 0.0
        return len(spans) / len(self._tags)


class Length:
    """Penalty for long responses: 0 up to a length of `max_chars` - `buffer_chars`, then falling
    linearly to -1 at `max_chars`. This is DAPO's overlong shaping (Yu et al. 2025, arXiv
    2503.14476, eq. 13), measured in characters. Responses shorter than `min_chars` also score -1.
    """

    def __init__(self, max_chars: int, buffer_chars: int = 0, min_chars: int = 0) -> None:
        for name, value in (("buffer_chars", buffer_chars), ("min_chars", min_chars)):
            if not 0 <= value <= max_chars:
                raise UserError(
                    f"reward.options.{name}",
                    value,
                    f"a number from 0 to max_chars ({max_chars})",
                    f"Change {name} or max_chars.",
                )
        self._most, self._buffer, self._least = max_chars, buffer_chars, min_chars

    def __call__(self, prompt: str, response: str, columns: Mapping[str, object]) -> float:
        length = len(response)
        if length < self._least or length > self._most:
            return -1.0
        over = length - (self._most - self._buffer)
        return -over / self._buffer if over > 0 else 0.0
