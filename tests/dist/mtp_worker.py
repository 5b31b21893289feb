"""One rank of the test of multi-token prediction: gradients of a layout, in HF coordinates.

mtp_worker.py reference FOLDER             one process; checked against transformers' modules
mtp_worker.py compare FOLDER LAYOUT...     each is "tp,pp,vpp"

The policy's gradients must be those of a model without the layer. The layer's own gradients are
compared with those of a layer of transformers that reads the model's hidden states and embeddings.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from parity_worker import (
    GRADIENT_TOLERANCE,
    LENGTHS,
    gradients_in_hf_names,
    objective,
    sample_batch,
)
from safetensors.torch import load_file, save_file
from tiny_models import LONGEST, tiny_model
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from hybridrl.checkpoint.folders import Checkpoint
from hybridrl.checkpoint.model_state import load_model
from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.config.schema import TrainConfig
from hybridrl.contracts.batch import TrainBatch
from hybridrl.errors import CheckpointError
from hybridrl.loop.exports import export_model
from hybridrl.models.family import resolve_family
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.training.model import ModelSource, ParallelModel

COEFFICIENT = 0.5
# Of the policy's gradients, which test_parity.py compares: tied embeddings add up in another order.
POLICY_TOLERANCE = 4e-6


class Predictor(torch.nn.Module):
    """The layer, from transformers' parts and under the names of the files."""

    def __init__(self, config) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            Qwen3_5RMSNorm(hidden, eps=eps) for _ in range(3)
        )
        attention = config.layer_types.index("full_attention")
        self.layers = torch.nn.ModuleList([Qwen3_5DecoderLayer(config, attention)])

    def forward(self, hidden_LD, embedded_LD, rotary, mask) -> torch.Tensor:
        """Returns what the head reads at each position but the last."""
        parts = self.pre_fc_norm_embedding(embedded_LD), self.pre_fc_norm_hidden(hidden_LD)
        joined = self.fc(torch.cat(parts, -1))[None]
        output = self.layers[0](joined, position_embeddings=rotary, attention_mask=mask)
        return self.norm(output[0] if isinstance(output, tuple) else output)[0]


