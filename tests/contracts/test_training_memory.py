"""What training gives up during rollout comes back unchanged: real Megatron, one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from hybridrl.algorithms import make_algorithm
from hybridrl.config.schema import SftConfig, TrainConfig
from hybridrl.contracts.batch import Producer, Prompt, TrainBatch
from hybridrl.errors import DeviceMemoryError
from hybridrl.loop import ledger
from hybridrl.models.family import resolve_family
from hybridrl.models.init import init_weights
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.roles.policy import Policy
from hybridrl.rollout.engine import Holding
from hybridrl.training.model import ModelSource, ParallelModel

# Masters are the parameters, copies of them, and parameters with remainders.
KINDS = [
    (torch.float32, "device"),
    (torch.bfloat16, "device"),
    (torch.bfloat16, "low_precision"),
    (torch.bfloat16, "host"),
]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 60)
    mesh = Mesh(World(platform, 60), TrainLayout(1))
    platform.seed(1)
    yield mesh
    stop_process_group()


def make_policy(mesh: Mesh, dtype: torch.dtype, level: Any = "device", **knobs: Any) -> Policy:
    hf_config = tiny_model("qwen2").config.to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    family = resolve_family(None, hf_config)
    source = ModelSource(family, hf_config, dtype, family.name, Path("."))
    train = TrainConfig(micro_batch_tokens=64, learning_rate=1e-2, optimizer_memory=level, **knobs)
    model = ParallelModel(mesh, source, "lm", train)
    init_weights(model.layout(), hf_shapes(family, source.shape), model.weights(), hf_config, 3)
    model.make_trainable(train.learning_rate)
    return Policy(model, make_algorithm(SftConfig(name="sft")), 4)


def a_batch(seed: int) -> TrainBatch:
    drawn = torch.randint(0, 199, (6, 12), generator=torch.Generator().manual_seed(seed)).tolist()
    prompts = [Prompt(i, "", tuple(row[:4]), {}, tuple(row[4:])) for i, row in enumerate(drawn)]
    return TrainBatch.supervised(prompts, Producer.here("the test"))


def copies(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.model.weights().items()}


def rollout_between(policy: Policy) -> None:
    """What the hybrid engine does around a rollout; in between, weights alone are readable."""
    memory: Any = policy.model.memory
    before, (state_bytes, _) = copies(policy), memory.state_bytes()
    memory.release()
    for chunk in policy.model.forward_chunks:
        for buffer in chunk.buffers:
            assert buffer.grad_data.untyped_storage().nbytes() == 0
    assert memory.state_bytes()[0] == state_bytes
    assert all(torch.equal(before[n], t) for n, t in policy.model.weights().items())
    memory.restore()
    for chunk in policy.model.forward_chunks:
        for buffer in chunk.buffers:
            assert buffer.grad_data.untyped_storage().nbytes() == memory.gradient_bytes()
            buffer.grad_data.fill_(float("nan"))  # what memory holds that others have used


@pytest.mark.parametrize(("dtype", "level"), KINDS)
def test_training_goes_on_bit_for_bit_after_its_memory_was_released(
    mesh: Mesh, dtype: torch.dtype, level: str
) -> None:
    plain, other = make_policy(mesh, dtype, level), make_policy(mesh, dtype, level)
    for policy, releases in ((plain, False), (other, True)):
        for step in range(3):
            if releases:
                rollout_between(policy)
            policy.update(a_batch(step))
    rollout_between(plain)  # gradients alone
    for policy in (plain, other):
        policy.update(a_batch(9))
    assert all(torch.equal(copies(other)[n], t) for n, t in copies(plain).items())
    fresh = copies(make_policy(mesh, dtype, level))
    assert not any(torch.equal(fresh[n], t) for n, t in copies(plain).items())


def test_memory_may_stay_once_an_update_has_taken_all_of_it(mesh: Mesh) -> None:
    for level in ("device", "host"):
        policy = make_policy(mesh, torch.bfloat16, level)
        memory: Any = policy.model.memory
        assert not memory.may_stay
        policy.update(a_batch(1))
        assert memory.may_stay
        memory.release()
        memory.restore()
        # A run that goes on from a checkpoint has the optimizer's state, and no update either.
        assert not memory.may_stay and memory.bytes_to_come() == 0
        policy.update(a_batch(2))
        assert memory.may_stay


def test_full_micro_batches_take_in_proportion_to_tokens(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory: Any = make_policy(mesh, torch.bfloat16).model.memory
    with memory.watching(10):
        pass
    assert memory.growth_bytes == 0  # nothing is known of a CPU's
    memory._device, memory._max_tokens = torch.device("cuda"), 100
    for tokens, peak, growth in ((20, 300, 800), (80, 900, 200), (40, 500, 200), (101, 950, 0)):
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _, peak=peak: peak)
        with memory.watching(tokens):
            pass
        assert memory.growth_bytes == growth, tokens
    memory.release()
    assert memory.growth_bytes == 0
    memory.restore()


def test_state_that_comes_with_the_first_step_is_foreseen(mesh: Mesh) -> None:
    policy = make_policy(mesh, torch.bfloat16)
    memory: Any = policy.model.memory
    foreseen, to_come = memory.state_bytes()
    assert to_come == memory.bytes_to_come() > 0
    policy.update(a_batch(0))
    assert memory.state_bytes() == (foreseen, 0) and memory.bytes_to_come() == 0
    for level in ("low_precision", "host"):
        packed: Any = make_policy(mesh, torch.bfloat16, level).model.memory
        assert packed.bytes_to_come() == 0  # exists from the start


def test_levels_with_the_same_arithmetic_train_alike_and_other_levels_nearly(mesh: Mesh) -> None:
    kept = {level: make_policy(mesh, torch.bfloat16, level) for _, level in KINDS}
    kept["bf16 gradients"] = make_policy(mesh, torch.bfloat16, "host", gradient_dtype="bfloat16")
    for part in kept["host"].model.optimizer.chained_optimizers:
        part.optimizer.piece_elements = 1024
    norms = {
        name: [policy.update(a_batch(step))["policy/grad_norm"] for step in range(3)]
        for name, policy in kept.items()
    }
    found = {name: copies(policy) for name, policy in kept.items()}
    assert norms["host"] == norms["low_precision"]
    assert all(torch.equal(found["host"][n], t) for n, t in found["low_precision"].items())
    for name in ("device", "bf16 gradients"):
        # Later norms are of other weights: on some CPUs the third is 6% away.
        assert norms[name][0] == pytest.approx(norms["host"][0], rel=0.01), name
        assert norms[name] == pytest.approx(norms["host"], rel=0.15), name
        apart = [(found[name][n].float() - t.float()).abs() for n, t in found["host"].items()]
        # Three steps change a weight by 0.03.
        assert 0 < max(float(one.mean()) for one in apart) < 3e-3, name
    num_parameters = sum(t.numel() for t in found["host"].values())
    memory: Any = kept["host"].model.memory
    assert memory.state_bytes() == (0, 0)
    assert 6 <= memory.host_bytes / num_parameters < 6.6
    assert memory.host_bytes == kept["low_precision"].model.memory.state_bytes()[0]
    assert 2 <= kept["bf16 gradients"].model.memory.gradient_bytes() / num_parameters < 2.2


def test_an_out_of_memory_error_carries_the_ledger(mesh: Mesh) -> None:
    held = ledger.MemoryLedger(mesh.platform)
    held.models["policy"] = make_policy(mesh, torch.float32).model
    with pytest.raises(DeviceMemoryError) as caught, held.explained():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.\nmore")
    text = str(caught.value)
    assert text.startswith("CUDA out of memory. Tried to allocate 3.00 GiB.\n")
    assert "policy gradients" in text and "policy optimizer" in text
    assert "train.micro_batch_tokens" in text and "more" not in text.splitlines()[1]
    with pytest.raises(RuntimeError, match="^something else$"), held.explained():
        raise RuntimeError("something else")


def test_the_ledger_counts_what_lies_on_the_device_in_each_phase(mesh: Mesh) -> None:
    policy = make_policy(mesh, torch.bfloat16)
    found = {entry.name: entry for entry in ledger.entries({"policy": policy.model}, {})}
    num_parameters = sum(t.numel() for t in policy.model.weights().values())
    # The buffers are padded, by less than a tenth here.
    for name, each, in_rollout in (
        ("policy weights", 2, True),
        ("policy gradients", 4, False),
        ("policy optimizer", 12, True),
    ):
        assert 1.0 <= found[name].num_bytes / (each * num_parameters) < 1.1, name
        assert (found[name].in_training, found[name].in_rollout) == (True, in_rollout)
    host = make_policy(mesh, torch.bfloat16, "host")
    entries = ledger.entries({"policy": host.model}, {})
    (state,) = (entry for entry in entries if "optimizer" in entry.name)
    assert state.name == "policy optimizer, in host memory"
    assert not state.in_training and not state.in_rollout


def test_the_ledger_counts_what_engine_and_trainer_share_once(mesh: Mesh) -> None:
    policy = make_policy(mesh, torch.float32)
    engine = {
        "weights": Holding(5),
        "shared weights": Holding(7, is_shared=True),
        "KV cache": Holding(11),
        "graphs": Holding(13, stays=True),
        "nothing": Holding(0),
    }
    found = ledger.entries({"policy": policy.model}, engine)
    mine = {entry.name: entry for entry in found if entry.name.startswith("engine")}
    assert [entry.num_bytes for entry in mine.values()] == [5, 7, 11, 13]
    assert sum(e.num_bytes for e in mine.values() if e.in_rollout) == 5 + 11 + 13
    assert sum(e.num_bytes for e in mine.values() if e.in_training) == 13
    found = ledger.entries({"policy": policy.model}, engine, keeps_memory=True)
    kept = {e.name: (e.in_training, e.in_rollout) for e in found}
    assert kept.pop("engine shared weights") == (False, False), "it stands with the policy's"
    assert set(kept.values()) == {(True, True)} and len(kept) == 3 + 3
