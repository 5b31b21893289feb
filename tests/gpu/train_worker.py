"""One rank of the trainer's checks on GPUs; on CPU the same with torch's layers.

train_worker.py reference FOLDER              one process, fp32, torch's layers: gradients to FOLDER
train_worker.py compare FOLDER LAYOUT...      bf16, `train.layers=auto`, each against the reference
The environment variable MODELS, e.g. qwen2,qwen2+lora, restricts both to these models.

A layout is what parallel.layout takes, as in tp2dp2; the rest of the world is data parallel. One
that deals or cuts experts (tp2ep2, tp2etp2) is for models with experts alone. What a layout's
gradients may be away from the reference is 2e-2 of their norm; torch's own layers in bf16 are
measured beside (`torch`), packed micro-batches against single samples (`single`) and against shared
prompts (`share_prompts`), and a checkpoint of torch's layers is loaded into the chosen ones
(`checkpoint`), all in one process.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from parity_worker import gradients_in_hf_names, objective
from safetensors.torch import load_file, save_file

from hybridrl.checkpoint.folders import Checkpoint
from hybridrl.checkpoint.model_state import load_model
from hybridrl.checkpoint.writing import write_checkpoint
from hybridrl.config.schema import TrainConfig
from hybridrl.contracts.batch import Blob, Producer, Prompt, TrainBatch
from hybridrl.models.adapters.base_reference import BaseReference
from hybridrl.models.adapters.lora import ALL_LINEAR, EXPERTS, Lora
from hybridrl.models.adapters.rows import adapted, is_adapter
from hybridrl.models.family import ModelShape, resolve_family
from hybridrl.models.init import init_weights
from hybridrl.models.megatron.router import Router
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.training.model import ModelSource, ParallelModel

# Of prompts and responses; neighbours of one prompt length have the same prompt.
LENGTHS = [(30, 170), (30, 61), (30, 5), (100, 412), (1, 1), (250, 300), (250, 13), (3, 700)]
BUDGET, LONGEST = 1024, 703
# Of a GPU: what NCCL and its kernels take, and each of the groups that a World connects: of all
# ranks, data parallel, and data with context parallel.
MOST_NCCL_BYTES, MOST_GROUP_BYTES, NUM_GROUPS = 800 << 20, 950 << 20, 3
TOLERANCE = 2e-2  # of the norm; a number in bf16 is within 4e-3 of what it stands for
# Of FP8: formats alone give 0.176 (qwen2) and 0.212 (qwen3), computed in fp32 with every operand of
# the blocks' products rounded; a forward pass in E5M2 would give 0.305 and 0.370.
FP8_TOLERANCE = {"qwen2": 0.21, "qwen3": 0.25}
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 4001,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "initializer_range": 0.02,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {**SIZES, "model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {**SIZES, "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": {
        **SIZES,
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        **SIZES,
        "model_type": "deepseek_v3",
        "head_dim": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "q_lora_rank": 512,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 512,
        "first_k_dense_replace": 0,
    },
}
MODELS["qwen3_5_text"] = {
    **SIZES,
    "model_type": "qwen3_5_text",
    "tie_word_embeddings": False,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
MODELS |= {f"{name}+lora": MODELS[name] for name in ("qwen2", "deepseek_v3")}
MODELS |= {f"{name}+experts": MODELS[name] for name in ("qwen3_moe", "deepseek_v3")}
LORA = Lora(rank=16, alpha=32.0)
LORAS = {"": None, "lora": LORA, "experts": replace(LORA, targets=(ALL_LINEAR, EXPERTS))}
SMALL = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
SMALL_LATENT = SMALL | {"head_dim": 64, "num_key_value_heads": 4, "q_lora_rank": 64}


def a_batch(shape: ModelShape) -> TrainBatch:
    generator = torch.Generator().manual_seed(5)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, shape.vocab_size, (count,), generator=generator).tolist())

    groups = [length for length, _ in LENGTHS]
    tokens = {length: draw(length) for length in dict.fromkeys(groups)}
    prompts = [Prompt(p, "", tokens[p], {}, draw(r)) for p, r in LENGTHS]
    batch = TrainBatch.supervised(prompts, Producer.here("the trainer's checks"))
    batch = replace(batch, group_B=torch.tensor(groups))
    return batch if shape.moe is None else with_experts(batch, shape)


def with_experts(batch: TrainBatch, shape: ModelShape) -> TrainBatch:
    """Returns the batch with experts for routers, whose own choices would follow from roundings."""
    assert shape.moe is not None
    rows: list[torch.Tensor] = []
    for sample, (prompt, response) in enumerate(LENGTHS):
        # Samples of one prompt have read it with the same experts.
        for seed, count in ((prompt, prompt), (1000 + sample, response)):
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.rand(count, shape.num_layers, shape.moe.num_experts, generator=generator)
            chosen = drawn.topk(shape.moe.experts_per_token).indices
            rows.append(chosen.flatten(1).to(torch.uint8))
        rows[-1] = rows[-1][:-1]  # the engine reads no sample's last token
    blob = Blob(torch.cat(rows), batch.lengths_B - 1)
    return replace(batch, blobs={"routed_experts": blob})


class Run:
    """One model of one layout, its weights in place."""

    def __init__(self, name: str, mesh: Mesh, dtype: torch.dtype, **train: Any) -> None:
        small = SMALL_LATENT if name.startswith("deepseek_v3") else SMALL
        config = MODELS[name] | (small if mesh.platform.is_cpu else {})
        name, _, targets = name.partition("+")
        if name == "qwen2":
            config = {key: value for key, value in config.items() if key != "head_dim"}
        family = adapted(resolve_family(name, config), LORAS[targets])
        base = BaseReference(None, "the checks' model", 7, "")
        source = ModelSource(family, config, dtype, name, Path("."), base=base)
        mesh.platform.seed(1)
        self.mesh, settings = mesh, {"micro_batch_tokens": BUDGET, **train}
        self.model = model = ParallelModel(mesh, source, "lm", TrainConfig(**settings))
        shapes = hf_shapes(family, source.shape)
        norm_weight = 0.0 if source.shape.centered_norms else 1.0
        init_weights(model.layout(), shapes, model.weights(), config, 7, norm_weight)
        for tensor in model.weights().values():
            tensor.copy_(tensor.bfloat16())  # the same numbers in every type
        model.make_trainable(1e-3)
        if source.shape.moe is not None:
            model.replay_experts()

    def use_few_experts(self) -> None:
        """Makes routers choose the first experts for all tokens; other ranks get none."""
        for chunk in self.model._chunks:
            for part in chunk.modules():
                if isinstance(part, Router):
                    part.routing = first_experts(part.topk)  # type: ignore[method-assign]

    def gradients(self, pads: bool = False) -> tuple[dict[str, Any], torch.Tensor]:
        """Returns parity_worker's gradients and log-probabilities; `pads` adds a padding batch."""
        batch = a_batch(self.model.source.shape)
        plan = self.model.plan(batch)
        inputs = plan.inputs
        outputs = self.model.forward_all(inputs)
        logp_T = plan.column([output.logp_S for output in outputs])
        if pads:
            inputs = [self.model.planner._input(plan.here, [], None, 1.0), *inputs]
        # Twice: from the second time on gradients are reduced while the backward pass runs.
        for _ in range(2):
            self.model.accumulate(inputs, objective)
        found = gradients_in_hf_names(self.model)
        if self.model.lora is not None:
            found = {name: one for name, one in found.items() if is_adapter(name)}
        return found, logp_T * batch.response_mask_T


