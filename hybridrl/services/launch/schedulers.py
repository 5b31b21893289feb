"""Renders an sbatch file, a JobSet or a PyTorchJob from templates/. Does not import torch.

Each file runs `hybridrl launch --node K` on every node. A restarted job continues from its newest
checkpoint. In a Slurm job, lost ranks are restarted up to `run.max_restarts` times.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

JobKind = Literal["jobset", "pytorchjob"]
PORT = "29500"  # Port of the job's store; always free, because each pod has an address.
MAX_RESTARTS = 3  # Maximum number of restarts of a Kubernetes job if run.max_restarts is 0.
# Exit code of a node whose ranks were lost and may restart. LOST is larger than all other exit
# codes, because srun returns the largest code, and LOST does not denote a signal.
LOST = 200
RESTARTS = "HYBRIDRL_RESTARTS"  # number of times that the job has restarted


@dataclass(frozen=True)
class NodeJob:
    """`hybridrl launch ARGUMENTS` on nodes of `slots` ranks, with `stop_s` seconds to save."""

    name: str
    num_nodes: int
    slots: int
    has_gpus: bool
    arguments: Sequence[str]
    folder: str
    environment: dict[str, str]
    stop_s: int
    max_restarts: int = 0

    def node_command(self, program: Sequence[str], node: str, address: str, port: str) -> str:
        """Returns the shell command for a node. `node`, `address` and `port` are shell words."""
        sizes = f"--nodes {self.num_nodes} --slots {self.slots}"
        place = f"--node {node} {sizes} --address {address} --port {port}"
        return f"{shlex.join(program)} launch {place} {shlex.join(self.arguments)}"


def slurm_script(
    job: NodeJob, program: Sequence[str], options: Sequence[str], output: Path | None
) -> str:
    """Returns the text of an sbatch file, which also works as a script inside an allocation.

    `program` runs `hybridrl`. `options` override those of the template. `output` is the file for
    the job's output, with Slurm's patterns; None for Slurm's default.
    """
    gpus = {"gpus-per-node": job.slots} if job.has_gpus else {}
    given = {
        "job-name": job.name,
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        **gpus,
        "signal": f"B:USR1@{job.stop_s}",
        "open-mode": "append",
        **({"output": output} if output else {}),
    }
    named = {option.partition("=")[0].removeprefix("--") for option in options}
    kept = [f"--{name}={value}" for name, value in given.items() if name not in named]
    node = job.node_command(program, '"$SLURM_NODEID"', '"$1"', '"$2"')
    return _rendered(
        "job.sbatch",
        job=job,
        options=[*kept, "--requeue", *options],
        exports=[f"{name}={shlex.quote(value)}" for name, value in job.environment.items()],
        folder=shlex.quote(job.folder),
        node_command=shlex.quote(f"exec {node}"),
        restarts_variable=RESTARTS,
        lost=LOST,
    )


def manifest(
    job: NodeJob, kind: JobKind, image: str, volumes: Sequence[tuple[str, str]], namespace: str
) -> str:
    """Returns a Kubernetes manifest as YAML. `volumes` are pairs of a claim and its mount path."""
    program = ["hybridrl"]
    if kind == "jobset":
        first = f"{job.name}-node-0-0.{job.name}"  # the first pod, in JobSet's headless service
        script = "exec " + job.node_command(program, '"$JOB_COMPLETION_INDEX"', first, PORT)
    else:
        # The operator's variables number pods, which torch would read as ranks.
        node = job.node_command(program, '"$node"', '"$MASTER_ADDR"', '"$MASTER_PORT"')
        script = f'node="$RANK"; unset RANK WORLD_SIZE; exec {node}'
    return _rendered(
        f"{kind}.yaml",
        job=job,
        image=image,
        volumes=volumes,
        namespace=namespace,
        script=script,
        max_restarts=job.max_restarts or MAX_RESTARTS,
    )


def _rendered(name: str, **values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    templates = Environment(
        loader=loader,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return templates.get_template(name + ".j2").render(**values)
