"""Adapters on the experts of mixtures: PEFT's directories, the hf engine, and grouped layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import canonical, with_layers, write_tensors
from engine_cases import LOGP_TOLERANCE, expected_logps, make_requests
from tiny_models import WITH_EXPERTS, tiny_model
from torch import Tensor

from hybridrl.config.wrapped_models import has_images
from hybridrl.loop.exports import peft_notice
from hybridrl.models.adapters.base_reference import BaseReference
from hybridrl.models.adapters.lora import ALL_LINEAR, EXPERTS, Lora
from hybridrl.models.adapters.peft_directory import OF_EXPERT, check_peft, read_peft
from hybridrl.models.adapters.peft_files import write_peft
from hybridrl.models.adapters.rows import HF_B, A, B, adapted, only_adapters, target_names
from hybridrl.models.adapters.slots import POLICY
from hybridrl.models.family import Family, ModelShape, read_model, resolve_family
from hybridrl.models.hf.directory import read_config
from hybridrl.models.hf.transformers_weights import checkpoint_tensors
from hybridrl.models.megatron.expert_adapters import add_expert_adapter
from hybridrl.models.weights import hf_shapes
from hybridrl.rollout.engine import SamplingParams, generate
from hybridrl.rollout.hf.adapter import HfEngine

LORA = Lora(4, 10.0, (ALL_LINEAR, EXPERTS))
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)
# No dense layers, whose adapters PEFT 0.21 would leave out.
ONLY_EXPERTS = {"qwen3_moe": {"dense_layers": ()}, "mixtral": {}}


# Families whose experts PEFT 0.21 does not stack.
UNSTACKED = ("qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_vl_moe")


def family_of(model: Any, lora: Lora) -> tuple[dict[str, Any], Family, ModelShape]:
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    plain = resolve_family(None, config)
    return config, adapted(plain, lora), plain.shape(config)


def drawn(family: Family, shape: ModelShape, seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.2 * torch.randn(size, generator=generator)
        for name, size in hf_shapes(only_adapters(family), shape).items()
    }


def scaled(adapter: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns an adapter as engines hold it: B with its scale."""
    return {n: one * (LORA.scale if n.endswith(HF_B) else 1) for n, one in adapter.items()}


def oracle(model: Any, family: Family, shape: ModelShape, tensors: dict[str, Tensor]) -> Any:
    """Returns PEFT's model with these adapters; wraps `model` in place."""
    wrapped = with_layers(model, LORA, target_names(family, shape), experts=True).eval()
    views = canonical(wrapped, family, shape)
    assert views.keys() == tensors.keys()
    for name, view in views.items():
        view.copy_(tensors[name])
    return wrapped


@pytest.mark.parametrize("name", ONLY_EXPERTS)
def test_peft_computes_the_same_with_the_written_directory(name: str, tmp_path: Path) -> None:
    """PEFT stacks the tensors of the experts when it loads them; hybridrl reads them again."""
    from peft import PeftModel

    models = [tiny_model(name, **ONLY_EXPERTS[name]).eval() for _ in range(2)]
    _, family, shape = family_of(models[0], LORA)
    tensors, base = drawn(family, shape), BaseReference("b", None, None, "0" * 64)
    write_peft(tmp_path / "peft", tensors, LORA, base)
    found = PeftModel.from_pretrained(models[0], tmp_path / "peft").eval()
    tokens = torch.arange(3, 30)[None]
    with torch.no_grad():
        plain = models[1](tokens).logits
        expected = oracle(models[1], family, shape, tensors)(tokens).logits
        assert torch.equal(found(tokens).logits, expected)
    assert float((expected - plain).abs().max()) > 0.1
    adapter = read_peft(tmp_path / "peft")
    assert adapter.lora.targets == ("experts", "k_proj", "o_proj", "q_proj", "v_proj")
    check_peft(adapter, hf_shapes(only_adapters(family), shape))

    assert peft_notice(family, shape) is None


