"""Several hosts by a hostfile: the weights of the local launcher, exit codes, signals and ends.

Hosts are names of this machine. Commands on them are run by a script in place of ssh, or, where
OpenSSH's server is installed, by ssh itself over loopback.
"""

from __future__ import annotations

import getpass
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from command_line import QUICKSTART, ROOT, exported_weights, run, start
from launch import free_port
from network_nodes import CAN_MAKE, network_nodes
from small_runs import SMALL

KNOBS = (*SMALL, "train.tp=2", "steps.num_steps=2")
# ssh OPTIONS HOST COMMAND: of the hosts "nowhere" does not exist.
STUB = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
[ "$1" = nowhere ] && { echo "ssh: Could not resolve hostname nowhere" >&2; exit 255; }
exec env -u HYBRIDRL_CACHE sh -c "$2"
"""
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


@pytest.fixture
def stub(tmp_path: Path) -> str:
    """A script in place of ssh."""
    file = tmp_path / "ssh"
    file.write_text(STUB)
    file.chmod(0o755)
    return str(file)


def hosts(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "hosts"
    file.write_text("# two of them\n" + "\n".join(lines) + "\n")
    return file


def command(folder: Path, hostfile: Path, ssh: str, *knobs: str) -> list[str | Path]:
    given = [QUICKSTART / "grpo.yaml", *KNOBS, f"run.dir={folder}", *knobs]
    return ["launch", "--hostfile", hostfile, "--ssh", ssh, *given]


def check_same_weights(tmp_path: Path, hostfile: Path, ssh: str) -> None:
    run(*command(tmp_path / "hosts_run", hostfile, ssh))
    logs = tmp_path / "hosts_run" / "quickstart-grpo" / "logs"
    names = {path.name for path in logs.iterdir()}
    assert names == {f"rank_{rank}.{kind}" for rank in range(2) for kind in ("log", "phase")}
    assert "step 2/2" in (logs / "rank_0.log").read_text()
    check_same_as_local(tmp_path, tmp_path / "hosts_run", 2)


def check_same_as_local(tmp_path: Path, folder: Path, world: int) -> None:
    """Compares a run's weights with those of the local launcher, bit by bit."""
    local = tmp_path / "local"
    run("train", QUICKSTART / "grpo.yaml", *KNOBS, f"run.dir={local}", "--world", str(world))
    found = exported_weights(folder / "quickstart-grpo", tmp_path / "hf_hosts")
    expected = exported_weights(local / "quickstart-grpo", tmp_path / "hf_local")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.dist
@pytest.mark.full
def test_two_hosts_give_the_weights_of_the_local_launcher(tmp_path: Path, stub: str) -> None:
    hostfile = hosts(tmp_path, "localhost slots=1  # rank 0", "127.0.0.1")
    check_same_weights(tmp_path, hostfile, stub)


def write_sshd_files(folder: Path, port: int) -> str:
    """Writes keys and the configuration of a server of this user; returns the ssh command for it.

    Its listener is told on the server's command line.
    """
    key = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", key], check=True)
    (folder / "authorized").write_text((folder / "key.pub").read_text())
    options = {
        "HostKey": key,
        "PidFile": "none",
        "AuthorizedKeysFile": folder / "authorized",
        "StrictModes": "no",
        "UsePAM": "no",
        "PermitRootLogin": "yes",
    }
    (folder / "sshd_config").write_text(
        "".join(f"{name} {value}\n" for name, value in options.items())
    )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    known = f"-o StrictHostKeyChecking=no -o UserKnownHostsFile={folder / 'known'}"
    return f"ssh -p {port} -i {key} -l {getpass.getuser()} {known}"