def away(mesh: Mesh, found: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, float]:
    """Returns the distance from the reference, relative to its norm, in all and of each tensor."""
    names = sorted(found)
    squares = torch.zeros(len(names), 3, dtype=torch.float64)
    for row, name in zip(squares, names, strict=True):
        gradient, held = found[name]
        expected = reference[name].double()
        row[0] = ((gradient.double() - expected) * held).square().sum()
        row[1], row[2] = expected.square().sum(), held.sum()
    once = mesh.world.sum_over_world(squares[:, [0, 2]])
    copies = once[:, 1] / torch.tensor([float(reference[n].numel()) for n in names])
    assert bool((copies >= 1).all()), "a gradient that no rank holds whole"
    errors = once[:, 0] / copies
    each = (errors / squares[:, 1].clamp(min=1e-30)).sqrt()
    worst = int(each.argmax())
    total = float((errors.sum() / squares[:, 1].sum()).sqrt())
    print_once(mesh, f"    worst tensor {names[worst]}: {float(each[worst]):.2e}")
    return {"all": total, names[worst]: float(each[worst])}


def print_once(mesh: Mesh, text: str) -> None:
    if mesh.world.rank == 0:
        print(text, flush=True)


def worlds(platform: Platform, *layouts: str) -> Iterator[tuple[str, Mesh]]:
    size = torch.distributed.get_world_size()
    for text in layouts:
        sizes = {axis: int(n) for axis, n in re.findall(r"(etp|ep|tp|pp|cp)(\d+)", text)}
        yield text, Mesh(World(platform, 120), TrainLayout(size, **sizes))
        parallel_state.destroy_model_parallel()


