"""Plays the same requests to two schedulers of vLLM, one with our shortcuts: both must schedule the
same, and then hold the same.

The model is played: tokens are drawn here, a step later where scheduling runs ahead of the GPU.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from hybridrl.rollout.vllm_decoding import DecodingSteps

STOP = 1
VOCAB = 40  # so that one in 40 tokens is the stop token
# Of a request: objects, and a step that only pipelines look at, which are refused.
NOT_COMPARED = {
    "arrival_time",
    "sampling_params",
    "_block_hasher",
    "output_token_ids",
    "all_token_ids",
    "prefill_stats",
    "next_decode_eligible_step",
}
OF_SCHEDULER = ("current_step", "finished_req_ids", "reset_preempted_req_ids")
OF_FIRST_RUNNER = "prev_step_scheduled_req_ids"


class Player:
    """A scheduler of the kind that a live engine has, or that engines of GPUs have."""

    def __init__(
        self, core: Any, is_async: bool, is_second_runner: bool, num_blocks: int, has_ours: bool
    ) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        own, config = core.scheduler, deepcopy(core.scheduler.vllm_config)
        config.scheduler_config.async_scheduling = is_async
        self.scheduler = (AsyncScheduler if is_async else Scheduler)(
            vllm_config=config,
            kv_cache_config=dataclasses.replace(own.kv_cache_config, num_blocks=num_blocks),
            structured_output_manager=own.structured_output_manager,
            block_size=own.block_size,
            hash_block_size=own.hash_block_size,
        )
        self.scheduler.use_v2_model_runner = is_second_runner
        self.preempted: list[str] = []
        preempt = self.scheduler._preempt_request

        def noted(request: Any, *arguments: Any, **keywords: Any) -> None:
            self.preempted.append(request.request_id)
            preempt(request, *arguments, **keywords)

        self.scheduler._preempt_request = noted
        self.ours: DecodingSteps | None = None
        self.counts = Counter[str]()  # of steps and tokens that vLLM's own way had
        if has_ours:
            schedule = self.scheduler.schedule

            def counted() -> Any:
                self.counts["schedule"] += 1
                return schedule()

            self.scheduler.schedule = counted
            self.ours = DecodingSteps(self.scheduler, is_known=True)

    def update(self, scheduled: Any, found: Any) -> dict[str, tuple[Any, ...]]:
        """Returns, of each request that a token is for: it, its log-probability, why it ends."""
        logps = dict(zip(found.req_ids, found.logprobs.logprobs[:, 0].tolist(), strict=True))
        outputs = self.scheduler.update_from_output(scheduled, found)
        told = [one for each in outputs.values() for one in each.outputs]
        taken = {one.request_id: (*one.new_token_ids, one.finish_reason) for one in told}
        if self.ours is None:
            return {name: (logps[name], *each) for name, each in taken.items()}
        found_all = {name: (self.ours.logp(name), *each) for name, each in taken.items()}
        self.counts["tokens"] += len(found_all)
        for name, token, logp in self.ours.drawn():
            assert name not in found_all
            found_all[name] = (logp, token, None)
        return found_all

    def state(self) -> dict[str, Any]:
        """Returns all that the next steps depend on."""
        scheduler = self.scheduler
        manager = scheduler.kv_cache_manager
        blocks, pool = manager.coordinator.single_type_managers[0], manager.block_pool
        names = (*OF_SCHEDULER, *(() if scheduler.use_v2_model_runner else (OF_FIRST_RUNNER,)))
        free, block = [], pool.free_block_queue.fake_free_list_head.next_free_block
        while block.next_free_block is not None:
            free.append(block.block_id)
            block = block.next_free_block
        return {
            **{name: getattr(scheduler, name) for name in names},
            "running": [request.request_id for request in scheduler.running],
            "counts": scheduler.get_request_counts(),
            "requests": {n: dict(_fields(r)) for n, r in scheduler.requests.items()},
            "blocks": {n: [b.block_id for b in held] for n, held in blocks.req_to_blocks.items()},
            "cached": dict(blocks.num_cached_block),
            "hashes": sorted(map(repr, pool.cached_block_hash_to_block._cache)),
            "free": free,
        }


def _fields(request: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(request).items():
        if name not in NOT_COMPARED:
            yield name, deepcopy(value)
    yield "has prefill_stats", request.prefill_stats is not None


def make_request(core: Any, name: str, prompt: Sequence[int], max_tokens: int) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(
        max_tokens=max_tokens, stop_token_ids=[STOP], ignore_eos=True, logprobs=0, seed=1
    )
    hasher = core.request_block_hasher
    return Request(name, list(prompt), params, None, arrival_time=0.0, block_hasher=hasher)


def draw(scheduled: Any, sampled: Sequence[str], rng: np.random.Generator) -> Any:
    """Returns what a model runner would: a token of each request that has no prompt left."""
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    names = list(scheduled.num_scheduled_tokens)
    tokens = rng.integers(1, VOCAB, len(names))
    logps = -rng.random((len(names), 1), dtype=np.float32)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: row for row, name in enumerate(names)},
        sampled_token_ids=[
            [int(token)] if name in sampled else []
            for name, token in zip(names, tokens, strict=True)
        ],
        logprobs=LogprobsLists(tokens[:, None], logps, np.zeros(len(names), np.int32)),
    )


def compare_schedulers(
    core: Any, is_async: bool, is_second_runner: bool, num_blocks: int, num_requests: int
) -> tuple[Player, Counter[str]]:
    """Plays requests that come in two waves, a few of them aborted; returns the player with our
    shortcuts and how many steps and tokens there were.

    Raises:
        AssertionError: the two differ in what they schedule, tell or hold after a step.
    """
    kind = (core, is_async, is_second_runner, num_blocks)
    players = [Player(*kind, has_ours=has_ours) for has_ours in (False, True)]
    rng, total = np.random.default_rng(num_blocks), Counter[str]()
    lengths = rng.integers(1, 70, num_requests)
    prompts = [rng.integers(2, VOCAB, n).tolist() for n in lengths]
    prompts[1::4] = prompts[0::4]  # some begin alike, and find each other's blocks
    waves = {0: range(num_requests // 2), 90: range(num_requests // 2, num_requests)}
    limits = rng.integers(2, 150, num_requests)
    under_way: deque[tuple[list[Any], list[str]]] = deque()
    for step in range(2000):
        for number in waves.get(step, ()):
            for player in players:
                request = make_request(core, f"r{number}", prompts[number], int(limits[number]))
                player.scheduler.add_request(request)
        if step % 25 == 24 and players[0].scheduler.running:
            from vllm.v1.request import RequestStatus

            name = players[0].scheduler.running[-1].request_id
            for player in players:
                player.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        if players[0].scheduler.has_requests():
            both = [player.scheduler.schedule() for player in players]
            _check_equal(*(vars(scheduled) for scheduled in both), f"step {step}")
            requests = players[0].scheduler.requests
            names = both[0].num_scheduled_tokens
            under_way.append((both, [n for n in names if not requests[n].is_prefill_chunk]))
            total["schedule"] += 1
            if is_async and len(under_way) < 2:
                continue
        elif not under_way:
            if step > max(waves):
                break
            continue
        both, sampled = under_way.popleft()
        found = draw(both[0], sampled, rng)
        told = [p.update(s, deepcopy(found)) for p, s in zip(players, both, strict=True)]
        assert told[0] == told[1], f"step {step}"
        total["tokens"] += len(told[0])
        _check_equal(*(player.state() for player in players), f"step {step}")
    else:
        raise AssertionError("requests are left after 2,000 steps")
    assert players[0].preempted == players[1].preempted
    return players[1], total


def _check_equal(one: dict[str, Any], other: dict[str, Any], where: str) -> None:
    assert one.keys() == other.keys(), where
    for name, value in one.items():
        assert value == other[name], f"{where}: {name}"
