"""Sizes of micro-batches that `plan` counts with, against the schedule that training makes."""

from __future__ import annotations

import random
from itertools import accumulate, groupby
from pathlib import Path

import pytest
import torch

from hybridrl.config.load import load_config_dict
from hybridrl.config.schema import Config
from hybridrl.config.source import read_model_config
from hybridrl.metrics.flops import attention_length
from hybridrl.models.family import ModelShape, read_model
from hybridrl.models.megatron.attention import SharedPrompts
from hybridrl.models.megatron.prefix_attention import TwoCalls
from hybridrl.parallel.layout import TrainLayout
from hybridrl.services.planner.micro_batch_sizes import (
    Lengths,
    MicroBatchSize,
    largest_micro_batch,
    positions_of_update,
    shares_prompts,
    usual_micro_batches,
)
from hybridrl.services.planner.times import packs
from hybridrl.training.batches.packing import even_sizes, round_up
from hybridrl.training.batches.prompt_sharing import ScheduleInputs, schedule_samples

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
MODEL = MODELS / "qwen2.5-1.5b.json"
TORCH = "train.layers=torch", "train.share_prompts=true"  # keys are copied


def config_of(prompt: int, response: int, budget: int, *overrides: str) -> Config:
    sections = {
        "run": {"name": "a"},
        "model": {"init": str(MODEL)},
        "algorithm": {"name": "grpo"},
        "rollout": {"engine": "vllm", "max_new_tokens": response},
        "data": {"max_prompt_tokens": prompt},
        "steps": {"prompts_per_step": 8, "samples_per_prompt": 4},
        "train": {"micro_batch_tokens": budget},
    }
    return load_config_dict(sections, list(overrides))


def shape_of(config: Config) -> ModelShape:
    return read_model(None, read_model_config(config.model))[1]


