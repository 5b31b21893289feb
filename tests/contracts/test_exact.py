"""Exact mode: engine and trainer compute the same bits for the same tokens. Real Megatron."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_cases import (
    EXPERT_MODELS,
    GEMMA3,
    HF_MODELS,
    MISTRAL,
    PACKAGED_MODELS,
    PACKAGED_OTHERS,
    TINY,
    make_requests,
    start_packaged,
    write_weights,
)
from packaged import needs
from small_runs import small_run
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl import ops
from hybridrl.algorithms.grpo import Grpo
from hybridrl.config.own_code import imported
from hybridrl.config.schema import GrpoConfig, TrainConfig
from hybridrl.contracts.batch import Producer, Prompt, Rollout, RolloutBatch, TrainBatch
from hybridrl.contracts.routed_experts import ROUTED_EXPERTS
from hybridrl.models.family import resolve_family
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.megatron import exact, packed_exactly
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.mesh import Mesh
from hybridrl.roles.policy import Policy
from hybridrl.rollout.engine import SamplingParams, generate
from hybridrl.rollout.hf.adapter import HfEngine
from hybridrl.rollout.registry import ENGINES
from hybridrl.training.model import ModelSource, ParallelModel

MIXTURE = {"qwen3-moe": EXPERT_MODELS["qwen3-moe"]}
MODELS: dict[str, dict[str, Any]] = {**HF_MODELS, **MISTRAL, **MIXTURE, "gemma3": GEMMA3}
VLLM = {
    name: model
    for name, model in {**PACKAGED_MODELS, **PACKAGED_OTHERS}.items()
    if name.startswith("vllm-")
}

FULL = pytest.mark.full


def needs_vllm(test: Any) -> Any:
    """Marks a test that calls vLLM's kernels."""
    for mark in needs("vllm"):
        test = mark(test)
    return test


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="exact mode is refused on GPUs")


