"""Starts an SGLang engine inside this process, on the ranks that the layout assigns.

`start` and `stop` are collective over the ranks that have an engine. Owns SGLang's environment
variables, its process groups, and fixes for the installed version, each with its reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hybridrl.console import say
from hybridrl.errors import UserError
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.rollout.common.cpu_experts import experts_forward
from hybridrl.rollout.common.groups import (
    check_groups,
    end_groups,
    engine_world,
    least_free_memory,
    over_layout,
)
from hybridrl.rollout.common.installed_package import refused_start, too_small_cache
from hybridrl.rollout.common.packaged_engine import StartedPackage, StartInputs
from hybridrl.rollout.common.process_state import (
    keep_generators,
    quiet,
    replaced,
    without_variables,
)
from hybridrl.rollout.sglang.adapters import adapter_arguments, adapters_without_experts
from hybridrl.rollout.sglang.arguments import longest_pass, longest_request, server_arguments
from hybridrl.rollout.sglang.memory import EnginePools, allocated_in, engine_pools
from hybridrl.rollout.sglang.process_config import configure
from hybridrl.rollout.sglang.repairs import known_models_kept, latents_on_cpu, stand_in
from hybridrl.rollout.sglang.routing import RecordedExperts, recorded_by
from hybridrl.rollout.sglang.sampling import SeededSampler, keep_seeds
from hybridrl.rollout.sglang.scheduler import make_scheduler, without_watchdog
from hybridrl.rollout.sglang.version import NAME

ENVIRONMENT = {
    # SGLang's context length exceeds the longest request, see sglang/arguments.py.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    # Disables SGLang's check for equal free memory, because the trainer uses more memory on some
    # ranks than on others.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    # Size of the cache of images' features, in MiB: two passes of a model of 8 billion parameters.
    # SGLang's default is 100, but 0 on Hopper (0.5.23).
    "SGLANG_VLM_CACHE_SIZE_MB": "512",
}
# On GPUs this variable would make layers behave as on a CPU, where some pack their weights.
CPU_VARIABLE = "SGLANG_USE_CPU_ENGINE"
# Variables that would make SGLang store weights in a layout that training does not write.
OTHER_WEIGHTS = (
    "SGLANG_CPU_QUANTIZATION",  # uses a loader that builds the model on the host
    "SGLANG_CUTLASS_MOE",  # changes the kernel for experts
    "SGLANG_SHARED_EXPERT_TP1",  # puts whole shared experts on each rank
    "SGLANG_ENABLE_EMBED_REPLICATION",  # puts the whole embedding on each rank
)
# Engines of this process that were not stopped. All of them use the same process groups.
_OPEN: list[Any] = []


@dataclass(frozen=True, kw_only=True)
class LiveEngine(StartedPackage):
    """A started SGLang engine; `pools` is None if SGLang allocates its memory itself."""

    scheduler: Any
    pools: EnginePools | None


def start(
    inputs: StartInputs,
    prepare: Callable[[torch.nn.Module], None],
    listen: Callable[[torch.nn.Module, int, int], RecordedExperts | None],
) -> LiveEngine:
    """Starts this rank's part of a replica with dummy weights; collective over ranks with an
    engine.

    Args:
        prepare: Called with the new module, before SGLang measures memory and captures graphs.
        listen: Called after `prepare`, before graphs are captured, with the module, the number of
            slots of the KV cache and the maximum number of tokens in a pass; returns the recorder
            of experts.

    Raises:
        UserError: SGLang cannot be imported, rejects the model, or has too little memory.
        RuntimeError: An engine with another layout is still open.
    """
    settings, layout, is_cpu = inputs.settings, inputs.layout, inputs.is_cpu
    _import_sglang(inputs.version, is_cpu, layout.tp)
    pools = engine_pools(inputs.device)
    from sglang.srt.distributed import parallel_state

    check_groups("SGLang", parallel_state, _OPEN, inputs.rank, inputs.members)
    if not _OPEN and parallel_state._WORLD is not None:
        # A failed start left these groups. From 0.5.22 on, SGLang cannot use groups that another
        # engine's start has built.
        end_groups(parallel_state)
    memory = None if is_cpu else least_free_memory(layout)
    arguments = server_arguments(settings, inputs.shape, layout.tp, inputs.weight_bytes, memory)
    if not is_cpu:
        arguments |= _attention()
    if inputs.slots is not None:
        arguments |= adapter_arguments(inputs.slots, is_cpu)
    loaded: list[torch.nn.Module] = []

    def prepare_loaded(model: torch.nn.Module) -> None:
        loaded.append(model)
        prepare(model)

    with (
        _inside_the_trainer(inputs),
        allocated_in(pools, inputs.device),
        _after_loading(prepare_loaded),
        contextlib.nullcontext() if inputs.slots is None else adapters_without_experts(is_cpu),
        recorded_by(lambda num_slots: listen(loaded[0], num_slots, longest_pass(arguments))),
    ):
        scheduler = _make_scheduler(inputs, arguments)
    _OPEN.append(scheduler)
    check_groups("SGLang", parallel_state, _OPEN, inputs.rank, inputs.members)
    fits = longest_request(scheduler.max_total_num_tokens)
    group = parallel_state._TP.cpu_group
    engine = LiveEngine(
        scheduler=scheduler, model=loaded[0], tp_group=group, version=inputs.version, pools=pools
    )
    if fits < settings.max_tokens:
        stop(engine)
        raise too_small_cache(settings.max_tokens, fits)
    return engine


@contextlib.contextmanager
def _inside_the_trainer(inputs: StartInputs) -> Iterator[None]:
    """Applies all fixes that SGLang's start needs, and restores process state that it changed."""
    from sglang.srt.managers import tp_worker
    from sglang.srt.model_executor import model_runner

    is_cpu = inputs.is_cpu
    has_latents = is_cpu and inputs.shape.latent is not None
    if hidden := sorted(os.environ.keys() & set(_other_weights(is_cpu))):
        why = "SGLang would store weights in a layout that training does not write"
        say(f"hybridrl: ignoring environment variables {', '.join(hidden)}: {why}")

    def keep_config(model_config: Any, load_config: Any, tp_size: int) -> Any:
        return model_config

    with (
        keep_generators(inputs.device, everywhere=True),
        _kept_threads(),
        _groups_of(inputs.layout, inputs.settings.timeout_s),
        # On CPU, SGLang would pad the model's sizes for AMX.
        replaced(model_runner, "adjust_config_with_unaligned_cpu_tp", keep_config),
        # Disables the broadcast of seeds: all ranks have the same seed, and a replica without rank
        # 0 would wait for the wrong sender.
        replaced(tp_worker, "broadcast_pyobj", lambda data, *args, **kwargs: data),
        latents_on_cpu() if has_latents else contextlib.nullcontext(),
        without_variables(_other_weights(is_cpu)),
        without_watchdog(),
        quiet(),
    ):
        yield


