"""One rank of the test of what the hybrid engine writes against the engine's own loader, bit
for bit.

packaged_loader_worker.py ENGINE FOLDER        FOLDER/NAME are HF directories

The loader gets (HF name, whole tensor) pairs of the same weights, gathered from the training
ranks; it knows nothing of our description of the engine's parameters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from packaged import engine_class
from safetensors.torch import load_file

from hybridrl.config.schema import TrainConfig
from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.hybrid_engine.export import gather_tensors
from hybridrl.models.boxes import box_view
from hybridrl.models.family import resolve_family
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.sources import TrainingShard
from hybridrl.models.weights import RankLayout, hf_shapes
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import RolloutLayout, TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.training.model import ModelSource, ParallelModel


@dataclass(frozen=True)
class Case:
    """How it trains and generates, and in which type."""

    train: TrainLayout
    rollout: RolloutLayout
    dtype: torch.dtype = torch.float32


PIPELINED, WIDE = TrainLayout(4, tp=2, pp=2), TrainLayout(4, tp=4)
STRIDED = RolloutLayout(2, ((0, 0), (1, 0), (0, 1), (1, 1)))  # groups {0, 2} and {1, 3}
CASES = [
    Case(PIPELINED, RolloutLayout.consecutive(4, 1)),
    Case(PIPELINED, RolloutLayout.consecutive(4, 2)),
    Case(WIDE, STRIDED, torch.bfloat16),
]
NAMES = ("llama", "qwen2", "qwen3")
NEITHER = 12345.0  # no weight is this


def stream(model: ParallelModel) -> dict[str, torch.Tensor]:
    """Returns every HF tensor on every rank: gathered on rank 0, then sent to all."""
    shapes = hf_shapes(model.source.family, model.source.shape)
    world, dtype = model.world, model.source.dtype
    gathered = gather_tensors(model.whole_weights(), shapes, dtype, world)
    found = {name: tensor.clone() for name, tensor in gathered}
    assert (found.keys() == shapes.keys()) == (world.rank == 0)
    for name, shape in shapes.items():
        tensor = found.setdefault(name, torch.empty(shape, dtype=dtype))
        dist.broadcast(tensor, 0)
    return found


def without_padding(
    layout: RankLayout, tensors: Mapping[str, torch.Tensor]
) -> dict[tuple[str, object], torch.Tensor]:
    """Returns a copy of all that is read: only the engine's loader writes padding."""
    padded = {name for name, _ in layout.padding}
    kept = {(name, None): t.clone() for name, t in tensors.items() if name not in padded}
    for region in layout.regions:
        if region.local in padded:
            part = box_view(tensors[region.local], region.local_box)
            kept[region.local, region.local_box] = part.clone()
    return kept


def check(engine_name: str, folder: Path, name: str, case: Case, mesh: Mesh) -> None:
    hf_config = json.loads((folder / name / "config.json").read_text())
    family = resolve_family(None, hf_config)
    source = ModelSource(family, hf_config, case.dtype, family.name, folder / name)
    model = ParallelModel(mesh, source, "lm", TrainConfig())
    shapes = hf_shapes(family, source.shape)
    load_hf(folder / name, model.layout(), model.weights(), shapes)
    pairs = stream(model)
    for key, tensor in load_file(folder / name / "model.safetensors").items():
        assert torch.equal(pairs[key], tensor.to(case.dtype)), (name, case, key)
    dtype = str(case.dtype).removeprefix("torch.")
    settings = EngineSettings(hf_config, family.architectures, dtype, 4, 96)
    shard = TrainingShard(model.layout(), model.weights())
    engine = engine_class(engine_name)(settings, family, case.rollout, mesh.world.rank, shard=shard)
    for key, tensor in engine.tensors().items():
        if key not in engine.shared:
            tensor.fill_(NEITHER)
    hybrid = HybridEngine(model.whole_weights(), engine, mesh.world, staging_bytes=1 << 18)
    stats = hybrid.to_rollout(0)
    written = without_padding(engine.layout(), engine.tensors())
    for tensor in engine.tensors().values():  # the trainer's too, where they are shared
        tensor.fill_(NEITHER)
    engine.model.load_weights(iter(pairs.items()))
    loaded = without_padding(engine.layout(), engine.tensors())
    integers = {2: torch.int16, 4: torch.int32}[case.dtype.itemsize]
    assert written.keys() == loaded.keys()
    for key, tensor in loaded.items():
        assert not (tensor == NEITHER).any(), (name, case, key, "the engine's loader left it out")
        assert torch.equal(written[key].view(integers), tensor.view(integers)), (name, case, key)
    # Where the engine's loader wrote into shared memory it wrote what the trainer has there.
    for key in engine.shared:
        assert engine.tensors()[key].data_ptr() in {t.data_ptr() for t in shard.tensors.values()}
    received, shared, total = stats.received_bytes, len(engine.shared), len(engine.tensors())
    print(
        f"rank {mesh.world.rank} {name} {case}: {received} bytes, {shared} of {total} shared",
        flush=True,
    )
    engine.close()


def main() -> None:
    engine, folder = sys.argv[1], Path(sys.argv[2])
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    torch.set_grad_enabled(False)
    for train in (PIPELINED, WIDE):
        mesh = Mesh(World(platform, 120), train)
        platform.seed(1)
        for case in CASES:
            for name in NAMES if case.train is train else ():
                check(engine, folder, name, case, mesh)
    stop_process_group()


if __name__ == "__main__":
    main()
