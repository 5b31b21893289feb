"""Which SGLang is accepted on which host, and what it is started with: no SGLang is needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from planned_configs import QWEN25_7B

from hybridrl import ops
from hybridrl.errors import ModelError, UserError
from hybridrl.models.family import read_model
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.rollout.common import installed_package
from hybridrl.rollout.common.groups import over_layout
from hybridrl.rollout.common.sampling import (
    RowSampling,
    log_distribution,
    sample,
    sample_rows,
    uniforms,
)
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.engine import SamplingParams
from hybridrl.rollout.sglang import start as sglang_start
from hybridrl.rollout.sglang import version as sglang_version
from hybridrl.rollout.sglang.adapter import SglangEngine
from hybridrl.rollout.sglang.arguments import (
    CPU_MAX_KV_CACHE_BYTES,
    SPARE_TOKENS,
    longest_request,
    server_arguments,
)
from hybridrl.rollout.sglang.penalties import TokenTable
from hybridrl.rollout.sglang.repairs import settle_longrope
from hybridrl.rollout.sglang.sampling import IS_GREEDY, SeededSampler
from hybridrl.rollout.sglang.version import (
    installed_version,
    model_rules,
)
from hybridrl.services.cluster_check import environment

GIB = 1 << 30
NEEDS = ["numpy", "torch==2.11.0", "transformers==5.12.1", "torch==1.0; extra == 'old'"]
GOOD = {"sglang": "0.5.16", "torch": "2.11.0+cu130", "transformers": "5.12.1"}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that makes just these distributions the installed ones."""

    def install(**found: str) -> None:
        def version(name: str) -> str:
            if name not in found:
                raise PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(installed_package, "version", version)
        monkeypatch.setattr(environment, "version", version)
        monkeypatch.setattr(installed_package, "requires", lambda name: NEEDS)

    return install


def test_sglang_of_the_host_is_accepted(install: Any) -> None:
    install(**GOOD)
    assert installed_version(is_cpu=False) == "sglang 0.5.16"
    install(**{**GOOD, "torch": "2.13.0", "transformers": "5.19.0"})
    assert installed_version(is_cpu=True) == "sglang 0.5.16"  # on CPU whatever SGLang's pins are


@pytest.mark.parametrize(
    ("packages", "is_cpu", "found", "fix"),
    [
        ({"torch": "2.13.0"}, True, "no sglang", "make .venv/installed-sglang"),
        ({"torch": "2.11.0"}, False, "no sglang", "pip install 'hybridrl[sglang]'"),
        ({**GOOD, "sglang": "0.5.15"}, False, "sglang 0.5.15", "hybridrl[sglang]"),
        ({**GOOD, "sglang": "0.5.21"}, False, "sglang 0.5.21", "hybridrl[sglang]"),
        ({**GOOD, "sglang": "0.5.17"}, True, "sglang 0.5.17", "make .venv/installed-sglang"),
        ({**GOOD, "torch": "2.13.0"}, False, "torch 2.13.0", "pip install 'torch==2.11.0'"),
        (
            {**GOOD, "transformers": "5.19.0"},
            False,
            "transformers 5.19.0",
            "pip install 'transformers==5.12.1'",
        ),
    ],
)
def test_sglang_that_does_not_fit_is_refused_with_the_fix(
    install: Any, packages: dict[str, str], is_cpu: bool, found: str, fix: str
) -> None:
    install(**packages)
    with pytest.raises(UserError) as caught:
        installed_version(is_cpu)
    assert str(caught.value.value).startswith(found)
    assert fix in caught.value.remedy and "rollout.engine=hf" in caught.value.remedy


