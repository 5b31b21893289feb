"""The page of a hang: what every rank was doing, the suspected ones first. No torch.

A page is one HTML file without anything from elsewhere, and a text file of the same name beside it.
Everything in it that a rank or a user has said is escaped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybridrl.parallel.watch import Beat, Call, ranks_text

HANGS = "hangs"  # the folder of pages, in that of the run
MESSAGE_LINE = 3  # of the text
INNERMOST = "Stacks begin with the innermost line."
STYLE = """
:root { color-scheme: light dark; --line: #8885; --soft: #8882; --bad: #c0392b; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1200px; padding: 16px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 28px 0 8px; }
p { margin: 4px 0; overflow-wrap: anywhere; }
.what { border-left: 4px solid var(--bad); padding: 8px 12px; background: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; vertical-align: top; padding: 5px 12px 5px 0;
  border-bottom: 1px solid var(--line); }
td.num { white-space: nowrap; } tr.suspect td:first-child { color: var(--bad); font-weight: 600; }
pre { font: 12.5px/1.45 ui-monospace, monospace; overflow-x: auto; padding: 8px 12px; margin: 6px 0;
  background: var(--soft); }
summary { cursor: pointer; padding: 4px 0; font-weight: 600; overflow-wrap: anywhere; }
details details { margin-left: 12px; } details details summary { font-weight: 400; }
@media (max-width: 600px) {
  thead { display: none; } tr { display: block; border-bottom: 1px solid var(--line); }
  td { display: block; border: 0; padding: 1px 0; overflow-wrap: anywhere; }
  td.num { white-space: normal; }
  td:first-child { padding-top: 6px; } td:last-child { padding-bottom: 6px; }
}
"""


@dataclass(frozen=True)
class RankReport:
    """What a rank says of itself when it is asked.

    Args:
        beat: its latest, with its calls.
        pid: of its process.
        stacks: of its threads, the main one first, by their names.
        states: what it sees of silent ranks of its host, by their numbers.
        stacks_of: stacks that it could get of these.
    """

    beat: Beat
    pid: int
    stacks: Mapping[str, str] = field(default_factory=dict)
    states: Mapping[int, str] = field(default_factory=dict)
    stacks_of: Mapping[int, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Returns the report as text."""
        fields = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return json.dumps({**fields, "beat": self.beat.to_json()})

    @staticmethod
    def from_json(text: str | bytes) -> RankReport:
        """Returns the report of `to_json`."""
        fields = json.loads(text)
        beat = Beat.from_json(fields["beat"])
        states, stacks_of = (
            {int(rank): said for rank, said in fields[name].items()}
            for name in ("states", "stacks_of")
        )
        return RankReport(beat, fields["pid"], fields["stacks"], states, stacks_of)


@dataclass(frozen=True)
class HangPage:
    """What is known of a hang.

    Args:
        step: in which it is; 0: before the first.
        message: what was found.
        suspects: the ranks to look at first.
        beats: of all ranks, the latest.
        reports: of the ranks that answered.
    """

    step: int
    message: str
    suspects: Sequence[int]
    beats: Mapping[int, Beat]
    reports: Mapping[int, RankReport]
    time: float = field(default_factory=time.time)

    def write(self, folder: Path) -> Path:
        """Writes both files, whole or not at all; returns the page's path.

        Raises:
            OSError: they cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        page = folder / f"step_{self.step}.html"
        for file, text in ((page.with_suffix(".txt"), self.text()), (page, self.html())):
            partial = file.with_name(file.name + ".partial")
            partial.write_text(text, encoding="utf-8")
            partial.replace(file)
        return page

    @property
    def title(self) -> str:
        """What the page is about."""
        where = f"in step {self.step}" if self.step else "before the first step"
        return f"Ranks without progress {where}"

    def ranks(self) -> list[int]:
        """Returns all ranks, the suspected ones first."""
        return sorted(self.beats, key=lambda rank: (rank not in self.suspects, rank))

    def beat(self, rank: int) -> Beat:
        """Returns what is last known of a rank."""
        report = self.reports.get(rank)
        return self.beats[rank] if report is None else report.beat

    def state(self, rank: int) -> str:
        """Returns whether a rank makes progress, or answered."""
        if rank in self.reports:
            return f"no progress for {self.beat(rank).idle_s:.0f} s"
        if self.beats[rank].has_left:
            return "took leave"
        seen = [one.states[rank] for one in self.reports.values() if rank in one.states]
        said = seen[0] if seen else "nobody of its host answered"
        return f"did not answer: {said}"

    def call(self, rank: int) -> str:
        """Returns in which collective a rank is, as far as that is known."""
        beat = self.beat(rank)
        pending = [call.name for call in beat.latest if not call.is_over]
        if pending:
            return "; ".join(pending)
        if beat.wait is not None:
            return f"after {beat.wait.what!r}, #{beat.wait.number} of {beat.wait.group}"
        return "in torch.distributed, not recorded" if beat.is_in_collective else "none"

    def stacks(self) -> list[tuple[list[int], Mapping[str, str]]]:
        """Returns the stacks, ranks with the same ones together."""
        found: dict[str, tuple[list[int], Mapping[str, str]]] = {}
        for rank in self.ranks():
            stacks: Mapping[str, str] = {}
            if (report := self.reports.get(rank)) is not None:
                stacks = report.stacks
            else:
                got = [r.stacks_of[rank] for r in self.reports.values() if rank in r.stacks_of]
                if got:
                    stacks = {"all threads, by a signal": got[0]}
            key = json.dumps([rank in self.suspects, rank in self.reports, stacks])
            found.setdefault(key, ([], stacks))[0].append(rank)
        return list(found.values())

    def groups(self) -> dict[str, dict[str, list[int]]]:
        """Returns the process groups that ranks are not alike in: who is at which call."""
        found: dict[str, dict[str, list[int]]] = {}
        for rank in sorted(self.beats):
            for call in self.beat(rank).latest:
                if not call.is_p2p:
                    name = f"{call.group} ({ranks_text(call.ranks)})"
                    found.setdefault(name, {}).setdefault(_at(call), []).append(rank)
        return {name: calls for name, calls in found.items() if len(calls) > 1}

    def text(self) -> str:
        """Returns the text file."""
        lines = [self.title, _clock(self.time), "", self.message, "", INNERMOST, ""]
        for rank in self.ranks():
            beat, mark = self.beat(rank), " (suspected)" if rank in self.suspects else ""
            lines += [
                f"rank {rank} on host {beat.host}{mark}: {self.state(rank)}",
                f"  {beat.where}",
                f"  collective: {self.call(rank)}",
            ]
        for group, calls in self.groups().items():
            lines += ["", f"process group {group}"]
            lines += [f"  {ranks_text(ranks)}: {call}" for call, ranks in calls.items()]
        for ranks, stacks in self.stacks():
            lines += ["", f"=== stacks of {ranks_text(ranks)}"]
            lines += [] if stacks else ["  none: it did not answer"]
            for name, stack in stacks.items():
                lines += [f"--- {name}", stack]
        return "\n".join(lines) + "\n"

    def html(self) -> str:
        """Returns the page."""
        title, message = html.escape(self.title), html.escape(self.message)
        parts = [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{STYLE}</style></head><body>",
            f"<h1>{title}</h1><p>{_clock(self.time)}</p>",
            f'<p class="what">{message}</p>',
            "<h2>Ranks</h2>",
            *self._table(),
            *self._group_tables(),
            f"<h2>Stacks</h2><p>{INNERMOST}</p>",
        ]
        for ranks, stacks in self.stacks():
            is_open = " open" if ranks[0] in self.suspects else ""
            parts.append(f"<details{is_open}><summary>{html.escape(ranks_text(ranks))}</summary>")
            if not stacks:
                parts.append("<p>None: it did not answer.</p>")
            for number, (name, stack) in enumerate(stacks.items()):
                shown = f"<summary>{html.escape(name)}</summary><pre>{html.escape(stack)}</pre>"
                parts.append(f"<details{' open' * (number == 0)}>{shown}</details>")
            parts.append("</details>")
        return "\n".join([*parts, "</body></html>", ""])

    def _table(self) -> list[str]:
        heads = ("Rank", "Host", "State", "Where", "Collective")
        rows = []
        for rank in self.ranks():
            beat, is_suspect = self.beat(rank), rank in self.suspects
            cells = [beat.host, self.state(rank), beat.where, self.call(rank)]
            first = f'<td class="num">rank {rank}{", suspected" * is_suspect}</td>'
            rest = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
            rows.append(f"<tr{' class=suspect' * is_suspect}>{first}{rest}</tr>")
        return _table_of(heads, rows)

    def _group_tables(self) -> list[str]:
        groups = self.groups()
        if not groups:
            return []
        rows = [
            f"<tr><td>{html.escape(group)}</td><td>{html.escape(ranks_text(ranks))}</td>"
            f"<td>{html.escape(call)}</td></tr>"
            for group, calls in groups.items()
            for call, ranks in calls.items()
        ]
        title = "<h2>Process groups whose ranks are not at the same call</h2>"
        return [title, *_table_of(("Group", "Ranks", "Latest call"), rows)]


def newest_page(run: Path, since: float) -> tuple[Path, str] | None:
    """Returns the newest page of a run and its message; None: none was written after a time.

    Args:
        run: its folder.
        since: that time, seconds since the epoch.
    """
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):  # a folder that another host removes
        found = [(file.stat().st_mtime, file) for file in (run / HANGS).glob("step_*.html")]
        written, page = max(found, default=(0.0, run))
        if written > since:
            lines = page.with_suffix(".txt").read_text(encoding="utf-8").splitlines()
            return page, lines[MESSAGE_LINE]
    return None


def _table_of(heads: Sequence[str], rows: Sequence[str]) -> list[str]:
    head = "".join(f"<th>{name}</th>" for name in heads)
    opening = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>'
    return [opening, *rows, "</tbody></table></div>"]


def _at(call: Call) -> str:
    return f"#{call.number} {call.what}, {'over' if call.is_over else 'not over'}"


def _clock(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(when))
