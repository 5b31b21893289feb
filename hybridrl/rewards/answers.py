"""Rewards that compare a response with the row's "answer" column. Does not import torch.

The options of a reward are its constructor's keyword arguments; functions.py describes how rewards
are called. An answer is a text or a number; if it is a list, each element counts as correct.
`check_row` raises an error for an answer that the reward cannot read, so that the fault is found
before ranks start.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from numbers import Rational, Real
from typing import Any

from hybridrl.errors import DataError, UserError, short

MAX_BOXES, MAX_BOX_CHARS = 5, 2_000
_NUMBER = r"-?(?:\\?\$)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
# An escaped dollar sign, which is a currency symbol and does not delimit a formula.
_MONEY = re.compile(r"(?<!\\)\\\$")
_NO_VALUE = re.compile(r"\\?\$|\\[()\[\]]|[\s{}]")
_COUNTED = re.compile(r"(?<=\d)\s+\([A-Za-z][A-Za-z .,'-]{2,}\)$")
_TEXT = re.compile(r"\\(?:text|mathrm)(?:bf|it|rm|normal)?\{([^{}]*)\}|\\mathbf\{([^{}]*)\}")


class ExactMatch:
    """1 if the answer in the response equals the row's "answer" column, otherwise 0.

    Args:
        extract: Regular expression. The answer is group 1 of the last match in which this group is
            not empty. A response without such a match scores 0. If None, the whole response is the
            answer. Leading and trailing white space is ignored. Raises UserError if there is no
            group.
    """

    def __init__(self, extract: str | None = None) -> None:
        self._pattern = compile_pattern("reward.extract", extract) if extract is not None else None
        if self._pattern is not None and self._pattern.groups < 1:
            raise UserError(
                "reward.extract",
                repr(extract),
                "a regular expression with a group",
                "Put ( ) around the part that is the answer.",
            )

    def __call__(self, prompt: str, response: str, columns: Mapping[str, object]) -> float:
        answer = self.answer(response)
        return float(answer in [text.strip() for text in answers_of(prompt, columns)])

    def check_row(self, prompt: str, columns: Mapping[str, object]) -> None:
        answers_of(prompt, columns)

    def answer(self, response: str) -> str | None:
        if self._pattern is None:
            return response.strip()
        # `([^,]*)$` matches "15,08,85" twice; the last, empty match is not an answer.
        found = [m[1].strip() for m in self._pattern.finditer(response) if m[1]]
        return found[-1] if found else None


class Gsm8k:
    """1 if the number in the response equals the number in "answer" (in GSM8K's form), else 0.

    With method 'strict', it is the number after the last `####`, with 'flexible' the last number.
    """

    def __init__(self, method: str = "strict") -> None:
        if method not in ("strict", "flexible"):
            raise UserError(
                "reward.options.method",
                repr(method),
                "strict or flexible",
                "Set method to strict or flexible.",
            )
        mark = r"####\s*" if method == "strict" else ""
        self._pattern = re.compile(f"{mark}({_NUMBER})")

    def __call__(self, prompt: str, response: str, columns: Mapping[str, object]) -> float:
        return float(self._response_number(response) in self._expected(prompt, columns))

    def check_row(self, prompt: str, columns: Mapping[str, object]) -> None:
        self._expected(prompt, columns)

    def _expected(self, prompt: str, columns: Mapping[str, object]) -> list[Decimal]:
        found = []
        for answer in answers_of(prompt, columns):
            if (number := _number(answer.rpartition("####")[2].strip())) is None:
                raise _answer_error(
                    answer[-40:], "a number, alone or after ####, or a list of them"
                )
            found.append(number)
        return found

    def _response_number(self, response: str) -> Decimal | None:
        found = self._pattern.findall(response)
        return _number(found[-1]) if found else None

    def answer(self, response: str) -> str | None:
        found = self._response_number(response)
        return None if found is None else f"{found.normalize():f}"


class Math:
    """1 if the answer in the response is mathematically equal to the "answer" column, otherwise 0.

    Uses math-verify, which reads LaTeX, numbers and the last `\\boxed{}`. On terms such as 9^9^9,
    math-verify may never finish, so it runs in processes that can be killed.
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
        # math-verify warns that it runs without a time limit, but the process has a time limit.
        logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)
        self._library = math_verify
        self._whole = [math_verify.LatexExtractionConfig()]

    def __call__(self, prompt: str, response: str, columns: Mapping[str, object]) -> float:
        answers, boxed = self._expected(prompt, columns), last_box(response)
        if boxed is not None and plain_math(boxed) in map(plain_math, answers):
            return 1.0  # equal texts are equal answers, even if they are not formulas
        # Disable math-verify's own time limits, which use signals; the process has a time limit.
        found = self._library.parse(_MONEY.sub("", response), parsing_timeout=None)
        return float(
            any(
                self._library.verify(wanted, found, timeout_seconds=None)
                for wanted in map(self._parsed, answers)
            )
        )

    def check_row(self, prompt: str, columns: Mapping[str, object]) -> None:
        """Raises DataError if the row's answer is missing or empty. Parses no formulas."""
        self._expected(prompt, columns)

    def _expected(self, prompt: str, columns: Mapping[str, object]) -> list[str]:
        found = [one.rpartition("####")[2].strip() for one in answers_of(prompt, columns)]
        for answer in found:
            if not _NO_VALUE.sub("", answer):
                raise _answer_error(answer)
        return found

    def _parsed(self, answer: str) -> list[Any]:
        """Parses an answer: the whole text, unless it is a solution with a box."""
        is_solution = "\\boxed" in answer or "\\fbox" in answer
        text = answer if is_solution else f"\\boxed{{{_COUNTED.sub('', answer)}}}"
        found: list[Any] = self._library.parse(text, self._whole, parsing_timeout=None)
        if not found:
            raise _answer_error(answer)
        return found

    def answer(self, response: str) -> str | None:
        """Returns the content of the last box in a response, or else its last number, as text.

        Notations of one value (1/2 and 0.5) differ unless `plain_math` unifies them.
        """
        boxed = last_box(response)
        if boxed is not None:
            return plain_math(boxed)
        found = re.findall(_NUMBER, response)
        return plain_math(found[-1]) if found else None