def test_models_that_sglang_would_compute_otherwise_are_refused() -> None:
    def rules(
        moe: Any, latent: Any = None, window: int | None = None, sinks: bool = False
    ) -> list[UserError]:
        sizes = {"moe": moe, "latent": latent, "window": window}
        shape = SimpleNamespace(
            **sizes, attention_sinks=sinks, vision=None, mixer=None, whole_qk_norm=False
        )
        return list(model_rules(shape, "float32", True))

    assert rules(None) == rules(SimpleNamespace(dense_layers=(), has_bias=False)) == []
    (violation,) = rules(SimpleNamespace(dense_layers=(1, 3), has_bias=False))
    assert violation.name == "model's layers without experts" and violation.value == "1, 3"
    assert "rollout.engine=vllm" in violation.remedy
    assert (
        rules(SimpleNamespace(dense_layers=(0,), has_bias=True), latent=object()) == []
    )  # DeepSeek's
    (violation,) = rules(None, window=4096)
    assert violation.name == "model's sliding_window" and violation.value == 4096
    (violation,) = rules(None, window=128, sinks=True)
    assert violation.name == "model's attention sinks"


def test_longrope_has_one_table_of_angles_for_all_positions() -> None:
    """SGLang has the rows of short factors, then those of long ones."""
    rope = torch.nn.Module()
    rope.short_factor, rope.long_factor = [1.0, 2.5], (1.0, 2.5)
    rope.long_cos_sin_cache, rope.original_max_position_embeddings = torch.arange(24.0), 8
    rope.long_short_cos_sin_cache = torch.cat((torch.arange(8.0), rope.long_cos_sin_cache))
    model = torch.nn.ModuleDict({"other": torch.nn.Linear(1, 1), "rotary_emb": rope})
    settle_longrope(model, "sglang 0.5.16")
    for positions in ([7], [8], [9], [3, 20]):  # as SGLang looks rows up
        places = torch.tensor(positions)
        beyond = places.max() > rope.original_max_position_embeddings
        rows = places + beyond * rope.original_max_position_embeddings
        assert rope.long_short_cos_sin_cache[rows].tolist() == positions
    rope.short_factor = [1.0, 1.0]
    with pytest.raises(ModelError, match="long_factor, at rotary_emb of sglang 0.5.16"):
        settle_longrope(model, "sglang 0.5.16")


def settings(**changes: Any) -> EngineSettings:
    given = {"dtype": "bfloat16", "max_batch": 256, "max_tokens": 1024, **changes}
    return EngineSettings(QWEN25_7B, ["Qwen2ForCausalLM"], **given)


def test_cpu_engine_has_room_for_its_requests_and_at_most_a_gigabyte() -> None:
    _, shape = read_model(None, QWEN25_7B)
    small = server_arguments(settings(max_batch=2), shape, 1, 0, None)
    assert small["max_total_tokens"] == 2 * (1024 + SPARE_TOKENS)
    assert longest_request(1024 + SPARE_TOKENS) == 1024
    assert small["context_length"] >= 1024 + 2  # SGLang ends requests before it
    large = server_arguments(settings(), shape, 1, 0, None)
    per_token = 2 * 28 * 4 * 128 * 2
    assert large["max_total_tokens"] * per_token > 0.9 * CPU_MAX_KV_CACHE_BYTES
    assert large["max_total_tokens"] * per_token <= CPU_MAX_KV_CACHE_BYTES
    halved = server_arguments(settings(), shape, 2, 0, None)
    assert halved["max_total_tokens"] > 1.9 * large["max_total_tokens"]
    given = server_arguments(settings(kv_cache_bytes=100 * per_token), shape, 1, 0, None)
    assert given["max_total_tokens"] == 100


def test_gpu_engine_leaves_what_the_trainer_holds() -> None:
    _, shape = read_model(None, QWEN25_7B)
    memory = 80 * GIB, 80 * GIB
    whole = server_arguments(settings(), shape, 1, 15 * GIB, memory)
    bound = server_arguments(settings(reserved_bytes=40 * GIB), shape, 1, 15 * GIB, memory)
    assert bound["mem_fraction_static"] < whole["mem_fraction_static"] < 0.85
    assert bound["mem_fraction_static"] * 80 + 40 < 80
    assert whole["enable_memory_saver"] and not whole["disable_cuda_graph"]
    assert server_arguments(settings(eager=True), shape, 1, 0, memory)["disable_cuda_graph"]
    with pytest.raises(UserError, match=r"free memory of the GPU: got 80.0 GiB, of which 70.0"):
        server_arguments(settings(reserved_bytes=70 * GIB), shape, 1, 15 * GIB, memory)


