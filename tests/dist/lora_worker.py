"""One rank of the tests of LoRA: real Megatron, gloo, PEFT on transformers' model as the oracle.

lora_worker.py FOLDER FAMILIES LAYOUT...
    each layout is "tp,pp,cp,vpp[,ep=2][,full][,experts][,whole]..."

With `experts`, experts have adapters, too, if the model has experts. With `whole`, embeddings, head
and norms are trained too. With `files`, PEFT directories and checkpoints are checked instead of
gradients; with `roles`, models that share the base.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from adapter_cases import PREFIX, canonical, with_layers
from collective_counts import Collectives
from lora_roles import check_moved, check_roles
from megatron.core import parallel_state
from parity_worker import LENGTHS, gradients_in_hf_names, objective, sample_batch
from safetensors.torch import load_file
from tiny_models import LONGEST, as_long
from transformers import AutoModelForCausalLM

from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.config.placement import Place
from hybridrl.config.schema import TrainConfig
from hybridrl.errors import CheckpointError
from hybridrl.hybrid_engine.export import gather_tensors
from hybridrl.hybrid_engine.planning.owned import frozen_tensors, without
from hybridrl.loop import ledger
from hybridrl.loop.exports import export_peft
from hybridrl.models.adapters.base_reference import BaseReference, weights_digest
from hybridrl.models.adapters.lora import ALL_LINEAR, EXPERTS, Lora
from hybridrl.models.adapters.peft_directory import check_peft, read_peft
from hybridrl.models.adapters.peft_files import load_peft, write_peft
from hybridrl.models.adapters.rows import (
    HF_A,
    HF_B,
    adapted,
    adapts_experts,
    base_of,
    only_adapters,
    target_names,
    without_expert_adapters,
)
from hybridrl.models.boxes import box_view
from hybridrl.models.family import Family, ModelShape, resolve_family
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.megatron.build import named_parameters
from hybridrl.models.trainable import synced_family
from hybridrl.models.weights import hf_shapes, megatron_layouts
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.services.planner.phase_memory import (
    FP32_BYTES,
    HeldModel,
    RoleModel,
    fullest,
)
from hybridrl.training.model import ModelSource, ParallelModel

RANK, ALPHA = 4, 8
# The last parts of HF names that PEFT's modules_to_save contains for each part of lora.full.
MODULES = {
    "embeddings": ["embed_tokens"],
    "head": ["lm_head"],
    "norms": ["input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm"],
}


def peft_folder(base: Path, folder: Path, family: Family, shape: ModelShape) -> None:
    """Saves a random adapter."""
    generator = torch.Generator().manual_seed(11)
    tensors = {
        name: torch.randn(size, generator=generator) * 0.1
        for name, size in hf_shapes(only_adapters(family), shape).items()
    }
    write_peft(folder, tensors, family.lora, BaseReference(str(base), None, None, "0" * 64))


def make(
    folder: Path,
    peft: Path,
    layout: TrainLayout,
    recompute: str,
    full: tuple[str, ...] = (),
) -> ParallelModel:
    hf_config = json.loads((folder / "config.json").read_text())
    adapter = read_peft(peft)
    family = adapted(resolve_family(None, hf_config), replace(adapter.lora, full=full))
    base = BaseReference(str(folder), None, None, weights_digest(folder))
    types = family, hf_config, torch.float32, family.name
    source = ModelSource(*types, folder, LONGEST, base=base)
    mesh = Mesh(World(Platform.detect(), 120), layout)
    mesh.platform.seed(1)
    train = TrainConfig(micro_batch_tokens=48, clip_grad=0.5, recompute=recompute)
    model = ParallelModel(mesh, source, "lm", train)
    load_hf(
        folder, model.base_layout(), model.base_weights(), hf_shapes(base_of(family), source.shape)
    )
    shapes = hf_shapes(only_adapters(family), source.shape)
    check_peft(adapter, shapes)
    load_peft(adapter, model.adapter_layout(), model.adapter_weights())
    return model


def oracle(folder: Path, peft: Path, family: Family, shape: ModelShape):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    model.set_attn_implementation("eager")  # the default leaves out soft caps
    targets, lora = target_names(family, shape), family.lora
    options = {
        "modules_to_save": [name for part in lora.full for name in MODULES[part]] or None,
        "ensure_weight_tying": bool(lora.full) and model.config.tie_word_embeddings,
    }
    model = with_layers(model, lora, targets, EXPERTS in lora.targets, **options).double()
    stored = load_file(peft / "adapter_model.safetensors")
    for name, tensor in canonical(model, family, shape).items():
        tensor.copy_(stored.pop(f"{PREFIX}{name}"))
    assert not stored, stored.keys()
    return model


def expected(folder: Path, peft: Path, family: Family, shape: ModelShape):
    """Returns PEFT's log-probabilities with and without the adapter, and all its gradients."""
    model = oracle(folder, peft, family, shape)
    batch = sample_batch(model.config.vocab_size)
    offsets, loss = batch.offsets.tolist(), torch.zeros((), dtype=torch.float64)
    logps = []
    for sample, (prompt, response) in enumerate(LENGTHS):
        tokens = batch.tokens_T[offsets[sample] : offsets[sample + 1]]
        log_p = model(as_long(model, tokens)[None]).logits[0, : len(tokens)].log_softmax(-1)
        position = torch.arange(prompt - 1, prompt + response - 1)
        logp = log_p[position, tokens[position + 1]]
        entropy = -(log_p.exp() * log_p).sum(-1)[position]
        loss = loss + (((position % 5) - 1.5) * logp + 0.3 * entropy).sum() / 100
        logps.append(logp.detach())
    loss.backward()
    gradients = canonical(model, family, shape, gradients=True)
    gradients |= {
        name.removeprefix(PREFIX)
        .replace(".modules_to_save", "")
        .replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and "lora_" not in name
    }
    plain = []
    with torch.no_grad(), model.disable_adapter():
        for sample, (prompt, response) in enumerate(LENGTHS):
            tokens = batch.tokens_T[offsets[sample] : offsets[sample + 1]]
            log_p = model(as_long(model, tokens)[None]).logits[0, : len(tokens)].log_softmax(-1)
            position = torch.arange(prompt - 1, prompt + response - 1)
            plain.append(log_p[position, tokens[position + 1]])
    return torch.cat(logps), torch.cat(plain), gradients


