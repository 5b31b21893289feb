"""The words of our own are few, in order, and said where they are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_glossary_is_short_and_names_what_is_there() -> None:
    lines = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    rows = [re.split(r" \| ", line.strip("| ")) for line in lines if line.startswith("| ")][2:]
    words = [word for word, _, _ in rows]
    assert len(words) <= 40 and words == sorted(words)
    missing = [where for *_, where in rows if not (ROOT / "hybridrl" / where.strip("`")).exists()]
    assert missing == []
