"""The page about a run."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hybridrl.errors import DataError
from hybridrl.metrics.report import write_report
from hybridrl.metrics.sinks import JsonlSink, RolloutDump


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
        "Accuracy on held-out prompts, greedy",
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


def test_report_escapes_samples_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path)).read_text(encoding="utf-8")
    assert "<script" not in page

    class Links(HTMLParser):
        found: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.found += [v or "" for k, v in attrs if k in ("src", "href", "srcset")]

    links = Links()
    links.feed(page)
    assert links.found
    assert all(link.startswith("data:") for link in links.found)


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


def test_report_imports_no_torch() -> None:
    code = "import sys, hybridrl.metrics.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