def _attention() -> dict[str, str]:
    """Returns an argument that selects another attention backend if FlashAttention 3, SGLang's
    default for Hopper, cannot be imported, as without the optional libraries of sgl-kernel.
    """
    if find_spec("sgl_kernel.flash_ops") is not None:
        return {}
    return {"attention_backend": "flashinfer" if find_spec("flashinfer") else "triton"}


def _make_scheduler(inputs: StartInputs, arguments: dict[str, Any]) -> Any:
    from sglang.srt.runtime_context import get_resources
    from sglang.srt.server_args import ServerArgs

    # SGLang assumes a single engine per process.
    get_resources().expert_location_metadata = None
    layout, settings = inputs.layout, inputs.settings
    _, tp_rank = layout.place(inputs.rank)
    ep_rank = tp_rank // (layout.tp // settings.ep)
    gpu_id = 0 if inputs.is_cpu else torch.cuda.current_device()
    with tempfile.TemporaryDirectory() as folder:
        config = json.dumps(settings.config_json())
        (Path(folder) / "config.json").write_text(config, encoding="utf-8")
        try:
            server_args = ServerArgs(model_path=folder, **arguments)
            active = configure(server_args, tp_rank, gpu_id, _OPEN)
            scheduler = make_scheduler(server_args, tp_rank, ep_rank, gpu_id, active)
        except (ValueError, NotImplementedError, AssertionError) as error:
            if not str(error):
                raise  # an empty message helps less than the traceback
            raise refused_start(NAME, "SGLang", str(error), inputs.version) from error
    keep_seeds()
    scheduler.model_config.hf_eos_token_id = None  # requests have their own stop tokens
    scheduler.tp_worker.model_runner.sampler = SeededSampler(scheduler.token_table)
    with active():
        scheduler.prepare_turns()
    return scheduler


def stop(engine: LiveEngine) -> None:
    """Shuts down the engine, and after the last one SGLang's groups, but never the trainer's."""
    from sglang.srt.distributed import parallel_state

    if engine.scheduler not in _OPEN:
        return
    _OPEN.remove(engine.scheduler)
    if not _OPEN:
        end_groups(parallel_state)


