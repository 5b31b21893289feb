"""Records the residual stream of a model after each stage, in the engine and in the trainer.

Functions that take a ParallelModel are collective over the world. The sum over all ranks is exactly
the whole stream: a rank's values are zero for layers and tokens that it does not hold.

The stages are `embedding`, `layers.N.attention` (after the attention output is added),
`layers.N.mlp` (after the layer), `norm` and `logits`. Streams are float32 on the CPU with one row
per token, recorded by forward hooks on pre-norm decoders. Modules are found by Megatron's names in
the trainer, and by HF's names, which vLLM and SGLang use too, in the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hybridrl import ops
from hybridrl.contracts.batch import TrainBatch
from hybridrl.models.megatron.heads import LanguageModel, TokenStats
from hybridrl.rollout.build import ComputingEngine
from hybridrl.rollout.engine import Request, SamplingParams, generate
from hybridrl.training.batches.batch_plan import ModelInput
from hybridrl.training.model import ParallelModel

Keep = Callable[[str, Tensor], None]
Pick = Callable[[Any, Any], Any]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=1)


def stages(num_layers: int) -> list[str]:
    parts = [f"layers.{i}.{part}" for i in range(num_layers) for part in ("attention", "mlp")]
    return ["embedding", *parts, "norm"]


def engine_streams(
    engine: ComputingEngine, prompts: Sequence[tuple[int, ...]]
) -> dict[str, Tensor]:
    """Returns the stages that an idle engine computes, with one row per prompt token.

    `logits` has one row per prompt, for its last position; it is missing on ranks to which vLLM
    returns no logits. Every tensor-parallel rank of a replica must call this.
    """
    found: dict[str, list[Tensor]] = {}
    decoder: Any = engine.model.get_submodule("model")
    expected = stages(len(decoder.layers))
    for number, prompt in enumerate(prompts):
        # One prompt at a time with an empty cache, so that every position is computed here.
        engine.begin_update()
        engine.finish_update(engine.version)
        parts: dict[str, list[Tensor]] = {}

        def keep(stage: str, hidden: Tensor, parts: dict[str, list[Tensor]] = parts) -> None:
            # Copy immediately, because vLLM's kernels overwrite their inputs.
            rows = hidden.detach().flatten(0, -2).to("cpu", torch.float32, copy=True)
            parts.setdefault(stage, []).append(rows)

        with decoder_hooks(engine.model, keep):
            generate(engine, [Request(number, prompt, 0, GREEDY)])
        for stage in expected:
            whole = torch.cat(parts.get(stage, [torch.empty(0, 1)]))[: len(prompt)]
            if len(whole) < len(prompt):
                raise RuntimeError(
                    f"stage {stage} of the engine computed {len(whole)} of {len(prompt)} positions "
                    "of a prompt; the engine needs an empty cache and rollout.eager=true"
                )
            found.setdefault(stage, []).append(whole)
        if "logits" in parts:
            found.setdefault("logits", []).append(parts["logits"][0][-1:])
    return {stage: torch.cat(rows) for stage, rows in found.items()}


@contextmanager
def decoder_hooks(model: nn.Module, keep: Keep) -> Iterator[None]:
    """Makes forward passes with HF's module names call `keep` with each stage's stream.

    In vLLM and SGLang, layers and norms return the MLP's output and the stream separately. SGLang
    returns an object with the logits as an attribute.
    """
    decoder: Any = model.get_submodule("model")
    modules = dict(model.named_modules())

    def norm_input(inputs: Any, output: Any) -> Any:
        return output[1] if isinstance(output, tuple) else inputs[0]

    def total(inputs: Any, output: Any) -> Any:
        return output[0] + output[1] if isinstance(output, tuple) else output

    def logits(inputs: Any, output: Any) -> Any:
        return getattr(output, "next_token_logits", _first(inputs, output))

    with ExitStack() as watched:
        watch = partial(_watch, watched, keep)
        watch(decoder.embed_tokens, "embedding")
        for number, layer in enumerate(decoder.layers):
            watch(layer.post_attention_layernorm, f"layers.{number}.attention", norm_input)
            watch(layer, f"layers.{number}.mlp", total)
        watch(decoder.norm, "norm")
        watch(modules.get("logits_processor") or modules["lm_head"], "logits", logits)
        yield


def _first(inputs: Any, output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _first_input(inputs: Any, output: Any) -> Any:
    return _first((), inputs[0])


def _watch(
    watched: ExitStack, keep: Keep, module: nn.Module, stage: str, pick: Pick = _first
) -> None:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if (stream := pick(inputs, output)) is not None:
            keep(stage, stream)

    watched.callback(module.register_forward_hook(hook).remove)


def trainer_streams(
    model: ParallelModel, batch: TrainBatch, wanted_N: Tensor, temperature: float
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Runs one forward pass over whole samples, in the training phase.

    Returns:
        The stages (N, D), without `logits`, of the ascending tokens `wanted_N`; the final norm of
        all tokens (T, D); and the log-probability of each response token, (T,).
    """
    plan = model.plan(batch, temperature)
    size, num_tokens = model.source.shape.hidden_size, batch.num_tokens
    slot_T = torch.full((num_tokens,), -1)
    slot_T[wanted_N] = torch.arange(len(wanted_N))
    own: dict[str, Tensor] = {}
    calls: Counter[str] = Counter()

    def keep(stage: str, hidden: Tensor) -> None:
        index = _local_tokens(model, batch, plan.inputs[calls[stage]])
        calls[stage] += 1
        slots = index if stage == "norm" else slot_T[index].where(index >= 0, -1)
        is_kept = slots >= 0
        count = num_tokens if stage == "norm" else len(wanted_N)
        column = own.setdefault(stage, torch.zeros(count, size))
        rows = hidden.detach().flatten(0, -2)
        column[slots[is_kept]] = rows[is_kept.to(rows.device)].to("cpu", torch.float32)

    with _megatron_hooks(model, keep):
        outputs: list[TokenStats] = model.forward_all(plan.inputs)
    logp_T = plan.column([output.logp_S for output in outputs])
    streams = {}
    for stage in stages(model.source.shape.num_layers):
        count = num_tokens if stage == "norm" else len(wanted_N)
        streams[stage] = model.world.sum_over_world(own.pop(stage, torch.zeros(count, size)))
    norm_TD = streams["norm"]
    return streams | {"norm": norm_TD[wanted_N]}, norm_TD, logp_T


