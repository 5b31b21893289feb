"""Engines that hold LoRA adapters: PEFT on transformers' model is the oracle."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import (
    draw_adapter,
    hf_tensors,
    merge_random,
    save_adapter,
    with_adapter,
    write_tensors,
)
from engine_cases import (
    ALL_MODELS,
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
from packaged import CLASSES, needs
from torch import Tensor

from hybridrl.errors import CheckpointError, ModelError, UserError
from hybridrl.models.adapters.base_reference import BaseReference
from hybridrl.models.adapters.lora import ALL_LINEAR, Lora
from hybridrl.models.adapters.peft_directory import read_peft
from hybridrl.models.adapters.peft_files import write_peft
from hybridrl.models.adapters.rows import HF_B, adapted, base_of, is_adapter, target_names
from hybridrl.models.adapters.slots import POLICY, is_slot
from hybridrl.models.family import Family, resolve_family
from hybridrl.models.sources import TrainingShard
from hybridrl.models.weights import fused_layout
from hybridrl.rollout.common.other_adapters import keep_policy, read_adapter
from hybridrl.rollout.engine import Request, SamplingParams, generate
from hybridrl.rollout.hf.adapter import HfEngine
from hybridrl.rollout.registry import ENGINES

pytestmark = pytest.mark.usefixtures("process_group", "closed_engines")

# The first engine of a package takes seconds to import, which other contract tests do anyway.
HOLDING = [pytest.param(name, marks=needs(name)) for name in CLASSES] + ["hf"]
QWEN2, MIXTURE, LATENT, DIRECT = "qwen2-tied", "qwen3-moe", "deepseek-v3", "deepseek-v3-plain"
SINKS = "gpt-oss"
LATENT_TARGETS = (
    *("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj"),
    *("up_proj", "down_proj"),
)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, stop_token_ids=(STOP,))


def name_of(engine: str, model: str) -> str:
    """Returns the name of an engine's variant of a model."""
    return model if engine == "hf" else f"{engine}-{model}"


def family_of(name: str, lora: Lora) -> tuple[Family, list[str]]:
    """Returns the family of an engine's model with adapters, and the names of adapted layers."""
    plain = resolve_family(None, ALL_MODELS[name])
    names = target_names(plain, plain.shape(ALL_MODELS[name]))
    return adapted(plain, lora), [one for one in names if {one, ALL_LINEAR} & {*lora.targets}]


def start(engine: str, name: str, family: Family, adapters: tuple[str, ...] = ()) -> Any:
    """Starts an engine with the policy's adapter and others."""
    if engine == "hf":
        config = ALL_MODELS[name]
        return HfEngine(config, "float32", "cpu", 8, family, adapters=adapters)
    return start_packaged(name, family=family, adapters=adapters)


def differences(engine: Any, peft: Any, requests: list[Request]) -> float:
    """Returns the largest difference of log-probabilities; inf if a greedy token differs."""
    worst = 0.0
    for request, done in zip(requests, generate(engine, requests), strict=True):
        expected = expected_logps(peft, request, done)
        worst = max(worst, float((expected - torch.tensor(done.logps)).abs().max()))
        if not request.sampling.temperature:
            tokens = full_logits(peft, request, done).argmax(-1).tolist()
            worst = worst if tokens == list(done.tokens) else float("inf")
    return worst


def worst_logp(engine: Any, peft: Any, sampling: Any, seed: int = 0) -> float:
    """Returns what `differences` returns for five requests."""
    return differences(engine, peft, make_requests(5, sampling, seed))


@pytest.mark.parametrize("engine_name", HOLDING)
def test_engine_with_an_adapter_generates_as_peft_does_after_every_update(engine_name: str) -> None:
    """Rank 4 in slots of rank 8, all linear layers, biases of q, k and v."""
    lora, name = Lora(4, 10.0), name_of(engine_name, QWEN2)
    family, targets = family_of(name, lora)
    engine = start(engine_name, name, family)
    addresses = {name: tensor.data_ptr() for name, tensor in engine.tensors().items()}
    peft = with_adapter(make_reference(name), lora, targets, seed=0)
    tensors = hf_tensors(peft, lora)
    write_tensors(engine, tensors, 0)
    assert worst_logp(engine, peft, MIXED) < LOGP_TOLERANCE
    with peft.disable_adapter():
        assert worst_logp(engine, peft, GREEDY) > 0.1, "the adapter changes something"
    taken: list[Any] = noted_steps(engine) if engine_name == "vllm" else [True]
    for version in range(1, 5):
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
    if engine_name != "hf":
        check_unused(engine, peft, tensors)


