"""Starts a vLLM engine inside this process, on the ranks that the layout assigns.

`start` and `stop` are collective over all ranks. Owns vLLM's environment variables and process
groups, and a few repairs of the installed version, each with its reason.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hybridrl import ops
from hybridrl.errors import UserError
from hybridrl.parallel.layout import Place, RolloutLayout
from hybridrl.rollout.common.groups import (
    check_groups,
    end_groups,
    engine_world,
    least_free_memory,
    over_layout,
)
from hybridrl.rollout.common.packaged_engine import StartedPackage, StartInputs
from hybridrl.rollout.common.process_state import keep_generators, ranks_in_environment, replaced
from hybridrl.rollout.common.sampling import uniforms
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.common.stand_ins import stand_in_for
from hybridrl.rollout.vllm.adapters import adapter_arguments, forget_addresses, split_projections
from hybridrl.rollout.vllm.arguments import engine_arguments
from hybridrl.rollout.vllm.experts import compute_with_live_experts, experts_without_adapters
from hybridrl.rollout.vllm.fp8 import before_processing, check_gpu, choose_kernels
from hybridrl.rollout.vllm.images import encode_once, without_processor
from hybridrl.rollout.vllm.model_folder import model_folder
from hybridrl.rollout.vllm.one_adapter import compute_densely
from hybridrl.rollout.vllm.repairs import register_text_models, text_config
from hybridrl.rollout.vllm.version import NAME, refusal

ENVIRONMENT = {
    # The engine core runs in this process, which external_launcher requires.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # FlashInfer's sampler ignores requests' seeds, and is compiled at the first start.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
# Name of vLLM 0.26's list of architectures, in addition to dense ones, that use its second model
# runner.
SECOND_RUNNER_LIST = "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"
# Engines that were not stopped. These engines share vLLM's process groups, and the references here
# prevent garbage collection of an engine from destroying these groups.
_OPEN: list[Any] = []


@dataclass(frozen=True, kw_only=True)
class LiveEngine(StartedPackage):
    """A started vLLM engine; `llm` is vLLM's `LLMEngine`."""

    llm: Any


def start(
    inputs: StartInputs,
    prepare: Callable[[torch.nn.Module], None],
    prepare_loading: Callable[[torch.nn.Module], None],
    prepare_adapter: Callable[[torch.nn.Module], None],
    listen: Callable[[torch.nn.Module, Any], object],
) -> LiveEngine:
    """Starts this rank's part of its replica, with dummy weights; collective over all ranks.

    Args:
        prepare: Called with the new module, before vLLM adds adapters' slots, measures memory and
            captures graphs.
        prepare_loading: Called with the module before vLLM processes its FP8 weights, if it has
            any.
        prepare_adapter: Called with the module after vLLM has added slots for adapters, if any.
        listen: Called with the module and vLLM's `KVCacheConfig`, before graphs are captured.

    Raises:
        UserError: vLLM cannot be imported, or rejects the model or the memory.
        RuntimeError: An engine of another layout is still open.
    """
    settings, layout, is_cpu = inputs.settings, inputs.layout, inputs.is_cpu
    is_fp8 = settings.quantization == "fp8"
    if is_fp8:
        choose_kernels(inputs.device)
    if settings.kv_cache_dtype == "fp8":
        check_gpu(inputs.device, "rollout.kv_cache_dtype", "auto")
    _import_vllm(inputs.version, is_cpu)
    shape = inputs.shape
    if is_cpu and (shape.vision is not None or shape.mixer is not None):
        # The model's code imports torchvision, whose wheels do not load with a CPU build of torch.
        stand_in_for(("torchvision",))
    if is_cpu and shape.mixer is not None:
        _convolve_with_live_parameters()
    register_text_models(settings.architectures)
    from vllm.distributed import parallel_state

    check_groups("vLLM", parallel_state, _OPEN, inputs.rank, inputs.members)
    memory = None if is_cpu else least_free_memory(layout)
    arguments = engine_arguments(settings, inputs.shape, layout.tp, inputs.weight_bytes, memory)
    if inputs.slots is not None:
        arguments |= adapter_arguments(inputs.slots, is_cpu)

    def finish_adapter(model: torch.nn.Module) -> None:
        if inputs.slots is not None and len(inputs.slots.adapters) == 1:
            compute_densely(model)
        prepare_adapter(model)

    with (
        keep_generators(inputs.device, everywhere=True),
        ranks_in_environment(),
        _groups_of(layout),
        _collectives_over_gloo(is_cpu),
        before_processing(prepare_loading) if is_fp8 else contextlib.nullcontext(),
        _after_loading(prepare, finish_adapter),
        _after_caching(listen),
        second_runner(settings.architectures),
        any_world_size(settings.architectures),
        without_processor(inputs.shape, settings),
        experts_without_adapters() if inputs.slots is not None else contextlib.nullcontext(),
    ):
        llm = _make_engine(settings, arguments, inputs.version, layout.place(inputs.rank))
    _OPEN.append(llm)
    finalizer = getattr(llm.engine_core, "_finalizer", None)  # since 0.32
    if finalizer is not None:
        finalizer.detach()  # otherwise it runs vLLM's shutdown, see `stop`
    check_groups("vLLM", parallel_state, _OPEN, inputs.rank, inputs.members)
    group = parallel_state.get_tp_group().cpu_group
    runner = runner_of(llm)
    scheduler = llm.engine_core.engine_core.scheduler
    if shape.vision is not None:
        encode_once(scheduler)
    if scheduler.use_v2_model_runner:
        compute_on_current_stream(type(runner))
    else:
        _draw_by_seed_and_position(runner)
    return LiveEngine(llm=llm, model=runner.model, tp_group=group, version=inputs.version)


