"""The head writes Megatron's main gradient itself: real Megatron, one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from hybridrl.batch import Producer, Prompt, TrainBatch
from hybridrl.config.schema import TrainConfig
from hybridrl.models import heads
from hybridrl.models.family import resolve_family
from hybridrl.models.init import init_weights
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.groups import World, start_process_group, stop_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.platform import Platform
from hybridrl.trainer.model import ModelSource, ParallelModel

# Kinds of output weights: tied, to which autograd brings the lookup's gradient too, and alone.
KINDS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 60)
    yield World(TrainLayout(1), platform, 60)
    stop_process_group()


def loss(output: heads.TokenStats, micro: object) -> tuple[torch.Tensor, None]:
    weight = torch.arange(output.logp_S.numel()) % 5 - 1.5
    return (weight * output.logp_S + 0.3 * output.entropy_S).sum() / 100, None


def main_gradients(model: ParallelModel, batch: TrainBatch) -> dict[str, torch.Tensor]:
    works = model.plan_work(batch)
    assert len(works) > 1
    model.accumulate(works, loss)
    return {
        name: parameter.main_grad.clone()
        for chunk in model.chunks
        for name, parameter in chunk.named_parameters()
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_micro_batches_add_up_as_through_autograd(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype
) -> None:
    world.platform.seed(1)
    hf_config = tiny_model(kind).config.to_dict() | {"architectures": [KINDS[kind]]}
    family = resolve_family(None, hf_config)
    source = ModelSource(family, hf_config, dtype, family.name, Path("."))
    model = ParallelModel(world, source, "lm", TrainConfig(micro_batch_tokens=30))
    init_weights(model.layout(), hf_shapes(family, source.shape), model.weights(), hf_config, 3)
    model.make_trainable(1e-3)
    drawn = torch.randint(0, 199, (6, 12), generator=torch.Generator().manual_seed(2)).tolist()
    prompts = [Prompt(i, "", tuple(row[:4]), {}, tuple(row[4:])) for i, row in enumerate(drawn)]
    batch = TrainBatch.supervised(prompts, Producer.here("the test"))

    torch.use_deterministic_algorithms(True)  # uninitialised memory is filled with what is none
    found = [main_gradients(model, batch) for _ in range(2)]
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(heads, "_main_grad", lambda weight: None)
    wanted = main_gradients(model, batch)
    head = "embedding.word_embeddings.weight" if kind == "llama" else "output_layer.weight"
    assert any(name.endswith(head) for name in wanted)
    # Autograd rounds every micro-batch's gradient to the weight's type before they are added.
    bound = 2**-8 if dtype == torch.bfloat16 else 1e-6
    for name, gradient in wanted.items():
        assert torch.equal(found[0][name], found[1][name]), f"{name}: left from the step before"
        is_head = name.endswith(head)
        assert is_head or torch.equal(found[0][name], gradient), name
        assert torch.allclose(
            found[0][name], gradient, rtol=bound, atol=bound * float(gradient.abs().max())
        ), name
