"""What schedulers are given, by its structure, and run by stubs of their commands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm_stub import scheduler_stubs, write_program

from hybridrl.errors import UserError
from hybridrl.services.launch.schedulers import LOST, NodeJob, manifest, slurm_script

# In place of hybridrl: writes what it was told, waits where asked to, ends as it is told.
PROGRAM = """#!/bin/bash
echo "$@" >"$(dirname "$0")/node_$3"
trap 'exit {at_usr1}' USR1
touch "$(dirname "$0")/ready_$3"
for ((i = 0; i < {turns}; i++)); do sleep 0.1; done
exit {code}
"""


def job(folder: Path, **changes: Any) -> NodeJob:
    given = {
        "name": "math",
        "num_nodes": 2,
        "slots": 4,
        "has_gpus": True,
        "arguments": ["c.yaml", "run.name=it's", "--resume", "newest"],
        "folder": str(folder),
        "environment": {"NAMES": '{"a": "b c"}'},
        "stop_s": 90,
    }
    return NodeJob(**{**given, **changes})


def directives(text: str) -> dict[str, str]:
    found = [line.removeprefix("#SBATCH --") for line in text.splitlines() if "#SBATCH" in line]
    return {name: value for name, _, value in (line.partition("=") for line in found)}


def test_an_sbatch_file_asks_for_nodes_gpus_requeue_and_a_signal(tmp_path: Path) -> None:
    text = slurm_script(job(tmp_path), ["h"], ["--partition=p", "--nodes=3"], tmp_path / "%j.log")
    assert text.startswith("#!/bin/bash\n#SBATCH")
    assert directives(text) == {
        "job-name": "math",
        "nodes": "3",
        "ntasks-per-node": "1",
        "gpus-per-node": "4",
        "signal": "B:USR1@90",
        "open-mode": "append",
        "output": str(tmp_path / "%j.log"),
        "requeue": "",
        "partition": "p",
    }
    assert "gpus" not in slurm_script(job(tmp_path, has_gpus=False), ["h"], [], None)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("code", "at_usr1", "turns", "is_signalled", "expected", "is_requeued"),
    [
        (0, 1, 0, False, 0, False),
        (2, 1, 0, False, 2, False),
        (0, 1, 600, True, 1, True),
        (0, 0, 600, True, 0, False),  # it was done as the signal came
    ],
)
def test_an_sbatch_file_runs_every_node_and_requeues_what_the_time_limit_stopped(
    tmp_path: Path,
    code: int,
    at_usr1: int,
    turns: int,
    is_signalled: bool,
    expected: int,
    is_requeued: bool,
) -> None:
    environment = os.environ | scheduler_stubs(tmp_path)
    program = tmp_path / "program"
    write_program(program, PROGRAM.format(code=code, at_usr1=at_usr1, turns=turns))
    file = tmp_path / "job.sbatch"
    file.write_text(slurm_script(job(tmp_path), [str(program)], [], None))
    process = subprocess.Popen([tmp_path / "sbatch", file], env=environment)
    if is_signalled:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("ready_*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=90) == expected
    for node in range(2):
        place = f"launch --node {node} --nodes 2 --slots 4 --address 127.0.0.1 --port 10077"
        told = (tmp_path / f"node_{node}").read_text()
        assert told == f"{place} c.yaml run.name=it's --resume newest\n"
    asked = tmp_path / "asked"
    assert asked.exists() == is_requeued
    assert not is_requeued or asked.read_text() == "requeue 77\n"


@pytest.mark.parametrize(
    ("first", "max_restarts", "expected", "starts"),
    [
        (LOST, 2, 0, 2),
        (LOST, 0, LOST, 1),
        (1, 2, 1, 1),  # an error of its own would come again
        (137, 2, 137, 1),
    ],
)
def test_an_sbatch_file_starts_lost_ranks_again(
    tmp_path: Path, first: int, max_restarts: int, expected: int, starts: int
) -> None:
    """The second node loses a rank in the first start; the first one is done in each."""
    environment = os.environ | scheduler_stubs(tmp_path)
    program = tmp_path / "program"
    lines = ("#!/bin/bash", 'log="$(dirname "$0")/node_$3"', 'echo "$@" >>"$log"')
    fails = f'[ "$3" = 1 ] && [ "$(wc -l <"$log")" = 1 ] && exit {first}'
    write_program(program, "\n".join((*lines, fails, "exit 0\n")))
    file = tmp_path / "job.sbatch"
    told = slurm_script(job(tmp_path, max_restarts=max_restarts), [str(program)], [], None)
    file.write_text(told)
    done = subprocess.run(
        [tmp_path / "sbatch", file], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == expected, done
    said = f"restart 1 of {max_restarts} (run.max_restarts)"
    assert done.stderr.count("restart ") == starts - 1 and (said in done.stderr) == (starts == 2)
    for node in range(2):
        calls = (tmp_path / f"node_{node}").read_text().splitlines()
        ports = [re.search(r"--port (\d+)", call)[1] for call in calls]  # type: ignore[index]
        assert ports == [str(10_077 + start) for start in range(starts)]
    assert not (tmp_path / "asked").exists()


def run_pod(tmp_path: Path, pod: dict[str, Any], **variables: str) -> str:
    """Runs a container's command with a program in place of hybridrl; returns its arguments."""
    (container,) = pod["spec"]["containers"]
    write_program(tmp_path / "hybridrl", '#!/bin/sh\necho "$RANK" "$WORLD_SIZE" "$@"\n')
    named = {one["name"]: one["value"] for one in container["env"]}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **named, **variables}
    return subprocess.run(
        container["command"], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_jobset_runs_one_pod_a_node_and_stops_at_a_mistake(tmp_path: Path) -> None:
    text = manifest(job(tmp_path), "jobset", "an/image:1", [("data", "/data")], "ml")
    found = yaml.safe_load(text)
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert found["metadata"] == {"name": "math", "namespace": "ml"}
    assert found["spec"]["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    assert found["spec"]["failurePolicy"]["maxRestarts"] == 3
    (replicated,) = found["spec"]["replicatedJobs"]
    pods = replicated["template"]["spec"]
    assert (replicated["name"], replicated["replicas"]) == ("node", 1)
    assert (pods["parallelism"], pods["completions"], pods["completionMode"]) == (2, 2, "Indexed")
    (rule,) = pods["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2]
    pod = pods["template"]
    (container,) = pod["spec"]["containers"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert pod["spec"]["restartPolicy"] == "Never"  # podFailurePolicy asks for it
    assert pod["spec"]["terminationGracePeriodSeconds"] == 90
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert set(mounts.values()) == {"/data", "/dev/shm"}
    told = run_pod(tmp_path, pod, JOB_COMPLETION_INDEX="1")
    place = "--node 1 --nodes 2 --slots 4 --address math-node-0-0.math --port 29500"
    assert told == f"launch {place} c.yaml run.name=it's --resume newest"


def faults(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """Returns where a value breaks a Kubernetes schema; unknown fields do, as with `--validate`."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int}
    expected = kinds.get(schema.get("type", ""), (int, str))
    if not isinstance(value, expected) or isinstance(value, bool):
        return [f"{where}: {value!r}"]
    found = [f"{where}: {value!r}"] if value not in schema.get("enum", [value]) else []
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        found.append(f"{where}: {value!r}")
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        found += [f"{where}: no {name}" for name in schema.get("required", ()) if name not in value]
        for name, one in value.items():
            part = known.get(name, others)
            inside = f"{where}.{name}"
            found += [f"{inside}: unknown"] if part is None else faults(one, part, inside)
    if isinstance(value, list):
        for index, one in enumerate(value):
            found += faults(one, schema["items"], f"{where}[{index}]")
    return found


@pytest.mark.parametrize("has_gpus", [False, True])
@pytest.mark.parametrize("volumes", [[], [("data", "/data"), ("hub", "/hub")]])
def test_a_jobset_is_one_by_its_schema(
    has_gpus: bool, volumes: list[tuple[str, str]], tmp_path: Path
) -> None:
    schema = json.loads((Path(__file__).parent / "jobset_schema.json").read_text())["schema"]
    text = manifest(job(tmp_path, has_gpus=has_gpus), "jobset", "an/image:1", volumes, "ml")
    found = yaml.safe_load(text)
    assert faults(found, schema) == []
    found["spec"]["failurePolicy"]["maxRestart"] = 3
    found["spec"]["failurePolicy"]["rules"][0]["action"] = "Fail"
    found["spec"]["replicatedJobs"][0]["replicas"] = "1"
    del found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert faults(found, schema) == [
        ".spec.failurePolicy.rules[0].action: 'Fail'",
        ".spec.failurePolicy.maxRestart: unknown",
        ".spec.replicatedJobs[0].replicas: '1'",
        ".spec.replicatedJobs[0].template.spec: no template",
    ]


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_pytorchjob_has_a_master_and_workers_that_are_no_ranks(
    num_nodes: int, tmp_path: Path
) -> None:
    text = manifest(job(tmp_path, num_nodes=num_nodes), "pytorchjob", "an/image:1", [], "ml")
    assert "&id" not in text  # anchors, which readers of the file would have to resolve
    found = yaml.safe_load(text)
    assert (found["apiVersion"], found["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    specs = found["spec"]["pytorchReplicaSpecs"]
    counts = {name: spec["replicas"] for name, spec in specs.items()}
    assert counts == ({"Master": 1} if num_nodes == 1 else {"Master": 1, "Worker": 1})
    for node, spec in enumerate(specs.values()):
        (container,) = spec["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the operator looks for it
        told = run_pod(
            tmp_path,
            spec["template"],
            RANK=str(node),
            WORLD_SIZE="2",
            MASTER_ADDR="math-master-0",
            MASTER_PORT="23456",
        )
        place = f"--node {node} --nodes {num_nodes} --slots 4 --address math-master-0 --port 23456"
        assert told == f"launch {place} c.yaml run.name=it's --resume newest"


def test_sizes_come_from_the_command_or_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridrl.services.launch.several_nodes import counts

    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    assert counts(None, None, True) == (3, 8)
    assert counts(2, 4, True) == (2, 4)
    with pytest.raises(UserError, match="--nodes"):
        counts(None, 4, False)
    with pytest.raises(UserError, match="--slots"):
        counts(2, None, False)
