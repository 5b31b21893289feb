"""Connects to hosts over ssh, for `hybridrl launch --hostfile`. Does not import torch."""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hybridrl import __version__
from hybridrl.errors import ConfigError, UserError
from hybridrl.services.launch.connections import Connection, Host, ProcessConnection
from hybridrl.services.launch.local_ranks import Share
from hybridrl.services.launch.node import Order

PROBE_S = 60.0  # Maximum time until a host replies.
CONNECT_S = 5  # Timeout for a lost host; if an option is repeated, ssh uses the first.
SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15")
# A host that does not respond for 30 s is considered lost, like a rank (heartbeat.py).
KEEP_ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=6")
PORTS = (10_000, 32_000)  # Below the ephemeral port range of all systems.
# Environment variables of the user that are passed to ranks on other hosts.
FORWARDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")
FORWARDED_PREFIXES = (
    *("HYBRIDRL_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_DEVICE_", "HF_"),
    *("VLLM_", "SGLANG_", "WANDB_", "MLFLOW_", "TRITON_", "UCX_", "OMPI_"),
)
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")
# Program that runs on a host to print its version of hybridrl and to resolve rank 0's address.
PROBE = (
    "import socket, sys, hybridrl; socket.getaddrinfo(sys.argv[1], None); print('hybridrl', "
    "hybridrl.__version__)"
)


def read_hostfile(file: Path) -> list[Host]:
    """Reads a file in MPI's format: `name slots=N` per line, `#` for comments, 1 slot by default.

    Raises:
        UserError, ConfigError: The file cannot be read, lines are invalid, or there is no host.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(
            "--hostfile", f"{file}: {reason}", "a hostfile", "Check the path."
        ) from error
    slots: dict[str, int] = {}
    wrong: list[UserError] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, *rest = text.split()
        found = re.fullmatch(r"slots\s*=\s*(\S+)", " ".join(rest)) if rest else None
        count = "1" if not rest else found[1] if found else ""
        if name.startswith(("-", "slots=")) or not re.fullmatch(r"[1-9][0-9]{0,5}", count):
            allowed, remedy = "name slots=N, N an integer of at least 1", "Correct the line."
            wrong.append(UserError(f"{file}, line {number}", text, allowed, remedy))
            continue
        slots[name] = slots.get(name, 0) + int(count)
    if not slots and not wrong:
        wrong.append(UserError("--hostfile", f"{file}: no host", "name slots=N", "Add hosts."))
    if wrong:
        raise ConfigError(wrong)
    return [Host(name, count) for name, count in slots.items()]


def shares(hosts: Sequence[Host], world_size: int, address: str, port: int) -> list[Share]:
    """Assigns consecutive ranks to hosts in rank order. Hosts without ranks are left out."""
    found, first = [], 0
    for host in hosts:
        if count := min(host.slots, world_size - first):
            found.append(Share(count, first, world_size, address, port))
        first += count
    return found


def ask_hosts(hosts: Sequence[Host], ssh: Sequence[str], address: str) -> None:
    """Raises an error unless all hosts can be reached and have the installation of this host."""
    if _LOOPBACK.fullmatch(address) and not all(_LOOPBACK.fullmatch(host.name) for host in hosts):
        allowed = "a name that all hosts can resolve"
        remedy = "Write the host's name instead, or set --address."
        raise UserError("--hostfile", f"{address} as the first of several hosts", allowed, remedy)
    found = answers(hosts, ssh, address)
    if wrong := [error for error in found if error is not None]:
        raise ConfigError(wrong)


def answers(hosts: Sequence[Host], ssh: Sequence[str], address: str) -> list[UserError | None]:
    """Returns an error for each host that fails the check, and None for each host that passes."""
    with ThreadPoolExecutor(min(64, max(len(hosts), 1))) as pool:
        return list(pool.map(lambda host: _ask(host, ssh, address), hosts))


def _ask(host: Host, ssh: Sequence[str], address: str) -> UserError | None:
    command = remote(ssh, host.name, [sys.executable, "-c", PROBE, address])
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
        )
        lines, code = f"{done.stdout}\n{done.stderr}".strip().splitlines(), done.returncode
        answer = done.stdout.strip().rpartition("\n")[2]
    except subprocess.TimeoutExpired:
        lines, code, answer = [f"no reply within {PROBE_S:g} s"], 255, ""
    except OSError as error:
        raise UserError(
            "--ssh", command[0], "a program that runs commands on hosts", f"{error.strerror}."
        ) from error
    if answer == f"hybridrl {__version__}":
        return None
    name, last = f"host {host.name}", lines[-1] if lines else f"exit code {code}"
    if code == 255:  # ssh itself failed
        remedy = (
            f"Make `{shlex.join([*ssh, host.name])}` work without a password, or remove this host."
        )
        return UserError(name, last, "a host that ssh can reach", remedy)
    allowed = (
        f"hybridrl {__version__} with {sys.executable} in {os.getcwd()}; {address} must resolve"
    )
    remedy = "Share the environment and the working folder among the hosts."
    return UserError(name, last, allowed, remedy)


def remote(ssh: Sequence[str], host: str, command: Sequence[str]) -> list[str]:
    """Returns the ssh command that runs `command` on a host, in this process's folder."""
    there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
    return [*ssh, *SSH_OPTIONS, *KEEP_ALIVE, host, there]


def forwarded() -> dict[str, str]:
    """Returns the environment variables to pass to processes on other hosts."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in FORWARDED or name.startswith(FORWARDED_PREFIXES)
    }


class SshCluster:
    """The hosts in a hostfile, in rank order, as the `Cluster` of a `HostsJob`."""

    def __init__(self, hosts: Sequence[Host], ssh: Sequence[str]) -> None:
        self._hosts, self._ssh = hosts, ssh

    def connect(self, host: Host, order: Order) -> Connection:
        program = [sys.executable, "-m", "hybridrl.services.launch.node"]
        return ProcessConnection(host, remote(self._ssh, host.name, program), order)

    def hosts(self, down: Set[str]) -> list[Host]:
        asked = [host for host in self._hosts if host.name in down]
        ssh = [*self._ssh, "-o", f"ConnectTimeout={CONNECT_S}"]
        found = answers(asked, ssh, self._hosts[0].name)
        silent = {host.name for host, wrong in zip(asked, found, strict=True) if wrong is not None}
        return [host for host in self._hosts if host.name not in silent]

    def close(self) -> None:
        """Does nothing, because each host waits for its own ranks at the end of a start."""


def any_port() -> int:
    """Returns a random port for the job's store. Rank 0's host reports a port that is in use."""
    return random.SystemRandom().randrange(*PORTS)
