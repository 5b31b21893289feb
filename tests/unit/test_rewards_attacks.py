"""What a contained program may try against the host, as programs of root and of another user."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from other_user import UID, run_as_user

from hybridrl.services.sandbox.code_reward import SandboxError, run_program
from hybridrl.services.sandbox.syscalls import AUDIT, numbers

LIMITS = {"time_s": 20, "memory_mib": 512, "disk_mib": 4, "processes": 8}
# Of calls that no program has: name, number on x86-64 and on arm64. They give memory that no limit
# counts, reach other processes, change the host, or open rarely used parts of the kernel.
REFUSED = """
acct 163 89, add_key 248 217, adjtimex 159 171, bpf 321 280, chroot 161 51, clock_settime 227 112,
copy_file_range 326 285, delete_module 176 106, fanotify_init 300 262, finit_module 313 273,
fsopen 430 430, fspick 433 433, init_module 175 105, inotify_init1 294 26, io_setup 206 0,
io_submit 209 2, io_uring_setup 425 425, ioperm 173 -, iopl 172 -, kcmp 312 272, kexec_load 246 104,
keyctl 250 219, landlock_create_ruleset 444 444, lookup_dcookie 212 18, mbind 237 235,
memfd_create 319 279, memfd_secret 447 447, migrate_pages 256 238, mknodat 259 33, mlock 149 228,
mlockall 151 230, modify_ldt 154 -, mount 165 40, mount_setattr 442 442, move_mount 429 429,
move_pages 279 239, mq_open 240 180, msgget 68 186, name_to_handle_at 303 264,
open_by_handle_at 304 265, open_tree 428 428, perf_event_open 298 241, personality 135 92,
pidfd_getfd 438 438, pivot_root 155 41, pkey_alloc 330 289, process_madvise 440 440,
process_vm_readv 310 270, process_vm_writev 311 271, ptrace 101 117, quotactl 179 60,
reboot 169 142, remap_file_pages 216 234, request_key 249 218, sched_setattr 314 274,
sched_setscheduler 144 119, seccomp 317 277, semget 64 190, sendfile 40 71, set_mempolicy 238 237,
sethostname 170 161, setns 308 268, settimeofday 164 170, shmget 29 194, signalfd4 289 74,
splice 275 76, swapon 167 224, syslog 103 116, tee 276 77, timer_create 222 107, umount2 166 39,
unshare 272 97, userfaultfd 323 282, vhangup 153 58, vmsplice 278 75
"""
# Each succeeds if it raises nothing. SECRET is a file of the trainer's user.
ATTACKS = {
    # Files.
    "read a file of the trainer's user": "open(SECRET).read()",
    "see the folder of that file": "os.stat(os.path.dirname(SECRET))",
    "read it above the root": "open('../' * 40 + SECRET[1:]).read()",
    "read it through process 1": "open('/proc/1/root' + SECRET).read()",
    "read it through its own root": "open('/proc/self/root/..' + SECRET).read()",
    "read it through an open folder": "[open(f'/proc/self/fd/{n}' + SECRET).read()"
    " for n in range(64) if os.path.isdir(f'/proc/self/fd/{n}')][0]",
    "read passwords": "open('/etc/shadow').read()",
    "read users": "assert 'root' in open('/etc/passwd').read()",
    "read the host's name": "assert 'program' != os.uname().nodename",
    "list homes": "[os.listdir(d) for d in ('/home', '/root')]; os.stat('/home')",
    "list services": "os.listdir('/run')",
    "list configuration": "assert len(os.listdir('/etc')) > 9",
    "list variable data": "os.listdir('/var')",
    "list the kernel's settings": "os.listdir('/sys/kernel')",
    "list control groups": "os.listdir('/sys/fs/cgroup')",
    "list shared memory": "assert set(os.listdir('/dev/shm')) - set(os.listdir('.'))",
    "open a disk": "open('/dev/vda', 'rb')",
    "open memory": "open('/dev/mem', 'rb')",
    "open a terminal": "open('/dev/tty')",
    "open a device of another namespace": "open('/dev/fuse', 'rb')",
    "make a device": "os.mknod('d', 0o20600, os.makedev(1, 1))",
    "write a library": "open(os.__file__, 'a')",
    "write byte code": "os.makedirs(os.path.dirname(os.__file__) + '/x')",
    "write the interpreter": "open(os.path.realpath(sys.executable), 'r+b')",
    "change a library's mode": "os.chmod(os.__file__, 0o777)",
    "change a library's time": "os.utime(os.__file__)",
    "remove a library": "os.unlink(os.__file__)",
    "link a library": "os.link(os.__file__, 'l')",
    "write beside the program": "open('/x', 'w')",
    "write a processor's state": "open('/sys/devices/system/cpu/cpu1/online', 'w')",
    "write what answers its tests": "open('/hybridrl/hybridrl/services/sandbox/program.py', 'a')",
    "write users": "open('/etc/passwd', 'a')",
    "fill a file": "f = open('big', 'wb')\nfor i in range(9): f.write(bytes(1 << 20)); f.flush()",
    "fill the folder with files": "for i in range(2000): open(f'n{i}', 'w')",
    "change what it is given": "os.write(os.open('/proc/self/fd/0', os.O_WRONLY), b'x')",
    "attributes of files": "os.setxattr(mine(), 'user.x', b'1')",
    # Processes.
    "the environment of others": "[open(f'/proc/{p}/environ').read() for p in others()][0]",
    "the command of others": "[open(f'/proc/{p}/cmdline').read() for p in others()][0]",
    "the memory of process 1": "open('/proc/1/mem', 'r+b')",
    "the maps of process 1": "open('/proc/1/maps').read()",
    "the files of process 1": "os.listdir('/proc/1/fd')",
    "the oom score of process 1": "open('/proc/1/oom_score_adj', 'w').write('1000')",
    "its own oom score": "open('/proc/self/oom_score_adj', 'w').write('999')",
    "the groups of its namespace": "open('/proc/self/setgroups', 'w').write('allow')",
    "the users of its namespace": "open('/proc/self/uid_map', 'w').write('0 0 1')",
    "the kernel's parameters": "open('/proc/sys/kernel/core_pattern', 'w')",
    "the magic key": "open('/proc/sysrq-trigger', 'w')",
    "end process 1": "os.kill(1, 9); time.sleep(0.1); assert not os.path.exists('/proc/self')",
    "limit process 1": "resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3))",
    "slow process 1 down": "os.setpriority(os.PRIO_PROCESS, 1, 19)",
    "slow its user down": "os.setpriority(os.PRIO_USER, 0, 19)",
    "move process 1": "os.sched_setaffinity(1, {0})",
    "raise its limits": "resource.setrlimit(resource.RLIMIT_NPROC, (99, 99))",
    "raise its descriptors": "resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))",
    "a higher priority": "os.nice(-5)",
    "trace a child": "p = os.fork()\nif not p: time.sleep(9)\n"
    "try: check(libc.ptrace(16, p, 0, 0))\nfinally: os.kill(p, 9); os.waitpid(p, 0)",
    "many processes": "pids = []\ntry:\n for i in range(20):\n  pids.append(os.fork())\n"
    "  if not pids[-1]: time.sleep(9); os._exit(0)\nfinally:\n"
    " for p in pids: os.kill(p, 9); os.waitpid(p, 0)",
    # Privileges.
    "become root": "os.setuid(0)",
    "become another": "os.setresuid(1234, 1234, 1234)",
    "other groups": "os.setgroups([0])",
    "capabilities": "assert int(status('CapEff'), 16) | int(status('CapPrm'), 16)",
    "capabilities back": "check(libc.capset(struct.pack('=Ii', 0x20080522, 0), b'\\xff' * 24))",
    "ambient capabilities": "check(libc.prctl(47, 2, 21, 0, 0))",
    "programs that give privileges": "assert status('NoNewPrivs') == '0'",
    "become root by su": "subprocess.run(['/usr/bin/su', '-c', 'true'], check=True,"
    " stdin=subprocess.DEVNULL)",
    "a namespace of users by clone": "child(libc.syscall(CLONE, 0x10000000 | 17, 0, 0, 0, 0))",
    "a namespace of mounts by clone": "child(libc.syscall(CLONE, 0x00020000 | 17, 0, 0, 0, 0))",
    "a namespace by clone3": "child(libc.syscall(435, struct.pack('=11Q', 0x10000000, 0, 0, 0, 17,"
    " 0, 0, 0, 0, 0, 0), 88))",
    "a filter of its own": "check(libc.prctl(22, 2, bytes(16), 0, 0))",
    "names of memory": "check(libc.prctl(0x53564D41, 0, 0, 0, 0))",
    "layout of memory": "check(libc.prctl(35, 1, 0, 0, 0))",
    # Network.
    **{
        f"a socket of family {family}": f"socket.socket({family}, socket.SOCK_{kind})"
        for family, kind in (
            (1, "STREAM"),
            (2, "STREAM"),
            (2, "DGRAM"),
            (10, "STREAM"),
            (16, "RAW"),
        )
    },
    "a socket of packets": "socket.socket(17, socket.SOCK_RAW)",
    "a socket of the kernel's ciphers": "socket.socket(38, socket.SOCK_SEQPACKET)",
    "a socket to other machines of the host": "socket.socket(40, socket.SOCK_STREAM)",
    "a pair of datagrams": "socket.socketpair(type=socket.SOCK_DGRAM)",
    "larger buffers": "socket.socketpair()[0].setsockopt(1, socket.SO_SNDBUF, 1 << 30)",
    # Memory that no limit counts.
    "larger pipes": "fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)",
    "leases": "fcntl.fcntl(open(mine(), 'r'), 1024, 0)",
    "notes of changes": "fcntl.fcntl(os.open('.', 0), 1026, 0x80000004)",
    "locks of open files": "fcntl.fcntl(open(mine(), 'w'), 38, RECORD)",
    "locks of records": "locks()",
    "signals that wait": "signal.pthread_sigmask(0, [40])\n"
    "for i in range(999): check(libc.sigqueue(os.getpid(), 40, None))",
    "requests of drivers": "fcntl.ioctl(os.open('.', 0), 0x80086601, bytes(8))",
    "input for a terminal": "fcntl.ioctl(0, 0x5412, b'x')",
    "calls by 32-bit numbers": "interrupt()",
    "calls by x32 numbers": "check(libc.syscall(0x40000000 | 39)) if X86 else 1 / 0",
    "memory": "bytearray(1 << 30)",
}
PROGRAM = """
import ctypes, errno, fcntl, json, mmap, os, re, resource, signal, socket, struct, subprocess, sys
import time
RECORD = struct.pack("hhqqi", 1, 0, 0, 1, 0)
X86 = os.uname().machine == "x86_64"
CLONE = 56 if X86 else 220
libc = ctypes.CDLL(None, use_errno=True)

