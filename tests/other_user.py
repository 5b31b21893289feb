"""Runs code as a user who is not root, where the tests run as root.

The interpreter and the packages often lie in folders that only root may enter, such as /root. In a
mount namespace of the new process these folders are covered by empty ones, in which nothing but
what the code needs is placed again: of a folder that is itself closed the folders in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

UID = 65534
BECOME = """
import ctypes, os, sys
uid, code, paths = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
libc = ctypes.CDLL(None, use_errno=True)
def check(done):
    if done: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def mount(source, target, kind, flags, options=b""):
    check(libc.mount(source.encode(), target.encode(), kind, ctypes.c_ulong(flags), options))
def open_to_all(path):
    if os.stat(path).st_mode & 1:
        return [path]
    inside = [entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
    return [each for one in inside for each in open_to_all(one)]
paths = sorted({each for path in paths for each in open_to_all(path)})
check(libc.unshare(0x20000))
mount("none", "/", None, 16384 | 1 << 18)
files, closed = {path: os.open(path, os.O_PATH) for path in paths}, set()
for path in files:
    parts = path.split("/")
    above = ["/".join(parts[:i]) for i in range(2, len(parts) + 1)]
    closed |= {folder for folder in above if not os.stat(folder).st_mode & 1}
for folder in sorted(closed):
    if os.path.exists(folder):
        mount("tmpfs", folder, b"tmpfs", 0, b"mode=755")
for path, file in files.items():
    if not os.path.exists(path):
        os.makedirs(path)
        mount(f"/proc/self/fd/{file}", path, None, 4096 | 16384)
    os.close(file)
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
os.execv(sys.executable, [sys.executable, "-c", code])
"""


def run_as_user(code: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Runs Python code as the user UID with this standard input; root only."""
    needed = {sys.prefix, sys.base_prefix, str(Path(__file__).parents[1])}
    needed |= {path for path in sys.path if os.path.isdir(path)}
    paths = sorted(os.path.realpath(path) for path in needed)
    return subprocess.run(
        [sys.executable, "-c", BECOME, str(UID), code, *paths],
        capture_output=True,
        text=True,
        input=given,
        timeout=120,
        check=False,
        cwd="/",
        env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"},
    )
