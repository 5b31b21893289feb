"""The rewards that compare with an answer, and those of form."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hybridrl.config.schema import ScorerConfig
from hybridrl.errors import UserError
from hybridrl.rewards.functions import find_reward

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


def reward(function: str, **options: object):
    return find_reward(ScorerConfig(function=function, options=options))


@pytest.mark.parametrize(
    ("response", "answer", "strict", "flexible"),
    [
        ("so 72.\n#### 72", "48+24 = <<48+24=72>>72\n#### 72", 1, 1),
        ("#### 1,234", "#### 1234", 1, 1),
        ("#### $18.00", "#### 18", 1, 1),
        ("####18", "18", 1, 1),
        ("The answer is 18.", "#### 18", 0, 1),
        ("#### 18 of 20", "#### 18", 1, 0),
        ("#### 17\n#### 18", "#### 18", 1, 1),
        ("#### 18\n#### 17", "#### 18", 0, 0),
        ("#### -5", "#### 5", 0, 0),
        ("#### -5", "#### -5", 1, 1),
        ("#### .5", "#### 0.5", 1, 1),
        ("no number", "#### 5", 0, 0),
        ("", "#### 5", 0, 0),
        ("#### five", "#### 5", 0, 0),
    ],
)
def test_gsm8k_takes_the_marked_or_the_last_number(response, answer, strict, flexible):
    assert reward("gsm8k")("", response, {"answer": answer}) == strict
    assert reward("gsm8k", method="flexible")("", response, {"answer": answer}) == flexible


@pytest.mark.skipif(not GSM8K.is_dir(), reason="no GSM8K beside this checkout")
@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_every_published_gsm8k_solution_has_the_full_reward(method):
    scored = reward("gsm8k", method=method)
    rows = [json.loads(line) for file in GSM8K.glob("*.jsonl") for line in file.open()]
    assert len(rows) == 7473 + 1319
    assert all(scored(r["question"], r["answer"], r) == 1.0 for r in rows)
    wrong = [scored(a["question"], a["answer"] + "1", b) for a, b in zip(rows, rows, strict=True)]
    assert sum(wrong) == 0


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("It is \\boxed{\\frac{1}{2}}.", "0.5", 1),
        ("It is $\\frac{2}{4}$.", "\\frac{1}{2}", 1),
        ("\\boxed{x^2 + 2x + 1}", "$(x+1)^2$", 1),
        ("\\boxed{{1, 2}}", "{2, 1}", 1),
        ("\\boxed{3}", "4", 0),
        ("no answer here", "4", 0),
        ("The sum is 72", "48+24 = <<48+24=72>>72\n#### 72", 1),
    ],
)
def test_math_compares_values_not_texts(response, answer, expected):
    assert reward("math")("", response, {"answer": answer}) == expected


# Answers as MATH-500, GSM8K, NuminaMath, AIME, OlympiadBench and the gaokao sets have them, with
# responses that are right and wrong.
PUBLISHED = [
    (r"\$18.90", [r"\boxed{\$18.90}", r"\boxed{18.9}", r"It costs \$18.90."], [r"\boxed{18}"]),
    (r"\$32,\!348", [r"\boxed{\$32,348}", r"$\$32348$"], [r"\boxed{348}", r"\boxed{32}"]),
    (r"\$5 \text{ dollars}", [r"\boxed{5}", r"\boxed{5 \text{ dollars}}"], [r"\boxed{6}"]),
    (r"10\%", [r"\boxed{10\%}"], [r"\boxed{11\%}"]),
    (r"\text{(C)}", [r"\boxed{C}", r"\boxed{\text{(C)}}"], [r"\boxed{B}"]),
    (r"\text{Evelyn}", [r"\boxed{\text{Evelyn}}", r"\boxed{Evelyn}"], [r"\boxed{Angela}"]),
    (r"90^\circ", [r"\boxed{90^\circ}", r"\boxed{90}"], [r"\boxed{9}"]),
    (r"13 \text{ cm}^2", [r"\boxed{13}", r"\boxed{13\text{ cm}^2}"], [r"\boxed{3}"]),
    (r"(3, \frac{\pi}{2})", [r"\boxed{\left(3,\tfrac{\pi}{2}\right)}"], [r"\boxed{(3, \pi)}"]),
    (r"[-2,7)", [r"\boxed{[-2, 7)}"], [r"\boxed{[-2,7]}", r"\boxed{(-2,7)}"]),
    (
        r"(-\infty, 2) \cup (3, \infty)",
        [r"\boxed{(-\infty,2)\cup(3,\infty)}"],
        [r"\boxed{(3,\infty)}"],
    ),
    (
        r"$\frac{5}{4}$;$\frac{37}{28}$",
        [r"\boxed{\frac54, \frac{37}{28}}"],
        [r"\boxed{\frac{37}{28}}"],
    ),
    ("15 and $22.5 \\mathrm{~min}$", [r"\boxed{15, 22.5}"], [r"\boxed{22.5}"]),
    (r"$\{x|-2\leq x < 1\}$", [r"\boxed{\{x|-2\leq x < 1\}}"], [r"\boxed{1}", r"so x is 1"]),
    (r"11,\!111,\!111,\!100", [r"\boxed{11111111100}"], [r"\boxed{100}"]),
    (r"1\frac{4}{5}", [r"\boxed{\frac95}"], [r"\boxed{\frac45}"]),
    (r"3 \pm 2 \sqrt{2}", [r"\boxed{3 - 2\sqrt2, 3 + 2\sqrt2}"], [r"\boxed{3 + 2\sqrt2}"]),
    ("025", [r"\boxed{25}", r"\boxed{025}"], [r"\boxed{5}"]),
    (25, [r"\boxed{25}"], [r"\boxed{5}"]),
    (25.0, [r"\boxed{25}"], [r"\boxed{2.5}"]),
    (0.00001, [r"\boxed{0.00001}", r"\boxed{10^{-5}}"], [r"\boxed{e - 5}"]),
    ("51 (trucks)", [r"\boxed{51}", r"\boxed{51 (trucks)}"], [r"\boxed{5}"]),
    (["2", r"\frac12"], [r"\boxed{2}", r"\boxed{0.5}"], [r"\boxed{3}"]),
    (r"We add. $\boxed{\$36}$", [r"\boxed{36}"], [r"\boxed{3}"]),
]


@pytest.mark.parametrize(("answer", "right", "wrong"), PUBLISHED, ids=lambda one: repr(one)[:24])
def test_math_reads_answers_as_they_are_published(answer, right, wrong):
    math = reward("math")
    math.check_row("", {"answer": answer})
    found = [math("", response, {"answer": answer}) for response in (*right, *wrong)]
    assert found == [1.0] * len(right) + [0.0] * len(wrong)


def test_regex_matches_a_part_or_the_whole():
    assert reward("regex", pattern=r"\d+")("", "a 1", {}) == 1
    assert reward("regex", pattern=r"\d+", whole=True)("", "a 1", {}) == 0
    assert reward("regex", pattern=r"\d+", whole=True)("", " 12\n", {}) == 1
    assert reward("regex", pattern="x", match=0.5, no_match=-2)("", "y", {}) == -2
    with pytest.raises(UserError, match=r"reward\.options\.pattern.*a regular expression"):
        reward("regex", pattern="(")


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a</think> <answer>b</answer>\n", 1),
        ("<think>a</think>", 0.5),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think><answer>b</answer> more", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("</think>a<think><answer>b</answer>", 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0),
        ("plain", 0),
    ],
)
def test_format_wants_each_tag_once_and_in_order(response, expected):
    assert reward("format")("", response, {}) == expected


def test_length_falls_linearly_over_the_buffer():
    scored = reward("length", max_chars=10, buffer_chars=4, min_chars=2)
    found = [scored("", "x" * n, {}) for n in (1, 2, 6, 7, 8, 10, 11)]
    assert found == [-1, 0, 0, -0.25, -0.5, -1, -1]
    with pytest.raises(UserError, match=r"0 to max_chars \(3\)"):
        reward("length", max_chars=3, buffer_chars=4)


@pytest.mark.parametrize("function", ["exact_match", "gsm8k", "math", "choice"])
def test_any_answer_of_a_list_is_right(function):
    right, other, wrong = (
        ("B", "A", "C") if function == "choice" else ("#### 5", "#### 7", "#### 8")
    )
    answers = {"answer": [right, other]}
    scores = [reward(function)("", response, answers) for response in (right, other, wrong)]
    assert scores == [1, 1, 0]


def test_numbers_of_columns_compare_as_integers_where_they_are():
    for answer in (5, 5.0, np.float64(5), np.float32(5), np.int64(5), np.array([7.0, 5.0])):
        assert reward("exact_match")("", "5", {"answer": answer}) == 1
        assert reward("gsm8k")("", "#### 5", {"answer": answer}) == 1
    assert reward("exact_match")("", "0.25", {"answer": 0.25}) == 1
    assert reward("exact_match")("", "1" + "0" * 22, {"answer": 1e22}) == 1
