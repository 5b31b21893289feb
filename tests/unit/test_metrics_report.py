"""The page about a run: its data, and that texts in it are texts."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import shutil
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from tiny_images import file_of

from hybridrl.contracts.prompts import Content
from hybridrl.loop.sample_records import SamplePictures
from hybridrl.metrics.sinks import JsonlSink, RolloutDump
from hybridrl.models.vision.images import FILE, IMAGE, ImageFault
from hybridrl.services.report import page_data
from hybridrl.services.report.html_page import PAGE, SCRIPTS, STYLES, write_report
from hybridrl.services.report.page_data import evenly, read_run
from hybridrl.services.report.plots import PLOTS, figures


def make_run(tmp_path: Path) -> Path:
    run = tmp_path / "my-run"
    sink = JsonlSink(run / "metrics.jsonl")
    for step in range(1, 13):
        metrics = {
            "reward/mean": step / 20,
            "policy/loss": 1.0 / step,
            "policy/kl": float("nan"),
            "time_s/generate": 0.1,
            "time_s/update": 0.5,
            "time_s/step": 0.7,
        }
        if step % 6 == 0:
            metrics |= {"eval/accuracy": step / 24, "eval/accuracy_stderr": 0.125}
        sink.write(step, metrics)
    sink.close()
    (run / "config.yaml").write_text("run:\n  name: my-run # <b>\n")
    dump = RolloutDump(run / "rollouts", every=10)
    dump.write(1, [{"prompt": "old"}])
    dump.write(10, [{"prompt": "47+38=", "response": "<script>alert(1)</script>", "reward": 0.0}])
    return run


class Page(HTMLParser):
    """What a browser would make of a page: its tags, attributes, and the text of each script."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self._inside = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.data: dict[str, Any] = json.loads(self.texts["script"][0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._inside = tag
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in self.texts:
            self.texts[self._inside][-1] += data

    @property
    def policy(self) -> dict[str, str]:
        """The parts of the Content-Security-Policy, by name."""
        text = next(value for name, value in self.attributes if "default-src" in value)
        return dict(part.split(" ", 1) for part in text.split("; "))

    def titles(self) -> list[str]:
        """The figures, as they follow each other."""
        return [plot["title"] for group in self.data["groups"] for plot in group["plots"]]

    def row(self, label: str) -> list[str]:
        """The values of a row of the tables on top."""
        rows: dict[str, list[str]] = {
            name: of for part in self.data["summary"] for name, of in part
        }
        return rows[label]


def test_report_has_curves_config_samples_and_evaluations(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    path = write_report(run)
    assert path == run / "report.html"
    found = Page(path)
    assert found.titles() == [
        "Reward",
        "Accuracy on held-out prompts",
        "Policy loss",
        "KL",  # without a finite value, so that the page leaves it out
        "Time of a step",
    ]
    (shown,) = found.data["runs"]
    assert shown["steps"] == list(range(1, 13))
    assert shown["metrics"]["reward/mean"] == {"v": [step / 20 for step in range(1, 13)]}
    assert shown["metrics"]["eval/accuracy"] == {"v": [0.25, 0.5], "at": [5, 11]}
    assert shown["metrics"]["policy/kl"] == {"v": [None] * 12}
    assert [(one["step"], one["prompt"]) for one in shown["samples"]] == [
        (1, "old"),
        (10, "47+38="),
    ]
    assert shown["config"] == "run:\n  name: my-run # <b>\n"
    assert found.row("reward, mean of the last 10 steps") == ["0.375"]
    assert found.row("last measured accuracy") == ["0.500 (step 12)"]
    (table,) = found.data["evaluations"]
    assert table["columns"] == ["step", "accuracy"]
    assert table["rows"] == [["12", "0.5000 ± 0.1250"], ["6", "0.2500 ± 0.1250"]]
    accuracy = found.data["groups"][0]["plots"][1]["series"][0]
    assert accuracy["error"] == "eval/accuracy_stderr"


HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "</style></title><img src=https://example.org/x onerror=alert(1)>",
    "{{ config }}{% for x in y %}",
    "' onmouseover='alert(1)",
    "\u202egnp.exe &lt;b&gt; \u2028 </pre><style>body{display:none}</style>",
    "half a pair \ud800, a bell \x07, \\u003c",
)


