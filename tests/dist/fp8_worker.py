"""One rank of the reshard test with engines that hold FP8 weights: many layout pairs through gloo.

fp8_worker.py FIRST_SEED NUM_CASES

The reference quantizes whole HF tensors with torch, and cuts them as weight_cases.py does. Blocks
have 2 or 4 rows and columns, because the random models are tiny.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.distributed as dist
from job_world import job_world
from weight_cases import Arrays, Case, random_case, random_case_with_experts

from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.hybrid_engine.planning.plan import PlanError
from hybridrl.hybrid_engine.planning.wire_elements import fixed_sizes
from hybridrl.hybrid_engine.verify import VerifyError
from hybridrl.models.quantized import SCALES, engine_scales, quantized_shapes
from hybridrl.models.sources import FullWeights
from hybridrl.models.weights import RankLayout
from hybridrl.parallel.joining import stop_process_group
from hybridrl.training.quantized_weights import QuantizedWeights

STAGING_BYTES = 6000  # small, so that there are many exchanges and split rows
FP8 = torch.float8_e4m3fn


class Engine:
    """A WeightTarget of bare tensors, some of them FP8."""

    def __init__(self, layout: RankLayout) -> None:
        self._layout = layout
        types = {
            name: FP8 if size == 1 else torch.float32 for name, size in fixed_sizes(layout).items()
        }
        self._tensors = {
            name: torch.full(shape, -1.0).to(types.get(name, torch.bfloat16))
            for name, shape in layout.shapes.items()
        }
        self.after: Callable[[], object] = lambda: None

    def layout(self) -> RankLayout:
        return self._layout

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def sleep(self, keeps_memory: bool = False) -> None:
        pass

    def begin_update(self) -> None:
        pass

    def finish_update(self, version: int) -> None:
        self.after()


def whole(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bits of a whole quantized tensor, and for each element its scale."""
    scales = torch.ones(weight.shape)
    for row in range(0, weight.size(0), block):
        for column in range(0, weight.size(1), block):
            place = slice(row, row + block), slice(column, column + block)
            largest = weight[place].float().abs().max()
            if largest > 0:
                scales[place] = torch.exp2(torch.ceil(torch.log2(largest.double() / 448)))
    return (weight.float() / scales).to(FP8).view(torch.uint8), scales


def expected(
    case: Case, weights: dict[str, torch.Tensor], rank: int, block: int
) -> tuple[Arrays, Arrays]:
    """Returns a rank's parameters, in FP8 their bits, and the scale of each of their elements."""
    quantized = quantized_shapes(case.family, case.shape)
    bits, scales = {}, {}
    for name, weight in weights.items():
        found = (
            whole(weight, block)
            if name in quantized
            else (weight.float(), torch.zeros(weight.shape))
        )
        bits[name], scales[name] = (one.float().numpy() for one in found)
    return case.generating(bits, rank), case.generating(scales, rank)


