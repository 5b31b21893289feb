"""One rank of the parity test: log-probabilities and gradients of a layout, in HF coordinates.

parity_worker.py reference FOLDER FAMILIES           one process; checked against transformers
parity_worker.py compare FOLDER FAMILIES LAYOUT...   each is "tp,pp,cp,vpp,order[,ep=2][,full]"
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe.moe_layer import MoELayer
from safetensors.torch import load_file, save_file
from tiny_models import LONGEST, as_long, chosen_by, slices_of
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from hybridrl.config.schema import MoeConfig, TrainConfig
from hybridrl.contracts.batch import Blob, Producer, Prompt, TrainBatch
from hybridrl.models.family import resolve_family
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.megatron.dispatch import GatheringDispatcher
from hybridrl.models.megatron.router import load_of
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.training.model import ModelSource, ParallelModel

LENGTHS = [(3, 9), (5, 2), (2, 17), (7, 7), (1, 30), (4, 1), (6, 12), (3, 3)]
# A user's own families, which no architecture name leads to.
FAMILY_KEYS = {"olmo": "olmo_family:FAMILY", "windowed": "windowed_family:FAMILY"}
NO_LOSSES = MoeConfig()
ROUTER_BIAS = "e_score_correction_bias"
GRADIENT_TOLERANCE = 2e-6  # of the largest gradient; fp32 sums in another order, nothing else


def sample_batch(vocab: int, lengths=LENGTHS) -> TrainBatch:
    return grouped_batch([(prompt, (response,)) for prompt, response in lengths], vocab)


def grouped_batch(groups: Sequence[tuple[int, Sequence[int]]], vocab: int) -> TrainBatch:
    """Returns a batch of random tokens; each group is its prompt's length and its responses'."""
    generator = torch.Generator().manual_seed(5)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocab, (count,), generator=generator).tolist())

    prompts, group_B = [], []
    for number, (length, responses) in enumerate(groups):
        tokens = draw(length)
        prompts += [Prompt(number, "", tokens, {}, draw(count)) for count in responses]
        group_B += [number] * len(responses)
    batch = TrainBatch.supervised(prompts, Producer.here("a test of groups"))
    return replace(batch, group_B=torch.tensor(group_B))


def with_experts(batch: TrainBatch, shape) -> TrainBatch:
    """Returns the batch with experts that no router has chosen, others in each place."""
    generator = torch.Generator().manual_seed(6)
    num_layers = shape.num_layers - len(shape.moe.dense_layers)
    drawn = torch.rand(batch.num_tokens, num_layers, shape.moe.num_experts, generator=generator)
    experts_TLK = drawn.topk(shape.moe.experts_per_token).indices.to(torch.uint8)
    is_input_T = torch.ones(batch.num_tokens, dtype=torch.bool)
    is_input_T[batch.offsets[1:] - 1] = False
    blob = Blob(experts_TLK.flatten(1)[is_input_T], batch.lengths_B - 1)
    return replace(batch, blobs={"routed_experts": blob})


@contextmanager
def counted_shapes():
    """Counts the calls of Megatron's own exchange of shapes between stages."""
    original, calls = P2PCommunicator._communicate_shapes, []

    def counting(*arguments):
        calls.append(1)
        return original(*arguments)

    P2PCommunicator._communicate_shapes = counting
    try:
        yield calls
    finally:
        P2PCommunicator._communicate_shapes = original


@contextmanager
def replaying(oracle, experts_TLK: torch.Tensor | None):
    """Lets transformers' routers take these experts, for all tokens but the last."""

    def taken(layer: int):
        def hook(gate, _, output):
            logits_TE, _, own_TK = output
            chosen_TK = torch.cat((experts_TLK[:-1, layer].long(), own_TK[-1:]))
            has_bias = hasattr(gate, "e_score_correction_bias")
            scores_TE = logits_TE.sigmoid() if has_bias else logits_TE.float().softmax(-1)
            weights_TK = scores_TE.gather(1, chosen_TK)
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
            scale = gate.routed_scaling_factor if has_bias else 1
            return logits_TE, weights_TK * scale, chosen_TK

        return hook

    gates = [m for n, m in oracle.named_modules() if n.endswith((".mlp.gate", ".mlp.router"))]
    hooks = [] if experts_TLK is None else gates
    hooks = [gate.register_forward_hook(taken(layer)) for layer, gate in enumerate(hooks)]
    yield
    for hook in hooks:
        hook.remove()


