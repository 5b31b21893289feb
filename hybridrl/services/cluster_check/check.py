"""Runs `hybridrl check --cluster`: queries all nodes, and reports problems, without torch.

One command per question (probe.py) has up to ANSWER_S to reply; no reply is a finding.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hybridrl.errors import UserError, error_text
from hybridrl.services.cluster_check.findings import ClusterFacts, Finding, PairFacts, judge
from hybridrl.services.cluster_check.probe import PREFIX, NodeFacts
from hybridrl.services.launch.hosts import any_port, forwarded, read_hostfile, remote
from hybridrl.services.launch.ray_cluster import alive_nodes, connect, dead_nodes

PROGRAM = (sys.executable, "-m", "hybridrl.services.cluster_check.probe")
# If an all-reduce over a node's GPUs fails, this includes the time to find the failing pair.
ANSWER_S = 420.0
# Variables for probes on other nodes; no API keys, because command lines are public.
FORWARDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "NCCL_", "GLOO_", "HYBRIDRL_CACHE")


class NodeLost(Exception):
    """A node does not reply. The message is the last line of the node's output."""


# Function that asks a node a question, and returns the node's reply or raises NodeLost.
Reach = Callable[[str, Mapping[str, Any]], dict[str, Any]]


def ask(command: Sequence[str], question: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the probe. Returns its reply with `ahead_s`: seconds that the node's clock is ahead.

    Raises:
        NodeLost: The node does not reply.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",  # a login banner may have any encoding
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )
    except OSError as error:
        allowed = "a program that runs commands on hosts"
        remedy = f"{error.strerror}: check the path of the program."
        raise UserError("--ssh", command[0], allowed, remedy) from error
    assert process.stdin is not None and process.stdout is not None
    timer = threading.Timer(ANSWER_S, process.kill)
    timer.start()
    reply, last = None, ""
    with suppress(OSError):  # the process has ended; its last line contains the reason
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.close()
    for line in process.stdout:
        if line.startswith(PREFIX):
            reply = json.loads(line.removeprefix(PREFIX))
            reply["ahead_s"] = reply["time"] - time.time()
        last = line.strip() or last
    code, is_late = process.wait(), not timer.is_alive()
    timer.cancel()
    if reply is None:
        late = f"no reply within {ANSWER_S:g} s"
        raise NodeLost(late if is_late else last or f"exit code {code}")
    return reply


