"""One rank of the tests of late gathers and freed weights: real Megatron, real steps, gloo.

    trained_weights_worker.py FOLDER some|more|parts  `more` are the cases that `some` leaves out

`parts` has a model whose checkpoints store parameters in parts.

Every case trains the same model with and without the knobs, from the same weights on the same
batches, and compares bit for bit what engines, training and checkpoints hold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoint_bytes import megatrons_own_way, read_bytes, small_buckets, written_bytes
from megatron.core.distributed import param_and_grad_buffer as megatron_buffers
from tiny_models import tiny_model
from torch.distributed import distributed_c10d

from hybridrl.algorithms import make_algorithm
from hybridrl.checkpoint import parameter_pieces
from hybridrl.checkpoint.folders import Checkpoint
from hybridrl.checkpoint.host_copies import HostCopies
from hybridrl.checkpoint.model_state import connect_shares, load_model
from hybridrl.checkpoint.sharded_files import load_index
from hybridrl.checkpoint.writing import BegunCheckpoint, Content, write_checkpoint
from hybridrl.config.schema import RolloutConfig, SftConfig, TrainConfig
from hybridrl.contracts.batch import Producer, Prompt, TrainBatch
from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.hybrid_engine.memory.alias import shared_views
from hybridrl.hybrid_engine.memory.phases import PhaseError
from hybridrl.hybrid_engine.transports.packed import PackedTransport
from hybridrl.hybrid_engine.verify import VerifyError
from hybridrl.loop import ledger, rollout_setup
from hybridrl.models.family import resolve_family
from hybridrl.models.init import init_weights
from hybridrl.models.sources import TrainingShard
from hybridrl.models.weights import RankLayout, check_coverage, fused_layout, hf_shapes
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.roles.policy import Policy
from hybridrl.training.model import ModelSource, ParallelModel

Tensors = dict[str, torch.Tensor]
ARCHITECTURES = {"qwen3_moe": "Qwen3Moe", "deepseek_v3": "DeepseekV3", "gpt_oss": "GptOss"}


@dataclass(frozen=True)
class Case:
    """A model, the training layout of four ranks, and the tensor parallel size of the engine."""

    name: str
    family: str
    train: TrainLayout
    rollout_tp: int
    dtype: torch.dtype
    is_aliased: bool = False


FUSED = {
    "some": [
        Case("DP2CP2 -> TP4", "qwen2", TrainLayout(4, cp=2), 4, torch.bfloat16),
        Case("DP4 -> TP1, aliased", "llama", TrainLayout(4), 1, torch.float32, True),
        Case("TP2DP2 -> TP2, aliased", "qwen3", TrainLayout(4, tp=2), 2, torch.bfloat16, True),
        Case("PP2DP2 -> TP2, tied", "llama", TrainLayout(4, pp=2), 2, torch.bfloat16),
    ],
    "more": [
        Case("DP4 -> TP4", "qwen2", TrainLayout(4), 4, torch.bfloat16),
        Case("TP2DP2 -> TP1", "qwen2", TrainLayout(4, tp=2), 1, torch.float32),
    ],
}
FREED = {
    "some": [Case("PP2DP2 -> TP1, tied", "llama", TrainLayout(4, pp=2), 1, torch.bfloat16)],
    "more": [
        Case("DP4 -> TP4", "qwen2", TrainLayout(4), 4, torch.bfloat16),
        Case("TP2DP2 -> TP2", "llama", TrainLayout(4, tp=2), 2, torch.bfloat16),
    ],
}
FREEING: list[dict[str, Any]] = [{}, {"fuse_param_gather": True}]


LEVELS = {
    "some": [
        (
            Case("DP4", "qwen2", TrainLayout(4), 1, torch.bfloat16),
            Case("TP2DP2", "qwen2", TrainLayout(4, tp=2), 1, torch.bfloat16),
            ("host",),
        )
    ],
    "more": [
        (
            Case("TP2PP2", "llama", TrainLayout(4, tp=2, pp=2), 1, torch.bfloat16),
            Case("DP2CP2", "llama", TrainLayout(4, cp=2), 1, torch.bfloat16),
            ("host", "low_precision"),
        )
    ],
    "parts": [
        (
            Case("TP2DP2", "qwen3_5_text", TrainLayout(4, tp=2), 1, torch.bfloat16),
            Case("DP4", "qwen3_5_text", TrainLayout(4), 1, torch.bfloat16),
            ("low_precision",),
        )
    ],
}


class Engine:
    """A WeightTarget of bare tensors, some of them the trainer's own if it gives its shard."""

    def __init__(
        self,
        layout: RankLayout,
        dtype: torch.dtype,
        device: torch.device,
        shard: TrainingShard | None,
    ) -> None:
        self._layout = layout
        views = shared_views(shard, layout, dtype) if shard is not None else {}
        own = {
            # The decay of recurrent layers is fp32 in every model.
            n: torch.full(s, -1.0, dtype=torch.float32 if "A_log" in n else dtype, device=device)
            for n, s in layout.shapes.items()
        }
        self.num_shared, self.live = len(views), own | views
        self.at_finish: Callable[[], None] = lambda: None

    def layout(self) -> RankLayout:
        return self._layout

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.live

    def sleep(self, keeps_memory: bool = False) -> None: ...

    def begin_update(self) -> None: ...

    def finish_update(self, version: int) -> None:
        self.at_finish()


