"""Runs one untrusted program and removes all traces of it; code_reward.py starts this process.

The outer process enters new namespaces (mounts, network, IPC, host name; without root also a user
namespace). It builds a new root directory with the interpreter, the system's libraries and a few
devices (all read-only), and FOLDER, a small file system in memory. One or two roles run in this
root, each with its own process namespace and limits, no privileges, and the system calls of
syscalls.py: the program, and its tests if any (judge.py), which call it through two pipes.

When process 1 of a namespace ends, the kernel kills all its processes. Process 1 dies with the
outer process, which dies with its parent, so neither daemons nor fork bombs survive. bubblewrap
would replace only `_build_root` and `_enter_namespaces` (docs/adr/0008). Linux 5.12, or 5.14
without root.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from importlib import import_module

from hybridrl.services.sandbox.verdict import ENDED, FAILED, NOT_CONTAINED

TYPE_CHECKING = False  # importing `typing` is slow
if TYPE_CHECKING:
    from typing import Any

NEWNS, NEWUSER, NEWPID = 0x00020000, 0x10000000, 0x20000000
NEWNET, NEWIPC, NEWUTS = 0x40000000, 0x08000000, 0x04000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY, ATTR_NOSUID = 442, -100, 0x8000, 1, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
CAPABILITIES = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
RLIMIT_MSGQUEUE = 12  # Limit on POSIX message queues; missing in the module `resource`.
FIRST_UID = 0x20000000  # First user id for programs if the trainer is root.
USER = 1000  # User id inside the sandbox if the trainer is not root.
OWN_PROCESSES = 5  # Processes of the sandbox itself count towards the user's limit.

FOLDER = "/program"  # The program may write to this folder.
CODE = "/hybridrl"  # Folder with the code of the two roles.
START_PROGRAM = (
    f"import sys; sys.path.insert(0, {CODE!r})\n"
    "from hybridrl.services.sandbox.program import main\n"
    "del sys.path[0]\n"
    "main()"
)
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "shm": FOLDER,  # for semaphores of multiprocessing
}

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Runs the plan from descriptor argv[1] with the tests from descriptor argv[2] (-1 for none).

    Exits with the program's code (128 + the number of a signal), or a verdict from verdict.py.
    """
    tests = int(sys.argv[2])
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        plan = marshal.load(file)
    try:
        own_user = _enter_namespaces()
        # Prevents other processes with the same user id from reading this process's /proc files.
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        _build_root(plan)
        until = time.monotonic() + plan["limits"]["time_s"]
        if tests < 0:
            program = _start(lambda: _first_process(plan, own_user, []), [], [], with_proc=True)
            os._exit(_wait(program, until))
        from_program, to_judge = os.pipe()
        from_judge, to_program = os.pipe()
        judges, programs = [tests, from_program, to_program], [from_judge, to_judge]
        judging = _start(lambda: _judge(plan, own_user, *judges), judges, programs)
        program = _start(
            lambda: _first_process(plan, own_user, programs), programs, judges, with_proc=True
        )
        for file_no in judges + programs:
            os.close(file_no)
    except Exception as error:  # raised before any role has started
        _give_up(error)
    code = _wait(judging, until)
    if code == ENDED:  # the exit code of the program shows why
        ended = _wait(program, until)
        code = ended if ended == NOT_CONTAINED or ended > 128 else FAILED
    os._exit(code)


def _start(
    role: Callable[[], None], own: list[int], others: list[int], with_proc: bool = False
) -> int:
    """Starts a role as process 1 of a new namespace. Returns the id of the process that waits.

    Both close the descriptors of the other role (`others`), which would see no end of file while
    they are open here.
    """
    waiting = os.fork()
    if waiting:
        return waiting
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _check(libc.unshare(NEWPID | NEWNS), "unshare")
        first = os.fork()
        for file_no in others + own * (first != 0):
            os.close(file_no)
        if not first:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if with_proc:
                _mount_proc()
            _close_root()
            role()
    except Exception as error:  # roles handle their own errors, so this role has not started
        _give_up(error)
    os._exit(_code(os.waitpid(first, 0)[1]))


