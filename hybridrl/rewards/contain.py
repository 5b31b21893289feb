"""Runs one untrusted program so that nothing of it lasts; a script of its own, started by
sandbox.py as `python -I contain.py LIMITS PROGRAM FOLDER`.

Three processes: the outer one enters new namespaces (mounts, processes, network, IPC; as a user
also a user namespace), the inner one is process 1 there and arranges the file system (all of it
read-only, but for a small file system in memory at FOLDER), the third becomes the program, without
privileges, within its limits, and without the system calls that give memory which no limit counts.
When process 1 ends the kernel kills all others of its namespace,
so neither daemons nor fork bombs outlive it; it ends with the outer one, and that with its starter.
Linux only; imports nothing of hybridrl.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
import time
from typing import NamedTuple

NEWNS, NEWUSER, NEWPID, NEWNET, NEWIPC, NEWUTS = (
    0x00020000,
    0x10000000,
    0x20000000,
    0x40000000,
    0x08000000,
    0x04000000,
)
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY = 442, -100, 0x8000, 1
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
# Sockets and files of others, to which a read-only file system is no bar; devices but for the plain
# ones.
HIDDEN = ("/tmp", "/var/tmp", "/home", "/root", "/mnt", "/media", "/srv")
DEVICES = ("null", "zero", "full", "random", "urandom")
RLIMIT_MSGQUEUE = 12  # bytes of POSIX message queues; not in the module resource
NOT_CONTAINED = 97  # exit code: it could not be arranged, and the program did not run
FIRST_UID = 0x20000000  # of processes that root starts: nobody else's


class Calls(NamedTuple):
    """System calls of a kind of machine that are refused to the program, by number.

    What is refused always gives memory which no limit counts: System V shared memory and messages,
    memory files, io_uring; namespaces of its own (a tmpfs in one may take half of the host's
    memory); sockets, of which one that listens holds what thousands have sent, and larger buffers
    for them; pages given to a pipe. There is no network, and a pair of sockets, as event loops and
    multiprocessing have, needs neither.

    Args:
        audit: number of the machine.
        refused: always.
        clone, clone3, socketpair, fcntl: refused by their arguments.
    """

    audit: int
    refused: tuple[int, ...]
    clone: int
    clone3: int
    socketpair: int
    fcntl: int


# In this order: shmget, shmat, msgget, msgsnd, memfd_create, memfd_secret, io_uring_setup, unshare,
# setns, mount, open_tree, fsopen, socket, setsockopt, splice, tee, vmsplice, sendfile.
# linux/audit.h, arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h.
REFUSED = {
    "x86_64": Calls(
        0xC000003E,
        (29, 30, 68, 69, 319, 447, 425, 272, 308, 165, 428, 430, 41, 54, 275, 276, 278, 40),
        *(56, 435, 53, 72),
    ),
    "aarch64": Calls(
        0xC00000B7,
        (194, 196, 186, 189, 279, 447, 425, 97, 268, 40, 428, 430, 198, 208, 76, 77, 75, 71),
        *(220, 435, 199, 25),
    ),
}
FIRST_ARGUMENT, SECOND_ARGUMENT = 16, 24  # lower halves in struct seccomp_data
AF_UNIX, NOT_STREAM, F_SETPIPE_SZ = 1, 0xE, 1031  # SOCK_STREAM is 1; flags are higher bits
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
ALLOW, FAIL_WITH = 0x7FFF0000, 0x00050000  # linux/seccomp.h; the latter with an errno
X32_CALLS = 0x40000000  # x86-64 has a second table of calls from here

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Runs the program; exits like it, or with 128 + the signal that ended it."""
    limits, program, folder = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        _enter_namespaces()
        inner = os.fork()  # the first child is process 1 of the new namespace
        if not inner:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            _be_first_process(limits, program, folder)
    except OSError as error:
        _give_up(error)
    os._exit(_wait_for(inner))


def _enter_namespaces() -> None:
    spaces = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS
    if os.geteuid() == 0:
        _check(libc.unshare(spaces), "unshare")
        return
    uid, gid = os.geteuid(), os.getegid()
    _check(libc.unshare(spaces | NEWUSER), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _be_first_process(limits: dict[str, int], program: str, folder: str) -> None:
    try:
        _arrange_files(limits, program, folder)
        running = os.fork()
        if not running:
            _become_program(limits, folder)
    except OSError as error:
        _give_up(error)
    until = time.monotonic() + limits["time_s"]
    while time.monotonic() < until:  # it also takes over orphans, which are none of its business
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == running:
            code = _code(status)
            os._exit(1 if code == NOT_CONTAINED else code)  # that code is not the program's to give
        time.sleep(0.002)
    os._exit(128 + signal.SIGALRM)


def _arrange_files(limits: dict[str, int], program: str, folder: str) -> None:
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    prefixes = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)}
    if os.geteuid() == 0:
        for prefix in prefixes:
            _uncover(prefix)
    for hidden in HIDDEN:
        if os.path.isdir(hidden) and not os.path.islink(hidden):
            _cover(hidden, [p for p in prefixes if (p + "/").startswith(hidden + "/")])
    _cover("/dev", [f"/dev/{name}" for name in DEVICES])
    os.makedirs(folder, exist_ok=True)
    attributes = (ctypes.c_uint64 * 4)(ATTR_RDONLY, 0, 0, 0)
    done = libc.syscall(
        SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, ctypes.sizeof(attributes)
    )
    _check(done, "mount_setattr")
    options = f"size={limits['disk_mib']}m,nr_inodes=1024,mode=1777"
    _mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, options)
    if os.path.isdir("/run"):  # sockets of services
        _mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "size=4k")
    try:  # not the processes outside, with their environment
        _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)
    except OSError:  # where /proc has covered parts, as in containers
        _mount("tmpfs", "/proc", "tmpfs", MS_NOSUID | MS_NODEV, "size=4k")
    os.chdir(folder)
    with open("main.py", "w", encoding="utf-8") as file:
        file.write(program)