def group_bytes(platform: Platform) -> int:
    """Returns what the groups of the first World take of this rank's GPU."""
    if platform.is_cpu:
        return 0
    before = torch.cuda.mem_get_info()[0]
    for _ in worlds(platform, "tp1"):
        pass
    return before - torch.cuda.mem_get_info()[0]


def first_experts(count: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Returns a router that chooses the first `count` experts by their own scores."""

    def routing(logits: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits_TE = logits.view(-1, logits.size(-1))
        chosen_TE = torch.zeros_like(logits_TE, dtype=torch.bool)
        chosen_TE[:, :count] = True
        return logits_TE.float().sigmoid() * chosen_TE, chosen_TE

    return routing


def has_experts(name: str) -> bool:
    return "num_experts" in MODELS[name] or "n_routed_experts" in MODELS[name]


def few(name: str) -> str:
    """Returns the name of the reference that `use_few_experts` gives."""
    return f"{name}_few"


def check_layouts(platform: Platform, name: str, folder: Path, layouts: list[str]) -> None:
    if not has_experts(name):
        layouts = [text for text in layouts if "ep" not in text]
    for text, mesh in worlds(platform, *layouts):
        run = Run(name, mesh, torch.bfloat16)
        print_once(mesh, f"{name} {text}: {run.model.layers.said}")
        check_gradients(run, f"{name} {text}", load_file(folder / f"{name}.safetensors"))
        if has_experts(name):
            run = Run(name, mesh, torch.bfloat16)
            run.use_few_experts()
            reference = load_file(folder / f"{few(name)}.safetensors")
            check_gradients(run, f"{name} {text}, few experts", reference, pads=True)


def check_gradients(
    run: Run, what: str, reference: Mapping[str, torch.Tensor], pads: bool = False
) -> None:
    mesh = run.mesh
    gradients, logp_T = run.gradients(pads)
    error = away(mesh, gradients, reference)["all"]
    mean = float((logp_T - reference["logp_T"]).abs().sum() / (logp_T != 0).sum())
    print_once(mesh, f"    {what}: gradients {error:.2e}, log-probabilities {mean:.2e} away")
    assert error < TOLERANCE, f"{what}: gradients are {error} from fp32"
    assert mean < TOLERANCE, f"{what}: log-probabilities are {mean} nats from fp32"


def check_alone(platform: Platform, name: str, folder: Path) -> None:
    """What one process can say."""
    reference = load_file(folder / f"{name}.safetensors")
    for _, mesh in worlds(platform, "tp1"):
        chosen = Run(name, mesh, torch.bfloat16)
        ours, _ = chosen.gradients()
        ways = {
            "torch": {"layers": "torch"},
            "torch_rule": {"delta_rule": "torch"},
            "single": {"micro_batch_tokens": LONGEST},
            "selective": {"recompute": "selective"},
            "full": {"recompute": "full"},
            "fp32_residual": {"fp32_residual": True},
            "share_prompts": {"share_prompts": True},
            "fp8": {"fp8": "hybrid"},  # the last, as it is the least like the others
        }
        has_experts = chosen.model.source.shape.moe is not None
        if chosen.model.source.shape.mixer is None:
            del ways["torch_rule"]
        else:
            print_once(mesh, f"{name} {chosen.model.delta_rule.said}")
        # FP8 is refused with experts, and with torch's layers.
        if has_experts or chosen.model.layers.kind == "torch":
            del ways["fp8"]
        ours_from_fp32 = away(mesh, ours, reference)["all"]
        print_once(mesh, f"{name} {chosen.model.layers.said}: {ours_from_fp32:.2e} from fp32")
        check_recurrent_layers(mesh, name, ours, reference)
        assert ours_from_fp32 < TOLERANCE, f"{name}: gradients are {ours_from_fp32} from fp32"
        for way, settings in ways.items():
            other, _ = Run(name, mesh, torch.bfloat16, **settings).gradients()
            from_fp32 = away(mesh, other, reference)["all"]
            ours_is = away(mesh, ours, {n: g for n, (g, _) in other.items()})["all"]
            print_once(mesh, f"{name} {way}: {from_fp32:.2e} from fp32, {ours_is:.2e} from ours")
            most = FP8_TOLERANCE[name.partition("+")[0]] if way == "fp8" else TOLERANCE
            assert from_fp32 < most, f"{name} {way}: gradients are {from_fp32} from fp32"
        check_checkpoints(name, mesh, folder)


def check_recurrent_layers(
    mesh: Mesh, name: str, found: Mapping[str, Any], reference: Mapping[str, Any]
) -> None:
    """Gradients of delta nets have the bound of attention, each kind of layer by itself."""
    if not any(".linear_attn." in n for n in found):
        return
    errors = {}
    for kind in (".linear_attn.", ".self_attn.", ".mlp."):
        of_kind = {n: one for n, one in found.items() if kind in n}
        errors[kind] = away(mesh, of_kind, reference)["all"]
        print_once(mesh, f"{name} {kind.strip('.')}: {errors[kind]:.2e} from fp32")
    assert errors[".linear_attn."] < TOLERANCE, f"{name}: {errors}"


def check_checkpoints(name: str, mesh: Mesh, folder: Path) -> None:
    """A checkpoint of one kind of layers is loaded into the other kind, both ways."""
    for kinds in (("torch", "auto"), ("auto", "torch")):
        saved, loaded = (Run(name, mesh, torch.bfloat16, layers=kind).model for kind in kinds)
        saved.accumulate(
            saved.plan(a_batch(saved.source.shape)).inputs,
            objective,
        )
        saved.apply(1e-3, saved.grad_norm())
        where = folder / f"{name}_{kinds[0]}"
        write_checkpoint(where, mesh.world, {"policy": saved}, {}, saved.source.files)
        load_model(Checkpoint.open(where), "policy", loaded, mesh.world)
        named = [dict(in_hf_names(model)) for model in (saved, loaded)]
        assert named[0].keys() == named[1].keys()
        assert all(torch.equal(tensor, named[1][key]) for key, tensor in named[0].items())
        print_once(mesh, f"{name}: layers={kinds[1]} loads a checkpoint of layers={kinds[0]}")


def in_hf_names(model: ParallelModel) -> Iterator[tuple[tuple[str, Any], torch.Tensor]]:
    weights = model.weights()
    for region in model.layout().regions:
        inner = tuple(slice(a, b) for a, b in region.local_box)
        yield (region.hf, region.hf_box), weights[region.local][inner]


def write_reference(platform: Platform, name: str, folder: Path) -> None:
    for _, mesh in worlds(platform, "tp1"):
        for kind in (name, few(name)) if has_experts(name) else (name,):
            run = Run(name, mesh, torch.float32, layers="torch")
            if kind != name:
                run.use_few_experts()
            gradients, logp_T = run.gradients()
            tensors = {n: gradient for n, (gradient, _) in gradients.items()}
            save_file({**tensors, "logp_T": logp_T}, folder / f"{kind}.safetensors")


def main() -> None:
    mode, folder, layouts = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    taken, world_size = group_bytes(platform), torch.distributed.get_world_size()
    # The reference is in fp32 proper, not in TF32.
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in os.environ.get("MODELS", ",".join(MODELS)).split(","):
        if mode == "reference":
            write_reference(platform, name, folder)
        elif layouts == ["alone"]:
            check_alone(platform, name, folder)
        else:
            check_layouts(platform, name, folder, layouts)
    torch.distributed.destroy_process_group()
    # Groups of ranks that nothing uses take no memory: only those that a World connects do.
    most = MOST_NCCL_BYTES + (MOST_GROUP_BYTES * NUM_GROUPS if world_size > 1 else 0)
    assert taken < most, f"a World's groups take {taken} bytes"
    said = {"mode": mode, "layouts": layouts, "group_bytes": taken, "ok": True}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
