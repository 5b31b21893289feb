"""A run that stops at steps it cannot trust, its replay and its trace, through the command line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import QUICKSTART, run

NINE = 11  # its token
GOOD, BAD = ["12+34=", "55+01="], ["20+31=", "98+01="]


def write_run(folder: Path) -> Path:
    """Three good steps, then only bad ones: their loss is NaN where a prompt begins with 9."""
    rows = [{"prompt": p, "response": "1,2", "answer": "2"} for p in [*GOOD * 3, *BAD * 3]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content: dict[str, Any] = {
        "run": {"name": "mine", "dir": str(folder), "profile": "2-3"},
        "model": {"init": str(QUICKSTART / "model")},
        "train": {"learning_rate": 1e-3},
        "algorithm": {
            "name": "poisoned_algorithm:Poisoned",
            "options": {"token": NINE, "of": {"name": "sft"}},
        },
        "data": {"prompts": str(folder / "rows.jsonl"), "shuffle": False},
        "steps": {"prompts_per_step": 2, "num_steps": 6},
        "log": {"tensorboard": False},
        "checkpoint": {"every": 2},
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(content))
    return folder / "c.yaml"


@pytest.mark.dist
def test_a_run_stops_says_where_and_is_replayed(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    said = run("train", config, "--world", "2", expect=2)
    runs = tmp_path / "mine"
    file = runs / "replay" / "step_000006_update_000.safetensors"
    assert "step 4: optimizer step skipped (1 of at most 3 in a row): policy/loss is nan" in said
    assert "train.max_skipped_steps: got 3 optimizer steps skipped in a row, at step 6" in said
    assert said.count(f"hybridrl train CONFIG --replay {file}") == 1 and "Traceback" not in said
    records = [json.loads(line) for line in (runs / "metrics.jsonl").read_text().splitlines()]
    assert [record["train/skipped_steps"] for record in records] == [0, 0, 0, 1, 1]
    assert records[3]["policy/loss"] is None and records[2]["policy/loss"] > 0
    assert all(record["flops/update"] > 0 for record in records)
    assert all("mfu/update" not in record for record in records)
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*") if path.is_file()}
    said = run("train", config, "--world", "2", "--replay", file, expect=1)
    assert "step 6, optimizer step 0, skipped in the run because policy/loss is nan" in said
    assert f"{runs / 'checkpoints' / 'step_4'}, 1 steps older" in said
    assert "row 1 (sample 1, 6 + 4 tokens" in said and "'98+01='" in said and "row 0" not in said
    assert "not finite again: policy/loss is nan in micro-batch" in said
    assert "first parameter with a non-finite gradient: 0/" in said
    after = {path: path.stat().st_mtime_ns for path in runs.rglob("*") if path.is_file()}
    assert before == after, "a replay writes nothing into the run"
    said = run("train", config, "--replay", config, expect=2)
    assert "--replay: got" in said and "the message about the skipped step" in said
    said = run("train", config, "--replay", tmp_path / "none", expect=2)
    assert "--replay: got" in said and "Correct the path" in said
    check_traces(runs / "traces")


@pytest.mark.dist
def test_the_batch_of_a_first_step_is_kept(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    knobs = ("train.max_skipped_steps=1", "steps.prompts_per_step=12", "run.profile=[]")
    said = run("train", config, *knobs, expect=2)
    assert "got 1 optimizer steps skipped in a row, at step 1" in said
    file = tmp_path / "mine" / "replay" / "step_000001_update_000.safetensors"
    said = run("train", config, *knobs, "train.micro_batch_tokens=999", "--replay", file, expect=1)
    assert "the initial weights, exactly the skipped step's" in said
    assert "changed since the run: train.micro_batch_tokens: 999 (" in said
    assert said.count("<- not finite") == 1 and said.count("prompt '98+01='") == 3


def check_traces(folder: Path) -> None:
    """Every rank is there, its phases in order, and on one clock with the others'."""
    files = [f"step_{step}.{end}" for step in (2, 3) for end in ("json.gz", "phases.json")]
    assert sorted(file.name for file in folder.iterdir()) == files
    lanes = json.loads((folder / "step_3.phases.json").read_text())
    assert lanes["step"] == 3 and set(lanes["ranks"]) == {"0", "1"}
    with gzip.open(folder / "step_3.json.gz") as file:
        trace = json.load(file)
    assert trace["otherData"]["step"] == 3 and len(trace["otherData"]["clock_error_us"]) == 2
    events = trace["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(names) >= {f"rank {r}: {what}" for r in (0, 1) for what in ("phases", "host")}
    assert len(set(names.values())) == len(names)
    barriers = []
    for rank in (0, 1):
        phases = [e for e in events if e["pid"] == names[f"rank {rank}: phases"] and e["ph"] == "X"]
        phases.sort(key=lambda event: event["ts"])
        order = [event["name"] for event in phases]
        assert order == ["barrier", "logprobs", "advantages", "update", "barrier"], order
        ends = [event["ts"] + event["dur"] for event in phases]
        assert all(end <= later["ts"] for end, later in zip(ends, phases[1:], strict=False))
        barriers.append((ends[0], ends[-1]))
        inner = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in phases[1:-1]]
        for (name, start, seconds), lane in zip(inner, lanes["ranks"][str(rank)], strict=True):
            # The report's lanes are those of the trace; floats of some 1e6 us are exact to 1e-9 s.
            assert lane[0] == name and lane[1] == pytest.approx(start, abs=1e-6)
            assert lane[2] == pytest.approx(start + seconds, abs=1e-6)
        update = phases[3]
        host = [e for e in events if e["pid"] == names[f"rank {rank}: host"] and e["ph"] == "X"]
        products = [e for e in host if e["name"] == "aten::mm"]
        inside = [e for e in products if update["ts"] <= e["ts"] <= update["ts"] + update["dur"]]
        assert len(products) > 20 and len(inside) == len(products), "SFT multiplies in its update"
    for one, other in zip(*barriers, strict=True):
        assert abs(one - other) < 1e5, "ranks leave a barrier together, but for the scheduler"
