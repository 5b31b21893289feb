"""The head writes Megatron's main gradient, and computes only rows that are read: one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.config.schema import TrainConfig
from hybridrl.contracts.batch import Producer, Prompt, TrainBatch
from hybridrl.models.family import resolve_family
from hybridrl.models.init import init_weights
from hybridrl.models.megatron import heads
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.mesh import Mesh
from hybridrl.training.batches.batch_plan import ModelInput
from hybridrl.training.model import ModelSource, ParallelModel

# Kinds of output weights: tied, to which autograd brings the lookup's gradient too, and alone.
KINDS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def loss(output: heads.TokenStats, micro: object) -> tuple[torch.Tensor, None]:
    weight = torch.arange(output.logp_S.numel()) % 5 - 1.5
    total = (weight * output.logp_S + 0.3 * output.entropy_S).sum()
    if output.chosen_logp_SK is not None:
        total = total + (output.chosen_logp_SK * torch.tensor([0.2, -0.7, 0.4])).sum()
    return total / 100, None


def make(mesh: Mesh, kind: str, dtype: torch.dtype) -> ParallelModel:
    mesh.platform.seed(1)
    hf_config = tiny_model(kind).config.to_dict() | {"architectures": [KINDS[kind]]}
    family = resolve_family(None, hf_config)
    source = ModelSource(family, hf_config, dtype, family.name, Path("."))
    model = ParallelModel(mesh, source, "lm", TrainConfig(micro_batch_tokens=30))
    init_weights(model.layout(), hf_shapes(family, source.shape), model.weights(), hf_config, 3)
    model.make_trainable(1e-3)
    return model


def a_batch(is_taught: bool = False) -> TrainBatch:
    drawn = torch.randint(0, 199, (6, 12), generator=torch.Generator().manual_seed(2)).tolist()
    prompts = [Prompt(i, "", tuple(row[:4]), {}, tuple(row[4:])) for i, row in enumerate(drawn)]
    batch = TrainBatch.supervised(prompts, Producer.here("the test"))
    if not is_taught:
        return batch
    tokens_TK = torch.randint(0, 199, (batch.num_tokens, 3), generator=torch.manual_seed(4)).int()
    tokens_TK *= batch.response_mask_T[:, None]
    return batch.join_columns(Producer.here("the test"), teacher_tokens_TK=tokens_TK)


def main_gradients(model: ParallelModel, inputs: list[ModelInput]) -> dict[str, torch.Tensor]:
    assert len(inputs) > 1
    model.accumulate(inputs, loss)
    return {
        name: parameter.main_grad.clone()
        for chunk in model.chunks
        for name, parameter in chunk.named_parameters()
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_taught", [False, True])
def test_micro_batches_add_up_as_through_autograd(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, is_taught: bool
) -> None:
    model = make(mesh, kind, dtype)
    inputs = model.plan(a_batch(is_taught)).inputs

    torch.use_deterministic_algorithms(True)  # uninitialised memory is filled with what is none
    found = [main_gradients(model, inputs) for _ in range(2)]
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(heads, "_main_grad", lambda weight: None)
    wanted = main_gradients(model, inputs)
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


class MadeTensors(TorchDispatchMode):
    """Names the operations that make tensors of one shape and type, views left out."""

    def __init__(self, like: torch.Tensor) -> None:
        super().__init__()
        self.like = like
        self.makers: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        storages = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.shape == self.like.shape:
                is_new = tensor.untyped_storage()._cdata not in storages
                if is_new and tensor.dtype == self.like.dtype:
                    self.makers.append(str(func))
        return result


@pytest.mark.parametrize("is_taught", [False, True])
def test_stand_in_for_the_gradient_takes_no_memory_and_the_hook_runs(
    mesh: Mesh, is_taught: bool
) -> None:
    model = make(mesh, "qwen2", torch.bfloat16)
    wanted = main_gradients(model, model.plan(a_batch(is_taught)).inputs)
    (chunk,), (wrapped,) = model.chunks, model.forward_chunks
    # As with more than one replica: Megatron's hook refuses a missing gradient, and the reduction
    # begins when it has run for every parameter.
    wrapped.ddp_config.overlap_grad_reduce = True
    weight = chunk.output_weight()
    before = weight.detach().clone()
    with MadeTensors(weight) as made:
        found = main_gradients(model, model.plan(a_batch(is_taught)).inputs)
    # Beside the stand-in this type and shape has only the embedding's gradient: the head's sums are
    # fp32.
    assert set(made.makers) == {"aten.embedding_dense_backward.default"}
    assert weight.grad is None and weight.grad_added_to_main_grad
    assert torch.equal(weight, before)
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_nobody_reads_are_not_computed_and_have_no_gradient(
    mesh: Mesh, kind: str
) -> None:
    model = make(mesh, kind, torch.float32)
    inputs = model.plan(a_batch()).inputs
    for one in inputs:
        assert torch.equal(one.head.rows_N, one.local.loss_mask_S.nonzero()[:, 0])
        assert 0 < len(one.head.rows_N) < one.local.num_positions
    gradients: list[torch.Tensor] = []

    def watch(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradients.append(gradient.flatten(0, 1)))

    # This file's loss reads every position.
    hook = model.chunks[0].decoder.register_forward_hook(watch)
    computed = main_gradients(model, inputs)
    hook.remove()
    assert len(gradients) == len(inputs)
    for one, gradient_SD in zip(inputs, gradients, strict=True):
        has_gradient = gradient_SD.abs().amax(-1) > 0
        assert torch.equal(has_gradient, one.local.loss_mask_S)

    every = [
        replace(w, head=replace(w.head, rows_N=torch.arange(w.local.num_positions))) for w in inputs
    ]
    for some, whole, one in zip(
        model.forward_all(inputs), model.forward_all(every), inputs, strict=True
    ):
        mask_S = one.local.loss_mask_S
        for own, other in zip(some[:2], whole[:2], strict=True):
            assert not own[~mask_S].any() and other[~mask_S].all()
            # Matrix products of other sizes may sum in another order.
            assert torch.allclose(own[mask_S], other[mask_S], rtol=1e-6, atol=1e-6)

    def masked(output: heads.TokenStats, micro: Any) -> tuple[torch.Tensor, None]:
        parts = [column_S * micro.loss_mask_S for column_S in output[:2]]
        return loss(heads.TokenStats(*parts), micro)

    model.accumulate(every, masked)
    for name, parameter in model.chunks[0].named_parameters():
        gradient = computed[name]
        bound = 1e-6 * float(gradient.abs().max())
        assert torch.allclose(parameter.main_grad, gradient, rtol=1e-6, atol=bound), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_taught", [False, True])
def test_micro_batch_without_a_row_to_read_has_no_gradient(
    mesh: Mesh, kind: str, is_taught: bool
) -> None:
    model = make(mesh, kind, torch.bfloat16)
    planned = model.plan(a_batch(is_taught)).inputs
    inputs = [replace(one, head=replace(one.head, rows_N=one.head.rows_N[:0])) for one in planned]
    assert not any(gradient.any() for gradient in main_gradients(model, inputs).values())
