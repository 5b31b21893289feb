"""Sizes counted from one layer of each kind are those of the whole layouts."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod

import pytest
from some_cases import some
from weight_cases import random_case, random_case_with_experts

from hybridrl.hybrid_engine.memory.alias import shared_names
from hybridrl.models.expert_stacks import stacks_are_even
from hybridrl.models.weights import fused_layout, megatron_layout, megatron_layouts
from hybridrl.services.planner.phase_memory import fullest
from hybridrl.services.planner.sizes import engine_elements, fullest_stage, shared_elements


@pytest.mark.parametrize("batch", some(range(4), 1))
def test_sizes_are_those_of_whole_layouts(batch: int) -> None:
    shared = 0
    for seed in range(batch, 120, 4):
        case = (random_case if seed % 3 else random_case_with_experts)(seed)
        family, rng = case.family, random.Random(seed)
        layers = case.train.pp * case.train.vpp * rng.randint(1, 3)
        shape = replace(case.shape, num_layers=layers)
        if shape.moe is not None:
            dense = tuple(i for i in range(layers) if rng.random() < 0.3)[: layers - 1]
            shape = replace(shape, moe=replace(shape.moe, dense_layers=dense))
        head = rng.choice(("lm", "value"))
        parts = megatron_layouts(family, shape, case.train, head)
        assert fullest_stage(family, shape, case.train, head) == fullest(parts), seed
        tp, ep = (case.rollout.tp, case.rollout_ep) if case.engine == "fused" else (1, 1)
        engine = fused_layout(family, shape, tp, 0, ep)
        assert engine_elements(family, shape, tp, ep) == fullest([engine]).num, seed
        found = shared_elements(family, shape, case.train, tp, ep)
        by_stage = []
        for stage in range(case.train.pp):
            rank = case.train.rank_at(tp=0, cp=0, dp=0, pp=stage)
            source = megatron_layout(family, shape, case.train, rank)
            is_even = stacks_are_even(source.shapes, case.train, True)
            names = shared_names(source, engine, is_even)
            by_stage.append(sum(prod(engine.shapes[name]) for name in names))
        assert found == min(by_stage), seed
        shared += found > 0
    assert shared > 0
