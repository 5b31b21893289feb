"""Starts a vLLM engine inside this process, cut over the ranks as our own layout says.

Owns everything that is about vLLM's start and not about generation: environment, process groups,
and the few repairs of the installed version, each with its reason. Who waits for whom: `start` and
`stop` are collective over the world.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl import ops
from hybridrl.errors import UserError
from hybridrl.models.family import ModelShape
from hybridrl.parallel.layout import Place, RolloutLayout
from hybridrl.parallel.view import View
from hybridrl.rollout.common.groups import (
    check_groups,
    end_groups,
    least_free_memory,
    over_layout,
    replica_members,
)
from hybridrl.rollout.common.packaged_engine import StartedPackage
from hybridrl.rollout.common.process_state import keep_generators, ranks_in_environment, replaced
from hybridrl.rollout.common.sampling import uniforms
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.vllm.arguments import engine_arguments
from hybridrl.rollout.vllm.experts import compute_with_live_experts
from hybridrl.rollout.vllm.model_folder import model_folder
from hybridrl.rollout.vllm.version import NAME, installed_version, refusal

ENVIRONMENT = {
    # The engine core runs in this process: external_launcher asserts it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # FlashInfer's sampler knows no seeds of requests, and compiles itself at the first start.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
# The architectures beside dense ones that vLLM 0.26 computes with its second model runner.
SECOND_RUNNER_LIST = "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"
# Engines that are not stopped. vLLM's process groups belong to all of them, and one that Python
# collected would take the groups along.
_OPEN: list[Any] = []


@dataclass(frozen=True, kw_only=True)
class LiveEngine(StartedPackage):
    """A started vLLM engine; `llm` is vLLM's `LLMEngine`."""

    llm: Any


def start(
    settings: EngineSettings,
    shape: ModelShape,
    layout: RolloutLayout,
    rank: int,
    device: torch.device,
    weight_bytes: int,
    prepare: Callable[[torch.nn.Module, str], None],
    listen: Callable[[torch.nn.Module, Any], object],
) -> LiveEngine:
    """Starts this rank's part of its replica, with dummy weights; collective over the world.

    Args:
        weight_bytes: Bytes of this rank's parameters.
        prepare: Called with the new module and vLLM's version, before vLLM measures memory and
            captures graphs.
        listen: Called with the module and vLLM's `KVCacheConfig` of this rank, before graphs are
            captured.

    Raises:
        UserError: vLLM is missing, does not fit this host, or refuses the model or its memory.
        ValueError: The ranks of a replica do not ascend.
        RuntimeError: There is no process group, or an engine of another layout is still open.
    """
    is_cpu = device.type == "cpu"
    version = installed_version(is_cpu)
    members = replica_members(layout, rank)
    if not dist.is_initialized():
        raise RuntimeError("start a process group first: the engine's ranks are those of the world")
    _import_vllm(version, is_cpu)
    from vllm.distributed import parallel_state

    check_groups("vLLM", parallel_state, _OPEN, rank, members)
    memory = None if is_cpu else least_free_memory(layout)
    arguments = engine_arguments(settings, shape, layout.tp, weight_bytes, memory)
    with (
        keep_generators(device, everywhere=True),
        ranks_in_environment(),
        _groups_of(layout),
        _collectives_over_gloo(is_cpu),
        _after_loading(lambda model: prepare(model, version)),
        _after_caching(listen),
        second_runner(settings.architectures),
    ):
        llm = _make_engine(settings, arguments, version, layout.place(rank))
    _OPEN.append(llm)
    finalizer = getattr(llm.engine_core, "_finalizer", None)  # since 0.32
    if finalizer is not None:
        finalizer.detach()  # it runs vLLM's shutdown, see `stop`
    check_groups("vLLM", parallel_state, _OPEN, rank, members)
    group = parallel_state.get_tp_group()
    runner = runner_of(llm)
    if llm.engine_core.engine_core.scheduler.use_v2_model_runner:
        compute_on_current_stream(type(runner))
    else:
        _draw_by_seed_and_position(runner)
    return LiveEngine(llm=llm, model=runner.model, tp_group=group.cpu_group, version=version)


def runner_of(llm: Any) -> Any:
    """Returns the model runner of vLLM's `LLMEngine`."""
    return llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def caches_of(runner: Any) -> list[Tensor]:
    """Returns the memory of keys and values of all layers, as bytes, once each."""
    found: dict[int, Tensor] = {}
    for layer in runner.kv_caches:  # of some models several of a layer
        for cache in [layer] if isinstance(layer, Tensor) else layer:
            whole = torch.empty(0, dtype=torch.uint8, device=cache.device)
            whole.set_(cache.untyped_storage())
            found[whole.data_ptr()] = whole
    return list(found.values())


