"""One rank: what teacher and student say of given tokens, in every layout, against transformers.

teacher_worker.py FOLDER LAYOUT...     a layout is "tp,pp,cp,vpp[,shared]"; FOLDER has student and
teacher, the teacher with another family, other sizes and a larger embedding.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from megatron.core import parallel_state
from parity_worker import gradients_in_hf_names, grouped_batch
from transformers import AutoModelForCausalLM

from hybridrl.algorithms import make_algorithm
from hybridrl.algorithms.base import Needs
from hybridrl.config.algorithm import OnPolicyDistillationConfig
from hybridrl.config.distillation import DistillationConfig
from hybridrl.config.schema import TrainConfig
from hybridrl.contracts.batch import Producer, TrainBatch
from hybridrl.models.family import resolve_family
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.roles.policy import Policy
from hybridrl.roles.teacher import Teacher
from hybridrl.training.model import ModelSource, ParallelModel

GROUPS = ((3, (9, 4, 6)), (5, (2,)), (2, (17, 3)), (7, (7,)), (1, (30, 1)), (4, (1, 12)))
TOP, TEMPERATURE = 7, 1.3
LOGP = 1e-5  # fp32 sums in another order, as in parity_worker.py
GRADIENT = 5e-6  # of the largest; the same


def oracle_logps(
    folder: Path, batch: TrainBatch, vocab: int
) -> tuple[torch.nn.Module, torch.Tensor]:
    """Returns transformers' model and its log-probabilities at response tokens, (R, vocab)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows, offsets = [], batch.offsets.tolist()
    for sample, prompt in enumerate(batch.prompt_lengths_B.tolist()):
        tokens = batch.tokens_T[offsets[sample] : offsets[sample + 1]]
        logits = model(tokens[None]).logits[0, prompt - 1 : -1, :vocab]
        rows.append((logits / TEMPERATURE).log_softmax(-1))
    return model, torch.cat(rows)


def build(mesh: Mesh, folder: Path, settings: TrainConfig) -> ParallelModel:
    hf_config = json.loads((folder / "config.json").read_text())
    family = resolve_family(None, hf_config)
    source = ModelSource(family, hf_config, torch.float32, family.name, folder)
    model = ParallelModel(mesh, source, "lm", settings)
    load_hf(folder, model.layout(), model.weights(), hf_shapes(family, source.shape))
    return model


def whole_kl(
    teacher_RV: torch.Tensor, policy_RV: torch.Tensor, top_RK: torch.Tensor
) -> torch.Tensor:
    """The KL in which tokens that are not in the top are one outcome, by sums over all tokens."""
    is_top_RV = torch.zeros_like(teacher_RV, dtype=torch.bool).scatter(1, top_RK, True)
    p_RV, q_RV = teacher_RV.exp().double(), policy_RV.exp().double()
    top = (p_RV * (p_RV.log() - q_RV.log()) * is_top_RV).sum(1)
    rest_p, rest_q = ((x * ~is_top_RV).sum(1) for x in (p_RV, q_RV))
    return top + rest_p * (rest_p / rest_q).log()


def check_teacher(
    mesh: Mesh, root: Path, settings: TrainConfig, batch: TrainBatch, oracle_RV: torch.Tensor
) -> TrainBatch:
    """The teacher's columns are transformers' likeliest tokens and log-probabilities."""
    model = build(mesh, root / "teacher", settings)
    model.freeze()
    vocab, mask_T = oracle_RV.size(1), batch.response_mask_T
    teacher = Teacher(model, Needs(teacher=True, teacher_top=TOP), vocab, TEMPERATURE)
    batch = batch.join_columns(Producer.here("the teacher"), **teacher.columns(batch))
    expected = oracle_RV.topk(TOP)
    assert batch.teacher_tokens_TK.dtype == torch.int32
    assert torch.equal(batch.teacher_tokens_TK[mask_T].long(), expected.indices)
    assert (batch.teacher_logp_TK[mask_T] - expected.values).abs().max() < LOGP
    sampled_R = oracle_RV.gather(1, batch.tokens_T[mask_T][:, None])[:, 0]
    assert (batch.teacher_logp_T[mask_T] - sampled_R).abs().max() < LOGP
    return batch


