"""Planted faults fit the sources, and the tests that should find them are there.

What finds them is tests/mutants/run.py's to say, which runs the suite once for each.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from mutants.run import (
    INTERRUPTED,
    NOTHING_SELECTED,
    ROOT,
    SOME_FAILED,
    Mutant,
    chosen,
    judged,
    mutated,
    read_mutants,
)

MUTANTS = read_mutants()
LEAST = 80


def test_there_are_enough_faults_and_each_has_a_name_of_its_own() -> None:
    names = Counter(mutant.name for mutant in MUTANTS)
    assert len(names) == len(MUTANTS) >= LEAST, names.most_common(1)
    assert not set(names) & {mutant.area for mutant in MUTANTS}  # the runner takes either
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in names)


def meaning(text: str, comment: str) -> str:
    """Returns a text without comments and layout: a change of these alone would be no fault."""
    return "".join(re.sub(rf"{comment}[^\n]*", "", text).split())


def fault_of(mutant: Mutant) -> str:
    """Returns what is wrong with an entry: whether it can be planted, and who should find it."""
    is_python = mutant.file.endswith(".py")
    comment = "#" if is_python else "//"
    try:
        source = mutated(mutant, (ROOT / mutant.file).read_text(encoding="utf-8"))
        if meaning(mutant.old, comment) == meaning(mutant.new, comment):
            return "changes nothing"
        if is_python:
            ast.parse(source)
    except (ValueError, SyntaxError) as error:
        return str(error)
    if not re.fullmatch(r"[A-Za-z].* .*\.", mutant.breaks):
        return "what it breaks is not a sentence"
    for test in mutant.found_by:
        path, _, function = test.partition("::")
        name = function.partition("[")[0]
        if not (ROOT / path).is_file() or not Path(path).name.startswith("test_"):
            return f"{path} is no file of tests"
        if name and f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8"):
            return f"{path} has no {name}"
    return "" if mutant.found_by else "no test should find it"


def test_each_fault_can_be_planted_and_the_tests_that_should_find_it_exist() -> None:
    wrong = {mutant.name: fault_of(mutant) for mutant in MUTANTS}
    assert {name: why for name, why in wrong.items() if why} == {}
    assert {mutant.file.split("/")[0] for mutant in MUTANTS} <= {"hybridrl", "kernels", "csrc"}


def test_names_and_areas_choose_faults() -> None:
    first = MUTANTS[0]
    assert chosen(MUTANTS, [first.name]) == [first]
    assert chosen(MUTANTS, [first.area]) == [one for one in MUTANTS if one.area == first.area]
    assert chosen(MUTANTS, []) == MUTANTS
    with pytest.raises(SystemExit, match="called nothing-like-it"):
        chosen(MUTANTS, ["nothing-like-it"])


def test_a_text_that_moved_is_told() -> None:
    with pytest.raises(ValueError, match="occurs 0 times in"):
        mutated(MUTANTS[0], "")


def test_how_pytest_ended_says_whether_a_fault_was_found() -> None:
    output = "F\nFAILED tests/unit/test_a.py::test_b - assert 1\n"
    assert judged(SOME_FAILED, output) == (True, "tests/unit/test_a.py::test_b")
    assert judged(INTERRUPTED, "ERROR tests/unit/test_a.py - x") == (True, "tests/unit/test_a.py")
    assert judged(None, "") == (True, "the time limit")
    assert judged(-11, "")[0]
    assert not judged(0, "")[0]
    # Only tests of another suite: they do not count.
    assert judged(NOTHING_SELECTED, "") == (False, "no selected test")
    with pytest.raises(RuntimeError, match="pytest ended with 4"):
        judged(4, "file not found")
