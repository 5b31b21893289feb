"""Checks the installation for `hybridrl check`: versions, working functions, and fixes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Literal

from packaging.specifiers import SpecifierSet

from hybridrl.config.packages import MEGATRON_CORE, NEWEST_TESTED, PYTHON, REQUIRED
from hybridrl.errors import UserError
from hybridrl.parallel.host_gpus import num_local_gpus
from hybridrl.rollout.registry import ENGINES, engine_package
from hybridrl.services.cluster_check import gpu_links
from hybridrl.versions import MEGATRON, TRANSFORMER_ENGINE


@dataclass(frozen=True)
class Item:
    """A line of the report. "absent" means optional and not installed; `fix` is a command."""

    name: str
    status: Literal["ok", "absent", "problem"]
    found: str
    fix: str = ""
    tested: str = ""
    newest: str = ""


def inspect() -> list[Item]:
    """Returns the items of the report, in the order in which problems should be fixed."""
    items = [_python(), *_packages(), *_engines(), _apex()]
    if any(item.name == "torch" and item.found != "not installed" for item in items):
        items += _torch_probes()
    return items


def as_json(items: list[Item]) -> dict[str, Any]:
    """Returns `{"ok": bool, "items": [{name, status, found, fix, tested, newest}]}`."""
    is_ok = all(item.status != "problem" for item in items)
    return {"ok": is_ok, "items": [asdict(item) for item in items]}


def _python() -> Item:
    found = sys.version.split()[0]
    if SpecifierSet(PYTHON, prereleases=True).contains(found):
        return Item("python", "ok", found)
    fix = "install hybridrl with another Python: make clean; make .venv/installed PYTHON=python3.11"
    return Item("python", "problem", f"{found}, not {PYTHON}", fix)


def _packages() -> Iterator[Item]:
    for name, wanted in REQUIRED.items():
        found = installed(name)
        fix = f"pip install '{name}{wanted}'"
        columns = wanted, NEWEST_TESTED[name]
        if found is None:
            yield Item(name, "problem", "not installed", fix, *columns)
        elif name == "megatron-core":
            if fault := MEGATRON.fault(found):
                told = f"{found} ({fault}), not {MEGATRON.allowed}"
                yield Item(name, "problem", told, fix, *columns)
            else:
                yield Item(name, "ok", _with_tests(found, MEGATRON_CORE), "", *columns)
        elif not SpecifierSet(wanted, prereleases=True).contains(found):
            yield Item(name, "problem", f"{found}, not {wanted}", fix, *columns)
        else:
            yield Item(name, "ok", found, "", *columns)
    found = installed("transformer-engine")
    status: Literal["ok", "absent"] = "ok" if found else "absent"
    columns = f">={TRANSFORMER_ENGINE.oldest}", TRANSFORMER_ENGINE.newest
    yield Item("transformer-engine", status, found or "not installed, optional", "", *columns)


def _engines() -> Iterator[Item]:
    for name in ENGINES:
        package = engine_package(name)
        if package is None:
            continue
        is_cpu = num_local_gpus() == 0
        support = package.support(is_cpu)
        bad = (f",without {versions}" for versions in support.bad)
        columns = f">={support.oldest}{''.join(bad)}", support.newest
        if not package.is_installed():
            yield Item(name, "absent", "not installed, optional", "", *columns)
            continue
        try:
            installed = package.installed_version(is_cpu)
            yield Item(name, "ok", _with_tests(installed, package.tested), "", *columns)
        except UserError as error:
            told = f"{error.value}, not {error.allowed}"
            yield Item(name, "problem", told, error.remedy, *columns)


def _with_tests(found: str, tested: Mapping[str, str]) -> str:
    """Returns a version with the hardware on which it was tested, or with the tested versions."""
    known = found.partition("+")[0]  # without the local version label
    if known in tested:
        return f"{found}, tested on {tested[known]}"
    others = "; ".join(f"{version} on {where}" for version, where in tested.items())
    return f"{found}, not tested; tested versions: {others}"


def _apex() -> Item:
    """Megatron 0.16.1 imports FusedLayerNorm from any importable `apex`. With PyPI's package of
    this name, which is not NVIDIA's, models with RMSNorm cannot be built.
    """
    if find_spec("apex") is None:
        return Item("apex", "absent", "not installed, optional")
    if find_spec("fused_weight_gradient_mlp_cuda") is None:
        found = "an importable `apex` that is not NVIDIA's (no fused_weight_gradient_mlp_cuda)"
        return Item("apex", "problem", found, "pip uninstall -y apex")
    return Item("apex", "ok", installed("apex") or "importable")


def _torch_probes() -> Iterator[Item]:
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus:
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
        yield Item("gpus", "ok", f"{num_gpus} x {torch.cuda.get_device_name(0)}")
        yield Item("nccl", "ok", nccl)
        yield _gpu_sum(num_gpus)
    else:
        yield Item("gpus", "absent", "0, training runs on CPU")
        yield Item("nccl", "absent", "not needed without GPUs")
    yield _gloo()


def _gpu_sum(num_gpus: int) -> Item:
    works, found = gpu_links.judge(num_gpus)
    if works:
        return Item("all-reduce", "ok", found)
    gpus = ",".join(map(str, range(num_gpus)))
    fix = (
        f"NCCL_DEBUG=INFO python -m hybridrl.services.cluster_check.gpu_links {gpus}; if it works "
    )
    fix += "with export NCCL_P2P_DISABLE=1, turn off IOMMU and ACS of the host"
    return Item("all-reduce", "problem", found, fix)


def _gloo() -> Item:
    import torch
    from torch import distributed as dist

    fix = f"pip install --force-reinstall 'torch{REQUIRED['torch']}'"
    if not dist.is_available() or not dist.is_gloo_available():
        return Item("gloo", "problem", "this torch was built without gloo", fix)
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            ones = torch.ones(8)
            dist.all_reduce(ones)
            total = int(ones.sum())
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:
        fix = "export GLOO_SOCKET_IFNAME=lo"
        return Item("gloo", "problem", str(error).splitlines()[0], fix)
    if total != 8:
        return Item("gloo", "problem", f"all_reduce gave {total}, not 8", fix)
    return Item("gloo", "ok", "all_reduce works")


def installed(name: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