def random_weights(case: Case, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, array in case.weights().items():
        size = 10.0 ** torch.randint(-6, 5, array.shape[:1], generator=generator)
        value = torch.randn(array.shape, generator=generator)
        if value.dim() == 2:
            value = value * size[:, None]
            value[:2] = 0
        kept = name.endswith("e_score_correction_bias")
        found[name] = value if kept else value.bfloat16()
    return found


def on_rank(case: Case, weights: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Returns a rank's training tensors; their arrays are fp32, which holds bf16 exactly."""
    arrays = case.trained({name: one.float().numpy() for name, one in weights.items()}, rank)
    kept = {name for name in arrays if name.endswith("expert_bias")}
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()
    }
    return {name: one if name in kept else one.bfloat16() for name, one in tensors.items()}


def check_engine(engine: Engine, wanted: Arrays, scales: Arrays, block: int, where: object) -> int:
    """Compares an engine with the reference; returns how many of its parameters are in FP8."""
    tensors, sizes = engine.tensors(), fixed_sizes(engine.layout())
    num_fp8 = 0
    for name, array in wanted.items():
        found = tensors[name]
        if found.dtype == FP8:
            found, num_fp8 = found.view(torch.uint8), num_fp8 + 1
            stem, slash, index = name.partition("/")
            own = tensors[f"{stem}{SCALES}{slash}{index}"]
            wide = own.repeat_interleave(block, 0).repeat_interleave(block, 1)
            rows, columns = found.shape
            assert torch.equal(wide[:rows, :columns], torch.from_numpy(scales[name])), (where, name)
        value = torch.from_numpy(np.ascontiguousarray(array))
        is_weight = (
            value != -1 if sizes.get(name) != 1 else torch.ones(value.shape, dtype=torch.bool)
        )
        assert torch.equal(found.float()[is_weight], value[is_weight]), (where, name)
    return num_fp8


def check_case(seed: int, rank: int, world: int) -> int:
    """Writes an engine twice, with new scales; returns the number of FP8 parameters compared."""
    case = (random_case_with_experts if seed % 2 else random_case)(seed, world)
    block = random.Random(seed).choice((2, 4))
    quantized = quantized_shapes(case.family, case.shape)
    weights = random_weights(case, seed)
    trained = on_rank(case, weights, rank)
    try:
        targets = [engine_scales(one, quantized, block) for one in case.targets()]
        source = QuantizedWeights(FullWeights(case.sources(), trained), rank, quantized, block)
    except ModelError as error:
        assert "whole blocks of" in str(error)
        return 0
    engine = Engine(targets[rank])
    options = {"staging_bytes": STAGING_BYTES, "verify_every": 1, "domain_size": 2}
    hybrid = HybridEngine(source, engine, job_world(), **options)
    compared = 0
    for version in range(2):
        stats = hybrid.to_rollout()
        assert stats.verify_seconds > 0
        assert stats.total_sent_bytes == stats.total_planned_bytes == stats.total_received_bytes
        compared += check_engine(engine, *expected(case, weights, rank, block), block, (seed, rank))
        if version == 0:
            weights = random_weights(case, seed + 1000)
            for name, tensor in on_rank(case, weights, rank).items():
                trained[name].copy_(tensor)
    hybrid.close()
    return compared


def faulty_case() -> tuple[Case, int, dict[str, torch.Tensor]]:
    for seed in range(1, 100, 2):
        case = random_case_with_experts(seed, dist.get_world_size())
        quantized = quantized_shapes(case.family, case.shape)
        try:
            for layout in case.targets():
                engine_scales(layout, quantized, 2)
            QuantizedWeights(
                FullWeights(case.sources(), on_rank(case, random_weights(case, 0), 0)),
                0,
                quantized,
                2,
            )
        except ModelError:
            continue
        if case.engine == "fused" and case.rollout.tp > 1 and case.shape.latent is None:
            return case, 2, random_weights(case, seed)
    raise AssertionError("no layouts consist of whole blocks")


def check_faults(rank: int, world: int) -> None:
    """Wrong scales on the last rank, behind the transport's back, are named by all ranks."""
    case, block, weights = faulty_case()
    quantized = quantized_shapes(case.family, case.shape)
    trained = on_rank(case, weights, rank)
    layout = engine_scales(case.targets()[rank], quantized, block)
    scales = "mlp.experts.routed_experts.w13_weight_scale_inv/0"

    def neighbour(engine: Engine) -> None:
        for name, own in engine.tensors().items():
            if name.endswith(scales):
                own.copy_(own.roll(1, 0))

    kept: dict[str, torch.Tensor] = {}

    def stale(engine: Engine) -> None:
        for name, own in engine.tensors().items():
            if name.endswith(scales):
                if name in kept:
                    own.copy_(kept[name])
                kept[name] = own.clone()

    for plant, version in ((neighbour, 0), (stale, 1)):
        engine = Engine(layout)
        source = QuantizedWeights(FullWeights(case.sources(), trained), rank, quantized, block)
        hybrid = HybridEngine(
            source, engine, job_world(), staging_bytes=STAGING_BYTES, verify_every=1
        )
        if rank == world - 1:
            engine.after = lambda engine=engine, plant=plant: plant(engine)
        if version:
            hybrid.to_rollout()
            for tensor in trained.values():
                tensor.mul_(4)
        try:
            hybrid.to_rollout()
        except VerifyError as error:
            assert "w13_weight_scale_inv/0" in str(error), error
            assert f"of the engine on rank {world - 1} differs" in str(error), error
        else:
            raise AssertionError(f"{plant.__name__} was not found")
        hybrid.close()


def check_refusals(rank: int, world: int) -> None:
    """Weights of another type than the engine's are refused by all ranks."""
    case, block, weights = faulty_case()
    quantized = quantized_shapes(case.family, case.shape)
    trained = on_rank(case, weights, rank)
    name = next(name for name in trained if name.endswith("input_layernorm.weight"))
    if rank == world - 1:
        trained[name] = trained[name].float()
    source = QuantizedWeights(FullWeights(case.sources(), trained), rank, quantized, block)
    engine = Engine(engine_scales(case.targets()[rank], quantized, block))
    try:
        HybridEngine(source, engine, job_world(), staging_bytes=STAGING_BYTES)
    except PlanError as error:
        assert f"rank {world - 1}: " in str(error) and "without a cast" in str(error), error
    else:
        raise AssertionError("fp32 norms were not refused")


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    compared = [check_case(seed, rank, world) for seed in range(first, first + count)]
    num_cases = sum(any(row) for row in zip(*job_world().gather_objects(compared), strict=True))
    assert num_cases >= count // 3, (
        f"only {num_cases} of {count} layout pairs consist of whole blocks"
    )
    check_faults(rank, world)
    check_refusals(rank, world)
    print(f"{num_cases} of {count} layout pairs")
    dist.barrier()
    stop_process_group()


if __name__ == "__main__":
    main()