def response_logps(model: ParallelModel, batch) -> torch.Tensor:
    plan = model.plan(batch)
    column_T = plan.column([output.logp_S for output in model.forward_all(plan.inputs)])
    offsets = batch.offsets.tolist()
    return torch.cat(
        [
            column_T[offsets[sample] + prompt : offsets[sample + 1]]
            for sample, (prompt, _) in enumerate(LENGTHS)
        ]
    )


def check_memory(model: ParallelModel) -> None:
    """Memory and synced weights are those that plans count."""
    source, layout = model.source, model.mesh.layout
    family, shape = source.family, source.shape
    role = RoleModel("policy", family, shape, True)
    ranks = Place(tuple(range(layout.world_size)))
    parts = zip(
        megatron_layouts(family, shape, layout),
        megatron_layouts(role.trained_family, shape, layout),
        strict=True,
    )
    held = [HeldModel(role, ranks, layout, *map(fullest, ([a], [b]))) for a, b in parts]
    assert model.memory is not None
    state_bytes, gradient_bytes = model.memory.state_bytes()[0], model.memory.gradient_bytes()
    planned = sum(2 * FP32_BYTES * one.num_updated for one in held)
    found = sum(model.world.gather_objects(state_bytes))
    assert abs(found - planned) <= 2 * FP32_BYTES * layout.world_size, (found, planned)
    here = held[model.world.rank]
    trained = 4 * here.trained.num
    assert trained <= gradient_bytes <= 1.1 * trained + (4 << 10), (gradient_bytes, trained)
    sizes = {one.name: one.num_bytes for one in ledger.entries({"policy": model}, {})}
    own = named_parameters(model.chunks)
    base = {
        name: one
        for name, one in model.base_weights().items()
        if name not in own or not own[name].requires_grad
    }
    frozen = sum(one.nbytes for one in base.values())
    biases = sum(one.nbytes for name, one in base.items() if name.endswith("expert_bias"))
    assert frozen == 4 * (here.held.num - here.trained.num), (frozen, here)
    assert sizes["policy frozen weights"] == frozen - biases, sizes
    assert trained <= sizes["policy trained weights (lora)"] <= 1.1 * trained + (4 << 10), sizes
    for held in (family, base_of(family), without_expert_adapters(family)):
        weights = model.weight_source(held)
        frozen_names = model.world.gather_objects(weights.frozen)
        sent = without(weights.layouts, frozen_tensors(weights.layouts, frozen_names))
        names = {region.hf for one in sent for region in one.regions}
        synced = hf_shapes(synced_family(family, shape, held), shape)
        assert names == synced.keys(), names ^ synced.keys()