class Gathers:
    """Notes Megatron's parameter gathers and the reshards, in order, and the bytes received."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.received_bytes = 0

    def take(self) -> list[str]:
        """Returns what happened since the last call."""
        seen, self.seen = self.seen, []
        return seen

    @contextmanager
    def watching(self) -> Iterator[None]:
        gather, run = megatron_buffers.dist_all_gather_func, PackedTransport.run

        def watched_gather(whole: torch.Tensor, own: torch.Tensor, **rest: Any) -> Any:
            self.seen.append("gather")
            self.received_bytes += whole.nbytes - own.nbytes
            result = gather(whole, own, **rest)
            # Over gloo none is left to the coalescing manager around it: two such gathers in a row
            # can end the process (platform.py).
            assert whole.is_cuda or not distributed_c10d._world.pg_coalesce_state[rest["group"]]
            return result

        def watched_run(transport: PackedTransport) -> Any:
            self.seen.append("reshard")
            return run(transport)

        megatron_buffers.dist_all_gather_func, PackedTransport.run = watched_gather, watched_run
        try:
            yield
        finally:
            megatron_buffers.dist_all_gather_func, PackedTransport.run = gather, run


class Run:
    """A trained model and an engine that follows it."""

    def __init__(self, mesh: Mesh, case: Case, **knobs: Any) -> None:
        hf_config = tiny_model(case.family).config.to_dict()
        name = case.family.removesuffix("_text")
        architecture = f"{ARCHITECTURES.get(name, name.capitalize())}ForCausalLM"
        family = resolve_family(None, hf_config | {"architectures": [architecture]})
        source = ModelSource(family, hf_config, case.dtype, family.name, Path("."))
        train = TrainConfig(micro_batch_tokens=64, learning_rate=1e-2, **knobs)
        self.mesh, self.world = mesh, mesh.world
        self.model = model = ParallelModel(mesh, source, "lm", train)
        shapes = hf_shapes(family, source.shape)
        init_weights(model.layout(), shapes, model.weights(), hf_config, 3)
        model.make_trainable(train.learning_rate)
        self.policy = Policy(model, make_algorithm(SftConfig(name="sft")), 99)
        weights = model.weight_source()
        check_coverage(weights.layouts, shapes)
        rollout = RolloutConfig(tp=case.rollout_tp)
        layout = rollout_setup.rollout_layout(model, rollout, weights.layouts)
        _, tp_rank = layout.assignment[mesh.world.rank]
        target = fused_layout(family, source.shape, case.rollout_tp, tp_rank)
        shard = weights.shard if case.is_aliased else None
        self.engine = Engine(target, case.dtype, mesh.platform.device, shard)
        self.memories, self.copies = rollout_setup.training_memories([model])
        self.hybrid = HybridEngine(
            weights,
            self.engine,
            mesh.world,
            staging_bytes=1 << 16,
            verify_every=1,
            training=self.memories,
            training_weights=self.copies,
        )

    def update(self, step: int) -> dict[str, float]:
        generator = torch.Generator().manual_seed(step)
        drawn = torch.randint(0, 199, (8, 12), generator=generator).tolist()
        prompts = [Prompt(i, "", tuple(r[:4]), {}, tuple(r[4:])) for i, r in enumerate(drawn)]
        return self.policy.update(TrainBatch.supervised(prompts, Producer.here("the test")))

    def weights(self) -> Tensors:
        return {name: tensor.clone() for name, tensor in self.model.weights().items()}

    def freed(self) -> bool:
        sizes = [t.untyped_storage().nbytes() for t in self.model.weights_in_place().values()]
        assert not any(sizes) or all(sizes)
        return not any(sizes)


def assert_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def assert_engines_equal(found: Run, wanted: Run) -> None:
    """Compares what generation reads: rows that pad the vocabulary are nobody's."""
    assert found.engine.layout() == wanted.engine.layout()
    for region in wanted.engine.layout().regions:
        inside = tuple(slice(*span) for span in region.local_box)
        one, other = found.engine.live[region.local], wanted.engine.live[region.local]
        assert torch.equal(one[inside], other[inside]), region


