"""Nodes on this machine: network namespaces with addresses, names and mounts of their own.

Needs root and iproute2. Nodes are joined by a bridge in a namespace of its own. A script stands in
for ssh and runs commands in a node; what is wrong with a node is a shell text that runs there
first.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CAN_MAKE = os.name == "posix" and os.getuid() == 0 and shutil.which("ip") is not None

# ssh OPTIONS HOST COMMAND, where a node's folder stands before PATH and PYTHONPATH.
STUB = """#!/bin/bash
while [ $# -gt 2 ]; do shift; done
home={home}/$1
[ -d "$home" ] || {{ echo "ssh: Could not resolve hostname $1" >&2; exit 255; }}
own="s# PATH=# PATH=$home/bin:#; s# PYTHONPATH=# PYTHONPATH=$home/path:#"
command=$(printf %s "$2" | sed "$own")
exec ip netns exec {prefix}$1 unshare --uts bash -c \\
  "hostname $1; mount --bind $home/hosts /etc/hosts; . $home/first; $command"
"""


class Nodes:
    """Nodes that are up; the first has the address 10.77.0.1, each a folder in `home`."""

    def __init__(self, names: Sequence[str], home: Path, prefix: str) -> None:
        self.names, self.home, self.prefix = names, home, prefix
        self.ssh = home / "ssh"
        self.hostfile = home / "hostfile"

    def spoil(self, name: str, shell: str) -> None:
        """Has a shell text run in a node before each command."""
        with (self.home / name / "first").open("a") as file:
            file.write(shell + "\n")

    def run(self, name: str, *command: str) -> None:
        """Runs a command in a node's network."""
        ip("netns", "exec", self.prefix + name, *command)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


@contextmanager
def network_nodes(names: Sequence[str], home: Path) -> Iterator[Nodes]:
    """Makes nodes, and removes them at the end."""
    prefix = f"hy{secrets.token_hex(2)}-"
    switch = f"{prefix}switch"
    hosts = "127.0.0.1 localhost\n"
    hosts += "".join(f"10.77.0.{index} {name}\n" for index, name in enumerate(names, 1))
    made = [switch, *(prefix + name for name in names)]
    try:
        for namespace in made:
            ip("netns", "add", namespace)
        ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge0", "up")
        for index, name in enumerate(names, 1):
            port, own = f"port{index}", ["-n", prefix + name]
            ip(
                "-n",
                switch,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "eth0",
                "netns",
                made[index],
            )
            ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            ip(*own, "addr", "add", f"10.77.0.{index}/24", "dev", "eth0")
            ip(*own, "link", "set", "eth0", "up")
            ip(*own, "link", "set", "lo", "up")
            for part in ("bin", "path"):
                (home / name / part).mkdir(parents=True)
            (home / name / "hosts").write_text(hosts)
            (home / name / "first").touch()
        nodes = Nodes(names, home, prefix)
        nodes.ssh.write_text(STUB.format(home=home, prefix=prefix))
        nodes.ssh.chmod(0o755)
        nodes.hostfile.write_text("".join(f"{name} slots=1\n" for name in names))
        yield nodes
    finally:
        for namespace in made:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)