def check(
    folder: Path, peft: Path, layout: TrainLayout, recompute: str, full: tuple[str, ...]
) -> None:
    model = make(folder, peft, layout, recompute, full)
    world = model.world
    of_model = model.source.family, model.source.shape
    wanted = expected(folder, peft, *of_model) if world.rank == 0 else None
    logps, plain, gradients = world.broadcast_object(wanted, 0)
    batch = sample_batch(model.source.shape.vocab_size)
    base = {name: one.clone() for name, one in model.base_weights().items()}
    model.make_trainable(1e-2)
    check_memory(model)
    worst = float((response_logps(model, batch) - logps).abs().max())
    assert worst < 1e-5, f"log-probabilities differ from PEFT's by {worst}"
    with model.without_adapters():
        worst = float((response_logps(model, batch) - plain).abs().max())
    assert worst < 1e-5, f"without adapters they differ by {worst}"
    for _ in range(2):
        model.accumulate(model.plan(batch).inputs, objective)
        found = gradients_in_hf_names(model)
        norm = model.grad_norm()
    held_by = world.gather_objects({name for name, (_, held) in found.items() if held.any()})
    assert set().union(*held_by) == gradients.keys(), set().union(*held_by) ^ gradients.keys()
    largest = max(float(one.abs().max()) for one in gradients.values())
    for name, (gradient, held) in found.items():
        if held.any():
            off = float((gradient - gradients[name])[held].abs().max()) / largest
            assert off < 5e-6, f"{layout}: gradient of {name} differs by {off}"
    total = sum(float(one.double().square().sum()) for one in gradients.values()) ** 0.5
    assert abs(norm / total - 1) < 1e-5, (norm, total)
    check_modules_way(model, batch, gradients)
    model.apply(1e-2, norm)
    trained = {name for name, p in named_parameters(model.chunks).items() if p.requires_grad}
    for name, one in model.base_weights().items():
        assert torch.equal(one, base[name]) != (name in trained), f"{name} has changed"


def check_modules_way(model: ParallelModel, batch, gradients) -> None:
    """Layers that cannot compute W x and the adapters together (FP8) have the same gradients. The
    others communicate for adapters only A's gradient.
    """
    parts = [part for one in model.chunks for part in one.modules()]
    layers = [part for part in parts if hasattr(part, "lora_frozen")]
    direct = [part for part in layers if part.lora_frozen is not None]
    kept = [part.lora_frozen for part in direct]
    tp, inputs = model.mesh.layout.tp, model.plan(batch).inputs
    shape = model.source.shape
    is_counted = tp > 1 and len(direct) == len(layers) and not shape.moe
    is_counted &= shape.num_kv_heads >= tp  # otherwise, Megatron gathers queries, keys and values
    if is_counted:
        with Collectives() as adapted_forward:
            response_logps(model, batch)
        with Collectives() as plain, model.without_adapters():
            response_logps(model, batch)
        assert adapted_forward.found == plain.found, "adapters add collectives to a forward pass"
        with Collectives() as update:
            model.accumulate(inputs, objective)
        split = [one for one in update.found if one[0] in ("allgather", "reduce_scatter")]
        columns = [part for part in layers if not part.lora_is_row]
        small = [one for one in split if one[-1] != shape.hidden_size]
        widths = [part.lora_a.size(0) for part in columns] * len(inputs)
        assert all(name == "reduce_scatter" for name, *_ in small), small
        assert sorted(width for *_, width in small) == sorted(widths), small
    for part in direct:
        part.lora_frozen = None
    model.accumulate(inputs, objective)
    largest = max(float(one.abs().max()) for one in gradients.values())
    for name, (gradient, held) in gradients_in_hf_names(model).items():
        if held.any():
            off = float((gradient - gradients[name])[held].abs().max()) / largest
            assert off < 5e-6, f"gradient of {name} differs by {off}"
    for part, one in zip(direct, kept, strict=True):
        part.lora_frozen = one
    model.accumulate(inputs, objective)
    model.grad_norm()


def check_sent(model: ParallelModel, folder: Path, peft: Path) -> None:
    """Engines receive A and s B, and weights with those adapters merged that they do not hold."""
    family, shape = model.source.family, model.source.shape
    adapters = load_file(peft / "adapter_model.safetensors")
    adapters = {name.removeprefix(PREFIX): one for name, one in adapters.items()}
    scale = family.lora.scale
    for held in (family, base_of(family), without_expert_adapters(family)):
        shapes, source = hf_shapes(held, shape), model.weight_source(held)
        expected = {
            name: one
            for path in folder.glob("*.safetensors")
            for name, one in load_file(path).items()
        }
        for name, one in adapters.items():
            module = name.removesuffix(f".{HF_B}")
            if name in shapes:
                expected[name] = one * (scale if name.endswith(HF_B) else 1)
            elif module != name:
                merged = scale * one @ adapters[f"{module}.{HF_A}"]
                expected[f"{module}.weight"] = expected[f"{module}.weight"] + merged
        shard = source.shard
        for region in () if shard is None else shard.layout.regions:
            own = box_view(shard.tensors[region.local], region.local_box)
            assert torch.equal(own, box_view(expected[region.hf], region.hf_box)), region
        for name, one in gather_tensors(source, shapes, torch.float32, model.world):
            off = float((one - expected[name]).abs().max())
            assert off < 1e-6, (held.lora, name, off, float(one.abs().max()))


