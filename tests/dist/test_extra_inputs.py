"""A second user of each seam between rollouts and a model's forward call, in real ranks.

Blobs of two kinds go from responses through saved rollouts, an exchange of samples in flight,
gathering, a replay file and micro-batches to the model, bit for bit. There they change the
embeddings, and another model has position ids of three rows. Log-probabilities are those of
transformers with the same changes. This file is all that either takes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch import run_ranks
from megatron.core import parallel_state
from tiny_models import save_tiny_models
from transformers import AutoModelForCausalLM

from hybridrl.config.schema import TrainConfig
from hybridrl.contracts.batch import Producer, Prompt, RolloutBatch, TrainBatch
from hybridrl.contracts.blobs import BlobKind, Blobs, declare
from hybridrl.contracts.micro_batch import MicroBatch, ModelTensor
from hybridrl.contracts.prompts import Content
from hybridrl.generation.sample_tables import gathered_batch, table_of
from hybridrl.generation.saved_rollouts import SavedRollouts, prompt_digest, rollout_state
from hybridrl.loop.saved_batch import SavedBatch
from hybridrl.models.families.llama import FAMILY
from hybridrl.models.family import Family, HfConfig
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.inputs import ExtraInputs
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.exchange import collect
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.rollout.engine import Completion, Request, RunningRequest, SamplingParams
from hybridrl.training.model import ModelSource, ParallelModel

WORLD, STEP, HERE = 4, 3, Producer.here("the test")
LAYOUTS = TrainLayout(WORLD, tp=2, pp=2), TrainLayout(WORLD, tp=2, cp=2)
SAMPLING = SamplingParams(max_new_tokens=40)
PATCHES = declare(BlobKind("planted patches", ("float16",), rows="any", row_dims=2))
MARKS = declare(BlobKind("planted marks", ("int32",), rows="token"))
SECTIONS = [2, 3, 3]  # of the 8 frequencies of a head
TABLE = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)) / 20


def prompt_of(group: int) -> Prompt:
    rng = np.random.default_rng(group)
    picture = Content("picture", 1, 2, str(group), {"bytes": rng.integers(0, 255, 9, np.uint8)})
    tokens = tuple(rng.integers(2, 199, 4 + group).tolist())
    return Prompt(group, "", tokens, contents=(picture,))


def tokens_of(sample: int) -> tuple[int, ...]:
    rng = np.random.default_rng(100 + sample)
    return tuple(rng.integers(2, 199, 3 + 2 * sample).tolist())


def blobs_of(sample: int) -> Blobs:
    """Returns blobs whose marks are alike on the prompt for all samples of it."""
    rng = np.random.default_rng(200 + sample)
    prompt = prompt_of(sample // 2).tokens
    marks = np.concatenate([prompt, tokens_of(sample)]) * [[1], [1 << 20]]
    patches = rng.standard_normal((sample % 3, 2, 3)).astype(np.float16)
    return {MARKS.name: marks.T.astype(np.int32), PATCHES.name: patches}


class Planted(ExtraInputs):
    blobs = (PATCHES.name, MARKS.name)
    changes_embeddings = True

    def prepare(self, micro: MicroBatch, batch: RolloutBatch) -> Mapping[str, ModelTensor]:
        given = micro.model_inputs
        ids_B = batch.sample_ids_B[list(micro.sample_indices)]
        for i, content in enumerate(batch.prompts[n].contents[0] for n in micro.sample_indices):
            expected = prompt_of(int(ids_B[i]) // 2).contents[0].arrays["bytes"]
            assert np.array_equal(content.arrays["bytes"], expected)
        return {
            "patches": given[PATCHES.name],
            "num_rows": given[f"{PATCHES.name}.num_rows"],
            "samples": ModelTensor(ids_B),
            "marks": given[MARKS.name],
            "is_marked": given[f"{MARKS.name}.is_there"],
            "tokens": ModelTensor(micro.tokens_S, is_per_position=True),
        }

    def embed(
        self, model: Any, embedded_S1D: torch.Tensor, inputs: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        expected = [blobs_of(sample)[PATCHES.name] for sample in inputs["samples"].tolist()]
        assert inputs["num_rows"].tolist() == [len(one) for one in expected]
        if expected:
            assert inputs["patches"].numpy().tobytes() == np.concatenate(expected).tobytes()
        marks_S2, tokens_S = inputs["marks"], inputs["tokens"] * inputs["is_marked"]
        assert marks_S2.dtype == torch.int32 and torch.equal(marks_S2[:, 0].long(), tokens_S)
        assert torch.equal(marks_S2[:, 1].long(), tokens_S << 20)
        return embedded_S1D + (TABLE[tokens_S % 5] * inputs["is_marked"][:, None])[:, None]


class ThreeRows(ExtraInputs):
    num_position_rows = 3

    def positions(self, batch: RolloutBatch, index: int, num_tokens: int) -> torch.Tensor:
        return torch.arange(num_tokens)[:, None] * torch.tensor([1, 2, 3])


def keywords(hf_config: HfConfig) -> dict[str, Any]:
    return FAMILY.model_keywords(hf_config) | {"position_embedding_type": "mrope"}


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    return FAMILY.transformer_config(hf_config) | {"mrope_section": SECTIONS}


FAMILIES = {
    "embeddings": replace(FAMILY, extra_inputs=lambda *_: Planted()),
    "positions": replace(
        FAMILY,
        extra_inputs=lambda *_: ThreeRows(),
        model_keywords=keywords,
        transformer_config=transformer_config,
    ),
}


def finished(world: World) -> list[Completion]:
    """Returns this rank's responses, after a checkpoint and a way through the next rank."""
    found = []
    for sample in (2 * world.rank, 2 * world.rank + 1):
        prompt, tokens = prompt_of(world.rank), tokens_of(sample)
        patches = {PATCHES.name: blobs_of(sample)[PATCHES.name]}
        begun = Request(sample + 50, prompt.tokens, 1, SAMPLING, blobs=patches)
        row = RunningRequest(begun)
        row.append(tokens[0], -1.0, 0)
        done = Completion(sample, tokens, (-1.0,) * len(tokens), "stop", 0, blobs=blobs_of(sample))
        digest = prompt_digest(prompt.tokens, prompt.contents)
        digests = dict.fromkeys((sample, sample + 50), digest)
        state = rollout_state([done], [row.to_request()], [], digests)
        state |= {"step": STEP, "sampling": asdict(SAMPLING)}
        saved = SavedRollouts(json.loads(json.dumps(state)))
        again = saved.find(STEP, sample + 50, prompt, SAMPLING).request
        assert again is not None
        expected = patches[PATCHES.name]
        assert again.blobs[PATCHES.name].tobytes() == expected.tobytes()
        whole = saved.find(STEP, sample, prompt, SAMPLING).whole
        assert whole is not None
        found.append(whole)
    target = (world.rank + 1) % WORLD
    (moved,) = [one for one in world.exchange_objects({target: found}) if one is not None]
    back = world.exchange_objects({(world.rank - 1) % WORLD: moved})
    return next(one for one in back if one is not None)


