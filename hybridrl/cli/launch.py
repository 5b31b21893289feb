"""`hybridrl launch`: `hybridrl train` on several machines. No torch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from hybridrl.cli.options import ConfigFile, Overrides, Ssh, World
from hybridrl.config.load import load_config
from hybridrl.errors import UserError
from hybridrl.services.launch import several_nodes
from hybridrl.services.launch.pinning import with_commits
from hybridrl.services.launch.schedulers import JobKind

Hostfile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Start over ssh on the hosts listed in a file, one `name slots=N` per line.",
    ),
]
Slurm = Annotated[
    bool,
    typer.Option(
        "--slurm", help="Submit an sbatch script; inside an allocation, run on its nodes."
    ),
]
Kubernetes = Annotated[
    JobKind | None, typer.Option("--k8s", help="Print a manifest of this kind for kubectl.")
]
Ray = Annotated[
    str | None, typer.Option("--ray", metavar="ADDRESS", help="Start as actors on a Ray cluster.")
]
Node = Annotated[
    int | None,
    typer.Option(
        min=0, help="Start only this node's ranks; for launchers that start one process per node."
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(min=1, help="Number of nodes; default inside an allocation: all its nodes."),
]
Slots = Annotated[
    int | None, typer.Option(min=1, help="Number of ranks per node; not with --hostfile.")
]
Address = Annotated[
    str | None, typer.Option(help="Address of rank 0's host; default: the first host.")
]
Port = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Port of the job's store on rank 0's host.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="With --slurm: print the script without submitting it.")
]
Sbatch = Annotated[
    list[str] | None, typer.Option(metavar="--NAME=VALUE", help="Additional option for sbatch.")
]
HasGpus = Annotated[bool, typer.Option("--gpus/--no-gpus", help="Whether each rank has a GPU.")]
StopSeconds = Annotated[
    int,
    typer.Option(min=1, help="Seconds that the scheduler gives the job to save before killing it."),
]
Image = Annotated[str | None, typer.Option(help="With --k8s: container image.")]
Volume = Annotated[
    list[str] | None,
    typer.Option(metavar="CLAIM:PATH", help="With --k8s: volume to mount in the containers."),
]
Namespace = Annotated[str, typer.Option(help="With --k8s: Kubernetes namespace.")]
Folder = Annotated[
    str | None, typer.Option(help="Working directory of the command; default: the current one.")
]
Resume = Annotated[
    Literal["newest", "previous"],
    typer.Option(help="Checkpoint to continue from, as in `hybridrl train`."),
]


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
        raise UserError("launch", " ".join(named) or "no launcher", allowed, "Choose one of them.")
    given = overrides or []
    loaded = with_commits(load_config(config, given))
    run = several_nodes.Run(loaded, [str(config), *given, "--resume", resume], resume)
    if hostfile is not None:
        code = several_nodes.on_hosts(run, hostfile, world, shlex.split(ssh), address, port)
        raise typer.Exit(code)
    if ray is not None:
        raise typer.Exit(several_nodes.on_ray(run, ray, world, gpus))
    if world is not None:
        raise UserError("--world", world, f"no value with {named[0]}", "Set --nodes and --slots.")
    if node is not None:
        raise typer.Exit(several_nodes.on_node(run, node, nodes, slots, address, port))
    sizes = several_nodes.NodeSizes(nodes, slots, gpus, stop_s, folder)
    if k8s is not None:
        typer.echo(
            several_nodes.manifest_of(run, sizes, k8s, image, volume or [], namespace), nl=False
        )
    else:
        raise typer.Exit(several_nodes.by_slurm(run, sizes, sbatch or [], dry_run))