def noted_steps(engine: Any) -> list[Any]:
    """Returns a list to which each step that the shortcuts of vLLM's scheduler take is added."""
    taken, take_steps = [], engine._decoding.take_steps

    def noted() -> Any:
        steps = take_steps()
        taken.extend(steps)
        return steps

    engine._decoding.take_steps = noted
    return taken


@pytest.mark.parametrize("engine_name", HOLDING)
def test_requests_of_one_batch_use_the_adapters_that_they_name(engine_name: str, tmp_path) -> None:
    """Policy, an earlier version, a PEFT directory of other layers, and none; the same prompts."""
    lora, name = Lora(4, 10.0), name_of(engine_name, QWEN2)
    family, targets = family_of(name, lora)
    engine = start(engine_name, name, family, ("earlier", "other"))
    assert list(engine.adapters) == [POLICY, "earlier", "other"]
    models = {
        key: with_adapter(make_reference(name), lora, targets, 3) for key in (POLICY, "earlier")
    }
    narrow = Lora(2, 6.0, ("q_proj", "down_proj"))
    models["other"] = with_adapter(make_reference(name), narrow, ["q_proj", "down_proj"], 5)
    models[None] = make_reference(name)
    save_adapter(models["other"], tmp_path)
    write_tensors(engine, hf_tensors(models["earlier"], lora), 0)
    engine.begin_update()
    keep_policy(engine, "earlier")
    read_adapter(engine, "other", read_peft(tmp_path))
    engine.finish_update(0)
    taken: list[Any] = noted_steps(engine) if engine_name == "vllm" else [True]
    for version in range(1, 4):
        engine.sleep()
        draw_adapter(models[POLICY], 10 + version)
        write_tensors(engine, hf_tensors(models[POLICY], lora), version)
        check_each(engine, models)
    assert taken
    refuse_adapters(engine, tmp_path, name)


def check_each(engine: Any, models: Mapping[str | None, Any]) -> None:
    """Compares every adapter with its own model, in one batch, and with another's."""
    requests = [
        replace(request, request_id=10 * request.request_id + place, adapter=key)
        for place, key in enumerate(models)
        for request in make_requests(2, GREEDY)
    ]
    requests.sort(key=lambda request: request.request_id)  # neighbours have other adapters
    done = dict(zip(requests, generate(engine, requests), strict=True))
    for request, one in done.items():
        tokens = full_logits(models[request.adapter], request, one).argmax(-1).tolist()
        assert tokens == list(one.tokens), request.adapter
        expected = expected_logps(models[request.adapter], request, one)
        assert (expected - torch.tensor(one.logps)).abs().max() < LOGP_TOLERANCE, request.adapter
    answers = {(request.adapter, one.tokens) for request, one in done.items()}
    assert len({tokens for _, tokens in answers}) > len(models), "adapters differ"


def refuse_adapters(engine: Any, folder: Any, name: str) -> None:
    """Adapters that an engine does not hold, or cannot hold, are refused by name."""
    request = replace(make_requests(1, GREEDY)[0], adapter="nobody")
    with pytest.raises(ValueError, match="names adapter 'nobody'; the engine has policy, earlier"):
        engine.submit([request])
    assert not engine.has_unfinished
    with pytest.raises(KeyError, match="nobody"):
        engine.adapter_tensors("nobody")
    wide = Lora(12, 6.0, ("q_proj",))
    save_adapter(with_adapter(make_reference(name), wide, ["q_proj"], 5), folder / "wide")
    with pytest.raises(CheckpointError, match="got rank 12; allowed: at most"):
        read_adapter(engine, "other", read_peft(folder / "wide"))


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
    """Lent memory has other content, which an update clears; a dropped adapter is noticed."""
    for name, tensor in engine.tensors().items():
        if is_slot(name):
            tensor.fill_(7.0)
    write_tensors(engine, dict(tensors), 31)
    assert worst_logp(engine, peft, GREEDY) < LOGP_TOLERANCE
    if engine.name == "vllm":
        engine._live.llm.engine_core.engine_core.model_executor.driver_worker.worker.remove_lora(1)
        message = r"adapters \[None, None\] in its slots"
    else:
        engine._scheduler.tp_worker.model_runner.lora_manager.memory_pool.remove_lora(POLICY)
        message = "adapter policy in slot None instead of 1"
    with pytest.raises(RuntimeError, match=message):
        write_tensors(engine, dict(tensors), 32)


