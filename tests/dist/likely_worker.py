"""One rank of the test of likely tokens: log-probabilities and gradients against transformers.

likely_worker.py FOLDER CASE...   each is "family,tp,pp,cp"
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import parallel_state
from parity_worker import GRADIENT_TOLERANCE, gradients_in_hf_names, grouped_batch
from transformers import AutoModelForCausalLM

from hybridrl.algorithms.centering import mean_score
from hybridrl.config.correction import CorrectionConfig
from hybridrl.config.schema import TrainConfig
from hybridrl.contracts.batch import Blob, TrainBatch
from hybridrl.contracts.likely_tokens import LIKELY_LOGPS, LIKELY_TOKENS
from hybridrl.models.family import resolve_family
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.training.model import ModelSource, ParallelModel

GROUPS = [(3, (9, 2, 5)), (5, (2, 7)), (2, (17,)), (7, (7, 1)), (1, (13, 4)), (6, (12,))]
NUM_LIKELY = 6
WEIGHTED = CorrectionConfig(weight="token")
Sets = list[list[tuple[torch.Tensor, torch.Tensor]]]


def likely_sets(batch: TrainBatch, vocab: int, is_support: bool) -> Sets:
    """Returns random sets of tokens with the drawn one in front, for each token of each sample."""
    generator, found = torch.Generator().manual_seed(3), []
    starts = (batch.offsets[:-1] + batch.prompt_lengths_B).tolist()
    for start, end in zip(starts, batch.offsets[1:].tolist(), strict=True):
        found.append([])
        for token in batch.tokens_T[start:end].tolist():
            num = int(torch.randint(1, NUM_LIKELY + 1, (1,), generator=generator))
            order = torch.randperm(vocab, generator=generator)
            tokens = torch.cat((torch.tensor([token]), order[order != token][: num - 1]))
            logps = torch.randn(num, generator=generator).log_softmax(0)
            found[-1].append((tokens, logps if is_support else logps - 0.1))
    return found


def with_sets(batch: TrainBatch, sets: Sets) -> TrainBatch:
    tokens, logps, num_rows = [], [], []
    for prompt_length, own in zip(batch.prompt_lengths_B.tolist(), sets, strict=True):
        num_rows.append(sum(len(one) + 1 for one, _ in own))
        for index, (ids, values) in enumerate(own, prompt_length):
            tokens += [-1 - index, *ids.tolist()]
            logps += [0.0, *values.tolist()]
    num_rows_B = torch.tensor(num_rows)
    entries = torch.tensor(tokens, dtype=torch.int32), torch.tensor(logps)
    names = LIKELY_TOKENS, LIKELY_LOGPS
    return replace(
        batch,
        blobs={n: Blob(one, num_rows_B) for n, one in zip(names, entries, strict=True)},
    )


def objective(output, micro):
    """A loss of all statistics, with a different weight at every position."""
    weight = (micro.positions_S % 5 - 1.5).to(output.logp_S.dtype) * micro.loss_mask_S
    logp_SK = torch.cat((output.logp_S[:, None], output.chosen_logp_SK), 1)
    mean_S = mean_score(logp_SK, micro.model_inputs[LIKELY_LOGPS].value, WEIGHTED)
    loss = weight * (output.logp_S + 0.7 * mean_S) + 0.3 * output.entropy_S * micro.loss_mask_S
    return loss.sum() / 100, None


def expected(folder: Path, batch: TrainBatch, sets: Sets, is_support: bool):
    """Returns log-probabilities (T,) and gradients by HF name, with transformers' logits."""
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logp_T, offsets, loss = torch.zeros(batch.num_tokens), batch.offsets.tolist(), torch.zeros(())
    for sample, own in enumerate(sets):
        tokens = batch.tokens_T[offsets[sample] : offsets[sample + 1]]
        logits_LV = oracle(tokens[None]).logits[0]
        for index, (ids, engine_logps) in enumerate(own, int(batch.prompt_lengths_B[sample])):
            chosen = logits_LV[index - 1][ids] if is_support else logits_LV[index - 1]
            logp = chosen.log_softmax(0)
            of_ids = logp if is_support else logp[ids]
            mean = mean_score(of_ids[None], engine_logps[None], WEIGHTED)[0]
            weight = (index - 1) % 5 - 1.5
            loss = loss + weight * (of_ids[0] + 0.7 * mean) - 0.3 * (logp.exp() * logp).sum()
            logp_T[offsets[sample] + index] = of_ids[0].detach()
    (loss / 100).backward()
    return logp_T, {name: p.grad for name, p in oracle.named_parameters()}


def check(folder: Path, layout: TrainLayout, is_support: bool) -> str:
    platform = Platform.detect()
    mesh = Mesh(World(platform, 120), layout)
    platform.seed(1)
    hf_config = json.loads((folder / "config.json").read_text())
    family = resolve_family(None, hf_config)
    source = ModelSource(family, hf_config, torch.float32, family.name, folder)
    # With context parallelism, prompts are shared only with transformer-engine's layers.
    shares = layout.cp == 1
    train = TrainConfig(micro_batch_tokens=48, share_prompts=shares)
    model = ParallelModel(mesh, source, "lm", train)
    load_hf(folder, model.layout(), model.weights(), hf_shapes(family, source.shape))
    model.make_trainable(1e-3)
    model.use_likely_tokens(is_support, True, NUM_LIKELY)
    plain = grouped_batch(GROUPS, hf_config["vocab_size"])
    sets = likely_sets(plain, hf_config["vocab_size"], is_support)
    batch = with_sets(plain, sets)
    expected_T, wanted = expected(folder, batch, sets, is_support)
    plan = model.plan(batch)
    outputs = model.forward_all(plan.inputs)
    assert not outputs or outputs[0].chosen_logp_SK is None, "a pass without gradients keeps them"
    found_T = plan.column([output.logp_S for output in outputs]) * batch.response_mask_T
    worst_logp = float((found_T - expected_T).abs().max())
    assert worst_logp < 1e-5, f"log-probabilities differ by {worst_logp}"
    model.accumulate(plan.inputs, objective)
    gradients = gradients_in_hf_names(model)
    assert wanted.keys() == gradients.keys()
    largest = max(float(one.abs().max()) for one in wanted.values())
    worst, num_held = 0.0, 0
    for name, (gradient, held) in gradients.items():
        worst = max(worst, float(((gradient - wanted[name]).abs() * held).max()))
        num_held += int(held.sum())
    assert num_held
    # As parity_worker.py allows from transformers.
    assert worst < 2.5 * GRADIENT_TOLERANCE * largest, f"gradients differ by {worst / largest}"
    parallel_state.destroy_model_parallel()
    return f"logp {worst_logp:.1e}, gradient {worst / largest:.1e} of the largest"


def main() -> None:
    root = Path(sys.argv[1])
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    for case in sys.argv[2:]:
        name, *sizes = case.split(",")
        for is_support in (True, False):
            said = check(root / name, TrainLayout(size, *map(int, sizes)), is_support)
            print(f"rank {rank} {case} support={is_support}: {said}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