def sshd_command(folder: Path, address: str, port: int) -> list[str]:
    assert SSHD is not None
    listens = f"ListenAddress={address}:{port}"
    return [SSHD, "-D", "-e", "-f", str(folder / "sshd_config"), "-o", listens]


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[str]:
    """A server of this user on a loopback port; the value is the ssh command for it."""
    port = free_port()
    ssh = write_sshd_files(tmp_path, port)
    server = subprocess.Popen(
        sshd_command(tmp_path, "127.0.0.1", port), stderr=(tmp_path / "sshd.log").open("w")
    )
    yield ssh
    server.terminate()
    server.wait()


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.skipif(SSHD is None, reason="needs OpenSSH's server")
def test_two_hosts_over_ssh_give_the_weights_of_the_local_launcher(
    tmp_path: Path, sshd: str
) -> None:
    check_same_weights(tmp_path, hosts(tmp_path, "127.0.0.1", "localhost slots=1"), sshd)


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.skipif(SSHD is None or not CAN_MAKE, reason="needs OpenSSH's server and namespaces")
def test_nodes_over_ssh_give_the_weights_of_the_local_launcher(tmp_path: Path) -> None:
    count = 2
    names = [f"node-{letter}" for letter in "abcd"[:count]]
    ssh, servers = write_sshd_files(tmp_path, 2222), list[subprocess.Popen[str]]()
    with network_nodes(names, tmp_path / "nodes") as nodes:

        def start_on(index: int, *program: str | Path) -> subprocess.Popen[str]:
            own = f"cd {ROOT} && exec env PATH={os.environ['PATH']} OMP_NUM_THREADS=1 "
            own += f"PYTHONPATH={ROOT / 'tests'} {shlex.join(map(str, program))}"
            output = (tmp_path / f"{len(servers)}.log").open("w")
            return subprocess.Popen(
                [nodes.ssh, names[index], own], text=True, stdout=output, stderr=output
            )

        try:
            for index in range(count):
                address = f"10.77.0.{index + 1}"
                servers.append(start_on(index, *sshd_command(tmp_path, address, 2222)))
            given = command(tmp_path / "nodes_run", nodes.hostfile, ssh)
            job = start_on(0, sys.executable, "-m", "hybridrl.cli.main", *given)
            code = job.wait(timeout=240)
        finally:
            for server in servers:
                server.terminate()
                server.wait()
        assert code == 0, (tmp_path / f"{count}.log").read_text()[-4000:]
    starts = json.loads((tmp_path / "nodes_run" / "quickstart-grpo" / "run.json").read_text())
    assert [(one["world_size"], one["hosts"]) for one in starts["starts"]] == [(count, count)]
    check_same_as_local(tmp_path, tmp_path / "nodes_run", count)


def started(logs: Path, output: subprocess.Popen[str], steps: int) -> None:
    """Waits until a run has made steps."""
    file, deadline = logs.parent / "metrics.jsonl", time.monotonic() + 120
    while not file.exists() or len(file.read_text().splitlines()) < steps:
        assert output.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.dist
@pytest.mark.full
def test_sigterm_saves_on_all_hosts(tmp_path: Path, stub: str) -> None:
    folder = tmp_path / "runs"
    hostfile = hosts(tmp_path, "localhost", "127.0.0.1")
    job = start(command(folder, hostfile, stub, "steps.num_steps=100000"))
    try:
        started(folder / "quickstart-grpo" / "logs", job, 1)
        job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=90)
    finally:
        job.kill()
    assert job.returncode == 143 and "stopped by SIGTERM" in output, output[-4000:]
    run_folder = folder / "quickstart-grpo"
    assert list((run_folder / "checkpoints").iterdir()) and not (run_folder / "run.lock").exists()


def refused(tmp_path: Path, ssh: str, lines: Sequence[str], *knobs: str) -> str:
    """Returns what a launch says that starts nothing."""
    folder = tmp_path / "none"
    output = run(*command(folder, hosts(tmp_path, *lines), ssh, *knobs), expect=2)
    assert not folder.exists() and "Traceback" not in output
    return output


def test_bad_hostfiles_are_refused_before_anything_is_started(tmp_path: Path, stub: str) -> None:
    wrong = ("a slots=two", "b slots=0", "c max=3", "slots=2", "d slots=1")
    output = refused(tmp_path, stub, wrong)
    assert [f"line {n}" in output for n in range(1, 7)] == [False, *[True] * 4, False], output
    output = refused(tmp_path, stub, ["localhost slots=1"])
    assert "1 slots on 1 hosts" in output and "at least 2 slots" in output
    output = refused(tmp_path, stub, ["nowhere slots=2"])
    assert "host nowhere" in output and "Could not resolve hostname" in output
    assert output.count("allowed:") == 1
    output = refused(tmp_path, stub, ["localhost", "other slots=1"])
    assert "localhost as the first of several hosts" in output
    output = refused(tmp_path, stub, ["# none"])
    assert "no host" in output


def test_keys_of_services_stand_in_no_command_line(tmp_path: Path) -> None:
    from hybridrl.services.launch.node import Order

    program = (
        "import os, sys; os.environ['WANDB_API_KEY'] = 'secret'; "
        "from pathlib import Path; "
        "from hybridrl.services.launch.hosts import Host, Share, SshCluster; "
        "from hybridrl.services.launch.hosts_job import HostsJob; "
        f"logs = Path({str(tmp_path)!r}); "
        "hosts = [Host('a', 1)]; parts = [Share(1, 0, 1, 'a', 1)]; "
        "job = HostsJob(SshCluster(hosts, [str(logs / 'ssh')]), hosts, parts, None); "
        "job.run(['train'], logs, {})"
    )
    file = tmp_path / "ssh"
    file.write_text('#!/bin/sh\necho "$@" >"$0.arguments"; head -n 1 >"$0.stdin"; exit 2\n')
    file.chmod(0o755)
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False, timeout=60)
    assert "secret" not in (tmp_path / "ssh.arguments").read_text()
    line = (tmp_path / "ssh.stdin").read_bytes()
    assert Order.from_line(line).environment["WANDB_API_KEY"] == "secret"
    assert json.loads(line)["share"]["world_size"] == 1
