"""The device under the job: CUDA as Megatron expects it, or CPU and gloo.

Owns the choice of device and backend, and the only code that knows how megatron-core 0.16 runs
without CUDA. On a CUDA host nothing here changes Megatron. On a CPU host `Platform.activate` adapts
it, by reason:

* device: `torch.cuda.current_device` and friends answer for the CPU; modules whose CUDA literals
  lie on the path of every micro-batch see a `torch` whose factories ignore `device="cuda"`; rarer
  literals are rewritten inside `Platform.megatron_phase`, which must surround model building,
  optimizer steps and checkpoints (not rollout: a torch function mode slows every operation under
  it).
* random numbers: Megatron's tracker works on the CPU generator.
* experts: the dispatcher's counts of tokens are numpy's, as it takes them, and unequal parts are
  gathered and scattered padded.
* gathers: each of a parameter buffer is a collective of its own, and waited for.
* missing transformer-engine / apex: two fixes that GPU hosts without them need as well.

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

# What megatron-core 0.16.1 asks for in its own metadata; 0.19.2 asks for no version.
TRANSFORMER_ENGINE_VERSIONS = SpecifierSet(">=2.9.0a0,<2.12.0")
# cuDNN's attention over packed sequences with grouped queries; transformer-engine's other way
# without flash-attn makes the whole matrix of scores.
PACKED_ATTENTION_MAJORS = (9, 10)


@dataclass(frozen=True)
class Platform:
    """What kind of device the ranks of this job own.

    Args:
        device: this rank's device.
        backend: torch.distributed backend of its collectives.
    """

    device: torch.device
    backend: str

    @staticmethod
    def detect() -> Platform:
        """Returns the platform of this host: CUDA with NCCL where a GPU is visible, else CPU with
        gloo.
        """
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            return Platform(device, "nccl")
        return Platform(torch.device("cpu"), "gloo")

    @property
    def is_cpu(self) -> bool:
        """Whether Megatron runs here without CUDA."""
        return self.device.type == "cpu"

    def default_dtype(self) -> torch.dtype:
        """Returns the training dtype of `model.dtype: auto`: bf16 on GPUs, fp32 on CPU, where bf16
        is not faster.
        """
        return torch.float32 if self.is_cpu else torch.bfloat16

    def transformer_engine_fault(self) -> str | None:
        """Returns why transformer-engine's layers cannot be used here; None if they can."""
        if self.is_cpu:
            return "there is no CUDA GPU"
        major, minor = torch.cuda.get_device_capability(self.device)
        if major not in PACKED_ATTENTION_MAJORS:
            wanted = " or ".join(f"{major}.x" for major in PACKED_ATTENTION_MAJORS)
            return f"the GPU has compute capability {major}.{minor}, packed attention asks {wanted}"
        return transformer_engine_import_fault()

    def activate(self) -> None:
        """Selects the device and, on CPU, adapts Megatron; must run before any Megatron object is
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
        """Surrounds Megatron calls that hold CUDA literals of their own; does nothing on CUDA."""
        if not self.is_cpu:
            yield
            return
        with _CudaLiteralsOnCpu():
            yield

    def seed(self, seed: int) -> None:
        """Seeds torch and Megatron's model-parallel generators alike on every host; a rank without
        a part of the policy has the latter as the first of its tensor-parallel ranks.
        """
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        torch.manual_seed(seed)
        group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
        ranks = {} if group is not None else {"tp_rank": 0, "ep_rank": 0, "etp_rank": 0}
        model_parallel_cuda_manual_seed(seed, **ranks)

    def synchronize(self) -> None:
        """Waits for the device; phase timers call it, because CUDA work is asynchronous."""
        if not self.is_cpu:
            torch.cuda.synchronize()

    def peak_memory_bytes(self) -> int:
        """Returns the largest memory used so far: of the device on CUDA, of the process on CPU."""
        if not self.is_cpu:
            return torch.cuda.max_memory_allocated()
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def keep_compiled_kernels() -> None:
    """Makes this process find Triton kernels that earlier ones compiled, and keep its own there.

    Triton's folder is the same for all processes unless TRITON_CACHE_DIR names another. Inductor
    sets that where it compiles, to a folder of what it compiles, and not where it finds all of it:
    the second start of an engine, after a lost rank say, compiled all other kernels again, 15 s.
    A folder that TORCHINDUCTOR_CACHE_DIR names has them too. Where nothing can be written, Inductor
    is left to find a place.
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
    """Gives CUDA one hardware queue where training is tensor or context parallel.

    Megatron then starts a collective on one stream and right after it, on another, the matrix
    product that hides it (tensor_parallel/layers.py of megatron-core 0.16.1: "we rely on
    CUDA_DEVICE_MAX_CONNECTIONS=1"). From several queues the GPU may begin the product first, which
    takes all its multiprocessors, and the collective waits. A value that the user has set stays.

    Must run before anything that starts CUDA, which reads the variable then; `Platform.detect`
    does. Here and not in the launcher, so that ranks of torchrun have it too.
    """
    if max(tp, cp) > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def transformer_engine_import_fault() -> str | None:
    """Returns why transformer-engine cannot be imported, or is of the wrong version; else None."""
    try:
        found = version("transformer_engine")
    except PackageNotFoundError:
        return "transformer-engine is not installed"
    if not TRANSFORMER_ENGINE_VERSIONS.contains(found, prereleases=True):
        return f"transformer-engine is {found}, megatron-core asks {TRANSFORMER_ENGINE_VERSIONS}"
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
    """Stands for `torch` in one module of Megatron: factories ignore CUDA and pinned memory."""

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
    """A CUDA stream on a host without CUDA: everything is already in order."""

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
    """Megatron's dispatcher of tokens to experts brings its counts to the host, and only then makes
    them arrays, which all-to-all takes: tensors that are there already stay tensors (0.16.1).
    """
    from megatron.core.transformer.moe import token_dispatcher

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_host


def _exchange_unequal_parts_on_gloo() -> None:
    """gloo gathers and scatters parts of one size only; the tokens of an expert that is cut over
    ranks are not equally many on each.
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
    """torch's gloo notes the name of what it has completed without a lock, in two threads a group:
    coalesced gathers, whose name is too long for a string without memory of its own, may free it
    twice, and the process ends by SIGSEGV soon after (torch 2.13, ProcessGroupGloo::runLoop; once
    in some 10,000 gathers). Other collectives have short names. Nothing is lost: Megatron coalesces
    one gather a bucket, and ranks on CPU have no cores left to gather beside other work.
    """
    from megatron.core.distributed import param_and_grad_buffer

    def gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
        dist.all_gather(list(output.chunk(group.size())), shard, group=group)

    param_and_grad_buffer.dist_all_gather_func = gather


def _put_rng_tracker_on_cpu() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    # Megatron makes a tracker of CUDA's generator when anybody asks for one; it has no use here.
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
    """megatron-core 0.16 uses names of transformer-engine that exist only where it is installed."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    _let_torch_adam_load_distributed_checkpoints()


def _let_torch_adam_load_distributed_checkpoints() -> None:
    """Without apex and transformer-engine, loading the distributed optimizer's state needs two
    repairs (0.16.1).

    `_set_main_param_and_optimizer_states` expects a per-parameter `step`, which the checkpoint
    keeps in the parameter group instead, and writes into leaf tensors under autograd.
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
