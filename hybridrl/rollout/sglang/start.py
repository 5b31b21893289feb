"""Starts an SGLang engine inside this process, cut over the ranks as our own layout says.

Owns environment, process groups and the repairs of the installed version, each with its reason. Who
waits for whom: `start` and `stop` are collective over the ranks that have an engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
import torch.distributed as dist

from hybridrl.console import say
from hybridrl.errors import UserError
from hybridrl.models.family import ModelShape
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.parallel.view import View
from hybridrl.rollout.common.cpu_experts import experts_forward
from hybridrl.rollout.common.groups import (
    check_groups,
    end_groups,
    least_free_memory,
    over_layout,
    replica_members,
)
from hybridrl.rollout.common.installed_package import refused_start, too_small_cache
from hybridrl.rollout.common.packaged_engine import StartedPackage
from hybridrl.rollout.common.process_state import (
    keep_generators,
    quiet,
    replaced,
    without_variables,
)
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.sglang.arguments import longest_pass, longest_request, server_arguments
from hybridrl.rollout.sglang.latent import latents_on_cpu
from hybridrl.rollout.sglang.memory import EnginePools, allocated_in, engine_pools
from hybridrl.rollout.sglang.routing import RecordedExperts, recorded_by
from hybridrl.rollout.sglang.sampling import SeededSampler, keep_seeds
from hybridrl.rollout.sglang.scheduler import make_scheduler, without_watchdog
from hybridrl.rollout.sglang.stand_ins import known_models_kept, stand_in
from hybridrl.rollout.sglang.version import NAME, installed_version

ENVIRONMENT = {
    # Requests end before the length that SGLang is told, which is above the longest request.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    # The trainer's ranks hold unlike amounts of memory, which SGLang takes for a fault.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
}
# On GPUs it lets layers believe that they run on a CPU, where some pack their weights.
CPU_VARIABLE = "SGLANG_USE_CPU_ENGINE"
# Variables with which SGLang would keep weights otherwise than its arguments say, and otherwise
# than training writes them.
OTHER_WEIGHTS = (
    "SGLANG_CPU_QUANTIZATION",  # another loader, which makes the model on the host
    "SGLANG_CUTLASS_MOE",  # another runner of experts
    "SGLANG_SHARED_EXPERT_TP1",  # experts that all tokens pass through whole on each rank
    "SGLANG_ENABLE_EMBED_REPLICATION",  # the embedding whole on each rank
)
# Arguments of 0.5.12 that are called otherwise in newer versions.
RENAMED = {
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "disable_piecewise_cuda_graph": "disable_prefill_cuda_graph",
}
# Engines that are not stopped; SGLang's process groups belong to all of them.
_OPEN: list[Any] = []


@dataclass(frozen=True, kw_only=True)
class LiveEngine(StartedPackage):
    """A started SGLang engine. `pools` hold weights and KV cache; None: SGLang knows where they
    are.
    """

    scheduler: Any
    pools: EnginePools | None


def start(
    settings: EngineSettings,
    shape: ModelShape,
    layout: RolloutLayout,
    rank: int,
    device: torch.device,
    weight_bytes: int,
    prepare: Callable[[torch.nn.Module, str], None],
    listen: Callable[[torch.nn.Module, int, int], RecordedExperts | None],
) -> LiveEngine:
    """Starts this rank's part of its replica, with dummy weights; collective over the engines.

    Args:
        weight_bytes: Bytes of this rank's parameters.
        prepare: Called with the new module and SGLang's version, before SGLang measures memory and
            captures graphs.
        listen: Called after it, before graphs are captured, with the module, the slots of the KV
            cache and the most tokens that are computed at once; returns what records experts.

    Raises:
        UserError: SGLang is missing, does not fit this host, or refuses the model or its memory.
        ValueError: The ranks of a replica do not ascend.
        RuntimeError: There is no process group, or an engine of another layout is still open.
    """
    is_cpu = device.type == "cpu"
    version = installed_version(is_cpu)
    members = replica_members(layout, rank)
    if not dist.is_initialized():
        raise RuntimeError("start a process group first: the engine's ranks are those of the world")
    _import_sglang(version, is_cpu, layout.tp)
    pools = engine_pools(device)
    from sglang.srt.distributed import parallel_state

    check_groups("SGLang", parallel_state, _OPEN, rank, members)
    memory = None if is_cpu else least_free_memory(layout)
    arguments = server_arguments(settings, shape, layout.tp, weight_bytes, memory)
    if not is_cpu:
        arguments |= _attention()
    loaded: list[torch.nn.Module] = []

    def prepare_loaded(model: torch.nn.Module) -> None:
        loaded.append(model)
        prepare(model, version)

    with (
        _inside_the_trainer(settings, shape, layout, device),
        allocated_in(pools, device),
        _after_loading(prepare_loaded),
        recorded_by(lambda num_slots: listen(loaded[0], num_slots, longest_pass(arguments))),
    ):
        scheduler = _make_scheduler(settings, arguments, layout, rank, device, version)
    _OPEN.append(scheduler)
    check_groups("SGLang", parallel_state, _OPEN, rank, members)
    fits = longest_request(scheduler.max_total_num_tokens)
    group = parallel_state.get_tp_group().cpu_group
    engine = LiveEngine(
        scheduler=scheduler, model=loaded[0], tp_group=group, version=version, pools=pools
    )
    if fits < settings.max_tokens:
        stop(engine)
        raise too_small_cache(settings.max_tokens, fits)
    return engine


@contextlib.contextmanager
def _inside_the_trainer(
    settings: EngineSettings, shape: ModelShape, layout: RolloutLayout, device: torch.device
) -> Iterator[None]:
    """Keeps what a start of SGLang would change in this process, and what it would do otherwise."""
    is_cpu = device.type == "cpu"
    has_latents = is_cpu and shape.latent is not None
    if hidden := sorted(os.environ.keys() & set(_other_weights(is_cpu))):
        why = "weights would not lie where training writes them"
        say(f"hybridrl: SGLang starts without {', '.join(hidden)}: {why}")
    with (
        keep_generators(device, everywhere=True),
        _kept_threads(),
        _groups_of(layout, settings.timeout_s),
        _sizes_as_they_are(),
        _seeds_as_they_are(),
        latents_on_cpu() if has_latents else contextlib.nullcontext(),
        without_variables(_other_weights(is_cpu)),
        without_watchdog(),
        quiet(),
    ):
        yield


def _attention() -> dict[str, str]:
    """Returns which attention to take where SGLang's own choice for Hopper cannot be imported:
    installations that leave out the libraries of sgl-kernel which they do not use have no
    FlashAttention 3. Nothing where it can.
    """
    if find_spec("sgl_kernel.flash_ops") is not None:
        return {}
    return {"attention_backend": "flashinfer" if find_spec("flashinfer") else "triton"}


def _make_scheduler(
    settings: EngineSettings,
    arguments: dict[str, Any],
    layout: RolloutLayout,
    rank: int,
    device: torch.device,
    version: str,
) -> Any:
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    _forget_places_of_experts()
    _, tp_rank = layout.place(rank)
    ep_rank = tp_rank // (layout.tp // settings.ep)
    gpu_id = 0 if device.type == "cpu" else torch.cuda.current_device()
    with tempfile.TemporaryDirectory() as folder:
        config = json.dumps(settings.config_json())
        (Path(folder) / "config.json").write_text(config, encoding="utf-8")
        try:
            server_args = ServerArgs(model_path=folder, **renamed(arguments, ServerArgs))
            set_global_server_args_for_scheduler(server_args)
            scheduler = make_scheduler(server_args, tp_rank, ep_rank, gpu_id)
        except (ValueError, NotImplementedError, AssertionError) as error:
            if not str(error):
                raise  # says nothing to a user
            raise refused_start(NAME, "SGLang", str(error), version) from error
    keep_seeds()
    scheduler.model_config.hf_eos_token_id = None  # requests say where they end
    scheduler.tp_worker.model_runner.sampler = SeededSampler(scheduler.said)
    scheduler.prepare_turns()
    return scheduler


def _forget_places_of_experts() -> None:
    """Lets a further engine say where its experts lie: SGLang takes one engine for a process."""
    try:
        from sglang.srt.runtime_context import get_resources  # of newer versions
    except ImportError:
        from sglang.srt.eplb import expert_location

        vars(expert_location)["_global_expert_location_metadata"] = None
    else:
        get_resources().expert_location_metadata = None


def renamed(arguments: dict[str, Any], server_args: Any) -> dict[str, Any]:
    """Returns the arguments by the names that this version has for them."""
    known = {field.name for field in dataclasses.fields(server_args)}
    names = {name: name if name in known else RENAMED.get(name, name) for name in arguments}
    return {names[name]: value for name, value in arguments.items()}


def stop(engine: LiveEngine) -> None:
    """Ends the engine; with the last one of the process, SGLang's process groups too.

    Not by SGLang's own shutdown, which destroys the default process group, the trainer's.
    """
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
        # A list of cores for each rank, of which it counts the entries; it binds none.
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp)))
    try:
        if is_cpu:
            stand_in()
        with quiet(), known_models_kept(), without_variables(_other_weights(is_cpu)):
            import sglang.srt.managers.scheduler  # noqa: F401  # all that a start needs
            import sglang.srt.utils.common as common
    except (ImportError, OSError) as error:  # OSError: a library that does not load
        reason = str(error).splitlines()[0]
        raise UserError(NAME, reason, "an SGLang that imports", f"Reinstall {version}.") from error
    if is_cpu and common.cpu_has_amx_support():
        raise UserError(
            NAME,
            "an SGLang with kernels for AMX, which pack the weights",
            "a build without them: they would not see the weights that training writes",
            "Run: pip uninstall -y sgl-kernel-cpu",
        )
    if is_cpu:
        _compute_with_local_experts()


def _other_weights(is_cpu: bool) -> list[str]:
    """Returns the variables of the environment by which SGLang would keep weights otherwise. It
    reads a part of them when it is imported, and takes names with SGL_ for those with SGLANG_.
    """
    names = OTHER_WEIGHTS if is_cpu else (*OTHER_WEIGHTS, CPU_VARIABLE)
    return [*names, *(name.replace("SGLANG_", "SGL_") for name in names)]


def _compute_with_local_experts() -> None:
    """Lets CPU engines deal experts to ranks: SGLang's computation there takes -1, an expert of
    another rank, for a place.
    """
    from sglang.srt.layers.moe import fused_moe_native

    def forward(layer: Any, hidden_TD: torch.Tensor, chosen: Any, config: Any) -> torch.Tensor:
        if config.apply_router_weight_on_input or config.activation != "silu":
            raise NotImplementedError("experts other than gated SiLU, weighed after them")
        weights_TK, experts_TK, _ = chosen
        return experts_forward(hidden_TD, layer.w13_weight, layer.w2_weight, weights_TK, experts_TK)

    fused_moe_native.moe_forward_native = forward


@contextlib.contextmanager
def _groups_of(layout: RolloutLayout, timeout_s: float | None) -> Iterator[None]:
    """Makes SGLang build its process groups over the ranks that the layout assigns, the same for
    every replica, and keep those that are there: it takes a replica for the whole world and its
    ranks from 0 on. Their collectives are bounded as the trainer's.
    """
    from sglang.srt.distributed import parallel_state

    build = over_layout(layout, parallel_state.init_model_parallel_group, knows_replicas=False)
    initialize = parallel_state.initialize_model_parallel
    parts = {"use_pynccl": False, "use_custom_allreduce": False, "group_name": "world"}

    def build_world(_: list[int], local_rank: int, backend: str, **kwargs: Any) -> Any:
        return build([list(range(layout.tp))], local_rank, backend, **parts)

    def initialize_once(*args: Any, **kwargs: Any) -> None:
        if not parallel_state.model_parallel_is_initialized():
            initialize(*args, **kwargs)

    bound = None if timeout_s is None else timedelta(seconds=timeout_s)
    distributed, seen = View(dist), View(torch)
    distributed.get_world_size = lambda group=None: (
        layout.tp if group is None else dist.get_world_size(group)
    )
    seen.distributed = distributed
    with (
        replaced(parallel_state, "init_model_parallel_group", build),
        replaced(parallel_state, "init_world_group", build_world),
        replaced(parallel_state, "torch", seen),
        replaced(parallel_state, "_MODEL_PARALLEL_GROUP_TIMEOUT", bound),
        replaced(_caller_of_groups(), "initialize_model_parallel", initialize_once),
    ):
        yield


def _caller_of_groups() -> Any:
    """Returns the module that makes SGLang's groups at the start of a model."""
    try:
        from sglang.srt.distributed import bootstrap  # of newer versions
    except ImportError:
        from sglang.srt.model_executor import model_runner

        return model_runner
    return bootstrap


@contextlib.contextmanager
def _after_loading(prepare: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Calls `prepare` with the module that SGLang has just made, inside the memory pool of weights.

    Inside, so that what `prepare` replaces is given back with the pool's other unused memory.
    """
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
def _sizes_as_they_are() -> Iterator[None]:
    """Makes CPU engines keep the model's sizes, which SGLang pads for AMX."""
    from sglang.srt.model_executor import model_runner

    def keep(model_config: Any, load_config: Any, tp_size: int) -> Any:
        return model_config

    with replaced(model_runner, "adjust_config_with_unaligned_cpu_tp", keep):
        yield


@contextlib.contextmanager
def _seeds_as_they_are() -> Iterator[None]:
    """Keeps SGLang's seed where it is: ranks have the same, and a replica that does not begin with
    rank 0 would wait for a sender that it takes for another rank.
    """
    from sglang.srt.managers import tp_worker

    with replaced(tp_worker, "broadcast_pyobj", lambda data, *args, **kwargs: data):
        yield


@contextlib.contextmanager
def _kept_threads() -> Iterator[None]:
    """Keeps the number of torch's threads: SGLang sets it to 1 while it loads, and leaves it so."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
