"""Plays the same requests to two schedulers of vLLM, one with our shortcuts: both must schedule the
same, and then hold the same.

The model is played: tokens are drawn here, a step later where scheduling runs ahead of the GPU.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridrl.rollout.vllm.decoding import DecodingSteps

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


@dataclass(frozen=True)
class Kind:
    """A scheduler: whether it runs ahead of the model, vLLM's runner, blocks, tokens in a step."""

    is_async: bool
    is_second_runner: bool
    num_blocks: int
    max_tokens: int = 8192


class Player:
    """A scheduler made as a live engine's was, but of a kind."""

    def __init__(self, core: Any, kind: Kind, has_ours: bool, is_known: bool = True) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        own, config = core.scheduler, copy(core.scheduler.vllm_config)  # a deep copy has caches
        config.scheduler_config = copy(config.scheduler_config)
        config.scheduler_config.async_scheduling = kind.is_async
        config.scheduler_config.enable_chunked_prefill = True
        config.scheduler_config.max_num_batched_tokens = kind.max_tokens
        config.scheduler_config.max_num_scheduled_tokens = None
        self.scheduler = (AsyncScheduler if kind.is_async else Scheduler)(
            vllm_config=config,
            kv_cache_config=dataclasses.replace(own.kv_cache_config, num_blocks=kind.num_blocks),
            structured_output_manager=own.structured_output_manager,
            block_size=own.block_size,
            hash_block_size=own.hash_block_size,
        )
        self.scheduler.use_v2_model_runner = kind.is_second_runner
        self.preempted: list[str] = []
        preempt = self.scheduler._preempt_request

        def noted(request: Any, *arguments: Any, **keywords: Any) -> None:
            self.preempted.append(request.request_id)
            preempt(request, *arguments, **keywords)

        self.scheduler._preempt_request = noted
        self.ours: DecodingSteps | None = None
        # Of steps and tokens that vLLM's own way had; of steps whose requests we counted together.
        self.counts = Counter[str]()
        if has_ours:
            schedule = self.scheduler.schedule

            def counted() -> Any:
                self.counts["schedule"] += 1
                return schedule()

            self.scheduler.schedule = counted
            self.ours = DecodingSteps(self.scheduler, is_known)
            hand_out = self.ours._hand_out_steady

            def counted_together(steady: Any) -> Any:
                output = hand_out(steady)
                self.counts["together"] += output is not None
                return output

            self.ours._hand_out_steady = counted_together

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
        for step in self.ours.take_steps():
            for name, token, logp in zip(step.names, step.tokens, step.logps, strict=True):
                assert name not in found_all
                found_all[name] = (logp, token, None)
        return found_all

    def state(self) -> dict[str, Any]:
        """Returns all that the next steps depend on."""
        scheduler = self.scheduler
        if self.ours is not None:
            self.ours.write()
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
            "waiting": [request.request_id for request in scheduler.waiting],
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
            yield name, value
    yield "has prefill_stats", request.prefill_stats is not None


def make_request(
    core: Any, name: str, prompt: Sequence[int], max_tokens: int, stops: Sequence[int]
) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(
        max_tokens=max_tokens, stop_token_ids=list(stops), ignore_eos=True, logprobs=0, seed=1
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
    core: Any, kind: Kind, num_requests: int, is_known: bool = True
) -> tuple[Player, Counter[str]]:
    """Plays requests in two waves and a last one; some are aborted, once all, as by an update.

    `core` is vLLM's `EngineCore` or a part; `is_known`, what the shortcuts learn of vLLM's version.
    Returns the player with our shortcuts, and counts of steps, tokens and parts of prompts.
    AssertionError if the two schedule, report or hold different things after a step.
    """
    players = [Player(core, kind, False), Player(core, kind, True, is_known)]
    own = players[0].scheduler
    rng, total = np.random.default_rng(kind.num_blocks), Counter[str]()
    prompts = [rng.integers(2, VOCAB, n).tolist() for n in rng.integers(1, 70, num_requests)]
    prompts[1::4] = prompts[0::4]  # some begin alike, and find each other's blocks
    limits = rng.integers(1, 150, num_requests)
    waves = {0: range(num_requests // 2), 90: range(num_requests // 2, num_requests - 1)}
    # The last one comes alone, in parts one token is left of it, and the engine's length ends it.
    waves[1500] = range(num_requests - 1, num_requests)
    prompts[-1], limits[-1] = rng.integers(2, VOCAB, 17).tolist(), 1000
    under_way: deque[tuple[list[Any], list[str]]] = deque()

    def submit(name: str, prompt: Sequence[int], max_tokens: int) -> None:
        stops = () if max_tokens == limits[-1] else (STOP,)
        for player in players:
            player.scheduler.add_request(make_request(core, name, prompt, max_tokens, stops))

    def abort(names: Sequence[str]) -> None:
        for player in players:
            for name in names:
                player.scheduler.finish_requests(name, _aborted())

    for step in range(3000):
        for number in waves.get(step, ()):
            submit(f"r{number}", prompts[number], int(limits[number]))
        if step % 25 == 24 and own.running and step < max(waves):
            abort([own.running[-1].request_id, *[r.request_id for r in own.waiting][:1]])
        if step == 60:  # as an update of weights: what was generated comes again as a prompt
            left = list(own.requests.values())
            so_far = [(r.request_id, list(r.all_token_ids), r.max_tokens) for r in left]
            abort([request.request_id for request in left])
            for player in players:
                assert player.scheduler.reset_prefix_cache()
            for name, tokens, max_tokens in so_far:
                submit(f"{name}-again", tokens, max_tokens)
        if own.has_requests():
            both = [player.scheduler.schedule() for player in players]
            _check_equal(*(vars(scheduled) for scheduled in both), f"step {step}")
            names = both[0].num_scheduled_tokens
            sampled = [name for name in names if not own.requests[name].is_prefill_chunk]
            under_way.append((both, sampled))
            total["schedule"] += 1
            total["parts"] += len(names) - len(sampled)
            if kind.is_async and len(under_way) < 2:
                continue
        elif not under_way:
            if step > max(waves):
                break
            continue
        both, sampled = under_way.popleft()
        result = draw(both[0], sampled, rng)
        told = [p.update(s, deepcopy(result)) for p, s in zip(players, both, strict=True)]
        assert told[0] == told[1], f"step {step}"
        total["tokens"] += len(told[0])
        # Between, what ours keeps for later is not written: the next steps are made without it.
        if rng.random() < 0.15:
            _check_equal(*(player.state() for player in players), f"step {step}")
    else:
        raise AssertionError("requests are left after 3,000 steps")
    _check_equal(*(player.state() for player in players), "the end")
    assert players[0].preempted == players[1].preempted
    return players[1], total


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def _check_equal(one: dict[str, Any], other: dict[str, Any], where: str) -> None:
    assert one.keys() == other.keys(), where
    for name, value in one.items():
        assert value == other[name], f"{where}: {name}"
