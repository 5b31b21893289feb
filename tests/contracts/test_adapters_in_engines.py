"""Engines that hold a LoRA adapter: PEFT on transformers' model is the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from adapter_cases import draw_adapter, hf_tensors, merge_random, with_adapter, write_tensors
from engine_cases import (
    LOGP_TOLERANCE,
    MIXED,
    PACKAGED_ALL,
    STOP,
    expected_logps,
    full_logits,
    make_reference,
    make_requests,
    opened,
    start_packaged,
)
from packaged import needs
from torch import Tensor

from hybridrl.errors import ModelError, UserError
from hybridrl.models.adapters.lora import ALL_LINEAR, Lora
from hybridrl.models.adapters.rows import adapted, base_of, target_names
from hybridrl.models.adapters.slots import is_slot
from hybridrl.models.family import Family, resolve_family
from hybridrl.models.sources import TrainingShard
from hybridrl.models.weights import fused_layout
from hybridrl.rollout.engine import SamplingParams, generate
from hybridrl.rollout.registry import ENGINES

pytestmark = [*needs("vllm"), pytest.mark.usefixtures("process_group", "closed_engines")]

QWEN2, MIXTURE, LATENT = "vllm-qwen2-tied", "vllm-qwen3-moe", "vllm-deepseek-v3"
SINKS = "vllm-gpt-oss"
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, stop_token_ids=(STOP,))


def family_of(name: str, lora: Lora) -> tuple[Family, list[str]]:
    """Returns the family of an engine's model with adapters, and the names of adapted layers."""
    plain = resolve_family(None, PACKAGED_ALL[name])
    names = target_names(plain, plain.shape(PACKAGED_ALL[name]))
    return adapted(plain, lora), [one for one in names if {one, ALL_LINEAR} & {*lora.targets}]


def worst_logp(engine: Any, peft: Any, sampling: Any, seed: int = 0) -> float:
    """Returns the largest difference of log-probabilities; inf if a greedy token differs."""
    requests, worst = make_requests(5, sampling, seed), 0.0
    for request, done in zip(requests, generate(engine, requests), strict=True):
        expected = expected_logps(peft, request, done)
        worst = max(worst, float((expected - torch.tensor(done.logps)).abs().max()))
        if not request.sampling.temperature:
            tokens = full_logits(peft, request, done).argmax(-1).tolist()
            worst = worst if tokens == list(done.tokens) else float("inf")
    return worst


def test_vllm_engine_with_an_adapter_generates_as_peft_does_after_every_update() -> None:
    """Rank 4 in slots of rank 8, all linear layers, biases of q, k and v."""
    lora = Lora(4, 10.0)
    family, targets = family_of(QWEN2, lora)
    engine = start_packaged(QWEN2, family=family)
    addresses = {name: tensor.data_ptr() for name, tensor in engine.tensors().items()}
    peft = with_adapter(make_reference(QWEN2), lora, targets, seed=0)
    tensors = hf_tensors(peft, lora)
    write_tensors(engine, tensors, 0)
    assert worst_logp(engine, peft, MIXED) < LOGP_TOLERANCE
    with peft.disable_adapter():
        assert worst_logp(engine, peft, GREEDY) > 0.1, "the adapter changes something"
    taken, take_steps = [], engine._decoding.take_steps

    def noted() -> Any:
        steps = take_steps()
        taken.extend(steps)
        return steps

    engine._decoding.take_steps = noted
    for version in range(1, 21):
        engine.sleep(keeps_memory=version % 2 == 0)
        draw_adapter(peft, version)
        before, tensors = tensors, hf_tensors(peft, lora)
        write_tensors(engine, tensors, version)
        worst = worst_logp(engine, peft, GREEDY)  # the same prompts: nothing cached is used
        assert worst < LOGP_TOLERANCE, (version, worst)
    assert taken, "the scheduler's shortcuts work with an adapter"
    found = {name: tensor.data_ptr() for name, tensor in engine.tensors().items()}
    assert found == addresses
    check_faults(engine, peft, tensors, before)
    check_unused(engine, peft, tensors)


