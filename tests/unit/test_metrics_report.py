"""The page about a run."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hybridrl.errors import DataError
from hybridrl.metrics.plots import PLOTS, figures, points
from hybridrl.metrics.report import write_report
from hybridrl.metrics.sinks import JsonlSink, RolloutDump, read_records
from hybridrl.metrics.values import ACCURACY


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
            metrics["eval/accuracy"] = step / 24
        sink.write(step, metrics)
    sink.close()
    (run / "config.yaml").write_text("run:\n  name: my-run # <b>\n")
    dump = RolloutDump(run / "rollouts", every=10)
    dump.write(1, [{"prompt": "old"}])
    dump.write(10, [{"prompt": "47+38=", "response": "<script>alert(1)</script>", "reward": 0.0}])
    return run


def test_report_shows_curves_config_and_newest_samples(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    path = write_report(run)
    assert path == run / "report.html"
    page = path.read_text(encoding="utf-8")
    titles = re.findall(r'<img alt="([^"]*)"', page)
    assert titles == [
        "Reward",
        "Accuracy on held-out prompts",
        "Policy loss",
        "Time of a step",
    ]
    for image in re.findall(r"base64,([^\"]*)", page):
        assert ElementTree.fromstring(base64.b64decode(image)).tag.endswith("svg")
    assert "47+38=" in page
    assert "old" not in re.findall(r"<td>([^<]*)</td>", page)
    assert "0.375" in page  # mean reward of the last 10 of 12 steps
    assert "0.500 (step 12)" in page
    assert "name: my-run # &lt;b&gt;" in page


class Page(HTMLParser):
    """What a browser would make of a page: its tags, its links, and the texts of its cells."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.cells: list[str] = []
        self.images: dict[str, str] = {}
        self._is_cell = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = {name: value or "" for name, value in attrs}
        self.attributes += found.items()
        if tag == "img":
            svg = base64.b64decode(found["src"].partition("base64,")[2]).decode()
            self.images[found["alt"]] = svg
        if tag in ("td", "th"):
            self._is_cell = True
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_cell = self._is_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._is_cell:
            self.cells[-1] += data


HOSTILE = (
    "<script>alert(1)</script>",
    "</div></td></table><img src=https://example.org/x onerror=alert(1)>",
    "{{ config }}{% for x in y %}",
    "' onmouseover='alert(1)",
    "\u202egnp.exe &lt;b&gt; </pre><style>body{display:none}</style>",
    "half a pair \ud800, a bell \x07",
)


def test_report_shows_hostile_texts_as_texts_and_needs_nothing_from_outside(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    rows = [{"prompt": text, "response": text, "reward": 0.0, text: 1} for text in HOSTILE]
    dump = run / "rollouts" / "step_000012.jsonl"
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"prompt": "cut sh')
    (run / "config.yaml").write_text("run:\n  name: " + json.dumps(HOSTILE[1]) + "\n")
    page = Page(write_report(run))
    allowed = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "div", "img", "pre"}
    assert set(page.tags) <= allowed | {"table", "tr", "th", "td", "details", "summary"}
    assert page.tags.count("style") == 1 and page.tags.count("table") == 2
    names = {name for name, _ in page.attributes}
    assert not {name for name in names if name.startswith("on")}
    links = [value for name, value in page.attributes if name in ("src", "href", "srcset")]
    assert links and all(link.startswith("data:image/svg+xml;base64,") for link in links)
    for text in HOSTILE:
        shown = text.replace("\ud800", "?")
        assert page.cells.count(shown) == 3, shown  # head of a column, prompt, response
    assert not any("built-in method" in cell for cell in page.cells)


