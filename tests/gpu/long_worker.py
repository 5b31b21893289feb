"""Long prompts, branches and Muon on one GPU; on CPU the same with torch's layers.

long_worker.py OUT.json [prompts] [branches] [muon]
torchrun --nproc-per-node=2 long_worker.py OUT.json prompts       with context parallelism

`prompts`: gradients of a model whose samples share long prompts, in two calls and with copied keys,
against fp32 without sharing. `branches`: the same for sequences of agents, in fp32 with torch's
layers, and in bf16. `muon`: steps of Muon on the GPU against torch.optim.Muon in bf16 and in fp32.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import muon_worker
import shared_prompts_worker
import torch
import train_worker
from parity_worker import gradients_in_hf_names, grouped_batch, objective
from tiny_models import save_tiny_models

from hybridrl.contracts.batch import TrainBatch
from hybridrl.models.family import resolve_family
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.training.model import ModelSource

# Lengths of each prompt, and of each of its responses.
GROUPS = ((9000, (40, 100, 3, 60)), (1, (20,)), (6000, (17, 90, 44)), (50, (300,)))
BUDGET = 16384
FOUND: dict[str, Any] = {}


def say(name: str, value: Any) -> None:
    if os.environ["RANK"] != "0":
        return
    FOUND[name] = value
    print(json.dumps({name: value}), flush=True)
    Path(sys.argv[1]).write_text(json.dumps(FOUND, indent=1) + "\n")


def gradients(run: Any, batch: TrainBatch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    model = run.model
    plan = model.plan(batch)
    outputs = model.forward_all(plan.inputs)
    logp_T = plan.column([one.logp_S for one in outputs]) * batch.response_mask_T
    model.accumulate(plan.inputs, objective)
    # Only where this rank's part of the optimizer holds the sum over all ranks.
    found = {n: g.double() * held for n, (g, held) in gradients_in_hf_names(model).items()}
    return found, logp_T


def away(mesh: Mesh, found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    error = sum(float((found[n] - one).square().sum()) for n, one in reference.items())
    total = sum(float(one.square().sum()) for one in reference.values())
    errors, totals = zip(*mesh.world.gather_objects((error, total)), strict=True)
    return float((sum(errors) / sum(totals)) ** 0.5)


def check_prompts(mesh: Mesh) -> None:
    for name in ("qwen2", "qwen3"):
        make = partial(train_worker.Run, name, mesh, cp=mesh.layout.cp)
        exact = make(torch.float32, layers="torch", share_prompts=False, micro_batch_tokens=BUDGET)
        batch = grouped_batch(GROUPS, exact.model.source.shape.vocab_size)
        reference, logp_T = gradients(exact, batch)
        del exact
        for way in ("alone", "copies", "two calls"):
            run = make(torch.bfloat16, share_prompts=way != "alone", micro_batch_tokens=BUDGET)
            calls = run.model.prompt_calls
            if way == "copies":
                for chunk in run.model._chunks:
                    for part in chunk.modules():
                        if hasattr(part, "prefix_kernel"):
                            part.prefix_kernel = None
            inputs = run.model.plan(batch).inputs
            used = [
                one.packed.shared is not None and one.packed.shared.two_calls is not None
                for one in inputs
            ]
            found, other_T = gradients(run, batch)
            mean = float((other_T - logp_T).abs().sum() / (logp_T != 0).sum())
            say(
                f"{name}, {way}",
                {
                    "layers": run.model.layers.kind,
                    "chosen": [calls.uses_two, calls.said],
                    "micro_batches_with_two_calls": used,
                    "gradients_from_fp32": away(mesh, found, reference),
                    "logprobs_from_fp32": mean,
                },
            )


def check_branches(mesh: Mesh) -> None:
    worker, made = shared_prompts_worker, shared_prompts_worker.TrainConfig
    # With torch's layers on a GPU, sharing must be asked for.
    worker.TrainConfig = lambda **k: made(**{**k, "share_prompts": k["share_prompts"] is not False})
    with tempfile.TemporaryDirectory() as folder:
        names = ("llama", "windowed", "gpt_oss")
        save_tiny_models(Path(folder), names)
        for name in names:
            root = Path(folder) / name
            hf_config = json.loads((root / "config.json").read_text())
            family = resolve_family(worker.FAMILY_KEYS.get(name), hf_config)
            source = ModelSource(family, hf_config, torch.float32, family.name, root)
            for is_forest in (False, True):
                try:
                    said = worker.compare(mesh, source, "lm", "none", is_forest)
                except AssertionError as error:
                    said = f"failed: {error}"
                say(f"{name} in fp32, {'branches' if is_forest else 'prompts'}", said)
    name = "qwen2"
    exact = train_worker.Run(name, mesh, torch.float32, layers="torch", share_prompts=False)
    batch = worker.a_forest(exact.model.source.shape.vocab_size)
    reference, logp_T = gradients(exact, batch)
    for shares in (False, True):
        run = train_worker.Run(name, mesh, torch.bfloat16, share_prompts=shares)
        assert run.model.planner.shares_branches == shares
        found, other_T = gradients(run, batch)
        mean = float((other_T - logp_T).abs().sum() / (logp_T != 0).sum())
        held = sum(int((i.whole.sequence_index_S >= 0).sum()) for i in run.model.plan(batch).inputs)
        say(
            f"branches of {name} in bf16, {'shared' if shares else 'alone'}",
            {
                "gradients_from_fp32": away(mesh, found, reference),
                "logprobs_from_fp32": mean,
                "positions": held,
            },
        )


def check_muon(mesh: Mesh) -> None:
    layout = TrainLayout(1)
    for family in ("qwen2", "qwen3_moe"):
        case = muon_worker.Case("one GPU", family, layout, 1, torch.float32)
        for dtype in ("bf16", "fp32"):
            mesh.platform.seed(1)
            run = muon_worker.a_run(mesh, case)
            model = run.model
            initial = {n: t.cpu() for n, t in muon_worker.in_hf_names(model).items()}
            oracle = Oracle(initial, dtype)
            for step in range(muon_worker.NUM_STEPS):
                model.accumulate(model.plan(muon_worker.a_batch(step)).inputs, objective_of_muon)
                norm = model.grad_norm()
                oracle.step({n: g.cpu() for n, g in muon_worker.whole_gradients(model).items()})
                model.apply(muon_worker.RATE, norm)
            found = {n: t.cpu() for n, t in muon_worker.in_hf_names(model).items()}
            errors = {}
            for name, one in found.items():
                expected = oracle.params[name].detach().double()
                change = (expected - initial[name]).norm()
                errors[name] = float((one - expected).norm() / change)
            worst = max(errors, key=errors.__getitem__)
            say(f"Muon of {family}, against torch's in {dtype}", [worst, errors[worst]])


def objective_of_muon(output: Any, micro: Any) -> tuple[torch.Tensor, None]:
    return muon_worker.objective(output, micro)


class Oracle(muon_worker.Oracle):
    """torch's optimizers, which orthogonalize in bf16 unless told."""

    def __init__(self, initial: dict[str, torch.Tensor], dtype: str) -> None:
        super().__init__(initial)
        self._is_fp32 = dtype == "fp32"

    def step(self, gradients: dict[str, torch.Tensor]) -> None:
        if self._is_fp32:
            super().step(gradients)
            return
        for name, one in self.params.items():
            one.grad = gradients[name].float()
        torch.nn.utils.clip_grad_norm_(self.params.values(), muon_worker.CLIP)
        self.muon.step()
        self.adamw.step()


def main() -> None:
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("PORT", "29533")}
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    torch.backends.cuda.matmul.allow_tf32 = False
    size = torch.distributed.get_world_size()
    mesh = Mesh(World(platform, 120), TrainLayout(size, cp=size))
    checks = {"prompts": check_prompts, "branches": check_branches, "muon": check_muon}
    for name in sys.argv[2:] or list(checks):
        began = time.monotonic()
        checks[name](mesh)
        say(f"{name}, seconds", round(time.monotonic() - began, 1))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
