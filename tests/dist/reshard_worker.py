"""One rank of the reshard test: many layout pairs through real gloo, or NCCL, messages.

reshard_worker.py FOLDER FIRST_SEED NUM_CASES RANKS_PER_NODE [experts]

With `experts` the layouts are of mixtures of experts, and only they are looked at.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from job_world import job_world
from safetensors.torch import load_file
from weight_cases import (
    Arrays,
    Case,
    minimum_receive_elements,
    random_case,
    random_case_with_experts,
    random_placed_case,
)

from hybridrl.errors import CheckpointError
from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.hybrid_engine.export import export_hf
from hybridrl.hybrid_engine.memory.phases import Phase, PhaseError
from hybridrl.hybrid_engine.planning import direct
from hybridrl.hybrid_engine.planning.plan import PlanError
from hybridrl.hybrid_engine.transports import packed, peer
from hybridrl.hybrid_engine.verify import VerifyError
from hybridrl.models.family import ModelShape, MoeShape
from hybridrl.models.sources import FullWeights
from hybridrl.models.weights import RankLayout, hf_shapes
from hybridrl.parallel.joining import stop_process_group
from hybridrl.parallel.layout import RolloutLayout, TrainLayout
from hybridrl.parallel.peer_memory import PeerMemory, allocate

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if HAS_GPU else torch.device("cpu")
STAGING_BYTES = 6000  # small, so that there are many exchanges and split rows
NODE = int(sys.argv[4])
HAS_EXPERTS = "experts" in sys.argv
NUM_DIRECT: list[int] = []  # operations that went unstaged, by case
NUM_STAGED: list[int] = []  # by case, what landed where something else came later


class Engine:
    """A WeightTarget of bare tensors that notes how it was called."""

    def __init__(self, layout: RankLayout, dtype: torch.dtype) -> None:
        self._layout = layout
        self._tensors = {
            name: torch.full(shape, -1.0, dtype=type_of(name, dtype), device=DEVICE)
            for name, shape in layout.shapes.items()
        }
        self.calls: list[str] = []

    def layout(self) -> RankLayout:
        return self._layout

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def sleep(self, keeps_memory: bool = False) -> None:
        self.calls.append("sleep")

    def begin_update(self) -> None:
        self.calls.append("begin")

    def finish_update(self, version: int) -> None:
        self.calls.append(f"finish {version}")


class MessageCount:
    """Stands in for `dist.batch_isend_irecv` and counts an exchange's messages a peer and way."""

    def __init__(self, node: range) -> None:
        self.node = node
        self.most = 0
        self.sent_bytes = 0
        self.node_sent_bytes = 0
        self.exchanges = 0
        self._exchange = dist.batch_isend_irecv

    def __call__(self, transfers: list[dist.P2POp]) -> list[dist.Work]:
        messages = Counter((transfer.op, transfer.peer) for transfer in transfers)
        self.most = max(self.most, *messages.values())
        self.exchanges += 1
        sends = [transfer for transfer in transfers if transfer.op is dist.isend]
        self.sent_bytes += sum(transfer.tensor.nbytes for transfer in sends)
        far = [transfer for transfer in sends if transfer.peer not in self.node]
        self.node_sent_bytes += sum(transfer.tensor.nbytes for transfer in far)
        return self._exchange(transfers)


def tensors_of(arrays: Arrays, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(array.copy()).to(DEVICE, type_of(name, dtype))
        for name, array in arrays.items()
    }


