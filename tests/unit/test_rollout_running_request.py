"""Requests that an engine has under way."""

from __future__ import annotations

import pytest

from hybridrl.rollout.engine import Request, RunningRequest, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=6, stop_token_ids=(9,))


def row(tokens: tuple[int, ...] = ()) -> RunningRequest:
    version = 4 if tokens else None
    request = Request(3, (1, 2), 7, SAMPLING, tokens, tuple(-1.0 for _ in tokens), version)
    return RunningRequest(request)


@pytest.mark.parametrize("tokens", [[5], [5, 6], [5, 6, 7, 8], [5, 6, 9], [9]])
@pytest.mark.parametrize("begun", [(), (4, 4)])
@pytest.mark.parametrize("version", [4, 5])
def test_tokens_are_kept_together_as_one_after_another(
    tokens: list[int], begun: tuple[int, ...], version: int
) -> None:
    logps = [-float(token) for token in tokens]
    one, other = row(begun), row(begun)
    expected = [other.append(*pair, version) for pair in zip(tokens, logps, strict=True)]
    assert one.extend(tokens, logps, version) == expected[-1]
    assert (
        one.to_request() == other.to_request() if expected[-1] is None else not any(expected[:-1])
    )
    assert (one.tokens, one.logps) == (other.tokens, other.logps)


@pytest.mark.parametrize("tokens", [[9, 5], [5, 9, 5], [5] * 7])
def test_tokens_after_the_end_are_refused(tokens: list[int]) -> None:
    with pytest.raises(RuntimeError, match="request 3 has tokens after its end"):
        row().extend(tokens, [-1.0] * len(tokens), 4)