def objective(output, micro):
    """A loss of log-probability and entropy, with a weight of its own at every position."""
    weight = (micro.positions_S % 5 - 1.5).to(output.logp_S.dtype) * micro.loss_mask_S
    loss = (weight * output.logp_S).sum() + 0.3 * (output.entropy_S * micro.loss_mask_S).sum()
    return loss / 100, None


def gradients_in_hf_names(model: ParallelModel) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns, for every HF tensor, this rank's reduced gradients and where it has some."""
    shapes = hf_shapes(model.source.family, model.shape, model.head)
    found = {
        name: (torch.zeros(shape), torch.zeros(shape, dtype=torch.bool))
        for name, shape in shapes.items()
        if not name.endswith(ROUTER_BIAS)  # which has no gradient
    }
    local = {}
    for index, chunk in enumerate(model.chunks):
        for name, parameter in chunk.named_parameters():
            if not parameter.requires_grad:
                continue
            held = torch.zeros(parameter.numel(), dtype=torch.bool)
            for optimizer in model.optimizer.chained_optimizers:
                if parameter in optimizer.model_param_gbuf_map:
                    span = optimizer._get_model_param_range_map(parameter)["param"]
                    held[span.start : span.end] = True
            local[f"{index}/{name}"] = (
                parameter.main_grad.float().cpu(),
                held.view(parameter.shape),
            )
    for region in model.layout().regions:
        if region.hf not in found or region.local not in local:
            continue
        gradient, held = local[region.local]
        inner = tuple(slice(a, b) for a, b in region.local_box)
        outer = tuple(slice(a, b) for a, b in region.hf_box)
        target = found[region.hf][0][outer]
        mask = held[inner].view(target.shape)
        target[mask] = gradient[inner].view(target.shape)[mask]
        found[region.hf][1][outer] |= mask
    return found


def logits_of(model: ParallelModel, inputs) -> list[torch.Tensor]:
    """Returns the logits of each micro-batch in one process, from the decoder's own output."""
    found: list[torch.Tensor] = []
    hook = model.chunks[0].decoder.register_forward_hook(lambda _, __, out: found.append(out[:, 0]))
    model.forward_all(inputs)
    hook.remove()
    tied = model.source.shape.tied_embeddings
    name = "0/embedding.word_embeddings.weight" if tied else "0/output_layer.weight"
    head = model.weights()[name][: model.source.shape.vocab_size]
    divisor = model.chunks[0].scales.logits
    logits, cap = (
        [(hidden @ head.T / divisor).cpu() for hidden in found],
        model.source.shape.logits_cap,
    )
    return [cap * torch.tanh(one / cap) for one in logits] if cap else logits


