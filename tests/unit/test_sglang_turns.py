"""What the SGLang engine does after a turn of SGLang's loop; without SGLang."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.rollout.engine import Request, RunningRequest, SamplingParams
from hybridrl.rollout.sglang.adapter import SglangEngine, _Running

SAMPLING = SamplingParams(max_new_tokens=2)


def engine_after(turn: Callable[[Any, Any], None], logps: list[list[float]]) -> Any:
    """Returns an engine with requests whose tokens are drawn; `turn` changes its next turn."""
    engine: Any = SglangEngine.__new__(SglangEngine)
    requests = [
        SimpleNamespace(
            rid=str(i),
            output_ids=[5] * len(own),
            logprob=SimpleNamespace(output_token_logprobs_val=own),
        )
        for i, own in enumerate(logps)
    ]
    rows = [RunningRequest(Request(i, (1, 2), 7, SAMPLING, (), (), None)) for i in range(2)]
    engine._rows = dict(enumerate(rows))
    engine._running = {i: _Running(row, requests[i]) for i, row in enumerate(rows)}
    scheduler = SimpleNamespace(ended=[], drawn=([], []), has_wrong_logp=False, last_batch=None)
    scheduler.turn = lambda: turn(scheduler, requests)
    engine._scheduler, engine._experts, engine._finished = scheduler, None, []
    engine._agreement = SimpleNamespace(
        settle=lambda is_last=False: None, report=lambda names, tokens: None
    )
    engine._is_updating, engine._version, engine._tensors = False, 3, {}
    engine._num_empty_turns, engine._by_text, engine._leaving = 0, set(), set()
    return engine


def end_first(scheduler: Any, requests: Any) -> None:
    scheduler.ended, scheduler.has_wrong_logp = [requests[0]], True


def test_a_log_probability_that_is_none_is_told_where_another_request_ends() -> None:
    engine = engine_after(end_first, [[-1.0, -1.0], [float("nan")]])
    with pytest.raises(Exception, match="log-probability nan for request 1"):
        engine.step()


def test_of_a_row_that_nobody_takes_it_is_passed_over() -> None:
    engine = engine_after(end_first, [[-1.0, -1.0], [-2.0]])
    engine.step()
    assert [one.request_id for one in engine._finished] == [0]
    assert list(engine._rows) == [1] and not engine._scheduler.has_wrong_logp
