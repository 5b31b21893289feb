"""Log-probabilities of engine and trainer where their routers choose otherwise. Real Megatron."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import (
    EXPERTS,
    LOGP_TOLERANCE,
    close_engines,
    make_engine,
    make_reference,
    make_requests,
    write_weights,
)
from packaged import CLASSES, needs

from hybridrl.algorithms.grpo import Grpo
from hybridrl.config.schema import GrpoConfig, TrainConfig
from hybridrl.contracts.batch import BatchError, Producer, Prompt, Rollout, RolloutBatch, TrainBatch
from hybridrl.models.family import resolve_family
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.mesh import Mesh
from hybridrl.roles.policy import Policy
from hybridrl.rollout.engine import SamplingParams, generate
from hybridrl.training.model import ModelSource, ParallelModel

NAME = "qwen3-moe"
SAMPLES = 3  # of a prompt
TINY_LOGITS = 1e-6  # of routers: experts weigh nearly the same, whichever are chosen


@pytest.fixture(autouse=True)
def closed_engines() -> Iterator[None]:
    yield
    close_engines()


def with_routers(name: str, seed: int) -> Any:
    """Returns a model whose routers' choices follow from the seed, and next to nothing else."""
    model, generator = make_reference(name), torch.Generator().manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("mlp.gate.weight"):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = TINY_LOGITS * noise
    return model


def rollouts_of(engine: Any) -> TrainBatch:
    """Returns responses of the engine, several to each prompt, one of them of a single token."""
    prompts = [request.prompt for request in make_requests(4, SamplingParams())]
    prompts[2] = prompts[2] * 20  # longer than a block of vLLM's KV cache
    requests = []
    for i in range(4 * SAMPLES):
        sampling = SamplingParams(max_new_tokens=1 if i == 5 else 12)
        (request,) = make_requests(1, sampling, seed=i)
        requests.append(replace(request, request_id=i, prompt=prompts[i // SAMPLES]))
    made = [
        Rollout(
            done.request_id,
            Prompt(done.request_id // SAMPLES, "", request.prompt),
            done.tokens,
            done.logps,
            done.finish_reason,
            done.version,
            blobs=done.blobs,
        )
        for request, done in zip(requests, generate(engine, requests), strict=True)
    ]
    here = Producer.here("the test")
    batch = RolloutBatch.from_rollouts(made, [i // SAMPLES for i in range(len(made))], here)
    return batch.scored(torch.zeros(batch.num_samples), {}, here).to_train(here)


def trainer(mesh: Mesh, folder: Path, shares: bool) -> Policy:
    mesh.platform.seed(1)
    hf_config = json.loads((folder / "config.json").read_text())
    family = resolve_family(None, hf_config)
    source = ModelSource(family, hf_config, torch.float32, family.name, folder)
    train = TrainConfig(micro_batch_tokens=512, share_prompts=shares)
    model = ParallelModel(mesh, source, "lm", train)
    load_hf(folder, model.layout(), model.weights(), hf_shapes(family, source.shape))
    return Policy(model, Grpo(GrpoConfig()), 1)


@pytest.mark.parametrize(
    "name",
    [NAME, *(pytest.param(f"{engine}-{NAME}", marks=needs(engine)) for engine in CLASSES)],
    ids=["hf", *CLASSES],
)
def test_replay_gives_the_engines_log_probabilities_where_routers_differ(
    mesh: Mesh, tmp_path: Path, name: str
) -> None:
    """Also with shared prompts. The routers of engine and trainer differ in their choices."""
    assert EXPERTS[name]["num_experts_per_tok"] == 2
    engine = make_engine(name, records_experts=True)
    write_weights(engine, with_routers(name, 1), 0)
    batch = rollouts_of(engine)
    with_routers(name, 2).save_pretrained(tmp_path)
    for shares in (True, False):
        policy = trainer(mesh, tmp_path, shares)
        own_T = policy.logprobs(batch)
        assert float((own_T - batch.behaviour_logp_T).abs().max()) > 0.1
        policy.model.replay_experts()
        gap_T = (policy.logprobs(batch) - batch.behaviour_logp_T).abs()
        assert float(gap_T.max()) < LOGP_TOLERANCE, shares
    with pytest.raises(BatchError, match="router_replay=rollout"):
        policy.logprobs(batch.with_blobs())
    blob = batch.blobs["routed_experts"]
    experts_NK, here = blob.values_N, Producer.here("the test")
    too_few = f"{experts_NK.shape[1] - 1} experts per token"
    for wrong_NK, said in ((experts_NK[:, 1:], too_few), (experts_NK + 7, "expert 1")):
        wrong = batch.join_blob(here, "routed_experts", replace(blob, values_N=wrong_NK))
        with pytest.raises(BatchError, match=said):
            policy.logprobs(wrong)