def check_against_transformers(folder: Path, model, batch, inputs, logp_T, gradients) -> None:
    """Compares logits, log-probabilities and gradients with the HF model's, sample by sample."""
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if model.source.shape.attention_cap:  # which its default attention leaves out
        oracle.set_attn_implementation("eager")
    logits = logits_of(model, inputs)
    loss, worst = torch.zeros(()), 0.0
    expected_T = torch.zeros(batch.num_tokens)
    offsets, losses = batch.offsets.tolist(), model.train.moe
    has_losses = bool(losses.z_loss or losses.aux_loss)
    for one, found in zip(inputs, logits, strict=True):
        starts, routed = one.whole.cu_seqlens.tolist(), []
        for index, sample in enumerate(one.whole.sample_indices):
            prompt, response = LENGTHS[sample]
            tokens = batch.tokens_T[offsets[sample] : offsets[sample + 1]]
            experts_TLK = None
            if (blob := batch.blobs.get("routed_experts")) is not None:
                # The last token's experts, of which there is no record, change nothing that is
                # compared.
                at = offsets[sample] - sample, offsets[sample + 1] - sample - 1
                rows_PK = torch.nn.functional.pad(blob.values_N[slice(*at)], (0, 0, 0, 1))
                experts_TLK = rows_PK.unflatten(1, (-1, oracle.config.num_experts_per_tok))
            asked = {"output_router_logits": True} if has_losses else {}
            with replaying(oracle, experts_TLK):
                output = oracle(as_long(oracle, tokens)[None], **asked)
            routed.append(output.router_logits if has_losses else ())
            full = output.logits[0, : len(tokens)]
            ours = found[starts[index] : starts[index] + prompt + response]
            worst = max(worst, float((full - ours).abs().max()))
            log_p = full.log_softmax(-1)
            position = torch.arange(prompt - 1, prompt + response - 1)
            logp = log_p[position, tokens[position + 1]]
            entropy = -(log_p.exp() * log_p).sum(-1)[position]
            expected_T[offsets[sample] + prompt : offsets[sample + 1]] = logp.detach()
            loss = loss + (((position % 5) - 1.5) * logp + 0.3 * entropy).sum() / 100
        loss = loss + router_losses(oracle, routed, losses) / batch.num_tokens
    loss.backward()
    assert worst < 1e-4, f"logits differ from transformers by {worst}"
    assert float((expected_T - logp_T).abs().max()) < 1e-5
    expected = slices_of(on_disk(oracle, "grad"), gradients)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert expected.keys() == gradients.keys()
    for name, gradient in expected.items():
        difference = float((gradients[name][0] - gradient).abs().max())
        assert difference < 5e-6 * largest, f"{name}: gradient differs by {difference / largest}"
    print(f"{folder.name}: logits within {worst:.1e} of transformers", flush=True)


def on_disk(oracle, attribute: str) -> dict[str, torch.Tensor]:
    """Returns a tensor of each parameter by the names and shapes that transformers writes."""
    with tempfile.TemporaryDirectory() as folder:
        state = {name: getattr(p, attribute) for name, p in oracle.named_parameters()}
        oracle.save_pretrained(folder, state_dict=state)
        return load_file(Path(folder) / "model.safetensors")


def losses_of(name: str) -> MoeConfig:
    """Returns the losses of routers that a name asks for, as in qwen3_moe+z+replay."""
    kinds = name.split("+")[1:]
    return MoeConfig(
        z_loss=0.5 * ("z" in kinds),
        aux_loss=0.5 * ("aux" in kinds),
        bias_update_rate=0.01 * ("bias" in kinds),
    )


def router_losses(oracle, routed, losses: MoeConfig) -> torch.Tensor:
    """Returns a micro-batch's sums of losses; `routed` has each sample's router logits (T, E)."""
    found = torch.zeros(())
    for layer in zip(*routed, strict=True):
        logits_TE, k = torch.cat(layer), oracle.config.num_experts_per_tok
        z = logits_TE.logsumexp(-1).square().sum()
        # transformers' loss of experts that are used evenly is k.
        aux = load_balancing_loss_func((logits_TE,), logits_TE.size(1), k) / k * len(logits_TE)
        found = found + losses.z_loss * z + losses.aux_loss * aux
    return found


def check_nothing_read(model: ParallelModel, inputs) -> None:
    """Micro-batches without a row for the head: no gradient, and no rank waits for another."""
    model.accumulate(
        [replace(one, head=replace(one.head, rows_N=one.head.rows_N[:0])) for one in inputs],
        objective,
    )
    for chunk in model.chunks:
        assert not any(parameter.main_grad.any() for parameter in chunk.parameters())


def check_disagreement(model: ParallelModel, vocab: int) -> None:
    """One rank has other lengths: every rank is told, and none begins a pass."""
    size, rank = model.world.size, model.world.rank
    lengths = LENGTHS[::-1] if rank == size - 1 else LENGTHS
    try:
        model.plan(sample_batch(vocab, lengths))
    except RuntimeError as error:
        expected = f"the micro-batch schedule differs between rank 0 and ranks [{size - 1}]"
        assert str(error).startswith(expected), error
    else:
        raise AssertionError("ranks went on with different schedules")


