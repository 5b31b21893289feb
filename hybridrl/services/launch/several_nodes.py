"""Runs `hybridrl train` on several machines over ssh, Ray, Slurm or Kubernetes, without torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hybridrl.config.identity import run_folder
from hybridrl.config.rules import check, default_world_size
from hybridrl.config.schema import Config
from hybridrl.console import say
from hybridrl.errors import MISSING, ConfigError, UserError
from hybridrl.loop.preflight import model_violations, validate_training
from hybridrl.services.launch.connections import Host
from hybridrl.services.launch.hosts import SshCluster, any_port, ask_hosts, read_hostfile, shares
from hybridrl.services.launch.hosts_job import Cluster, HostsJob
from hybridrl.services.launch.local_ranks import PROGRAM, Share, launch_run, run_ranks
from hybridrl.services.launch.pinning import HUB_NAMES, fits_on, laid_out
from hybridrl.services.launch.rank_ends import conclude, has_lost_ranks
from hybridrl.services.launch.ray_cluster import RayCluster
from hybridrl.services.launch.restarts import ElasticLaunch
from hybridrl.services.launch.schedulers import (
    LOST,
    RESTARTS,
    JobKind,
    NodeJob,
    manifest,
    slurm_script,
)

SCRIPT = "launch.sbatch"  # file in the run folder


@dataclass(frozen=True)
class Run:
    """A training run to launch: the config, and the arguments of `hybridrl train`."""

    config: Config
    arguments: list[str]
    resume: Literal["newest", "previous"]

    @property
    def fits(self) -> Callable[[int], bool] | None:
        """Function that returns whether a number of ranks can train; None if restarts are off."""
        if not self.config.run.max_restarts:
            return None
        return lambda size: fits_on(self.config, size)


@dataclass(frozen=True)
class NodeSizes:
    """Resources that a job requests; None for the allocation's sizes or the current folder."""

    nodes: int | None
    slots: int | None
    has_gpus: bool = True
    stop_s: int = 120
    folder: str | None = None

    def job(self, run: Run, in_allocation: bool = False) -> NodeJob:
        nodes, slots = counts(self.nodes, self.slots, in_allocation)
        return NodeJob(
            name=run.config.run.name,
            num_nodes=nodes,
            slots=slots,
            has_gpus=self.has_gpus,
            arguments=run.arguments,
            folder=self.folder or os.getcwd(),
            environment={HUB_NAMES: os.environ[HUB_NAMES]},
            stop_s=self.stop_s,
            max_restarts=run.config.run.max_restarts,
        )


def counts(nodes: int | None, slots: int | None, in_allocation: bool = False) -> tuple[int, int]:
    """Returns the numbers of nodes and of ranks per node, from options or the allocation."""
    slurm = os.environ if in_allocation else {}
    each = slurm.get("SLURM_GPUS_ON_NODE")
    each = each or slurm.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    nodes = nodes or int(slurm.get("SLURM_JOB_NUM_NODES", 0))
    slots = slots or (int(each) if each and each.isdigit() else 0)
    for name, value in (("--nodes", nodes), ("--slots", slots)):
        if not value:
            raise UserError(name, MISSING, "an integer of at least 1", f"Add {name}.")
    return nodes, slots


def on_hosts(
    run: Run,
    hostfile: Path,
    world: int | None,
    ssh: Sequence[str],
    address: str | None,
    port: int | None,
) -> int:
    """Runs the ranks on hosts over ssh. Returns the exit code."""
    hosts = read_hostfile(hostfile)
    slots = sum(host.slots for host in hosts)
    world_size = world or slots
    least = max(world_size, default_world_size(run.config, 0))
    if slots < least:
        allowed = f"at least {least} slots for --world and the layout"
        remedy = "Add hosts or slots, or make the layout smaller."
        raise UserError("--hostfile", f"{slots} slots on {len(hosts)} hosts", allowed, remedy)
    first = address or hosts[0].name
    parts = shares(hosts, world_size, first, port or any_port())
    _validate(run, parts)
    ask_hosts(hosts[: len(parts)], ssh, first)
    return _run_on(run, SshCluster(hosts, ssh), hosts, parts, port)


def on_ray(run: Run, address: str, world: int | None, has_gpus: bool) -> int:
    """Runs the ranks on the nodes of a Ray cluster. Returns the exit code."""
    cluster = RayCluster(address, has_gpus)
    try:
        hosts = cluster.hosts(set())
        slots = sum(host.slots for host in hosts)
        has_gpus = cluster.unit == "GPU"
        world_size = world or (slots if has_gpus else default_world_size(run.config, 0))
        if not 0 < world_size <= slots:
            found = f"{slots} free {cluster.unit} slots in the cluster" + cluster.lost_nodes()
            allowed = f"{max(world_size, 1)} free slots" + ", each with a CPU" * has_gpus
            remedy = "Run `ray status`; add nodes, end other jobs, or set --world."
            raise UserError("--ray", found, allowed, remedy)
        parts = shares(hosts, world_size, hosts[0].name, any_port())
        _validate(run, parts)
        return _run_on(run, cluster, hosts, parts, None)
    finally:
        cluster.close()


