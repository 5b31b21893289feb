"""Every instruction of IFEval has a response that follows it and one that does not."""

from __future__ import annotations

from typing import Any

import pytest

from hybridrl.errors import DataError
from hybridrl.rewards.instructions import CHECKS, Instructions, follows

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["Ab", "c"]}, "ab C", "ab"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "A a", "a"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "less than"}, "a", "a a"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "category", "a Cat."),
    (
        "keywords:letter_frequency",
        {"letter": "q", "let_frequency": 2, "let_relation": "at least"},
        "Qq",
        "q",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        'One. "Two!" Three?',
        "Only 3.5 of it.",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a *** b ***", "a *** *** b"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "a b c", "a b"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "president"},
        "x\n\n'President, he",
        "President\n\nx",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\nP.S. y", "x P.S y"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "x\np.p.s: y", "x\nP.S. y"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n**b** c"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* **b**", "*a* b"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section 1",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<song of joy>>", "<< >>"),
    ("combination:two_responses", {}, "a ****** b", "a ****** a"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Do it"}, "do it: done", "done"),
    ("startend:end_checker", {"end_phrase": "the end."}, 'This is "The end."', "The end. No."),
    ("startend:quotation", {}, '"a b"', '"a" b'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        "ONE two",
        "ONE TWO",
    ),
    ("change_case:english_capital", {}, "ALL 3.", "All"),
    ("change_case:english_lowercase", {}, "all 3.", "All"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
]


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), CASES)
def test_a_check_tells_what_follows_from_what_does_not(
    name: str, arguments: dict[str, Any], right: str, wrong: str
) -> None:
    assert follows(name, arguments, "Do it", right)
    assert not follows(name, arguments, "Do it", wrong)


def test_every_check_has_a_case() -> None:
    # Languages need a package that is not installed with hybridrl.
    assert {name for name, *_ in CASES} == set(CHECKS) - {"language:response_language"}
    assert len(CHECKS) == 25  # as many as were published


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []},
        {"instruction_id_list": [], "kwargs": []},
        {"instruction_id_list": ["punctuation:none"], "kwargs": [{}]},
        {"instruction_id_list": ["keywords:existence"], "kwargs": [{"words": ["a"]}]},
        {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": [1]}]},
        {
            "instruction_id_list": ["length_constraints:number_words"],
            "kwargs": [{"num_words": 3, "relation": "about"}],
        },
    ],
)
def test_rows_that_cannot_be_checked_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        Instructions()("p", "a b", row)
