"""How `hybridrl check --cluster` reaches nodes: processes that are talked with, line by line. No
torch; Ray is imported where it is needed.

Who waits for whom: a channel's lines wait for its process, which ends with its stdin; `close` waits
for that some seconds and then ends it by force.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from hybridrl.cli.hostfile import forwarded, read_hostfile, remote
from hybridrl.cli.ray_actors import ActorPipe, ProcessActor
from hybridrl.cli.ray_launch import connect, dead_nodes
from hybridrl.errors import UserError

PROBE = "hybridrl.cli.cluster_probe"
PROGRAM = (sys.executable, "-m", PROBE)
# Variables that a node is asked with, as ranks get them. Keys of services stay here: they would
# stand in a command line.
KEPT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "NCCL_", "GLOO_", "HYBRIDRL_CACHE")


class Channel(Protocol):
    """A process on a node, which has been started."""

    def send(self, line: str) -> None:
        """Writes a line to it, or nothing if it has ended."""
        ...

    def lines(self) -> Iterator[str]:
        """Yields what it prints, until it has ended."""
        ...

    def outcome(self) -> str:
        """Returns how it ended, in words; after all lines."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


# Starts the probe on a node.
Reach = Callable[[str], Channel]


class Pipe:
    """A process of this host.

    Args:
        command: that starts the probe, here or elsewhere.
    """

    def __init__(self, command: Sequence[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",  # greetings of hosts are in any encoding
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(
                "--ssh", command[0], "a program that runs commands on hosts", f"{error.strerror}."
            ) from error

    def send(self, line: str) -> None:
        """Writes a line to the process."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended; its last line says how
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def lines(self) -> Iterator[str]:
        """Yields what it prints."""
        assert self._process.stdout is not None
        yield from self._process.stdout

    def outcome(self) -> str:
        """Returns its exit code, in words."""
        return f"ended with code {self._process.wait()}"

    def close(self) -> None:
        """Ends it by the end of its stdin."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _variables() -> dict[str, str]:
    return {name: value for name, value in forwarded().items() if name.startswith(KEPT)}


def _local(node: str) -> Pipe:
    """Reaches this host."""
    return Pipe(PROGRAM)


def _by_ssh(ssh: Sequence[str]) -> Reach:
    variables = [f"{name}={value}" for name, value in _variables().items()]
    return lambda node: Pipe(remote(ssh, node, ["env", *variables, *PROGRAM]))


def _by_srun(node: str) -> Pipe:
    """Reaches a node of this Slurm allocation."""
    found = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
    return Pipe([*found, *PROGRAM])


class _Lost:
    """The channel to a node that Ray lost: nothing comes from it.

    Args:
        why: in Ray's words.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def send(self, line: str) -> None:
        """Drops a line."""

    def lines(self) -> Iterator[str]:
        """Yields nothing."""
        return iter(())

    def outcome(self) -> str:
        """Returns why, in words."""
        return f"Ray lost this node: {self._why}"

    def close(self) -> None:
        """Has nothing to end."""


@contextmanager
def _ray_nodes(address: str) -> Iterator[tuple[list[str], Reach]]:
    """Yields the nodes of a cluster, by address, and what reaches them: an actor on each, which
    takes no slot of the cluster's, so that they can be asked while others use it. Those that Ray
    lost are among them, and do not answer.
    """
    ray: Any = connect(address)
    try:
        known = ray.nodes()
        nodes = {one["NodeManagerAddress"]: one["NodeID"] for one in known if one["Alive"]}
        lost = dead_nodes(known)
        kind, variables = ray.remote(ProcessActor), {"OMP_NUM_THREADS": "1", **_variables()}
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy

        def reach(node: str) -> Channel:
            if node in lost:
                return _Lost(lost[node])
            where = strategy(nodes[node], soft=False)
            options = kind.options(
                num_cpus=0, num_gpus=0, max_restarts=0, scheduling_strategy=where
            )
            return ActorPipe(options.remote(os.getcwd()), PROBE, variables)

        yield sorted({*nodes, *lost}), reach
    finally:
        ray.shutdown()


@contextmanager
def nodes_of(
    hostfile: Path | None, slurm: bool, ray: str | None, ssh: Sequence[str]
) -> Iterator[tuple[list[str], Reach, str]]:
    """Yields the nodes to check, what reaches them, and with which command before it a remedy is
    carried out there.

    Raises:
        UserError: there is no such hostfile, no allocation, or no such cluster.
    """
    given = {"--hostfile": hostfile, "--slurm": slurm or None, "--ray": ray}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise UserError("check", " and ".join(named), "one of them", "Leave the others out.")
    if hostfile is not None:
        yield [host.name for host in read_hostfile(hostfile)], _by_ssh(ssh), shlex.join(ssh)
    elif slurm:
        yield _allocated(), _by_srun, "srun --overlap --nodelist"
    elif ray is not None:
        with _ray_nodes(ray) as (names, reach):
            yield names, reach, "ssh"
    else:
        yield [os.uname().nodename], _local, "ssh"


def _allocated() -> list[str]:
    told = os.environ.get("SLURM_JOB_NODELIST")
    if not told:
        raise UserError("--slurm", "no allocation", "a job of Slurm's", "Start it under salloc.")
    shown = subprocess.run(
        ["scontrol", "show", "hostnames", told], capture_output=True, text=True, check=True
    )
    return shown.stdout.split()
