from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from documented import documentation_script


@pytest.fixture(scope="module")
def wording() -> ModuleType:
    return documentation_script("wording")


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("What a sample is.", "noun or a verb"),
        ("Packs samples.\n\nArgs:\n    batch: whose tokens are packed.", "noun phrase"),
        ("Returns the size; None: it is unknown.", "None if"),
        ("Of the ranks, the first sends.", "subject first"),
        ("Mended tensors come anew.", "again"),
    ],
)
def test_faults_name_what_to_write_instead(wording: ModuleType, text: str, advice: str) -> None:
    assert any(advice in told for _, told in wording.faults(text, is_module=True))


def test_plain_sentences_have_no_faults(wording: ModuleType) -> None:
    text = "Packs samples.\n\nArgs:\n    batch: Batch whose tokens are packed. None if empty.\n"
    assert list(wording.faults(text, is_module=True)) == []


def test_passages_have_the_lines_of_docstrings_messages_comments_and_pages(
    wording: ModuleType, tmp_path: Path
) -> None:
    code, page = tmp_path / "code.py", tmp_path / "page.md"
    code.write_text('"""Module."""\n\n# a comment\nraise ValueError("a message of five words")\n')
    page.write_text("one\n```\ncode\n```\ntwo\n")
    assert list(wording.passages(code)) == [
        (1, "Module.", True),
        (4, "a message of five words", False),
        (3, "a comment", False),
    ]
    assert [(line, text) for line, text, _ in wording.passages(page) if text] == [
        (1, "one"),
        (5, "two"),
    ]
