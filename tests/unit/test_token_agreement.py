"""Ranks of a replica tell each other what they drew: through memory, or by messages.

The ranks are threads here, and what carries their numbers is the real thing.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from thread_ranks import ThreadRank, on_ranks

from hybridrl.rollout.common import agreement
from hybridrl.rollout.common.agreement import TokenAgreement, TokensDifferError


def on_threads(size: int, run: Callable[[int, Any], Any], timeout_s: float = 20.0) -> list[Any]:
    """Returns what each rank's thread returned, or the error that it raised."""

    def one(rank: ThreadRank) -> Any:
        members: Any = rank
        sums = agreement._SharedSums(members, range(10, 10 + size), timeout_s)
        try:
            return run(rank.rank, sums)
        except RuntimeError as error:
            return error

    return on_ranks(size, one)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_no_rank_gets_another_steps_number_however_ranks_hurry(steps_ahead: int) -> None:
    def run(rank: int, sums: Any) -> int:
        draw, one = random.Random(rank), TokenAgreement([10, 11, 12], sums, steps_ahead)
        for step in range(600):
            one.settle()
            if draw.random() < 0.05:
                time.sleep(draw.random() * 0.004)
            one.report(["0", "7"], [step, 3 * step])
        one.settle(is_last=True)
        return one._step

    assert on_threads(3, run) == [600] * 3


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_all_ranks_hear_of_one_that_draws_otherwise(steps_ahead: int) -> None:
    begun = [0, 0, 0]

    def run(rank: int, sums: Any) -> None:
        one = TokenAgreement([10, 11, 12], sums, steps_ahead)
        for step in range(8):
            one.settle()
            begun[rank] = step + 1
            one.report(["4"], [5 if step < 4 or rank != 1 else 6])
        one.settle(is_last=True)

    for error in on_threads(3, run):
        assert isinstance(error, TokensDifferError)
        assert "in engine step 5 ranks [11] drew other tokens than rank 10" in str(error)
    assert begun == [5 + steps_ahead] * 3  # so many steps later all know it


def test_a_sum_stays_until_the_slowest_peer_has_read_it() -> None:
    # With a step ahead a rank writes a step's sum once its peers have settled four steps before.
    def run(rank: int, sums: Any) -> list[list[int]]:
        for step in range(1, 5):
            sums.publish(step, 10 * step + rank)
        return [sums.wait(step) for step in range(1, 5)]

    expected = [[10 * step, 10 * step + 1] for step in range(1, 5)]
    assert on_threads(2, run, timeout_s=1.0) == [expected, expected]


def test_a_replica_that_differs_waits_for_nobody_any_more() -> None:
    def run(rank: int, sums: Any) -> bool:
        one = TokenAgreement([10, 11], sums, steps_ahead=1)
        one.report(["4"], [5 + rank])
        if rank == 0:
            one.report(["4"], [5])  # its peer is done, and takes no further step
        for is_last in (True, False, False):
            with pytest.raises(TokensDifferError, match="in engine step 1"):
                one.settle(is_last)
        one.report(["4"], [5])
        one.settle(is_last=True)  # as for requests that are dropped
        return True

    assert on_threads(2, run) == [True, True]


def test_a_rank_that_is_done_waits_for_its_peers_last_tokens() -> None:
    def run(rank: int, sums: Any) -> None:
        one = TokenAgreement([10, 11], sums, steps_ahead=1)
        one.report(["4"], [5 + rank])
        one.settle(is_last=True)

    assert all(isinstance(error, TokensDifferError) for error in on_threads(2, run))


def test_a_rank_says_which_peer_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "PEER_CHECK_S", 0.05)

    def run(rank: int, sums: Any) -> None:
        one = TokenAgreement([10, 11], sums)
        if rank == 0:
            one.report(["4"], [5])
            one.settle()

    late, _ = on_threads(2, run, timeout_s=0.3)
    said = "rank 11 of replica [10, 11] has not finished engine step 1 within 0.3 s"
    assert said in str(late)


def test_a_peer_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "PEER_CHECK_S", 0.05)
    peer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = time.monotonic()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    many = [os.dup(0) for _ in range(1100)]  # of a process with many open files

    def run(rank: int, sums: Any) -> None:
        if rank == 0:
            sums._peers[1] = agreement._process(peer.pid)
            threading.Timer(0.2, peer.kill).start()
            one = TokenAgreement([10, 11], sums)
            one.report(["4"], [5])
            one.settle()

    gone, _ = on_threads(2, run, timeout_s=60.0)
    for descriptor in many:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "rank 11 ended before its engine finished step 1" in str(gone)
    assert time.monotonic() - began < 10
    peer.wait()  # a process that nobody has waited for has ended all the same


@pytest.mark.parametrize("is_in_reach", [True, False])
def test_a_replica_of_one_host_shares_memory(
    is_in_reach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Group:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 2

    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5])
    own = agreement.peer_memory.host_id()
    peer = own if is_in_reach else "another host"
    monkeypatch.setattr(
        agreement._Members,
        "gather_objects",
        lambda _, value: [value, peer if value == own else value],
    )
    monkeypatch.setattr(agreement.peer_memory, "why_unusable", lambda *_: "")
    group: Any = Group()
    found = TokenAgreement.over(group, 5.0)
    wanted = agreement._SharedSums if is_in_reach else agreement._GatheredSums
    assert type(found._sums) is wanted