def check_repacking(run: Run) -> None:
    """An engine that changes a parameter when it is told that all are complete is found out."""
    name = max(run.engine.live, key=lambda name: run.engine.live[name].numel())

    def repack() -> None:
        if run.world.rank == run.world.size - 1:
            flat = run.engine.live[name].view(-1)
            flat[0] += 1

    run.engine.at_finish = repack
    try:
        run.hybrid.to_rollout()
    except VerifyError as error:
        assert f"of the engine on rank {run.world.size - 1} differs" in str(error)
    else:
        raise AssertionError("a repacked parameter was not found")


@contextmanager
def over_devices() -> Iterator[None]:
    """States go to the host by way of a device's memory, as on GPUs, and in many rounds."""
    ours = parameter_pieces.is_gpu, parameter_pieces.ROUND_BYTES
    parameter_pieces.ROUND_BYTES = 24_000  # some pieces have more, of others several are in one
    parameter_pieces.is_gpu = lambda device: True
    try:
        yield
    finally:
        parameter_pieces.is_gpu, parameter_pieces.ROUND_BYTES = ours


def check_shares(run: Run, num_bytes: int) -> None:
    """A rank writes and reads about its share of the state, in whole parameters."""
    sizes = [12 * p.numel() for p in run.model.weights_in_place().values()]
    share = sum(sizes) / (run.mesh.layout.dp * run.mesh.layout.cp)
    assert 0 < num_bytes <= share + 2 * max(sizes), (num_bytes, share, sizes)


