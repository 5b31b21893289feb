"""Hosts over ssh, for `hybridrl launch --hostfile`. No torch.

Owns the hostfile and the questions to hosts before anything is started. Hosts share the working
folder, the Python environment and the run folder.
"""

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

PROBE_S = 60.0  # for a host to answer
CONNECT_S = 5  # for a host that was lost; ssh takes the first of several values
SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15")
# A host that answers nothing for 30 s is given up, as a rank is (heartbeat.py).
KEEP_ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=6")
PORTS = (10_000, 32_000)  # which no system hands out by itself
# Variables of the user's that the ranks of other hosts get too.
FORWARDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")
FORWARDED_PREFIXES = (
    *("HYBRIDRL_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_DEVICE_", "HF_"),
    *("VLLM_", "SGLANG_", "WANDB_", "MLFLOW_", "TRITON_", "UCX_", "OMPI_"),
)
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")
# What a host is asked: whether it is set up as this one is, and knows where rank 0 will be.
PROBE = (
    "import socket, sys, hybridrl; socket.getaddrinfo(sys.argv[1], None); print('hybridrl', "
    "hybridrl.__version__)"
)


def read_hostfile(file: Path) -> list[Host]:
    """Returns the hosts of a file in MPI's form: `name slots=N` in each line, `#` before comments;
    without slots= a host has one. A host in several lines has the slots of all.

    Raises:
        UserError: a ConfigError with every line that is wrong, or that there is no host.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(
            "--hostfile", f"{file}: {reason}", "a file of hosts", "Check the path."
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
            allowed = "name slots=N, N an integer from 1" if count or name else "name slots=N"
            wrong.append(
                UserError(f"{file}, line {number}", text, allowed, "Correct or remove the line.")
            )
            continue
        slots[name] = slots.get(name, 0) + int(count)
    if not slots and not wrong:
        wrong.append(UserError("--hostfile", f"{file}: no host", "name slots=N", "Add hosts."))
    if wrong:
        raise ConfigError(wrong)
    return [Host(name, count) for name, count in slots.items()]


def shares(hosts: Sequence[Host], world_size: int, address: str, port: int) -> list[Share]:
    """Returns the ranks of each host, which are consecutive; hosts that get none are left out.

    Args:
        hosts: in the order of ranks; they have slots enough.
        world_size: ranks to start.
        address, port: of the job's store, on the first host.
    """
    found, first = [], 0
    for host in hosts:
        if count := min(host.slots, world_size - first):
            found.append(Share(count, first, world_size, address, port))
        first += count
    return found


def ask_hosts(hosts: Sequence[Host], ssh: Sequence[str], address: str) -> None:
    """Asks all hosts whether they can be reached and are set up as this one is.

    Raises:
        UserError: a ConfigError with every host that is not.
    """
    if _LOOPBACK.fullmatch(address) and not all(_LOOPBACK.fullmatch(host.name) for host in hosts):
        raise UserError(
            "--hostfile",
            f"{address} as the first of several hosts",
            "a name that all hosts know it by",
            "Write the host's name in its place, or give --address.",
        )
    found = answers(hosts, ssh, address)
    if wrong := [error for error in found if error is not None]:
        raise ConfigError(wrong)


def answers(hosts: Sequence[Host], ssh: Sequence[str], address: str) -> list[UserError | None]:
    """Returns what is wrong with each host, None of one that is set up as this one is."""
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
        said, code = f"{done.stdout}\n{done.stderr}".strip().splitlines(), done.returncode
        answer = done.stdout.strip().rpartition("\n")[2]
    except subprocess.TimeoutExpired:
        said, code, answer = [f"no answer in {PROBE_S:g} s"], 255, ""
    except OSError as error:
        raise UserError(
            "--ssh", command[0], "a program that runs commands on hosts", f"{error.strerror}."
        ) from error
    if answer == f"hybridrl {__version__}":
        return None
    name, last = f"host {host.name}", said[-1] if said else f"exit code {code}"
    if code == 255:  # ssh's own
        remedy = f"Make `{shlex.join([*ssh, host.name])}` work without a password, or remove it."
        return UserError(name, last, "a host that ssh can reach", remedy)
    return UserError(
        name,
        last,
        f"hybridrl {__version__} by {sys.executable} in {os.getcwd()}, with {address} known",
        "Share the environment and the working folder among the hosts.",
    )


def remote(ssh: Sequence[str], host: str, command: Sequence[str]) -> list[str]:
    """Returns the command that runs another one on a host, in the same folder as here."""
    there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
    return [*ssh, *SSH_OPTIONS, *KEEP_ALIVE, host, there]


def forwarded() -> dict[str, str]:
    """Returns the variables of the user's that processes on other hosts get."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in FORWARDED or name.startswith(FORWARDED_PREFIXES)
    }


class SshCluster:
    """The hosts of a hostfile, as the `Cluster` of a `HostsJob`.

    Args:
        hosts: Hosts in the order of ranks.
        ssh: The program with its options.
    """

    def __init__(self, hosts: Sequence[Host], ssh: Sequence[str]) -> None:
        self._hosts, self._ssh = hosts, ssh

    def connect(self, host: Host, order: Order) -> Connection:
        """Starts node.py on a host."""
        program = [sys.executable, "-m", "hybridrl.services.launch.node"]
        return ProcessConnection(host, remote(self._ssh, host.name, program), order)

    def hosts(self, down: Set[str]) -> list[Host]:
        """Returns the hosts without those that were down and do not answer now."""
        asked = [host for host in self._hosts if host.name in down]
        ssh = [*self._ssh, "-o", f"ConnectTimeout={CONNECT_S}"]
        found = answers(asked, ssh, self._hosts[0].name)
        silent = {host.name for host, wrong in zip(asked, found, strict=True) if wrong is not None}
        return [host for host in self._hosts if host.name not in silent]

    def close(self) -> None:
        """Nothing is left: each host has waited for its ranks at the end of a start."""


def any_port() -> int:
    """Returns a port for the job's store, which may be taken there: then rank 0's host says so."""
    return random.SystemRandom().randrange(*PORTS)