def _enter_namespaces() -> bool:
    spaces = NEWNS | NEWNET | NEWIPC | NEWUTS
    uid, gid = os.geteuid(), os.getegid()
    own_user = uid == 0 and _has_users()
    _check(libc.unshare(spaces if own_user else spaces | NEWUSER), "unshare")
    if not own_user:
        _text("/proc/self/setgroups", "deny")
        _text("/proc/self/uid_map", f"{USER} {uid} 1")
        _text("/proc/self/gid_map", f"{USER} {gid} 1")
    libc.sethostname(b"program", 7)
    return own_user


def _has_users() -> bool:
    """Whether this process, which runs as root, may switch to any user id; not in containers."""
    lines = _text("/proc/self/uid_map").splitlines()
    ranges = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    return any(first <= FIRST_UID and first + count >= FIRST_UID << 2 for first, count in ranges)


def _build_root(plan: dict[str, Any]) -> None:
    """Switches to an empty root directory, and mounts the visible files in it.

    The host's root stays the current folder until _close_root, as the source of mounts.
    """
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    somewhere = os.path.dirname(__file__)  # any existing folder; the mount hides it briefly
    host = os.open("/", os.O_PATH | os.O_DIRECTORY)
    _mount("tmpfs", somewhere, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.chdir(somewhere)
    _check(libc.pivot_root(b".", b"."), "pivot_root")
    os.fchdir(host)
    os.close(host)
    _place(plan["visible"]["real"], plan["visible"]["links"])
    os.mkdir("/dev")
    for name in DEVICES:
        _bind(f"/dev/{name}")
    for name, target in LINKS.items():
        os.symlink(target, f"/dev/{name}")
    os.makedirs("/etc", exist_ok=True)
    uid = FIRST_UID + 2 * plan["limits"]["number"] if os.geteuid() == 0 else USER
    _text("/etc/passwd", f"program:x:{uid}:{uid}::{FOLDER}:/bin/sh\n")
    _text("/etc/group", f"program:x:{uid}:\n")
    _bind(plan["code"], CODE)
    os.mkdir("/proc")
    os.mkdir(FOLDER)
    options = f"size={plan['limits']['disk_mib']}m,nr_inodes=1024,mode=1777"
    _mount("tmpfs", FOLDER, "tmpfs", MS_NOSUID | MS_NODEV, options)
    _text(f"{FOLDER}/main.py", plan["program"])
    if not os.path.lexists("/tmp"):
        os.symlink(FOLDER, "/tmp")


def _place(real: list[str], links: dict[str, str]) -> None:
    for path in real:
        _bind(path)
    for link, target in links.items():
        if not os.path.lexists(link):
            os.makedirs(os.path.dirname(link), exist_ok=True)
            os.symlink(target, link)


def _bind(path: str, place: str | None = None) -> None:
    source, place = "." + path, place or path  # this path is relative to the host's root
    if os.path.isdir(source):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, place, None, MS_BIND | MS_REC)


def _mount_proc() -> None:
    """Mounts a /proc that shows the processes of this namespace, except process 1."""
    flags = MS_NOSUID | MS_NODEV
    try:
        _mount("proc", "/proc", "proc", flags, "hidepid=2")
    except OSError:  # forbidden if other mounts hide parts of /proc, as in containers
        _mount("tmpfs", "/proc", "tmpfs", flags, "size=4k")


