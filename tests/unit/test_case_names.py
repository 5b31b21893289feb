"""What the names of benchmarks' cases say."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("name", "ranks", "rollout", "placement"),
    [
        ("7b/tp2dp2/tp2", 4, {"tp": 2}, {}),
        ("7b/tp2/apart-tp1", 3, {"tp": 1}, {"policy": "0-1", "rollout": "2-2"}),
        ("7b/tp2/apart-dp2tp1", 4, {"tp": 1}, {"policy": "0-1", "rollout": "2-3"}),
    ],
)
def test_a_name_says_which_ranks_train_and_which_generate(
    name: str,
    ranks: int,
    rollout: dict[str, int],
    placement: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from case_name import parse_case

    found = parse_case(name, BENCHMARKS / "models", "7b/tp2/tp1")
    assert (found.num_ranks, found.rollout, found.placement) == (ranks, rollout, placement)