def update(model: ParallelModel) -> float:
    model.accumulate(model.plan(sample_batch(model.source.shape.vocab_size)).inputs, objective)
    norm = model.grad_norm()
    model.apply(1e-2, norm)
    return norm


def exported_tensors(model: ParallelModel, folder: Path) -> dict[str, torch.Tensor]:
    export_peft(model, folder, None)
    model.world.gather_objects(None)
    return load_file(folder / "adapter_model.safetensors")


def check_files(folder: Path, peft: Path, layout: TrainLayout, moved: TrainLayout) -> None:
    """A PEFT directory comes back bit for bit, and another layout continues from a checkpoint."""
    model = make(folder, peft, layout, "none")
    world = model.world
    exported = Path(world.broadcast_object(tempfile.mkdtemp(), 0)) / "peft"
    before, after = (
        load_file(peft / "adapter_model.safetensors"),
        exported_tensors(model, exported),
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], one) for name, one in before.items())
    assert read_peft(exported).lora == read_peft(peft).lora
    check_sent(model, folder, peft)
    model.make_trainable(1e-2)
    update(model)
    store = CheckpointStore(exported.parent, world, 1)
    state = {"step": 1, "prompts": {"fingerprint": "x"}, "num_updates": {"policy": 1}}
    place = store.save(1, {"policy": model}, state, model.source.files, waits=True)
    other = make(folder, peft, moved, "none")
    other.make_trainable(1e-2)
    store.load(place, {"policy": other})
    found = exported_tensors(other, exported.with_name("loaded"))
    assert all(
        torch.equal(found[name], one)
        for name, one in exported_tensors(model, exported.with_name("saved")).items()
    )
    # Layouts add in other orders, so norms differ in the last bits.
    for _ in range(2):
        norms = update(other), update(model)
        assert abs(norms[0] / norms[1] - 1) < 1e-3, norms
    found = exported_tensors(other, exported.with_name("moved"))
    for name, one in exported_tensors(model, exported.with_name("stayed")).items():
        assert float((found[name] - one).abs().mean()) < 1e-4, f"{name}: other optimizer states"
    assert other.base is not None
    other.source = replace(other.source, base=replace(other.base, digest="0" * 64))
    try:
        store.load(place, {"policy": other})
    except CheckpointError as error:
        assert "digest 000000000000" in str(error), error
    else:
        raise AssertionError("loaded adapters of another model")


def main() -> None:
    torch.set_num_threads(1)
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    root, families, *layouts = sys.argv[1:]
    for family in families.split(","):
        folder, world = Path(root) / family, World(platform, 120)
        hf_config = json.loads((folder / "config.json").read_text())
        plain = resolve_family(None, hf_config)
        for text in layouts:
            targets = (ALL_LINEAR, *([EXPERTS] if "experts" in text.split(",") else []))
            known = adapted(plain, Lora(RANK, ALPHA, targets))
            if not adapts_experts(known, known.shape(hf_config)):
                known = adapted(plain, Lora(RANK, ALPHA))
            peft = Path(root) / f"{family}-peft-{len(targets)}"
            if world.rank == 0 and not peft.exists():
                peft_folder(folder, peft, known, known.shape(hf_config))
            world.gather_objects(None)
            numbers = [one for one in text.split(",") if one.isdigit()]
            tp, pp, cp, vpp = map(int, numbers)
            more = dict(one.split("=") for one in text.split(",") if "=" in one)
            recompute = next((r for r in ("full", "selective") if r in text.split(",")), "none")
            sizes = {name: int(size) for name, size in more.items()}
            layout = TrainLayout(world.size, tp, pp, cp, vpp=vpp, **sizes)
            full: tuple[str, ...] = ()
            if "whole" in text:
                tied = known.shape(hf_config).tied_embeddings
                full = ("embeddings", "norms") if tied else ("embeddings", "head", "norms")
            if "files" in text:
                moved = TrainLayout(world.size, pp, tp)
                if "etp" in sizes:
                    moved = TrainLayout(world.size, ep=2)
                check_files(folder, peft, layout, moved)
                models = (make(folder, peft, one, "none", full) for one in (layout, moved))
                check_moved(*models, folder, peft)
            elif "roles" in text:
                models = (make(folder, peft, layout, recompute, full) for _ in range(2))
                check_roles(*models, folder, peft)
            else:
                check(folder, peft, layout, recompute, full)
            parallel_state.destroy_model_parallel()
            print(f"{family} {text} is right", flush=True)


if __name__ == "__main__":
    main()