def test_report_has_hostile_texts_as_texts_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    rows = [{"prompt": text, "response": text, "reward": 0.0, text: 1} for text in HOSTILE]
    dump = run / "rollouts" / "step_000012.jsonl"
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"prompt": "cut sh')
    (run / "config.yaml").write_text("run:\n  name: " + json.dumps(HOSTILE[0]) + "\n")
    folder = shutil.move(run, run.with_name("<b>my run&"))
    found = Page(write_report(folder))
    assert set(found.tags) <= {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "script",
        "noscript",
    }
    assert found.tags.count("script") == 1 + len(SCRIPTS)
    assert found.tags.count("style") == len(STYLES)
    names = {name for name, _ in found.attributes}
    assert names <= {"lang", "charset", "name", "content", "http-equiv", "type", "id"}
    assert found.texts["title"] == ["<b>my run&"]
    shown = [one for one in found.data["runs"][0]["samples"] if one["step"] == 12]
    assert [one["response"] for one in shown] == list(HOSTILE)
    assert all(text in one for text, one in zip(HOSTILE, shown, strict=True))
    assert found.row("steps") == ["12"]


def test_images_of_samples_are_small_copies_within_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, contents = make_run(tmp_path), []
    for number, size in enumerate([(900, 300), (40, 30)]):
        picture = Image.new("RGBA", size, (200, 0, 0, 0))
        arrays = {FILE: np.frombuffer(file_of(picture), np.uint8)}
        contents.append(Content(IMAGE, number, 1, f"{number}" * 64, arrays))
    with SamplePictures(run / "rollouts") as pictures:
        names = pictures.write([*contents, contents[0]])
    assert names == ["0" * 32, "1" * 32, "0" * 32] and not list(run.rglob("*.partial"))
    sizes = [Image.open(run / "rollouts" / "images" / f"{name}.jpg").size for name in names]
    assert sizes == [(384, 128), (40, 30), (384, 128)]
    (run / "rollouts" / "secret.jpg").write_bytes(b"secret")
    hostile = ["../secret", "f" * 32, 5, None, "0" * 32 + ".jpg"]
    dump = RolloutDump(run / "rollouts", every=10)
    dump.write(10, [{"images": names}, {"images": hostile}, {"images": "0" * 32}])
    page = Page(write_report(run))
    (data,) = page.data["runs"]
    assert data["images"].keys() == {"0" * 32, "1" * 32}
    uri = data["images"]["1" * 32]
    assert Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).size == (40, 30)
    assert any("img-src data:;" in value for _, value in page.attributes)
    monkeypatch.setattr(page_data, "MOST_IMAGE_BYTES", 100)
    assert not read_run(run, "a").images


def test_copies_of_photographs_are_decoded_small_and_damage_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, threads, load = list[tuple[int, int]](), set[str](), JpegImageFile.load

    def loaded(self: JpegImageFile) -> object:
        sizes.append(self.size)
        threads.add(threading.current_thread().name)
        return load(self)

    monkeypatch.setattr(JpegImageFile, "load", loaded)
    photo = Image.radial_gradient("L").resize((3200, 1600)).convert("RGB")
    files = [file_of(photo, "JPEG"), b"no image"]
    one, bad = (
        Content(IMAGE, 0, 1, digit * 64, {FILE: np.frombuffer(data, np.uint8)})
        for digit, data in zip("ab", files, strict=True)
    )
    with SamplePictures(tmp_path) as pictures:
        (name,) = pictures.write([one])
    assert sizes[0] == (800, 400) and all(one.startswith("pictures") for one in threads)
    with Image.open(tmp_path / "images" / f"{name}.jpg") as copy:
        expected = photo.resize(copy.size)
        assert copy.size == (384, 192)
        assert np.abs(np.asarray(copy).astype(int) - np.asarray(expected)).mean() < 3
    with pytest.raises(ImageFault, match="not an image"), SamplePictures(tmp_path) as pictures:
        pictures.write([bad])