def reference(name: str) -> Any:
    """Returns a transformers model with random weights."""
    fields = dict((MODELS | VLLM)[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            scale = 0.3 * (TINY["hidden_size"] / config.hidden_size) ** 0.5
            # Gemma's norms add 1, and its embeddings, which are tied, are multiplied by a factor.
            is_gemma = config.model_type.startswith("gemma")
            if parameter.ndim > 1:
                parameter.data = (0.2 if is_gemma else 1.0) * scale * noise
            else:
                parameter.data = 0.1 * noise + (-0.5 if is_gemma else 0.5)
    return model


def rollouts_of(engine: Any, temperature: float, repeated: int = 25) -> TrainBatch:
    """Returns responses to prompts, a long one among them: a short one `repeated` times."""
    prompts = [request.prompt for request in make_requests(3, SamplingParams())]
    prompts[1] = prompts[1] * repeated
    requests = []
    for i in range(9):
        sampling = SamplingParams(temperature, max_new_tokens=1 if i == 5 else 7 + i)
        (request,) = make_requests(1, sampling, seed=i)
        requests.append(replace(request, request_id=i, prompt=prompts[i // 3]))
    made = [
        Rollout(
            done.request_id,
            Prompt(done.request_id // 3, "", request.prompt),
            done.tokens,
            done.logps,
            done.finish_reason,
            done.version,
            blobs=done.blobs,
        )
        for request, done in zip(requests, generate(engine, requests), strict=True)
    ]
    here = Producer.here("the test")
    batch = RolloutBatch.from_rollouts(made, [i // 3 for i in range(len(made))], here)
    return batch.scored(torch.zeros(batch.num_samples), {}, here).to_train(here)


def trainer(
    mesh: Mesh,
    folder: Path,
    dtype: torch.dtype,
    temperature: float,
    budget: int = 512,
    shares: bool | None = None,
) -> Policy:
    mesh.platform.seed(1)
    hf_config = AutoConfig.from_pretrained(folder).to_dict()
    family = resolve_family(None, hf_config)
    source = ModelSource(family, hf_config, dtype, family.name, folder)
    train = TrainConfig(micro_batch_tokens=budget, layers="torch", share_prompts=shares)
    model = ParallelModel(mesh, source, "lm", train)
    load_hf(folder, model.layout(), model.weights(), hf_shapes(family, source.shape))
    return Policy(model, Grpo(GrpoConfig()), 1, temperature)


def cases() -> list[Any]:
    """Returns models and types; one start of vLLM is enough for every day."""
    found = []
    for dtype in ("bfloat16", "float32"):
        for name in (*MODELS, *VLLM):
            is_usual = dtype == "bfloat16" and (name in MODELS or name == "vllm-qwen3")
            marks = [*(needs("vllm") if name in VLLM else ())]
            found.append(pytest.param(name, dtype, marks=marks if is_usual else [*marks, FULL]))
    return found


@pytest.mark.parametrize(("name", "dtype"), cases())
def test_trainer_computes_the_bits_that_the_engine_sampled_with(
    mesh: Mesh,
    tmp_path: Path,
    closed_engines: None,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: str,
) -> None:
    # Beyond 1,000 tokens, vLLM's attention in float32 would depend on the number of queries.
    is_long = name in VLLM and dtype == "float32"
    if is_long:
        monkeypatch.setitem((MODELS | VLLM)[name], "max_position_embeddings", 2048)
    model, temperature, attend = reference(name), 0.7, None
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    if name in VLLM:
        engine: Any = start_packaged(
            name, max_batch=4, dtype=dtype, is_exact=True, max_tokens=1500 if is_long else 300
        )
        attend = imported(str(ENGINES["vllm"].exact_attention))
    else:
        engine = HfEngine(
            config, dtype, max_batch=4, is_exact=True, records_experts=name in MIXTURE
        )
    write_weights(engine, model, 0)
    batch = rollouts_of(engine, temperature, 190 if is_long else 25)
    budget = 1500 if is_long else 512
    policy = trainer(mesh, tmp_path, getattr(torch, dtype), temperature, budget)
    usual_T = policy.logprobs(batch)
    policy.model.match_engine(attend)
    if name in MIXTURE:
        assert ROUTED_EXPERTS in batch.blobs
        assert torch.equal(policy.logprobs(batch), batch.behaviour_logp_T)  # its own experts
        policy.model.replay_experts()
    exact_T = policy.logprobs(batch)
    assert torch.equal(exact_T, batch.behaviour_logp_T)
    assert float(exact_T[batch.response_mask_T].mean()) < -0.1  # responses are not certain
    # The usual operations round differently, so that the test can fail.
    assert not torch.equal(usual_T, batch.behaviour_logp_T)
    # Usual routers may choose other experts in bfloat16.
    most = 2 if name in MIXTURE else 0.5
    assert float((usual_T - exact_T).abs().max()) < (most if dtype == "bfloat16" else 1e-4)


def attend_plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: packed_exactly.Bounds,
    scale: float,
    num_before: int | None,
) -> torch.Tensor:
    """Attends within packed sequences, one after another."""
    found = []
    for q, k in zip(
        pairwise(bounds.cu_seqlens_q.tolist()), pairwise(bounds.cu_seqlens_k.tolist()), strict=True
    ):
        column = torch.arange(k[1] - k[0])
        row = column[len(column) - (q[1] - q[0]) :, None]
        seen = column <= row
        if num_before is not None:
            seen &= column >= row - num_before
        parts = (x.transpose(0, 1) for x in (query[slice(*q)], key[slice(*k)], value[slice(*k)]))
        result = torch.nn.functional.scaled_dot_product_attention(
            *parts, attn_mask=seen, scale=scale, enable_gqa=True
        )
        found.append(result.transpose(0, 1))
    return torch.cat(found)


def plain_kernels() -> packed_exactly.EngineKernels:
    """Returns stand-ins on CPU for an engine's operations on GPUs."""

    def attend(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return attend_plainly(*arguments), arguments[0].new_zeros(0)

    def backward(grad: torch.Tensor, *arguments: Any) -> Any:
        query, key, value, _, _, *rest = arguments
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (query, key, value)]
            return torch.autograd.grad(attend_plainly(*inputs, *rest), inputs, grad)

    return packed_exactly.EngineKernels(attend, backward, ops.invariant_logps)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "qwen3-moe"])
def test_exact_operations_compute_what_the_usual_layers_compute(
    mesh: Mesh, tmp_path: Path, name: str, is_shared: bool
) -> None:
    """Log-probabilities and gradients. Dense models compute as on GPUs, with stand-ins for the
    engine's kernels; mixtures as on CPU.
    """
    model = reference(name)
    model.save_pretrained(tmp_path)
    engine = HfEngine(model.config.to_dict(), "float32", max_batch=4)
    write_weights(engine, model, 0)
    batch = rollouts_of(engine, 0.7)
    found = []
    for is_exact in (False, True):
        policy = trainer(mesh, tmp_path, torch.float32, 0.7, shares=is_shared)
        if is_exact:
            policy.model.match_engine(kernels=None if name in MIXTURE else plain_kernels())
        policy.model.make_trainable(1e-3)
        logps = policy.logprobs(batch)
        learned = batch.join_columns(Producer.here("the test"), old_logp_T=logps)
        learned = replace(learned, reward_B=torch.arange(9.0) % 4)
        metrics = policy.update(policy.algorithm.advantages(learned))
        found.append((logps, metrics["policy/grad_norm"]))
    (usual_T, usual), (exact_T, ours) = found
    torch.testing.assert_close(exact_T, usual_T, atol=1e-5, rtol=1e-5)
    assert ours == pytest.approx(usual, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_before", [None, 1023])
@needs_vllm
def test_attention_of_vllm_computes_equal_bits_in_long_sequences(
    dtype: torch.dtype, num_before: int | None
) -> None:
    """A token of a long prompt gets the bits that it gets alone, unlike with other block sizes."""
    attend = imported(str(ENGINES["vllm"].exact_attention))
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, n, 3001, 64).to(dtype) for n in (4, 2, 2))

    def at(*positions: int) -> torch.Tensor:
        end = positions[-1] + 1
        seen, place = torch.empty(0), torch.tensor(positions)[None]
        result: torch.Tensor = attend(
            query[:, :, place[0]], key[:, :, :end], value[:, :, :end], seen, place, num_before, 0.3
        )
        return result

    whole = at(*range(3001))
    for position in (5, 511, 600, 1023, 2048, 2100, 3000):
        assert torch.equal(at(position)[:, :, 0], whole[:, :, position]), position
        several = at(*range(position - 3, position + 1))
        assert torch.equal(several, whole[:, :, position - 3 : position + 1]), position


@needs_vllm
def test_each_token_of_vllm_attends_as_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 4 new tokens after 5 cached ones, and a token at position 2."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

    from hybridrl.rollout.vllm import exact as vllm_exact

    planned, passed = list[Any](), list[Any]()
    monkeypatch.setattr(vllm_exact, "_plan", lambda *found: planned.append(found))
    given = CPUAttentionMetadata(
        num_actual_tokens=5,
        max_query_len=4,
        query_start_loc=torch.tensor([0, 4, 5], dtype=torch.int32),
        max_seq_len=9,
        seq_lens=torch.tensor([9, 3], dtype=torch.int32),
        block_table=torch.tensor([[1, 2], [3, 0]], dtype=torch.int32),
        slot_mapping=torch.arange(5),
        scheduler_metadata=torch.empty(0),
    )
    layer: Any = SimpleNamespace(
        num_heads=4, num_kv_heads=2, head_size=8, impl=SimpleNamespace(sliding_window=7)
    )
    query = torch.empty(5, 4, 8)
    vllm_exact._attend_by_tokens(
        lambda *found, **_: passed.append(found[5]), layer, query, query, query, query, given
    )
    (rows,), ((lengths, sizes, dtype, window),) = passed, planned
    assert rows.seq_lens.tolist() == lengths.tolist() == [6, 7, 8, 9, 3]
    assert rows.query_start_loc.tolist() == [0, 1, 2, 3, 4, 5]
    assert rows.block_table.tolist() == [[1, 2]] * 4 + [[3, 0]]
    assert (sizes, dtype, window) == ((4, 2, 8), torch.float32, 7)


@pytest.mark.parametrize("is_centered", [False, True])
def test_gradients_of_exact_operations_are_those_of_torch(is_centered: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 7, 24, requires_grad=True), torch.randn(40, 24, requires_grad=True)
    norm, bias = torch.randn(24, requires_grad=True), torch.randn(40, requires_grad=True)
    angle = torch.randn(4, 8)
    angles = packed_exactly.rotary_table(angle, torch.float32)
    turn = torch.polar(torch.ones(5, 1, 8), angle[[3, 0, 1, 3, 2]][:, None])
    turned = torch.complex(x[..., :8], x[..., 8:16]) * turn
    query, key, value = (torch.randn(2, n, 9, 8, requires_grad=True) for n in (4, 2, 2))
    seen = torch.ones(9, 9, dtype=torch.bool).tril()[None]
    position = torch.arange(9)[None]
    pairs = (
        (exact.Linear.apply(x, weight, bias), x @ weight.T + bias, (x, weight, bias)),
        (exact.Linear.apply(x, weight, None), x @ weight.T, (x, weight)),
        (
            exact._Swiglu.apply(x),
            torch.nn.functional.silu(x[..., :12]) * x[..., 12:],
            (x,),
        ),
        (
            packed_exactly._Rotate.apply(x, angles, torch.tensor([3, 0, 1, 3, 2])),
            torch.cat((turned.real, turned.imag, x[..., 16:]), -1),
            (x,),
        ),
        (
            exact._Norm.apply(x, norm, 1e-5, is_centered),
            torch.nn.functional.rms_norm(x, (24,), norm + float(is_centered), 1e-5),
            (x, norm),
        ),
        (
            exact.ExactAttention.apply(
                exact.by_blocks, query, key, value, seen, position, None, 0.3
            ),
            torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=0.3, enable_gqa=True
            ),
            (query, key, value),
        ),
    )
    for found, expected, inputs in pairs:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        gradient = torch.randn_like(expected)
        ours = torch.autograd.grad(found, inputs, gradient)
        theirs = torch.autograd.grad(expected, inputs, gradient)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


class Watched:
    """A step's metrics, its passes without gradients, and each micro-batch's largest log-ratio."""

    def __init__(self, folder: Path, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_passes, self.log_ratios = 0, list[float]()
        logprobs, loss = Policy.logprobs, Grpo.loss

        def counted(*args: Any, **keywords: Any) -> torch.Tensor:
            self.num_passes += 1
            return logprobs(*args, **keywords)

        def watched(own: Grpo, logp_S: Any, entropy_S: Any, micro: Any, total: float) -> Any:
            ratio_S = (logp_S.detach() - micro.old_logp_S)[micro.loss_mask_S]
            self.log_ratios.append(float(ratio_S.abs().max()))
            return loss(own, logp_S, entropy_S, micro, total)

        knobs = ["rollout.engine=hf", "steps.updates_per_step=2", "steps.num_steps=2"]
        knobs += [f"numerics.match={match}", f"run.name={match}"]
        with small_run(folder, *knobs) as run, monkeypatch.context() as patched:
            run.check_engine()
            patched.setattr(Policy, "logprobs", counted)
            patched.setattr(Grpo, "loss", watched)
            self.metrics = run.train_step()


def test_a_run_learns_from_the_samplers_log_probabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ratios of the first update are exactly 1, and no pass recomputes log-probabilities."""
    close, exact_run = (Watched(tmp_path, match, monkeypatch) for match in ("close", "exact"))
    assert exact_run.num_passes == 0 and close.num_passes == 1
    assert exact_run.log_ratios[0] == 0.0
    assert exact_run.log_ratios[-1] > 0  # the second update follows changed weights
    assert exact_run.metrics["mismatch/logprob_diff_max"] == 0.0
    assert close.metrics["mismatch/logprob_diff_max"] > 0
    # float32: both sampled the same tokens, and computed the same gradient but for rounding.
    name = "policy/grad_norm"
    assert exact_run.metrics[name] == pytest.approx(close.metrics[name], rel=1e-3)