def _make_engine(
    settings: EngineSettings, arguments: Mapping[str, Any], version: str, place: Place
) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry
    from vllm.v1.engine.llm_engine import LLMEngine

    set_num_threads = torch.set_num_threads
    with (
        model_folder(settings.config_json(), *place) as folder,
        # vLLM looks at the model's class in a process of its own, which takes 17 s to import all
        # that this one has imported, so that no GPU is touched; this process does so anyway.
        replaced(registry, "_run_in_subprocess", lambda look: look(), if_there=True),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            return LLMEngine.from_engine_args(EngineArgs(model=str(folder), **arguments))
        except ValueError as error:  # pydantic's too: a model or a size that vLLM refuses
            raise refusal(str(error), settings.max_tokens, version) from error
        finally:
            torch.set_num_threads = set_num_threads  # vLLM on CPU puts one that does nothing


def stop(engine: LiveEngine) -> None:
    """Ends the engine; with the last one of the process, vLLM's process groups too.

    Not by vLLM's own shutdown, which destroys the default process group, the trainer's.
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


def _import_vllm(version: str, is_cpu: bool) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        import vllm.platforms
    except (ImportError, OSError) as error:  # OSError: a library that does not load
        reason = str(error).splitlines()[0]
        raise UserError(NAME, reason, "a vLLM that imports", f"Reinstall {version}.") from error
    if is_cpu:
        _compute_with_live_parameters()
        # Two helpers of the sampler are compiled by inductor, that is by g++, 3 to 17 s at the
        # first token; they do next to nothing.
        type(vllm.platforms.current_platform).simple_compile_backend = "eager"


def _compute_with_live_parameters() -> None:
    """Makes CPU layers compute with their parameters, which the hybrid engine writes.

    vLLM on CPU packs each linear layer's weight for oneDNN (bf16 on AMX machines: for its own
    kernels) and leaves an empty parameter, or for lm_head a stale one. F.linear reads the live one.
    Experts are packed in place (vllm/experts.py).
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *args: False
    compute_with_live_experts()


@contextlib.contextmanager
def _groups_of(layout: RolloutLayout) -> Iterator[None]:
    """Makes vLLM build its process groups over the ranks that the layout assigns.

    vLLM lays its grid (replicas, ..., tensor parallel) over consecutive ranks; here every place of
    the grid is translated into the rank that the layout puts there.
    """
    from vllm.distributed import parallel_state

    build = over_layout(layout, parallel_state.init_model_parallel_group, knows_replicas=True)
    build_world = parallel_state.init_world_group

    def build_over_engines(_: list[int], *args: Any, **kwargs: Any) -> Any:
        return build_world(list(layout.ranks), *args, **kwargs)

    # vLLM takes the ranks that have an engine for the whole world.
    distributed, seen = View(dist), View(torch)
    distributed.get_world_size = lambda group=None: (
        len(layout.ranks) if group is None else dist.get_world_size(group)
    )
    seen.distributed = distributed
    with (
        replaced(parallel_state, "init_model_parallel_group", build),
        replaced(parallel_state, "init_world_group", build_over_engines),
        replaced(parallel_state, "torch", seen),
    ):
        yield


@contextlib.contextmanager
def _collectives_over_gloo(is_cpu: bool) -> Iterator[None]:
    """Makes the tensor-parallel collectives of CPU engines wait without burning a core.

    vLLM's own run through shared memory and spin. With more ranks than cores a rank so keeps the
    core that its peer needs: 1.6 s a token with 4 ranks on 2 busy cores, gloo 0.05 s. And the
    shared memory is named after the ranks alone, so two jobs of one machine would meet in it.
    """
    if not is_cpu:
        yield
        return
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    name = "_all_group_ranks_share_shm_group_name"
    with replaced(CpuCommunicator, name, lambda communicator: False):
        yield


@contextlib.contextmanager
def _after_loading(prepare: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Calls `prepare` with the module that vLLM has just made, inside the memory pool of weights.

    Inside, so that the pool gives back what `prepare` replaces.
    """
    from vllm.v1.worker.gpu_worker import Worker  # CPU workers too

    load_worker = Worker.load_model

    def load(worker: Any, **keywords: Any) -> None:
        runner = worker.model_runner
        load_runner = runner.load_model

        def load_and_prepare(*args: Any, **runner_keywords: Any) -> None:
            load_runner(*args, **runner_keywords)
            with torch.inference_mode(False):
                prepare(runner.model)

        runner.load_model = load_and_prepare
        try:
            load_worker(worker, **keywords)
        finally:
            del runner.load_model

    with replaced(Worker, "load_model", load):
        yield


@contextlib.contextmanager
def _after_caching(listen: Callable[[torch.nn.Module, Any], object]) -> Iterator[None]:
    """Calls `listen` with the module and the KV cache's configuration once the cache is there."""
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
    """Makes an engine that starts inside compute with vLLM's second model runner, where it can.

    vLLM 0.26 takes it for dense models and for the mixtures of experts of a list; newer versions
    have no list. A step of a Qwen3 mixture was 1.07 to 1.6 times as fast with it on H200.
    VLLM_USE_V2_MODEL_RUNNER in the environment goes before.
    """
    from vllm.config import vllm as config

    listed = vars(config).get(SECOND_RUNNER_LIST, frozenset()) | set(architectures)
    with replaced(config, SECOND_RUNNER_LIST, listed, if_there=True):
        yield


def compute_on_current_stream(runner: type) -> None:
    """Lets vLLM's second model runner compute on the stream that is current.

    It keeps the stream of its first step as `main_stream` (0.26, 0.32): a step in another thread,
    on a stream of its own (generation/beside.py), would have tokens copied before they are drawn.
    """
    if hasattr(runner, "main_stream"):
        current = property(lambda own: torch.cuda.current_stream(own.device))
        runner.main_stream = current  # type: ignore[attr-defined]


def _draw_by_seed_and_position(runner: Any) -> None:
    """Makes a token's randomness a function of its request's seed and its position, and draws all
    rows at once, as the second model runner does. The first one keeps a generator a request, which
    a continued request has lost, and launches a draw for each row.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    def forward(
        logits_BV: torch.Tensor,
        generators: dict[int, torch.Generator],
        k_B: torch.Tensor | None,
        p_B: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device, rows = logits_BV.device, list(generators)  # others are greedy: vLLM's to replace
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
