"""Defines which system calls a sandboxed program may make, as a seccomp filter for the kernel.

It is an allow list, which remains valid on later kernels: of about 380 calls, CPython, numpy,
threads, subprocesses and `multiprocessing` need few. A deny list would need every call that
allocates memory without a limit (keys, asynchronous I/O contexts, locks, inotify, BPF maps) or
accesses other processes. Other calls fail with ENOSYS, as on an older kernel, so that libraries use
their fallback.
"""

from __future__ import annotations

import errno
import struct
from typing import NamedTuple

# Name, number on x86-64, number on arm64 (- if it has none).
# arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h.
ALLOWED = """
read 0 63, write 1 64, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, preadv 295 69,
pwritev 296 70, preadv2 327 286, pwritev2 328 287, open 2 -, openat 257 56, openat2 437 437,
creat 85 -, close 3 57, close_range 436 436, lseek 8 62, stat 4 -, fstat 5 80, lstat 6 -,
newfstatat 262 -, statx 332 291, statfs 137 43, fstatfs 138 44, access 21 -, faccessat 269 48,
faccessat2 439 439, getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, renameat 264 38,
renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -, link 86 -, linkat 265 37, unlink 87
-, unlinkat 263 35, symlink 88 -, symlinkat 266 36, readlink 89 -, readlinkat 267 78, chmod 90
-, fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, umask
95 166, utime 132 -, utimes 235 -, utimensat 280 88, futimesat 261 -, getdents 78 -, getdents64
217 61, truncate 76 45, ftruncate 77 46, fallocate 285 47, fsync 74 82, fdatasync 75 83,
sync_file_range 277 84, fadvise64 221 223, flock 73 32, dup 32 23, dup2 33 -, dup3 292 24, pipe
22 -, pipe2 293 59, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11,
llistxattr 195 12, flistxattr 196 13, mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216,
madvise 28 233, brk 12 214, mincore 27 232, msync 26 227, get_mempolicy 239 236, membarrier 324
283, fork 57 -, vfork 58 -, execve 59 221, exit 60 93, exit_group 231 94, wait4 61 260, waitid
247 95, kill 62 129, tkill 200 130, tgkill 234 131, getpid 39 172, getppid 110 173, gettid 186
178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148,
getresgid 120 150, getgroups 115 158, setsid 112 157, setpgid 109 154, getpgid 121 155, getpgrp
111 -, getsid 124 156, set_tid_address 218 96, set_robust_list 273 99, get_robust_list 274 100,
futex 202 98, futex_waitv 449 449, rseq 334 293, restart_syscall 219 128, arch_prctl 158 -,
sched_yield 24 124, sched_getaffinity 204 123, sched_getparam 143
121, sched_getscheduler 145 120, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
sched_rr_get_interval 148 127, sched_getattr 315 275, getpriority 140 141,
getrlimit 97 163, setrlimit 160 164, getrusage 98 165, times 100 153,
clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101,
gettimeofday 96 169, time 201 -, getcpu 309 168, sysinfo 99 179, uname 63 160, getrandom 318
278, capget 125 90, pidfd_open 434 434, pidfd_send_signal 424 424, rt_sigaction 13 134,
rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137,
rt_sigsuspend 130 133, rt_sigqueueinfo 129 138, sigaltstack 131 132, pause 34 -, alarm 37 -,
setitimer 38 103, getitimer 36 102, timerfd_create 283 85, timerfd_settime 286 86,
timerfd_gettime 287 87, eventfd 284 -, eventfd2 290 19, poll 7 -, ppoll 271 73, select 23 -,
pselect6 270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -,
epoll_pwait 281 22, epoll_pwait2 441 441, sendto 44 206, recvfrom 45 207, sendmsg 46 211,
recvmsg 47 212, shutdown 48 210, getsockopt 55 209, getsockname 51 204, getpeername 52 205
"""
# The same columns for calls that are limited to some arguments, or fail otherwise.
OTHERS = """
clone 56 220, fcntl 72 25, ioctl 16 29, prctl 157 167, socketpair 53 199, prlimit64 302 261,
setpriority 141 140, sched_setaffinity 203 122,
socket 41 198, setsockopt 54 208, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7
"""
# Socket buffers use kernel memory, and there is no network anyway. Values of extended attributes
# also use kernel memory; copy functions expect ENOTSUP from file systems that do not support them.
FAILING = {
    "socket": errno.EPERM,
    "setsockopt": errno.EPERM,
    "setxattr": errno.ENOTSUP,
    "lsetxattr": errno.ENOTSUP,
    "fsetxattr": errno.ENOTSUP,
}


class Rule(NamedTuple):
    """A call that is allowed only with some values (lower 32 bits), by argument index.

    Others fail with `otherwise`; with `no_op` the call does nothing and reports success.
    """

    call: str
    values: dict[int, tuple[int, ...]]
    otherwise: int
    no_op: tuple[int, ...] = ()