def journey(world: World, folder: Path) -> TrainBatch:
    prompts = {group: prompt_of(group) for group in range(WORLD)}
    rollouts = [
        rollout for done in finished(world) for rollout in done.rollouts(prompts[world.rank])
    ]
    own = RolloutBatch.from_rollouts(rollouts, [world.rank] * 2, HERE)
    scored = own.scored(torch.zeros(2), {}, HERE)
    tables = world.gather_objects(table_of(scored))
    batch = gathered_batch(tables, scored, prompts, world).to_train(HERE)
    whole = collect(batch, world)
    if whole is not None:
        path = folder / "replay.safetensors"
        rng = [{"torch": torch.zeros(1)}] * WORLD
        SavedBatch(whole, 1, 0, "test", "run: {}", rng).write(path)
        read = SavedBatch.read(path).batch
        assert read.prompts == whole.prompts
        for name, blob in whole.blobs.items():
            expected = np.concatenate([blobs_of(sample)[name] for sample in range(2 * WORLD)])
            for one in (blob, read.blobs[name]):
                assert one.values_N.numpy().tobytes() == expected.tobytes(), name
                assert torch.equal(one.num_rows_B, blob.num_rows_B)
    return batch


def logprobs(world: World, layout: TrainLayout, family: Family, folder: Path, batch: TrainBatch):
    hf_config = json.loads((folder / "config.json").read_text())
    source = ModelSource(family, hf_config, torch.float32, family.name, folder)
    model = ParallelModel(Mesh(world, layout), source, "lm", TrainConfig(micro_batch_tokens=48))
    load_hf(folder, model.layout(), model.weights(), hf_shapes(family, source.shape))
    plan = model.plan(batch)
    return plan.column([output.logp_S for output in model.forward_all(plan.inputs)])


@torch.no_grad()
def expected_logp(oracle: Any, name: str, sample: int) -> torch.Tensor:
    """Returns transformers' log-probabilities of the response."""
    prompt, response = prompt_of(sample // 2).tokens, tokens_of(sample)
    tokens = torch.tensor([*prompt, *response])
    embedded = oracle.get_input_embeddings()(tokens)
    if name == "embeddings":
        embedded = embedded + TABLE[tokens % 5]
    logp = oracle(inputs_embeds=embedded[None]).logits[0].log_softmax(-1)
    at = torch.arange(len(prompt) - 1, len(tokens) - 1)
    return logp[at, tokens[at + 1]]


def main(root: Path) -> None:
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    world, folder = World(platform, 120), root / "llama"
    platform.seed(1)
    batch = journey(world, root)
    for name, family in FAMILIES.items():
        oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if name == "positions":
            rotary = oracle.model.rotary_emb
            rotary.inv_freq *= torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(
                torch.tensor(SECTIONS)
            )
        expected = torch.cat(
            [expected_logp(oracle, name, sample) for sample in batch.rows_H.tolist()]
        )
        for layout in LAYOUTS:
            logp_T = logprobs(World(platform, 120), layout, family, folder, batch)
            gap = float((logp_T[batch.response_mask_T] - expected).abs().max())
            assert gap < 1e-5, (name, layout, gap)
            parallel_state.destroy_model_parallel()
    stop_process_group()


@pytest.mark.dist
def test_planted_blobs_inputs_and_positions_reach_the_model(tmp_path: Path) -> None:
    save_tiny_models(tmp_path, ("llama",))
    run_ranks(WORLD, __file__, [str(tmp_path)], timeout_s=300)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
