"""Where metrics and samples go, and what a continued run leaves of earlier ones."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.summary.writer import event_file_writer

from hybridrl.metrics.sinks import (
    JsonlSink,
    RolloutDump,
    TensorBoardSink,
    read_records,
)
from hybridrl.metrics.tables import MAX_CELL_LETTERS, MAX_MARKDOWN_SAMPLES


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


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with its configuration."""
    # Event files are read by their names: the second, then the number in the process, as text.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))
    knobs = "run: {name: a}\ntrain: {learning_rate: 1.0e-06, tp: 2}\nmodel: {init: 'a_b|<c>'}\n"
    (tmp_path / "config.yaml").write_text(knobs + "eval: {sets: {}}\nmix: [1, null]\n")
    return tmp_path


def texts(run: Path, name: str) -> list[tuple[int, str]]:
    """The texts that TensorBoard shows under a name, by step."""
    # With TensorBoard's own reader: the one for scripts keeps texts of steps that are taken again.
    found = plugin_event_accumulator.EventAccumulator(str(run / "tensorboard")).Reload()
    events = found.Tensors(f"{name}/text_summary")
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in events]


class Cells(HTMLParser):
    """Reads the tables of a page, cell by cell."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "br":
            self.rows[-1][-1] += "\n"
        else:
            assert tag in ("table", "thead", "tbody"), f"{tag} is no part of a table"

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip("\n")


def shown(markdown: str) -> list[list[str]]:
    """The cells of a table as TensorBoard shows it."""
    cells = Cells()
    cells.feed(markdown_to_safe_html(markdown))
    return cells.rows


def test_tensorboard_sink_writes_scalars_that_tensorboard_reads(run: Path) -> None:
    first = TensorBoardSink(run)
    for step in (1, 2, 3):
        first.write(step, {"reward/mean": step * 1.0})
    first.close()
    second = TensorBoardSink(run, last_step=2)
    second.write(3, {"reward/mean": 30.0})
    second.close()
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]


def test_tensorboard_shows_samples_letter_by_letter(run: Path) -> None:
    hostile = "a|b **c** `d` [e](f) <img src=x onerror=y>\n\n# g\r_h_ \\* &amp; ![i](j) $k$ |"
    samples: list[dict[str, object]] = [
        {"prompt": hostile, "response": "", "reward": 0.5, "parts": {"a": 1}, "chars": [1, 2]},
        {"prompt": "half \ud83d", "response": "x" * 4999 + "y", "reward": -1e-7, "answer": None},
    ]
    dump = RolloutDump(run / "rollouts", every=1)
    dump.write(4, samples)
    sink = TensorBoardSink(run)
    sink.samples(4, dump.file(4))
    sink.close()
    ((step, text),) = texts(run, "samples")
    assert step == 4
    half = MAX_CELL_LETTERS // 2
    cut = "x" * half + " ... (5000 characters) ... " + "x" * (half - 1) + "y"
    assert shown(text) == [
        ["prompt", "response", "reward", "parts", "answer"],
        [hostile.replace("\r", "\n"), "", "0.5", '{"a": 1}', ""],
        ["half \\ud83d", cut, "-1e-07", "", "null"],
    ]


def test_tensorboard_gets_some_samples_and_forgets_those_of_steps_taken_again(run: Path) -> None:
    dump = RolloutDump(run / "rollouts", every=1)
    for last_step, prompt in ((0, "left"), (2, "kept")):
        sink = TensorBoardSink(run, last_step)
        for step in range(last_step + 1, 5):
            dump.write(step, [{"prompt": f"{prompt} {i}"} for i in range(MAX_MARKDOWN_SAMPLES + 5)])
            sink.samples(step, dump.file(step))
        sink.close()
    found = {step: shown(text) for step, text in texts(run, "samples")}
    assert [step for step, _ in texts(run, "samples")] == [1, 2, 3, 4]
    assert {len(rows) - 1 for rows in found.values()} == {MAX_MARKDOWN_SAMPLES}
    assert [found[step][-1] for step in (2, 3)] == [
        [f"left {MAX_MARKDOWN_SAMPLES - 1}"],
        [f"kept {MAX_MARKDOWN_SAMPLES - 1}"],
    ]
    TensorBoardSink(run, last_step=1).close()
    assert [step for step, _ in texts(run, "samples")] == [1]


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
