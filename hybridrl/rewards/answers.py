"""Rewards that compare a response with the row's "answer" column. No torch.

Each is made with its options as keyword arguments and called as functions.py says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation

from hybridrl.errors import DataError, UserError, short

_NUMBER = r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"


class ExactMatch:
    """1 if the answer found in the response is the row's "answer" column, else 0.

    Args:
        extract: a regular expression; group 1 of its last match (that is not empty) is the
            answer, no match scores 0. None takes the whole response. White space at both ends
            does not count.

    Raises:
        UserError: `extract` is not a regular expression with a group.
    """

    def __init__(self, extract: str | None = None) -> None:
        self._pattern = pattern("reward.extract", extract) if extract is not None else None
        if self._pattern is not None and self._pattern.groups < 1:
            raise _no_group(extract)

    def __call__(self, prompt: str, response: str, columns: Mapping[str, object]) -> float:
        """Returns 1.0 or 0.0."""
        wanted = answer_of(prompt, columns).strip()
        answer = self._extracted(response)
        return float(answer is not None and answer == wanted)

    def _extracted(self, response: str) -> str | None:
        if self._pattern is None:
            return response.strip()
        # `([^,]*)$` matches "15,08,85" twice, at last with nothing: such a match is no answer.
        found = [m[1].strip() for m in self._pattern.finditer(response) if m[1]]
        return found[-1] if found else None


class Gsm8k:
    """1 if the response's number is that of the "answer" column in GSM8K's published form, else 0.

    Args:
        method: 'strict' takes the number after the last `####`; 'flexible' the last number.

    Raises:
        UserError: there is no such method.
    """

    def __init__(self, method: str = "strict") -> None:
        if method not in ("strict", "flexible"):
            raise UserError(
                "reward.options.method", repr(method), "strict or flexible", "Set one of the two."
            )
        mark = r"####\s*" if method == "strict" else ""
        self._pattern = re.compile(f"{mark}({_NUMBER})")

    def __call__(self, prompt: str, response: str, columns: Mapping[str, object]) -> float:
        """Returns 1.0 or 0.0."""
        answer = answer_of(prompt, columns)
        wanted = _number(answer.rpartition("####")[2].strip())
        if wanted is None:
            raise DataError(
                "data.answer_key",
                short(answer[-40:]),
                "a number, alone or after ####",
                "Mend that row, or use another reward.",
            )
        found = self._pattern.findall(response)
        return float(bool(found) and _number(found[-1]) == wanted)


class Math:
    """1 if the response's answer is mathematically equal to the "answer" column, else 0.

    By math-verify, which reads LaTeX, numbers and the last `\\boxed{}`. It may take for ever on
    terms such as 9^9^9, so it runs in processes that are killed.
    """

    runs = "process"
    memory_bytes = 4 << 30

    def __init__(self) -> None:
        try:
            import math_verify
        except ImportError as error:
            allowed = "math, with the package math-verify"
            raise UserError(
                "reward.function", "math", allowed, f"Run: pip install 'hybridrl[math]' ({error})"
            ) from error
        self._library = math_verify

    def __call__(self, prompt: str, response: str, columns: Mapping[str, object]) -> float:
        """Returns 1.0 or 0.0."""
        answer = answer_of(prompt, columns).rpartition("####")[2].strip()
        marked = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
        # Its own limits are signals; that of the process is enough.
        wanted = self._library.parse(marked, parsing_timeout=None)
        if not wanted:
            raise DataError(
                "data.answer_key", short(answer[:60]), "a number or formula", "Mend that row."
            )
        found = self._library.parse(response, parsing_timeout=None)
        return float(self._library.verify(wanted, found, timeout_seconds=None))


def answer_of(prompt: str, columns: Mapping[str, object]) -> str:
    """Returns the row's answer as text.

    Raises:
        DataError: it has none.
    """
    if "answer" not in columns:
        present = short(sorted(map(str, columns)), 300)
        raise DataError(
            "data.answer_key",
            f"no answer for the prompt {prompt[:40]!r}, only {present}",
            "a column with the answer in every row",
            "Set data.answer_key to its name.",
        )
    return str(columns["answer"])


def pattern(key: str, text: object) -> re.Pattern[str]:
    """Returns the compiled expression, or raises UserError naming `key`."""
    try:
        return re.compile(text)  # type: ignore[call-overload, no-any-return]
    except (re.error, TypeError) as error:
        allowed = "a regular expression"
        raise UserError(key, repr(text), allowed, f"Mend it: {error}.") from error


def _no_group(extract: str | None) -> UserError:
    return UserError(
        "reward.extract",
        repr(extract),
        "a regular expression with a group",
        "Put ( ) around the part that is the answer.",
    )


def _number(text: str) -> Decimal | None:
    try:
        found = Decimal(text.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None
    return found if found.is_finite() else None
