"""`hybridrl launch`: `hybridrl train` on several machines. No torch.

Owns the command's options and which launcher they mean. The launchers start ranks as `hybridrl
train` does on one machine, with the same environment variables, log files and exit codes; of one
node alone LOST is another.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from hybridrl.cli.elastic import ElasticLaunch
from hybridrl.cli.hostfile import (
    Host,
    any_port,
    ask_hosts,
    read_hostfile,
    shares,
)
from hybridrl.cli.hosts_job import HostsJob
from hybridrl.cli.launch import Share, launch_run, run_ranks
from hybridrl.cli.options import ConfigFile, Overrides, World
from hybridrl.cli.pinning import HUB_NAMES, fits_on, laid_out, with_commits
from hybridrl.cli.rank_ends import conclude, has_lost_ranks
from hybridrl.cli.ray_launch import RayJob, counts
from hybridrl.cli.schedulers import LOST, RESTARTS, JobKind, NodeJob, manifest, slurm_script
from hybridrl.config.identity import run_folder
from hybridrl.config.load import load_config
from hybridrl.config.rules import check, default_world_size
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, UserError
from hybridrl.loop.preflight import model_violations, validate_training

PROGRAM = (sys.executable, "-m", "hybridrl.cli.main")  # in environments that nodes share
SCRIPT = "launch.sbatch"  # in the run folder

Hostfile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Start by ssh on hosts, one a line: name slots=N."),
]
Slurm = Annotated[
    bool,
    typer.Option("--slurm", help="Submit an sbatch file; in an allocation run there."),
]
Kubernetes = Annotated[
    JobKind | None, typer.Option("--k8s", help="Print a manifest of this kind for kubectl.")
]
Ray = Annotated[
    str | None, typer.Option("--ray", metavar="ADDRESS", help="Start as actors of a Ray cluster.")
]
Node = Annotated[
    int | None,
    typer.Option(min=0, help="Start this node's ranks; for other launchers, once a node."),
]
Nodes = Annotated[int | None, typer.Option(min=1, help="Nodes; in an allocation: all of it.")]
Slots = Annotated[int | None, typer.Option(min=1, help="Ranks of each node; not for --hostfile.")]
Ssh = Annotated[str, typer.Option(help="The program for --hostfile, with its options.")]
Address = Annotated[
    str | None, typer.Option(help="Rank 0's host as others know it; default: the first host.")
]
Port = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Of the job's store on rank 0's host.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="With --slurm: only print the file.")]
Sbatch = Annotated[
    list[str] | None, typer.Option(metavar="--NAME=VALUE", help="A further option of sbatch.")
]
HasGpus = Annotated[bool, typer.Option("--gpus/--no-gpus", help="Whether each rank has a GPU.")]
StopSeconds = Annotated[
    int, typer.Option(min=1, help="Seconds to save in before a scheduler ends the job.")
]
Image = Annotated[str | None, typer.Option(help="Of the containers, for --k8s.")]
Volume = Annotated[
    list[str] | None, typer.Option(metavar="CLAIM:PATH", help="Mounted in the containers.")
]
Namespace = Annotated[str, typer.Option(help="In Kubernetes.")]
Folder = Annotated[
    str | None, typer.Option(help="Where the command runs in containers; default: as here.")
]
Resume = Annotated[Literal["newest", "previous"], typer.Option(help="As of hybridrl train.")]

# Of `check --cluster`.
OfCluster = Annotated[
    bool, typer.Option("--cluster", help="Check nodes, the links between them and shared files.")
]
NodesFile = Annotated[
    Path | None, typer.Option("--hostfile", metavar="FILE", help="With --cluster: its hosts.")
]
InAllocation = Annotated[
    bool, typer.Option("--slurm", help="With --cluster: the nodes of this allocation.")
]
OfRay = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", help="With --cluster: the nodes of a Ray cluster."),
]
RunsFolder = Annotated[
    Path, typer.Option(metavar="DIR", help="With --cluster: where runs are written.")
]


@dataclass(frozen=True)
class _Run:
    """What is to be trained.

    Args:
        config: of the run.
        arguments: CONFIG, overrides and options of `hybridrl train`.
        resume: which checkpoint the run goes on from.
    """

    config: Config
    arguments: list[str]
    resume: Literal["newest", "previous"]

    @property
    def fits(self) -> Callable[[int], bool] | None:
        """Whether so many ranks can train it; None where it is started once."""
        if not self.config.run.max_restarts:
            return None
        return lambda size: fits_on(self.config, size)


def launch_command(
    config: ConfigFile,
    overrides: Overrides = None,
    hostfile: Hostfile = None,
    slurm: Slurm = False,
    k8s: Kubernetes = None,
    ray: Ray = None,
    node: Node = None,
    world: World = None,
    nodes: Nodes = None,
    slots: Slots = None,
    ssh: Ssh = "ssh",
    address: Address = None,
    port: Port = None,
    dry_run: DryRun = False,
    sbatch: Sbatch = None,
    gpus: HasGpus = True,
    stop_s: StopSeconds = 120,
    image: Image = None,
    volume: Volume = None,
    namespace: Namespace = "default",
    folder: Folder = None,
    resume: Resume = "newest",
) -> None:
    """Train on several machines: by ssh, Slurm, Kubernetes or Ray."""
    launchers: dict[str, object] = {"--hostfile": hostfile, "--slurm": slurm or None, "--k8s": k8s}
    launchers |= {"--ray": ray, "--node": node}
    named = [name for name, value in launchers.items() if value is not None]
    if len(named) != 1:
        allowed = "one of " + ", ".join(launchers)
        raise UserError("launch", " ".join(named) or "no launcher", allowed, "Name one.")
    given = overrides or []
    loaded = with_commits(load_config(config, given))
    run = _Run(loaded, [str(config), *given, "--resume", resume], resume)
    if hostfile is not None:
        raise typer.Exit(_on_hosts(run, hostfile, world, shlex.split(ssh), address, port))
    if ray is not None:
        raise typer.Exit(_on_ray(run, ray, world, gpus))
    if world is not None:
        raise UserError("--world", world, f"nothing with {named[0]}", "Give --nodes and --slots.")
    in_allocation = slurm and "SLURM_JOB_ID" in os.environ and not dry_run
    nodes, slots = _sizes(nodes, slots, in_allocation)
    if node is not None:
        raise typer.Exit(_on_node(run, node, nodes, slots, address, port))
    environment = {HUB_NAMES: os.environ[HUB_NAMES]}
    where, name = folder or os.getcwd(), loaded.run.name
    restarts = run.config.run.max_restarts
    job = NodeJob(name, nodes, slots, gpus, run.arguments, where, environment, stop_s, restarts)
    if k8s is not None:
        typer.echo(_manifest(run, job, k8s, image, volume or [], namespace), nl=False)
    else:
        raise typer.Exit(_by_slurm(run, job, sbatch or [], in_allocation, dry_run))


def _sizes(nodes: int | None, slots: int | None, in_allocation: bool) -> tuple[int, int]:
    """Returns nodes and ranks of each, which an allocation says where the command does not."""
    told = os.environ if in_allocation else {}
    each = told.get("SLURM_GPUS_ON_NODE") or told.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    nodes = nodes or int(told.get("SLURM_JOB_NUM_NODES", 0))
    slots = slots or (int(each) if each and each.isdigit() else 0)
    for name, value in (("--nodes", nodes), ("--slots", slots)):
        if not value:
            raise UserError(name, "nothing", "an integer from 1", f"Add {name}.")
    return nodes, slots


def _on_hosts(
    run: _Run,
    hostfile: Path,
    world: int | None,
    ssh: Sequence[str],
    address: str | None,
    port: int | None,
) -> int:
    hosts = read_hostfile(hostfile)
    world_size = world or sum(host.slots for host in hosts)
    _check_slots(hosts, world_size, run.config)
    first = address or hosts[0].name
    parts = shares(hosts, world_size, first, port or any_port())
    used = hosts[: len(parts)]
    laid, _ = laid_out(run.config, world_size)  # the run's own is of rank 0
    validate_training(laid, world_size, run.resume, [part.count for part in parts])
    ask_hosts(used, ssh, first)

    job = HostsJob(hosts, parts, ssh, port, run.fits)
    start = ElasticLaunch(run.config.run.max_restarts, job)
    return launch_run(["train", *run.arguments], world_size, run_folder(run.config), start)


def _on_ray(run: _Run, address: str, world: int | None, has_gpus: bool) -> int:
    job = RayJob(address, world, has_gpus, default_world_size(run.config, 0), run.fits)
    try:
        laid, _ = laid_out(run.config, job.world_size)  # the run's own is of rank 0
        validate_training(laid, job.world_size, run.resume, counts(job.places))
        start = ElasticLaunch(run.config.run.max_restarts, job)
        arguments = ["train", *run.arguments]
        return launch_run(arguments, job.world_size, run_folder(run.config), start)
    finally:
        job.close()


def _check_slots(hosts: list[Host], world_size: int, config: Config) -> None:
    """Raises a UserError where the hosts have fewer slots than there are ranks, or than the
    smallest layout has.
    """
    slots = sum(host.slots for host in hosts)
    least = max(world_size, default_world_size(config, 0))
    if slots < least:
        raise UserError(
            "--hostfile",
            f"{slots} slots on {len(hosts)} hosts",
            f"{least} slots or more, as --world and the layout ask for",
            "Add hosts or slots, or make the layout smaller.",
        )


def _on_node(
    run: _Run, node: int, nodes: int, slots: int, address: str | None, port: int | None
) -> int:
    """Starts one node's ranks; returns LOST where they may be started again. Rank 0 takes the run
    folder, since no process stands above all.
    """
    if address is None or port is None or node >= nodes:
        found = f"--node {node} --nodes {nodes} --address {address} --port {port}"
        allowed = "a node below --nodes, and the address and port of node 0"
        raise UserError("--node", found, allowed, "Give all of them.")
    laid, _ = laid_out(run.config, nodes * slots)
    validate_training(laid, nodes * slots, run.resume, [slots] * nodes)
    logs = run_folder(run.config) / "logs"
    share = Share(slots, node * slots, nodes * slots, address, port)
    # The checkpoint that the user went back to is the newest once a step was saved.
    starts = sum(int(os.environ.get(name, "0")) for name in (RESTARTS, "SLURM_RESTART_COUNT"))
    given = ["newest" if starts and one == "previous" else one for one in run.arguments]
    outcome = run_ranks(["-m", "hybridrl.cli.main", "train", *given], share, logs)
    code = conclude(outcome, logs)
    is_elastic = run.config.run.max_restarts > 0 and code == 1 and not outcome.stopped_by
    return LOST if is_elastic and has_lost_ranks(outcome, logs) else code


def _by_slurm(
    run: _Run, job: NodeJob, options: Sequence[str], in_allocation: bool, dry_run: bool
) -> int:
    """Submits the job, or runs it in this allocation; returns the exit code."""
    laid, _ = laid_out(run.config, job.num_nodes * job.slots)
    _, violations = model_violations(laid, job.num_nodes * job.slots)
    if violations:
        raise ConfigError(violations)
    for option in options:
        if not re.fullmatch(r"--[a-z][a-z-]*(=.*)?", option):
            raise UserError("--sbatch", option, "--name or --name=value", "Correct it.")
    folder = run_folder(run.config).absolute()
    output = None if in_allocation else folder / "logs" / "slurm-%j.log"
    text = slurm_script(job, PROGRAM, options, output)
    if dry_run:
        typer.echo(text, nl=False)
        return 0
    try:
        if in_allocation:
            os.execvp("bash", ["bash", "-c", text])
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / SCRIPT).write_text(text, encoding="utf-8")
        return 1 if subprocess.run(["sbatch", folder / SCRIPT], check=False).returncode else 0
    except FileNotFoundError as error:
        raise UserError(
            "--slurm", f"no {error.filename}", "a host that submits Slurm jobs", "Use --dry-run."
        ) from error


def _manifest(
    run: _Run,
    job: NodeJob,
    kind: JobKind,
    image: str | None,
    volumes: Sequence[str],
    namespace: str,
) -> str:
    violations = check(run.config, job.num_nodes * job.slots)  # the model may lie elsewhere
    if violations:
        raise ConfigError(violations)
    if image is None:
        raise UserError("--image", "nothing", "an image with hybridrl", "Add --image.")
    pairs = [volume.partition(":") for volume in volumes]
    for claim, _, path in pairs:
        if not claim or not path.startswith("/"):
            raise UserError("--volume", f"{claim}:{path}", "CLAIM:/PATH", "Correct it.")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?", job.name):
        allowed = "small letters, digits and hyphens, 42 at most, for Kubernetes"
        raise UserError("run.name", job.name, allowed, "Choose another run.name.")
    return manifest(job, kind, image, [(claim, path) for claim, _, path in pairs], namespace)
