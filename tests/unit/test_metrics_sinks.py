"""Where metrics and samples go, and what a continued run leaves of earlier ones."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybridrl.errors import UserError
from hybridrl.metrics.estimates import Estimate
from hybridrl.metrics.sinks import (
    ConsoleSink,
    JsonlSink,
    RolloutDump,
    TensorBoardSink,
    read_records,
    step_line,
)

METRICS = {
    "time_s/generate": 0.123,
    "time_s/reward": 0.01,
    "time_s/logprobs": 0.2,
    "time_s/advantages": 0.0,
    "time_s/update": 1.5,
    "time_s/reshard": 0.04,
    "time_s/step": 1.9,
    "reward/mean": 0.5,
    "eval/accuracy": 0.75,
}


def test_jsonl_sink_shows_each_step_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"reward/mean": 0.5})
    assert path.read_text() == '{"step": 1, "reward/mean": 0.5}\n'
    sink.write(2, {"reward/mean": float("nan"), "policy/loss": float("inf")})
    sink.close()
    assert read_records(path)[1] == {"step": 2, "reward/mean": None, "policy/loss": None}


def test_jsonl_sink_forgets_steps_after_the_one_it_continues_from(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path)
    for step in range(1, 8):
        first.write(step, {"value": step / 10})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 8, "val')
    second = JsonlSink(path, last_step=5)
    second.write(6, {"value": 60.0})
    second.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["value"] for row in rows] == [0.1, 0.2, 0.3, 0.4, 0.5, 60.0]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_jsonl_sink_of_a_new_run_starts_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3}\n')
    JsonlSink(path).close()
    assert path.read_text() == ""


def test_tensorboard_sink_writes_scalars_that_tensorboard_reads(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        first.write(step, {"reward/mean": step * 1.0})
    first.close()
    second = TensorBoardSink(tmp_path, last_step=2)
    second.write(3, {"reward/mean": 30.0})
    second.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]


def test_step_line_shows_every_phase_and_the_results() -> None:
    assert step_line(7, 120, METRICS) == (
        "step   7/120 [gen] 0.12s [reward] 0.01s [logp] 0.20s [adv] 0.00s [update] 1.50s"
        " [reshard] 0.04s reward 0.500 accuracy 0.750"
    )


def test_console_sink_prints_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(120, console=Console(file=stream, width=40))
    sink.write(7, METRICS)
    sink.message("saved [runs/x]")
    sink.compare(
        "Accuracy",
        {
            "greedy": (Estimate(0.25, None), Estimate(0.9375, None)),
            "sampled": (None, Estimate(0.5, 0.02)),
        },
    )
    sink.close()
    lines = stream.getvalue().splitlines()
    assert lines[:2] == [step_line(7, 120, METRICS), "saved [runs/x]"]
    table = "\n".join(lines[2:])
    for text in ("Accuracy", "before", "after", "0.250", "0.938", "-", "0.500 ± 0.020"):
        assert text in table
    assert "\x1b" not in stream.getvalue()


def test_console_sink_shows_a_progress_bar_on_a_terminal() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, legacy_windows=False)
    sink = ConsoleSink(120, last_step=6, console=console)
    sink.write(7, METRICS)
    sink.close()
    assert "7/120" in stream.getvalue().split("accuracy 0.750")[1]
    assert "[gen] 0.12s" in stream.getvalue()


def test_rollout_dump_writes_one_file_a_due_step(tmp_path: Path) -> None:
    dump = RolloutDump(tmp_path / "rollouts", every=10)
    assert [step for step in range(1, 31) if dump.is_due(step)] == [1, 10, 20, 30]
    assert not RolloutDump(tmp_path, every=0).is_due(10)
    samples = [{"prompt": "1+1=", "response": "é2", "reward": 1.0}, {"prompt": "2"}]
    for _ in range(2):
        dump.write(10, samples)
    lines = (tmp_path / "rollouts" / "step_000010.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == samples


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 2, "a": \xff}',
        b"[" * 10**5,
        b'{"step": "two"}',
        b'{"step": true}',
        b"[1]",
        b"\x00",
        b'{"step": ' + b"9" * 5000 + b"}",
    ],
)
def test_damaged_lines_are_set_aside(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1, "a": 1.0, "text": "x"}\n' + line + b'\n{"step": 3, "a": 3.0}\n{"st'
    )
    assert read_records(path) == [{"step": 1, "a": 1.0}, {"step": 3, "a": 3.0}]
    sink = JsonlSink(path, last_step=3)
    sink.write(4, {"a": 4.0})
    sink.close()
    assert sink.num_damaged == 1 and [r["step"] for r in read_records(path)] == [1, 3, 4]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == line + b"\n"


def test_a_folder_in_place_of_metrics_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    for attempt in (read_records, JsonlSink):
        with pytest.raises(UserError, match="metrics.jsonl: got a folder"):
            attempt(tmp_path / "metrics.jsonl")