def _validate(run: Run, parts: Sequence[Share]) -> None:
    world_size = parts[0].world_size
    laid, *_ = laid_out(run.config, world_size)  # rank 0 chooses the run's layout itself
    validate_training(laid, world_size, run.resume, [part.count for part in parts])


def _run_on(
    run: Run, cluster: Cluster, hosts: Sequence[Host], parts: Sequence[Share], port: int | None
) -> int:
    job = HostsJob(cluster, hosts, parts, port, run.fits)
    start = ElasticLaunch(run.config.run.max_restarts, job)
    size = parts[0].world_size
    return launch_run(["train", *run.arguments], size, run_folder(run.config), start)


def on_node(
    run: Run, node: int, nodes: int | None, slots: int | None, address: str | None, port: int | None
) -> int:
    """Runs one node's ranks; returns LOST if ranks were lost and may restart.

    Rank 0 locks the run folder, because no process controls all nodes.
    """
    num_nodes, each = counts(nodes, slots)
    if address is None or port is None or node >= num_nodes:
        found = f"--node {node} --nodes {num_nodes} --address {address} --port {port}"
        allowed = "a node below --nodes, and the address and port of node 0"
        raise UserError("--node", found, allowed, "Set all of these options.")
    parts = [Share(each, n * each, num_nodes * each, address, port) for n in range(num_nodes)]
    _validate(run, parts)
    logs = run_folder(run.config) / "logs"
    # After a restart, the newest checkpoint descends from the one that the user chose.
    starts = sum(int(os.environ.get(name, "0")) for name in (RESTARTS, "SLURM_RESTART_COUNT"))
    given = ["newest" if starts and one == "previous" else one for one in run.arguments]
    outcome = run_ranks([*PROGRAM, "train", *given], parts[node], logs)
    code = conclude(outcome, logs)
    is_elastic = run.config.run.max_restarts > 0 and code == 1 and not outcome.stopped_by
    return LOST if is_elastic and has_lost_ranks(outcome, logs) else code


def by_slurm(run: Run, sizes: NodeSizes, options: Sequence[str], dry_run: bool) -> int:
    """Submits the job, or runs it in the current allocation. Returns the exit code."""
    in_allocation = "SLURM_JOB_ID" in os.environ and not dry_run
    job = sizes.job(run, in_allocation)
    laid, *_ = laid_out(run.config, job.num_nodes * job.slots)
    _, violations = model_violations(laid, job.num_nodes * job.slots)
    if violations:
        raise ConfigError(violations)
    for option in options:
        if not re.fullmatch(r"--[a-z][a-z-]*(=.*)?", option):
            raise UserError("--sbatch", option, "--name or --name=value", "Correct the option.")
    folder = run_folder(run.config).absolute()
    output = None if in_allocation else folder / "logs" / "slurm-%j.log"
    text = slurm_script(job, [sys.executable, *PROGRAM], options, output)
    if dry_run:
        say(text.rstrip("\n"), sys.stdout)
        return 0
    try:
        if in_allocation:
            os.execvp("bash", ["bash", "-c", text])
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / SCRIPT).write_text(text, encoding="utf-8")
        return 1 if subprocess.run(["sbatch", folder / SCRIPT], check=False).returncode else 0
    except FileNotFoundError as error:
        allowed = "a host on which Slurm's sbatch is installed"
        remedy = "Run this on a login node, or print the script with --dry-run."
        raise UserError("--slurm", f"{error.filename} was not found", allowed, remedy) from error


def manifest_of(
    run: Run,
    sizes: NodeSizes,
    kind: JobKind,
    image: str | None,
    volumes: Sequence[str],
    namespace: str,
) -> str:
    job = sizes.job(run)
    violations = check(run.config, job.num_nodes * job.slots)  # the model may not be on this host
    if violations:
        raise ConfigError(violations)
    if image is None:
        raise UserError("--image", MISSING, "an image with hybridrl", "Add --image.")
    pairs = [volume.partition(":") for volume in volumes]
    for claim, _, path in pairs:
        if not claim or not path.startswith("/"):
            raise UserError("--volume", f"{claim}:{path}", "CLAIM:/PATH", "Correct the option.")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?", job.name):
        allowed = "at most 42 lower-case letters, digits and hyphens, for Kubernetes"
        raise UserError("run.name", job.name, allowed, "Choose another run.name.")
    return manifest(job, kind, image, [(claim, path) for claim, _, path in pairs], namespace)
