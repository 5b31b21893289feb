"""The all-reduce over a host's GPUs in `hybridrl check`, and which pair it names."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hybridrl.services.cluster_check import environment, gpu_links
from hybridrl.services.cluster_check.gpu_links import Sum, all_reduce, judge


def broken(*faults: set[int]) -> gpu_links.Reduce:
    """Returns an all-reduce that fails wherever all GPUs of one of the sets take part."""

    def reduce(gpus: Sequence[int], limit_s: float) -> Sum:
        is_broken = any(fault <= set(gpus) for fault in faults)
        return Sum(None, f"not finished within {limit_s:g} s") if is_broken else Sum(123.4)

    return reduce


@pytest.mark.parametrize(
    ("count", "faults", "works", "found"),
    [
        (8, [], True, "works over 8 GPUs, 123 GB/s per GPU"),
        (1, [], True, "works on 1 GPU"),
        (1, [{0}], False, "not finished within 60 s"),
        (8, [{2, 5}], False, "GPUs 2 and 5: not finished within 30 s"),
        (2, [{0, 1}], False, "GPUs 0 and 1: not finished within 30 s"),
        (
            5,
            [{1, 2}, {0, 4}],
            False,
            "GPUs 0 and 4: not finished within 30 s; GPUs 1 and 2: not finished within 30 s",
        ),
        (
            4,
            [{3, gpu} for gpu in range(3)],
            False,
            "GPU 3 with each of the others: not finished within 30 s",
        ),
        (3, [{0, 1, 2}], False, "not finished within 60 s; each pair works"),
    ],
)
def test_the_gpus_that_fail_are_named(
    count: int, faults: list[set[int]], works: bool, found: str
) -> None:
    assert judge(count, broken(*faults)) == (works, found)


def test_check_reports_the_failing_pair_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_links, "judge", lambda count: judge(count, broken({0, 3})))
    item = environment._gpu_sum(4)
    assert (item.name, item.status) == ("all-reduce", "problem")
    assert item.found == "GPUs 0 and 3: not finished within 30 s"
    assert "python -m hybridrl.services.cluster_check.gpu_links 0,1,2,3" in item.fix


@pytest.mark.full
def test_processes_sum_up_within_their_time() -> None:
    found = all_reduce([0, 1], 60, "cpu")
    assert found.fault == "" and found.gb_per_s is not None and found.gb_per_s > 0
    assert all_reduce([0, 1], 0.05, "cpu").fault == "not finished within 0.05 s on GPU 0, 1"


def test_the_gpu_whose_process_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_links.sys, "executable", "/bin/false")
    assert all_reduce([4, 6], 60).fault == "GPU 4: exit code 1"