def gather(names: Sequence[str], reach: Reach, folder: Path) -> ClusterFacts:
    """Collects facts about the nodes, their links and the folder in which runs are written."""
    lost: dict[str, str] = {}

    def all_of(nodes: Sequence[str], question: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
        def one(node: str) -> dict[str, Any] | None:
            try:
                reply = reach(node, question(node))
            except NodeLost as error:
                reply = {"fault": str(error)}
            if "fault" in reply:
                lost[node] = reply["fault"]
                return None
            return reply

        with ThreadPoolExecutor(min(64, len(nodes) or 1)) as pool:
            replies = list(pool.map(one, nodes))
        return {node: reply for node, reply in zip(nodes, replies, strict=True) if reply}

    token, port = secrets.token_hex(4), any_port()
    shared = {"folder": str(folder.absolute()), "token": token}

    def facts(node: str) -> dict[str, Any]:
        peers = [name for name in names if name != node]
        return {"ask": "facts", "node": node, "peers": peers, "port": port, **shared}

    replies = all_of(names, facts)
    nodes = [
        replace(NodeFacts.from_json(reply["answer"]), clock_ahead_s=reply["ahead_s"])
        for reply in replies.values()
    ]
    unreachable = dict(lost)
    writers = [node.node for node in nodes if not node.folder_fault]
    is_connected = all(
        node.address and not set(node.unconnected).intersection(replies) for node in nodes
    )
    has_links = len(nodes) > 1 and is_connected and len(writers) == len(nodes)
    by_name = {node.node: node for node in nodes}

    def meet(name: str) -> dict[str, Any]:
        return {
            "ask": "meet",
            "names": writers,
            "rank": writers.index(name),
            "address": by_name[writers[0]].address,
            "port": port,
            "interface": by_name[name].interface,
            "has_gpus": by_name[name].num_torch_gpus > 0,
            "has_links": has_links,
            **shared,
        }

    met = {node: reply["answer"] for node, reply in all_of(writers, meet).items()}
    faults = [("gloo", None, f"{node}: {lost[node]}") for node in writers if node in lost]
    all_of(writers, lambda node: {"ask": "clean", "node": node, **shared})
    return ClusterFacts(
        folder=str(folder),
        nodes=nodes,
        unreachable=unreachable,
        pairs=[
            PairFacts(writers[first], writers[second], backend, rate)
            for answer in met.values()
            for first, second, backend, rate in answer["pairs"]
        ],
        all_reduce=[*faults, *(tuple(s) for a in [*met.values()][:1] for s in a["all_reduce"])],
        unseen={node: answer["unseen"] for node, answer in met.items()},
    )


def text(facts: ClusterFacts, findings: Sequence[Finding]) -> str:
    """Returns the report as text: one line per node and per pair, followed by the findings."""
    lines = []
    for node in facts.nodes:
        has = {name: node.versions.get(name) for name in ("hybridrl", "python", "torch", "GPUs")}
        what = ", ".join(f"{name} {value or 'none'}" for name, value in has.items())
        where = node.interface or "no interface to others"
        lines.append(f"node     {node.node}: {what}, {where}, clock {node.clock_ahead_s:+.2f} s")
    for pair in facts.pairs:
        rate = f"{pair.backend} {pair.gb_per_s:.3g} GB/s"
        lines.append(f"link     {pair.first} - {pair.second}: {rate}")
    for backend, gb_per_s, fault in facts.all_reduce:
        lines.append(f"sum      all-reduce by {backend}: {fault or f'{gb_per_s:.3g} GB/s'}")
    for finding in findings:
        lines.append(f"problem  {finding.where}: {finding.found}  [{finding.kind}]")
        lines.append(f"         fix: {finding.remedy}")
    return "\n".join([*lines, f"{len(findings)} problems" if findings else "ok"])


def check_cluster(
    hostfile: Path | None, slurm: bool, ray: str | None, ssh: str, folder: Path, as_json: bool
) -> int:
    """Queries the nodes, prints the facts and findings, and returns the exit code.

    The nodes are those of a file, the current Slurm allocation, a Ray address, or this one. Runs
    are written in `folder`, which the nodes share.
    """
    given = {"--hostfile": hostfile, "--slurm": slurm or None, "--ray": ray}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise UserError("check", " and ".join(named), "one of them", "Remove the other options.")
    reached_by = "ssh"
    if hostfile is not None:
        reached_by = ssh
        names = [host.name for host in read_hostfile(hostfile)]
        facts = gather(names, _by_ssh(shlex.split(ssh)), folder)
    elif slurm:
        reached_by = "srun --overlap --nodelist"
        facts = gather(_allocated(), _by_srun, folder)
    elif ray is not None:
        with _ray_nodes(ray) as (names, reach):
            facts = gather(names, reach, folder)
    else:
        facts = gather([os.uname().nodename], lambda node, question: ask(PROGRAM, question), folder)
    findings = judge(facts, reached_by)
    found = [asdict(finding) for finding in findings]
    report = {"ok": not findings, "findings": found, "facts": asdict(facts)}
    print(json.dumps(report) if as_json else text(facts, findings))
    return 1 if findings else 0


def _by_ssh(ssh: Sequence[str]) -> Reach:
    variables = [f"{name}={value}" for name, value in _variables().items()]
    return lambda node, question: ask(remote(ssh, node, ["env", *variables, *PROGRAM]), question)


def _by_srun(node: str, question: Mapping[str, Any]) -> dict[str, Any]:
    srun = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
    return ask([*srun, *PROGRAM], question)


def _variables() -> dict[str, str]:
    return {name: value for name, value in forwarded().items() if name.startswith(FORWARDED)}


@contextmanager
def _ray_nodes(address: str) -> Iterator[tuple[list[str], Reach]]:
    """Nodes that Ray has lost are included, but do not reply. Tasks reserve no resources."""
    ray = connect(address)
    try:
        alive = alive_nodes(ray.nodes())
        lost = dead_nodes(ray.nodes())
        command = ["env", *(f"{name}={value}" for name, value in _variables().items()), *PROGRAM]
        folder = os.getcwd()

        def on_node(question: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
            os.chdir(folder)
            return ask(command, question), time.time()

        def reach(node: str, question: Mapping[str, Any]) -> dict[str, Any]:
            if node in lost:
                raise NodeLost(f"Ray lost this node: {lost[node]}")
            strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            where = strategy(alive[node], soft=False)
            task = ray.remote(on_node).options(
                num_cpus=0, num_gpus=0, max_retries=0, scheduling_strategy=where
            )
            try:
                reply, there = ray.get(task.remote(question), timeout=ANSWER_S)
            except ray.exceptions.RayTaskError as error:
                raise NodeLost(error_text(error.cause)) from error
            except ray.exceptions.RayError as error:
                raise NodeLost(error_text(error)) from error
            return {**reply, "ahead_s": there - time.time()}

        yield sorted({*alive, *lost}), reach
    finally:
        ray.shutdown()


def _allocated() -> list[str]:
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        remedy = "Run the command under salloc or in a job."
        raise UserError("--slurm", "no allocation", "a Slurm allocation", remedy)
    shown = subprocess.run(
        ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
    )
    return shown.stdout.split()
