"""One rank of the tests of frozen parts: real Megatron, gloo.

    trainable_worker.py FOLDER usual|rare|NUMBER

Every case trains a model of which some parts are frozen, and compares it with transformers' model
of which the same tensors are frozen.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from megatron.core import parallel_state
from parity_worker import LENGTHS, gradients_in_hf_names, objective, on_disk, sample_batch
from transformers import AutoModelForCausalLM

from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.config.placement import Place
from hybridrl.config.schema import TrainConfig
from hybridrl.errors import CheckpointError
from hybridrl.hybrid_engine.memory.alias import _stacked
from hybridrl.loop import ledger
from hybridrl.models.expert_stacks import place_in_stack
from hybridrl.models.family import is_kept_in_fp32, resolve_family
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.weights import check_coverage, hf_shapes, megatron_layouts
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.services.planner.phase_memory import (
    FP32_BYTES,
    MASTER_BYTES,
    Elements,
    HeldModel,
    RoleModel,
    fullest,
)
from hybridrl.training.model import ModelSource, ParallelModel
from hybridrl.training.peer_weights import PeerWeights

RATE = 1e-2


@dataclass(frozen=True)
class Case:
    """A model, how it is cut, what is frozen, and a pattern of the same in HF names."""

    family: str
    sizes: dict[str, int]
    freeze: tuple[str, ...]
    frozen: str
    knobs: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


FIRST = ("embeddings", "layers.0-1"), r"model\.(embed_tokens|layers\.[01]\.).*"
LAST = ("embeddings", "layers.2-3", "norms"), r"model\.embed.*|.*layers\.[23]\..*|.*norm.*"
# Of layer 2 the last product alone is trained: what selective recompute makes again has no
# trained input.
DEEP = (
    (
        "embeddings",
        "layers.0-1",
        "norms",
        *(f"model.layers.2.{n}" for n in ("self_attn.*", "mlp.[gu]*")),
    ),
    r"model\.(embed_tokens|layers\.[01]\.).*|.*norm.*|model\.layers\.2\.(self_attn|mlp\.[gu]).*",
)
EXPERTS = ("experts", "router"), r".*mlp\.(experts|gate\.).*"
OTHERS = (
    ("embeddings", "head", "norms", "router", "*.self_attn.*", "model.layers.1.mlp.*"),
    r"(?!.*mlp\.experts).*",
)
CASES = [
    Case("qwen3", {"tp": 2}, *FIRST),
    Case("qwen3", {"tp": 2}, *DEEP, {"recompute": "selective"}),
    Case("qwen3", {"pp": 2}, *FIRST),
    Case("qwen3", {"pp": 2, "vpp": 2}, *FIRST, {"recompute": "full"}),
    Case("llama", {"pp": 2}, *LAST),
    Case("qwen2", {}, *FIRST, {"recompute": "full"}),
    Case("qwen2", {}, ("head", "layers.3"), r"lm_head.*|model\.layers\.3\..*"),
    Case("qwen2", {}, *FIRST, {"fuse_param_gather": True}, torch.bfloat16),
    Case("qwen2", {"pp": 2}, *FIRST, {"release_weights_in_rollout": True}, torch.bfloat16),
    Case("qwen3_moe", {"ep": 2}, *EXPERTS),
    Case("qwen3_moe", {"ep": 2}, *OTHERS, {"recompute": "full"}),
]

RARE = {1, 3, 6, 8}  # of CASES


def make(case: Case, folder: Path, **changes) -> ParallelModel:
    """Returns the model, its optimizer made."""
    hf_config = json.loads((folder / case.family / "config.json").read_text())
    family = resolve_family(None, hf_config)
    source = ModelSource(family, hf_config, case.dtype, family.name, folder / case.family)
    platform = Platform.detect()
    mesh = Mesh(World(platform, 120), TrainLayout(2, **{**case.sizes, **changes}))
    platform.seed(1)
    train = TrainConfig(micro_batch_tokens=48, freeze=case.freeze, clip_grad=0.5, **case.knobs)
    model = ParallelModel(mesh, source, "lm", train)
    shapes = hf_shapes(family, source.shape)
    load_hf(folder / case.family, model.layout(), model.weights(), shapes)
    return model


def update(model: ParallelModel, seed: int = 0) -> float:
    lengths = LENGTHS[seed:] + LENGTHS[:seed]
    batch = sample_batch(model.source.shape.vocab_size, lengths)
    model.accumulate(model.plan(batch).inputs, objective)
    norm = model.grad_norm()
    model.apply(RATE, norm)
    return norm


def oracle_gradients(folder: Path, frozen: str) -> dict[str, torch.Tensor]:
    """Returns the gradients of transformers' model, by the names that it writes."""
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = sample_batch(oracle.config.vocab_size)
    for name, parameter in oracle.named_parameters():
        parameter.requires_grad_(re.fullmatch(frozen, name) is None)
    offsets, loss = batch.offsets.tolist(), torch.zeros(())
    for sample, (prompt, response) in enumerate(LENGTHS):
        tokens = batch.tokens_T[offsets[sample] : offsets[sample + 1]]
        log_p = oracle(tokens[None]).logits[0].log_softmax(-1)
        position = torch.arange(prompt - 1, prompt + response - 1)
        logp = log_p[position, tokens[position + 1]]
        entropy = -(log_p.exp() * log_p).sum(-1)[position]
        loss = loss + (((position % 5) - 1.5) * logp + 0.3 * entropy).sum() / 100
    loss.backward()
    for parameter in oracle.parameters():
        if parameter.grad is None:
            parameter.grad = torch.full_like(parameter, torch.nan)
    found = on_disk(oracle, "grad")
    return {name: grad for name, grad in found.items() if not grad.isnan().any()}