def type_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the type of a tensor beside others of `dtype`: biases of routers are kept in fp32."""
    return torch.float32 if name.endswith(("expert_bias", "e_score_correction_bias")) else dtype


def node_minimum(case: Case, hf: Arrays, world: int, itemsize: int) -> int:
    """Returns the bytes that nodes need and own on no rank, by their values in the arrays."""

    def values(arrays: list[Arrays]) -> set[float]:
        return {v for part in arrays for array in part.values() for v in np.unique(array)} - {-1.0}

    total, wide = 0, values([{n: a for n, a in hf.items() if n.endswith("correction_bias")}])
    for start in range(0, world, NODE):
        node = range(start, start + NODE)
        held = values([case.trained(hf, rank) for rank in node])
        missing = values([case.generating(hf, rank) for rank in node]) - held
        total += itemsize * len(missing - wide) + 4 * len(missing & wide)
    return total


def check_case(seed: int, rank: int, world: int) -> tuple[int, int]:
    """Runs a layout pair twice with other weights; returns exchanges and bytes between nodes."""
    case = (random_case_with_experts if HAS_EXPERTS else random_case)(seed, world)
    hf = case.weights()
    source_dtype, dest_dtype = [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ][seed % 4]
    trained = tensors_of(case.trained(hf, rank), source_dtype)
    engine = Engine(case.targets()[rank], dest_dtype)
    hybrid = HybridEngine(
        FullWeights(case.sources(), trained),
        engine,
        job_world(),
        staging_bytes=STAGING_BYTES,
        verify_every=7,
        domain_size=NODE,
    )
    start = rank - rank % NODE
    packed.dist.batch_isend_irecv = count = MessageCount(range(start, start + NODE))
    try:
        for version, sign in ((None, 1), (7, -1)):
            for tensor in trained.values():
                tensor.mul_(sign)
            stats = hybrid.to_rollout(version)
            for name, wanted in tensors_of(case.generating(hf, rank), source_dtype).items():
                values = torch.where(wanted == -1, wanted, sign * wanted)
                values = values.to(type_of(name, dest_dtype))
                assert torch.equal(engine.tensors()[name], values), (seed, rank, name)
            plan = hybrid.plan
            assert stats.sent_bytes == plan.send_bytes[rank], seed
            assert stats.received_bytes == plan.receive_bytes[rank], seed
            assert stats.total_sent_bytes == stats.total_planned_bytes, seed
            assert stats.total_received_bytes == stats.total_planned_bytes, seed
            assert set(stats.metrics()) >= {"reshard/received_bytes", "reshard/gb_per_s"}
            assert stats.verify_seconds > 0  # versions 0 and 7
    finally:
        packed.dist.batch_isend_irecv = count._exchange
    assert count.sent_bytes == 2 * plan.send_bytes[rank]
    minimum = node_minimum(case, hf, world, plan.itemsize)
    assert stats.total_node_received_bytes == minimum, seed
    assert sum(job_world().gather_objects(count.node_sent_bytes)) == 2 * minimum, seed
    assert count.most <= 1, (seed, count.most)
    assert engine.calls == ["begin", "finish 0", "sleep", "begin", "finish 7"]
    traffic = hybrid.transport.run()
    assert traffic.staging_bytes <= STAGING_BYTES, (seed, traffic)
    assert traffic.node_sent_bytes * 2 == count.node_sent_bytes
    check_direct(seed, hybrid, engine, rank)
    if world <= NODE:
        check_peers(seed, case, trained, dest_dtype, rank)
    return traffic.num_exchanges, minimum


def check_direct(seed: int, hybrid: HybridEngine, engine: Engine, rank: int) -> None:
    """The same bytes and values where all that lies in one piece at both ends goes unstaged."""
    wanted = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    for tensor in engine.tensors().values():
        tensor.zero_()
    limit, direct.BLOCK_BYTES = direct.BLOCK_BYTES, 1
    try:
        transport = hybrid.make_transport("packed")
    finally:
        direct.BLOCK_BYTES = limit
    traffic = transport.run()
    assert traffic.received_bytes == hybrid.plan.receive_bytes[rank], seed
    assert traffic.sent_bytes == hybrid.plan.send_bytes[rank], seed
    NUM_DIRECT.append(sum(map(len, transport._direct.receives.values())))
    for name, values in wanted.items():
        is_written = values != -1
        assert torch.equal(engine.tensors()[name][is_written], values[is_written]), (seed, name)


def check_placed(seed: int, rank: int, world: int) -> str:
    """Runs ranks that give, receive or both, by messages and peer memory; returns their kind."""
    case = random_placed_case(seed, world)
    hf = case.weights()
    trained = tensors_of(case.trained(hf, rank), torch.float32)
    memory, placed = in_peer_memory(trained, rank)
    wanted = tensors_of(case.generating(hf, rank), torch.float32)
    fewest = minimum_receive_elements(hf, case.trained(hf, rank), case.generating(hf, rank))
    for peers, sources in ((None, trained), (memory, placed)):
        engine = Engine(case.targets()[rank], torch.float32)
        options = {"staging_bytes": STAGING_BYTES, "verify_every": 1, "peer_memory": peers}
        hybrid = HybridEngine(FullWeights(case.sources(), sources), engine, job_world(), **options)
        for sign in (1, -1):
            for tensor in sources.values():
                tensor.mul_(-1)
            stats = hybrid.to_rollout()
            assert engine.tensors().keys() == wanted.keys(), (seed, rank)
            for name, value in wanted.items():
                expected = torch.where(value == -1, value, -sign * value)
                assert torch.equal(engine.tensors()[name], expected), (seed, rank, name)
            assert stats.received_bytes <= 4 * fewest, (seed, rank)
        hybrid.close()
    trains, generates = set(case.trains), set(case.rollout.ranks)
    return "overlapping" if trains & generates else "disjoint"


def in_peer_memory(
    tensors: dict[str, torch.Tensor], rank: int
) -> tuple[PeerMemory, dict[str, torch.Tensor]]:
    """Returns memory that all ranks can read, and copies of the tensors in this rank's piece."""
    starts, size = {}, 0
    for name, tensor in tensors.items():
        starts[name] = size
        size += -(-tensor.nbytes // 16) * 16
    memory = allocate(max(job_world().gather_objects(size)), DEVICE, 60, job_world())
    own, placed = memory.of(rank), {}
    for name, tensor in tensors.items():
        place = own[starts[name] : starts[name] + tensor.nbytes]
        placed[name] = place.view(tensor.dtype).view(tensor.shape)
        placed[name].copy_(tensor)
    return memory, placed


def check_peers(
    seed: int, case: Case, trained: dict[str, torch.Tensor], dtype: torch.dtype, rank: int
) -> None:
    """The same weights, read by every rank where the others have them, and no message sent."""
    memory, placed = in_peer_memory(trained, rank)
    engine = Engine(case.targets()[rank], dtype)
    hybrid = HybridEngine(
        FullWeights(case.sources(), placed),
        engine,
        job_world(),
        staging_bytes=STAGING_BYTES,
        verify_every=1,
        peer_memory=memory,
    )
    packed_engine = Engine(case.targets()[rank], dtype)
    reference = HybridEngine(
        FullWeights(case.sources(), trained),
        packed_engine,
        job_world(),
        staging_bytes=STAGING_BYTES,
    )
    exchange = packed.dist.batch_isend_irecv
    for factor in (1, 3):
        for tensor in (*trained.values(), *placed.values()):
            tensor.mul_(factor)
        reference.to_rollout()
        packed.dist.batch_isend_irecv = None  # whoever sends a message fails
        try:
            stats = hybrid.to_rollout()
        finally:
            packed.dist.batch_isend_irecv = exchange
        assert stats.received_bytes == hybrid.plan.receive_bytes[rank]
        for name, found in engine.tensors().items():
            assert torch.equal(found, packed_engine.tensors()[name]), (seed, rank, name)
    check_staging(hybrid, engine, packed_engine)
    if rank == 0:
        placed[next(iter(placed))] = trained[next(iter(trained))]
    try:
        HybridEngine(
            FullWeights(case.sources(), placed),
            engine,
            job_world(),
            staging_bytes=STAGING_BYTES,
            peer_memory=memory,
        )
    except PlanError as error:
        assert "rank 0" in str(error) and "peer memory" in str(error)
    else:
        raise AssertionError("a parameter outside peer memory was not refused")


def check_staging(hybrid: HybridEngine, engine: Engine, reference: Engine) -> None:
    """The same weights with and without copy engines for what is in one piece at its source."""
    stage, share, found = peer.stage_copies, peer.kernel_shares, []
    limit, peer.BLOCK_BYTES = peer.BLOCK_BYTES, 1
    peer.stage_copies = lambda pairs: found.append(stage(pairs)) or found[-1]
    for shares in (share, lambda cut_up, blocks: blocks // 2):
        for tensor in engine.tensors().values():
            tensor.fill_(-1)
        peer.kernel_shares = shares
        try:
            hybrid.make_transport("peer").run()
        finally:
            peer.kernel_shares = share
        for name, tensor in engine.tensors().items():
            assert torch.equal(tensor, reference.tensors()[name]), name
    peer.BLOCK_BYTES, peer.stage_copies = limit, stage
    NUM_STAGED.append(len(found[0].to_staging))


def check_any_order(rank: int, world: int) -> None:
    """Replicas whose ranks do not ascend get HF's slices all the same, and no byte too many."""
    shape = ModelShape(4, 16, 8, 4, 4, 32, 300, qkv_bias=True)
    two, pairs = ((0, 0), (0, 2), (0, 1), (0, 3)), ((1, 1), (0, 1), (0, 0), (1, 0))
    for train in (TrainLayout(world, tp=2, pp=2), TrainLayout(world, tp=4), TrainLayout(world)):
        for rollout in (RolloutLayout(4, two), RolloutLayout(2, pairs)):
            case = Case(shape, train, rollout, "fused")
            hf = case.weights()
            held, wanted = case.trained(hf, rank), case.generating(hf, rank)
            engine = Engine(case.targets()[rank], torch.float32)
            trained = tensors_of(held, torch.float32)
            hybrid = HybridEngine(
                FullWeights(case.sources(), trained),
                engine,
                job_world(),
                staging_bytes=STAGING_BYTES,
            )
            stats = hybrid.to_rollout()
            for name, values in tensors_of(wanted, torch.float32).items():
                assert torch.equal(engine.tensors()[name], values), (train, rollout, rank, name)
            assert stats.received_bytes == 4 * minimum_receive_elements(hf, held, wanted)


def check_export(folder: Path, rank: int, world: int) -> None:
    """Shards become an HF directory; a directory that exists is refused on every rank alike."""
    case = random_case(11, world)
    shapes = hf_shapes(case.family, case.shape)
    hf = case.weights()
    trained = tensors_of(case.trained(hf, rank), torch.float32)
    config = {"model_type": "llama", "dtype": "bfloat16"}
    for attempt in range(2):
        try:
            export_hf(
                folder / "export",
                FullWeights(case.sources(), trained),
                shapes,
                torch.float32,
                config,
                peers=job_world(),
            )
        except CheckpointError as error:
            assert attempt == 1 and "new or empty directory" in str(error)
        else:
            assert attempt == 0
    found = load_file(folder / "export" / "model.safetensors")
    assert found.keys() == hf.keys()
    for name, array in hf.items():
        assert np.array_equal(found[name].numpy(), array), name


def check_refusals(rank: int, world: int) -> None:
    """What is wrong on one rank is an error on all, and names it."""
    shape = ModelShape(4, 16, 8, 2, 4, 32, 100)
    case = Case(shape, TrainLayout(world, tp=world), RolloutLayout.consecutive(world, 1), "hf")
    trained = tensors_of(case.trained(case.weights(), rank), torch.float32)

    def refused(layouts: list[RankLayout], tensors: dict[str, torch.Tensor], match: str) -> None:
        engine = Engine(case.targets()[rank], torch.float32)
        try:
            HybridEngine(
                FullWeights(layouts, tensors),
                engine,
                job_world(),
                staging_bytes=STAGING_BYTES,
                domain_size=NODE,
            )
        except PlanError as error:
            assert match in str(error), error
        else:
            raise AssertionError(f"not refused: {match}")

    layouts = case.sources()
    last = world - 1
    if rank == last:  # believes that the first two ranks hold each other's slices
        layouts = [layouts[1], layouts[0], *layouts[2:]]
    refused(layouts, trained, f"ranks [{last}] made a different plan than rank 0")
    fewer = dict(trained)
    if rank == last:
        fewer.pop("0/decoder.layers.0.mlp.linear_fc2.weight")
    refused(case.sources(), fewer, f"rank {last}: parameter 0/decoder.layers.0.mlp.linear_fc2")


def check_phases(rank: int, world: int) -> None:
    case = random_case(11, world)
    trained = tensors_of(case.trained(case.weights(), rank), torch.float32)
    engine = Engine(case.targets()[rank], torch.float32)
    hybrid = HybridEngine(
        FullWeights(case.sources(), trained), engine, job_world(), staging_bytes=STAGING_BYTES
    )
    assert hybrid.phases.phase is Phase.TRAIN
    hybrid.to_rollout()
    assert hybrid.phases.phase is Phase.ROLLOUT
    hybrid.to_train()
    try:
        hybrid.to_train()
    except PhaseError as error:
        assert "cannot enter phase train" in str(error)
    else:
        raise AssertionError("entered the training phase twice")


def check_verification(rank: int, world: int) -> None:
    """Two elements that swap places on one rank, after the update, are found and named by all."""
    case = random_case(11, world)
    trained = tensors_of(case.trained(case.weights(), rank), torch.float32)
    engine = Engine(case.targets()[rank], torch.float32)
    name = max(engine.tensors(), key=lambda name: engine.tensors()[name].numel())

    def repack(version: int) -> None:
        if rank == world - 1:
            flat = engine.tensors()[name].view(-1)
            flat[[0, 1]] = flat[[1, 0]]

    engine.finish_update = repack
    hybrid = HybridEngine(
        FullWeights(case.sources(), trained),
        engine,
        job_world(),
        staging_bytes=STAGING_BYTES,
        verify_every=2,
        domain_size=NODE,
    )
    try:
        hybrid.to_rollout(2)
    except VerifyError as error:
        assert f"of the engine on rank {world - 1} differs" in str(error), error
        assert rank != world - 1 or name in str(error)
    else:
        raise AssertionError("the fault was not found")
    assert hybrid.to_rollout(3).verify_seconds == 0


def check_expert_faults(rank: int, world: int) -> None:
    """Faults of single experts, behind the transport's back on the last rank, are named by all."""
    shape = ModelShape(2, 16, 8, 2, 4, 32, 100, moe=MoeShape(8, 2, 24))
    rollout = RolloutLayout.consecutive(world, world)
    case = Case(shape, TrainLayout(world, ep=world), rollout, "fused")
    trained = tensors_of(case.trained(case.weights(), rank), torch.float32)
    stacks = "model.layers.1.mlp.experts.routed_experts."

    def swap_experts(tensors: Mapping[str, torch.Tensor]) -> None:
        one, other = (tensors[f"{stacks}w13_weight/{expert}"] for expert in (2, 5))
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)

    def swap_gate_and_up(tensors: Mapping[str, torch.Tensor]) -> None:
        gate, up = tensors[f"{stacks}w13_weight/6"].chunk(2)
        kept = gate.clone()
        gate.copy_(up)
        up.copy_(kept)

    def keep_stale(tensors: Mapping[str, torch.Tensor]) -> None:
        tensors[f"{stacks}w2_weight/3"].mul_(1 + 1e-6)

    faults = (("w13_weight/2", swap_experts), ("w13_weight/6", swap_gate_and_up))
    for name, plant in (*faults, ("w2_weight/3", keep_stale)):
        engine = Engine(case.targets()[rank], torch.float32)
        hybrid = HybridEngine(
            FullWeights(case.sources(), trained),
            engine,
            job_world(),
            staging_bytes=STAGING_BYTES,
            verify_every=1,
        )
        if rank == world - 1:
            engine.finish_update = lambda version, e=engine, plant=plant: plant(e.tensors())
        try:
            hybrid.to_rollout()
        except VerifyError as error:
            assert str(error).startswith(f"{stacks}{name}["), error
            assert f"of the engine on rank {world - 1} differs" in str(error), error
        else:
            raise AssertionError(f"{plant.__name__} was not found")
        hybrid.close()


def main() -> None:
    folder, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("nccl")  # groups connect when they are used, as in a run
    else:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    exchanges = [check_case(seed, rank, world) for seed in range(first, first + count)]
    assert max(number for number, _ in exchanges) > 3, exchanges
    assert sum(NUM_DIRECT) > 0
    assert sum(NUM_STAGED) > 0 or world > NODE or count < 12
    if HAS_EXPERTS:
        check_expert_faults(rank, world)
        dist.barrier()
        dist.destroy_process_group()
        return
    assert (sum(far for _, far in exchanges) > 0) == (world > NODE)
    if world == 4:
        check_any_order(rank, world)
        kinds = [check_placed(seed, rank, world) for seed in range(30)]
        assert min(kinds.count("disjoint"), kinds.count("overlapping")) >= 5, kinds
    check_export(folder, rank, world)
    check_refusals(rank, world)
    check_phases(rank, world)
    check_verification(rank, world)
    dist.barrier()
    stop_process_group()


if __name__ == "__main__":
    main()
