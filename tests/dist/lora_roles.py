"""Checks of several models that use one model's frozen weights, called by lora_worker.py."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from parity_worker import objective, sample_batch

from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.hybrid_engine.export import gather_tensors
from hybridrl.loop import ledger
from hybridrl.models.adapters.peft_directory import read_peft
from hybridrl.models.adapters.peft_files import load_peft
from hybridrl.models.adapters.rows import base_of
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.megatron.build import named_parameters
from hybridrl.models.sources import FullWeights
from hybridrl.models.trainable import trained_family
from hybridrl.models.weights import VALUE_HEAD, Head, hf_shapes
from hybridrl.training.model import ParallelModel


def second_model(
    policy: ParallelModel,
    folder: Path,
    peft: Path | None,
    lender: ParallelModel | None,
    head: Head = "value",
) -> ParallelModel:
    """Returns a critic or, without `peft`, a reference of the policy's base."""
    source = policy.source
    if peft is None:
        source = replace(source, family=base_of(source.family), base=None)
    model = ParallelModel(policy.mesh, source, head, policy.train, lender)
    shapes = hf_shapes(base_of(source.family), source.shape, head)
    missing = {VALUE_HEAD} if head == "value" else set()
    load_hf(folder, model.own_layout(), model.own_weights(), shapes, missing_ok=missing)
    if peft is not None:
        load_peft(read_peft(peft), model.adapter_layout(), model.adapter_weights())
    generator = torch.Generator().manual_seed(3)
    for name, one in model.own_weights().items():
        if head == "value" and name.endswith("output_layer.weight"):
            one.copy_(torch.randn(one.shape, generator=generator))  # zero would give no gradient
    return model


def value_loss(values_S: torch.Tensor, micro):
    weight = (micro.positions_S % 5 - 1.5).to(values_S.dtype) * micro.loss_mask_S
    return (weight * values_S).sum() / 100, None


def step(model: ParallelModel) -> float:
    inputs = model.plan(sample_batch(model.source.shape.vocab_size)).inputs
    model.accumulate(inputs, objective if model.head == "lm" else value_loss)
    norm = model.grad_norm()
    model.apply(1e-2, norm)
    return norm


def held_bytes(models: Sequence[ParallelModel]) -> int:
    """Returns the bytes of all parameters of these models in this process."""
    parameters = {
        id(one): one for model in models for one in named_parameters(model.chunks).values()
    }
    return sum(one.nbytes for one in parameters.values())


def trained_weights(model: ParallelModel) -> dict[str, torch.Tensor]:
    """Returns the trained tensors by HF name, on rank 0."""
    family = trained_family(model.source.family, model.source.shape, (), model.head)
    shapes = hf_shapes(family, model.source.shape, model.head)
    layouts = model._whole_layouts(family)
    own = layouts[model.world.rank].shapes
    tensors = {name: one for name, one in model.weights().items() if name in own}
    found = gather_tensors(FullWeights(layouts, tensors), shapes, torch.float32, model.world)
    return {name: one.clone() for name, one in found}


def check_roles(policy: ParallelModel, alone: ParallelModel, folder: Path, peft: Path) -> None:
    """A critic on frozen weights of `policy` computes and learns as on its own, beside `alone`.

    `folder` and `peft` hold the base and the adapters.
    """
    world = policy.world
    for model in (policy, alone):
        model.make_trainable(1e-2)
    before = {name: one.clone() for name, one in policy.base_weights().items()}
    own_bytes = held_bytes([policy])
    critic = second_model(policy, folder, peft, policy)
    other = second_model(alone, folder, peft, None)
    for model in (critic, other):
        model.make_trainable(1e-2)
    reference = second_model(policy, folder, None, policy, "lm")
    reference.freeze()
    trained = sum(p.nbytes for p in named_parameters(critic.chunks).values() if p.requires_grad)
    full = [
        parameter.nbytes
        for name, parameter in named_parameters(reference.chunks).items()
        if named_parameters(policy.chunks)[name].requires_grad
    ]
    assert held_bytes([policy, critic]) == own_bytes + trained, "the critic has its own base"
    assert held_bytes([policy, reference]) == own_bytes + sum(full)
    assert held_bytes([alone, other]) > 1.5 * own_bytes
    listed = {one.name: one.num_bytes for one in ledger.entries({"critic": critic}, {})}
    assert "critic frozen weights" not in listed, listed
    assert "critic frozen weights, the policy's" in listed, listed
    batch = sample_batch(policy.source.shape.vocab_size)
    plain = logps(reference, batch)
    for _ in range(2):
        assert step(policy) == step(alone)
        with policy.without_adapters():  # the critic's adapters stay active
            norms = step(critic), step(other)
        assert norms[0] == norms[1] > 0, norms
    for model, wanted in ((policy, alone), (critic, other)):
        found, expected = model.weights(), wanted.weights()
        assert found.keys() == expected.keys()
        for name, one in found.items():
            assert torch.equal(one, expected[name]), f"{model.head}: {name} differs"
    trained_names = {n for n, p in named_parameters(policy.chunks).items() if p.requires_grad}
    for name, one in policy.base_weights().items():
        assert torch.equal(one, before[name]) != (name in trained_names), name
    assert torch.equal(logps(reference, batch), plain), "the reference has changed"
    after = logps_of(policy)  # on all ranks
    assert world.rank != 0 or not torch.equal(after, plain)


def logps_of(model: ParallelModel) -> torch.Tensor:
    return logps(model, sample_batch(model.source.shape.vocab_size))


def logps(model: ParallelModel, batch) -> torch.Tensor:
    plan = model.plan(batch)
    return plan.column([output.logp_S for output in model.forward_all(plan.inputs)])


def check_moved(policy: ParallelModel, moved: ParallelModel, folder: Path, peft: Path) -> None:
    """A checkpoint of policy and critic continues in another layout, bit for bit."""
    models = {"policy": policy, "critic": second_model(policy, folder, peft, policy)}
    others = {"policy": moved, "critic": second_model(moved, folder, peft, moved)}
    for model in (*models.values(), *others.values()):
        model.make_trainable(1e-2)
    for model in models.values():
        step(model)
    world = policy.world
    root = Path(world.broadcast_object(tempfile.mkdtemp(), 0))
    store = CheckpointStore(root, world, 1)
    counts = {"policy": 1, "critic": 1}
    state = {"step": 1, "prompts": {"fingerprint": "x"}, "num_updates": counts}
    place = store.save(1, models, state, policy.source.files, waits=True)
    before = moved.base_weights()["0/decoder.layers.0.self_attention.linear_proj.weight"].clone()
    store.load(place, others)
    for name, model in models.items():
        found, wanted = trained_weights(others[name]), trained_weights(model)
        assert found.keys() == wanted.keys() and (world.rank != 0 or found)
        for tensor, one in wanted.items():
            assert torch.equal(found[tensor], one), f"{name}: {tensor} differs"
        # The optimizer states are those of the same elements.
        norms = step(others[name]), step(model)
        assert abs(norms[0] / norms[1] - 1) < 1e-4, (name, norms)
        found, wanted = trained_weights(others[name]), trained_weights(model)
        for tensor, one in wanted.items():
            difference = (found[tensor] - one).abs().max()
            assert float(difference) < 1e-4, f"{name}: {tensor} differs after a step"
    after = moved.base_weights()["0/decoder.layers.0.self_attention.linear_proj.weight"]
    assert torch.equal(before, after)
