"""One rank of the tests of Muon: real Megatron, real steps, gloo.

    muon_worker.py FOLDER some|more

Each layout's steps are compared with torch.optim.Muon and AdamW on the tensors of the HF
checkpoint. States pass through another layout and come back bit for bit.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from checkpoint_bytes import small_buckets
from parity_worker import gradients_in_hf_names
from torch.optim import AdamW
from torch.optim import Muon as TorchMuon
from trained_weights_worker import Case, Run, assert_equal, saved

from hybridrl.checkpoint.model_state import load_model
from hybridrl.contracts.batch import Producer, Prompt, TrainBatch
from hybridrl.errors import CheckpointError
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.training.model import ParallelModel

RATE, DECAY, CLIP, NUM_STEPS = 1e-2, 0.1, 0.5, 3
TOLERANCE = 2e-5  # of the largest change; fp32 sums in another order
FP32, BF16 = torch.float32, torch.bfloat16
CASES = {
    "some": [
        Case("TP2EP2", "qwen3_moe", TrainLayout(4, tp=2, ep=2), 1, FP32),
    ],
    "more": [
        Case("TP2DP2", "qwen2", TrainLayout(4, tp=2), 1, FP32),
        Case("PP2DP2", "llama", TrainLayout(4, pp=2), 1, FP32),
        Case("DP2CP2", "qwen2", TrainLayout(4, cp=2), 1, FP32),
        Case("TP2DP2", "deepseek_v3", TrainLayout(4, tp=2), 1, FP32),
        Case("TP2DP2", "qwen3_5_text", TrainLayout(4, tp=2), 1, FP32),
        Case("TP2ETP2", "qwen3_moe", TrainLayout(4, tp=2, ep=2, etp=2), 1, FP32),
        Case("EP4", "gpt_oss", TrainLayout(4, ep=4), 1, FP32),
    ],
}
RESUMED = {
    "some": (
        Case("TP2DP2", "qwen2", TrainLayout(4, tp=2), 1, BF16),
        Case("PP2DP2", "qwen2", TrainLayout(4, pp=2), 1, BF16),
    ),
    "more": (
        Case("DP4", "llama", TrainLayout(4), 1, BF16),
        Case("TP2DP2", "llama", TrainLayout(4, tp=2), 1, BF16),
    ),
}


def a_run(mesh: Mesh, case: Case, optimizer: str = "muon") -> Run:
    return Run(mesh, case, optimizer=optimizer, weight_decay=DECAY, clip_grad=CLIP)


def in_hf_names(model: ParallelModel) -> dict[str, torch.Tensor]:
    """Returns the model's whole HF tensors in fp64; collective."""
    gradients = gradients_in_hf_names(model)
    found = {}
    for name in sorted(gradients):
        whole, held = torch.zeros(2, *gradients[name][0].shape, dtype=torch.float64)
        for region in model.layout().regions:
            if region.hf == name:
                there, here = (
                    tuple(slice(*span) for span in box) for box in (region.hf_box, region.local_box)
                )
                whole[there] = model.weights()[region.local][here].double()
                held[there] = 1
        whole, held = model.world.sum_over_world(torch.stack((whole, held)))
        assert bool((held > 0).all()), name
        found[name] = whole / held
    return found


def whole_gradients(model: ParallelModel) -> dict[str, torch.Tensor]:
    """Returns the gradients of whole HF tensors; collective."""
    found = {}
    for name, (gradient, held) in sorted(gradients_in_hf_names(model).items()):
        pair = torch.stack((gradient.double() * held, held.double()))
        total, count = model.world.sum_over_world(pair)
        assert bool((count > 0).all()), name
        found[name] = total / count
    return found