def _local_tokens(model: ParallelModel, batch: TrainBatch, one: ModelInput) -> Tensor:
    """Returns the batch's token at each position that this rank computes; -1 for padding."""
    whole, where, layout = one.whole, model.mesh.place, model.mesh.layout
    sample_S = torch.tensor([*whole.sample_indices, -1])[whole.sequence_index_S]
    token_S = batch.offsets[sample_S] + whole.positions_S
    held_S = token_S.where(whole.sequence_index_S >= 0, -1)[one.held_S]
    return held_S.chunk(layout.tp)[where.tp]  # sequence parallelism is on if tp > 1


@contextmanager
def _megatron_hooks(model: ParallelModel, keep: Keep) -> Iterator[None]:
    with ExitStack() as watched:
        watch = partial(_watch, watched, keep)
        for chunk in model.chunks:
            decoder: Any = chunk.decoder
            if chunk.pre_process:
                watch(chunk.get_submodule("embedding"), "embedding")
            for layer in decoder.layers:
                name = f"layers.{layer.layer_number - 1}"
                watch(layer.pre_mlp_layernorm, f"{name}.attention", _first_input)
                watch(layer, f"{name}.mlp")
            if chunk.post_process:
                watch(decoder.final_layernorm, "norm")
        yield


@torch.no_grad()
def trainer_logits(model: ParallelModel, norm_ND: Tensor) -> Tensor:
    """Returns the logits (N, V) for rows of the final norm, on every rank."""
    world, source = model.world, model.source
    logits_NV = torch.zeros(len(norm_ND), source.shape.vocab_size)
    head = model.chunks[-1]
    where = model.mesh.where
    if where is not None and model.mesh.is_last_stage and where.dp == where.cp == 0:
        assert isinstance(head, LanguageModel)
        weight_VD = head.output_weight()
        start = where.tp * len(weight_VD)
        part_NV = logits_NV[:, start : start + len(weight_VD)]
        hidden_ND = norm_ND.to(weight_VD.device, weight_VD.dtype)
        shard_VD = weight_VD[: part_NV.shape[1]]
        if head.exact_logps is not None:
            part_NV.copy_(ops.invariant_logits(hidden_ND, shard_VD))
        else:
            part_NV.copy_(ops.wide_logits(hidden_ND, shard_VD))
    return world.sum_over_world(logits_NV)
