"""`hybridrl launch --hostfile`: ranks on several machines over ssh, one connection a machine.

Owns the hostfile, the questions to hosts before anything is started, and the end of the job. Who
waits for whom: this process waits for node.py on every host, which waits for its ranks. Invariant:
when one host's ranks have failed or its connection is lost, the others are ended within
KILL_AFTER_S of it. Hosts share the working folder, the Python environment and the run folder.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hybridrl import __version__
from hybridrl.cli.launch import GRACE_S, KILL_AFTER_S, LEAVE_S, POLL_S, Share
from hybridrl.cli.node import DONE, FAILED, STOPPED, Order, outcome_file
from hybridrl.cli.rank_ends import Outcome, conclude
from hybridrl.console import say
from hybridrl.errors import ConfigError, UserError

PROBE_S = 60.0  # for a host to answer
# For hosts to end their ranks and say so: the kernel may take a minute to free what they have
# page-locked. The connection to a host that is gone ends by itself (KEEP_ALIVE).
END_S = 180.0
# For the files in which hosts say so: shared file systems keep listings for a while (NFS: up to
# 60 s by default). It is told after the second.
OUTCOME_S, OUTCOME_NOTICE_S = 90.0, 3.0
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


@dataclass(frozen=True)
class Host:
    """A line of a hostfile.

    Args:
        name: as ssh knows the host.
        slots: ranks that it can run.
    """

    name: str
    slots: int


class Connection(Protocol):
    """What holds node.py on another machine: a process that is told by its stdin what to do, as
    `subprocess.Popen` has it.
    """

    @property
    def stdin(self) -> Any:
        """Takes lines; the ranks are ended when it is closed."""

    @property
    def returncode(self) -> Any:
        """The exit code, once `poll` has seen the end; -N: signal N."""

    def poll(self) -> int | None:
        """Returns the exit code, None before the end."""

    def kill(self) -> None:
        """Ends it at once."""

    def wait(self) -> int:
        """Returns the exit code, at the end."""


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


def start_node(host: str, ssh: Sequence[str], order: Order) -> subprocess.Popen[bytes]:
    """Starts node.py on a host over ssh and gives it its order."""
    command = remote(ssh, host, [sys.executable, "-m", "hybridrl.cli.node"])
    # In a session of its own: a terminal's Ctrl-C reaches the ranks once, through us.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    tell_node(process, order.to_line())
    return process


def tell_node(process: Connection, line: bytes) -> None:
    """Writes a line to node.py, if it still runs."""
    assert process.stdin is not None
    with suppress(OSError):  # it has ended; its code says how
        process.stdin.write(line)
        process.stdin.flush()


def wait_for_nodes(
    nodes: Sequence[Connection],
    received: list[int],
    look: Callable[[], None] = lambda: None,
) -> None:
    """Returns when all hosts are done, or one has failed and the others have had time to say what
    they know of it; hands signals on.

    Args:
        nodes: the connection to each host.
        received: signals.
        look: called every POLL_S.
    """
    deadline, num_told = float("inf"), 0
    while None in (codes := {node.poll() for node in nodes}):
        for number in received[num_told:]:
            for node in nodes:
                tell_node(node, b"%d\n" % number)
            num_told += 1
        if len(received) > 1:
            return
        look()
        if ended := {code for code in codes if code is not None} - {DONE}:
            deadline = min(deadline, time.monotonic() + _time_left_s(ended))
            if time.monotonic() > deadline:
                return
        time.sleep(POLL_S)


def _time_left_s(codes: Set[int]) -> float:
    """Returns how long ranks have to end by themselves once others have ended with these codes."""
    if codes <= {STOPPED}:
        return LEAVE_S
    # What others say of a host that is gone is no news.
    return KILL_AFTER_S if codes <= {2, FAILED, STOPPED} else GRACE_S


def end_nodes(nodes: Sequence[Connection]) -> None:
    """Ends what is still alive: hosts end their ranks when their stdin is closed."""
    for node in nodes:
        assert node.stdin is not None
        with suppress(OSError):
            node.stdin.close()
    deadline = time.monotonic() + END_S
    while None in {node.poll() for node in nodes} and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for node in nodes:
        node.kill()
        node.wait()


@dataclass(frozen=True)
class NodesEnd:
    """How the hosts of a job ended.

    Args:
        outcome: of the ranks of hosts that could say so.
        cut_off: numbers of hosts whose connection was lost.
        code: exit code of the job.
    """

    outcome: Outcome
    cut_off: Sequence[int]
    code: int


def conclude_nodes(
    nodes: Sequence[Connection], hosts: Sequence[Host], log_dir: Path, is_stopped: bool
) -> NodesEnd:
    """Says how the job ended, and returns it.

    Args:
        nodes: the connections, all ended.
        hosts: of each.
        log_dir: of the run.
        is_stopped: whether the launcher has asked ranks to stop, other than by `end_nodes`, which
            ends those that are left where a host is lost.
    """
    have_said = {i for i, node in enumerate(nodes) if node.returncode in (DONE, FAILED, STOPPED)}
    found = _outcomes({index: outcome_file(log_dir, index) for index in have_said})
    for index in range(len(nodes)):
        outcome_file(log_dir, index).unlink(missing_ok=True)
    outcome = Outcome.together([found[index] for index in sorted(found)])
    if not is_stopped and len(found) < len(nodes):
        outcome = replace(outcome, stopped_by=0)
    code = conclude(outcome, log_dir)
    refused, cut_off = False, []
    for index, (node, host) in enumerate(zip(nodes, hosts, strict=False)):
        if index in found:
            continue
        if node.returncode == 2:  # it has said why
            refused = True
        elif index in have_said:
            _tell_of_missing(host, outcome_file(log_dir, index), node.returncode)
            code = 1
        else:
            how = f"ended with code {node.returncode}"
            if node.returncode < 0:
                how = f"was killed by {signal.Signals(-node.returncode).name}"
            say(f"hybridrl: the connection to host {host.name} {how}")
            cut_off.append(index)
            code = code or 1
    return NodesEnd(outcome, cut_off, 2 if refused else code)


def _outcomes(files: Mapping[int, Path]) -> dict[int, Outcome]:
    """Returns what is in those of the files that can be seen within OUTCOME_S."""
    found: dict[int, Outcome] = {}
    began, is_told = time.monotonic(), False
    while True:
        for index in files.keys() - found.keys():
            with suppress(OSError):  # not there yet, or not as it is now (ESTALE)
                found[index] = Outcome.read(files[index])
        waited_s = time.monotonic() - began
        if len(found) == len(files) or waited_s > OUTCOME_S:
            return found
        if waited_s > OUTCOME_NOTICE_S and not is_told:
            is_told = True
            names = ", ".join(str(files[index]) for index in sorted(files.keys() - found.keys()))
            say(f"hybridrl: the ranks have ended; waiting {OUTCOME_S:g} s for {names}")
        time.sleep(POLL_S)


def _tell_of_missing(host: Host, file: Path, code: int) -> None:
    how = {DONE: "are done", FAILED: "have failed", STOPPED: "have stopped"}[code]
    say(
        f"hybridrl: the ranks of host {host.name} {how}, but {file}, in which the host says more, "
        f"is not there after {OUTCOME_S:g} s: the run is counted as failed. All hosts must share "
        f"run.dir; the ranks' logs are in {file.parent} on that host"
    )


def any_port() -> int:
    """Returns a port for the job's store, which may be taken there: then rank 0's host says so."""
    return random.SystemRandom().randrange(*PORTS)