def check_dispatch(model: ParallelModel) -> None:
    """Which tokens are gathered is decided by the process groups, and is what the layout says."""
    layout, moe, rank = model.mesh.layout, model.source.shape.moe, model.world.rank
    gathers = layout.gathers_tokens(moe.experts_per_token, rank)
    for chunk in model._chunks:
        for part in chunk.modules():
            if isinstance(part, MoELayer):
                assert (type(part.token_dispatcher) is GatheringDispatcher) == gathers, layout


def check_load(model: ParallelModel, num_tokens: int) -> None:
    """Counts of routers are of real tokens, each once, whatever the layout."""
    shape, found = model.source.shape, model.expert_load()
    load = load_of(model._chunks, shape.num_layers, shape.moe.num_experts)
    whole = model.mesh.sum_over_world(load)[:, :-1]
    num_layers = shape.num_layers - len(shape.moe.dense_layers)
    assert int(whole.sum()) == num_layers * num_tokens * shape.moe.experts_per_token, whole
    assert (whole.sum(1) == 0).sum() == len(shape.moe.dense_layers)
    assert 1 < found["max_load"] < shape.moe.num_experts / shape.moe.experts_per_token
    assert 0 < found["routing_entropy"] < math.log(shape.moe.num_experts)
    means = whole.sum(1, keepdim=True) / shape.moe.num_experts
    assert abs(float((whole / means).nan_to_num().max()) - found["max_load"]) < 1e-9


def biases(model: ParallelModel) -> dict[str, torch.Tensor]:
    """Returns the biases of this rank's routers by HF name."""
    weights = model.weights()
    regions = model.layout().regions
    return {r.hf: weights[r.local].clone() for r in regions if r.hf.endswith(ROUTER_BIAS)}


def check_biases(folder: Path, batch: TrainBatch, found: dict[str, torch.Tensor], rate) -> None:
    """They moved by what transformers' routers chose over the whole batch."""
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    offsets = batch.offsets.tolist()
    with torch.no_grad(), chosen_by(oracle) as chosen:
        for start, end in zip(offsets, offsets[1:], strict=False):
            oracle(batch.tokens_T[start:end][None])
    buffers = dict(oracle.named_buffers())
    assert found
    for layer, name in enumerate(sorted(found)):
        experts = torch.cat([one.flatten() for one in chosen[layer :: len(found)]])
        counts_E = experts.bincount(minlength=len(found[name]))
        moved_E = rate * (counts_E.float().mean() - counts_E).sign()
        assert moved_E.any() and torch.allclose(found[name], buffers[name] + moved_E, atol=1e-7)


def logprobs(model: ParallelModel, batch: TrainBatch) -> torch.Tensor:
    plan = model.plan(batch)
    return plan.column([output.logp_S for output in model.forward_all(plan.inputs)])


def run(
    folder: Path,
    family: str | None,
    layout: TrainLayout,
    recompute: str = "none",
    moe=NO_LOSSES,
    replays: bool = False,
) -> tuple[dict, torch.Tensor, float, dict[str, torch.Tensor]]:
    platform = Platform.detect()
    mesh = Mesh(World(platform, 120), layout)
    platform.seed(1)
    hf_config = json.loads((folder / "config.json").read_text())
    resolved = resolve_family(family, hf_config)
    source = ModelSource(resolved, hf_config, torch.float32, resolved.name, folder, LONGEST)
    model = ParallelModel(
        mesh, source, "lm", TrainConfig(micro_batch_tokens=48, recompute=recompute, moe=moe)
    )
    shapes = hf_shapes(source.family, source.shape)
    load_hf(folder, model.layout(), model.weights(), shapes)
    assert not model.config.batch_p2p_sync, "stages wait for the device"
    if source.shape.moe is not None:
        check_dispatch(model)
    model.make_trainable(1e-3)
    batch = sample_batch(hf_config["vocab_size"])
    if replays:
        batch = with_experts(batch, source.shape)
        own_T = logprobs(model, batch)
        model.replay_experts()
    plan = model.plan(batch)
    inputs = plan.inputs
    outputs = model.forward_all(inputs)
    logp_T = plan.column([output.logp_S for output in outputs])
    model.accumulate(inputs, objective)
    gradients = gradients_in_hf_names(model)
    # From the second time on Megatron's hooks reduce gradients while the backward pass runs.
    model.accumulate(inputs, objective)
    for name, (again, held) in gradients_in_hf_names(model).items():
        assert torch.equal(again[held], gradients[name][0][held]), (
            f"{name}: the second time differs"
        )
    if layout.world_size == 1:
        masked_T = logp_T * batch.response_mask_T
        check_against_transformers(folder, model, batch, inputs, masked_T, gradients)
    if replays:
        assert float((logp_T - own_T).abs().max()) > 0.1, "the experts made no difference"
        found = model.replays()
        assert found["replayed_share"] == 1 and found["own_choice_tokens"] == batch.num_samples
        assert 0 < found["agreed_share"] < 1
    norm = model.grad_norm()
    model.forward_all(inputs)  # a pass without gradients counts nowhere
    if source.shape.moe is not None:
        check_load(model, batch.num_tokens)
    model.apply(1e-3, norm)
    moved = biases(model) if moe.bias_update_rate else {}
    if moved and layout.world_size == 1:
        check_biases(folder, batch, moved, moe.bias_update_rate)
    if not (moe.z_loss or moe.aux_loss):  # those are of all tokens
        check_nothing_read(model, inputs)
    if replays:  # what was not recorded routers choose
        model.accumulate(model.plan(sample_batch(hf_config["vocab_size"])).inputs, objective)
        check_load(model, batch.num_tokens)
    if layout.world_size > 1:
        check_disagreement(model, hf_config["vocab_size"])
    return gradients, logp_T * batch.response_mask_T, norm, moved


