"""`hybridrl check --cluster`: asks every node, and says what should be mended. No torch.

Owns the conversations with nodes and what is printed. Who waits for whom: this process waits for
each node's answer within a time limit; a node that does not answer is a finding, and the others go
on without it.
"""

from __future__ import annotations

import json
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from hybridrl.cli.cluster_facts import ClusterFacts, NodeFacts, PairFacts, SharedFacts
from hybridrl.cli.cluster_findings import Finding, judge
from hybridrl.cli.cluster_probe import PREFIX
from hybridrl.cli.cluster_reach import Channel, Reach, nodes_of
from hybridrl.cli.hostfile import any_port
from hybridrl.errors import UserError

ANSWER_S = 120.0  # imports of torch on a cold file system, and matrix products
FACTS_S = 420.0  # also where GPUs do not sum up, and the pair that fails is looked for
START_S = 60.0
CLOCKS = 5  # questions of the time; the quickest answer counts


class NodeLost(Exception):
    """A node does not answer; the text is what it said last."""


class Conversation:
    """Questions to the probe on one node.

    Args:
        node: its name.
        channel: the probe there.
        folder: where runs are written.
    """

    def __init__(self, node: str, channel: Channel, folder: Path) -> None:
        self.node, self._channel = node, channel
        self._lines: Queue[str | None] = Queue()
        self._said: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._tell({"node": node, "folder": str(folder.absolute())})

    def ask(self, question: str, limit_s: float = ANSWER_S, **given: Any) -> Any:
        """Returns the node's answer.

        Raises:
            NodeLost: there is none within the time, or the node failed to find one.
        """
        self._tell({"ask": question, **given})
        try:
            line = self._lines.get(timeout=limit_s)
        except Empty:
            raise NodeLost(f"no answer about '{question}' in {limit_s:g} s") from None
        if line is None:
            raise NodeLost(self._said[-1] if self._said else self._channel.outcome())
        reply = json.loads(line)
        if "fault" in reply:
            raise NodeLost(reply["fault"])
        return reply["answer"]

    def close(self) -> None:
        """Ends the probe."""
        self._channel.close()
        self._listener.join(1)  # it may not ask a cluster that was left

    def _tell(self, message: Mapping[str, Any]) -> None:
        self._channel.send(json.dumps(message))

    def _listen(self) -> None:
        try:
            for line in self._channel.lines():
                if line.startswith(PREFIX):
                    self._lines.put(line.removeprefix(PREFIX))
                elif line.strip():
                    self._said.append(line.strip())
        finally:
            self._lines.put(None)


def gather(names: Sequence[str], reach: Reach, folder: Path, measures: bool = True) -> ClusterFacts:
    """Returns what the nodes say of themselves, of their links and of the folder they share.

    Args:
        names: of the nodes.
        reach: how.
        folder: where runs are written.
        measures: whether products, copies and links are timed.
    """
    asked = [Conversation(name, reach(name), folder) for name in names]
    lost: dict[str, str] = {}

    def each(talk: Callable[[Conversation], Any]) -> dict[str, Any]:
        """Asks all nodes that are left at once; those that fail are lost."""
        there = [node for node in asked if node.node not in lost]

        def one(node: Conversation) -> Any:
            try:
                return talk(node)
            except NodeLost as error:
                lost[node.node] = str(error)
                return None

        with ThreadPoolExecutor(min(64, len(there) or 1)) as pool:
            answers = list(pool.map(one, there))
        pairs = zip(there, answers, strict=True)
        return {node.node: answer for node, answer in pairs if node.node not in lost}

    try:
        clocks = each(_clock)
        told = each(lambda node: node.ask("facts", FACTS_S, peers=list(names), measures=measures))
        nodes = [
            replace(
                NodeFacts.from_json(facts), clock_ahead_s=clocks[n][0], clock_error_s=clocks[n][1]
            )
            for n, facts in told.items()
        ]
        shared = _shared_folder(each, list(told))
        unreachable = dict(lost)
        pairs, all_reduce = _links(each, lost, nodes, measures)
    finally:
        with ThreadPoolExecutor(min(64, len(asked))) as pool:
            list(pool.map(Conversation.close, asked))
    return ClusterFacts(nodes, unreachable, pairs, all_reduce, shared)


Each = Callable[[Callable[[Conversation], Any]], dict[str, Any]]


def _clock(node: Conversation) -> tuple[float, float]:
    """Returns how far a node's clock is ahead, and the error of that: half of the quickest turn."""
    best = (0.0, float("inf"))
    node.ask("clock", START_S)  # the first answer comes when Python has started there
    for _ in range(CLOCKS):
        before = time.time()
        told = float(node.ask("clock"))
        after = time.time()
        if (after - before) / 2 < best[1]:
            best = (told - (before + after) / 2, (after - before) / 2)
    return best


def _shared_folder(each: Each, names: list[str]) -> list[SharedFacts]:
    """Every node writes a file and reads all; then each writes its file anew."""
    token = secrets.token_hex(4)
    wrote = each(lambda node: node.ask("write", token=token, version=1))
    able = [name for name in names if name in wrote and not wrote[name]["fault"]]
    seen = each(lambda node: node.ask("read", token=token, version=1, peers=able))
    both = [name for name in able if not any(name in one["unseen"] for one in seen.values())]
    each(lambda node: node.ask("write", token=token, version=2) if node.node in both else None)
    again = each(lambda node: node.ask("read", token=token, version=2, peers=both))
    found = []
    for name in wrote:
        facts = SharedFacts(**wrote[name])
        if name in again and name in able:
            differing = sorted({*seen[name]["differing"], *again[name]["differing"]})
            facts = replace(facts, unseen=seen[name]["unseen"], differing=differing)
        found.append(facts)
    return found


