"""What schedulers are given: an sbatch file, a JobSet or a PyTorchJob. No torch.

Each runs `hybridrl launch --node K` once on every node, which starts the node's ranks. A job goes
on from its newest checkpoint when the scheduler starts it again. Within a Slurm job ranks that were
lost are started again `run.max_restarts` times, as many as before, while its nodes are there.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

JobKind = Literal["jobset", "pytorchjob"]
FIRST_PORT, NUM_PORTS = 10_000, 20_000  # of Slurm jobs: by the job's number
PORT = 29_500  # in Kubernetes each pod has an address of its own
MAX_RESTARTS = 3  # of a Kubernetes job, where the run says nothing
MISTAKE = 2  # the exit code after which a restart would be in vain
# The exit code of a node whose ranks were lost and may be started again: above all others, since
# srun returns the largest, and no signal's.
LOST = 200
RESTARTS = "HYBRIDRL_RESTARTS"  # tells ranks how often the job has started them again


@dataclass(frozen=True)
class NodeJob:
    """A job that runs one command on each of several nodes.

    Args:
        name: of the job.
        num_nodes: nodes.
        slots: ranks of each.
        has_gpus: whether each rank has a GPU.
        arguments: CONFIG, overrides and options of `hybridrl launch`.
        folder: where the command runs.
        environment: variables of the command.
        stop_s: seconds that the ranks have to save before the job ends.
        max_restarts: how often ranks that were lost are started again.
    """

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
        """Returns the shell command of a node; the last three are shell words."""
        sizes = f"--nodes {self.num_nodes} --slots {self.slots}"
        place = f"--node {node} {sizes} --address {address} --port {port}"
        return f"{shlex.join(program)} launch {place} {shlex.join(self.arguments)}"


def slurm_script(
    job: NodeJob, program: Sequence[str], options: Sequence[str], output: Path | None
) -> str:
    """Returns an sbatch file, whose text also runs inside an allocation.

    Slurm sends SIGUSR1 `stop_s` before the time limit: the ranks save and end, and the job is put
    into the queue again.

    Args:
        job: what to run.
        program: that is `hybridrl`.
        options: further options of sbatch, as --name=value, in place of those written here.
        output: the file of the job's output, with Slurm's patterns; None: Slurm's default.
    """
    given = {
        "job-name": job.name,
        "nodes": str(job.num_nodes),
        "ntasks-per-node": "1",
        **({"gpus-per-node": str(job.slots)} if job.has_gpus else {}),
        "signal": f"B:USR1@{job.stop_s}",
        "open-mode": "append",
        **({"output": str(output)} if output else {}),
    }
    told = {option.partition("=")[0].removeprefix("--") for option in options}
    kept = {name: value for name, value in given.items() if name not in told}
    lines = [f"#SBATCH --{name}={value}" for name, value in kept.items()]
    lines += ["#SBATCH --requeue", *(f"#SBATCH {option}" for option in options)]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "",
            f"cd {shlex.quote(job.folder)} || exit 1",
            *exports,
            'address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"port=$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))",
            "is_stopping= step=",
            'trap \'is_stopping=1; [ -z "$step" ] || kill -USR1 "$step"\' USR1',
            f"for ((restarts = 0; restarts <= {job.max_restarts}; restarts++)); do",
            *(f"  {line}" for line in _slurm_step(job, program)),
            "done",
            'if [ -n "$is_stopping" ] && [ "$code" -ne 0 ]; then',
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
            "",
        ]
    )


def _slurm_step(job: NodeJob, program: Sequence[str]) -> list[str]:
    """Returns the lines of one start; they leave the loop around them where no other follows."""
    node = job.node_command(program, '"$SLURM_NODEID"', '"$1"', '"$2"')
    step = f"srun --nodes={job.num_nodes} --ntasks={job.num_nodes} --ntasks-per-node=1"
    said = f"hybridrl: restart $restarts of {job.max_restarts} (run.max_restarts): the ranks go on"
    return [
        f'[ "$restarts" -eq 0 ] || echo "{said}" >&2',
        f"export {RESTARTS}=$restarts",
        f"{step} --kill-on-bad-exit=1 bash -c {shlex.quote('exec ' + node)} \\",
        '  node "$address" "$((port + restarts))" &',
        "step=$!",
        '[ -z "$is_stopping" ] || kill -USR1 "$step"  # it came before there was a step',
        "code=0",
        'wait "$step" || code=$?',
        '# A signal ends "wait", not the step.',
        'while kill -0 "$step" 2>/dev/null; do code=0; wait "$step" || code=$?; done',
        "step=",
        f'[ -z "$is_stopping" ] && [ "$code" -eq {LOST} ] || break',
    ]


def manifest(
    job: NodeJob, kind: JobKind, image: str, volumes: Sequence[tuple[str, str]], namespace: str
) -> str:
    """Returns a Kubernetes manifest as YAML.

    Args:
        job: what to run.
        kind: of the manifest.
        image: of the containers, with `hybridrl` on its PATH.
        volumes: claims of volumes with the paths they are mounted at.
        namespace: of the job.
    """
    meta = {"name": job.name, "namespace": namespace}
    if kind == "jobset":
        found = _jobset(job, image, volumes, meta)
    else:
        found = _pytorchjob(job, image, volumes, meta)
    return str(yaml.safe_dump(found, sort_keys=False))


def _jobset(
    job: NodeJob, image: str, volumes: Sequence[tuple[str, str]], meta: dict[str, str]
) -> dict[str, Any]:
    address = f"{job.name}-node-0-0.{job.name}"  # of the first pod, by JobSet's headless service
    script = "exec " + job.node_command(["hybridrl"], '"$JOB_COMPLETION_INDEX"', address, str(PORT))
    rule = {"containerName": "hybridrl", "operator": "In", "values": [MISTAKE]}
    pods = {
        "parallelism": job.num_nodes,
        "completions": job.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": rule}]},
        "template": _pod(job, "hybridrl", image, volumes, script, {"restartPolicy": "Never"}),
    }
    no_restart = {
        "name": "mistake",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": meta,
        "spec": {
            "failurePolicy": {
                "maxRestarts": job.max_restarts or MAX_RESTARTS,
                "rules": [no_restart],
            },
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": pods}}],
        },
    }


def _pytorchjob(
    job: NodeJob, image: str, volumes: Sequence[tuple[str, str]], meta: dict[str, str]
) -> dict[str, Any]:
    # The operator numbers pods as torch does ranks, which ours are not.
    node = job.node_command(["hybridrl"], '"$node"', '"$MASTER_ADDR"', '"$MASTER_PORT"')
    script = f'node="$RANK"; unset RANK WORLD_SIZE; exec {node}'
    counts = {"Master": 1, "Worker": job.num_nodes - 1}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": meta,
        "spec": {
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "backoffLimit": job.max_restarts or MAX_RESTARTS,
            },
            "pytorchReplicaSpecs": {
                name: {
                    "replicas": count,
                    "restartPolicy": "OnFailure",
                    "template": _pod(job, "pytorch", image, volumes, script, {}),
                }
                for name, count in counts.items()
                if count
            },
        },
    }


def _pod(
    job: NodeJob,
    container: str,
    image: str,
    volumes: Sequence[tuple[str, str]],
    script: str,
    further: dict[str, Any],
) -> dict[str, Any]:
    names = [f"volume-{index}" for index in range(len(volumes))]
    mounts = [
        {"name": name, "mountPath": path} for name, (_, path) in zip(names, volumes, strict=True)
    ]
    claims = [
        {"name": name, "persistentVolumeClaim": {"claimName": claim}}
        for name, (claim, _) in zip(names, volumes, strict=True)
    ]
    # NCCL and data loaders share memory between processes; a pod has 64 MB of it by default.
    memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    one: dict[str, Any] = {
        "name": container,
        "image": image,
        "workingDir": job.folder,
        "command": ["sh", "-c", script],
        "env": [{"name": name, "value": value} for name, value in job.environment.items()],
        "volumeMounts": [*mounts, {"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    if job.has_gpus:
        one["resources"] = {"limits": {"nvidia.com/gpu": job.slots}}
    spec = {
        **further,
        "terminationGracePeriodSeconds": job.stop_s,
        "containers": [one],
        "volumes": [*claims, memory],
    }
    return {"spec": spec}
