"""The schedule of micro-batches over data-parallel ranks."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from clock import is_within
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.errors import DataError
from hybridrl.metrics.flops import attention_length, forward_flops
from hybridrl.models.families.qwen2 import shape
from hybridrl.training.batches.packing import (
    DEFAULT_ATTENTION_LENGTH,
    _assign_within_budget,
    pack,
    schedule,
    schedule_hash,
)

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
# Medians of tokens and deviations of their logarithm, of prompts and responses, and the longest
# response: grade-school sums of a few lines, and reasoning whose longest is beside the budget.
SAMPLES = {
    "gsm8k": (95, 0.35, 180, 0.45, 1024),
    "long_tailed": (150, 0.5, 1500, 1.0, 14_000),
}
BUDGET = 16_384
CASES = {
    "lengths": st.lists(st.integers(1, 200), min_size=1, max_size=80),
    "num_ranks": st.integers(1, 6),
    "budget": st.integers(200, 600),
    "multiple": st.integers(1, 4),
}


def cost(length: int) -> int:
    return length * (length + DEFAULT_ATTENTION_LENGTH)


@settings(max_examples=80, deadline=None)
@given(**CASES)
def test_schedule_holds_every_sample_once_within_the_budget_evenly(
    lengths, num_ranks, budget, multiple
):
    found = schedule(lengths, num_ranks, budget, multiple)
    micros = [micro for rank in found for micro in rank]
    assert len(found) == num_ranks
    assert len({len(rank) for rank in found}) == 1
    assert len(found[0]) % multiple == 0 and found[0]
    assert sorted(i for micro in micros for i in micro) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in micro) <= budget for micro in micros)
    assert all(list(micro) == sorted(micro) for micro in micros)


@settings(max_examples=80, deadline=None)
@given(**CASES)
def test_schedule_leaves_a_micro_batch_empty_only_for_want_of_samples(
    lengths, num_ranks, budget, multiple
):
    micros = [m for rank in schedule(lengths, num_ranks, budget, multiple) for m in rank]
    assert sum(not micro for micro in micros) == max(0, len(micros) - len(lengths))


@settings(max_examples=80, deadline=None)
@given(**CASES)
def test_schedule_makes_no_more_micro_batches_than_packing_needs(
    lengths, num_ranks, budget, multiple
):
    per_rank = len(schedule(lengths, num_ranks, budget, multiple)[0])
    needed = -(-len(pack(lengths, budget)) // num_ranks)
    assert needed <= per_rank < needed + multiple


@pytest.mark.parametrize("seed", range(5))
def test_schedule_balances_ranks_within_the_longest_sample(seed):
    rng = random.Random(seed)
    lengths = [min(int(rng.lognormvariate(5.5, 0.8)) + 1, 2048) for _ in range(512)]
    found = schedule(lengths, 8, 8192)
    loads = [sum(cost(lengths[i]) for micro in rank for i in micro) for rank in found]
    micro_loads = [sum(cost(lengths[i]) for i in micro) for rank in found for micro in rank]
    # Largest first, each to the least loaded: the spread is below one item's cost.
    assert max(loads) - min(loads) <= max(micro_loads)
    assert max(loads) <= 1.02 * sum(loads) / len(loads)


def draw_sizes(kind, num_prompts, seed):
    """Returns prompt and response tokens of 8 samples a prompt."""
    rng = random.Random(seed)
    prompt_median, prompt_sigma, median, sigma, longest = SAMPLES[kind]
    sizes = []
    for _ in range(num_prompts):
        prompt = min(int(rng.lognormvariate(math.log(prompt_median), prompt_sigma)) + 1, 1024)
        for _ in range(8):
            response = int(rng.lognormvariate(math.log(median), sigma)) + 1
            sizes.append((prompt, min(response, longest)))
    return sizes


@pytest.mark.parametrize("model", ["0.5b", "7b"])
@pytest.mark.parametrize("num_ranks", [4, 8, 16])
@pytest.mark.parametrize("kind", SAMPLES)
def test_ranks_compute_flops_within_three_percent(kind, num_ranks, model):
    of = shape(json.loads((MODELS / f"qwen2.5-{model}.json").read_text()))
    for seed in range(5):
        sizes = draw_sizes(kind, 128, seed)
        lengths = [sum(size) for size in sizes]
        found = schedule(lengths, num_ranks, BUDGET, attention_length=attention_length(of))
        loads = []
        for rank in found:
            mine = [i for micro in rank for i in micro]
            response_tokens = sum(sizes[i][1] for i in mine)
            loads.append(forward_flops(of, [lengths[i] for i in mine], response_tokens))
        assert max(loads) - min(loads) <= 0.03 * sum(loads) / num_ranks


@pytest.mark.parametrize("kind", SAMPLES)
def test_packs_fill_the_budget(kind):
    for seed in range(5):
        lengths = [sum(size) for size in draw_sizes(kind, 128, seed)]
        packs = pack(lengths, BUDGET)
        fills = sorted(sum(lengths[i] for i in members) / BUDGET for members in packs)
        # One pack holds what is left over.
        assert sum(fills[1:]) >= 0.95 * len(fills[1:])
        assert len(fills) <= math.ceil(sum(lengths) / BUDGET) + 1  # no packing has fewer than that


def test_schedule_counts_attention_in_the_cost():
    # One long sample weighs as much as many short ones of the same number of tokens and more.
    lengths = [4000] + [100] * 80
    plain = schedule(lengths, 2, 10_000, attention_length=10**9)
    heavy = schedule(lengths, 2, 10_000, attention_length=2000)
    beside = [len(next(m for rank in s for m in rank if 0 in m)) - 1 for s in (plain, heavy)]
    assert beside[0] == 20 and beside[1] == 0


def test_schedule_falls_back_to_packing_when_balance_does_not_fit():
    # Costliest first to the cheapest leaves no room for the last sample of 4 here; best fit does.
    lengths = [7, 4, 5, 8, 6, 1, 2, 2, 4, 9, 4, 5, 5, 8]
    costs = [cost(length) for length in lengths]
    assert _assign_within_budget(lengths, costs, 14, 5) is None
    found = schedule(lengths, 5, 14)
    assert [len(rank) for rank in found] == [1] * 5
    assert all(sum(lengths[i] for i in micro) <= 14 for (micro,) in found)


def test_schedule_balances_ranks_when_micro_batches_are_unequal():
    # Four micro-batches of one sample each: a long one and a short one for either rank.
    lengths = [10, 9, 2, 1]
    found = schedule(lengths, 2, 10, 2)
    assert [sum(lengths[i] for micro in rank for i in micro) for rank in found] == [11, 11]


def test_schedule_gives_padding_to_ranks_without_samples():
    found = schedule([5, 3], 4, 10)
    assert sorted(found) == [[()], [()], [(0,)], [(1,)]]


def test_schedule_names_a_sample_longer_than_the_budget():
    with pytest.raises(DataError, match="sample 2 has 11 tokens"):
        schedule([3, 10, 11], 1, 10)


def test_schedule_hash_is_the_same_in_every_process():
    code = (
        "from hybridrl.training.batches.packing import schedule, schedule_hash\n"
        "print(schedule_hash(schedule([7 * i % 50 + 1 for i in range(100)], 4, 128, 2)))\n"
        "import sys; assert 'torch' not in sys.modules"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]  # fmt: skip
    here = schedule_hash(schedule([7 * i % 50 + 1 for i in range(100)], 4, 128, 2))
    assert runs == [here, here]


def test_schedule_hash_differs_for_another_schedule():
    assert schedule_hash([[(0, 1)], [(2,)]]) == "474eb60e9b4f1f27"
    assert schedule_hash([[(0,)], [(1, 2)]]) != "474eb60e9b4f1f27"


def test_schedule_of_a_large_batch_is_quick():
    rng = random.Random(0)
    lengths = [rng.randint(1, 4096) for _ in range(8192)]
    assert is_within(1, lambda: schedule(lengths, 64, 8192))  # about 0.1 s on an idle core


def test_schedule_swaps_packs_where_dealing_them_out_leaves_ranks_uneven():
    # The longest first, each to the rank with least so far: 300 + 200 + 200 against 300 + 200.
    lengths = [300, 300, 200, 200, 200]
    found = schedule(lengths, num_ranks=2, token_budget=300, attention_length=1_000_000)
    assert [sum(lengths[i] for pack in packs for i in pack) for packs in found] == [600, 600]
