"""Platform of a job: CUDA with NCCL, or CPU with gloo.

Owns the choice of device and backend, and all code that makes megatron-core 0.16 run without CUDA.
On a CUDA host Megatron is not modified. On a CPU host `Platform.activate` adapts it: its current
device is the CPU; in modules that use CUDA literals in every micro-batch, `torch`'s factory
functions ignore these literals; other literals are rewritten inside `Platform.megatron_phase`,
which must surround model building, optimizer steps and checkpoints, but not rollout, because its
function mode slows down every operation. Random numbers come from the CPU generator, expert counts
are numpy arrays, unequal parts are padded, and gathers are synchronous. `torch.cuda.Stream` becomes
a class, which vLLM subclasses. Two fixes are also needed on GPU hosts without transformer-engine
and apex.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hybridrl.versions import TRANSFORMER_ENGINE

# Compute capabilities for which cuDNN supports grouped-query attention over packed sequences.
# Without cuDNN and flash-attn, transformer-engine stores the whole matrix of attention scores.
PACKED_ATTENTION_MAJORS = (9, 10)


@dataclass(frozen=True)
class Platform:
    """Device of this rank, and torch.distributed backend of its collectives."""

    device: torch.device
    backend: str

    @staticmethod
    def detect() -> Platform:
        """Returns CUDA with NCCL if a GPU is visible, else CPU with gloo."""
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            return Platform(device, "nccl")
        return Platform(torch.device("cpu"), "gloo")

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    def default_dtype(self) -> torch.dtype:
        """Returns the dtype of `model.dtype: auto`; fp32 on CPU, where bf16 is not faster."""
        return torch.float32 if self.is_cpu else torch.bfloat16

    def transformer_engine_fault(self) -> str | None:
        """Returns why transformer-engine's layers cannot be used; None if they can."""
        if self.is_cpu:
            return "there is no CUDA GPU"
        major, minor = torch.cuda.get_device_capability(self.device)
        if major not in PACKED_ATTENTION_MAJORS:
            wanted = " or ".join(f"{major}.x" for major in PACKED_ATTENTION_MAJORS)
            return (
                f"the GPU has compute capability {major}.{minor}; packed attention needs {wanted}"
            )
        return transformer_engine_import_fault()

    def activate(self) -> None:
        """Selects the device and, on CPU, adapts Megatron, before any Megatron object exists."""
        if self.is_cpu:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            _adapt_megatron_to_cpu()
        else:
            torch.cuda.set_device(self.device)
            keep_compiled_kernels()
        _fix_missing_transformer_engine()

    @contextlib.contextmanager
    def megatron_phase(self) -> Iterator[None]:
        """Context manager for Megatron calls with hard-coded CUDA devices. Does nothing on GPUs."""
        if not self.is_cpu:
            yield
            return
        with _CudaLiteralsOnCpu():
            yield

    def seed(self, seed: int) -> None:
        """Seeds torch's and Megatron's generators; a rank without a policy uses rank 0's seeds."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        torch.manual_seed(seed)
        group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
        ranks = {} if group is not None else {"tp_rank": 0, "ep_rank": 0, "etp_rank": 0}
        model_parallel_cuda_manual_seed(seed, **ranks)

    def synchronize(self) -> None:
        """Waits for the device, so that phase timers include asynchronous CUDA work."""
        if not self.is_cpu:
            torch.cuda.synchronize()

    def peak_memory_bytes(self) -> int:
        """Returns the peak memory so far: device memory on CUDA, the process's memory on CPU."""
        if not self.is_cpu:
            return torch.cuda.max_memory_allocated()
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def keep_compiled_kernels() -> None:
    """Makes this process share compiled Triton kernels with earlier and later processes.

    Inductor sets TRITON_CACHE_DIR when it compiles, but not when it finds everything in its cache.
    The second start of an engine, for example after a failed rank, would then look for other
    kernels in another folder and spend 15 s compiling them again.
    """
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    wanted = os.path.join(folder, "triton") if folder else os.path.join(home, ".triton", "cache")
    try:
        os.makedirs(wanted, exist_ok=True)
    except OSError:
        return
    if os.access(wanted, os.W_OK):
        os.environ.setdefault("TRITON_CACHE_DIR", wanted)


def start_kernels_in_order(tp: int, cp: int) -> None:
    """Makes CUDA use a single hardware queue if training is tensor or context parallel.

    Megatron then launches a collective on one stream and immediately the overlapping product on
    another (tensor_parallel/layers.py of megatron-core 0.16.1: "we rely on
    CUDA_DEVICE_MAX_CONNECTIONS=1"). With several queues the product may start first and occupy all
    multiprocessors, so that the collective must wait. Must be called before CUDA is initialised;
    not by the launcher, because ranks started by torchrun need it too.
    """
    if max(tp, cp) > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def multiply_in_one_order() -> None:
    """Makes cuBLAS sum each product in one order, whatever the number of rows.

    Without a workspace, cuBLAS does not split the contracted dimension; all its other kernels for
    16-bit inputs add up in the same order (measured on H200 with CUDA 13; vLLM's batch-invariant
    mode also relies on it). Must be called before the first product of the process.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    if torch.cuda.is_available():
        # cuBLAS's other interface has a workspace of at least 128 KiB.
        torch.backends.cuda.preferred_blas_library("cublaslt")


def transformer_engine_import_fault() -> str | None:
    """Returns why transformer-engine cannot be imported or its version is refused, if so."""
    try:
        found = version("transformer_engine")
    except PackageNotFoundError:
        return "transformer-engine is not installed"
    if (fault := TRANSFORMER_ENGINE.fault(found)) is not None:
        return f"transformer-engine {found} is refused ({fault})"
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:  # built for another CUDA or cuDNN
        return f"transformer-engine {found} cannot be imported: {str(error).splitlines()[0]}"
    return None


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _CudaLiteralsOnCpu(TorchFunctionMode):
    """Rewrites CUDA devices, `Tensor.cuda()`, pinned memory and `Tensor.type()` of CUDA."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class _TorchOnCpu(ModuleType):
    """Replacement for `torch` in a Megatron module; its factories ignore CUDA and pinned memory."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in ("zeros", "ones", "empty", "tensor"):
            setattr(self, name, self._on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(
            *args: Any, device: object = None, pin_memory: bool = False, **kwargs: Any
        ) -> torch.Tensor:
            return factory(*args, **kwargs)

        return make


class _NullStream:
    """Replacement for CUDA streams on a host without CUDA, where all operations run in order."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: object = None) -> object:
        return self if event is None else event  # events and streams can both be waited for