def check_student(
    mesh: Mesh, root: Path, settings: TrainConfig, batch: TrainBatch, teacher_RV: torch.Tensor
) -> str:
    """The loss of distillation and its gradient are those of transformers and autograd."""
    algorithm = make_algorithm(DistillationConfig(teacher="t", top_k=TOP))
    model = build(mesh, root / "student", settings)
    model.make_trainable(1e-3)
    policy = Policy(model, algorithm, 10, TEMPERATURE)
    found = policy.gradients(algorithm.advantages(batch))
    oracle, policy_RV = oracle_logps(root / "student", batch, teacher_RV.size(1))
    kl_R = whole_kl(teacher_RV, policy_RV, teacher_RV.topk(TOP).indices)
    kl_R.mean().backward()
    assert abs(found.loss / kl_R.mean().item() - 1) < 1e-5, (found.loss, kl_R.mean())
    assert abs(found.metrics["teacher/forward_kl"] / found.loss - 1) < 1e-5
    mass = teacher_RV.topk(TOP).values.exp().sum(1).mean().item()
    assert abs(found.metrics["teacher/top_mass"] / mass - 1) < 1e-5
    largest = max(float(p.grad.abs().max()) for p in oracle.parameters())
    worst, covered = 0.0, 0
    gradients = gradients_in_hf_names(model)
    for name, parameter in oracle.named_parameters():
        gradient, held = gradients[name]
        worst = max(worst, float(((gradient - parameter.grad) * held).abs().max()))
        covered += int(held.sum())
    assert worst < GRADIENT * largest, worst / largest
    assert covered > 0 and largest > 1e-3
    return f"gradient within {worst / largest:.1e} of the largest"


def check_itself(mesh: Mesh, root: Path, settings: TrainConfig, batch: TrainBatch) -> None:
    """A student that is its own teacher: no advantage, no loss, no gradient."""
    sampled = OnPolicyDistillationConfig(teacher="t", gamma=0.7)
    student = build(mesh, root / "student", settings)
    frozen = build(mesh, root / "student", settings)
    student.make_trainable(1e-3)
    frozen.freeze()
    vocab = student.source.shape.vocab_size
    teacher = Teacher(frozen, Needs(teacher=True), vocab, TEMPERATURE)
    algorithm = make_algorithm(sampled)
    policy = Policy(student, algorithm, 10, TEMPERATURE)
    columns = {"old_logp_T": policy.logprobs(batch), **teacher.columns(batch)}
    filled = algorithm.advantages(batch.join_columns(Producer.here("test"), **columns))
    assert columns["old_logp_T"].abs().sum() > 0
    assert (filled.advantages_T == 0).all(), filled.advantages_T.abs().max()
    algorithm = make_algorithm(DistillationConfig(teacher="t", top_k=TOP))
    teacher = Teacher(frozen, algorithm.needs, vocab, TEMPERATURE)
    filled = batch.join_columns(Producer.here("test"), **teacher.columns(batch))
    found = Policy(student, algorithm, 10, TEMPERATURE).gradients(filled)
    # One pass with and one without gradients: the same sums in the same order.
    assert abs(found.loss) < 1e-7 and found.grad_norm < 1e-5, (found.loss, found.grad_norm)


def main() -> None:
    root = Path(sys.argv[1])
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    size = torch.distributed.get_world_size()
    vocab = json.loads((root / "student" / "config.json").read_text())["vocab_size"]
    batch = grouped_batch(GROUPS, vocab)
    with torch.no_grad():
        _, teacher_RV = oracle_logps(root / "teacher", batch, vocab)
    for text in sys.argv[2:]:
        tp, pp, cp, vpp, *shared = text.split(",")
        mesh = Mesh(
            World(platform, 120), TrainLayout(size, int(tp), int(pp), int(cp), vpp=int(vpp))
        )
        settings = TrainConfig(micro_batch_tokens=48, share_prompts=bool(shared), tp=int(tp))
        platform.seed(1)
        taught = check_teacher(mesh, root, settings, batch, teacher_RV)
        said = check_student(mesh, root, settings, taught, teacher_RV)
        check_itself(mesh, root, settings, batch)
        if mesh.world.rank == 0:
            print(f"{text}: {said}", flush=True)
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