def check(done):
    if done == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done

def child(pid):
    if check(pid) == 0:
        os._exit(0)
    os.waitpid(pid, 0)

def status(name):
    return re.search(name + r":\\s*(\\w+)", open("/proc/self/status").read())[1]

def others():
    found = [p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]
    return found or ["1"]

def mine():
    open("mine", "w").write("x")
    return "mine"

def locks():
    file = open(mine(), "w")
    fcntl.lockf(file, fcntl.LOCK_EX)
    ready, told = os.pipe()
    if not os.fork():
        found = fcntl.fcntl(open("mine"), fcntl.F_GETLK, RECORD)
        os.write(told, str(struct.unpack("hhqqi", found)[0]).encode())
        os._exit(0)
    os.wait()
    assert int(os.read(ready, 9)) != fcntl.F_UNLCK

def interrupt():
    code = b"\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3"  # mov eax, getpid; int 0x80; ret
    memory = mmap.mmap(-1, 4096, prot=7)
    memory.write(code)
    call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    assert X86 and call() > 0

def refused(number):
    libc.syscall(number, 0, 0, 0, 0, 0, 0)
    assert ctypes.get_errno() != errno.ENOSYS

calls, attacks, SECRET = json.load(sys.stdin)
attacks.update({name: f"refused({number})" for name, number in calls.items()})
found = {}
for name, code in attacks.items():
    try:
        exec(code, globals())
        found[name] = "got through"
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
    for file in os.listdir("."):
        if file != "main.py":
            try: os.unlink(file)
            except OSError: pass
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def secret() -> Iterator[Path]:
    """A file that the user of the trainer may read, and in the first place nobody else."""
    is_root = os.geteuid() == 0
    folder = Path(tempfile.mkdtemp(dir="/var" if is_root else None))
    (folder / "secret").write_text("secret")
    if is_root:
        os.chown(folder, UID, UID)
        os.chown(folder / "secret", UID, UID)
    yield folder / "secret"
    shutil.rmtree(folder)