def test_every_dump_has_its_share_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest dumps too; pipes, missing files and files above the share are left out."""
    run = make_run(tmp_path)
    folder, dump = run / "rollouts" / "images", RolloutDump(run / "rollouts", every=1)
    folder.mkdir()
    names = [[f"{step:02}{number:02}" * 2 for number in range(4)] for step in range(1, 4)]
    for step, of_step in enumerate(names, start=11):
        for name in of_step:
            (folder / f"{name}.jpg").write_bytes(b"x" * 10)
        dump.write(step, [{"images": [name]} for name in of_step])
    monkeypatch.setattr(page_data, "MOST_IMAGE_BYTES", 60)
    shown = [name for of_step in names for name in of_step[:2]]
    assert sorted(read_run(run, "run").images) == shown
    (folder / f"{names[2][0]}.jpg").write_bytes(b"x" * 21)
    (folder / f"{names[2][1]}.jpg").unlink()
    os.mkfifo(folder / f"{names[2][1]}.jpg")
    (folder / f"{names[2][2]}.jpg").unlink()
    # Room that the newest dump does not need is for the others.
    shown = [*names[0][:3], *names[1][:2], names[2][3]]
    assert sorted(read_run(run, "run").images) == shown
    monkeypatch.setattr(page_data, "MOST_IMAGE_BYTES", 70)
    shown = [*names[0][:2], *names[1][:2], names[2][0]]
    assert sorted(read_run(run, "run").images) == shown


def test_page_runs_nothing_but_the_packages_scripts(tmp_path: Path) -> None:
    found = Page(write_report(make_run(tmp_path)))

    def digests(texts: list[str]) -> str:
        sums = (hashlib.sha256(text.encode()).digest() for text in texts)
        return " ".join(f"'sha256-{base64.b64encode(one).decode()}'" for one in sums)

    assert found.policy == {
        "default-src": "'none'",
        "img-src": "data:",
        "script-src": digests(found.texts["script"][1:]),
        "style-src": digests(found.texts["style"]),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    for name in ("figures.js", "samples.js", "page.js"):
        text = (PAGE / name).read_text(encoding="utf-8")
        # What would make markup or code of a text.
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", text
        )
        assert "http" not in text


def test_report_of_two_runs_tells_configurations_apart(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "x$1$"), make_run(tmp_path / "y")
    shutil.move(other, other.with_name("_other run"))
    other = other.with_name("_other run")
    (one / "config.yaml").write_text("run: {name: a}\ntrain: {tp: 2, betas: [1, 2]}\n")
    (other / "config.yaml").write_text("run: {name: a}\ntrain: {tp: 4, betas: [1, 2], pp: 2}\n")
    (other / "summary.json").write_text('{"accuracy_before": 0.125}')
    (other / "run.json").write_text('{"starts": [{"world_size": 24}]}')
    path = write_report(one, other)
    assert path == one / "comparison.html" and not (one / "report.html").exists()
    found = Page(path)
    assert found.data["differences"] == [["train.tp", ["2", "4"]], ["train.pp", ["–", "2"]]]
    assert [run["label"] for run in found.data["runs"]] == ["A: my-run", "B: _other run"]
    assert found.row("first measured accuracy") == ["0.250 (step 6)", "0.125 (step 0)"]
    assert found.row("layout") == ["tp 2", "tp 4, pp 2, dp 3"]
    assert found.row("exit") == ["–", "finished"]


def test_samples_are_evenly_spread_over_dumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_data, "MOST_DUMPS", 3)
    monkeypatch.setattr(page_data, "MOST_SAMPLES", 6)
    run = make_run(tmp_path)
    dump = RolloutDump(run / "rollouts", every=1)
    for step in range(1, 12):
        dump.write(step, [{"sample": i} for i in range(5)])
    found = read_run(run, "run")
    assert [(one["step"], one["sample"]) for one in found.samples] == [
        *((1, 0), (1, 1), (6, 0), (6, 1), (11, 0), (11, 1))
    ]
    assert found.dumps == 11
    monkeypatch.setattr(page_data, "MOST_SAMPLE_BYTES", 3 * len('{"sample": 0}\n'))
    assert len(read_run(run, "run").samples) == 3  # one of each dump
    assert evenly([1, 2], 3) == [1, 2]


def test_report_has_a_figure_of_every_metric_that_a_run_may_have() -> None:
    names = {name for plot in PLOTS for name in plot.metrics.values()}
    titles = [plot["title"] for group in figures(names) for plot in group["plots"]]
    assert {plot.title for plot in PLOTS} <= {*titles}
    assert len(titles) == len({*titles})


def test_what_was_measured_before_the_first_step_comes_from_the_summary(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    summary = {"accuracy_before": 0.125, "eval_reward_before": 1.5, "validation/loss_before": 2.5}
    summary["eval_sums/accuracy_before"] = 0.75  # of the evaluation set eval_sums
    (run / "summary.json").write_text(json.dumps({**summary, "seconds": 1.0}))
    shown = Page(write_report(run)).data["runs"][0]
    assert shown["steps"][0] == 0
    assert shown["metrics"]["eval/reward"] == {"v": [1.5], "at": [0]}
    assert shown["metrics"]["eval/loss"] == {"v": [2.5], "at": [0]}
    assert shown["metrics"]["eval/eval_sums/accuracy"] == {"v": [0.75], "at": [0]}
    assert shown["metrics"]["eval/accuracy"] == {"v": [0.125, 0.25, 0.5], "at": [0, 6, 12]}