def _close_root() -> None:
    """Unmounts the host's root, and makes everything read-only except the program's folder."""
    _check(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")
    _set_attributes("/", AT_RECURSIVE, ATTR_RDONLY | ATTR_NOSUID, 0)
    _set_attributes(FOLDER, 0, 0, ATTR_RDONLY)
    os.chdir(FOLDER)


def _set_attributes(path: str, flags: int, those: int, not_those: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(those, not_those, 0, 0)
    size = ctypes.sizeof(attributes)
    done = libc.syscall(
        SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, ctypes.byref(attributes), size
    )
    _check(done, f"mount_setattr {path}")


def _first_process(plan: dict[str, Any], own_user: bool, pipes: list[int]) -> None:
    failed, failing = os.pipe()  # closed when the program starts (exec)
    running = os.fork()
    if not running:
        try:
            _restrict(plan, own_user, 0)
            for pipe in pipes:
                os.set_inheritable(pipe, True)
            script = ["-c", START_PROGRAM, *map(str, pipes)] if pipes else ["main.py"]
            os.execve(sys.executable, [sys.executable, "-I", *script], _environment())
        except Exception as error:  # raised before the program has started
            os.write(failing, b"failed")
            _give_up(error)
    for file_no in [*pipes, failing]:
        os.close(file_no)
    while True:
        pid, status = os.wait()
        if pid == running:
            code = _code(status)
            if code == NOT_CONTAINED and not os.read(failed, 1):
                code = 1  # this code is reserved for the sandbox
            os._exit(code)


def _judge(
    plan: dict[str, Any], own_user: bool, tests: int, from_program: int, to_program: int
) -> None:
    with os.fdopen(tests, encoding="utf-8") as file:
        text = file.read()
    _restrict(plan, own_user, 1)
    os.environ.clear()
    os.environ.update(_environment())
    for name in [name for name in sys.modules if name.partition(".")[0] == "hybridrl"]:
        del sys.modules[name]  # they were loaded from a host folder that is no longer mounted
    sys.path[:] = [CODE, *plan["visible"]["path"]]
    judge = import_module("hybridrl.services.sandbox.judge")
    del sys.path[0]
    judge.main(text, from_program, to_program)


def _environment() -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": FOLDER,
        "TMPDIR": FOLDER,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _restrict(plan: dict[str, Any], own_user: bool, role: int) -> None:
    limits, num_processes = plan["limits"], plan["limits"]["processes"]
    if own_user:
        # Use a separate user, so that only this program's processes count towards the limit.
        uid = FIRST_UID + 2 * limits["number"] + role
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    else:
        num_processes += OWN_PROCESSES
    header = struct.pack("=Ii", CAPABILITIES, 0)
    _check(libc.capset(header, bytes(24)), "capset")
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # set again, because changing the user clears it
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    mib = 1 << 20
    for kind, most in (
        (resource.RLIMIT_CPU, limits["time_s"] + 1),
        (resource.RLIMIT_AS, limits["memory_mib"] * mib),
        (resource.RLIMIT_FSIZE, limits["disk_mib"] * mib),
        (resource.RLIMIT_NPROC, num_processes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_SIGPENDING, 64),
        (RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    code = bytes.fromhex(plan["filter"])
    if not code:
        return
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    _check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0), "seccomp")


def _wait(pid: int, until: float) -> int:
    """Returns the exit code of a role, or that of SIGALRM if it has not ended by `until`."""
    watched = select.poll()
    watched.register(os.pidfd_open(pid), select.POLLIN)
    if not watched.poll(max(0.0, until - time.monotonic()) * 1000):
        return 128 + signal.SIGALRM
    return _code(os.waitpid(pid, 0)[1])


def _text(path: str, new: str | None = None) -> str:
    with open(path, "r" if new is None else "w", encoding="utf-8") as file:
        return file.read() if new is None else str(file.write(new))


def _code(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    of_kind = kind.encode() if kind else None
    done = libc.mount(
        source.encode(), target.encode(), of_kind, ctypes.c_ulong(flags), options.encode()
    )
    _check(done, f"mount {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _give_up(error: Exception) -> None:
    text = error.strerror if isinstance(error, OSError) else None
    reason = text or f"{type(error).__name__}: {error}"
    os.write(2, f"not contained: {reason}\n".encode())
    os._exit(NOT_CONTAINED)