def outcomes(secret: Path, as_user: bool) -> dict[str, str]:
    calls = numbers(REFUSED, os.uname().machine) if os.uname().machine in AUDIT else {}
    given = json.dumps([calls, ATTACKS, str(secret)])
    if as_user:
        code = (
            "from hybridrl.services.sandbox.code_reward import run_program\n"
            f"ended = run_program({PROGRAM!r}, {given!r}, {LIMITS!r})\n"
            "print(ended.output, ended.error)"
        )
        done = run_as_user(code)
        output = done.stdout + done.stderr
    else:
        try:
            output = run_program(PROGRAM, given, LIMITS).output
        except SandboxError as error:
            output = str(error)
    if "not contained: unshare" in output:
        pytest.skip("no namespaces here")
    found = re.search(r"^\{.*\}", output, re.MULTILINE)
    assert found, output
    return json.loads(found[0])


@pytest.mark.skipif(os.uname().machine not in AUDIT, reason="no list of calls")
@pytest.mark.parametrize("as_user", [False, True], ids=["own", "other"])
def test_no_attack_gets_through(secret, as_user):
    """With root's privileges (each program is a user of its own) and without."""
    if as_user and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    os.chmod(secret.parent, 0o700 if as_user else 0o755)  # for a program of root: everybody's
    os.chmod(secret, 0o600 if as_user else 0o644)
    found = outcomes(secret, as_user)
    assert len(found) == len(ATTACKS) + len(numbers(REFUSED, os.uname().machine)) > 140
    wrong = {name: outcome for name, outcome in found.items() if outcome == "got through"}
    assert not wrong
