"""What `layout: auto` chooses for models that no machine here holds, how long it looks, and what
the same model of time and memory says of layouts that others' recipes use. Needs no GPU.

    python benchmarks/bench_layout_choices.py --out benchmarks/results/layout_choices.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from case_record import commit

from hybridrl.config.load import load_config_dict
from hybridrl.services.planner.choose import search
from hybridrl.services.planner.hardware import ClusterFile, Host
from hybridrl.services.planner.search_report import search_report

MODELS = Path(__file__).parents[1] / "examples" / "recipes" / "models"
# Layouts of recipes, read on 2026-11-25, with where they stand; sizes that are not named are free.
RECIPES = {
    "llama3-70b": {
        "NeMo-RL, grpo_math_70B_megatron.yaml, 64 GPUs": {
            **{"tp": 4, "pp": 4, "cp": 1, "recompute": "none"},
            "rollout.tp": 4,
        },
        "NeMo-RL, grpo-llama3.3-70b-instruct-4n8g.yaml, 32 GPUs": {
            **{"tp": 4, "pp": 8, "cp": 1},
            "rollout.tp": 4,
        },
    },
    "qwen3-235b-a22b": {
        "verl, docs/perf/dpsk.md, 256 GPUs": {"tp": 4, "pp": 8, "cp": 1, "ep": 4},
        "NeMo-RL, grpo-qwen3-235b-32n8g.yaml, 256 GPUs": {
            **{"tp": 2, "pp": 8, "cp": 2, "ep": 16, "recompute": "full"},
            "rollout.tp": 16,
        },
        "slime, scripts/run-qwen3-235B-A22B.sh, 64 GPUs": {
            **{"tp": 4, "pp": 4, "cp": 2, "ep": 16},
            "recompute": "full",
            "offload_optimizer": True,
        },
    },
}
WORLDS = {"llama3-70b": 64, "qwen3-235b-a22b": 256}
FOLDERS = {"llama3-70b": "llama-3.1-70b", "qwen3-235b-a22b": "qwen3-235b-a22b"}


def main() -> int:
    """Writes the choices; returns 1 where a search took more than a minute."""
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split()))
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    cases = []
    for name in WORLDS:
        for gpu in ("H100", "H200"):
            cases.append(judged(name, gpu, {}) | {"layout_of": "layout: auto"})
            for recipe, keys in RECIPES[name].items():
                cases.append(judged(name, gpu, keys) | {"layout_of": recipe})
    notes = [
        "Predicted, not measured: 5,120 tokens a sample (prompts of 1,024), 8 samples of a prompt, "
        "8 (70B) and 4 (235B) prompts a rank, GRPO with a reference, vLLM, nodes of 8 GPUs.",
        "Some recipes are of other numbers of GPUs or engines: only their sizes are pinned, on as "
        "many ranks as the choice; the rest is the best that the search finds beside them.",
    ]
    command = f"python benchmarks/bench_layout_choices.py --out {out}"
    report = {"benchmark": "choices of layout: auto", "command": command, "commit": commit()}
    out.write_text(json.dumps({**report, "notes": notes, "cases": cases}, indent=1) + "\n")
    return 0 if all(case["seconds"] <= 60 for case in cases) else 1


def judged(name: str, gpu: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Searches with some keys pinned and returns the best, and how long it took."""
    world = WORLDS[name]
    config = load_config_dict(
        {
            "run": {"name": "choices"},
            "model": {"init": str(MODELS / FOLDERS[name])},
            "algorithm": {"name": "grpo", "kl_coef": 0.001},
            "rollout": {"engine": "vllm", "max_new_tokens": 4096},
            "data": {"max_prompt_tokens": 1024},
            "steps": {
                "prompts_per_step": (8 if world == 64 else 4) * world,
                "samples_per_prompt": 8,
            },
            "layout": "auto",
        },
        [f"{key if '.' in key else 'train.' + key}={json.dumps(v)}" for key, v in keys.items()],
    )
    started = time.monotonic()
    result, assumed = search(config, world, Host(), ClusterFile(gpu=gpu))
    report = search_report(result, assumed, time.monotonic() - started, keys)
    kept = {key: report[key] for key in ("seconds", "fitting", "too_large", "refused", "nearest")}
    return {
        "model": name,
        "world": world,
        "gpu": gpu,
        "pinned": keys,
        **kept,
        "best": report["best"][:3],
    }


if __name__ == "__main__":
    sys.exit(main())
