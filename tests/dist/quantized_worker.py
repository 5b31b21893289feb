"""One rank of the test of block FP8: real gloo messages and peer memory, against quantized slices.

quantized_worker.py
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from job_world import job_world
from weight_cases import Arrays, Case

from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.hybrid_engine.planning.plan import PlanError
from hybridrl.hybrid_engine.transports.packed import PackedTransport
from hybridrl.hybrid_engine.verify import VerifyError
from hybridrl.models.family import ModelShape
from hybridrl.models.weights import RankLayout
from hybridrl.parallel.joining import stop_process_group
from hybridrl.parallel.layout import RolloutLayout, TrainLayout
from hybridrl.parallel.peer_memory import PeerMemory, allocate

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if HAS_GPU else torch.device("cpu")
STAGING_BYTES = 1 << 20  # 256 KiB a buffer, less than a parameter: its rows come in many exchanges
FP8 = torch.float8_e4m3fn

# Cut at multiples of 128, but for the keys and values of tp 4; and hardly anything so: parameters
# end within a block, and tp 4 cuts rows into 80.
WHOLE = ModelShape(4, 256, 4, 2, 64, 512, 300, qkv_bias=True)
RAGGED = ModelShape(4, 192, 4, 4, 48, 320, 300)


class Engine:
    """A QuantizedTarget of bare tensors whose projections are block FP8."""

    def __init__(self, layout: RankLayout) -> None:
        self._layout = layout
        self._tensors, self._scales = {}, {}
        for name, shape in layout.shapes.items():
            is_quantized = "_proj.weight" in name
            dtype = FP8 if is_quantized else torch.bfloat16
            self._tensors[name] = torch.full(shape, -1.0, device=DEVICE).to(dtype)
            if is_quantized:
                blocks = [-(-size // 128) for size in shape]
                self._scales[name] = torch.full(blocks, -1.0, device=DEVICE)

    def layout(self) -> RankLayout:
        return self._layout

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def scales(self) -> Mapping[str, torch.Tensor]:
        return self._scales

    def sleep(self, keeps_memory: bool = False) -> None:
        pass

    def begin_update(self) -> None:
        pass

    def finish_update(self, version: int) -> None:
        pass


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a whole bfloat16 weight, block by block."""
    values = torch.empty(weight.shape, dtype=FP8, device=DEVICE)
    scales = torch.empty([-(-size // 128) for size in weight.shape], device=DEVICE)
    for i in range(scales.size(0)):
        for j in range(scales.size(1)):
            place = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            block = weight[place].float()
            scales[i, j] = block.abs().max().clamp(min=1e-4) / torch.tensor(448.0, device=DEVICE)
            values[place] = (block / scales[i, j]).to(FP8)
    return values, scales


def drawn(case: Case) -> Arrays:
    """Returns HF weights of many magnitudes; some blocks are zeros."""
    random = np.random.default_rng(0)
    found = {}
    for name, numbers in case.weights().items():
        weight = random.standard_normal(numbers.shape, np.float32)
        weight *= 10.0 ** random.uniform(-4, 2, (numbers.shape[0], *[1] * (numbers.ndim - 1)))
        if "down_proj" in name:
            weight[:128, :128] = 0
        found[name] = weight.astype(np.float32)
    return found


def in_peer_memory(trained: Mapping[str, torch.Tensor]) -> tuple[PeerMemory, Mapping]:
    starts, size = {}, 0
    for name, tensor in trained.items():
        starts[name] = size
        size += -(-tensor.nbytes // 16) * 16
    memory = allocate(max(job_world().gather_objects(size)), DEVICE, 60, job_world())
    placed = {}
    for name, tensor in trained.items():
        place = memory.of(dist.get_rank())[starts[name] : starts[name] + tensor.nbytes]
        placed[name] = place.view(tensor.dtype).view(tensor.shape)
        placed[name].copy_(tensor)
    return memory, placed


def check(case: Case, dtype: torch.dtype, kind: str) -> HybridEngine:
    """Reshards with weights that change in between, verified each time; on GPUs the second time
    makes the graph of the packed transport, and the third runs it alone.
    """
    rank, hf = dist.get_rank(), drawn(case)
    arrays = case.trained(hf, rank)
    trained = {n: torch.from_numpy(a.copy()).to(DEVICE, dtype) for n, a in arrays.items()}
    memory, trained = in_peer_memory(trained)
    engine = Engine(case.targets()[rank])
    hybrid = HybridEngine(
        case.sources(),
        trained,
        engine,
        job_world(),
        staging_bytes=STAGING_BYTES,
        verify_every=1,
        domain_size=2 if kind == "packed" and case.shape is RAGGED else None,
        peer_memory=memory if kind == "peer" else None,
    )
    total = 1
    for factor in (1, -3, 2):
        total *= factor
        for tensor in trained.values():
            tensor.mul_(factor)
        stats = hybrid.to_rollout()
        assert stats.received_bytes == hybrid.plan.receive_bytes[rank] > 0
        assert hybrid.plan.itemsize == 2 and stats.verify_seconds > 0
        for name, array in case.generating(hf, rank).items():
            wanted = torch.from_numpy(array.copy()).to(DEVICE, dtype)
            wanted = wanted.mul_(total).to(torch.bfloat16)
            found = engine.tensors()[name]
            if name in engine.scales():
                values, scales = quantized(wanted)
                assert torch.equal(engine.scales()[name], scales), (kind, rank, name)
                assert torch.equal(found.view(torch.uint8), values.view(torch.uint8)), name
            else:
                rows = wanted.size(0) if "proj" in name or "norm" in name else case.shape.vocab_size
                rows = max(min(rows, rows - case.rollout.assignment[rank][1] * len(found)), 0)
                assert torch.equal(found[:rows], wanted[:rows]), (kind, rank, name)
    return hybrid


def check_memory(hybrid: HybridEngine, case: Case) -> None:
    """Scratches are shared: they hold fewer elements than the quantized parameters together."""
    engine = hybrid._target
    sizes = {name: 2 * engine.tensors()[name].numel() for name in engine.scales()}
    transport = hybrid.transport
    if isinstance(transport, PackedTransport):
        assert 0 < transport._arrivals.extra_bytes < sum(sizes.values()) * 0.75
        assert transport._traffic.num_exchanges > 3
        assert transport.extra_bytes > transport._arrivals.extra_bytes
    else:  # what is of whole blocks, in the wire's type, is not gathered
        dtype = next(iter(hybrid._weights.values())).dtype
        gathered = set(sizes.values())
        if dtype == hybrid._wire_dtype:
            cut = [size for name, size in sizes.items() if "qkv" in name]
            gathered = set(cut if case.train.tp > 2 or case.shape is RAGGED else [0])
        scratch = transport._quantized._scratch.nbytes
        assert scratch >= max(gathered), (scratch, gathered)
        assert scratch == max(gathered) or case.shape is RAGGED
        assert scratch <= max(sizes.values()) and scratch <= transport.extra_bytes


def check_faults(hybrid: HybridEngine, engine: Engine) -> None:
    """A bit of a value, or the last bit of a scale, on the last rank is found and named by all."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for name in ("model.layers.1.self_attn.qkv_proj.weight", "model.layers.3.mlp.down_proj.weight"):
        bits = engine.tensors()[name].view(torch.uint8), engine.scales()[name].view(torch.int32)
        for place in bits:
            hybrid.verify()
            if rank == last:
                place[-1, -1] ^= 1
            try:
                hybrid.verify()
            except VerifyError as error:
                assert name in str(error) and f"engine on rank {last} differs" in str(error), error
            else:
                raise AssertionError(f"the fault in {name} was not found")
            if rank == last:
                place[-1, -1] ^= 1


def check_refusals(case: Case) -> None:
    """Scales that do not fit, on one rank, are an error on all."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    arrays = case.trained(drawn(case), rank)
    trained = {n: torch.from_numpy(a).to(DEVICE) for n, a in arrays.items()}
    name, vocabulary = "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"
    for match in ("needs scales", "must be float32", "have no counterpart"):
        engine = Engine(case.targets()[rank])
        if rank == last and match == "needs scales":
            del engine._scales[name]
        elif rank == last and match == "must be float32":
            engine._scales[name] = engine._scales[name][:1, :1].clone()
        elif rank == last:
            shape = engine._tensors[vocabulary].shape
            engine._tensors[vocabulary] = torch.zeros(shape, dtype=FP8, device=DEVICE)
            blocks = [-(-size // 128) for size in shape]
            engine._scales[vocabulary] = torch.zeros(blocks, device=DEVICE)
        try:
            HybridEngine(case.sources(), trained, engine, job_world(), staging_bytes=STAGING_BYTES)
        except PlanError as error:
            assert f"rank {last}: " in str(error) and match in str(error), error
        else:
            raise AssertionError(f"not refused: {match}")


def main() -> None:
    if HAS_GPU:
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("nccl")  # groups connect when they are used, as in a run
    else:
        dist.init_process_group("gloo")
    world = dist.get_world_size()
    layouts = (TrainLayout(world, tp=2, pp=2), 2), (TrainLayout(world, tp=4), 1)
    for shape in (WHOLE, RAGGED):
        for train, tp in layouts:
            case = Case(shape, train, RolloutLayout.consecutive(world, tp), "fused")
            for kind in ("packed", "peer"):
                for dtype in (torch.bfloat16, torch.float32):
                    hybrid = check(case, dtype, kind)
                    check_memory(hybrid, case)
                check_faults(hybrid, hybrid._target)
    check_refusals(case)
    dist.barrier()
    stop_process_group()


if __name__ == "__main__":
    main()