def trained_sizes(
    config: Config, layout: TrainLayout, lengths: list[tuple[int, int]]
) -> list[MicroBatchSize]:
    """Returns training's micro-batches of these lengths; positions and keys by sample."""
    per_prompt, shares = (
        config.steps.samples_per_prompt,
        shares_prompts(config, shape_of(config)),
    )
    pad = 2 * layout.cp if layout.cp > 1 else 1
    wholes = tuple(round_up(prompt + response, pad) for prompt, response in lengths)
    inputs = ScheduleInputs(
        lengths=wholes,
        groups=tuple(number // per_prompt for number in range(len(lengths))),
        prompt_lengths=tuple(prompt for prompt, _ in lengths) if shares else None,
        part_sizes=tuple(even_sizes(len(lengths), config.steps.updates_per_step)),
        num_ranks=layout.dp,
        token_budget=config.train.micro_batch_tokens,
        multiple=layout.pp if layout.vpp > 1 else 1,
        attention_length=attention_length(shape_of(config)),
        pad_each=pad,
    )
    found = []
    for micro in (micro for rank in schedule_samples(inputs) for micro in rank):
        positions = rows = 0
        sequences: list[tuple[int, int, int]] = []  # length, prompt and its length
        # As collate lays them: a prompt is there again where other samples were in between.
        for _, run in groupby(micro, key=inputs.groups.__getitem__):
            members = list(run)
            prefix = lengths[members[0]][0] - 1 if shares and len(members) > 1 else 0
            own = [round_up(wholes[sample] - prefix, pad) for sample in members]
            positions += round_up(prefix, pad) + sum(own)
            rows += sum(wholes[sample] for sample in members)
            first = len(sequences) if prefix else -1
            sequences += [(round_up(prefix, pad), -1, 0)] if prefix else []
            sequences += [(one, first, prefix) for one in own]
        sizes, prompts, continued = zip(*sequences, strict=True)
        if shares and layout.cp > 1:
            rows = gathered_rows((0, *accumulate(sizes)), prompts, continued, layout.cp)
        positions = round_up(positions, layout.tp * pad)
        if shares and config.train.layers != "torch" and layout.cp == 1:
            bounds = [0, *accumulate(sizes), positions]
            if TwoCalls.of(bounds, (*prompts, -1), (*continued, 0), torch.device("cpu")):
                rows = positions
        found.append(MicroBatchSize(positions, rows))
    return found


def gathered_rows(
    bounds: tuple[int, ...], prompts: tuple[int, ...], continued: tuple[int, ...], cp: int
) -> int:
    """Returns the rows of keys of context parallel ranks, each of which gathers all keys."""
    ranks = [
        SharedPrompts(bounds, prompts, continued, torch.zeros(1), cp, rank) for rank in range(cp)
    ]
    return cp * bounds[-1] + sum(len(rank.keys.index_K) for rank in ranks)


@pytest.mark.parametrize(
    ("prompt", "response", "budget", "layout", "overrides"),
    [
        (256, 512, 16384, TrainLayout(2, 2), ()),
        (256, 512, 4416, TrainLayout(2), ("steps.prompts_per_step=32",)),
        (16384, 1024, 32768, TrainLayout(2, 2), ()),  # one long sample in each
        (16384, 1024, 32768, TrainLayout(2, cp=2), ()),
        (16384, 1024, 40000, TrainLayout(2, 2), ()),  # samples of one prompt meet again
        (4095, 1024, 32768, TrainLayout(1), ("steps.samples_per_prompt=8",)),
        (4096, 1024, 32768, TrainLayout(1), ("steps.samples_per_prompt=8",)),
        (4096, 1024, 32768, TrainLayout(1), ("steps.samples_per_prompt=8", *TORCH)),
        (256, 512, 16384, TrainLayout(4, 2), ("steps.updates_per_step=2",)),
        (256, 512, 16384, TrainLayout(2), ("train.share_prompts=false",)),
    ],
)
def test_usual_micro_batches_are_those_that_training_makes(
    prompt: int, response: int, budget: int, layout: TrainLayout, overrides: tuple[str, ...]
) -> None:
    config = config_of(prompt, response, budget, *overrides)
    steps = config.steps
    lengths = [(prompt, response)] * (steps.prompts_per_step * steps.samples_per_prompt)
    trained = trained_sizes(config, layout, lengths)
    usual = usual_micro_batches(config, shape_of(config), layout)
    assert {one.positions for one in usual} == {one.positions for one in trained}
    rows = max(one.key_rows for one in trained)
    most = max(one.key_rows for one in usual)
    assert rows <= most < rows + layout.tp * 2 * layout.cp  # padding has rows too


def test_mean_lengths_of_the_section_layout_are_the_usual_ones() -> None:
    told = "layout.mean_prompt_tokens=100", "layout.mean_response_tokens=50"
    layout = TrainLayout(1)
    config = config_of(256, 512, 16384, *told, "train.share_prompts=false")
    (usual,) = usual_micro_batches(config, shape_of(config), layout)
    assert usual.positions == 32 * 150
    assert largest_micro_batch(config, shape_of(config), layout).positions == 16384


@pytest.mark.parametrize("layers", [(), TORCH])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("prompt", "response"), [(256, 512), (3000, 300), (6000, 100), (9000, 50)])
def test_no_micro_batch_is_larger_than_the_largest(
    prompt: int, response: int, seed: int, layers: tuple[str, ...]
) -> None:
    draw, layout = random.Random(seed), TrainLayout(2)
    config = config_of(prompt, response, 16384, "steps.prompts_per_step=24", *layers)
    longest = draw.choice([4, response // 4, response])  # short responses: many copies of prompts
    prompts = [draw.randint(prompt // 2, prompt) for _ in range(24)]
    lengths = [(one, draw.randint(1, longest)) for one in prompts for _ in range(4)]
    largest = largest_micro_batch(config, shape_of(config), layout)
    for one in trained_sizes(config, layout, lengths):
        assert one.positions <= largest.positions and one.key_rows <= largest.key_rows


def test_rows_of_data_may_fill_a_micro_batch() -> None:
    config = config_of(256, 512, 16384, "algorithm.name=sft", "steps.samples_per_prompt=1")
    (usual,) = usual_micro_batches(config, shape_of(config), TrainLayout(1))
    assert usual.positions == 16384


@pytest.mark.parametrize("layout", [TrainLayout(1), TrainLayout(2, cp=2), TrainLayout(4, cp=4)])
@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.name=dpo",),
        ("mix.a.algorithm.name=dpo", "mix.a.data.prompts=[a.jsonl]", "mix.a.weight=1"),
    ],
)
def test_pairs_in_data_share_prompts_up_to_the_largest(
    layout: TrainLayout, overrides: tuple[str, ...]
) -> None:
    prompt, response, num, pad = 1024, 32, 48, max(2 * layout.cp * (layout.cp > 1), 1)
    sizes = "data.max_prompt_tokens=1024", "mix.a.data.max_prompt_tokens=1024"
    config = config_of(prompt, response, 16384, *overrides, *sizes[: 1 + ("mix" in overrides[0])])
    largest = largest_micro_batch(config, shape_of(config), layout)
    inputs = ScheduleInputs(
        lengths=(round_up(prompt + response, pad),) * (2 * num),
        groups=(*range(num), *range(num)),
        prompt_lengths=(prompt,) * (2 * num),
        part_sizes=(2 * num,),
        num_ranks=1,
        token_budget=16384,
        multiple=1,
        attention_length=attention_length(shape_of(config)),
        pad_each=pad,
    )
    most, own, shared = 0, round_up(response + 1, pad), round_up(prompt - 1, pad)
    for micro in schedule_samples(inputs)[0]:
        bounds, prompts = [0], list[int]()
        for _, run in groupby(micro, key=inputs.groups.__getitem__):
            members = list(run)
            assert len(members) == 2
            prompts += [-1, *[len(prompts)] * 2]
            bounds += [bounds[-1] + size for size in (shared, shared + own, shared + 2 * own)]
        continued = tuple(0 if one < 0 else prompt - 1 for one in prompts)
        if layout.cp == 1:
            rows = bounds[-1] + (prompt - 1) * (len(prompts) // 3)
        else:
            rows = gathered_rows(tuple(bounds), tuple(prompts), continued, layout.cp)
        most = max(most, rows)
    assert most > 16384
    assert most <= largest.key_rows < 2 * most


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
@pytest.mark.parametrize("prompt", [2048, 16384])
def test_times_count_the_positions_of_the_units_that_training_makes(prompt: int, cp: int) -> None:
    """Keys that context parallel ranks copy limit how many samples share a long prompt."""
    config = config_of(prompt, 512, 32768, "steps.samples_per_prompt=16")
    shape, layout = shape_of(config), TrainLayout(cp, cp=cp)
    positions = positions_of_update(config, shape, layout)
    assert positions is not None
    packed = packs(config, shape, Lengths.of(config), layout.dp, cp, 32768)
    assert packed.tokens == pytest.approx(positions["computed"], rel=0.25)


def test_models_in_fp32_share_no_prompts_by_default_on_gpus() -> None:
    """They have torch's layers there, as layers.py decides."""
    config = config_of(256, 512, 16384, "model.dtype=float32")
    assert not shares_prompts(config, shape_of(config))
    assert shares_prompts(config_of(256, 512, 16384), shape_of(config))


@pytest.mark.parametrize(
    ("per_prompt", "layout", "model", "rows"),
    [
        (1, TrainLayout(1), "qwen2.5-1.5b", 4 * 16384),
        (4, TrainLayout(1), "qwen2.5-1.5b", 4 * 16384),
        # Both ranks gather 16384 keys, and copy 1.25 times that and 2 x 1.5 times that.
        (1, TrainLayout(2, cp=2), "qwen2.5-1.5b", 2 * 16384 * 21 // 4),
        (4, TrainLayout(1), "qwen3.5-4b", 16384),  # recurrent layers share nothing
    ],
)
def test_agents_may_fill_a_micro_batch_with_copied_keys(
    per_prompt: int, layout: TrainLayout, model: str, rows: int
) -> None:
    # A sample may consist of several sequences, so even two samples may fill a micro-batch.
    overrides = (
        "agent.server=true",
        f"model.init={MODELS / model}.json",
        "steps.prompts_per_step=2",
        f"steps.samples_per_prompt={per_prompt}",
        "algorithm.name=reinforce_pp" if per_prompt == 1 else "algorithm.name=grpo",
        "train.share_prompts=true",
    )
    config = config_of(256, 512, 16384, *overrides)
    largest = largest_micro_batch(config, shape_of(config), layout)
    assert largest == MicroBatchSize(16384, rows)


@pytest.mark.parametrize("per_prompt", [16, 64])
def test_copies_of_context_parallel_ranks_are_within_the_largest(per_prompt: int) -> None:
    layout = TrainLayout(2, cp=2)
    sizes = f"steps.samples_per_prompt={per_prompt}", "train.share_prompts=true"
    config = config_of(6000, 8, 16384, "steps.prompts_per_step=2", *sizes)
    largest = largest_micro_batch(config, shape_of(config), layout)
    count, prefix, own = 2 * per_prompt, 6000, 12  # with padding
    inputs = ScheduleInputs(
        lengths=(6008,) * count,
        groups=tuple(number // per_prompt for number in range(count)),
        prompt_lengths=(6000,) * count,
        part_sizes=(count,),
        num_ranks=1,
        token_budget=16384,
        multiple=1,
        attention_length=attention_length(shape_of(config)),
        pad_each=4,
    )
    most = 0
    for micro in schedule_samples(inputs)[0]:
        bounds, prompts = [0], list[int]()
        for group in sorted({inputs.groups[sample] for sample in micro}):
            members = [sample for sample in micro if inputs.groups[sample] == group]
            prompts += [-1, *[len(prompts)] * len(members)]
            bounds += [bounds[-1] + prefix]
            bounds += [bounds[-1] + own * number for number in range(1, len(members) + 1)]
        continued = [0 if prompt < 0 else prefix - 1 for prompt in prompts]
        most = max(most, gathered_rows(tuple(bounds), tuple(prompts), tuple(continued), layout.cp))
    # Shorter prompts copy more rows per position, so the bound is not reached here.
    assert 0.5 * largest.key_rows < most <= largest.key_rows
