"""Writes docs/recipes.md and examples/recipes/*.yaml, with layouts and predictions of `plan`.

`python docs/scripts/recipes.py` writes the page from the headers of the recipes. `--plan` first
updates the predictions in the headers. `--search` first searches the layouts again, for nodes of 8
H100 80 GB, and writes the recipes. Needs no GPU and no network.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

from hybridrl.config.load import load_config, load_config_dict
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.services.planner.choose import search
from hybridrl.services.planner.hardware import ClusterFile, Host
from hybridrl.services.planner.plan_report import plan_report
from hybridrl.services.planner.search import Candidate

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "recipes"
PAGE = ROOT / "docs" / "recipes.md"
H100 = ClusterFile(gpus_per_node=8, gpu_memory_gib=79.2)
H200 = ClusterFile(gpus_per_node=8, gpu="H200")
LORA, ON_H200 = "-lora", "-h200"  # suffixes of recipes
NAMES = {
    "qwen2.5-0.5b": ("Qwen2.5 0.5B", (1, 8)),
    "qwen2.5-1.5b": ("Qwen2.5 1.5B", (1, 8)),
    "qwen2.5-7b": ("Qwen2.5 7B", (8, 64)),
    "qwen2.5-32b": ("Qwen2.5 32B", (64, 256)),
    "qwen2.5-72b": ("Qwen2.5 72B", (64, 256)),
    "llama-3.1-8b": ("Llama 3.1 8B", (8, 64)),
    "llama-3.1-70b": ("Llama 3.1 70B", (64, 256)),
    "qwen3-8b": ("Qwen3 8B", (8, 64)),
    "qwen3-30b-a3b": ("Qwen3 30B-A3B", (8, 64)),
    "qwen3-235b-a22b": ("Qwen3 235B-A22B", (64, 256)),
    "olmoe-1b-7b": ("OLMoE 1B-7B", (8,)),
    "moonlight-16b-a3b": ("Moonlight 16B-A3B", (8,)),
    "qwen2-57b-a14b": ("Qwen2 57B-A14B", (64,)),
    "glm-4.5-air": ("GLM-4.5-Air", (64,)),
    "glm-4.7": ("GLM-4.7", (256,)),
    "deepseek-v3": ("DeepSeek-V3", (256,)),
    "kimi-k2-h200": ("Kimi K2, H200", (512,)),
    "qwen2.5-32b-lora-h200": ("Qwen2.5 32B, LoRA, H200", (2,)),
    "qwen2.5-32b-lora": ("Qwen2.5 32B, LoRA", (8,)),
    "llama-3.1-70b-lora": ("Llama 3.1 70B, LoRA", (4, 8)),
    "qwen3-235b-a22b-lora": ("Qwen3 235B-A22B, LoRA", (8, 16)),
}
HEAD = """# Recipes

Goal: a GRPO configuration for a known model, with a layout that fits.

```
hybridrl plan examples/recipes/qwen2.5-7b_8gpu.yaml
```

Choose a row, copy the file, set `model.path` to your model and `data.prompts` to your data. The layouts are the
fastest that `hybridrl plan --search` found for nodes of 8 H100 80 GB. The
remaining ranks are data-parallel.