@pytest.mark.parametrize("name", UNSTACKED)
def test_peft_loads_no_adapters_of_experts_that_it_does_not_stack(
    name: str, tmp_path: Path
) -> None:
    """Exports say so, because PEFT does not."""
    from peft import PeftModel

    model = tiny_model(name)
    model.config.save_pretrained(tmp_path)
    config = read_config(tmp_path, name)
    plain, shape = read_model(None, config)
    family, base = adapted(plain, LORA), BaseReference("b", None, None, "0" * 64)
    tensors = drawn(family, shape)
    write_peft(tmp_path / "peft", tensors, LORA, base, is_wrapped=has_images(config))
    stored = read_peft(tmp_path / "peft").stored_names
    loaded = PeftModel.from_pretrained(model, tmp_path / "peft")
    held = {n: one for n, one in loaded.named_parameters() if "lora_" in n}
    names = {n: stored[n].replace(".weight", ".default.weight") for n in tensors}
    others = {n: own for n, own in names.items() if not OF_EXPERT.search(n)}
    assert held.keys() == set(others.values()) and len(others) < len(names)
    assert all(torch.equal(held[own], tensors[n]) for n, own in others.items())
    notice = peft_notice(family, shape)
    assert notice is not None and "loads no adapters on experts" in notice
    assert peft_notice(adapted(plain, Lora(4, 10.0)), shape) is None


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("qwen3_moe", "deepseek_v3") else pytest.mark.full)
        for name in WITH_EXPERTS
        if name != "gpt_oss"
    ],
)
def test_hf_engine_computes_each_request_with_its_own_adapters_on_experts(name: str) -> None:
    """The policy, another adapter and the model without adapters, in one batch."""
    config, family, shape = family_of(tiny_model(name), LORA)
    engine = HfEngine(config, family=family, adapters=("other",))
    base = checkpoint_tensors(tiny_model(name), config)
    adapters = {POLICY: drawn(family, shape), "other": drawn(family, shape, seed=4)}
    sent = {key: one.detach().clone() for key, one in base.items()} | scaled(adapters[POLICY])
    assert set(engine.tensors()) == set(sent)
    write_tensors(engine, sent, 0)
    own = engine.adapter_tensors("other")
    assert own.keys() == adapters["other"].keys()
    for key, one in scaled(adapters["other"]).items():
        own[key].copy_(one)
    models = {
        key: oracle(tiny_model(name).eval(), family, shape, one) for key, one in adapters.items()
    }
    models[None] = tiny_model(name).eval()
    requests = [
        replace(request, request_id=f"{request.request_id}-{adapter}", adapter=adapter)
        for request in make_requests(3, GREEDY)
        for adapter in models
    ]
    found = {done.request_id: done for done in generate(engine, requests)}
    for request in requests:
        done = found[request.request_id]
        for key, model in models.items():
            off = expected_logps(model, request, done) - torch.tensor(done.logps)
            assert (float(off.abs().max()) < LOGP_TOLERANCE) == (key == request.adapter)


class Grouped(torch.nn.Module):
    """Stands in for transformer-engine's grouped linear layer, which needs a GPU."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        for expert, weight in enumerate(weights):
            frozen = torch.nn.Parameter(weight.clone(), requires_grad=False)
            self.register_parameter(f"weight{expert}", frozen)
        self._tp_group = None

    def forward(self, hidden: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        parts = hidden.split(m_splits)
        return torch.cat([x @ getattr(self, f"weight{e}").T for e, x in enumerate(parts)]), None


@pytest.mark.parametrize("num_projections", [1, 2])
def test_grouped_layers_add_each_experts_adapter(num_projections: int) -> None:
    torch.manual_seed(0)
    splits, rank, num_in, num_out = [5, 0, 3], 2, 6, 8
    weights = torch.randn(len(splits), num_out, num_in, dtype=torch.float64)
    layer: Any = Grouped(weights)
    rows = torch.arange(num_out)
    places = rows * num_projections // num_out
    shapes = (num_projections * rank, num_in), (num_out, rank)
    for expert in range(len(splits)):
        add_expert_adapter(layer, expert, shapes, rows, places, Lora(rank, 3.0))
    names = dict(layer.named_parameters())
    assert [n for n in names if "adapters.1" in n] == [f"adapters.1.{p}" for p in (A, B)]
    for name, parameter in names.items():
        if "adapters" in name:
            torch.nn.init.normal_(parameter)
    hidden = torch.randn(sum(splits), num_in, dtype=torch.float64, requires_grad=True)
    output, _ = layer(hidden, splits)
    upstream = torch.randn_like(output)
    (output * upstream).sum().backward()
    found = [hidden.grad, *(one.grad for name, one in names.items() if "adapters" in name)]

    own = hidden.detach().requires_grad_()
    factors = [one.detach().requires_grad_() for name, one in names.items() if "adapters" in name]
    outputs = []
    for expert, x in enumerate(own.split(splits)):
        a, b = (factors[2 * expert + part] for part in range(2))
        added = [
            z @ y.T
            for z, y in zip(
                (x @ a.T).chunk(num_projections, 1), b.chunk(num_projections), strict=True
            )
        ]
        outputs.append(x @ weights[expert].T + 1.5 * torch.cat(added, 1))
    expected = torch.cat(outputs)
    (expected * upstream).sum().backward()
    assert torch.allclose(output, expected)
    for one, other in zip(found, (own.grad, *(f.grad for f in factors)), strict=True):
        assert torch.allclose(one, other)
    layer.lora_is_on = False
    assert torch.equal(layer(hidden, splits)[0], Grouped(weights)(hidden, splits)[0])
