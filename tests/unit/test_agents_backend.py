"""The queue between the endpoint's thread and a rank's loop; rows train each token once."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from hybridrl.agents.backend import (
    BackendClosed,
    SamplingTerms,
    TurnAborted,
    TurnQueue,
    TurnRequest,
)
from hybridrl.agents.samples import Row, Span, pick_last, pick_longest, picked, trained_once
from hybridrl.errors import UserError
from hybridrl.rollout.engine import Completion

TERMS = SamplingTerms(temperature=1.0, max_context=64)


def request(number: int) -> TurnRequest:
    return TurnRequest(number, "s", 0, 0, (1, 2), 4)


def completion(number: int) -> Completion:
    return Completion(number, (5, 6), (-0.5, -0.25), "stop", 0)


def test_turns_reach_the_loop_in_order_and_complete_from_another_thread() -> None:
    queue = TurnQueue(TERMS)
    first, second = queue.submit(request(1)), queue.submit(request(2))
    assert [one.request_id for one in queue.take().requests] == [1, 2]
    assert not queue.take()
    assert queue.num_unfinished == 2
    threading.Thread(target=queue.finish, args=([completion(2), completion(1)],)).start()
    assert first.result(5) == completion(1)
    assert second.result(5) == completion(2)
    assert queue.num_unfinished == 0


def test_an_aborted_turn_is_named_to_the_loop_only_if_it_was_taken() -> None:
    queue = TurnQueue(TERMS)
    early = queue.submit(request(1))
    queue.abort(1)
    assert not queue.take()
    late = queue.submit(request(2))
    queue.take()
    queue.abort(2)
    queue.abort(2)
    assert queue.take().aborted == (2,)
    for future in (early, late):
        with pytest.raises(TurnAborted):
            future.result(0)
    queue.finish([completion(2)])  # it finished before the loop heard of the abort


def test_waiting_ends_when_a_turn_arrives() -> None:
    queue = TurnQueue(TERMS)
    assert not queue.wait(0.01)
    threading.Timer(0.05, queue.submit, [request(1)]).start()
    assert queue.wait(5)


def test_a_closed_queue_fails_open_and_later_turns_with_its_reason() -> None:
    queue = TurnQueue(TERMS)
    future = queue.submit(request(1))
    queue.close("the run stops")
    for one in (future, queue.submit(request(2))):
        with pytest.raises(BackendClosed, match="the run stops"):
            one.result(0)
    assert not queue.take()


def row(*spans: Span, num: int) -> Row:
    """A row of `num` tokens, of which the spans are sampled."""
    observed = [True] * num
    for span in spans:
        observed[span.start : span.start + span.num_tokens] = [False] * span.num_tokens
    logps = tuple(0.0 if is_observed else -1.0 for is_observed in observed)
    return Row((1,), tuple(range(num)), logps, tuple(observed), ((0, num),), "stop", spans)


def test_a_token_that_branches_share_is_trained_in_the_earliest_row() -> None:
    shared = Span(0, 0, 3)
    one, two = row(shared, Span(1, 5, 2), num=7), row(shared, Span(2, 4, 3), num=7)
    first, second = trained_once([one, two])
    assert first == one
    assert second.observed == (True, True, True, True, False, False, False)
    assert second.logps[:4] == (0.0,) * 4


def test_a_replaced_end_token_is_trained_in_the_row_that_has_it() -> None:
    whole, without_end = row(Span(0, 0, 3), num=3), row(Span(0, 0, 2), Span(1, 4, 2), num=6)
    assert [one.num_trained for one in trained_once([whole, without_end])] == [3, 2]
    last, first = trained_once([without_end, whole])
    assert (last.num_trained, first.observed) == (4, (True, True, False))


def test_pickers_choose_among_rows_and_may_not_invent_any() -> None:
    rows = [row(Span(0, 0, 2), num=2), row(Span(1, 0, 5), num=5), row(Span(2, 0, 3), num=3)]
    assert picked(rows, pick_last) == (rows[2],)
    assert picked(rows, pick_longest) == (rows[1],)
    assert picked(rows, lambda found: [found[2], found[0]]) == (rows[0], rows[2])
    with pytest.raises(UserError, match="not given"):
        picked(rows, lambda found: [replace(found[0])])