def check_fused(mesh: Mesh, case: Case, folder: Path) -> None:
    """Steps that leave the gather to the rollout phase, against steps that do not."""
    plain, fused = Run(mesh, case), Run(mesh, case, fuse_param_gather=True)
    assert (fused.engine.num_shared > 0) == case.is_aliased
    gathers, received, initial = Gathers(), [0, 0], plain.weights()
    with gathers.watching():
        for step in range(3):
            assert plain.update(step) == fused.update(step)
            one_step = gathers.take()
            assert set(one_step) == {"gather"}, "the plain step gathers, and no other"
            received[0] += gathers.received_bytes + plain.hybrid.to_rollout().received_bytes
            assert gathers.take() == ["reshard"]
            received[1] += fused.hybrid.to_rollout().received_bytes
            assert gathers.take() == ["reshard", *one_step], "the engine first, then the gather"
            gathers.received_bytes = 0
            assert_engines_equal(fused, plain)
            fused.hybrid.verify()
            plain.hybrid.to_train()
            fused.hybrid.to_train()
            assert_equal(fused.weights(), plain.weights())
            assert gathers.take() == [], "everything was complete"
        # Two steps between reshards, and a checkpoint while the gather is due.
        for step in (3, 4):
            assert plain.update(step) == fused.update(step)
        gathers.take()
        files = fused.model.source.files
        with written_bytes() as sizes:
            write_checkpoint(folder / "fused", mesh.world, {"policy": fused.model}, {}, files)
        check_shares(fused, sum(sizes.values()))
        assert set(gathers.take()) == {"gather"}
    # Megatron's way reads what ours wrote, of one bucket and of many, and ours what it wrote.
    fresh, copied = Run(mesh, case), Run(mesh, case)
    with small_buckets():
        cut, other = Run(mesh, case), Run(mesh, case)
    with megatrons_own_way():
        load_model(Checkpoint.open(folder / "fused"), "policy", cut.model, mesh.world)
        # Not of `cut`: Megatron 0.16.1 takes states of several padded buckets from wrong places.
        write_checkpoint(folder / "gathered", mesh.world, {"policy": fused.model}, {}, files)
    with written_bytes() as sizes:
        write_checkpoint(folder / "cut", mesh.world, {"policy": cut.model}, {}, files)
    check_shares(cut, sum(sizes.values()))
    # What a rank has gathered is written where it came to; on CPU the rest is cloned.
    assert case.train.pp > 1 or 5 * sizes["cloned"] < sizes["in place"], sizes
    copies = HostCopies()
    for name in ("copied", "copied again"):  # the second into the memory of the first
        content = Content({"policy": cut.model}, {}, files)
        begun = BegunCheckpoint(folder / name, mesh.world, content, copies)
        with over_devices() if name == "copied again" else nullcontext():
            connect_shares(cut.model)
            begun.begin()
        begun.write()
        begun.complete()
    is_state = [len(key) > 2 or key[1].fqn.startswith("optimizer.") for key in copies._kept]
    kept = sum(
        t.nbytes for t, is_one in zip(copies._kept.values(), is_state, strict=True) if is_one
    )
    of_states = [key for key, is_one in zip(copies._kept, is_state, strict=True) if is_one]
    assert len({len(key) > 2 for key in of_states}) <= 1, "parts of a tensor lie in two memories"
    # A last stage gathers the tied embedding too, which the first one writes.
    assert case.train.pp > 1 or kept == sum(sizes.values()), "what is gathered is copied again"
    load_model(Checkpoint.open(folder / "copied again"), "policy", copied.model, mesh.world)
    with megatrons_own_way():
        load_model(Checkpoint.open(folder / "cut"), "policy", fresh.model, mesh.world)
    with read_bytes() as sizes:
        load_model(Checkpoint.open(folder / "gathered"), "policy", other.model, mesh.world)
    check_shares(other, sizes["asked"])
    for run in (fresh, copied, cut, other):
        assert_equal(run.weights(), plain.weights())
    assert fresh.update(5) == copied.update(5) == plain.update(5) == fused.update(5)
    assert other.update(5) == cut.update(5)  # a norm's terms are added in the order of shares
    for ours, wanted in ((fresh, plain), (copied, plain), (fused, plain), (other, cut)):
        assert_equal(ours.weights(), wanted.weights())
    assert not all(torch.equal(initial[name], t) for name, t in plain.weights().items())
    sums = [sum(part) for part in zip(*mesh.world.gather_objects(received), strict=True)]
    if case.rollout_tp > case.train.tp:
        assert sums[1] < sums[0], sums
    for run in () if case.is_aliased else (plain, fused):
        check_repacking(run)
    if mesh.world.rank == 0:
        print(f"{case.name}: received until the engine has it {sums[1]}, plain {sums[0]}")