def check_gradients(case: Case, model: ParallelModel, folder: Path) -> None:
    """Gradients of what is trained are transformers', and there are no others."""
    world = model.world  # transformers writes on rank 0 alone
    expected = oracle_gradients(folder / case.family, case.frozen) if world.rank == 0 else None
    expected = world.broadcast_object(expected, 0)
    batch = sample_batch(model.source.shape.vocab_size)
    inputs = model.plan(batch).inputs
    for _ in range(2):  # from the second time on gradients are reduced beside the backward pass
        model.accumulate(inputs, objective)
        found = gradients_in_hf_names(model)
        norm = model.grad_norm()
    largest = max(float(one.abs().max()) for one in expected.values())
    tolerance = 5e-6 if case.dtype == torch.float32 else 0.05
    held_by = model.world.gather_objects({name for name, (_, held) in found.items() if held.any()})
    assert set().union(*held_by) == expected.keys(), set().union(*held_by) ^ expected.keys()
    for name, (gradient, held) in found.items():
        if held.any():
            worst = float((gradient - expected[name])[held].abs().max()) / largest
            assert worst < tolerance, f"{case}: {name} differs by {worst}"
    wanted = sum(float(one.double().square().sum()) for one in expected.values()) ** 0.5
    assert abs(norm / wanted - 1) < (1e-5 if case.dtype == torch.float32 else 0.05), (norm, wanted)


def check_memory(case: Case, model: ParallelModel) -> None:
    """Gradients and optimizer states are those of what is trained, as plans count them."""
    source, layout = model.source, model.mesh.layout
    role = RoleModel("policy", source.family, source.shape, True, freeze=case.freeze)
    parts = megatron_layouts(role.trained_family, source.shape, layout)
    on_ranks = [
        HeldModel(role, Place((0, 1)), layout, Elements(), fullest([part])) for part in parts
    ]
    assert model.memory is not None
    state_bytes, gradient_bytes = model.memory.state_bytes()[0], model.memory.gradient_bytes()
    own = 2 * FP32_BYTES + (MASTER_BYTES if case.dtype == torch.bfloat16 else 0)
    planned = sum(own * one.num_updated for one in on_ranks)
    found = sum(model.world.gather_objects(state_bytes))
    assert abs(found - planned) <= own * layout.world_size, (case, found, planned)
    here = on_ranks[model.world.rank].trained.num
    assert 4 * here <= gradient_bytes <= 4 * here * 1.1 + (4 << 10), (gradient_bytes, here)
    sizes = {one.name: one.num_bytes for one in ledger.entries({"policy": model}, {})}
    assert sizes.get("policy frozen weights", 0) == sum(
        one.nbytes for one in model.frozen_weights().values()
    )


