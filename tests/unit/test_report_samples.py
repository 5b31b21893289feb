"""The report's samples in Node, in place of a browser: elements that the page's script creates."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hybridrl.services.report.html_page import PAGE

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node")
# As much of a document as the script needs. Opens all samples and prints each one's elements.
SCRIPT = """
class Node {
  constructor(tag) { Object.assign(this, { tag, childNodes: [], className: "", listeners: {} });
    if (tag === "img") Object.assign(this, { src: "", alt: "" }); }
  append(...nodes) { this.childNodes.push(...nodes); }
  replaceChildren(...nodes) { this.childNodes = nodes; }
  setAttribute() {}
  addEventListener(name, call) { this.listeners[name] = call; }
}
const plain = (node) => typeof node === "string" ? node
  : node.tag === "img" ? [node.src, node.alt] : node.childNodes.flatMap((one) => [plain(one)]);
const document = { createElement: (tag) => new Node(tag) }, Figures = { number: String };
"""
SHOWN = """
const rows = Samples.make([GIVEN]).at(-1).childNodes;
for (const row of rows) { row.open = true; row.listeners.toggle(); }
console.log(JSON.stringify(rows.map((row) => plain(row.childNodes[1].childNodes[0]))));
"""


def shown(run: dict[str, Any], folder: Path) -> list[list[Any]]:
    """Returns each sample's prompt and response: lists of texts, and images as source and text."""
    file = folder / "script.js"
    given = SHOWN.replace("GIVEN", json.dumps(run))
    file.write_text(SCRIPT + (PAGE / "samples.js").read_text() + given)
    found = subprocess.run([str(NODE), file], capture_output=True, text=True, check=True)
    rows: list[list[Any]] = json.loads(found.stdout)
    return rows


def test_images_are_beside_the_turns_that_show_them(tmp_path: Path) -> None:
    turns = {"chars": [1, 0, 1, 1, 1, 1], "turns": [[0, 1], [1, 2], [0, 1], [1, 1], [0, 1]]}
    seeing = {"prompt": "p", "response": "abcde", "images": ["one"], **turns}
    seeing |= {"response_images": ["two", "gone"], "response_images_at": [1, 4]}
    whole = {"prompt": "p", "response": "r", "response_images": ["two"], "response_images_at": [0]}
    samples = [{**one, "step": 1, "sample": i} for i, one in enumerate((seeing, whole))]
    images = {"one": "data:1", "two": "data:2"}
    first, second = shown({"samples": samples, "images": images, "dumps": 1}, tmp_path)
    assert first == [
        *(["prompt"], [["data:1", "image 1 of the prompt"]], ["p"], ["response"]),
        [["policy, turn 1"], [["a"]]],
        [["environment"], [["data:2", "image 1 of the response"]], [[""], ["b"]]],
        [["policy, turn 2"], [["c"]]],
        [["environment"], [["image 2 of the response is in rollouts/images"]], [["d"]]],
        [["policy, turn 3"], [["e"]]],
    ]
    assert second[2:] == [["response"], [["data:2", "image 1 of the response"]], ["r"]]
