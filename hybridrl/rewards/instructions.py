"""Checks whether a response follows verifiable instructions from IFEval (Zhou et al. 2023, arXiv
2311.07911, appendix). Does not import torch.

A row contains `instruction_id_list` (names from the table CHECKS) and `kwargs` (their arguments in
the same order, null to ignore). Differences from the published checks: a sentence ends at . ! or ?
before white space or the end of the text, instead of by a trained splitter; `change_case` checks
only the letters; `language:response_language` needs the package langdetect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from hybridrl.contracts.prompts import Asked
from hybridrl.errors import DataError, UserError, short

_DASHES = re.compile(r"\s?\*\*\*\s?")
_BULLET = re.compile(r"^\s*(?:\*(?!\*)|-)\s*\S", re.MULTILINE)
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?:\s+|$)")
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


class Instructions:
    """Share of a row's instructions that a response follows (`partial`), or 1 if all, else 0."""

    runs = "process"  # regular expressions may take exponential time on some responses

    def __init__(self, partial: bool = False) -> None:
        self._partial = partial

    def __call__(self, prompt: Asked, response: str, columns: Mapping[str, object]) -> float:
        """Returns a score from 0 to 1. Raises DataError for unknown instructions or arguments."""
        asked = instructions_of(columns)
        followed = [response.strip() != "" and follows(*one, prompt, response) for one in asked]
        return sum(followed) / len(asked) if self._partial else float(all(followed))

    def check_row(self, prompt: str, columns: Mapping[str, object]) -> None:
        instructions_of(columns)


def instructions_of(columns: Mapping[str, object]) -> list[tuple[str, dict[str, Any]]]:
    """Returns a row's instructions with their arguments. Raises DataError if they are invalid."""
    names, given = columns.get("instruction_id_list"), columns.get("kwargs")
    if given is None and isinstance(names, list):
        given = [{} for _ in names]
    is_whole = isinstance(names, list) and isinstance(given, list) and len(names) == len(given)
    has_arguments = isinstance(given, list) and all(isinstance(one, dict) for one in given)
    if not is_whole or not names or not has_arguments:
        got = short({"instruction_id_list": names, "kwargs": given}, 200)
        allowed = "two lists of equal length, one with names and one with their arguments"
        raise DataError("instruction_id_list", got, allowed, "Fix that row.")
    assert isinstance(names, list) and isinstance(given, list)
    found = []
    for name, arguments in zip(names, given, strict=True):
        if name not in CHECKS:
            raise DataError("instruction_id_list", short(name), ", ".join(CHECKS), "Fix that row.")
        found.append((str(name), {k: v for k, v in arguments.items() if v is not None}))
    return found


def follows(name: str, arguments: Mapping[str, Any], prompt: Asked, response: str) -> bool:
    """Whether a response follows one instruction. Raises DataError for wrong arguments."""
    given = dict(arguments)
    if name == "combination:repeat_prompt":
        given.setdefault("prompt_to_repeat", _prompt_text(prompt))
    try:
        return bool(CHECKS[name](response, **given))
    except (TypeError, ValueError, AttributeError) as error:
        reason = str(error).replace("<lambda>", name)
        got, allowed = f"{short(dict(arguments), 120)} ({reason})", f"the arguments of {name}"
        raise DataError("kwargs", got, allowed, "Fix that row.") from error


def _compare(count: int, relation: str, number: int) -> bool:
    if relation not in ("at least", "less than"):
        raise ValueError(f"relation is {relation!r}, not 'at least' or 'less than'")
    return count >= int(number) if relation == "at least" else count < int(number)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _occurrences(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _language(text: str, language: str) -> bool:
    try:
        import langdetect
    except ImportError as error:
        raise UserError(  # not a fault of the row, so reward.on_error must not apply
            "instruction_id_list",
            "language:response_language",
            "this instruction only if the package langdetect is installed",
            "Run: pip install langdetect, or remove such rows.",
        ) from error
    langdetect.DetectorFactory.seed = 0
    try:
        return str(langdetect.detect(text)) == language
    except langdetect.LangDetectException:  # no words in the text; the published check passes it
        return True


def _sentences(text: str, num_sentences: int, relation: str) -> bool:
    parts = [part for part in _SENTENCE_END.split(text) if part.strip()]
    return _compare(len(parts), relation, num_sentences)


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = _DASHES.split(text)
    inner = [part for part in parts[1:-1] if part.strip()]
    ends = [part for part in (parts[0], parts[-1])[: len(parts)] if part.strip()]
    is_whole = len(inner) == max(len(parts) - 2, 0)
    return is_whole and len(inner) + len(ends) == int(num_paragraphs)


def _nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = [part.strip() for part in re.split(r"\n\n+", text) if part.strip()]
    if len(parts) != int(num_paragraphs) or not 1 <= int(nth_paragraph) <= len(parts):
        return False
    first = parts[int(nth_paragraph) - 1].split()[0].lstrip("'\"")
    word = re.match(r"[^.,?!'\"]*", first)
    return word is not None and word[0].lower() == first_word.lower()


def _postscript(text: str, postscript_marker: str) -> bool:
    letters = [re.escape(one) for one in postscript_marker.lower() if one not in ". "]
    pattern = rf"(?m)^\s*{r'[.]?[ ]?'.join(letters)}[.:]?"
    return re.search(pattern, text.lower()) is not None


def _highlights(text: str, num_highlights: int) -> bool:
    double = re.findall(r"\*\*([^\n*]+)\*\*", text)
    single = re.findall(r"\*([^\n*]+)\*", re.sub(r"\*\*[^\n*]+\*\*", "", text))
    return sum(1 for one in (*double, *single) if one.strip()) >= int(num_highlights)


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    found = re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)
    return len(found) >= int(num_sections)


def _json(text: str) -> bool:
    inner = text.strip()
    for mark in ("```json", "```Json", "```JSON", "```"):
        inner = inner.removeprefix(mark)
    try:
        json.loads(inner.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str) -> bool:
    parts = text.split("******")
    whole = [part.strip() for i, part in enumerate(parts) if part.strip() or 0 < i < len(parts) - 1]
    return len(whole) == 2 and all(whole) and whole[0] != whole[1]


def _prompt_text(prompt: Asked) -> str:
    if isinstance(prompt, str):
        return prompt
    contents = [message["content"] for message in prompt if message["role"] == "user"]
    last = contents[-1] if contents else ""
    if isinstance(last, list):  # with images
        return "".join(part["text"] for part in last if part.get("type") == "text").strip()
    return str(last)


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    count = sum(1 for word in _words(text) if word.isupper())
    return _compare(count, capital_relation, capital_frequency)


def _quoted(text: str) -> bool:
    inner = text.strip()
    return len(inner) > 1 and inner[0] == inner[-1] == '"'


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(
        word.lower() in text.lower() for word in keywords
    ),
    "keywords:frequency": lambda text, keyword, frequency, relation: _compare(
        text.lower().count(keyword.lower()), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(_occurrences(text, word) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _compare(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "language:response_language": _language,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda text, num_words, relation: _compare(
        len(_words(text)), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[[^\[\]]*\]", text)) >= int(num_placeholders)
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        len(_BULLET.findall(text)) == int(num_bullets)
    ),
    "detectable_format:constrained_response": lambda text: any(
        answer in text for answer in _ANSWERS
    ),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda text: any(
        one.strip("<> ") for one in re.findall(r"<<[^\n]+>>", text)
    ),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "punctuation:no_comma": lambda text: "," not in text,
}
