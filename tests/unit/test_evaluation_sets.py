"""Public sets in the form in which they were published, and what scores responses to them.

Rows are a few of each set, as the hub has them, shortened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config.data import DataConfig
from hybridrl.config.evaluation import EvalSetConfig
from hybridrl.data.evaluation_sets import set_rows
from hybridrl.errors import DataError
from hybridrl.rewards.functions import check_rewards, find_reward

# openai/gsm8k, HuggingFaceH4/MATH-500, HuggingFaceH4/aime_2024, Maxwell-Jia/AIME_2024,
# math-ai/aime25, cais/mmlu, TIGER-Lab/MMLU-Pro, allenai/ai2_arc, google/IFEval.
PUBLISHED: dict[str, tuple[str, dict[str, Any], object]] = {
    "gsm8k": (
        "gsm8k",
        {"question": "Janet has 16 eggs ...?", "answer": "16 - 7 = <<16-7=9>>9 eggs.\n#### 18"},
        "16 - 7 = <<16-7=9>>9 eggs.\n#### 18",
    ),
    "math500": (
        "math",
        {
            "problem": "Convert the point $(0,3)$ to polar coordinates.",
            "solution": "We have ...",
            "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
            "subject": "Precalculus",
            "level": 2,
            "unique_id": "test/precalculus/807.json",
        },
        "\\left( 3, \\frac{\\pi}{2} \\right)",
    ),
    "aime_h4": (
        "aime",
        {
            "id": 60,
            "problem": "Every morning Aya ...",
            "solution": "$\\frac{9}{s}$",
            "answer": "204",
        },
        204,
    ),
    "aime_mj": (
        "aime",
        {"ID": "2024-II-4", "Problem": "Let $x,y$ ...", "Solution": "Denote ...", "Answer": 33},
        33,
    ),
    "aime25": ("aime", {"problem": "Find the sum ...", "answer": "070", "id": "0"}, 70),
    "mmlu": (
        "choices",
        {"question": "Find the degree", "subject": "algebra", "choices": list("0462"), "answer": 1},
        "B",
    ),
    "mmlu_pro": (
        "choices",
        {
            "question_id": 70,
            "question": "Typical bodies ...",
            "options": [f"o{i}" for i in range(10)],
            "answer": "I",
            "answer_index": 8,
        },
        "I",
    ),
    "arc": (
        "choices",
        {
            "id": "Mercury_7175875",
            "question": "An astronomer observes ...",
            "choices": {"text": ["a", "b", "c", "d"], "label": ["1", "2", "3", "4"]},
            "answerKey": "3",
        },
        "C",
    ),
    "ifeval": (
        "ifeval",
        {
            "key": 1000,
            "prompt": "Write a summary without commas.",
            "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
            "kwargs": [
                {"num_words": None, "relation": None},
                {"num_words": 3, "relation": "at least"},
            ],
        },
        None,
    ),
}


def rows_of(tmp_path: Path, row: Mapping[str, Any], **knobs: Any) -> list[dict[str, object]]:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    section = EvalSetConfig.model_validate({"path": str(file), **knobs})
    return list(set_rows(section, DataConfig()))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_row_becomes_a_prompt_with_its_answer(tmp_path: Path, name: str) -> None:
    form, row, answer = PUBLISHED[name]
    found = rows_of(tmp_path, row, form=form)
    assert len(found) == 2 and found[0].get("answer") == answer
    prompt = str(found[0]["prompt"])
    question = next(row[k] for k in ("question", "problem", "Problem", "prompt") if k in row)
    assert prompt.startswith(question)
    if form == "choices":
        assert "\nA. " in prompt and "\nC. " in prompt
    if form == "ifeval":
        assert prompt == question and found[0]["kwargs"] == row["kwargs"]
    (one,) = rows_of(tmp_path, row, form=form, limit=1, instruction="Go.")
    assert str(one["prompt"]).endswith("\nGo.")


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("gsm8k", {"problem": "a", "answer": "1"}),
        ("math", {"problem": "", "answer": "1"}),
        ("aime", {"problem": "a", "answer": "one"}),
        ("choices", {"question": "a", "choices": ["x", "y"], "answer": 2}),
        ("choices", {"question": "a", "choices": ["x", "y"], "answer": 40}),
        ("choices", {"question": "a", "choices": ["x", "y"], "answer": None}),
        (
            "choices",
            {"question": "a", "choices": {"text": ["x"], "label": ["A"]}, "answerKey": "B"},
        ),
        ("ifeval", {"prompt": "a", "instruction_id_list": "punctuation:no_comma"}),
        ("prompts", {"body": "a"}),
    ],
)
def test_a_row_of_another_form_is_refused_by_place(tmp_path: Path, form: str, row: Any) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1"):
        rows_of(tmp_path, row, form=form)


def test_the_scorer_of_each_form_tells_right_from_wrong() -> None:
    pytest.importorskip("math_verify")
    cases: dict[str, tuple[object, str, str]] = {
        "gsm8k": ("so\n#### 1,018", "It is 18, no: $1018.00", "#### 18"),
        "math": ("\\frac{1}{2}", "thus \\boxed{0.5}", "thus \\boxed{0.25}"),
        "aime": (70, "the answer is \\boxed{070}", "\\boxed{71}"),
        "choices": ("C", "It may be A. The answer is (C).", "Answer: B"),
    }
    for form, (answer, right, wrong) in cases.items():
        section = EvalSetConfig(form=form, path=("a.jsonl",))  # type: ignore[arg-type]
        assert check_rewards(section.scored_by) == []
        (scorer,) = section.scored_by.scorers().values()
        function = find_reward(scorer)
        assert function("p", right, {"answer": answer}) == 1, form
        assert function("p", wrong, {"answer": answer}) == 0, form
        assert function.answer(right) is not None  # type: ignore[attr-defined]
        assert section.scored_by.on_error == "value"


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("Answer: B", "B"),
        ("the answer is **(D)**.", "D"),
        ("Answer: b", "B"),
        ("A. Paris", "A"),
        ("(C)", "C"),
        ("c", "C"),
        ("B", "B"),
        ("Answer: A\nNo, wait. Answer: J", "J"),
        ("so \\boxed{\\text{(E)}}", "E"),
        ("The answer is a fruit", None),
        ("I think so", None),
        ("A cat sat", None),
        ("", None),
        ("no idea", None),
    ],
)
def test_choice_is_found_by_its_rules(response: str, letter: str | None) -> None:
    from hybridrl.rewards.answers import Choice

    assert Choice().answer(response) == letter


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\boxed{1}{2} \\boxed{ \\dfrac{1}{2} }", "\\frac{1}{2}"),
        ("\\boxed{3} and \\boxed{4", "3"),
        ("12,345.50 at last", "12345.5"),
        ("\\boxed{12\\text{ cm}}", "12cm"),
        ("nothing", None),
    ],
)
def test_votes_of_math_are_plain_texts(text: str, found: str | None) -> None:
    pytest.importorskip("math_verify")
    from hybridrl.rewards.answers import Math

    assert Math().answer(text) == found
