"""vLLM with FP8 weights, on CPUs with stand-ins for its kernels (fp8_on_cpu.py)."""

from __future__ import annotations

from typing import Any

import engine_cases
import pytest
import torch
from engine_cases import TINY, close_engines, start_packaged
from fp8_on_cpu import quantized_model, stand_in
from packaged import needs
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.models.family import resolve_family
from hybridrl.models.hf.transformers_weights import checkpoint_tensors
from hybridrl.models.quantized import quantized_shapes, unquantized_modules
from hybridrl.models.sources import FullWeights
from hybridrl.models.weights import hf_layout, hf_shapes
from hybridrl.parallel.groups import World
from hybridrl.platform import Platform
from hybridrl.rollout.engine import Request, SamplingParams, generate
from hybridrl.training.quantized_weights import QuantizedWeights

pytestmark = [*needs("vllm"), pytest.mark.full, pytest.mark.usefixtures("process_group")]

WIDE: dict[str, Any] = {
    **TINY,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "vllm-fp8-qwen2": {**WIDE, "model_type": "qwen2", "tie_word_embeddings": True},
    "vllm-fp8-qwen3-moe": {
        **WIDE,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in(monkeypatch)
    for name, config in MODELS.items():
        monkeypatch.setitem(engine_cases.PACKAGED_ALL, name, config)
    yield
    close_engines()


@pytest.mark.parametrize("name", list(MODELS))
def test_fp8_weights_from_a_sync_give_the_log_probabilities_of_rounded_weights(
    name: str, kernels: None
) -> None:
    config = MODELS[name]
    family = resolve_family(None, config)
    shape = family.shape(config)
    quantized = quantized_shapes(family, shape)
    engine = start_packaged(
        name,
        dtype="bfloat16",
        quantization="fp8",
        unquantized=tuple(unquantized_modules(family, shape)),
    )
    fields = {key: value for key, value in config.items() if key != "model_type"}
    made = AutoConfig.for_model(config["model_type"], **fields)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()
    shapes = hf_shapes(family, shape)
    weights = {one: torch.empty(size, dtype=torch.bfloat16) for one, size in shapes.items()}
    source = QuantizedWeights(FullWeights([hf_layout(shapes)], weights), 0, quantized)
    world = World(Platform.detect(), 60)
    hybrid = HybridEngine(source, engine, world, staging_bytes=1 << 16, verify_every=1)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=12)
    requests = [Request(i, (5 + i, 3, 9), 7 + i, sampling) for i in range(4)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            value = 0.12 * noise if parameter.ndim > 1 else 1 + 0.1 * noise
            parameter.data.copy_(value.bfloat16())
        for one, tensor in checkpoint_tensors(model, made.to_dict()).items():
            if one in weights:
                weights[one].copy_(tensor)
        stats = hybrid.to_rollout()
        assert stats.verify_seconds > 0
        done = generate(engine, requests)
        gaps = {"rounded": 0.0, "exact": 0.0}
        for kind in ("exact", "rounded"):
            if kind == "rounded":
                quantized_model(model, quantized)
            for request, one in zip(requests, done, strict=True):
                ids = torch.tensor([request.prompt + one.tokens])
                with torch.no_grad():
                    logits = model(ids).logits[0, len(request.prompt) - 1 : -1]
                logps = logits.log_softmax(-1).gather(-1, torch.tensor(one.tokens)[:, None])[:, 0]
                gaps[kind] += float((logps - torch.tensor(one.logps)).abs().mean()) / len(done)
        # The engine computes in bf16, transformers in fp32: measured 0.01 and 0.1.
        assert gaps["rounded"] < 0.05, gaps
        assert gaps["exact"] > 2 * gaps["rounded"], gaps
    assert not engine.shared
    held = engine.memory()["weights"].num_bytes
    assert held < 0.7 * sum(2 * one.numel() for one in weights.values())