def _adapt_megatron_to_cpu() -> None:
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.Stream = _NullStream  # type: ignore[assignment, misc]
    stream = _NullStream()
    torch.cuda.current_stream = lambda device=None: stream  # type: ignore[assignment, return-value]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment, method-assign]

    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.pipeline_parallel import schedules

    schedules.torch = _TorchOnCpu()  # because of the token counter in all schedules
    rope_utils.torch = _TorchOnCpu()  # because of the pinned index in context-parallel RoPE
    _put_rng_tracker_on_cpu()
    _gather_parameters_without_coalescing()
    _give_token_counts_to_numpy()
    _exchange_unequal_parts_on_gloo()


def _give_token_counts_to_numpy() -> None:
    """Converts the token dispatcher's counts to numpy arrays, as its all-to-all requires.

    Megatron converts the counts only when it copies them to the host; it leaves tensors that are
    already on the host unchanged (0.16.1).
    """
    from megatron.core.transformer.moe import token_dispatcher

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_host


def _exchange_unequal_parts_on_gloo() -> None:
    """Pads parts of unequal sizes in gathers and scatters, because gloo requires equal sizes.

    The parts are unequal if an expert is split over ranks, because the ranks have different numbers
    of tokens for that expert.
    """
    from megatron.core.tensor_parallel import mappings

    gather_equal = mappings._gather_along_first_dim
    scatter_equal = mappings._reduce_scatter_along_first_dim

    def gather(
        part: Tensor, group: dist.ProcessGroup, sizes: Any = None, use_global_buffer: bool = False
    ) -> Tensor:
        if sizes is None or group.size() == 1:
            return gather_equal(part, group, None, use_global_buffer)
        padded = part.new_zeros((max(sizes), *part.shape[1:]))
        padded[: len(part)] = part
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded, group=group)
        return torch.cat([one[:size] for one, size in zip(found, sizes, strict=True)])

    def reduce_scatter(
        whole: Tensor, group: dist.ProcessGroup, sizes: Any = None, use_global_buffer: bool = False
    ) -> Tensor:
        if sizes is None or group.size() == 1:
            return scatter_equal(whole, group, None, use_global_buffer)
        summed = whole.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return torch.split(summed, list(sizes))[group.rank()]

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = reduce_scatter


def _gather_parameters_without_coalescing() -> None:
    """Replaces coalesced all-gathers, which can crash torch's gloo, with plain ones.

    Two threads per gloo group record the name of a completed operation without a lock. The name of
    a coalesced gather is allocated on the heap and can be freed twice: SIGSEGV (torch 2.13,
    ProcessGroupGloo::runLoop; about once in 10,000 gathers). Plain gathers are not slower here:
    Megatron coalesces one gather per bucket, and CPU ranks have no idle cores for overlap.
    """
    from megatron.core.distributed import param_and_grad_buffer

    def gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
        dist.all_gather(list(output.chunk(group.size())), shard, group=group)

    param_and_grad_buffer.dist_all_gather_func = gather


def _put_rng_tracker_on_cpu() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    # Megatron creates its CUDA tracker on demand; replace it with the CPU tracker only once.
    if hasattr(megatron_random._CUDA_RNG_STATE_TRACKER, "is_on_cpu"):
        return

    class CpuRngStatesTracker(megatron_random.CudaRNGStatesTracker):
        """Megatron's random-state tracker, based on the CPU generator."""

        is_on_cpu = True

        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"random state {name!r} or seed {seed} was added before")
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(
            self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME
        ) -> Iterator[None]:
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    megatron_random._CUDA_RNG_STATE_TRACKER = CpuRngStatesTracker()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    # Activation recomputation saves and restores "the CUDA state", which here is the CPU state.
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _fix_missing_transformer_engine() -> None:
    """Defines names that megatron-core 0.16 uses even if transformer-engine is not installed."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    _let_torch_adam_load_distributed_checkpoints()


def _let_torch_adam_load_distributed_checkpoints() -> None:
    """Makes the distributed optimizer's state loadable without apex and transformer-engine
    (0.16.1).

    `_set_main_param_and_optimizer_states` has two faults: it expects a `step` for each parameter,
    although the checkpoint stores it in the parameter group, and it writes into leaf tensors while
    autograd is on.
    """
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    owner = distrib_optimizer.DistributedOptimizer
    original = owner._set_main_param_and_optimizer_states
    if original.__name__ == "set_with_step":
        return

    @torch.no_grad()
    def set_with_step(self: Any, parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, index = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        step = {"step": state["step"]} if "step" in state else {}
        original(self, parameter, {**step, **tensors})

    owner._set_main_param_and_optimizer_states = set_with_step