def test_names_of_parameters_are_the_layouts() -> None:
    stem = "model.layers.3.mlp.experts."
    assert SglangEngine._layout_name(f"{stem}w13_weight") == f"{stem}routed_experts.w13_weight"
    assert SglangEngine._layout_name("model.norm.weight") == "model.norm.weight"
    down = "model.layers.3.self_attn.fused_qkv_a_proj"
    assert SglangEngine._layout_name(f"{down}_with_mqa.weight") == f"{down}.weight"
    alone = "model.layers.3.self_attn.kv_a_proj_with_mqa.weight"  # where queries have no latent
    assert SglangEngine._layout_name(alone) == alone


@pytest.mark.parametrize(("knows_replicas", "asked"), [(True, [[0, 1], [2, 3]]), (False, [[0, 1]])])
def test_groups_are_made_over_the_ranks_of_the_layout(
    knows_replicas: bool, asked: list[list[int]]
) -> None:
    layout = RolloutLayout(2, ((0, 0), (1, 0), (0, 1), (1, 1)))
    build = over_layout(layout, lambda groups, *rest: (groups, rest), knows_replicas)
    assert build(asked, "gloo") == ([[0, 2], [1, 3]], ("gloo",))


def test_uniforms_of_the_device_are_those_of_the_host() -> None:
    seeds = np.random.default_rng(0).integers(0, 2**63, 1000)
    counts = np.arange(1000)
    found = ops.row_uniforms(torch.from_numpy(seeds), torch.from_numpy(counts))
    assert np.array_equal(found.numpy(), uniforms(seeds.tolist(), counts.tolist()))


