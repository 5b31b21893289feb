"""One of two ranks that write engines from other weight sources than a model's parameters: gloo.

The sources here are all that it takes: nothing else knows of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny_models import tiny_model
from torch import Tensor
from trained_weights_worker import Case, Engine

from hybridrl.config.schema import TrainConfig
from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.hybrid_engine.export import export_hf
from hybridrl.hybrid_engine.verify import VerifyError
from hybridrl.models.boxes import Box, box_view
from hybridrl.models.family import resolve_family
from hybridrl.models.init import init_weights
from hybridrl.models.sources import TrainingShard
from hybridrl.models.weights import RankLayout, fused_layout, hf_shapes
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.training.model import ModelSource, ParallelModel

CASES = [
    Case("TP2 -> TP1", "qwen2", TrainLayout(2, tp=2), 1, torch.bfloat16),
    Case("PP2 -> TP2, tied", "llama", TrainLayout(2, pp=2), 2, torch.bfloat16),
]


class Doubled:
    """Twice a tensor, computed slice by slice."""

    def __init__(self, tensor: Tensor) -> None:
        self.inputs = (tensor,)
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.boxes: list[Box] = []

    def compute(self, box: Box) -> Tensor:
        self.boxes.append(box)
        return box_view(self.inputs[0], box) * 2


@dataclass(frozen=True)
class DoubledWeights:
    """Twice a model's weights; its norms are computed as a whole."""

    layouts: Sequence[RankLayout]
    tensors: Mapping[str, Tensor | Doubled]
    norms: Mapping[str, Tensor]
    frozen: frozenset[str] = frozenset()
    shard: TrainingShard | None = None

    @classmethod
    def of(cls, model: ParallelModel) -> DoubledWeights:
        norms = {name: one for name, one in model.weights().items() if one.dim() == 1}
        doubled = {name: Doubled(one) for name, one in model.weights().items()}
        held = {name: torch.empty_like(one) for name, one in norms.items()}
        return cls(model.whole_weights().layouts, doubled | held, norms)

    def refresh(self) -> None:
        for name, norm in self.norms.items():
            place = self.tensors[name]
            assert isinstance(place, Tensor)
            place.copy_(norm * 2)


def build(mesh: Mesh, case: Case) -> ParallelModel:
    hf_config = tiny_model(case.family).config.to_dict()
    architecture = f"{case.family.capitalize()}ForCausalLM"
    family = resolve_family(None, hf_config | {"architectures": [architecture]})
    source = ModelSource(family, hf_config, case.dtype, family.name, Path("."))
    model = ParallelModel(mesh, source, "lm", TrainConfig(micro_batch_tokens=64))
    shapes = hf_shapes(family, source.shape)
    init_weights(model.layout(), shapes, model.weights(), hf_config, 3)
    return model


def engine_of(model: ParallelModel, case: Case, kind: type[Engine] = Engine) -> Engine:
    tp_rank = model.world.rank % case.rollout_tp
    layout = fused_layout(model.source.family, model.source.shape, case.rollout_tp, tp_rank)
    return kind(layout, case.dtype, torch.device("cpu"), None)


def written(engine: Engine) -> dict[str, Tensor]:
    """Returns what an engine holds, without padding."""
    return {
        f"{region.hf}{region.hf_box}": box_view(engine.live[region.local], region.local_box).clone()
        for region in engine.layout().regions
    }


def check_computed(model: ParallelModel, case: Case, folder: Path) -> None:
    """Slices that are computed arrive, are verified and are exported like those in memory."""
    plain, doubled = engine_of(model, case), engine_of(model, case)
    source = DoubledWeights.of(model)
    of_plain = HybridEngine(model.whole_weights(), plain, model.world, staging_bytes=1 << 14)
    hybrid = HybridEngine(source, doubled, model.world, staging_bytes=1 << 14, verify_every=1)
    for _ in range(2):
        for weight in model.weights().values():
            weight.mul_(-3)
        stats = hybrid.to_rollout()
        assert stats.total_sent_bytes == of_plain.to_rollout().total_sent_bytes > 0
        wanted = {name: 2 * one for name, one in written(plain).items()}
        found = written(doubled)
        assert all(torch.equal(found[name], one) for name, one in wanted.items())
    computed = [one for one in source.tensors.values() if isinstance(one, Doubled)]
    sizes = [torch.Size(b - a for a, b in box) for one in computed for box in one.boxes]
    assert any(size not in {one.shape for one in computed} for size in sizes), "none was sliced"
    doubled.live[next(iter(doubled.live))].view(-1)[:64] += 1
    try:
        hybrid.verify()
    except VerifyError:
        pass
    else:
        raise AssertionError("an engine that differs from its source was not found")
    shapes = hf_shapes(model.source.family, model.source.shape)
    parts = shapes, case.dtype, model.source.hf_config
    export_hf(folder / "plain", model.whole_weights(), *parts, peers=model.world)
    export_hf(folder / "doubled", source, *parts, peers=model.world)
    ones, twos = (load_file(folder / one / "model.safetensors") for one in ("plain", "doubled"))
    assert ones.keys() == twos.keys() == shapes.keys()
    assert all(torch.equal(2 * ones[name], twos[name]) for name in ones)


class ForgetfulEngine(Engine):
    """Loses its weights in a sleep that frees memory."""

    def forgets_weights(self, keeps_memory: bool) -> bool:
        return not keeps_memory


def check_frozen(model: ParallelModel, case: Case) -> None:
    """Frozen tensors are sent once, and again to engines that have lost them."""
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_("norm" in name)
    weights = model.weight_source()
    for kind in (Engine, ForgetfulEngine):
        engine = engine_of(model, case, kind)
        hybrid = HybridEngine(weights, engine, model.world, staging_bytes=1 << 14)
        everything = frozenset(engine.live)
        changing = frozenset(name for name in everything if "norm" in name)

        def arrived(hybrid: HybridEngine = hybrid, engine: Engine = engine) -> frozenset[str]:
            """Returns what a transition writes."""
            for tensor in engine.live.values():
                tensor.fill_(float("nan"))
            stats = hybrid.to_rollout()
            assert stats.total_planned_bytes == stats.total_sent_bytes
            return frozenset(n for n, one in engine.live.items() if not one.isnan().all())

        assert arrived() == everything
        for _ in range(2):
            hybrid.to_train()
            assert arrived() == (changing if kind is Engine else everything)
        hybrid.send_frozen_again()
        assert arrived() == everything
        hybrid.verify()
        hybrid.to_train(frees_memory=True)
        if kind is ForgetfulEngine:
            continue
        assert arrived() == changing
        try:
            hybrid.verify()  # looks at frozen ones too
        except VerifyError:
            continue
        raise AssertionError("lost weights were not found")


def main() -> None:
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    for number, case in enumerate(CASES):
        mesh = Mesh(World(platform, 120), case.train)
        platform.seed(1)
        model = build(mesh, case)
        check_computed(model, case, Path(sys.argv[1], str(number)))
        check_frozen(model, case)


if __name__ == "__main__":
    main()