def save_model(folder: Path) -> None:
    """Writes a model with tied embeddings and its layer, as Qwen3.5 does."""
    config = tiny_model("qwen3_5_text").config
    config.tie_word_embeddings, config.mtp_num_hidden_layers = True, 1
    model = Qwen3_5ForCausalLM(config)
    state = tiny_model("qwen3_5_text").state_dict()
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    model.tie_weights()
    model.save_pretrained(folder)
    predictor = Predictor(config)
    generator = torch.Generator().manual_seed(3)
    for parameter in predictor.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.15
    whole = load_file(folder / "model.safetensors")
    own = {f"mtp.{name}": one.contiguous() for name, one in predictor.state_dict().items()}
    save_file(whole | own, folder / "model.safetensors", {"format": "pt"})
    written = json.loads((folder / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(written))


def expected(folder: Path, batch: TrainBatch) -> tuple[dict[str, torch.Tensor], float]:
    """Returns the layer's gradients by HF name, and its mean loss, sample by sample."""
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    oracle.set_attn_implementation("eager")
    predictor = Predictor(oracle.config)
    stored = load_file(folder / "model.safetensors")
    own = {n.removeprefix("mtp."): one for n, one in stored.items() if n.startswith("mtp.")}
    predictor.load_state_dict(own)
    total, count, offsets = torch.zeros(()), 0, batch.offsets.tolist()
    for (prompt, response), start, end in zip(LENGTHS, offsets, offsets[1:], strict=False):
        tokens_L = batch.tokens_T[start:end]
        with torch.no_grad():
            hidden_LD = oracle.model(tokens_L[None]).last_hidden_state[0]
            embedded_LD = oracle.model.embed_tokens(tokens_L)
            positions = torch.arange(len(tokens_L) - 1)[None]
            rotary = oracle.model.rotary_emb(hidden_LD[None], positions[None].expand(3, 1, -1))
        size = len(tokens_L) - 1
        mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
        found_LD = predictor(hidden_LD[:-1], embedded_LD[1:], rotary, mask)
        logp_LV = (found_LD @ oracle.lm_head.weight.detach().T).log_softmax(-1)
        # The first response token can be predicted from the prompt's last token but one.
        targets = torch.arange(max(prompt, 2), prompt + response)
        total = total - logp_LV[targets - 2, tokens_L[targets]].sum()
        count += len(targets)
    num_response_tokens = sum(response for _, response in LENGTHS)
    (COEFFICIENT * total / num_response_tokens).backward()
    gradients = {f"mtp.{name}": one.grad for name, one in predictor.named_parameters()}
    return gradients, float(total.detach()) / count


def run(folder: Path, layout: TrainLayout, coefficient: float) -> tuple[ParallelModel, dict]:
    """Returns the model after a pass, and its gradients."""
    platform = Platform.detect()
    mesh = Mesh(World(platform, 120), layout)
    platform.seed(1)
    hf_config = json.loads((folder / "config.json").read_text())
    family = resolve_family(None, hf_config)
    source = ModelSource(
        family, hf_config, torch.float32, family.name, folder, LONGEST, trains_mtp=coefficient > 0
    )
    train = TrainConfig(micro_batch_tokens=48, mtp_coef=coefficient)
    model = ParallelModel(mesh, source, "lm", train)
    load_hf(folder, model.layout(), model.weights(), hf_shapes(family, model.shape))
    model.make_trainable(1e-3)
    inputs = model.plan(sample_batch(hf_config["vocab_size"])).inputs
    model.accumulate(inputs, objective)
    return model, gradients_in_hf_names(model)


def check_export(model: ParallelModel, folder: Path) -> None:
    """A step changes the layer, and an export contains what it has become."""
    model.apply(1e-3, model.grad_norm())
    export_model(model, folder / "export", None)
    before, after = (load_file(one / "model.safetensors") for one in (folder, folder / "export"))
    assert before.keys() == after.keys(), before.keys() ^ after.keys()
    changed = [n for n in before if not torch.equal(before[n], after[n])]
    assert sorted(changed) == sorted(before), sorted(set(before) - set(changed))


def check_resume(model: ParallelModel, other: ParallelModel, folder: Path) -> None:
    """A run with the layer does not go on from a checkpoint without it, or the other way round."""
    for name, saved, loading in (("with", model, other), ("without", other, model)):
        store = CheckpointStore(folder / name, model.world, 1)
        state = {"step": 1, "prompts": {"fingerprint": "x"}, "num_updates": {"policy": 1}}
        store.save(1, {"policy": saved}, state, saved.source.files, waits=True)
        with pytest.raises(CheckpointError, match=r"train\.mtp_coef of .*step_1"):
            store.load(folder / name / "step_1", {"policy": loading})
    # A checkpoint of another model is not reported as damaged.
    checkpoint = Checkpoint.open(folder / "without" / "step_1")
    with pytest.raises(CheckpointError) as caught:
        load_model(checkpoint, "policy", model, model.world)
    assert "this model's shapes" in str(caught.value) and "damaged" not in str(caught.value)


def reference(folder: Path) -> None:
    save_model(folder)
    other, plain = run(folder, TrainLayout(1), 0.0)
    model, found = run(folder, TrainLayout(1), COEFFICIENT)
    for name, (gradient, _) in plain.items():
        assert torch.equal(gradient, found[name][0]), f"{name} is changed by the layer's loss"
    own, loss = expected(folder, sample_batch(model.source.hf_config["vocab_size"]))
    assert found.keys() == plain.keys() | own.keys()
    largest = max(float(gradient.abs().max()) for gradient in own.values())
    for name, gradient in own.items():
        error = float((found[name][0] - gradient).abs().max()) / largest
        assert error < 5e-6, f"{name}: gradient differs by {error}"
    assert abs(model.mtp_loss()["mtp/loss"] - loss) < 1e-5
    save_file({name: one for name, (one, _) in found.items()}, folder / "gradients.safetensors")
    check_export(model, folder)
    check_resume(model, other, folder)


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    size = torch.distributed.get_world_size()
    if mode == "reference":
        reference(folder)
    for text in sys.argv[3:]:
        tp, pp, vpp = map(int, text.split(","))
        stored = load_file(folder / "gradients.safetensors")
        model, found = run(folder, TrainLayout(size, tp, pp, vpp=vpp), COEFFICIENT)
        largest, covered = max(float(one.abs().max()) for one in stored.values()), set()
        for name, (gradient, held) in found.items():
            error = float(((gradient - stored[name]).abs() * held).max()) / largest
            bound = GRADIENT_TOLERANCE if name.startswith("mtp.") else POLICY_TOLERANCE
            assert error < bound, f"{text}: {name} differs by {error}"
            covered |= {name} if held.any() else set()
        everywhere = set().union(*model.world.gather_objects(covered))
        assert everywhere == stored.keys(), stored.keys() - everywhere
        assert model.mtp_loss()["mtp/loss"] > 0
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
