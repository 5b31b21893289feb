"""Draws docs/pictures/*.svg, each with its own background and a light and a dark color scheme.

Drawings are 480 units wide, so that text of 13 units is readable on a phone.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 480
LONGEST = 110  # steps of the runs that the picture of exact mode shows
STYLE = """
svg { --ground: #ffffff; --ink: #1d2433; --soft: #5a6478; --line: #aab3c5; --a: #dfe7fd; --b: #fde3cf; --c: #d5f0dd;
  --d: #eadcf8; --strong: #3f51b5; }
@media (prefers-color-scheme: dark) { svg { --ground: #1e2129; --ink: #e8ebf2; --soft: #a9b2c4; --line: #5d677c;
  --a: #2b3a66; --b: #5f3d22; --c: #214a31; --d: #46315f; --strong: #8c9eff; } }
text { font: 13px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; fill: var(--ink); }
.soft { fill: var(--soft); font-size: 12px; } .head { font-weight: 600; font-size: 14px; }
.line { stroke: var(--soft); stroke-width: 1.5; fill: none; } .box { stroke: var(--line); stroke-width: 1; }
"""


class Drawing:
    """A picture to which parts are added."""

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height, self.parts = title, height, [""]

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, *lines: str, head: bool = False
    ) -> None:
        """Adds a rectangle with lines of text in its middle."""
        self.parts.append(
            f'<rect class="box" x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="var(--{fill})"/>'
        )
        first = y + h / 2 + 4.5 - 8 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(
                x + w / 2,
                first + 16 * number,
                line,
                "head" if head and not number else "",
                "middle",
            )

    def text(self, x: float, y: float, line: str, kind: str = "", anchor: str = "start") -> None:
        """Adds a line of text."""
        self.parts.append(
            f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{html.escape(line)}</text>'
        )

    def arrow(self, *points: tuple[float, float]) -> None:
        """Adds a line through points, with an arrowhead at the last."""
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'<polyline class="line" points="{path}" marker-end="url(#head)"/>')

    def curve(self, color: str, *points: tuple[float, float]) -> None:
        """Adds a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = f"fill:none;stroke:var(--{color});stroke-width:2"
        self.parts.append(f'<polyline style="{style}" points="{path}"/>')

    def save(self, name: str) -> None:
        """Writes the picture."""
        marker = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 8 4 0 8z" fill="var(--soft)"/></marker>'
        )
        ground = f'<rect width="{WIDTH}" height="{self.height}" rx="8" fill="var(--ground)"/>'
        text = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img">'
            f"<title>{html.escape(self.title)}</title><style>{STYLE}</style><defs>{marker}</defs>{ground}"
        )
        body = "\n".join(self.parts)
        (PICTURES / f"{name}.svg").write_text(f"{text}{body}\n</svg>\n", encoding="utf-8")


def design() -> None:
    """Draws processes, the phases of a step, and the reshard between them."""
    d = Drawing("One process per GPU holds trainer and engine; a step alternates between them", 386)
    d.text(16, 26, "One torchrun world, one process per GPU", "head")
    for rank in range(4):
        x = 16 + 113 * rank
        d.box(x, 38, 109, 154, "ground")
        d.text(x + 54, 56, f"rank {rank}", "soft", "middle")
        d.box(x + 6, 64, 97, 40, "a", "Megatron", f"tp {rank % 2}, pp {rank // 2}")
        d.arrow((x + 54, 106), (x + 54, 128))
        d.box(x + 6, 132, 97, 52, "b", "engine", f"replica {rank // 2}", f"tp {rank % 2}")
    d.text(16, 212, "The reshard writes each missing slice once, directly into the", "soft")
    d.text(16, 228, "engine's parameters. No rank gathers the whole model.", "soft")
    d.text(16, 260, "A step", "head")
    names = (
        ("generate", "b"),
        ("reward", "c"),
        ("log-probs", "a"),
        ("update", "a"),
        ("reshard", "d"),
    )
    for number, (name, fill) in enumerate(names):
        x = 16 + 91 * number
        d.box(x, 272, 80, 34, fill, name)
        if number:
            d.arrow((x - 11, 289), (x - 1, 289))
    d.arrow((420, 308), (420, 330), (56, 330), (56, 308))
    d.text(238, 348, "the next step samples from the new weights", "soft", "middle")
    d.text(
        16, 374, "Every rank runs the same loop: no controller, no RPC, no object store.", "soft"
    )
    d.save("design")


def results() -> None:
    """Draws the times of a reshard of Qwen2.5-7B, TP4 to TP1, with different methods."""
    cases = json.loads((RESULTS / "reshard_h200.json").read_text(encoding="utf-8"))["cases"]
    (case,) = (c for c in cases if (c["case"], c["kind"]) == ("7b/tp4/tp1", "plain"))
    names = {
        "peer": "hybridrl, peer",
        "packed": "hybridrl, packed",
        "buckets": "buckets, as in slime",
        "all_gather": "per tensor, as in verl",
        "megatron_resharding": "megatron resharding",
        "mbridge_vllm": "mbridge, load_weights",
    }
    d = Drawing("Milliseconds to move the weights of Qwen2.5-7B from TP4 to TP1 on 4 H200", 306)
    d.text(16, 26, "Weights of a 7B model to the engine, milliseconds", "head")
    d.text(16, 44, "Qwen2.5-7B, TP4 to TP1, four H200, lower is better", "soft")
    longest = max(case["ways"][way]["ms"] for way in names)
    for number, (way, name) in enumerate(names.items()):
        y, ms = 58 + 34 * number, case["ways"][way]["ms"]
        d.text(172, y + 18, name, "", "end")
        fill = "strong" if number < 2 else "line"
        width = max(2, 240 * ms / longest)
        d.parts.append(
            f'<rect x="180" y="{y + 2}" width="{width:.1f}" height="22" rx="3" fill="var(--{fill})"/>'
        )
        d.text(186 + width, y + 18, f"{ms:.1f}")
    d.text(16, 276, 'Others are timed in the same run; "as in" means reimplemented.', "soft")
    d.text(16, 292, "benchmarks/results/reshard_h200.json", "soft")
    d.save("results")


def layouts() -> None:
    """Draws the part of a model that each of eight ranks has, in training and in rollout."""
    d = Drawing("Eight ranks: TP2 PP2 DP2 in training, four engines of TP2 in rollout", 354)
    d.text(16, 26, "Training: TP2 x PP2 x DP2", "head")
    for dp in range(2):
        d.text(126 + 226 * dp, 48, f"copy {dp} of the model (DP)", "soft", "middle")
    for rank in range(8):
        tp, dp, pp = rank % 2, rank // 2 % 2, rank // 4
        x, y = 16 + 113 * (2 * dp + tp), 56 + 62 * pp
        stage = ("first", "last")[pp]
        d.box(x, y, 107, 58, "ad"[pp], f"rank {rank}", f"{stage} layers", f"half {tp}")
    d.text(16, 208, "Rollout: 4 engines of TP2", "head")
    for replica in range(4):
        x = 16 + 113 * replica
        d.box(x, 220, 107, 72, "b", f"engine {replica}", "all layers,", "two ranks")
    d.text(16, 316, "The ranks of an engine are chosen so that they already hold", "soft")
    d.text(16, 334, "as much of its weights as possible.", "soft")
    d.save("layouts")


def reshard() -> None:
    """Draws how slices of a matrix move from training ranks to engine ranks."""
    d = Drawing("A matrix of one stage, cut in two by TP2, moves to an engine of TP4", 300)
    d.text(16, 26, "One matrix, TP2 PP2 to TP4", "head")
    d.text(16, 50, "training: two ranks of the stage hold one half each", "soft")
    d.box(16, 60, 220, 40, "a", "rank 0: rows 0 to 511")
    d.box(244, 60, 220, 40, "a", "rank 1: rows 512 to 1023")
    for rank in range(4):
        x = 16 + 114 * rank
        source = 70 + 112 * rank
        d.arrow((source, 102), (x + 53, 176))
    d.box(16, 180, 106, 58, "b", "rank 0", "0 to 255", "local")
    d.box(130, 180, 106, 58, "b", "rank 2", "256 to 511", "received")
    d.box(244, 180, 106, 58, "b", "rank 1", "512 to 767", "local")
    d.box(358, 180, 106, 58, "b", "rank 3", "768 to 1023", "received")
    d.text(16, 262, "Every rank knows the plan. A proof checks it before it runs:", "soft")
    d.text(16, 280, "each element of each engine parameter is written exactly once.", "soft")
    d.save("reshard")


def phases() -> None:
    """Draws the contents of a device's memory in both phases."""
    d = Drawing("Memory of a device in training and in rollout", 330)
    d.text(16, 26, "Memory of one device through a step", "head")
    for x, name in ((96, "training"), (284, "rollout")):
        d.text(x + 70, 52, name, "", "middle")
    d.box(96, 60, 140, 44, "a", "activations")
    d.box(96, 108, 140, 36, "a", "gradients")
    d.box(96, 148, 140, 50, "a", "optimizer state")
    d.box(96, 202, 140, 40, "a", "weights")
    d.box(284, 60, 140, 60, "b", "KV cache")
    d.box(284, 124, 140, 20, "b", "engine weights")
    d.box(284, 148, 140, 50, "a", "optimizer state*")
    d.box(284, 202, 140, 40, "a", "weights")
    d.arrow((238, 82), (281, 82))
    d.arrow((282, 172), (239, 172))
    d.text(
        16,
        268,
        "The engine sleeps during training. Gradients are freed during rollout.",
        "soft",
    )
    d.text(
        16,
        286,
        "* or in host memory (train.optimizer_memory). If a whole step shows that",
        "soft",
    )
    d.text(16, 304, "both phases fit at the same time, nothing is freed any more.", "soft")
    d.save("phases")


def lag() -> None:
    """Draws responses that continue under newer weights."""
    d = Drawing(
        "Responses over three steps, with the version of the weights that sampled them", 290
    )
    d.text(16, 26, "steps.max_policy_lag=1", "head")
    for step in range(3):
        x = 92 + 126 * step
        d.text(x + 60, 50, f"step {step}", "soft", "middle")
        d.parts.append(
            f'<line class="line" x1="{x}" y1="58" x2="{x}" y2="204" stroke-dasharray="3 4"/>'
        )
    rows = (("short", [(0, 76, "a", "v0")]), ("long", [(0, 122, "a", "v0"), (1, 52, "b", "v1")]))
    rows += (("short", [(1, 90, "b", "v1")]), ("long", [(1, 122, "b", "v1"), (2, 84, "c", "v2")]))
    for number, (name, parts) in enumerate(rows):
        y = 66 + 35 * number
        d.text(16, y + 17, name)
        for step, length, fill, version in parts:
            d.box(94 + 126 * step, y, length, 26, fill, version)
    d.text(
        16, 230, "A step ends when it has enough complete responses. The others continue", "soft"
    )
    d.text(
        16, 248, "in the next step, under newer weights. Every token records the version", "soft"
    )
    d.text(16, 266, "that sampled it, so that the loss can weight it.", "soft")
    d.save("lag")


def router_replay() -> None:
    """Draws how the trainer uses the experts that the engine chose."""
    d = Drawing("The engine records the experts that it chose, and the trainer uses them", 280)
    d.text(16, 26, "algorithm.router_replay=rollout", "head")
    d.box(16, 44, 200, 48, "b", "engine: router chooses", "experts 3 and 7")
    d.box(264, 44, 200, 48, "c", "response, one byte for each", "layer, expert and token")
    d.arrow((218, 68), (261, 68))
    d.arrow((364, 94), (364, 138))
    d.box(264, 142, 200, 48, "a", "trainer: experts 3 and 7,", "even if its router differs")
    d.box(16, 142, 200, 48, "a", "weights of the experts:", "from the trainer's router")
    d.arrow((218, 166), (261, 166))
    d.text(
        16, 222, "Because of rounding, two routers may choose different experts, and then a", "soft"
    )
    d.text(
        16, 240, "token has two log-probabilities. With replay, both use the same experts.", "soft"
    )
    d.text(16, 258, "Gradients still reach the trainer's router.", "soft")
    d.save("router_replay")


def images() -> None:
    """Draws the accuracy of the example with pictures over the steps with rewards."""
    runs = json.loads((RESULTS / "pictures_cpu.json").read_text(encoding="utf-8"))["runs"]
    d = Drawing("Held-out accuracy of the example with pictures, with rewards only, two seeds", 270)
    d.text(16, 26, "Accuracy on 512 held-out pictures, with rewards only", "head")
    d.text(16, 44, "Two seeds; before step 0: at most 18 steps with demonstrations", "soft")
    curves = [
        (color, run["grpo"]["accuracy_by_step"])
        for color, run in zip(("strong", "ink"), runs.values(), strict=True)
    ]
    accuracies(d, curves, 260, "step of 128 prompts x 8 answers")
    d.save("images")


def exact() -> None:
    """Draws the accuracy of SmolLM2 over the steps in exact mode and in close mode."""
    runs = json.loads((RESULTS / "exact_h200.json").read_text(encoding="utf-8"))["learning"]
    d = Drawing("Held-out accuracy of SmolLM2 on word sums, in exact and in close mode", 270)
    d.text(16, 26, "Accuracy on 256 held-out word sums", "head")
    d.text(16, 44, "Blue: numerics.match=exact, three seeds; the others: close, two seeds", "soft")
    curves = [
        ("strong" if "exact" in name else "ink", run["accuracy_by_step"])
        for name, run in runs.items()
        if run["steps"] == LONGEST
    ]
    accuracies(d, curves, LONGEST, "step of 64 prompts x 8 answers")
    d.save("exact")


def accuracies(
    d: Drawing, curves: Sequence[tuple[str, Mapping[str, float]]], last_step: int, label: str
) -> None:
    """Draws a chart of accuracies by step, one curve of a color for each run."""
    left, width, bottom, height = 48, 400, 226, 160
    for accuracy in (0, 0.25, 0.5, 0.75, 1):
        y = bottom - height * accuracy
        d.curve("line", (left, y), (left + width, y))
        d.text(left - 8, y + 4, f"{accuracy:g}", "soft", "end")
    for step in range(0, last_step + 1, last_step // 5):
        d.text(left + width * step / last_step, bottom + 20, str(step), "soft", "middle")
    d.text(left + width / 2, bottom + 36, label, "soft", "middle")
    for color, found in curves:
        points = (
            (left + width * int(n) / last_step, bottom - height * a) for n, a in found.items()
        )
        d.curve(color, *points)


def main() -> None:
    """Draws all of them."""
    for draw in (design, results, layouts, reshard, phases, lag, router_replay, images, exact):
        draw()


if __name__ == "__main__":
    main()
