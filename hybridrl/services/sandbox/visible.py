"""Which files of the host a contained program can read: the interpreter, its packages, the system's
libraries and programs, and what a user adds. No torch; imports nothing of hybridrl.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# Of the system: what the interpreter and its packages load, programs that a shell finds, time
# zones, the number of processors.
SYSTEM = (
    *("/bin", "/lib", "/lib32", "/lib64", "/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64"),
    *("/usr/local/lib", "/usr/share/zoneinfo", "/nix/store", "/sys/devices/system/cpu"),
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime"),
)
ASK = """
import json, sys
with open("/proc/self/maps") as file:
    mapped = {line.split(maxsplit=5)[-1].strip() for line in file}
prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
print(json.dumps([sys.path, prefixes, [sys.executable, sys._base_executable], sorted(mapped)]))
"""


@functools.cache
def visible_files(more: tuple[str, ...]) -> dict[str, Any]:
    """Returns what a contained program can read.

    Args:
        more: further files and folders.

    Returns:
        `real`, paths without symbolic links, none of which is within another; `links`, the targets
        of symbolic links on the way to them; `path`, the interpreter's sys.path.
    """
    asked = [sys.executable, "-I", "-c", ASK]
    answer = subprocess.run(asked, stdout=subprocess.PIPE, env={}, cwd="/", check=True).stdout
    path, prefixes, executables, mapped = json.loads(answer)
    found = [*SYSTEM, *executables, *_library_folders(), *more]
    for prefix in prefixes:
        parts = ("lib", "lib64", "pyvenv.cfg", "share/zoneinfo")
        found += [os.path.join(prefix, part) for part in parts]
    # Other folders of sys.path are of editable installs: a project's, with all that lies there.
    found += [one for one in path if one.endswith(("site-packages", "dist-packages"))]
    found += [os.path.dirname(one) for one in mapped if ".so" in os.path.basename(one)]
    links: dict[str, str] = {}
    all_real = {_followed(one, links) for one in found if os.path.exists(one)}
    real: list[str] = []
    for one in sorted(all_real):  # what holds others comes before them
        if one != "/" and not any(one.startswith(above + "/") for above in real):
            real.append(one)
    return {"real": real, "links": links, "path": path}


def _library_folders() -> list[str]:
    """Returns the folders in which the system's loader looks for libraries."""
    found = []
    for file in [Path("/etc/ld.so.conf"), *Path("/etc/ld.so.conf.d").glob("*.conf")]:
        if file.is_file() and os.access(file, os.R_OK):
            lines = map(str.strip, file.read_text(encoding="utf-8", errors="replace").splitlines())
            found += [line for line in lines if line.startswith("/")]
    return found


def _followed(path: str, links: dict[str, str]) -> str:
    """Returns the path without symbolic links, and adds to `links` those met."""
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