def _links(
    each: Each, lost: Mapping[str, str], nodes: Sequence[NodeFacts], measures: bool
) -> tuple[list[PairFacts], list[tuple[str, float | None, str]]]:
    """Connects every pair, and where all connect measures them."""
    places = {node.node: node.address for node in nodes if node.address}
    if len(nodes) > 1 and places:
        ports = each(
            lambda node: node.ask("listen", address=places[node.node]) if node.node in places else 0
        )
        targets = {name: (places[name], ports[name]) for name in places if ports.get(name)}

        def connect(node: Conversation) -> Any:
            peers = {name: to for name, to in targets.items() if name != node.node}
            return node.ask("connect", peers=peers)

        told = each(connect)
        failed = {
            tuple(sorted((name, peer))): f"from {name}: {fault}"
            for name, answers in told.items()
            for peer, fault in answers.items()
            if fault
        }
        if failed:
            pairs = [PairFacts(a, b, "tcp", None, fault) for (a, b), fault in failed.items()]
            return pairs, []
    if not measures or (len(nodes) > 1 and len(places) < len(nodes)):
        return [], []
    first, port = (places.get(nodes[0].node, "127.0.0.1") if nodes else ""), any_port()
    numbers = {node.node: index for index, node in enumerate(nodes)}
    facts = {node.node: node for node in nodes}

    def measured(node: Conversation) -> Any:
        own = facts[node.node]
        return node.ask(
            "links",
            index=numbers[node.node],
            count=len(nodes),
            address=first,
            port=port,
            interface=own.interface or "lo",
            num_gpus=own.num_torch_gpus,
        )

    before = dict(lost)
    answers = each(measured)
    names = [node.node for node in nodes]
    pairs = [
        PairFacts(names[a], names[b], backend, rate)
        for answer in answers.values()
        for a, b, backend, rate in answer["pairs"]
    ]
    pairs += [
        PairFacts(f"{name} gpu {a}", f"{name} gpu {b}", "copy", rate)
        for name, answer in answers.items()
        for a, b, rate in answer["local"]
    ]
    sums = [tuple(one) for answer in list(answers.values())[:1] for one in answer["all_reduce"]]
    failed_here = {name: text for name, text in lost.items() if name not in before}
    sums += [("gloo", None, f"{name}: {text}") for name, text in failed_here.items()]
    return pairs, sums  # type: ignore[return-value]


def report(facts: ClusterFacts, findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns the object of `--json`: ok, findings, facts."""
    found = [asdict(finding) for finding in findings]
    return {"ok": not findings, "findings": found, "facts": facts.as_json()}


def text(facts: ClusterFacts, findings: Sequence[Finding]) -> str:
    """Returns what people read: a line for each node and pair, then the findings."""
    lines = []
    for node in facts.nodes:
        gpus = f"{len(node.gpus)} x {node.gpus[0].name}" if node.gpus else "no GPU"
        link = f"{node.link_gbit_per_s:g} Gbit/s" if node.link_gbit_per_s else "rate not known"
        where = f"{node.interface or 'no interface to others'} ({link})"
        lines.append(
            f"node     {node.node}: hybridrl {node.hybridrl}, Python {node.python}, torch "
            f"{node.packages.get('torch')}, {gpus}, {where}, clock {node.clock_ahead_s:+.3f} s"
        )
    for pair in facts.pairs:
        rate = f"{pair.gb_per_s:.3g} GB/s" if pair.gb_per_s is not None else pair.fault
        lines.append(f"link     {pair.first} - {pair.second}: {pair.backend} {rate}")
    for backend, gb_per_s, fault in facts.all_reduce:
        lines.append(f"sum      all-reduce by {backend}: {fault or f'{gb_per_s:.3g} GB/s'}")
    for shared in facts.shared:
        if shared.write_mb_per_s is not None and shared.read_mb_per_s is not None:
            rates = f"{shared.write_mb_per_s:.0f} MB/s written, {shared.read_mb_per_s:.0f} read"
            lines.append(f"files    {shared.node}: {shared.folder}: {rates}")
    for finding in findings:
        lines.append(f"problem  {finding.where}: {finding.found}  [{finding.kind}]")
        lines.append(f"         fix: {finding.remedy}")
    lines.append("ok" if not findings else f"{len(findings)} problems")
    return "\n".join(lines)


def command(
    hostfile: Path | None, slurm: bool, ray: str | None, ssh: str, folder: Path, as_json: bool
) -> int:
    """Asks the nodes, prints what they say and what is to be mended; returns the exit code.

    Args:
        hostfile: of the nodes; None: others, or this host alone.
        slurm: whether the nodes are those of the allocation.
        ray: the cluster that has the nodes; None: others.
        ssh: the program for hosts, with its options.
        folder: where runs are written, on the file system that nodes share.
        as_json: whether one JSON object is printed instead of text.
    """
    with nodes_of(hostfile, slurm, ray, shlex.split(ssh)) as (names, reach, reached_by):
        facts = gather(names, reach, folder)
    findings = judge(facts, reached_by)
    print(json.dumps(report(facts, findings)) if as_json else text(facts, findings))
    return 1 if findings else 0


def refuse_without_cluster(hostfile: Path | None, slurm: bool, ray: str | None) -> None:
    """Raises a UserError for what means nothing without --cluster."""
    given = ("--hostfile", hostfile), ("--slurm", "given" if slurm else None), ("--ray", ray)
    for name, value in given:
        if value is not None:
            raise UserError(name, value, "nothing without --cluster", "Add it.")