class Oracle:
    """torch's optimizers on HF tensors."""

    def __init__(self, initial: dict[str, torch.Tensor]) -> None:
        self.params = {n: torch.nn.Parameter(t.float()) for n, t in initial.items()}
        parts: dict[str, list[Any]] = {"muon": [], "decayed": [], "rest": []}
        for name, one in self.params.items():
            is_matrix = one.dim() == 2 and min(one.shape) > 1
            is_matrix = is_matrix and "embed" not in name and "lm_head" not in name
            # As Megatron decays them.
            is_decayed = one.dim() > 1 and not name.endswith(".bias")
            parts["muon" if is_matrix else "decayed" if is_decayed else "rest"].append(one)
        adam = {"betas": (0.9, 0.95), "eps": 1e-8, "lr": RATE}
        self.muon = TorchMuon(
            parts["muon"], lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = AdamW(
            [
                {"params": parts["decayed"], "weight_decay": DECAY},
                {"params": parts["rest"], "weight_decay": 0.0},
            ],
            **adam,
        )

    def step(self, gradients: dict[str, torch.Tensor]) -> None:
        for name, one in self.params.items():
            one.grad = gradients[name].float()
        torch.nn.utils.clip_grad_norm_(self.params.values(), CLIP)
        # torch computes in bf16; rounding aside, it is the same. Versions write it in two ways.
        method, dtype = torch.Tensor.bfloat16, torch.bfloat16
        torch.Tensor.bfloat16 = torch.Tensor.float  # type: ignore[method-assign]
        torch.bfloat16 = torch.float32
        try:
            self.muon.step()
        finally:
            torch.Tensor.bfloat16 = method  # type: ignore[method-assign]
            torch.bfloat16 = dtype
        self.adamw.step()


def a_batch(step: int) -> TrainBatch:
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(0, 199, (8, 12), generator=generator).tolist()
    prompts = [Prompt(i, "", tuple(r[:4]), {}, tuple(r[4:])) for i, r in enumerate(drawn)]
    return TrainBatch.supervised(prompts, Producer.here("the test of Muon"))


def check_steps(mesh: Mesh, case: Case, has_small_buckets: bool) -> None:
    with small_buckets() if has_small_buckets else nullcontext():
        run = a_run(mesh, case)
    model = run.model
    initial = in_hf_names(model)
    oracle = Oracle(initial)
    for step in range(NUM_STEPS):
        model.accumulate(model.plan(a_batch(step)).inputs, objective)
        norm = model.grad_norm()
        oracle.step(whole_gradients(model))
        model.apply(RATE, norm)
    found = in_hf_names(model)
    changes = {name: float((one - initial[name]).abs().max()) for name, one in found.items()}
    assert min(changes.values()) > 0, changes
    worst = max(
        (float((one - oracle.params[name].detach()).abs().max()) / changes[name], name)
        for name, one in found.items()
    )
    assert worst[0] < TOLERANCE, (case.name, case.family, worst)
    names = [run.model.optimizer.chained_optimizers, "momentum_buffer"]
    assert any(names[1] in s for part in names[0] for s in part.optimizer.state.values())
    if mesh.world.rank == 0:
        print(f"{case.name} {case.family}: {worst[0]:.1e} of a change ({worst[1]})", flush=True)


def objective(output: Any, micro: Any) -> tuple[torch.Tensor, None]:
    weight_S = (micro.positions_S % 5 - 1.5) * micro.loss_mask_S
    return (weight_S * output.logp_S).sum() / 20, None


def check_resumed(mesh: Mesh, case: Case, other: Case, folder: Path) -> None:
    """States pass through another layout and come back bit for bit."""
    run, elsewhere = a_run(mesh, case), Mesh(mesh.world, other.train)
    for step in range(2):
        run.update(step)
    first = saved(run, folder / "first")
    run.update(2)
    between = a_run(elsewhere, other)
    load_model(first, "policy", between.model, mesh.world)
    second = saved(between, folder / "second")
    again = a_run(mesh, case)
    load_model(second, "policy", again.model, mesh.world)
    again.update(2)
    assert_equal(again.weights(), run.weights())
    adamw = a_run(mesh, case, "adamw")
    adamw.update(0)
    third = saved(adamw, folder / "adamw")
    for checkpoint, reader, was in ((second, "adamw", "muon"), (third, "muon", "adamw")):
        try:
            load_model(checkpoint, "policy", a_run(mesh, case, reader).model, mesh.world)
        except CheckpointError as error:
            assert f"a state of train.optimizer={was}" in str(error), error
        else:
            raise AssertionError("the states of another optimizer were loaded")
    if mesh.world.rank == 0:
        print(f"{case.name} by way of {other.name}: the same bits", flush=True)


def main() -> None:
    folder, which = Path(sys.argv[1]), sys.argv[2]
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    world = World(platform, 120)
    for number, case in enumerate(CASES[which]):
        mesh = Mesh(world, case.train)
        platform.seed(1)
        check_steps(mesh, case, has_small_buckets=number == 0)
    case, other = RESUMED[which]
    mesh = Mesh(world, case.train)
    platform.seed(1)
    check_resumed(mesh, case, other, folder)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