class Choice:
    """1 if the response chooses the letter in the "answer" column, otherwise 0.

    The first rule that applies determines the choice: the letter in the last `\\boxed{}`; the
    letter after the last "answer" ("Answer: B", "the answer is (B)"); the letter at the start of
    the response, if it stands alone or is followed by punctuation such as . ) or :. Letters are
    capitals A to Z. Lower-case letters count only in a box, after "answer", or as the whole
    response.
    """

    _AFTER = re.compile(
        r"\banswer\b(?:\s+is\b\s*:?|\s*:)\s*[*_(\[\"']{0,4}([A-Za-z])(?![A-Za-z0-9'])",
        re.IGNORECASE,
    )
    _FIRST = re.compile(r"\s*[*_(\[\"']{0,4}([A-Z])(?:[)\].:*_\"']|\s*$)")

    def __call__(self, prompt: str, response: str, columns: Mapping[str, object]) -> float:
        return float(self.answer(response) in self._expected(prompt, columns))

    def check_row(self, prompt: str, columns: Mapping[str, object]) -> None:
        self._expected(prompt, columns)

    def _expected(self, prompt: str, columns: Mapping[str, object]) -> list[str]:
        found = [answer.strip().upper() for answer in answers_of(prompt, columns)]
        for letter in found:
            if len(letter) != 1 or not "A" <= letter <= "Z":
                raise _answer_error(letter, "a letter A to Z, or a list of letters")
        return found

    def answer(self, response: str) -> str | None:
        boxed = _without_text_commands(last_box(response) or "").strip("(). ")
        if len(boxed) == 1 and "A" <= boxed.upper() <= "Z":
            return boxed.upper()
        # A lower-case letter is a choice only if no word follows it ("The answer is a fruit").
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
    """Returns the last `\\boxed{...}` with balanced braces; tries at most MAX_BOXES."""
    at = len(text)
    for _ in range(MAX_BOXES):
        if (at := text.rfind("\\boxed{", 0, at)) < 0:
            return None
        start, depth = at + len("\\boxed{"), 1
        for end in range(start, min(len(text), start + MAX_BOX_CHARS)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end]
    return None


def plain_math(text: str) -> str:
    """Normalizes notation that does not change an answer's value.

    Spaces, dollar signs, `\\left` and `\\right`, `\\text{}`, `\\dfrac` instead of `\\frac`,
    thousands separators, a final period, trailing zeros.
    """
    found = _without_text_commands(text)
    found = re.sub(r"\\(?:(?:left|right|quad)(?![a-z])|[,!;: $])|[\s$]", "", found)
    found = found.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")
    number = _number(found) if re.fullmatch(_NUMBER, found) else None
    return found if number is None else f"{number.normalize():f}"


def answers_of(prompt: str, columns: Mapping[str, object]) -> list[str]:
    """Returns the row's correct answers as texts; DataError unless they are texts or numbers."""
    given: Any = columns.get("answer")
    if given is None:
        present = short(sorted(map(str, columns)), 300)
        got = "null" if "answer" in columns else f"only {present}"
        raise DataError(
            "data.answer_key",
            f"no answer for the prompt {short(prompt, 60)}, {got}",
            "a column with the answer in every row",
            "Set data.answer_key to its name, or remove that row.",
        )
    if getattr(given, "shape", ()):  # an array
        given = given.tolist()
    texts = list(map(_as_text, given if isinstance(given, list | tuple) else [given]))
    found = [text for text in texts if text is not None]
    if not found or len(found) < len(texts):
        raise _answer_error(given, "a text, a number, or a list of these")
    return found


def _as_text(value: object) -> str | None:
    """Converts a text or number to text, others to None; 3.0 (in columns with nulls) becomes 3."""
    if isinstance(value, str | bool | Rational):
        return str(value)
    if isinstance(value, Real) and math.isfinite(value):
        return f"{Decimal(str(value)).normalize():f}"
    return None


def _answer_error(
    answer: object, allowed: str = "a number, formula or text, or a list of these"
) -> DataError:
    return DataError(
        "data.answer_key",
        f"the answer {short(answer)}",
        allowed,
        "Fix or remove that row, or use another reward.",
    )


def _without_text_commands(text: str) -> str:
    return _TEXT.sub(lambda found: found[1] or found[2] or "", text)


def compile_pattern(key: str, text: object) -> re.Pattern[str]:
    """Compiles a regular expression. Raises UserError with `key` if it is invalid."""
    try:
        return re.compile(text)  # type: ignore[call-overload, no-any-return]
    except (re.error, TypeError) as error:
        allowed = "a regular expression"
        raise UserError(key, repr(text), allowed, f"Fix the expression: {error}.") from error


def _number(text: str) -> Decimal | None:
    try:
        found = Decimal(text.replace(",", "").replace("\\$", "").replace("$", ""))
    except InvalidOperation:
        return None
    return found if found.is_finite() else None