def test_report_leaves_gaps_where_values_are_not_finite(tmp_path: Path) -> None:
    lines = ['{"step": 1, "policy/loss": 1.0, "policy/kl": null, "time_s/step": null}']
    lines += ['{"step": 2, "policy/loss": NaN, "policy/kl": NaN, "eval/accuracy": 0.5}']
    lines += ['{"step": 3, "policy/loss": Infinity, "time_s/update": null}']
    lines += ['{"step": 7, "policy/loss": 3.0, "time_s/update": 0.5, "train/skipped_steps": 2}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    records = read_records(tmp_path / "metrics.jsonl")
    steps, values = zip(*points(records, "policy/loss"), strict=True)
    assert steps == (1, 2, 3, 7) and [math.isnan(v) for v in values] == [False, True, True, False]
    assert points(records, "eval/accuracy") == [(2, 0.5)]
    page = Page(write_report(tmp_path))
    # Of KL no value is finite: no figure, as of what was never recorded.
    wanted = ["Accuracy on held-out prompts", "Policy loss", "Skipped optimizer steps"]
    assert list(page.images) == [*wanted, "Time of a step"]
    loss = page.images["Policy loss"]
    assert loss.count("<use ") and "nan" not in re.findall(r' d="([^"]*)"', loss)
    assert not any(cell in ("nan", "inf") for cell in page.cells)
    assert page.cells[page.cells.index("skipped optimizer steps") + 1] == "2"


def test_report_marks_a_value_between_gaps(tmp_path: Path) -> None:
    values = [None if step in (50, 52) else 1.0 + step for step in range(1, 101)]
    lines = [json.dumps({"step": i, "policy/loss": v}) for i, v in enumerate(values, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    svg = Page(write_report(tmp_path)).images["Policy loss"]
    curve = svg[svg.index("clip-path") :]
    assert len(re.findall(r'<use [^>]*style="fill: #1f77b4; stroke: #1f77b4"', curve)) == 1


def test_report_of_two_runs_overlays_curves_and_tells_configurations_apart(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "x$1$"), make_run(tmp_path / "y")
    shutil.move(other, other.with_name("_other $a$ run"))
    other = other.with_name("_other $a$ run")
    (one / "config.yaml").write_text("run: {name: a}\ntrain: {tp: 2, betas: [1, 2]}\n")
    (other / "config.yaml").write_text("run: {name: a}\ntrain: {tp: 4, betas: [1, 2], pp: 2}\n")
    (other / "summary.json").write_text('{"accuracy_before": 0.125}')
    path = write_report(one, other)
    assert path == one / "comparison.html" and not (one / "report.html").exists()
    page = Page(path)
    for row in (["train.tp", "2", "4"], ["train.pp", "–", "2"]):
        at = page.cells.index(row[0])
        assert page.cells[at : at + 3] == row
    assert not {"run.name", "train.betas"} & set(page.cells)
    at = page.cells.index("first measured accuracy")
    assert page.cells[at + 1 : at + 3] == ["0.250 (step 6)", "0.125 (step 0)"]
    reward = page.images["Reward"]
    assert {"A: my-run", "B: _other $a$ run"} <= set(re.findall(r"<!-- (.*?) -->", reward))
    alone = Page(write_report(one)).images["Reward"]
    curve = re.compile(r'<g id="line2d_\d+">\s*<path d="[^"]{100,}"')
    assert len(curve.findall(reward)) == 2 * len(curve.findall(alone)) > 0
    assert reward.count("stroke-dasharray") == 0  # one metric: runs differ by colour


def test_report_has_a_row_for_each_evaluation_set_with_its_standard_error(tmp_path: Path) -> None:
    record = {"step": 4, "eval/accuracy": 0.5, "eval/accuracy_stderr": 0.02, "eval/form": 0.9}
    record |= {"eval/gsm8k/accuracy": 0.25, "eval/gsm8k/accuracy_stderr": 0.011}
    record |= {"eval/gsm8k/pass_at_4": 0.75, "eval/gsm8k/pass_at_4_stderr": 0.02}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    summary = {"gsm8k/accuracy_before": 0.125, "gsm8k/accuracy_before_stderr": 0.01}
    summary |= {"accuracy_before": 0.375, "gsm8k/accuracy_after": 0.25}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    cells = Page(write_report(tmp_path)).cells
    for label, value in {
        "first measured accuracy": "0.375 (step 0)",
        "last measured accuracy": "0.500 ± 0.020 (step 4)",
        "first measured gsm8k/accuracy": "0.125 ± 0.010 (step 0)",
        "last measured gsm8k/accuracy": "0.250 ± 0.011 (step 4)",
        "last measured gsm8k/pass_at_4": "0.750 ± 0.020 (step 4)",
    }.items():
        assert cells[cells.index(label) + 1] == value


def test_report_has_a_figure_of_every_metric_that_a_run_may_have(tmp_path: Path) -> None:
    names = {name for plot in PLOTS for name in plot.metrics.values()} | {"time_s/generate"}
    lines = [json.dumps({"step": step, **dict.fromkeys(names, 0.5 * step)}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    page = Page(write_report(tmp_path))
    assert len(page.images) == len(PLOTS) + 1
    memory = page.images["Peak memory of the fullest rank"]
    assert all(f"<!-- {phase} -->" in memory for phase in ("generate", "update", "run so far"))


def test_report_shows_the_losses_of_further_terms(tmp_path: Path) -> None:
    losses = ("policy/loss", "critic/loss", "sft/loss", "pairs/loss")
    lines = [json.dumps({"step": step, **dict.fromkeys(losses, 1.0 / step)}) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    page = Page(write_report(tmp_path))
    figure = page.images["Losses of further terms"]
    assert all(f"<!-- {name} -->" in figure for name in ("sft", "pairs"))
    assert not any(f"<!-- {name} -->" in figure for name in ("policy", "critic"))


@pytest.mark.parametrize("content", [None, "", '{"step": 1, "rew'])
def test_report_refuses_a_folder_without_metrics(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match="metrics.jsonl"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_report_of_one_step_with_few_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "policy/loss": 2.0}) + "\n")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert re.findall(r'<img alt="([^"]*)"', page) == ["Policy loss"]
    assert "Sample rollouts" not in page


@pytest.mark.parametrize(("value", "is_shown"), [(0.0, False), (1e-9, True)])
def test_report_leaves_out_what_is_zero_without_a_reference(
    tmp_path: Path, value: float, is_shown: bool
) -> None:
    records = [{"step": step, "policy/kl": value * step, ACCURACY: 0.0} for step in range(3)]
    titles = {title for title, _ in figures({"run": records})}
    assert ("KL" in titles) is is_shown and "Accuracy on held-out prompts" in titles


def test_report_imports_no_torch() -> None:
    code = "import sys, hybridrl.metrics.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_layers_of_a_mixture_have_a_figure_of_eight_at_most() -> None:
    for num_layers, shown in ((3, [0, 1, 2]), (29, [0, 4, 8, 12, 16, 20, 24, 28])):
        records = [
            {"step": step, **{f"moe/max_load/layer_{i}": 1.0 + i for i in range(num_layers)}}
            for step in range(3)
        ]
        found = dict(figures({"run": records}))
        assert list(found) == ["Load of the busiest expert, by layer"]
        svg = found["Load of the busiest expert, by layer"].decode()
        assert [int(one) for one in re.findall(r"<!-- layer (\d+) -->", svg)] == shown
