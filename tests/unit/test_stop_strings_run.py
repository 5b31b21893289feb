"""A run whose responses end by text trains on what the policy drew: engine and trainer agree."""

from __future__ import annotations

import json
from pathlib import Path

from small_runs import small_run

AGREES = 1e-4  # nats a token, fp32


def test_stop_strings_leave_training_on_policy(tmp_path: Path) -> None:
    knobs = (
        "rollout.engine=hf",
        "rollout.stop_strings=['1',',']",
        "rollout.max_new_tokens=12",
        "log.rollouts_every=1",
        "steps.num_steps=2",
    )
    with small_run(tmp_path, *knobs) as trainer:
        trainer.fit()
        folder = trainer.journal.folder
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(record["mismatch/logprob_diff_max"] < AGREES for record in records)
    files = sorted((folder / "rollouts").glob("*.jsonl"))
    samples = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    ended = [one["response"] for one in samples if one["response"][-1:] in ("1", ",")]
    assert ended and all(text[:-1].count("1") + text[:-1].count(",") == 0 for text in ended)
    assert all(one["finished"] for one in samples if one["response"] in ended)
