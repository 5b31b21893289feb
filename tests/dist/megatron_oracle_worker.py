"""One rank of the test against Megatron's own ways from one training layout to another.

megatron_oracle_worker.py FOLDER        FOLDER/NAME and FOLDER/even are HF directories

`megatron.core.resharding` moves weights between two live models, `dist_checkpointing` saves one and
loads the other; neither knows our weight table, plan or transport.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.resharding import swap_model_weights
from safetensors.torch import load_file
from weight_cases import fused_reference

from hybridrl.checkpoint.folders import Checkpoint
from hybridrl.checkpoint.model_state import load_model
from hybridrl.checkpoint.writing import write_checkpoint
from hybridrl.config.load import load_config_dict
from hybridrl.config.schema import TrainConfig
from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.hybrid_engine.planning.plan import plan_reshard
from hybridrl.hybrid_engine.planning.proof import prove
from hybridrl.hybrid_engine.transports.packed import PackedTransport
from hybridrl.loop.rollout_setup import rollout_layout
from hybridrl.loop.setup import find_machines, make_meshes
from hybridrl.models.family import resolve_family
from hybridrl.models.hf.shards import box_view, load_hf
from hybridrl.models.weights import RankLayout, fused_layout, hf_shapes
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import DEFAULT_ORDER, TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.services.planner.plan_report import plan_report
from hybridrl.training.model import ModelSource, ParallelModel

TIMEOUT_S = 120.0
STAGING_BYTES = 1 << 16
STRIDED = "dp-tp-cp-ep-pp"  # tensor-parallel groups {0, 2} and {1, 3}
PIPELINE_FIRST = "pp-tp-cp-ep-dp"


@dataclass(frozen=True)
class Move:
    """A model and the layouts between which it moves."""

    name: str
    before: TrainLayout
    after: TrainLayout


def layout(**sizes: Any) -> TrainLayout:
    return TrainLayout(4, **sizes)


# TP 4 is more ranks than key-value heads.
LIVE = [
    Move("qwen2", layout(tp=4), layout(tp=2, pp=2)),
    Move("qwen2", layout(tp=2, pp=2), layout(tp=4)),
    Move("qwen2", layout(pp=4), layout(tp=2, order=STRIDED)),
    Move("qwen3", layout(tp=2, pp=2), layout(tp=2, pp=2, order=PIPELINE_FIRST)),
    Move("qwen3", layout(), layout(tp=4)),
    Move("qwen3", layout(tp=4), layout()),
    Move("qwen3", layout(cp=2, tp=2), layout(pp=2)),
    Move("llama", layout(tp=4), layout(tp=2, order=STRIDED)),
    Move("llama", layout(tp=2, pp=2), layout(pp=4)),
]
# What megatron.core.resharding 0.16.1 does not do: chunks of a virtual pipeline after the first,
# and the last stage's own copy of a tied embedding where the source has one stage.
SAVED = [
    Move("qwen2", layout(pp=2, vpp=2), layout(tp=4)),
    Move("qwen3", layout(tp=2, order=STRIDED), layout(tp=2, pp=2, vpp=2, order=PIPELINE_FIRST)),
    Move("llama", layout(tp=4), layout(pp=2, vpp=2)),
]


class BareEngine:
    """A WeightTarget of bare tensors."""

    def __init__(self, held: RankLayout) -> None:
        self._layout = held
        self._tensors = {name: torch.full(shape, -1.0) for name, shape in held.shapes.items()}

    def layout(self) -> RankLayout:
        return self._layout

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def begin_update(self) -> None: ...

    def sleep(self, keeps_memory: bool = False) -> None: ...

    def finish_update(self, version: int) -> None: ...


def build(folder: Path, name: str, mesh: Mesh) -> ParallelModel:
    """Builds a model whose every parameter is NaN."""
    mesh.platform.seed(1)
    hf_config = json.loads((folder / name / "config.json").read_text())
    family = resolve_family(None, hf_config)
    source = ModelSource(family, hf_config, torch.float32, family.name, folder / name)
    model = ParallelModel(mesh, source, "lm", TrainConfig())
    poison(model)
    return model


def poison(model: ParallelModel) -> None:
    for tensor in model.weights().values():
        tensor.fill_(torch.nan)


def load(folder: Path, name: str, model: ParallelModel) -> None:
    shapes = hf_shapes(model.source.family, model.source.shape)
    load_hf(folder / name, model.layout(), model.weights(), shapes)


def held(model: ParallelModel) -> dict[tuple[str, object], torch.Tensor]:
    """Returns a copy of all that has a counterpart in HF: all but padding."""
    weights = model.weights()
    return {
        (region.local, region.local_box): box_view(weights[region.local], region.local_box).clone()
        for region in model.layout().regions
    }


def move(before: ParallelModel, after: ParallelModel) -> int:
    """Moves the weights by our plan and transport; returns the bytes received."""
    sources, targets = (
        [model.layout_of(other) for other in range(model.world.size)] for model in (before, after)
    )
    plan = plan_reshard(sources, targets, itemsize=4)
    prove(plan, sources, targets)
    transport = PackedTransport(
        plan, before.world, before.weights(), after.weights(), STAGING_BYTES, torch.float32
    )
    traffic = transport.run()
    assert traffic.received_bytes == plan.receive_bytes[before.world.rank]
    return traffic.received_bytes


def megatron_bytes(model: torch.nn.Module, rank: int) -> int:
    """Returns what `megatron.core.resharding` planned that this rank receives from others."""
    parameters = dict(model.named_parameters())
    received = [op for op in model._cached_reshard_plan.recv_ops if op.peer_rank != rank]
    return sum(parameters[op.param_name][op.my_slice].nbytes for op in received)


def check_same(
    case: Move, found: Mapping[Any, torch.Tensor], wanted: Mapping[Any, torch.Tensor]
) -> None:
    assert found.keys() == wanted.keys() and found
    for key, tensor in wanted.items():
        assert not tensor.isnan().any(), (case, key, "the oracle left it out")
        assert torch.equal(found[key].view(torch.int32), tensor.view(torch.int32)), (case, key)


def check_live(folder: Path, case: Move, platform: Platform) -> None:
    """Compares with what `megatron.core.resharding` writes into a live model."""
    before = build(folder, case.name, Mesh(World(platform, TIMEOUT_S), case.before))
    load(folder, case.name, before)
    after = build(folder, case.name, Mesh(World(platform, TIMEOUT_S), case.after))
    rank = after.world.rank
    with torch.no_grad():
        swap_model_weights(before.chunks, after.chunks, "gloo")
    wanted, theirs = held(after), megatron_bytes(after.chunks[0], rank)
    poison(after)
    ours = move(before, after)
    check_same(case, held(after), wanted)
    assert ours <= theirs, (case, ours, theirs)
    print(f"rank {rank} {case}: received {ours} bytes, by Megatron's plan {theirs}", flush=True)


def check_saved(folder: Path, case: Move, platform: Platform, checkpoint: Path) -> None:
    """Compares with what `dist_checkpointing` loads that was saved in the other layout."""
    mesh = Mesh(World(platform, TIMEOUT_S), case.before)
    before = build(folder, case.name, mesh)
    load(folder, case.name, before)
    write_checkpoint(checkpoint, mesh.world, {"policy": before}, {}, before.source.files)
    mesh = Mesh(World(platform, TIMEOUT_S), case.after)
    after = build(folder, case.name, mesh)
    load_model(Checkpoint.open(checkpoint), "policy", after, mesh.world)
    wanted = held(after)
    poison(after)
    move(before, after)
    check_same(case, held(after), wanted)


def check_promise(folder: Path, platform: Platform) -> None:
    """What plan promises of the order that is chosen, is what then goes over the link."""
    sections = {
        "run": {"name": "a"},
        "model": {"init": str(folder / "even"), "dtype": "float32"},
        "algorithm": {"name": "grpo"},
        "steps": {"samples_per_prompt": 2},
        "train": {"tp": 2, "pp": 2},
        "rollout": {"engine": "vllm", "tp": 4, "max_new_tokens": 16},
        "data": {"max_prompt_tokens": 64},
    }
    own, _ = plan_report(load_config_dict(sections, [f"train.order={DEFAULT_ORDER}"]), 4)
    config = load_config_dict(sections)
    report, violations = plan_report(config, 4)
    assert violations == []
    meshes = make_meshes(config, platform, find_machines(platform))
    mesh = meshes.of("policy")
    assert mesh.layout.order == report["order"]["axes"] != DEFAULT_ORDER
    model = build(folder, "even", mesh)
    load(folder, "even", model)
    family, shape = model.source.family, model.source.shape
    sources = model.source_layouts()
    rollout = rollout_layout(model, config.rollout, sources, meshes.placement.rollout)
    assert [list(pair) for pair in rollout.assignment] == report["rollout"]["assignment"]
    tp_rank = rollout.assignment[mesh.world.rank][1]
    engine = BareEngine(fused_layout(family, shape, 4, tp_rank))
    sources = [model.layout_of(rank) for rank in range(4)]
    hybrid = HybridEngine(sources, model.weights(), engine, mesh.world, staging_bytes=STAGING_BYTES)
    stats = hybrid.to_rollout()
    assert stats.received_bytes == report["reshard"]["receive_bytes"][mesh.world.rank]
    assert stats.sent_bytes == report["reshard"]["send_bytes"][mesh.world.rank]
    most = max(mesh.world.gather_objects(stats.received_bytes))
    assert math.isclose(2 * most, max(own["reshard"]["receive_bytes"]), rel_tol=0.02)
    hf = {n: t.numpy() for n, t in load_file(folder / "even" / "model.safetensors").items()}
    for name, values in fused_reference(hf, shape, 4, tp_rank).items():
        written = engine.tensors()[name].numpy()
        assert (written == values).all(), name


def main() -> None:
    folder = Path(sys.argv[1])
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, TIMEOUT_S)
    check_promise(folder, platform)
    for case in LIVE:
        check_live(folder, case, platform)
    for number, case in enumerate(SAVED):
        check_saved(folder, case, platform, folder / f"checkpoint_{number}")
    stop_process_group()


if __name__ == "__main__":
    main()
