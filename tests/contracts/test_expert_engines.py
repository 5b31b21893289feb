"""Engines with mixtures of experts: what they generate, and where each expert must lie."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import (
    EXPERT_MODELS,
    FUSED_EXPERTS,
    LOGP_TOLERANCE,
    MIXED,
    PACKAGED_EXPERT_MODELS,
    VOCAB,
    expected_logps,
    make_engine,
    make_reference,
    make_requests,
    start_packaged,
    write_weights,
)
from layout_tensors import allocate
from packaged import CLASSES, FUSED_LAYOUT, load_symbol, needs
from tiny_models import chosen_by

from hybridrl.errors import ModelError
from hybridrl.generation.saved_rollouts import rollout_state
from hybridrl.models.family import resolve_family
from hybridrl.models.hf.transformers_weights import checkpoint_tensors
from hybridrl.models.sources import TrainingShard
from hybridrl.models.weights import (
    RankLayout,
    check_layout,
    fused_layout,
    hf_shapes,
    megatron_layout,
)
from hybridrl.parallel.layout import TrainLayout
from hybridrl.rollout import registry
from hybridrl.rollout.common.cpu_experts import experts_forward
from hybridrl.rollout.engine import Completion, Request, SamplingParams, generate
from hybridrl.rollout.hf.experts import ChosenExperts

pytestmark = pytest.mark.usefixtures("process_group", "closed_engines")

RECORDING = [
    name
    for name in FUSED_EXPERTS
    if registry.ENGINES[name.values[0].partition("-")[0]].records_experts
]


def records(name: str) -> bool:
    """Whether the engine of this model, and transformers here, tell which experts they chose."""
    engine = name.partition("-")[0]
    if engine in registry.ENGINES and not registry.ENGINES[engine].records_experts:
        return False
    modules = make_reference(name).named_modules()
    names = (".gate", ".router")
    return all(hasattr(part, "top_k") for part_name, part in modules if part_name.endswith(names))


@pytest.mark.parametrize("name", [*EXPERT_MODELS, *FUSED_EXPERTS])
def test_engine_with_experts_draws_from_the_distribution_of_transformers(name: str) -> None:
    """Also after an update: nothing of the older weights is kept, packed or not."""
    engine = make_engine(name, records_experts=records(name))
    check_layout(engine.layout())
    for version in range(2):
        model = make_reference(name, version)
        write_weights(engine, model, version)
        requests = make_requests(len(MIXED), MIXED)
        # Of one prompt, longer than a block of the KV cache: several are computed once.
        prompt = tuple(2 + i % (VOCAB - 2) for i in range(40))
        requests += [replace(one, request_id=i, prompt=prompt) for i, one in enumerate(requests)]
        for request, completion in zip(requests, generate(engine, requests), strict=True):
            if records(name):
                check_experts(model, request, completion)
            expected = expected_logps(model, request, completion)
            torch.testing.assert_close(
                torch.tensor(completion.logps), expected, rtol=0, atol=LOGP_TOLERANCE
            )


def chosen_experts(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """Returns what transformers' routers choose for these tokens, (T, layers, experts a token)."""
    with torch.no_grad(), chosen_by(model) as found:
        model(torch.tensor([tokens]))
    return torch.stack(found, 1)


def check_experts(model: Any, request: Request, completion: Completion) -> None:
    expected_TLK = chosen_experts(model, (*request.prompt, *completion.tokens[:-1]))
    assert completion.blobs["routed_experts"].dtype == np.uint8
    found_TLK = torch.from_numpy(completion.blobs["routed_experts"]).long().view(expected_TLK.shape)
    assert torch.equal(found_TLK.sort(-1).values, expected_TLK.sort(-1).values)


@pytest.mark.parametrize("name", [*EXPERT_MODELS, *RECORDING])
def test_experts_that_were_recorded_stay_when_other_weights_go_on(name: str) -> None:
    """Also in the sampler's order: requests leave the engine while weights change."""
    if not records(name):
        pytest.skip("routers of this transformers do not choose")
    engine, sampling = make_engine(name, records_experts=True), SamplingParams(max_new_tokens=12)
    for version, are_taken_out in enumerate((True, False)):
        older, newer = make_reference(name, version), make_reference(name, version + 1)
        requests = make_requests(4, sampling)
        engine.submit(requests[:3])
        for number in range(5):
            if number == 2:
                engine.pending()  # as for a checkpoint
                engine.submit(requests[3:])
            engine.step()
        if are_taken_out:
            begun = engine.pending()
            engine.clear()
            write_weights(engine, newer, version + 1)
        else:
            write_weights(engine, newer, version + 1)
            begun = engine.pending()
            engine.clear()
        saved = json.loads(json.dumps(rollout_state([], begun, [], {})))["requests"]
        done = generate(engine, [Request.from_dict(one) for one in saved])
        assert len({len(one.tokens) for one in begun}) > 1
        for one, completion in zip(begun, done, strict=True):
            assert 0 < len(one.tokens) < 12
            read = (*one.prompt, *one.tokens[:-1])
            assert len(one.blobs["routed_experts"]) == len(read)
            whole = (*one.prompt, *completion.tokens[:-1])
            later = chosen_experts(newer, whole)[len(read) :]
            expected_TLK = torch.cat((chosen_experts(older, read), later)).sort(-1).values
            found_TLK = (
                torch.from_numpy(completion.blobs["routed_experts"]).long().view(expected_TLK.shape)
            )
            assert torch.equal(found_TLK.sort(-1).values, expected_TLK), are_taken_out


