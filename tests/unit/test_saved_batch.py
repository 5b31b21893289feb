"""Files of skipped mini-batches: what they hold and what is none; what a replay says."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import feedback_batch, train_batch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors import safe_open
from safetensors.torch import save_file

from hybridrl.checkpoint.random_states import rng_state, set_rng_state
from hybridrl.cli.train import replay_text
from hybridrl.config.load import load_config_dict, to_yaml
from hybridrl.contracts.batch import TrainBatch
from hybridrl.errors import DataError
from hybridrl.loop.saved_batch import FILE_NAME, SavedBatch, file_name
from hybridrl.platform import Platform

MINIMAL = {"run": {"name": "any"}, "model": {"init": "any"}, "algorithm": {"name": "grpo"}}


def saved_batch(batch: TrainBatch, ranks: int = 2) -> SavedBatch:
    rng = [{"torch": torch.tensor([rank], dtype=torch.uint8)} for rank in range(ranks)]
    terms = {"pairs": feedback_batch("pairs", 4, 1), "sft": train_batch(num_prompts=1)}
    config = to_yaml(load_config_dict(MINIMAL))
    return SavedBatch(batch, 7, 1, "policy/loss is nan", config, rng, terms)


@pytest.mark.parametrize("batch", [train_batch(), feedback_batch("pairs", 3, 0)])
def test_saved_batch_reads_back_equal(batch: TrainBatch, tmp_path: Path) -> None:
    saved = saved_batch(batch)
    assert FILE_NAME.fullmatch(file_name(saved.step, saved.update))
    saved.write(tmp_path / file_name(saved.step, saved.update))
    assert [file.name for file in tmp_path.iterdir()] == [file_name(saved.step, saved.update)]
    found = SavedBatch.read(tmp_path / file_name(saved.step, saved.update))
    assert found.terms.keys() == saved.terms.keys()
    for one, other in (
        (found.batch, batch),
        *((found.terms[n], saved.terms[n]) for n in saved.terms),
    ):
        assert one.prompts == other.prompts
        assert one.producer == other.producer
        for name, value in other.columns().items():
            assert torch.equal(one.columns()[name], value), name
        assert one.blobs.keys() == other.blobs.keys()
        for name, blob in other.blobs.items():
            assert torch.equal(one.blobs[name].values_N, blob.values_N)
            assert torch.equal(one.blobs[name].num_rows_B, blob.num_rows_B)
        assert one.reward_parts.keys() == other.reward_parts.keys()
    assert (found.step, found.update, found.reason) == (7, 1, "policy/loss is nan")
    assert found.config == saved.config
    assert [states["torch"].tolist() for states in found.rng] == [[0], [1]]


def test_saved_batch_has_each_prompt_once_and_a_small_header(tmp_path: Path) -> None:
    batch = train_batch(num_prompts=3, samples_per_prompt=8)
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh", k=20_000)) for _ in range(3)]
    prompts = tuple(
        replace(prompt, text=texts[prompt.prompt_id - 100], columns={"n": [prompt.prompt_id]})
        for prompt in batch.prompts
    )
    file = tmp_path / "a"
    saved_batch(replace(batch, prompts=prompts)).write(file)
    assert SavedBatch.read(file).batch.prompts == prompts
    content = file.read_bytes()
    # A header of more than 100 MB is refused by safetensors; what grows must be outside.
    assert int.from_bytes(content[:8], "little") < 15_000  # it has two terms
    for text in texts:
        assert content.count(text.encode()) == 1


def of_header(header: dict[str, str], told: dict[str, Any], tensors: dict[str, Any]) -> None:
    header["hybridrl"] = "replay 2"


def of_told(**values: Any) -> Callable[..., None]:
    return lambda header, told, tensors: told.update(values)


def of_batch(**values: Any) -> Callable[..., None]:
    return lambda header, told, tensors: told["batch"].update(values)


def of_tensors(**values: Any) -> Callable[..., None]:
    named = {name.replace("__", "."): value for name, value in values.items()}
    return lambda header, told, tensors: tensors.update(named)


def without(name: str) -> Callable[..., None]:
    return lambda header, told, tensors: (tensors if name in tensors else told).pop(name)


ONE = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (of_header, "its header contains"),
        (of_told(step="x"), "step"),
        (of_told(step=0), "step"),
        (of_told(surprise=1), "surprise"),
        (without("reason"), "reason"),
        (of_told(config="- 1"), "has no sections"),
        (of_told(config="a: ["), "a: \\["),
        (of_batch(producer={"what": "x", "file": "y", "line": 1, "more": 2}), "producer"),
        (of_batch(prompts=[[0, "text", {}, "more"]]), "prompts"),
        (of_batch(prompts=[]), "argument"),
        (of_told(terms={"sft": 1}), "terms"),
        (without("term.pairs.column.reward_B"), "reward_B"),
        (without("prompts.index"), "prompts.index"),
        (of_tensors(prompts__index=ONE - 1), "prompt -1"),
        (of_tensors(prompts__index=ONE + 3), "prompt 3"),
        (of_tensors(prompts__tokens=ONE), "do not add up"),
        (of_tensors(prompts__tokens=torch.zeros(2, 2)), "not a row of int64"),
        (of_tensors(rng__1000000000__x=ONE), "random states of the ranks"),
        (of_tensors(rng__x__y=ONE), "random states of the ranks"),
        (of_tensors(column__surprise=ONE), "surprise"),
        (without("column.tokens_T"), "tokens_T"),
        (of_tensors(column__reward_B=torch.zeros(1)), "reward_B"),
        # Lengths that are not those of the tokens, by which memory would be read.
        (of_tensors(column__num_observed_B=torch.full((6,), -2000)), "num_observed_B"),
        (of_tensors(column__num_observed_B=torch.zeros(6, dtype=torch.int64)), "num_observed_B"),
    ],
)
def test_what_is_no_saved_batch_is_refused(
    change: Callable[..., None], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "a"
    saved_batch(train_batch()).write(file)
    with safe_open(file, "pt") as opened:
        header = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    told = json.loads(tensors["told"].numpy().tobytes())
    change(header, told, tensors)
    tensors["told"] = torch.frombuffer(bytearray(json.dumps(told), "ascii"), dtype=torch.uint8)
    save_file(tensors, file, header)
    with pytest.raises(DataError, match=said) as caught:
        SavedBatch.read(file)
    assert str(caught.value).startswith(f"--replay: got {file} (")


def test_files_of_before_blobs_are_read(tmp_path: Path) -> None:
    file, batch = tmp_path / "a", train_batch()
    saved_batch(batch).write(file)
    with safe_open(file, "pt") as opened:
        names = list(opened.keys())
        tensors = {n: opened.get_tensor(n) for n in names if "blob." not in n}
    blob = batch.blobs["routed_experts"]
    parts = blob.values_N.split(blob.num_rows_B.tolist())
    with_last = [torch.nn.functional.pad(part, (0, 0, 0, 1)) for part in parts]
    tensors["column.routed_experts_TK"] = torch.cat(with_last)
    save_file(tensors, file, {"hybridrl": "replay 3"})
    found = SavedBatch.read(file).batch.blobs
    assert list(found) == ["routed_experts"]
    assert torch.equal(found["routed_experts"].values_N, blob.values_N)


def test_random_states_of_another_device_are_left_out() -> None:
    torch.manual_seed(5)
    states = rng_state()
    expected = torch.rand(3)
    assert set_rng_state(states)
    assert torch.equal(torch.rand(3), expected)
    state = torch.get_rng_state()
    # What a rank on CUDA has: a state more, and generators of 16 bytes.
    assert not set_rng_state({**states, "cuda": torch.zeros(16, dtype=torch.uint8)})
    assert not set_rng_state({"torch": torch.zeros(16, dtype=torch.uint8)})
    assert torch.equal(torch.get_rng_state(), state)


def test_random_states_bring_back_those_that_megatron_tracks() -> None:
    Platform.detect().activate()  # else Megatron's tracker of CUDA would stay for later tests
    tracker = get_cuda_rng_tracker()
    before = tracker.get_states()
    state = torch.get_rng_state()
    try:
        tracker.set_states({"model-parallel-rng": state})
        saved = rng_state()
        tracker.set_states({"model-parallel-rng": torch.zeros_like(state)})
        assert set_rng_state(saved)
        assert torch.equal(tracker.get_states()["model-parallel-rng"], state)
    finally:
        tracker.set_states(before)


@pytest.mark.parametrize(
    ("steps", "update", "said"),
    [
        (0, 0, "weights: the initial weights, exactly the skipped step's"),
        (2, 0, "the initial weights, 2 steps older than"),
        (0, 3, "the initial weights, 3 optimizer steps older than"),
        (2, 3, "the initial weights, 2 steps and 3 optimizer steps older than"),
    ],
)
def test_replay_says_how_old_the_weights_are(steps: int, update: int, said: str) -> None:
    report = {
        "step": 5,
        "update": update,
        "saved_reason": "policy/loss is nan",
        "checkpoint": None,
        "num_steps_between": steps,
        "changed": [],
        "has_random_states": steps == 0,
        "models": {},
        "is_finite": True,
    }
    text = replay_text(report)
    assert said in text
    assert ("random states: not restored" in text) is (steps != 0)