def runner_of(llm: Any) -> Any:
    """Returns the model runner of vLLM's `LLMEngine`."""
    (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
    return runner


def caches_of(runner: Any) -> list[Tensor]:
    """Returns the distinct storages of all layers' keys and values, as bytes."""
    found: dict[int, Tensor] = {}
    for layer in runner.kv_caches:  # some models have several caches in a layer
        for cache in [layer] if isinstance(layer, Tensor) else layer:
            whole = torch.empty(0, dtype=torch.uint8, device=cache.device)
            whole.set_(cache.untyped_storage())
            found[whole.data_ptr()] = whole
    return list(found.values())


def _make_engine(
    settings: EngineSettings, arguments: Mapping[str, Any], version: str, place: Place
) -> Any:
    from vllm import EngineArgs, LLMEngine
    from vllm.model_executor.models import registry

    set_num_threads = torch.set_num_threads
    with (
        model_folder(text_config(settings.config_json(), settings.architectures), *place) as folder,
        # vLLM inspects the model's class in a subprocess, so that its own process does not use a
        # GPU. That takes 17 s for imports, and this process uses a GPU anyway.
        replaced(registry, "_run_in_subprocess", lambda look: look(), if_there=True),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            return LLMEngine.from_engine_args(EngineArgs(model=str(folder), **arguments))
        except ValueError as error:  # vLLM or pydantic rejects the model or a size
            raise refusal(str(error), settings.max_tokens, version) from error
        finally:
            torch.set_num_threads = set_num_threads  # vLLM on CPU disables the function


def stop(engine: LiveEngine) -> None:
    """Shuts down the engine and, if it is the process's last, vLLM's process groups. vLLM's own
    shutdown would also destroy the trainer's default process group.
    """
    from vllm.distributed import parallel_state

    if engine.llm not in _OPEN:
        return
    _OPEN.remove(engine.llm)
    core = engine.llm.engine_core.engine_core
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    if not _OPEN:
        end_groups(parallel_state)
        forget_addresses()


def _import_vllm(version: str, is_cpu: bool) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        import vllm.platforms
    except (ImportError, OSError) as error:  # OSError if a library does not load
        reason = str(error).splitlines()[0]
        raise UserError(NAME, reason, "an importable vLLM", f"Reinstall {version}.") from error
    if is_cpu:
        _compute_with_live_parameters()
        # Inductor would compile two trivial helpers of the sampler with g++, for 3 to 17 s at the
        # first token.
        type(vllm.platforms.current_platform).simple_compile_backend = "eager"


def _compute_with_live_parameters() -> None:
    """Makes CPU layers compute with their live parameters, which the hybrid engine writes.

    vLLM on CPU packs linear layers' weights for oneDNN (bf16 on AMX machines: for its own kernels)
    and leaves an empty parameter, or for lm_head a stale one. F.linear reads the live parameter.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *args: False
    compute_with_live_experts()


def _convolve_with_live_parameters() -> None:
    """Makes CPU engines compute convolutions of gated delta nets with live parameters.

    On CPUs with AVX512-BF16, vLLM (0.32) packs their weights in place. Only the code of these
    convolutions asks for this feature (layers/utils.py, mamba/ops/cpu/gdn_attention.py). The patch
    can go when vLLM packs copies.
    """
    torch.cpu._is_avx512_bf16_supported = lambda: False


@contextlib.contextmanager
def _groups_of(layout: RolloutLayout) -> Iterator[None]:
    """Makes vLLM, which maps its grid (replicas, ..., tensor parallel) to consecutive ranks, build
    its process groups over the ranks that the layout assigns.
    """
    from vllm.distributed import parallel_state

    build = over_layout(layout, parallel_state.init_model_parallel_group, knows_replicas=True)
    build_world = parallel_state.init_world_group

    def build_over_engines(_: list[int], *args: Any, **kwargs: Any) -> Any:
        return build_world(list(layout.ranks), *args, **kwargs)

    with engine_world(parallel_state, len(layout.ranks), build, build_over_engines):
        yield


@contextlib.contextmanager
def _collectives_over_gloo(is_cpu: bool) -> Iterator[None]:
    """Makes CPU engines' tensor-parallel collectives wait without occupying a core.

    vLLM's own spin on shared memory. If there are more ranks than cores, a waiting rank then
    occupies the core that its peer needs: 4 ranks on 2 busy cores took 1.6 s per token, instead of
    0.05 s with gloo. Its memory's name contains only the ranks, so two jobs on one machine would
    share it.
    """
    if not is_cpu:
        yield
        return
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    name = "_all_group_ranks_share_shm_group_name"
    with replaced(CpuCommunicator, name, lambda communicator: False):
        yield


@contextlib.contextmanager
def _after_loading(
    prepare: Callable[[torch.nn.Module], None], prepare_adapter: Callable[[torch.nn.Module], None]
) -> Iterator[None]:
    """Calls `prepare` with vLLM's new module while the memory pool for weights is in use, and
    `prepare_adapter` after vLLM has wrapped the layers that have adapters.

    The pool can then free the parameters that `prepare` replaces. `prepare` runs before vLLM wraps
    layers: the loader of a model with wrapped layers needs other names in vLLM 0.26.
    """
    from vllm.v1.worker.gpu_worker import Worker  # base class of CPU workers too

    load_worker = Worker.load_model

    def load(worker: Any, **keywords: Any) -> None:
        runner = worker.model_runner
        load_runner, wrap_layers = runner.load_model, runner.load_lora_model
        prepared: list[torch.nn.Module] = []

        def prepare_and_wrap(model: Any, *args: Any, **wrap_keywords: Any) -> Any:
            with torch.inference_mode(False):
                prepare(model)
            split_projections(model)
            prepared.append(wrap_layers(model, *args, **wrap_keywords))
            with torch.inference_mode(False):
                prepare_adapter(prepared[0])
            return prepared[0]

        def load_and_prepare(*args: Any, **runner_keywords: Any) -> None:
            load_runner(*args, **runner_keywords)
            if not prepared:
                with torch.inference_mode(False):
                    prepare(runner.model)

        runner.load_model, runner.load_lora_model = load_and_prepare, prepare_and_wrap
        try:
            load_worker(worker, **keywords)
        finally:
            del runner.load_model, runner.load_lora_model

    with replaced(Worker, "load_model", load):
        yield


@contextlib.contextmanager
def _after_caching(listen: Callable[[torch.nn.Module, Any], object]) -> Iterator[None]:
    """Calls `listen` with the module and the configuration of vLLM's allocated KV cache."""
    from vllm.v1.worker.gpu_worker import Worker

    initialize = Worker.initialize_from_config

    def initialize_and_listen(worker: Any, kv_cache_config: Any) -> None:
        initialize(worker, kv_cache_config)
        with torch.inference_mode(False):
            listen(worker.model_runner.model, kv_cache_config)

    with replaced(Worker, "initialize_from_config", initialize_and_listen):
        yield


@contextlib.contextmanager
def second_runner(architectures: Sequence[str]) -> Iterator[None]:
    """Makes an engine that starts in this context use vLLM's second model runner if possible.

    vLLM 0.26 uses this runner for dense models and for listed mixtures of experts; newer versions
    have no list. On H200, decode steps of a Qwen3 mixture were 1.07 to 1.6 times as fast with this
    runner. The environment variable VLLM_USE_V2_MODEL_RUNNER takes precedence.
    """
    from vllm.config import vllm as config

    listed = vars(config).get(SECOND_RUNNER_LIST, frozenset()) | set(architectures)
    with replaced(config, SECOND_RUNNER_LIST, listed, if_there=True):
        yield


@contextlib.contextmanager
def any_world_size(architectures: Sequence[str]) -> Iterator[None]:
    """Makes vLLM's GPT-OSS start in jobs of any size. Its experts' width must be a multiple of the
    whole job's number of ranks (gpt_oss.py, 0.32, MLPBlock), although only an engine's ranks divide
    it.
    """
    if "GptOssForCausalLM" not in architectures:
        yield
        return
    from vllm.model_executor.models import gpt_oss

    alone = SimpleNamespace(is_initialized=lambda: False)
    with replaced(gpt_oss, "dist", alone, if_there=True):
        yield


def compute_on_current_stream(runner: type) -> None:
    """Makes vLLM's second model runner compute on the current stream.

    The runner stores the stream of its first step as `main_stream` (0.26, 0.32). A step in another
    thread with its own stream (generation/background.py) would then copy tokens too early.
    """
    if hasattr(runner, "main_stream"):
        current = property(lambda own: torch.cuda.current_stream(own.device))
        runner.main_stream = current  # type: ignore[attr-defined]


def _draw_by_seed_and_position(runner: Any) -> None:
    """Makes a token's randomness a function of its request's seed and position, and draws all rows
    together, as the second model runner does. The first has a generator for each request, whose
    state is lost in a continued request, and launches one draw per row.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    def forward(
        logits_BV: torch.Tensor,
        generators: dict[int, torch.Generator],
        k_B: torch.Tensor | None,
        p_B: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device, rows = (
            logits_BV.device,
            list(generators),
        )  # vLLM overwrites the other rows, which are greedy
        requests = [runner.requests[runner.input_batch.req_ids[row]] for row in rows]
        seeds = [request.sampling_params.seed for request in requests]
        drawn = uniforms(seeds, [request.num_tokens for request in requests])
        uniform_B = torch.zeros(
            len(logits_BV), dtype=torch.float64, pin_memory=device.type != "cpu"
        )
        uniform_B[rows] = torch.from_numpy(drawn)
        kept_BV = apply_top_k_top_p(logits_BV, k_B, p_B)
        logp_BV = kept_BV.log_softmax(-1, dtype=torch.float32)
        return ops.invert_rows(logp_BV, uniform_B.to(device, non_blocking=True)), logp_BV

    runner.sampler.topk_topp_sampler.forward = forward