def test_routers_that_do_not_choose_are_refused() -> None:
    model = make_reference("deepseek-v3")
    for name, part in model.named_modules():
        if name.endswith(".gate"):
            vars(part).pop("top_k", None)
    with pytest.raises(ModelError, match="that choose experts"):
        ChosenExperts(model)


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_checkpoint_tensors_are_those_of_the_table_and_live(name: str) -> None:
    model, config = make_reference(name), EXPERT_MODELS[name]
    family = resolve_family(None, config)
    tensors = checkpoint_tensors(model, config)
    shapes = {tensor: tuple(value.shape) for tensor, value in tensors.items()}
    assert shapes == hf_shapes(family, family.shape(config))
    stacks = {n: p for n, p in model.named_parameters() if ".experts." in n}
    for tensor in tensors.values():
        tensor.fill_(7.0)
    assert all((parameter == 7.0).all() for parameter in stacks.values())


Change = Callable[[str], str]


def swapped(one: str, other: str) -> Change:
    return lambda name: name.replace(one, "?").replace(other, one).replace("?", other)


def renamed(layout: RankLayout, change: Change) -> RankLayout:
    regions = (dataclasses.replace(region, hf=change(region.hf)) for region in layout.regions)
    return dataclasses.replace(layout, regions=tuple(regions))


DEEPSEEK = tuple(f"{engine}-deepseek-v3" for engine in CLASSES)
OF_DEEPSEEK = [
    pytest.param(name, marks=needs(name.partition("-")[0]), id=name.partition("-")[0])
    for name in DEEPSEEK
]
# A change of a model's table, and the parameter that is named.
LATENT_FAULTS = [
    (
        swapped("layers.2.mlp.shared_experts.gate", "layers.2.mlp.shared_experts.up"),
        r"layers.2.mlp.shared_experts.gate_up_proj.weight\[0:64, 0:128\]",
    ),
    (
        swapped("layers.0.self_attn.q_a_proj", "layers.0.self_attn.kv_a_proj_with_mqa"),
        r"layers.0.self_attn.fused_qkv_a_proj.weight",
    ),
    (
        swapped("layers.1.mlp.gate.e_score", "layers.2.mlp.gate.e_score"),
        r"layers.2.mlp.gate.e_score_correction_bias",
    ),
]
EXPERT_FAULTS = [
    (
        swapped("layers.3.mlp.experts.2.", "layers.3.mlp.experts.5."),
        r"layers.3.mlp.experts.routed_experts.w13_weight/2\[0:24, 0:128\]",
    ),
    (
        swapped("layers.0.mlp.experts.7.gate_proj", "layers.0.mlp.experts.7.up_proj"),
        r"layers.0.mlp.experts.routed_experts.w13_weight/7\[0:24, 0:128\]",
    ),
    (
        swapped("layers.0.mlp.experts.0.down_proj", "layers.0.mlp.experts.1.down_proj"),
        r"layers.0.mlp.experts.routed_experts.w2_weight/0\[0:128, 0:24\]",
    ),
]
FAULTS = [
    *((name, *fault) for name in DEEPSEEK for fault in LATENT_FAULTS),
    *((f"{engine}-qwen3-moe", *fault) for engine in CLASSES for fault in EXPERT_FAULTS),
]


@pytest.mark.parametrize(
    ("model", "change", "named"),
    [pytest.param(*fault, marks=needs(fault[0].partition("-")[0])) for fault in FAULTS],
)
def test_packaged_engine_refuses_a_table_with_experts_elsewhere(
    monkeypatch: pytest.MonkeyPatch, model: str, change: Change, named: str
) -> None:
    def faulty(*arguments: Any) -> RankLayout:
        return renamed(fused_layout(*arguments), change)

    monkeypatch.setattr(FUSED_LAYOUT, faulty)
    with pytest.raises(ModelError, match=named):
        start_packaged(model)


