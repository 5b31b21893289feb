"""Layers keep what they should: for the backward pass, and in checkpoints. Real Megatron."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from tiny_models import tiny_model

from hybridrl.checkpoint.folders import Checkpoint
from hybridrl.checkpoint.model_state import _make_states, load_model
from hybridrl.checkpoint.optimizer_state import count_step
from hybridrl.checkpoint.writing import write_checkpoint
from hybridrl.config.schema import TrainConfig
from hybridrl.contracts.batch import Producer, Prompt, TrainBatch
from hybridrl.errors import UserError
from hybridrl.hybrid_engine.memory.alias import shared_names, shared_views
from hybridrl.models.family import resolve_family
from hybridrl.models.init import init_weights
from hybridrl.models.megatron.layers import torch_layer_spec
from hybridrl.models.megatron.specs import with_module
from hybridrl.models.sources import TrainingShard
from hybridrl.models.weights import TE_NAMES, fused_layout, hf_shapes
from hybridrl.parallel.mesh import Mesh
from hybridrl.training.model import ModelSource, ParallelModel

NUM_TOKENS = 6 * 12


def make(
    mesh: Mesh,
    seed: int = 3,
    recompute: Literal["none", "selective"] = "none",
    name: str = "qwen2",
) -> ParallelModel:
    hf_config = tiny_model(name).config.to_dict()
    family = resolve_family(name, hf_config)
    source = ModelSource(family, hf_config, torch.float32, name, Path("."))
    mesh.platform.seed(1)
    train = TrainConfig(micro_batch_tokens=NUM_TOKENS, recompute=recompute)
    model = ParallelModel(mesh, source, "lm", train)
    init_weights(model.layout(), hf_shapes(family, source.shape), model.weights(), hf_config, seed)
    model.make_trainable(1e-3)
    return model


def a_batch() -> TrainBatch:
    drawn = torch.randint(0, 199, (6, 12), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [Prompt(i, "", tuple(row[:4]), {}, tuple(row[4:])) for i, row in enumerate(drawn)]
    return TrainBatch.supervised(prompts, Producer.here("the test"))


def kept_bytes(forward: Callable[[], object]) -> int:
    """Returns the memory that a forward pass keeps for its backward pass."""
    kept: dict[int, torch.UntypedStorage] = {}

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in kept.values())


def forward(model: ParallelModel) -> None:
    (one,) = model.plan(a_batch()).inputs
    model.forward_chunks[0](
        input_ids=one.local.tokens_S[None],
        position_ids=one.local.positions_S[None],
        attention_mask=None,
        labels=one.head,
        packed_seq_params=one.packed,
    )


def forward_shared(model: ParallelModel) -> None:
    """Experts that compute with every token, of one layer."""
    for module in model.chunks[0].modules():
        if isinstance(module, SharedExpertMLP):
            size = NUM_TOKENS, 1, model.source.shape.hidden_size
            module(torch.ones(size, requires_grad=True))
            return
    raise AssertionError("no layer has any")


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_selective_recompute_keeps_no_output_of_activations(mesh: Mesh, name: str) -> None:
    """qwen3_moe has a dense layer and two experts a token; deepseek_v3 also shared ones."""
    models = {way: make(mesh, recompute=way, name=name) for way in ("none", "selective")}
    none, selective = (kept_bytes(partial(forward, model)) for model in models.values())
    saved = none - selective
    shape = models["none"].source.shape
    moe = shape.moe
    widths = [
        moe.experts_per_token * moe.expert_ffn_size + moe.shared_ffn_size
        if moe is not None and shape.has_experts(layer)
        else shape.ffn_size
        for layer in range(shape.num_layers)
    ]
    # Of each the product, and silu's output, which torch keeps for the product.
    assert saved >= 2 * NUM_TOKENS * sum(widths) * 4
    if moe is not None and moe.shared_ffn_size:
        none, selective = (kept_bytes(partial(forward_shared, m)) for m in models.values())
        assert none - selective >= 2 * NUM_TOKENS * moe.shared_ffn_size * 4
    gradients = []
    for model in models.values():
        inputs = model.plan(a_batch()).inputs
        model.accumulate(inputs, lambda output, _: (output.logp_S.sum(), None))
        gradients.append([p.main_grad.clone() for p in model.chunks[0].parameters()])  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_checkpoints_name_norms_as_transformer_engine_does(mesh: Mesh, tmp_path: Path) -> None:
    model = make(mesh)
    state = model.chunks[0].sharded_state_dict()  # type: ignore[operator]
    keys = {part.key for part in state.values()}
    for own, fused in TE_NAMES.items():
        assert fused.replace(".{L}", "") in keys and own.replace(".{L}", "") not in keys
    folder = tmp_path / "step_0"
    write_checkpoint(folder, mesh.world, {"policy": model}, {}, model.source.files)
    assert b"_extra_state" not in (folder / "policy" / ".metadata").read_bytes()
    other = make(mesh, seed=4)
    load_model(Checkpoint.open(folder), "policy", other, mesh.world)
    assert all(torch.equal(model.weights()[n], t) for n, t in other.weights().items())


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_every_stack_of_experts_is_one_view_of_trained_parameters(mesh: Mesh, name: str) -> None:
    model = make(mesh, name=name)
    family, shape = model.source.family, model.source.shape
    engine = fused_layout(family, shape, 1, 0)
    shard = TrainingShard(model.layout(), model.weights_in_place())
    stacks = {name.partition("/")[0] for name in engine.shapes if "/" in name}
    layers = sum(map(shape.has_experts, range(shape.num_layers)))
    assert len(stacks) == 2 * layers > 0
    views = shared_views(shard, engine, torch.float32)
    assert stacks <= views.keys()
    # All that can be shared is, but for what stays an engine's own.
    whole = {name.partition("/")[0] for name in shared_names(shard.layout, engine)}
    assert views.keys() == whole


class HalvedMlp(MLP):
    """A user's feed-forward layer."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(*args, **kwargs)
        return output / 2, bias