def _import_sglang(version: str, is_cpu: bool, tp: int) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if is_cpu:
        os.environ[CPU_VARIABLE] = "1"
        # SGLang requires a list of cores for each rank, but only counts the entries.
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp)))
    try:
        if is_cpu:
            stand_in()
        with quiet(), known_models_kept(), without_variables(_other_weights(is_cpu)):
            import sglang.srt.managers.scheduler  # noqa: F401  # imports all that a start needs
            import sglang.srt.utils.common as common
    except (ImportError, OSError) as error:  # OSError if a library does not load
        reason = str(error).splitlines()[0]
        raise UserError(NAME, reason, "an importable SGLang", f"Reinstall {version}.") from error
    if is_cpu and common.cpu_has_amx_support():
        raise UserError(
            NAME,
            "an SGLang with kernels for AMX, which pack the weights",
            "a build without these kernels, because they would ignore weights that training writes",
            "Run: pip uninstall -y sgl-kernel-cpu",
        )
    if is_cpu:
        _compute_with_local_experts()
        _gate_shared_experts_with_torch()


def _other_weights(is_cpu: bool) -> list[str]:
    """Returns the variables that would change the layout of weights, and their old SGL_ names."""
    names = OTHER_WEIGHTS if is_cpu else (*OTHER_WEIGHTS, CPU_VARIABLE)
    return [*names, *(name.replace("SGLANG_", "SGL_") for name in names)]


def _compute_with_local_experts() -> None:
    """Replaces SGLang's CPU experts, which use -1, the mark for other ranks, as an index."""
    from sglang.srt.layers.moe import fused_moe_native

    def forward(layer: Any, hidden_TD: torch.Tensor, chosen: Any, config: Any) -> torch.Tensor:
        if config.apply_router_weight_on_input or config.activation != "silu":
            raise NotImplementedError("only gated SiLU experts with weights on their outputs")
        weights_TK, experts_TK, _ = chosen
        return experts_forward(hidden_TD, layer.w13_weight, layer.w2_weight, weights_TK, experts_TK)

    fused_moe_native.moe_forward_native = forward


def _gate_shared_experts_with_torch() -> None:
    """Replaces a Triton kernel that Qwen2-MoE also calls on CPU (SGLang 0.5.16 to 0.5.23)."""
    from sglang.srt.models import qwen2_moe

    def add_gated(
        hidden_TD: torch.Tensor, gate_D: torch.Tensor, shared_TD: torch.Tensor, sum_TD: torch.Tensor
    ) -> None:
        sum_TD += torch.sigmoid(hidden_TD @ gate_D)[:, None] * shared_TD

    qwen2_moe.fused_gate_sigmoid_mul_add = add_gated


@contextlib.contextmanager
def _groups_of(layout: RolloutLayout, timeout_s: float | None) -> Iterator[None]:
    """Makes SGLang build its process groups over the layout's ranks, in the same way for each
    replica, and reuse existing groups, with the trainer's time limit. SGLang itself would treat a
    replica as the whole world.
    """
    from sglang.srt.distributed import bootstrap, parallel_state

    build = over_layout(layout, parallel_state.init_model_parallel_group, knows_replicas=False)
    initialize = parallel_state.initialize_model_parallel
    parts = {"use_pynccl": False, "use_custom_allreduce": False, "group_name": "world"}

    def build_world(ranks: list[int], local_rank: int, backend: str, **kwargs: Any) -> Any:
        return build([list(range(layout.tp))], local_rank, backend, **parts)

    def initialize_once(*args: Any, **kwargs: Any) -> None:
        if not parallel_state.model_parallel_is_initialized():
            initialize(*args, **kwargs)

    bound = None if timeout_s is None else timedelta(seconds=timeout_s)
    with (
        engine_world(parallel_state, layout.tp, build, build_world),
        replaced(parallel_state, "_MODEL_PARALLEL_GROUP_TIMEOUT", bound),
        replaced(bootstrap, "initialize_model_parallel", initialize_once),
    ):
        yield


@contextlib.contextmanager
def _after_loading(prepare: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Calls `prepare` while the memory pool for weights is in use and can free replaced weights."""
    from sglang.srt.model_loader.loader import DummyModelLoader

    load = DummyModelLoader.load_model

    def load_and_prepare(loader: Any, **keywords: Any) -> Any:
        model = load(loader, **keywords)
        prepare(model)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return model

    with replaced(DummyModelLoader, "load_model", load_and_prepare):
        yield


@contextlib.contextmanager
def _kept_threads() -> Iterator[None]:
    """Restores torch's number of threads afterwards, because SGLang sets it to 1 while loading."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