@pytest.mark.parametrize("name", OF_DEEPSEEK)
def test_latent_attention_computes_with_copies_of_the_newest_projection_up(name: str) -> None:
    """Copies of the projection, views on CPUs, have memory of their own here as on GPUs."""
    config = PACKAGED_EXPERT_MODELS[name]
    copies = load_symbol(CLASSES[name.partition("-")[0]].partition(":")[0] + ":COPIES")
    family = resolve_family(None, config)
    layout = megatron_layout(family, family.shape(config), TrainLayout(1), 0)
    shard = TrainingShard(layout, allocate(layout, torch.float32))
    engine = start_packaged(name, shard=shard)
    assert "model.layers.0.self_attn.kv_b_proj.weight" not in engine.shared
    assert "model.layers.0.self_attn.o_proj.weight" in engine.shared
    for attention in (part for part in engine.model.modules() if hasattr(part, copies.values)):
        for copy in (getattr(attention, copies.keys), getattr(attention, copies.values)):
            copy.data = copy.clone()
    for version in range(2):
        model = make_reference(name, version)
        write_weights(engine, model, version)
        requests = make_requests(4, SamplingParams(temperature=0.0, max_new_tokens=9))
        for request, completion in zip(requests, generate(engine, requests), strict=True):
            expected = expected_logps(model, request, completion)
            torch.testing.assert_close(
                torch.tensor(completion.logps), expected, rtol=0, atol=LOGP_TOLERANCE
            )


@pytest.mark.parametrize("model", OF_DEEPSEEK)
def test_packaged_engine_refuses_a_table_without_a_routers_bias(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Such as that of another model with the same parameters beside it."""
    name = "model.layers.1.mlp.gate.e_score_correction_bias"

    def faulty(*arguments: Any) -> RankLayout:
        layout = fused_layout(*arguments)
        shapes = {local: shape for local, shape in layout.shapes.items() if local != name}
        regions = tuple(region for region in layout.regions if region.local != name)
        return dataclasses.replace(layout, shapes=shapes, regions=regions)

    monkeypatch.setattr(FUSED_LAYOUT, faulty)
    with pytest.raises(ModelError, match=name):
        start_packaged(model)


def test_experts_of_all_ranks_add_up_to_those_of_one() -> None:
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden, gate_up, down = drawn(11, 6), drawn(4, 10, 6), drawn(4, 6, 5)
    weights, experts = drawn(11, 2), torch.stack([torch.randperm(4)[:2] for _ in range(11)])
    expected = torch.zeros(11, 6, dtype=torch.float64)
    for token in range(11):
        for weight, expert in zip(weights[token], experts[token].tolist(), strict=True):
            gate, up = (gate_up[expert] @ hidden[token]).split(5)
            expected[token] += weight * (down[expert] @ (gate * gate.sigmoid() * up))
    whole = experts_forward(hidden, gate_up, down, weights, experts.int())
    torch.testing.assert_close(whole, expected)
    parts = []
    for start in (0, 2):
        local = torch.tensor([e - start if start <= e < start + 2 else -1 for e in range(4)])
        own = gate_up[start : start + 2], down[start : start + 2]
        parts.append(experts_forward(hidden, *own, weights, experts.int(), local))
    torch.testing.assert_close(parts[0] + parts[1], expected)


@pytest.mark.parametrize("engine", [pytest.param(e, marks=needs(e)) for e in CLASSES])
def test_routers_that_an_engine_holds_in_float32_follow_the_weights(engine: str) -> None:
    """GLM-4.5's, beside bfloat16; updates write the trainer's memory where it is the same."""
    name, router = f"{engine}-glm4-moe", "model.layers.1.mlp.gate.weight"
    config = PACKAGED_EXPERT_MODELS[name]
    family = resolve_family(None, config)
    layout = megatron_layout(family, family.shape(config), TrainLayout(1), 0)
    shard = TrainingShard(layout, allocate(layout, torch.bfloat16))
    live = start_packaged(name, shard=shard, dtype="bfloat16")
    assert router in live.shared
    parameter = dict(live.model.named_parameters())[router]
    assert (parameter.dtype, live.tensors()[router].dtype) == (torch.float32, torch.bfloat16)
    for version in range(2):
        model = make_reference(name, version).to(torch.bfloat16)
        for part in (one for n, one in model.named_buffers() if n.endswith("correction_bias")):
            part.data = part.float()
        write_weights(live, model, version)
        assert torch.equal(parameter, model.get_parameter(router).float())
        assert live.stale_copy() is None
        generate(live, make_requests(2, SamplingParams(max_new_tokens=5)))
    parameter.data.add_(1)
    assert live.stale_copy() == router
