"""A served reward model gives the scores of transformers' sequence classifier of the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import AutoModelForSequenceClassification

from hybridrl.config.schema import ModelConfig, TrainConfig
from hybridrl.contracts.batch import Producer, Prompt, ScoredBatch, TrainBatch
from hybridrl.errors import CheckpointError
from hybridrl.parallel.mesh import Mesh
from hybridrl.roles.reward_models import served_model
from hybridrl.training.from_config import load_weights, model_source

END, PAD = 1, 0
# Responses that end with the end token, and two that were cut off.
SAMPLES = [((5, 9, 3), (7, 8, END)), ((4,), (6, END)), ((11, 12), (13, 14, 15)), ((9, 2), (3,))]


def save_classifier(folder: Path, name: str, **options: Any) -> Any:
    """Saves a classifier with random weights, its head too, and returns it."""
    base = tiny_model(name)
    base.config.update({"num_labels": 1, "pad_token_id": PAD, **options})
    model = AutoModelForSequenceClassification.from_config(base.config).eval()
    model.model.load_state_dict(base.model.state_dict())
    model.score.weight.data = torch.randn(1, 64, generator=torch.Generator().manual_seed(3))
    model.set_attn_implementation("eager")  # the default leaves out soft caps
    model.save_pretrained(folder)
    return model


def batch_of(samples: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> ScoredBatch:
    prompts = [Prompt(i, "", prompt, {}, response) for i, (prompt, response) in enumerate(samples)]
    return TrainBatch.supervised(prompts, Producer.here("the test"))


def our_scores(mesh: Mesh, folder: Path, batch: ScoredBatch) -> torch.Tensor:
    section = ModelConfig(path=str(folder), dtype="float32")
    mesh.platform.seed(0)
    source = model_source(section, mesh.platform, 96)
    scorer = served_model("judge", 2.0, source, mesh, TrainConfig(micro_batch_tokens=16))
    load_weights(scorer.model, section)
    scorer.model.freeze()
    found = scorer(batch)
    torch.testing.assert_close(found.reward_B, 2 * found.reward_parts["judge"])
    return found.reward_parts["judge"]


def their_scores(model: Any, batch: ScoredBatch) -> torch.Tensor:
    """Returns transformers' scores of a padded batch, after a check against single samples."""
    texts = batch.tokens_T.split(batch.lengths_B.tolist())
    padded = torch.nn.utils.rnn.pad_sequence(list(texts), True, PAD)
    mask = torch.arange(padded.size(1)) < batch.lengths_B[:, None]
    with torch.no_grad():
        together = model(padded, attention_mask=mask.long()).logits[:, 0]
        alone = torch.cat([model(text[None]).logits[:, 0] for text in texts])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    return alone


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3", "qwen3_moe"])
def test_scores_are_those_of_transformers(name: str, mesh: Mesh, tmp_path: Path) -> None:
    model, batch = save_classifier(tmp_path, name), batch_of(SAMPLES)
    # fp32 sums in another order, over four layers
    torch.testing.assert_close(
        our_scores(mesh, tmp_path, batch), their_scores(model, batch), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("head", ["value_head.weight", "v_head.summary.weight"])
def test_a_head_of_another_name_is_found_by_its_shape(
    head: str, mesh: Mesh, tmp_path: Path
) -> None:
    model, batch = save_classifier(tmp_path, "llama"), batch_of(SAMPLES)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[head] = tensors.pop("score.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    expected = their_scores(model, batch)
    torch.testing.assert_close(our_scores(mesh, tmp_path, batch), expected, atol=1e-4, rtol=1e-4)
    # Of two it is not known which is meant.
    save_file({**tensors, "other.weight": tensors[head] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"other\.weight"):
        our_scores(mesh, tmp_path, batch)


def test_end_tokens_that_are_padding_are_passed_over_as_transformers_does(
    mesh: Mesh, tmp_path: Path
) -> None:
    model, batch = save_classifier(tmp_path, "llama", pad_token_id=END), batch_of(SAMPLES)
    texts = batch.tokens_T.split(batch.lengths_B.tolist())
    with torch.no_grad():
        expected = torch.cat([model(text[None]).logits[:, 0] for text in texts])
    torch.testing.assert_close(our_scores(mesh, tmp_path, batch), expected, atol=1e-4, rtol=1e-4)


def test_an_older_export_keeps_the_place_that_its_config_names(mesh: Mesh, tmp_path: Path) -> None:
    model, batch = save_classifier(tmp_path, "llama"), batch_of(SAMPLES)
    content = json.loads((tmp_path / "config.json").read_text())
    content["hybridrl_score_token"] = "before_last"
    (tmp_path / "config.json").write_text(json.dumps(content))
    texts = batch.tokens_T.split(batch.lengths_B.tolist())
    with torch.no_grad():
        expected = torch.cat([model(text[None, :-1]).logits[:, 0] for text in texts])
    torch.testing.assert_close(our_scores(mesh, tmp_path, batch), expected, atol=1e-4, rtol=1e-4)