Rows with LoRA train adapters of rank 32 on all linear layers, and keep the model's weights as they are. Experts have no
adapters in them, because vLLM would receive merged experts in 16 bits ([LoRA](guides/lora.md#generation)), so that
235B-A22B trains only attention. The row with H200 is for GPUs of that type. These recipes were planned, but never run.

Memory of the fullest GPU and step times are **predicted, not measured**, for the longest responses (2,048 tokens).

| Recipe | GPUs | Training | Engine | Memory | Step |
| --- | --- | --- | --- | --- | --- |"""
PROMPTS = {
    1: 32,
    2: 64,
    4: 64,
    8: 128,
    16: 128,
    64: 512,
    256: 1024,
    512: 1024,
}  # a step; 8 samples each
FIGURES = re.compile(r"Predicted, not measured: memory ([\d.]+) GiB .*, step ([\d.]+) s")


def content(model: str, num_gpus: int) -> dict[str, Any]:
    """Returns a recipe without its layout."""
    name, trains_adapters = model.removesuffix(ON_H200).removesuffix(LORA), LORA in model
    return {
        "run": {"name": f"{model}-{num_gpus}gpu"},
        "model": {"path": f"examples/recipes/models/{name}", "dtype": "bfloat16"},
        **({"lora": {"rank": 32}} if trains_adapters else {}),
        "train": {"learning_rate": 1.0e-5 if trains_adapters else 1.0e-6, "warmup_steps": 5},
        "rollout": {"engine": "vllm", "max_new_tokens": 2048},
        "algorithm": {"name": "grpo"},
        "data": {"prompts": "data/gsm8k/train.jsonl", "max_prompt_tokens": 512}
        | {"prompt_key": "question", "answer_key": "answer", "chat_template": True},
        "reward": {"functions": {"correct": {"function": "gsm8k"}}},
        "steps": {"prompts_per_step": PROMPTS[num_gpus], "samples_per_prompt": 8, "num_steps": 100},
        "checkpoint": {"every": 50},
    }


def cluster(config: Config) -> ClusterFile:
    """Returns the GPUs that a recipe is for, by its name."""
    return H200 if ON_H200 in (config.run.name or "") else H100


def best(config: Config, num_gpus: int) -> Candidate | None:
    """Returns the fastest layout that fits, for the axes that the configuration leaves open."""
    found, _ = search(config, num_gpus, Host(), cluster(config))
    return found.best[0] if found.best else None


def planned(config: Config, num_gpus: int) -> tuple[str, str]:
    """Returns the memory of the fullest GPU in GiB and the time of a step in seconds, as text.

    Raises:
        ConfigError: The configuration breaks a rule.
        SystemExit: The run does not fit into the GPUs.
    """
    report, violations = plan_report(config, num_gpus, cluster(config), Host())
    if violations:
        raise ConfigError(violations)
    if not report["fits"]:
        sys.exit(report["verdict"]["summary"])
    memory = report["verdict"]["estimate_bytes"] / 2**30
    return f"{memory:.1f}", f"{report['step']['predicted_s']:.1f}"


def header(model: str, num_gpus: int, found: tuple[str, str]) -> str:
    """Returns a recipe's first lines."""
    memory, step = found
    name, gpu = NAMES[model][0].removesuffix(", H200"), "H200" if ON_H200 in model else "H100 80 GB"
    return (
        f"# GRPO of {name} on {num_gpus} {gpu}.\n"
        + _about_adapters(model)
        + f"# Predicted, not measured: memory {memory} GiB on the fullest GPU, step {step} s with the\n"
        "# longest responses (`hybridrl plan FILE --json`). model.path has a config.json only. Set it\n"
        "# to the directory of your model, and data.prompts to your data.\n"
    )


def _about_adapters(model: str) -> str:
    if LORA not in model:
        return ""
    what = "attention alone, because experts have no adapters yet" if "-a22b" in model else ""
    return f"# Planned, never run. Trains adapters of {what or 'all linear layers'}.\n"


def write(model: str, num_gpus: int) -> None:
    """Searches for a layout and writes its recipe.

    Raises:
        SystemExit: No layout fits.
    """
    recipe = content(model, num_gpus)
    one = best(load_config_dict(recipe, []), num_gpus)
    if one is None:
        sys.exit(f"{model} on {num_gpus}: no layout fits")
    for key, value in one.changes.items():
        section, _, name = key.partition(".")
        recipe[section][name] = value
    text = yaml.safe_dump(recipe, sort_keys=False)
    found = planned(load_config_dict(recipe, []), num_gpus)
    path(model, num_gpus).write_text(header(model, num_gpus, found) + text, encoding="utf-8")
    print(model, num_gpus, *found, one.changes, flush=True)


def path(model: str, num_gpus: int) -> Path:
    """Returns a recipe's file."""
    return FOLDER / f"{model}_{num_gpus}gpu.yaml"


def plan_again(model: str, num_gpus: int) -> None:
    """Updates the predictions in a recipe's header."""
    file = path(model, num_gpus)
    text = file.read_text(encoding="utf-8")
    found = planned(load_config(file, []), num_gpus)
    body = text[text.index("run:") :]
    file.write_text(header(model, num_gpus, found) + body, encoding="utf-8")
    print(model, num_gpus, *found, flush=True)


def page() -> str:
    """Returns the page that lists the recipes, from their headers."""
    lines = [HEAD]
    for model, (name, sizes) in NAMES.items():
        for num_gpus in sizes:
            file = path(model, num_gpus)
            found = FIGURES.search(file.read_text(encoding="utf-8"))
            config = load_config(file, [])
            train, engine = config.train, config.rollout
            trained = _layout({axis: getattr(train, axis) for axis in ("tp", "pp", "cp", "ep")})
            generated = _layout({"tp": engine.tp, "ep": engine.ep})
            lines.append(
                f"| [{name}](../examples/recipes/{file.name}) | {num_gpus} | {trained} | "
                f"{generated} | {found and found[1]} GiB | {found and found[2]} s |"
            )
    return "\n".join(lines) + "\n"


def _layout(sizes: dict[str, int]) -> str:
    """Returns a layout as text, such as "TP2 PP4", without axes of size 1."""
    return " ".join(f"{axis.upper()}{size}" for axis, size in sizes.items() if size > 1) or "TP1"


WAYS = {"--search": write, "--plan": plan_again}

if __name__ == "__main__":
    if ways := [way for name, way in WAYS.items() if name in sys.argv[1:2]]:
        for model, (_, sizes) in NAMES.items():
            for num_gpus in sizes:
                if not sys.argv[2:] or model in sys.argv[2:]:
                    ways[0](model, num_gpus)
    if not sys.argv[2:]:
        PAGE.write_text(page(), encoding="utf-8")