def check_freed(mesh: Mesh, case: Case, folder: Path, knobs: dict[str, Any]) -> None:
    """Weights that are freed while the engine generates, against weights that stay."""
    plain = Run(mesh, case)
    freed = Run(mesh, case, release_weights_in_rollout=True, **knobs)
    at_finish: list[bool] = []
    freed.engine.at_finish = lambda: at_finish.append(freed.freed())
    for step in range(3):
        if step:  # the first rollout is one of weights that no step has written
            assert plain.update(step) == freed.update(step)
        plain.hybrid.to_rollout()
        before = freed.weights() if step != 2 else plain.weights()  # 2: no gather asked for before
        stats = freed.hybrid.to_rollout()
        assert stats.verify_seconds > 0
        assert freed.freed() and at_finish == [True] * (step + 1)
        assert_engines_equal(freed, plain)
        for read in (freed.model.weights, lambda: freed.model.chunks):
            try:
                read()
            except RuntimeError as error:
                assert "train.release_weights_in_rollout=true" in str(error)
            else:
                raise AssertionError("freed weights were read")
        try:
            freed.hybrid.verify()
        except PhaseError as error:
            assert "rollout.verify=N" in str(error)
        else:
            raise AssertionError("freed weights were compared")
        entries = ledger.entries({"policy": freed.model}, {})
        entry = next(entry for entry in entries if entry.name == "policy weights")
        assert entry.num_bytes > 0 and entry.in_training and not entry.in_rollout
        freed.hybrid.to_train()
        plain.hybrid.to_train()
        assert not freed.freed()
        assert_equal(freed.weights(), before)
        assert_equal(freed.weights(), plain.weights())
    freed.hybrid.to_rollout()
    freed.hybrid.to_rollout()  # without a word of training in between
    freed.hybrid.to_train()
    assert_equal(freed.weights(), plain.weights())
    with rollout_setup.released([*freed.memories, *freed.copies]):  # as around the engine's start
        assert freed.freed()
    assert_equal(freed.weights(), plain.weights())
    if mesh.world.rank == 0:
        print(f"{case.name}: freed and made again, {knobs}")


def saved(run: Run, folder: Path, copies: HostCopies | None = None) -> Checkpoint:
    content = Content({"policy": run.model}, {}, run.model.source.files)
    begun = BegunCheckpoint(folder, run.world, content, copies)
    begun.begin()
    if copies is not None:
        run.update(9)  # changes the state that the copies hold
        begun.write()
    begun.complete()
    return Checkpoint.open(folder)


def check_levels(mesh: Mesh, case: Case, other: Case, folder: Path, levels: Sequence[Any]) -> None:
    """States pass through another layout and another level and come back bit for bit."""
    wanted: dict[str, Tensors] = {}
    elsewhere = Mesh(mesh.world, other.train)
    for level in levels:
        run = Run(mesh, case, optimizer_memory=level)
        for part in run.model.optimizer.chained_optimizers:
            part.optimizer.piece_elements = 512
        for step in range(2):
            run.update(step)
        first = saved(run, folder / level)
        keys = load_index(first.folder, "policy", first.manifest).state_dict_metadata
        assert any(".remainder." in key for key in keys)
        assert not any("optimizer.state.param." in key for key in keys)
        run.update(2)
        wanted[level] = run.weights()
        back: Any = {"host": "low_precision", "low_precision": "host"}[level]
        between = Run(elsewhere, other, optimizer_memory=back)
        load_model(first, "policy", between.model, run.world)
        with over_devices() if level == "host" else nullcontext():
            second = saved(between, folder / f"{level} {back}", HostCopies())
        again = Run(mesh, case, optimizer_memory=level)
        load_model(second, "policy", again.model, run.world)
        again.update(2)
        assert_equal(again.weights(), wanted[level])
        # fp32 masters and moments hold all that a packed state has.
        device = Run(elsewhere, other, optimizer_memory="device")
        load_model(first, "policy", device.model, run.world)
        third = saved(device, folder / f"{level} device")
        again = Run(mesh, case, optimizer_memory=level)
        load_model(third, "policy", again.model, run.world)
        again.update(2)
        assert_equal(again.weights(), wanted[level])
    for one in wanted.values():
        assert_equal(one, wanted[levels[0]])
    if mesh.world.rank == 0:
        print(f"{case.name} by way of {other.name}: all levels")


def main() -> None:
    folder, which = Path(sys.argv[1]), sys.argv[2]
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    for number, case in enumerate(FUSED.get(which, ())):
        mesh = Mesh(World(platform, 120), case.train)
        platform.seed(1)
        check_fused(mesh, case, folder / str(number))
    for number, case in enumerate(FREED.get(which, ())):
        mesh = Mesh(World(platform, 120), case.train)
        platform.seed(1)
        for knobs in FREEING:
            check_freed(mesh, case, folder / f"freed {number}", knobs)
    for number, (case, other, levels) in enumerate(LEVELS[which]):
        mesh = Mesh(World(platform, 120), case.train)
        platform.seed(1)
        check_levels(mesh, case, other, folder / f"levels {number}", levels)


if __name__ == "__main__":
    main()