def _cover(hidden: str, kept: list[str]) -> None:
    """Puts an empty folder over one, in which only what is kept can be reached."""
    files = {path: os.open(path, os.O_PATH) for path in kept if os.path.exists(path)}
    _mount("tmpfs", hidden, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path, file in files.items():
        if os.path.isdir(f"/proc/self/fd/{file}"):
            os.makedirs(path, exist_ok=True)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))
        _mount(f"/proc/self/fd/{file}", path, None, MS_BIND | MS_REC)
        os.close(file)


def _uncover(prefix: str) -> None:
    """Makes the interpreter's folder reachable for a user who may not enter one above it, of which
    nothing else stays visible.
    """
    parts = prefix.split("/")[1:]
    above = ["/" + "/".join(parts[: i + 1]) for i in range(len(parts))]
    closed = next((folder for folder in above if not os.stat(folder).st_mode & 0o001), None)
    if closed is None:
        return
    kept = os.open(prefix, os.O_PATH)
    _mount("tmpfs", closed, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.makedirs(prefix, exist_ok=True)
    _mount(f"/proc/self/fd/{kept}", prefix, None, MS_BIND | MS_REC)
    os.close(kept)


def _become_program(limits: dict[str, int], folder: str) -> None:
    if os.geteuid() == 0:
        # Each its own user, so that the limit on processes counts only this program's.
        uid = FIRST_UID + limits["number"]
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _refuse_calls()
    mib = 1 << 20
    for kind, most in (
        (resource.RLIMIT_CPU, limits["time_s"] + 1),
        (resource.RLIMIT_AS, limits["memory_mib"] * mib),
        (resource.RLIMIT_FSIZE, limits["disk_mib"] * mib),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, 64),
        (RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    os.execve(sys.executable, [sys.executable, "-I", "main.py"], environment)


def _refuse_calls() -> None:
    """Makes the calls of REFUSED fail, for this process and all that it starts; on machines that
    are not in it none.
    """
    if (known := REFUSED.get(os.uname().machine)) is None:
        return
    refuse, missing = FAIL_WITH | errno.EPERM, FAIL_WITH | errno.ENOSYS
    # (code, jump if true, jump if false, operand): linux/filter.h; data as of struct seccomp_data.
    lines = [
        (LOAD, 0, 0, 4),  # the machine: another has other numbers
        (EQUAL, 1, 0, known.audit),
        (RETURN, 0, 0, refuse),
        (LOAD, 0, 0, 0),  # the call
        (AT_LEAST, 0, 1, X32_CALLS),
        (RETURN, 0, 0, refuse),
    ]
    for call in known.refused:
        lines += [(EQUAL, 0, 1, call), (RETURN, 0, 0, refuse)]
    # Its flags lie in memory; the C library falls back to clone.
    lines += [(EQUAL, 0, 1, known.clone3), (RETURN, 0, 0, missing)]
    for call, argument, test, operand in (
        (known.clone, FIRST_ARGUMENT, ANY_BIT, NEWUSER),
        (known.socketpair, FIRST_ARGUMENT, ANY_BIT, 0xFFFFFFFF ^ AF_UNIX),
        (known.socketpair, SECOND_ARGUMENT, ANY_BIT, NOT_STREAM),
        (known.fcntl, SECOND_ARGUMENT, EQUAL, F_SETPIPE_SZ),
    ):
        lines += [
            (EQUAL, 0, 4, call),
            (LOAD, 0, 0, argument),
            (test, 0, 1, operand),
            (RETURN, 0, 0, refuse),
            (LOAD, 0, 0, 0),
        ]
    lines.append((RETURN, 0, 0, ALLOW))
    code = b"".join(struct.pack("=HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(lines), ctypes.addressof(buffer)))
    done = libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)
    _check(done, "seccomp")


def _wait_for(pid: int) -> int:
    return _code(os.waitpid(pid, 0)[1])


def _code(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    done = libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        options.encode(),
    )
    _check(done, f"mount {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _give_up(error: OSError) -> None:
    os.write(2, f"not contained: {error.strerror or error}\n".encode())
    os._exit(NOT_CONTAINED)


if __name__ == "__main__":
    main()
