"""One rank of the test that no layout changes what an algorithm learns: a mini-batch's gradients.

split_worker.py reference FOLDER   one process
split_worker.py compare FOLDER     8 ranks, TP2 PP2 DP2

Batches and settings are the contract suite's; the columns are made of the model's own
log-probabilities, as one process has them, so that no token is at another side of a bound.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from parity_worker import gradients_in_hf_names
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "contracts"))
from test_algorithms import CASES, prepare  # noqa: E402

from hybridrl.algorithms.base import CriticAlgorithm  # noqa: E402
from hybridrl.config.schema import TrainConfig  # noqa: E402
from hybridrl.contracts.batch import TrainBatch  # noqa: E402
from hybridrl.models.family import resolve_family  # noqa: E402
from hybridrl.models.hf.shards import load_hf  # noqa: E402
from hybridrl.models.init import init_weights  # noqa: E402
from hybridrl.models.weights import Head, hf_shapes  # noqa: E402
from hybridrl.parallel.groups import World  # noqa: E402
from hybridrl.parallel.joining import start_process_group  # noqa: E402
from hybridrl.parallel.layout import TrainLayout  # noqa: E402
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform  # noqa: E402
from hybridrl.roles.critic import Critic  # noqa: E402
from hybridrl.roles.policy import Policy  # noqa: E402
from hybridrl.training.model import ModelSource, ParallelModel  # noqa: E402

# fp32 sums in another order, of tokens that cancel: 2e-6 was seen, of the largest gradient.
GRADIENT_TOLERANCE = 5e-6
LOSS_TOLERANCE = 1e-5
Tensors = dict[str, torch.Tensor]


def build(mesh: Mesh, folder: Path, head: Head) -> ParallelModel:
    """The same weights in every layout."""
    hf_config = json.loads((folder / "config.json").read_text())
    family = resolve_family(None, hf_config)
    source = ModelSource(family, hf_config, torch.float32, family.name, folder)
    model = ParallelModel(mesh, source, head, TrainConfig(micro_batch_tokens=24))
    shapes = hf_shapes(family, source.shape, head)
    if head == "lm":
        load_hf(folder, model.layout(), model.weights(), shapes)
    else:
        init_weights(model.layout(), shapes, model.weights(), hf_config, 3)
    model.make_trainable(1e-3)
    return model


def with_columns(batch: TrainBatch, logp_T: torch.Tensor) -> TrainBatch:
    """Old policies and a reference near the model's own; some ratios clip."""
    generator = torch.Generator().manual_seed(1)
    mask_T = batch.response_mask_T
    noise_T, other_T = torch.randn(2, batch.num_tokens, generator=generator) * mask_T
    changed = {
        "old_logp_T": logp_T + 0.3 * noise_T,
        "behaviour_logp_T": logp_T + 0.3 * noise_T + 0.2 * other_T,
        "reference_logp_T": logp_T - 0.5 * noise_T.abs(),
    }
    return replace(batch, **{n: c for n, c in changed.items() if getattr(batch, n) is not None})


def found_of(case: str, policy: Policy, critic: ParallelModel, known: Tensors) -> Iterator[tuple]:
    """Yields the name, gradients and loss of each model that the case trains."""
    algorithm, _, batch = prepare(case)
    policy.algorithm = algorithm
    if case not in known:
        known[case] = policy.logprobs(batch)
    filled = algorithm.advantages(with_columns(batch, known[case]))
    assert filled.num_samples == 12, (case, filled.num_samples)
    loss = policy.gradients(filled).metrics["policy/loss"]
    yield f"{case}/policy", gradients_in_hf_names(policy.model), loss
    if isinstance(algorithm, CriticAlgorithm):
        loss = Critic(critic, algorithm, 10).gradients(filled).metrics["critic/loss"]
        yield f"{case}/critic", gradients_in_hf_names(critic), loss


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 300)
    is_reference = mode == "reference"
    layout = TrainLayout(1) if is_reference else TrainLayout(8, tp=2, pp=2)
    mesh = Mesh(World(platform, 300), layout)
    platform.seed(1)
    policy = Policy(build(mesh, folder, "lm"), prepare("grpo")[0], 10)
    critic = build(mesh, folder, "value")
    known = {} if is_reference else load_file(folder / "logps.safetensors")
    reference = {} if is_reference else load_file(folder / "gradients.safetensors")
    failures = []
    for case in CASES:
        for name, gradients, loss in found_of(case, policy, critic, known):
            if is_reference:
                reference |= {f"{name}/{key}": gradient for key, (gradient, _) in gradients.items()}
                reference[f"{name}/loss"] = torch.tensor(loss)
                continue
            expected = {key: reference[f"{name}/{key}"] for key in gradients}
            largest = max(float(gradient.abs().max()) for gradient in expected.values())
            worst = max(
                float(((gradient - expected[key]) * held).abs().max())
                for key, (gradient, held) in gradients.items()
            )
            gap = abs(loss - float(reference[f"{name}/loss"]))
            print(
                f"{name}: gradient {worst / largest:.1e}, loss {gap:.1e} of {loss:.3f}", flush=True
            )
            size = max(1.0, abs(loss))
            if largest == 0 or worst > GRADIENT_TOLERANCE * largest or gap > LOSS_TOLERANCE * size:
                failures.append(name)
    if is_reference:
        save_file(known, folder / "logps.safetensors")
        save_file(reference, folder / "gradients.safetensors")
    torch.distributed.destroy_process_group()
    if failures:
        sys.exit(f"rank {mesh.world.rank}: too far from one process: {failures}")


if __name__ == "__main__":
    main()
