"""Platform of a job: CUDA as Megatron expects it, or CPU with gloo.

Owns the choice of device and backend, and all code that lets megatron-core 0.16 run without CUDA.
On a CUDA host Megatron is unchanged. On a CPU host `Platform.activate` adapts it:

* device: `torch.cuda.current_device` and similar functions return the CPU. Modules with CUDA
literals in every micro-batch get a `torch` whose factories ignore `device="cuda"`. Other literals
are rewritten inside `Platform.megatron_phase`, which must surround model building, optimizer steps
and checkpoints, but not rollout: its torch function mode slows every operation. * random numbers:
Megatron's tracker uses the CPU generator. * experts: the dispatcher's token counts become numpy
arrays, and unequal parts are gathered and scattered with padding. * gathers: each gather of a
parameter buffer is a separate, synchronous collective. * without transformer-engine and apex: two
fixes that GPU hosts without them need too.

`torch.cuda.Stream` stays a class, because vLLM subclasses it.
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
from packaging.specifiers import SpecifierSet
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Required by the metadata of megatron-core 0.16.1; 0.19.2 requires no version.
TRANSFORMER_ENGINE_VERSIONS = SpecifierSet(">=2.9.0a0,<2.12.0")
# GPUs where cuDNN has attention over packed sequences with grouped queries. Without it and
# flash-attn, transformer-engine stores the whole matrix of scores.
PACKED_ATTENTION_MAJORS = (9, 10)


@dataclass(frozen=True)
class Platform:
    """Device and backend of a job's ranks.

    Args:
        device: This rank's device.
        backend: torch.distributed backend of its collectives.
    """

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
        """Whether Megatron runs without CUDA."""
        return self.device.type == "cpu"

    def default_dtype(self) -> torch.dtype:
        """Returns the training dtype of `model.dtype: auto`: bf16 on GPUs; fp32 on CPU, where bf16
        is not faster.
        """
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
        """Selects the device and, on CPU, adapts Megatron. Must run before any Megatron object is
        built.
        """
        if self.is_cpu:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            _adapt_megatron_to_cpu()
        else:
            torch.cuda.set_device(self.device)
            keep_compiled_kernels()
        _fix_missing_transformer_engine()

    @contextlib.contextmanager
    def megatron_phase(self) -> Iterator[None]:
        """Surrounds Megatron calls with CUDA literals; does nothing on CUDA."""
        if not self.is_cpu:
            yield
            return
        with _CudaLiteralsOnCpu():
            yield

    def seed(self, seed: int) -> None:
        """Seeds torch and Megatron's model-parallel generators.

        A rank without a part of the policy uses the seeds of the first tensor-parallel rank.
        """
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
        """Returns the peak memory so far: of the device on CUDA, of the process on CPU."""
        if not self.is_cpu:
            return torch.cuda.max_memory_allocated()
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def keep_compiled_kernels() -> None:
    """Lets this process share compiled Triton kernels with earlier and later ones.

    Triton's folder is common to all processes unless TRITON_CACHE_DIR names another. Inductor sets
    this variable when it compiles, but not when its cache is complete. The second start of an
    engine, for example after a failed rank, therefore compiled all other kernels again, for 15 s.
    TORCHINDUCTOR_CACHE_DIR moves Triton's folder too. If the folder cannot be written, Inductor
    chooses one.
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
    """Gives CUDA one hardware queue if training is tensor or context parallel.

    Megatron then starts a collective on one stream and, directly after it on another, the matrix
    product that hides it (tensor_parallel/layers.py of megatron-core 0.16.1: "we rely on
    CUDA_DEVICE_MAX_CONNECTIONS=1"). With several queues the GPU may start the product first; it
    occupies all multiprocessors, and the collective waits. A value that the user has set is kept.

    Must run before CUDA starts and reads the variable; `Platform.detect` starts it. The launcher
    does not do this, because torchrun's ranks need it too.
    """
    if max(tp, cp) > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def transformer_engine_import_fault() -> str | None:
    """Returns why transformer-engine cannot be imported or has the wrong version; else None."""
    try:
        found = version("transformer_engine")
    except PackageNotFoundError:
        return "transformer-engine is not installed"
    if not TRANSFORMER_ENGINE_VERSIONS.contains(found, prereleases=True):
        return f"transformer-engine is {found}; megatron-core needs {TRANSFORMER_ENGINE_VERSIONS}"
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:  # a library of another CUDA or cuDNN
        return f"transformer-engine {found} cannot be imported: {str(error).splitlines()[0]}"
    return None


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _CudaLiteralsOnCpu(TorchFunctionMode):
    """Rewrites `device="cuda"`, `Tensor.cuda()`, `pin_memory=True` and `Tensor.type() ==
    "torch.cuda.*"`.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs:
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
    """Replacement for `torch` in one Megatron module; factories ignore CUDA and pinned memory."""

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
    """A CUDA stream on a host without CUDA, where everything runs in order."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: object = None) -> object:
        return self if event is None else event  # both can be waited for


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

    schedules.torch = _TorchOnCpu()  # token counter of every schedule
    rope_utils.torch = _TorchOnCpu()  # pinned index of context-parallel RoPE
    _put_rng_tracker_on_cpu()
    _gather_parameters_without_coalescing()
    _give_token_counts_to_numpy()
    _exchange_unequal_parts_on_gloo()


def _give_token_counts_to_numpy() -> None:
    """Makes the token dispatcher's counts numpy arrays, as its all-to-all requires.

    Megatron converts them only while it copies them to the host; tensors already on the host stay
    tensors (0.16.1).
    """
    from megatron.core.transformer.moe import token_dispatcher

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_host


def _exchange_unequal_parts_on_gloo() -> None:
    """Gathers and scatters parts of unequal sizes with padding, because gloo needs equal sizes.

    The token counts of an expert that is cut over ranks differ by rank.
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
    """Replaces coalesced gathers, which may crash torch's gloo, by plain ones.

    gloo records the name of a completed operation without a lock, in two threads per group. The
    name of a coalesced gather is too long for a string without heap memory and may be freed twice;
    the process then ends by SIGSEGV (torch 2.13, ProcessGroupGloo::runLoop; once in some 10,000
    gathers). Other collectives have short names. This costs nothing: Megatron coalesces one gather
    per bucket, and CPU ranks have no cores left to overlap it with other work.
    """
    from megatron.core.distributed import param_and_grad_buffer

    def gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
        dist.all_gather(list(output.chunk(group.size())), shard, group=group)

    param_and_grad_buffer.dist_all_gather_func = gather


def _put_rng_tracker_on_cpu() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    # Megatron creates its CUDA tracker on demand; the CPU tracker replaces it once.
    if hasattr(megatron_random._CUDA_RNG_STATE_TRACKER, "is_on_cpu"):
        return

    class CpuRngStatesTracker(megatron_random.CudaRNGStatesTracker):
        """Megatron's tracker over the CPU generator."""

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
    # Activation recompute saves and restores "the CUDA state", which is the CPU state here.
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _fix_missing_transformer_engine() -> None:
    """Defines names that megatron-core 0.16 uses without transformer-engine installed."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    _let_torch_adam_load_distributed_checkpoints()


def _let_torch_adam_load_distributed_checkpoints() -> None:
    """Fixes loading of the distributed optimizer's state without apex and transformer-engine
    (0.16.1).

    `_set_main_param_and_optimizer_states` expects a per-parameter `step`, which the checkpoint
    stores in the parameter group, and writes into leaf tensors under autograd.
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
