"""vLLM with recurrent layers: live weights in bfloat16, states that no request inherits, and the
size of the cache. The contract of all engines is compared in float32, which vLLM's kernels for
gated delta nets do not have on CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_cases import (
    ALL_MODELS,
    PACKAGED_HYBRID_MODELS,
    make_reference,
    make_requests,
    start_packaged,
    write_weights,
)
from layout_tensors import allocate
from packaged import needs
from rounded_agreement import check_rounded

from hybridrl.errors import UserError
from hybridrl.models.family import is_kept_in_fp32, resolve_family
from hybridrl.models.sources import TrainingShard
from hybridrl.models.weights import megatron_layout
from hybridrl.parallel.layout import TrainLayout
from hybridrl.rollout.engine import Request, SamplingParams, generate
from hybridrl.rollout.vllm.repairs import QWEN3_5

pytestmark = [*needs("vllm"), pytest.mark.usefixtures("process_group", "closed_engines")]

NAMES = list(PACKAGED_HYBRID_MODELS)
# Engines have the projections of Qwen3-Next in the order of its files, trainers in Qwen3.5's.
GROUPED = "vllm-qwen3-next"
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=16)


def rounded_reference(name: str, seed: int) -> Any:
    """Returns a transformers model in bfloat16, but for what is kept in float32."""
    model = make_reference(name, seed).to(torch.bfloat16)
    for parameter_name, parameter in model.named_parameters():
        if is_kept_in_fp32(parameter_name):
            parameter.data = parameter.data.float()
    return model


def shard_of(name: str) -> TrainingShard:
    config = PACKAGED_HYBRID_MODELS[name]
    family = resolve_family(None, config)
    layout = megatron_layout(family, family.shape(config), TrainLayout(1), 0)
    return TrainingShard(layout, allocate(layout, torch.bfloat16))


@pytest.mark.parametrize("name", NAMES)
def test_hybrid_engine_generates_with_the_trainers_weights_after_each_update(name: str) -> None:
    """Delta nets share the trainer's memory; attention has another order of heads."""
    engine = start_packaged(name, shard=shard_of(name), dtype="bfloat16", kv_cache_bytes=None)
    kinds = {n.split(".linear_attn.")[1] for n in engine.shared if ".linear_attn." in n}
    projections = set() if name == GROUPED else {"in_proj_qkvz.weight", "in_proj_ba.weight"}
    others = {"conv1d.weight", "dt_bias", "norm.weight", "out_proj.weight"}
    assert kinds == projections | others
    assert not any(".qkv_proj." in one for one in engine.shared)
    for version in range(2):
        model = rounded_reference(name, version)
        write_weights(engine, model, version)
        requests = make_requests(12, GREEDY, seed=version)
        print(f"{name}: {check_rounded(model, requests, generate(engine, requests)):.2f}")


@pytest.mark.parametrize("name", NAMES[:1])
def test_hybrid_engine_resets_states_of_requests_and_updates(name: str) -> None:
    """A slot's next request begins without state; a stopped one's is computed by new weights."""
    engine = start_packaged(name, max_batch=2, dtype="bfloat16", kv_cache_bytes=None)
    write_weights(engine, rounded_reference(name, 0), 0)
    requests = make_requests(6, GREEDY)
    crowded = generate(engine, requests)
    for request, completion in zip(requests, crowded, strict=True):
        (alone,) = generate(engine, [request])
        assert alone.tokens == completion.tokens
    engine.submit(requests)
    for _ in range(5):
        engine.step()
    model = rounded_reference(name, 1)
    write_weights(engine, model, 1)
    begun = {one.request_id: one for one in engine.pending() if one.tokens}
    assert begun
    while engine.has_unfinished:
        engine.step()
    done = {one.request_id: one for one in engine.collect()}
    asked, found = list[Request](), list[Any]()
    for request_id, one in begun.items():
        kept, whole = len(one.tokens), done[request_id]
        assert whole.tokens[:kept] == one.tokens
        asked.append(
            replace(one, prompt=one.prompt + one.tokens, tokens=(), logps=(), version=None)
        )
        own = {"tokens": whole.tokens[kept:], "logps": whole.logps[kept:]}
        found.append(replace(whole, **own, version=1, versions=()))
    check_rounded(model, asked, found)


@pytest.mark.parametrize("name", NAMES[:2])
def test_text_models_that_vllm_does_not_register_generate(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in vLLM 0.26, whose classes of them also lack the description of states; with the sections
    of multimodal positions, which those classes do not compute.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models import qwen3_5

    models = {one: found for one, found in ModelRegistry.models.items() if one not in QWEN3_5}
    monkeypatch.setattr(ModelRegistry, "models", models)
    config = {**PACKAGED_HYBRID_MODELS[name], "head_dim": 128}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    sections = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    engine = start_packaged(
        name,
        hf_config={**config, "rope_parameters": rope | sections},
        dtype="bfloat16",
        kv_cache_bytes=None,
    )
    assert type(engine.model).__module__ != qwen3_5.__name__
    assert not engine._live.llm.vllm_config.model_config.uses_mrope
    monkeypatch.setitem(ALL_MODELS, name, {**config, "rope_parameters": rope})
    model = rounded_reference(name, 0)
    write_weights(engine, model, 0)
    requests = make_requests(12, GREEDY)
    check_rounded(model, requests, generate(engine, requests))


def test_cache_of_a_hybrid_model_has_room_for_its_requests() -> None:
    engine = start_packaged(NAMES[0], max_batch=5, dtype="bfloat16", kv_cache_bytes=None)
    cache = engine._live.llm.engine_core.engine_core.scheduler.kv_cache_config
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    assert len({spec.page_size_bytes for spec in specs}) == 1
    kinds = [type(spec).__name__ for spec in specs]
    assert sorted(kinds) == ["FullAttentionSpec", "MambaSpec", "MambaSpec"]
    (size,) = {s.block_size for s, kind in zip(specs, kinds, strict=True) if kind[0] == "F"}
    # Blocks of the longest request, 300 tokens, and the block that is never used.
    assert cache.num_blocks == 5 * (-(-300 // size) + 2) + 1


@pytest.mark.parametrize(
    ("changes", "dtype", "named"),
    [
        ({}, "float32", "model.dtype: got float32; allowed: bfloat16"),
        ({"linear_key_head_dim": 32}, "bfloat16", "linear_key_head_dim: got 32"),
    ],
)
def test_hybrid_engine_refuses_what_its_kernels_on_cpu_do_not_have(
    changes: dict[str, int], dtype: str, named: str
) -> None:
    config = {**PACKAGED_HYBRID_MODELS[NAMES[0]], **changes}
    with pytest.raises(UserError, match=named):
        start_packaged(NAMES[0], hf_config=config, dtype=dtype)