def halved_spec(config: TransformerConfig) -> tuple[ModuleSpec, type]:
    layer, norm = torch_layer_spec(config)
    layer.submodules.mlp = with_module(layer.submodules.mlp, HalvedMlp)
    return layer, norm


def test_selective_recompute_leaves_a_familys_own_feed_forward_layer_alone(mesh: Mesh) -> None:
    hf_config = tiny_model("qwen2").config.to_dict()
    family = replace(resolve_family("qwen2", hf_config), name="halved", layer_spec=halved_spec)
    source = ModelSource(family, hf_config, torch.float32, "halved", Path("."))
    train = TrainConfig(micro_batch_tokens=NUM_TOKENS, recompute="selective")
    with pytest.raises(UserError, match="family halved") as caught:
        ParallelModel(mesh, source, "lm", train)
    assert caught.value.name == "train.recompute" and "full" in caught.value.remedy


class CountingAdam:
    """What transformer-engine's FusedAdam keeps: moments of a parameter, steps of a group."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": parameters}]
        self.state: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}

    def initialize_state(self, parameter: torch.nn.Parameter, store_param_remainders: bool) -> None:
        assert not store_param_remainders
        self.state[parameter] = {
            name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")
        }


def test_states_before_the_first_step_count_no_step_and_change_no_weight() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(0))]
    adam = CountingAdam(parameters)
    _make_states(SimpleNamespace(optimizer=adam))
    assert adam.param_groups[0]["step"] == 0
    assert list(adam.state) == parameters[:1]
    assert all(parameter.grad is None for parameter in parameters)


def test_an_optimizer_without_parameters_counts_its_steps() -> None:
    """Rank 0 writes the count of all ranks, also if its layers are all frozen."""
    adam = CountingAdam([])
    for _ in range(2):
        count_step(adam)
    _make_states(SimpleNamespace(optimizer=adam))
    assert adam.param_groups[0]["step"] == 2 and not adam.state


def test_states_of_torchs_adam_before_the_first_step_are_those_it_begins_with() -> None:
    made, plain = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    adams = [torch.optim.Adam([parameter], lr=0.1) for parameter in (made, plain)]
    _make_states(SimpleNamespace(optimizer=adams[0]))
    for adam, parameter in zip(adams, (made, plain), strict=True):
        parameter.grad = torch.tensor([1.0, -2.0, 0.5])
        adam.step()
    assert torch.equal(made, plain)
    assert float(adams[0].state[made]["step"]) == 1.0
