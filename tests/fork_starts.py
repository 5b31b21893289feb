"""Starts hybridrl's processes of tests by a fork of one that has imported everything.

`install` replaces `subprocess.Popen` by a class that asks fork_server.py for the ranks, commands
and workers of tests; whatever else is started is started as ever. A process that is started so is
a child of its starter, with its own descriptors and environment: it is waited for, signalled and
killed as any other. So are the ranks that a launcher started so starts itself.

A program is started anew, as by a user, where a fork would not be the same: where a variable that
libraries read at their import differs, or a folder before the installed packages has a module that
is imported already. HYBRIDRL_COLD_STARTS=1 starts all of them so, or one that has it in its
environment.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
LENGTH = struct.Struct("!I")
MAX_DESCRIPTORS = 16  # in one request
_Popen = subprocess.Popen
COLD = "HYBRIDRL_COLD_STARTS"
SERVER = Path(__file__).with_name("fork_server.py")
# Packages whose modules need a GPU, an engine or another package that is not installed everywhere.
NEEDING_MORE = (
    "hybridrl.agents.connectors",
    "hybridrl.kernels",
    "hybridrl.rollout.sglang",
    "hybridrl.rollout.vllm",
)
HAS_VLLM = find_spec("vllm") is not None
# Modules that libraries import only when a run uses them. cloudpickle comes with vLLM.
LAZY = (
    *(["cloudpickle"] if HAS_VLLM else []),
    "numpy.ctypeslib",
    "pandas",
    "pyarrow.compute",
    "megatron.core.dist_checkpointing.strategies.torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.tokenization_utils_tokenizers",
    "rich.live",
    "rich.progress",
)


def _modules(package: Path) -> tuple[str, ...]:
    """Returns all modules of a package except NEEDING_MORE."""
    files = sorted(package.rglob("*.py"))
    names = [".".join(file.relative_to(package.parent).with_suffix("").parts) for file in files]
    wanted = [name for name in names if not name.startswith(NEEDING_MORE)]
    return tuple(name.removesuffix(".__init__") for name in wanted)


RANKS = ("torch", "transformers", *_modules(Path(__file__).parents[1] / "hybridrl"), *LAZY)
# vLLM is imported only where it is used: its import changes what other libraries do.
RANKS_WITH_VLLM = (
    *RANKS,
    "hybridrl.rollout.vllm.adapter",
    "vllm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.model_loader",
)
# Variables that some library reads at its import begin so.
READ_AT_IMPORT = (
    "CUDA",
    "HF_",
    "HOME",
    "KMP_",
    "LD_",
    "MKL_",
    "OMP_",
    "PYTHON",
    "PYTORCH_",
    "TORCH",
    "TRANSFORMERS_",
    "TRITON_",
    "XDG_",
)
# The server's child looks at the first four itself. The others are set by imports and
# engines, in the tests' own process too. vLLM looks at its variables when it needs them.
MAY_DIFFER = (
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONFAULTHANDLER",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "LD_PRELOAD",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
    "TRITON_CACHE_AUTOTUNING",
)


@dataclass(frozen=True)
class Server:
    """Where a server listens and which top-level modules it has imported."""

    address: str
    modules: frozenset[str]


class _Starts:
    """What starts programs of one project root: servers, each started at its first use."""

    def __init__(self, root: Path, given: Server | None) -> None:
        self.root = root.resolve()
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = os.getpid()  # the server's forks become children of this one only
        self._given = given
        self._servers: dict[tuple[str, ...], Server] = {}
        self._processes: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()

    def server_for(
        self, program: Sequence[str], environment: Mapping[str, str], folder: str
    ) -> Server | None:
        """Returns the server whose fork equals a new start, or None."""
        is_same = _read_at_import(environment) == _read_at_import(self.environment)
        is_same = is_same and environment.get(COLD) != "1"
        if not is_same or os.getpid() != self.process or not self._is_ours(program, folder):
            return None
        server = self._given or self._server(program)
        first = "" if program[0] == "-m" else os.path.dirname(program[0])
        further = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
        searched = [Path(folder, path).resolve() for path in (first, *further)]
        return None if any(self._hides(path, server) for path in searched) else server

    def _is_ours(self, program: Sequence[str], folder: str) -> bool:
        if not os.path.isdir(folder):
            return False
        if program[0] == "-m":
            return program[1:2] == ["hybridrl.cli.main"]
        return program[0].endswith(".py") and any(
            Path(folder, program[0]).resolve().is_relative_to(self.root / ours)
            for ours in ("tests", "benchmarks", "examples")
        )

    def _hides(self, path: Path, server: Server) -> bool:
        """Whether Python would find a module there that the server has from elsewhere."""
        if path in (self.root, self.root / "tests") or not path.is_dir():
            return False
        names = {entry.name.removesuffix(".py") for entry in path.iterdir()}
        return bool(names & (server.modules | {"sitecustomize", "usercustomize"}))

    def _server(self, program: Sequence[str]) -> Server:
        is_plan = program[2:3] == ["plan"]  # which starts no engine
        has_vllm = any("vllm" in argument.lower() for argument in program)
        has_vllm = HAS_VLLM and has_vllm and not is_plan
        modules = RANKS_WITH_VLLM if has_vllm else RANKS
        with self._lock:
            if modules not in self._servers:
                self._servers[modules] = self._start(modules)
            return self._servers[modules]

    def _start(self, modules: Sequence[str]) -> Server:
        folder = tempfile.mkdtemp(prefix="hybridrl-tests-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        address = os.path.join(folder, "starts")
        environment = {k: v for k, v in self.environment.items() if k != "PYTHONPATH"}
        environment["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow's allocator
        log = Path(folder, "log")
        engine = "vllm" if "vllm" in modules else "none"
        with socket.socket(socket.AF_UNIX) as listener, log.open("wb") as errors:
            listener.bind(address)
            listener.listen(64)
            number = listener.fileno()
            server = _Popen(
                [sys.executable, str(SERVER), str(number), str(self.root), engine],
                env=environment,
                pass_fds=(number,),
                stdin=subprocess.PIPE,  # its end tells the server that these tests have ended
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            raise RuntimeError(f"{SERVER.name} ended at its start: {log.read_text()[-2000:]}")
        self._processes.append(server)
        return Server(address, frozenset(json.loads(line)))


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_IMPORT) and name not in MAY_DIFFER
    }


_STARTS: list[_Starts] = []  # empty until `install`
_ASKING = threading.Lock()
_ARGUMENTS = inspect.signature(_Popen._execute_child)  # type: ignore[attr-defined]


class ForkedPopen(_Popen):  # type: ignore[type-arg]
    """A process that is forked from a server where that is the same, else started as ever."""

    def _execute_child(self, *given: Any) -> None:
        named = _ARGUMENTS.bind(self, *given).arguments
        args, pass_fds = named["args"], named["pass_fds"]
        variables = os.environ if named["env"] is None else named["env"]
        environment = {str(k): str(v) for k, v in variables.items()}
        folder = os.path.abspath(named["cwd"] or os.curdir)
        program = [] if isinstance(args, str | bytes | os.PathLike) else [str(a) for a in args]
        server = None
        if len(program) > 1 and program[0] == sys.executable and _is_plain(named):
            server = _STARTS[0].server_for(program[1:], environment, folder)
        if server is None:
            super()._execute_child(*given)
            return
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        streams = [
            number if named[end] == -1 else named[end]
            for number, end in enumerate(("p2cread", "c2pwrite", "errwrite"))
        ]
        mask = os.umask(0)
        os.umask(mask)
        request = {
            "program": program[1:],
            "descriptors": [0, 1, 2, *pass_fds],
            "folder": folder,
            "environment": environment,
            "is_new_session": named["start_new_session"],
            "umask": mask,
            "limits": _limits(),
        }
        self.pid = _ask(server, request, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*(named[end] for end in ends))


def _is_plain(named: Mapping[str, Any]) -> bool:
    """Whether nothing is asked for that a server does not know."""
    absent = ("executable", "preexec_fn", "gid", "gids", "uid")
    return (
        all(named[name] is None for name in absent)
        and named["close_fds"]
        and not named["shell"]
        and named["umask"] == named["process_group"] == -1
    )


def _limits() -> list[tuple[int, tuple[int, int]]]:
    numbers = sorted({getattr(resource, n) for n in dir(resource) if n.startswith("RLIMIT_")})
    return [(number, resource.getrlimit(number)) for number in numbers]


def _ask(server: Server, request: dict[str, Any], descriptors: Sequence[int]) -> int:
    """Returns the pid of the new child of this process; RuntimeError if there is none."""
    body = json.dumps(request).encode()
    prctl = ctypes.CDLL(None).prctl
    with _ASKING, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server.address)
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # of this process: one request at a time
        try:
            socket.send_fds(connection, [LENGTH.pack(len(body))], list(descriptors))
            connection.sendall(body)
            answer = connection.recv(LENGTH.size)
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0)
    if len(answer) < LENGTH.size:
        raise RuntimeError(f"{SERVER.name} ended before it had started {request['program']}")
    child = int(LENGTH.unpack(answer)[0])
    try:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError as error:  # its code would be read as 0
        raise RuntimeError(f"{request['program']} is no child of its starter") from error
    return child


def install(root: Path, server: Server | None = None) -> None:
    """Makes this process start hybridrl's processes by forks of `server`, else of a new one."""
    if sys.platform != "linux" or os.environ.get(COLD) == "1" or _STARTS:
        return
    _STARTS.append(_Starts(root, server))
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