@pytest.mark.parametrize("engine_name", HOLDING[:-1])
@pytest.mark.parametrize(
    ("model", "targets"),
    [
        (QWEN2, ("q_proj", "up_proj")),  # k, v and gate have slots without an adapter
        (MIXTURE, (ALL_LINEAR,)),
        pytest.param(SINKS, (ALL_LINEAR,), marks=pytest.mark.full),
        (LATENT, LATENT_TARGETS),
    ],
)
def test_engine_adapts_some_layers_and_shares_the_trainers_memory(
    engine_name: str, model: str, targets: tuple[str, ...]
) -> None:
    name = name_of(engine_name, model)
    if name not in PACKAGED_ALL:
        pytest.skip(f"{engine_name} refuses {model}")
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


@pytest.mark.parametrize("engine_name", HOLDING[:-1])
def test_engines_refuse_adapters_that_they_cannot_hold(engine_name: str) -> None:
    refused = [(LATENT, "kv_b_proj")]
    refused += [(DIRECT, "kv_a_proj_with_mqa and q_proj")] * (engine_name == "sglang")
    for model, layers in refused:
        targets = (ALL_LINEAR,) if model == LATENT else ("q_proj", "kv_a_proj_with_mqa", "o_proj")
        family, _ = family_of(name_of(engine_name, model), Lora(8, 8.0, targets))
        with pytest.raises(UserError, match=f"targets without {layers}"):
            start(engine_name, name_of(engine_name, model), family)
    assert not opened
    assert [one for one, traits in ENGINES.items() if traits.takes_adapters] == [
        *("hf", "vllm", "sglang")
    ]


@pytest.mark.parametrize("engine_name", HOLDING[:-1])
def test_engine_refuses_slots_of_another_shape(engine_name: str, monkeypatch) -> None:
    import importlib

    adapters = importlib.import_module(f"hybridrl.rollout.{engine_name}.adapters")
    module = (
        adapters
        if engine_name == "sglang"
        else importlib.import_module("hybridrl.rollout.vllm.adapter")
    )
    real = adapters.slot_tensors
    some = "model.layers.0.self_attn.qkv_proj.lora_b_stacked.1"

    def turned(*args: Any) -> dict[str, Tensor]:
        found = real(*args)
        return {**found, some: found[some].T}

    monkeypatch.setattr(module, "slot_tensors", turned)
    name = name_of(engine_name, QWEN2)
    family, _ = family_of(name, Lora(8, 8.0))
    with pytest.raises(ModelError, match=f"engine parameter {some}: got shape"):
        start(engine_name, name, family)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("engine_name", [pytest.param("vllm", marks=needs("vllm"))])
def test_an_exported_directory_generates_in_peft_and_in_vllm_alone_what_the_engine_generates(
    engine_name: str, tmp_path: Path
) -> None:
    from peft import PeftModel

    lora, name = Lora(8, 12.0, rslora=True), name_of(engine_name, QWEN2)
    family, targets = family_of(name, lora)
    peft = with_adapter(make_reference(name), lora, targets, seed=4)
    engine = start(engine_name, name, family)
    write_tensors(engine, hf_tensors(peft, lora), 0)
    longest = SamplingParams(temperature=0.0, max_new_tokens=12)
    requests = make_requests(4, longest)
    expected = [list(done.tokens) for done in generate(engine, requests)]
    make_reference(name).save_pretrained(tmp_path / "base")
    unscaled = {
        key: tensor / (lora.scale if key.endswith(HF_B) else 1)
        for key, tensor in hf_tensors(peft, lora).items()
        if is_adapter(key)
    }
    base = BaseReference(str(tmp_path / "base"), None, None, "")
    write_peft(tmp_path / "exported", unscaled, lora, base)
    loaded = PeftModel.from_pretrained(make_reference(name), tmp_path / "exported").eval()
    for request, tokens in zip(requests, expected, strict=True):
        whole = torch.tensor([[*request.prompt, *tokens]])
        best = loaded(whole).logits[0].argmax(-1).tolist()
        assert best[len(request.prompt) - 1 : -1] == tokens
    prompts = json.dumps([list(request.prompt) for request in requests])
    script = Path(__file__).with_name("plain_vllm.py")
    folders = tmp_path / "base", tmp_path / "exported"
    command = [sys.executable, str(script), *map(str, folders), prompts]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads(ran.stdout.strip().splitlines()[-1]) == expected