def check_faults(
    engine: Any, peft: Any, tensors: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> None:
    """Each fault of a transfer must show in the comparison. `before` is the last version."""

    def spoiled(change: Any) -> float:
        changed = dict(tensors)
        change(changed)
        write_tensors(engine, changed, 30)
        return worst_logp(engine, peft, GREEDY)

    layer, old = "model.layers.1.", {n: t for n, t in tensors.items() if ".lora_B" in n}

    def swap(changed: dict[str, Tensor]) -> None:
        names = [f"{layer}mlp.{proj}_proj.lora_B.weight" for proj in ("gate", "up")]
        changed.update(zip(names, (tensors[name] for name in reversed(names)), strict=True))

    def scale(changed: dict[str, Tensor]) -> None:
        changed.update({name: 2 * tensor for name, tensor in old.items()})

    def stale(changed: dict[str, Tensor]) -> None:
        name = f"{layer}self_attn.o_proj.lora_A.weight"
        changed[name] = before[name]

    def turned(changed: dict[str, Tensor]) -> None:
        name = f"{layer}mlp.down_proj.lora_A.weight"
        changed[name] = tensors[name].flip(1)  # as if ranks were in the wrong order

    for change in (swap, scale, stale, turned):
        assert spoiled(change) > 10 * LOGP_TOLERANCE, change
    assert spoiled(lambda changed: None) < LOGP_TOLERANCE


def check_unused(engine: Any, peft: Any, tensors: Mapping[str, Tensor]) -> None:
    """Memory that was lent has other content; an update must clear what no adapter fills. An
    adapter that vLLM has dropped must be noticed.
    """
    for name, tensor in engine.tensors().items():
        if is_slot(name):
            tensor.fill_(7.0)
    write_tensors(engine, dict(tensors), 31)
    assert worst_logp(engine, peft, GREEDY) < LOGP_TOLERANCE
    engine._live.llm.engine_core.engine_core.model_executor.driver_worker.worker.remove_lora(1)
    with pytest.raises(RuntimeError, match=r"adapters \[None\] in its slots"):
        write_tensors(engine, dict(tensors), 32)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        (QWEN2, ("q_proj", "up_proj")),  # k, v and gate have slots without an adapter
        (MIXTURE, (ALL_LINEAR,)),
        pytest.param(SINKS, (ALL_LINEAR,), marks=pytest.mark.full),
        (LATENT, ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj", "up_proj", "down_proj")),
    ],
)
def test_vllm_engine_adapts_some_layers_and_shares_the_trainers_memory(
    name: str, targets: tuple[str, ...]
) -> None:
    family, _ = family_of(name, Lora(8, 12.0, targets))
    shape, shard = family.shape(PACKAGED_ALL[name]), None
    merged, tensors = merge_random(make_reference(name), family, shape, seed=5)
    # A trainer whose frozen base has the engine's layout: the engine needs no copy of it.
    if shape.moe is None:
        base = fused_layout(base_of(family), shape, 1, 0)
        own = {one: torch.zeros(size) for one, size in base.shapes.items()}
        shard = TrainingShard(base, own)
    engine = start_packaged(name, family=family, shard=shard)
    expected = set() if shard is None else {one for one in engine.tensors() if not is_slot(one)}
    assert engine.shared == expected
    write_tensors(engine, tensors, 0)
    assert worst_logp(engine, merged, GREEDY) < LOGP_TOLERANCE
    assert worst_logp(engine, make_reference(name), GREEDY) > 0.1
    wrapped = [one for one, _ in engine.model.named_modules() if one.endswith(".base_layer")]
    assert wrapped and not any("embed" in one or "lm_head" in one for one in wrapped)
    assert not any(one.endswith(("gate.base_layer", "experts.base_layer")) for one in wrapped)


def test_engines_refuse_adapters_that_they_cannot_hold() -> None:
    family, _ = family_of(LATENT, Lora(8, 8.0))
    with pytest.raises(UserError, match="targets without kv_b_proj"):
        start_packaged(LATENT, family=family)
    assert not opened
    assert [name for name, traits in ENGINES.items() if traits.takes_adapters] == ["hf", "vllm"]


def test_vllm_engine_refuses_slots_of_another_shape(monkeypatch) -> None:
    from hybridrl.rollout.vllm import adapter

    real = adapter.slot_tensors
    some = "model.layers.0.self_attn.qkv_proj.lora_b_stacked.1"
    monkeypatch.setattr(
        adapter, "slot_tensors", lambda model: {**real(model), some: real(model)[some].T}
    )
    family, _ = family_of(QWEN2, Lora(8, 8.0))
    with pytest.raises(ModelError, match=f"engine parameter {some}: got shape"):
        start_packaged(QWEN2, family=family)