def main() -> None:
    mode, root = sys.argv[1], Path(sys.argv[2])
    families = sys.argv[3].split(",")
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    failures = []
    for name in families:
        folder, family = root / name.split("+")[0], FAMILY_KEYS.get(name)
        losses, replays = losses_of(name), "replay" in name.split("+")
        if mode == "reference":
            gradients, logp_T, norm, moved = run(
                folder, family, TrainLayout(1), moe=losses, replays=replays
            )
            tensors = {n: g for n, (g, _) in gradients.items()}
            tensors |= {"logp_T": logp_T, "norm": torch.tensor(norm), **moved}
            save_file(tensors, root / f"{name}.safetensors")
            parallel_state.destroy_model_parallel()
            continue
        reference = load_file(root / f"{name}.safetensors")
        largest = max(
            float(g.abs().max())
            for n, g in reference.items()
            if n not in ("logp_T", "norm") and not n.endswith(ROUTER_BIAS)
        )
        for text in sys.argv[4:]:
            tp, pp, cp, vpp, order, *more = text.split(",")
            experts = {k: int(v) for k, _, v in (one.partition("=") for one in more) if v}
            recompute = [one for one in more if "=" not in one]
            sizes = {"vpp": int(vpp), "order": order, **experts}
            layout = TrainLayout(size, int(tp), int(pp), int(cp), **sizes)
            with counted_shapes() as calls:
                gradients, logp_T, norm, moved = run(
                    folder, family, layout, *recompute, moe=losses, replays=replays
                )
            assert not calls, f"shapes were sent {len(calls)} times"
            worst, where, covered = 0.0, "", 0
            for tensor, (gradient, held) in gradients.items():
                difference = ((gradient - reference[tensor]).abs() * held).max().item()
                covered += int(held.sum())
                if difference > worst:
                    worst, where = difference, tensor
            worst_logp = float((logp_T - reference["logp_T"]).abs().max())
            print(
                f"rank {rank} {name} {text}: gradient {worst / largest:.1e} of the largest "
                f"({where}), logp {worst_logp:.1e}, norm "
                f"{norm - float(reference['norm']):.1e}, held {covered}",
                flush=True,
            )
            norm_error = abs(norm / float(reference["norm"]) - 1)
            if (
                worst > GRADIENT_TOLERANCE * largest
                or worst_logp > 1e-5
                or norm_error > 1e-6
                or not covered
                or any(not torch.equal(bias, reference[n]) for n, bias in moved.items())
            ):
                failures.append(f"{name} {text}")
            parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    if failures:
        sys.exit(f"rank {rank}: too far from one process: {failures}")


if __name__ == "__main__":
    main()