@pytest.mark.parametrize("vocab", [24, 199, 1024, 1536])
def test_draws_invert_the_whole_cumulative_distribution(vocab: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_BV = 3 * torch.randn(500, vocab, generator=generator)
    logits_BV[:, ::3] = -torch.inf
    uniform_B = torch.rand(500, dtype=torch.float64, generator=generator)
    uniform_B[:2] = torch.tensor([0.0, 1 - 2**-48], dtype=torch.float64)
    rows = RowSampling.of([SamplingParams()] * 500, torch.device("cpu"))
    tokens_B, logp_B = sample_rows(logits_BV, rows, uniform_B)
    cdf_BV = logits_BV.log_softmax(-1).exp().double().cumsum(-1)
    draw_B1 = (uniform_B * cdf_BV[:, -1])[:, None]
    assert torch.equal(tokens_B, torch.searchsorted(cdf_BV, draw_B1, right=True)[:, 0])
    assert bool(logp_B.isfinite().all())


def batch_info(sampling: list[SamplingParams]) -> SimpleNamespace:
    """What SGLang would have of these requests, as sglang/sampling.py hands them over."""
    greedy = [row.temperature == 0 for row in sampling]
    top_k = [1 if g else row.top_k or 1 << 30 for g, row in zip(greedy, sampling, strict=True)]
    top_p = torch.tensor([row.top_p for row in sampling])
    return SimpleNamespace(
        temperatures=torch.tensor([row.temperature or 1.0 for row in sampling])[:, None],
        top_ks=torch.tensor(top_k, dtype=torch.int32),
        top_ps=top_p,
        min_ps=torch.tensor([IS_GREEDY if g else 0.0 for g in greedy]),
        sampling_seed=torch.arange(len(sampling)),
        is_all_greedy=all(k == 1 for k in top_k),
        need_min_p_sampling=any(greedy),
        need_top_k_sampling=any(k < 1 << 30 for k in top_k),
        need_top_p_sampling=bool((top_p != 1).any()),
    )


@pytest.mark.parametrize(
    "sampling",
    [
        [SamplingParams(), SamplingParams(temperature=0.5)],
        [SamplingParams(temperature=0.0), SamplingParams(temperature=2.0)],
        [SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, top_k=1)],
        [SamplingParams(top_k=3, top_p=0.7), SamplingParams(temperature=0.0)],
    ],
)
def test_sampler_in_sglangs_place_draws_as_the_hf_engine_does(
    sampling: list[SamplingParams],
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits_BV = 3 * torch.randn(len(sampling), 50, generator=generator)
    output, positions = SimpleNamespace(next_token_logits=logits_BV), torch.tensor([7, 9])
    found = SeededSampler(TokenTable())(output, batch_info(sampling), True, None, None, positions)
    expected, logps = sample(logits_BV, sampling, uniforms([0, 1], [7, 9]))
    assert found.dtype == torch.int32 and torch.equal(found.long(), expected)
    torch.testing.assert_close(output.next_token_logprobs, logps)
    whole = log_distribution(logits_BV, sampling).gather(-1, expected[:, None])[:, 0]
    torch.testing.assert_close(output.next_token_logprobs, whole)


@pytest.mark.parametrize(
    ("importable", "chosen"),
    [
        (("sgl_kernel.flash_ops", "flashinfer"), {}),
        (("flashinfer",), {"attention_backend": "flashinfer"}),
        ((), {"attention_backend": "triton"}),
    ],
)
def test_attention_is_one_that_can_be_imported(
    importable: tuple[str, ...], chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_start, "find_spec", lambda name: name in importable or None)
    assert sglang_start._attention() == chosen


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Returns a function that makes a package of this text the imported SGLang, until the end."""
    root = tmp_path / "sglang"
    files = [root / "srt" / f"{name}.py" for name in PLANTED]

    def plant(text: str) -> None:
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for folder in {parent for file in files for parent in file.parents} - {*root.parents}:
            (folder / "__init__.py").touch()
        for name in sglang_modules():
            del sys.modules[name]
        monkeypatch.syspath_prepend(tmp_path)

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sglang_start, "stand_in", lambda: None)
    installed = {name: sys.modules[name] for name in sglang_modules()}
    yield plant
    for name in sglang_modules():
        del sys.modules[name]
    sys.modules.update(installed)


def sglang_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "sglang"]


PLANTED = (
    "managers/scheduler",
    "utils/common",
    "layers/moe/fused_moe_native",
    "models/qwen2_moe",
)
HAS_AMX = "def cpu_has_amx_support():\n    return True\n"


def test_an_sglang_that_packs_weights_for_amx_is_refused(plant: Callable[[str], None]) -> None:
    plant(HAS_AMX)
    with pytest.raises(UserError, match="kernels for AMX, which pack the weights") as caught:
        sglang_start._import_sglang("sglang 0.5.16", True, 1)
    assert caught.value.name == sglang_version.NAME
    assert "pip uninstall -y sgl-kernel-cpu" in str(caught.value)
    plant(HAS_AMX.replace("True", "False"))
    sglang_start._import_sglang("sglang 0.5.16", True, 1)
    plant(HAS_AMX)
    sglang_start._import_sglang("sglang 0.5.16", False, 1)  # on GPUs nothing is packed for it


@pytest.mark.parametrize("is_cpu", [True, False])
@pytest.mark.parametrize("prefix", ["SGLANG_", "SGL_"])
def test_sglang_is_imported_without_what_the_environment_asks_of_weights(
    is_cpu: bool, prefix: str, plant: Callable[[str], None]
) -> None:
    asked = [prefix + name.removeprefix("SGLANG_") for name in sglang_start.OTHER_WEIGHTS]
    own = prefix + sglang_start.CPU_VARIABLE.removeprefix("SGLANG_")
    os.environ.update(dict.fromkeys([*asked, own], "1"))
    plant("import os\nseen = set(os.environ)\n" + HAS_AMX.replace("True", "False"))
    sglang_start._import_sglang("sglang 0.5.16", is_cpu, 1)
    seen = sys.modules["sglang.srt.utils.common"].seen
    assert not seen & set(asked)
    assert (own in seen) == is_cpu
    assert all(os.environ[name] == "1" for name in [*asked, own]), "other programs may want them"