def check_stacks(model: ParallelModel) -> None:
    """Frozen experts of a stack can be one tensor of an engine."""
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, tensor in sorted(model.frozen_weights().items()):
        if place := place_in_stack(name):
            stacks.setdefault(place[0], []).append(tensor)
    for experts in stacks.values():
        assert _stacked(experts) is not None


def check(case: Case, folder: Path) -> None:
    model = make(case, folder)
    model.make_trainable(RATE)
    before = {name: one.clone() for name, one in model.weights().items()}
    frozen = model.frozen_weights().keys()
    check_gradients(case, model, folder)
    check_memory(case, model)
    check_stacks(model)
    check_coverage(
        model.weight_source().layouts, hf_shapes(model.source.family, model.source.shape)
    )
    for step in range(2):
        update(model, step)
    check_memory(case, model)
    for name, one in model.weights().items():
        is_same = bool((one == before[name]).all())
        assert is_same == (name in frozen or is_kept_in_fp32(name)), f"{case}: {name}"
    world = model.world
    root = folder / f"checkpoints_{CASES.index(case)}"
    store = CheckpointStore(root, world, 1)
    state = {
        "step": 1,
        "prompts": {"fingerprint": "x"},
        "num_updates": {"policy": 2},
        "freeze": list(case.freeze),
    }
    store.save(1, {"policy": model}, state, model.source.files, waits=True)
    again = make(case, folder)
    again.make_trainable(RATE, PeerWeights(world))
    store.load(root / "step_1", {"policy": again})
    assert update(again, 2) == update(model, 2), "a norm differs after loading"
    weights = model.weights()
    for name, one in again.weights().items():
        assert torch.equal(one, weights[name]), f"{case}: {name} differs after loading"
    check_stacks(again)
    check_released(case, model)
    # Another layout reads it, where it may not be the same to the last bit.
    other = {"tp": 1, "pp": 1, "vpp": 1} if "pp" in case.sizes else {"tp": 1, "pp": 2}
    moved = make(case, folder, **other, ep=1)
    moved.make_trainable(RATE)
    store.load(root / "step_1", {"policy": moved})
    if case.dtype == torch.float32:
        norms = update(moved, 2), update(moved, 3)
        assert abs(norms[1] / update(model, 3) - 1) < 1e-3, norms
    changed = Case(case.family, case.sizes, ("layers.0",), "", case.knobs, case.dtype)
    unlike = make(changed, folder)
    unlike.make_trainable(RATE)
    try:
        store.load(root / "step_1", {"policy": unlike})
    except CheckpointError as error:
        assert "train.freeze" in str(error) and "layers.0, as in this run" in str(error), error
    else:
        raise AssertionError("loaded the states of other parameters")


def check_released(case: Case, model: ParallelModel) -> None:
    """Weights that are freed come back from masters; frozen ones, which have none, stay."""
    if not case.knobs.get("release_weights_in_rollout"):
        return
    assert model.trained_weights is not None
    before = {name: one.clone() for name, one in model.weights().items()}
    model.trained_weights.release()
    kept = {
        name for name, one in model.weights_in_place().items() if one.untyped_storage().nbytes()
    }
    assert kept == model.frozen_weights().keys()
    with model.mesh.active():
        model.trained_weights.restore()
    for name, one in model.weights().items():
        assert torch.equal(one, before[name]), name


def main() -> None:
    torch.set_num_threads(1)
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    cases = sys.argv[2]
    wanted = (
        [int(cases)]
        if cases.isdigit()
        else [i for i in range(len(CASES)) if (i in RARE) == (cases == "rare")]
    )
    for index in wanted:
        check(CASES[index], Path(sys.argv[1]))
        parallel_state.destroy_model_parallel()
        print(f"case {index} is right", flush=True)


if __name__ == "__main__":
    main()
