"""A run whose responses end by text or by generation_config.json trains on what was drawn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import QUICKSTART
from small_runs import small_run

AGREES = 1e-4  # nats a token, fp32


def test_ends_of_responses_leave_training_on_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(QUICKSTART / "model", tmp_path / "model")
    one = json.loads((tmp_path / "model/tokenizer.json").read_text())["model"]["vocab"]["1"]
    (tmp_path / "model/generation_config.json").write_text(json.dumps({"eos_token_id": [one]}))
    knobs = (
        "rollout.engine=hf",
        f"model.init={tmp_path / 'model'}",
        "rollout.stop_strings=[',']",
        "log.console=true",
        "rollout.max_new_tokens=12",
        "log.rollouts_every=1",
        "steps.num_steps=2",
    )
    with small_run(tmp_path, *knobs) as trainer:
        assert trainer.sampler.sampling.stop_token_ids == (1, one)
        trainer.fit()
        folder = trainer.journal.folder
    captured = capsys.readouterr()
    assert "end tokens of responses: <eos>, 1" in captured.out + captured.err
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(record["mismatch/logprob_diff_max"] < AGREES for record in records)
    files = sorted((folder / "rollouts").glob("*.jsonl"))
    samples = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    ended = [one["response"] for one in samples if one["response"][-1:] in ("1", ",")]
    assert ended and all(text[:-1].count("1") + text[:-1].count(",") == 0 for text in ended)
    assert all(one["finished"] for one in samples if one["response"] in ended)
