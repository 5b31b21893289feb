"""Rewards that compare a response with the row's "answer" column. No torch.

Each is made with its options as keyword arguments and called as functions.py says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation

from hybridrl.errors import DataError, UserError, short

MOST_BOXES, MOST_BOX_CHARS = 5, 2_000
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
        answer = self.answer(response)
        return float(answer is not None and answer == wanted)

    def answer(self, response: str) -> str | None:
        """Returns the answer in a response, if there is one."""
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
        return float(self._found(response) == wanted)

    def _found(self, response: str) -> Decimal | None:
        found = self._pattern.findall(response)
        return _number(found[-1]) if found else None

    def answer(self, response: str) -> str | None:
        """Returns the number in a response, if there is one."""
        found = self._found(response)
        return None if found is None else f"{found.normalize():f}"


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

    def answer(self, response: str) -> str | None:
        """Returns what the last box of a response holds, or its last number, as text. Of two ways
        to write a value (1/2 and 0.5) each is an answer of its own, but for those of `plain_math`.
        """
        boxed = last_box(response)
        if boxed is not None:
            return plain_math(boxed)
        found = re.findall(_NUMBER, response)
        return plain_math(found[-1]) if found else None


class Choice:
    """1 if the response chooses the letter in the "answer" column, else 0.

    The choice of a response is, by the first of these rules that finds one: the letter in its last
    `\\boxed{}`; the letter after its last "answer" ("Answer: B", "the answer is (B)"); the letter
    that it begins with, alone or before one of . ) : and a space. Letters are A to Z as capitals;
    after "answer" and alone in a response also small ones.
    """

    _AFTER = re.compile(
        r"\banswer\b(?:\s+is\b\s*:?|\s*:)\s*[*_(\[\"']{0,4}([A-Za-z])(?![A-Za-z0-9'])",
        re.IGNORECASE,
    )
    _FIRST = re.compile(r"\s*[*_(\[\"']{0,4}([A-Z])(?:[)\].:*_\"']|\s*$)")

    def __call__(self, prompt: str, response: str, columns: Mapping[str, object]) -> float:
        """Returns 1.0 or 0.0."""
        wanted = answer_of(prompt, columns).strip().upper()
        if len(wanted) != 1 or not "A" <= wanted <= "Z":
            raise DataError("data.answer_key", short(wanted), "a letter", "Mend that row.")
        return float(self.answer(response) == wanted)

    def answer(self, response: str) -> str | None:
        """Returns the letter that a response chooses, if it chooses one."""
        boxed = (last_box(response) or "").strip()
        boxed = boxed.removeprefix("\\text{").removesuffix("}").strip("() ")
        if len(boxed) == 1 and "A" <= boxed.upper() <= "Z":
            return boxed.upper()
        # "The answer is a fruit": a small letter is a choice only where nothing else follows it.
        for found in reversed(list(self._AFTER.finditer(response))):
            rest = response[found.end() : found.end() + 2].strip("*_)]\"' ")
            if found[1].isupper() or not rest or rest[0] in ".,;\n":
                return found[1].upper()
        alone = response.strip().strip("()*.")
        first = self._FIRST.match(response)
        if first is not None or (len(alone) == 1 and "a" <= alone <= "z"):
            return first[1] if first is not None else alone.upper()
        return None


def last_box(text: str) -> str | None:
    """Returns what the last `\\boxed{...}` holds that is closed within MOST_BOX_CHARS, with braces
    balanced; of a text of many only the last few are looked at.
    """
    at = len(text)
    for _ in range(MOST_BOXES):
        if (at := text.rfind("\\boxed{", 0, at)) < 0:
            return None
        start, depth = at + len("\\boxed{"), 1
        for end in range(start, min(len(text), start + MOST_BOX_CHARS)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end]
    return None


def plain_math(text: str) -> str:
    """Returns an answer without what changes no value: spaces, dollar signs, `\\left` and
    `\\right`, `\\text{}`, `\\dfrac` for `\\frac`, commas between thousands, a point at the end,
    zeros after the decimal point.
    """
    found = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    found = re.sub(r"\\(?:left|right|,|!|;|quad)|[\s$]", "", found)
    found = found.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")
    number = _number(found) if re.fullmatch(_NUMBER, found) else None
    return found if number is None else f"{number.normalize():f}"


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
