"""Lists the host files that a sandboxed program can read. Imports nothing of hybridrl."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# Libraries of the interpreter and packages, shell programs, time zones, processors.
SYSTEM = (
    *("/bin", "/lib", "/lib32", "/lib64", "/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64"),
    *("/usr/local/lib", "/usr/share/zoneinfo", "/nix/store", "/sys/devices/system/cpu"),
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime"),
)
QUERY = """
import json, sys
with open("/proc/self/maps") as file:
    mapped = {line.split(maxsplit=5)[-1].strip() for line in file}
prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
print(json.dumps([sys.path, prefixes, [sys.executable, sys._base_executable], sorted(mapped)]))
"""


@functools.cache
def visible_files(more: tuple[str, ...]) -> dict[str, Any]:
    """Returns the paths that a sandboxed program can read, including `more`.

    `real` lists paths without symbolic links, none inside another; `links` maps links on these
    paths to their targets; `path` is the interpreter's sys.path.
    """
    command = [sys.executable, "-I", "-c", QUERY]
    answer = subprocess.run(command, stdout=subprocess.PIPE, env={}, cwd="/", check=True).stdout
    path, prefixes, executables, mapped = json.loads(answer)
    found = [*SYSTEM, *executables, *_library_folders(), *more]
    for prefix in prefixes:
        parts = ("lib", "lib64", "pyvenv.cfg", "share/zoneinfo")
        found += [os.path.join(prefix, part) for part in parts]
    # Other folders in sys.path are editable installs: whole projects, which stay hidden.
    found += [p for p in path if p.endswith(("site-packages", "dist-packages"))]
    found += [os.path.dirname(file) for file in mapped if ".so" in os.path.basename(file)]
    links: dict[str, str] = {}
    all_real = {_resolve(file, links) for file in found if os.path.exists(file)}
    real: list[str] = []
    for file in sorted(all_real):  # a folder sorts before its contents
        if file != "/" and not any(file.startswith(above + "/") for above in real):
            real.append(file)
    return {"real": real, "links": links, "path": path}


def _library_folders() -> list[str]:
    found = []
    for file in [Path("/etc/ld.so.conf"), *Path("/etc/ld.so.conf.d").glob("*.conf")]:
        if file.is_file() and os.access(file, os.R_OK):
            lines = map(str.strip, file.read_text(encoding="utf-8", errors="replace").splitlines())
            found += [line for line in lines if line.startswith("/")]
    return found


def _resolve(path: str, links: dict[str, str]) -> str:
    left, at = path.split("/")[::-1], "/"
    while left:
        step = left.pop()
        if step in ("", "."):
            continue
        next_at = os.path.dirname(at) if step == ".." else os.path.join(at, step)
        if os.path.islink(next_at):
            links[next_at] = os.readlink(next_at)
            left += links[next_at].split("/")[::-1]
            at = "/" if links[next_at].startswith("/") else at
        else:
            at = next_at
    return at