RULES = (
    # linux/fcntl.h: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_GETLK, F_DUPFD_CLOEXEC,
    # F_GETPIPE_SZ. Not allowed: changing pipe sizes, leases, notifications. F_SETLK and F_SETLKW do
    # nothing, because record locks could use unlimited kernel memory. Record locks matter only
    # between processes, but SQLite needs the calls to succeed.
    Rule("fcntl", {1: (0, 1, 2, 3, 4, 5, 1030, 1032)}, errno.EPERM, no_op=(6, 7)),
    # asm-generic/ioctls.h: TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
    Rule("ioctl", {1: (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)}, errno.ENOTTY),
    # linux/prctl.h: parent death signal, dumpable, name, capability bounds, seccomp state, timer
    # slack, subreaper, no new privileges.
    Rule("prctl", {0: (1, 2, 3, 4, 15, 16, 21, 23, 29, 30, 36, 37, 38, 39)}, errno.EINVAL),
    # Allowed only for the calling process, because process 1 may belong to the same user.
    Rule("prlimit64", {0: (0,)}, errno.EPERM),
    Rule("setpriority", {0: (0,), 1: (0,)}, errno.EPERM),
    Rule("sched_setaffinity", {0: (0,)}, errno.EPERM),
)
# CLONE_NEW* flags. A tmpfs in a new namespace could use half of the host's memory.
NAMESPACES = 0x7E020000
AF_UNIX, NOT_STREAM = 1, 0xE  # SOCK_STREAM is 1; higher bits are flags

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # See linux/audit.h.
X32_CALLS = 0x40000000  # On x86-64, a second table of system calls starts here.
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # See linux/bpf_common.h.
ALLOW, FAIL_WITH = 0x7FFF0000, 0x00050000  # See linux/seccomp.h; FAIL_WITH is added to an errno.
Line = tuple[int, int, int, int]  # Code, jump if true, jump if false, operand: see linux/filter.h.


def numbers(text: str, machine: str) -> dict[str, int]:
    """Returns the system call numbers in a table for one machine type, by name."""
    column = 1 + list(AUDIT).index(machine)
    entries = [entry.split() for entry in text.split(",")]
    return {entry[0]: int(entry[column]) for entry in entries if entry[column] != "-"}


def system_call_filter(machine: str) -> bytes:
    """Returns an array of struct sock_filter; empty bytes for a machine that is not in AUDIT."""
    if machine not in AUDIT:
        return b""
    other = numbers(OTHERS, machine)
    # Offsets into struct seccomp_data: 0 the call number, 4 the machine, 16 the arguments.
    lines: list[Line] = [
        (LOAD, 0, 0, 4),  # other machine types number the calls differently
        (EQUAL, 1, 0, AUDIT[machine]),
        (RETURN, 0, 0, FAIL_WITH | errno.EPERM),
        (LOAD, 0, 0, 0),
        (AT_LEAST, 0, 1, X32_CALLS),
        (RETURN, 0, 0, FAIL_WITH | errno.EPERM),
    ]
    for number in numbers(ALLOWED, machine).values():
        lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for name, error in FAILING.items():
        lines += [(EQUAL, 0, 1, other[name]), (RETURN, 0, 0, FAIL_WITH | error)]
    for rule in RULES:
        lines += _for_call(other[rule.call], _by_argument(rule))
    refuse: Line = (RETURN, 0, 0, FAIL_WITH | errno.EPERM)
    allow: Line = (RETURN, 0, 0, ALLOW)
    lines += _for_call(other["clone"], [_load(0), (ANY_BIT, 0, 1, NAMESPACES), refuse, allow])
    is_unix, is_no_stream = (EQUAL, 1, 0, AF_UNIX), (ANY_BIT, 0, 1, NOT_STREAM)
    pair = [_load(0), is_unix, refuse, _load(1), is_no_stream, refuse, allow]
    lines += _for_call(other["socketpair"], pair)
    lines.append((RETURN, 0, 0, FAIL_WITH | errno.ENOSYS))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _by_argument(rule: Rule) -> list[Line]:
    lines: list[Line] = []
    for argument, values in rule.values.items():
        lines.append(_load(argument))
        for value in rule.no_op:
            lines += [(EQUAL, 0, 1, value), (RETURN, 0, 0, FAIL_WITH)]  # Error 0 means success.
        for number, value in enumerate(values):  # Jump past the line that refuses.
            lines.append((EQUAL, len(values) - number, 0, value))
        lines.append((RETURN, 0, 0, FAIL_WITH | rule.otherwise))
    return [*lines, (RETURN, 0, 0, ALLOW)]


def _for_call(number: int, lines: list[Line]) -> list[Line]:
    """Makes filter lines apply to one system call only. The last line must return a verdict."""
    return [(EQUAL, 0, len(lines), number), *lines]


def _load(argument: int) -> Line:
    return (LOAD, 0, 0, 16 + 8 * argument)
