"""Writes the section "What ran" of docs/models.md, from the table in this file.

`python docs/scripts/models.py` rewrites the section. tests/unit/test_models_page.py compares every
entry with the parameters of the tests, and with the files of results.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
TITLE = "## What ran"
DENSE = ("TP4", "PP4", "CP2", "TP2 PP2", "TP2 CP2", "PP2 VPP2")
SHORT = ("TP2 PP2", "TP2 CP2")
EXPERTS = ("TP2", "PP2", "EP4", "ETP2", "TP2 EP2", "TP2 PP2 VPP2 EP2", "TP2 CP2 EP2 ETP2")
HYBRID_EXPERTS = ("TP2", "PP2", "EP4", "ETP2", "TP2 EP2", "TP2 PP2 VPP2 EP2")


@dataclass(frozen=True)
class OnGpus:
    """What ran on GPUs.

    Args:
        said: Size and work of the largest model.
        file: File with the result, relative to the repository's root.
        case: Text in the file that names the model.
    """

    said: str
    file: str
    case: str


@dataclass(frozen=True)
class Ran:
    """What ran with the models of a family.

    Args:
        layouts: Layouts on CPU in which gradients equal those of one process.
        engines: Packaged engines that generated on CPU.
        on_gpus: Largest run on GPUs; None if there was none.
    """

    layouts: tuple[str, ...]
    engines: tuple[str, ...]
    on_gpus: OnGpus | None = None


RESULTS = "benchmarks/results"
BOTH, VLLM = ("vllm", "sglang"), ("vllm",)
RAN = {
    "llama": Ran(
        DENSE,
        BOTH,
        OnGpus("SmolLM2-135M: fine-tuning and GRPO", "docs/results/smollm2_1gpu.json", "smollm2"),
    ),
    "qwen2": Ran(
        ("TP4", "PP4", "TP2 PP2", "TP2 CP2", "PP2 VPP2"),
        BOTH,
        OnGpus("Qwen2.5-32B: reshard", f"{RESULTS}/reshard_4gpu_h200.json", "32b/tp2pp2/tp4"),
    ),
    "qwen3": Ran(DENSE, BOTH),
    "qwen3_vl": Ran(
        SHORT,
        BOTH,
        OnGpus("Qwen3-VL-4B: GRPO steps", f"{RESULTS}/step_images_h200.json", "qwen3-vl-4b"),
    ),
    "qwen2_5_vl": Ran(
        SHORT,
        BOTH,
        OnGpus(
            "Shapes of Qwen2.5-VL-7B: GRPO step",
            f"{RESULTS}/step_images_h200.json",
            "qwen2.5-vl-7b",
        ),
    ),
    "qwen3_vl_moe": Ran(("TP2 PP2 EP2", "TP2 CP2 EP2"), BOTH),
    "qwen3_5_text": Ran(
        ("TP2", "PP2", "TP2 PP2", "PP2 VPP2"),
        VLLM,
        OnGpus("Qwen3.5-4B: GRPO steps", f"{RESULTS}/step_qwen35_h200.json", "qwen3.5-4b"),
    ),
    "qwen3_5_moe_text": Ran(HYBRID_EXPERTS, VLLM),
    "qwen3_5": Ran(("TP2", "PP2", "TP2 PP2"), VLLM),
    "qwen3_5_moe": Ran(("PP2", "TP2 EP2", "TP2 PP2 EP2"), VLLM),
    "qwen3_next": Ran(HYBRID_EXPERTS, VLLM),
    "qwen3_moe": Ran(
        (*EXPERTS, "TP4 EP2 ETP2"),
        BOTH,
        OnGpus(
            "Qwen3-30B-A3B: reshard, updates of 12 of its 48 layers",
            f"{RESULTS}/train_moe_h200.json",
            "qwen3-30b-a3b/dp2ep2",
        ),
    ),
    "qwen2_moe": Ran(EXPERTS, BOTH),
    "glm4_moe": Ran(EXPERTS, BOTH),
    "olmoe": Ran(EXPERTS, VLLM),
    "deepseek_v3": Ran(
        (*EXPERTS, "TP4 EP2 ETP2"),
        BOTH,
        OnGpus("4 small layers: gradients", f"{RESULTS}/gradients_experts_h100.json", "deepseek"),
    ),
    "mistral": Ran(SHORT, VLLM),
    "smollm3": Ran(SHORT, ()),
    "granite": Ran(SHORT, BOTH),
    "phi3": Ran(SHORT, BOTH),
    "olmo2": Ran(SHORT, ()),
    "glm4": Ran(SHORT, BOTH),
    "gemma2": Ran(SHORT, VLLM),
    "gemma3_text": Ran(SHORT, VLLM),
    "gpt_oss": Ran(
        ("TP2", "PP2", "EP4", "CP2 EP2", "TP2 EP2", "TP2 PP2 VPP2 EP2"),
        VLLM,
        OnGpus(
            "GPT-OSS-20B: GRPO steps of 3 of its 24 layers",
            f"{RESULTS}/gpt_oss_replay_h200.json",
            "gpt-oss-20b",
        ),
    ),
    "mixtral": Ran((*EXPERTS, "TP4 EP2 ETP2"), BOTH),
}
HEAD = f"""{TITLE}

Tests on CPU compare each family with transformers in float32: logits within 1e-4, gradients within 5e-6 of the largest gradient. In each layout below, gradients equal those of one
process within 2e-6 of the largest. The models are small and have random weights. The `hf` engine runs transformers' own code, for all families. The last column is the largest run on GPUs.

| Family | Layouts | Engines on CPU | On GPUs |
| --- | --- | --- | --- |"""


def section() -> str:
    """Returns the section."""
    lines = [HEAD]
    for name, ran in RAN.items():
        engines = ", ".join(("hf", *ran.engines))
        on_gpus = "" if ran.on_gpus is None else _on_gpus(ran.on_gpus)
        lines.append(f"| `{name}` | {', '.join(ran.layouts)} | {engines} | {on_gpus} |")
    return "\n".join(lines) + "\n\n"


def _on_gpus(ran: OnGpus) -> str:
    link = f"../{ran.file}" if ran.file.startswith("benchmarks") else ran.file.removeprefix("docs/")
    return f"{ran.said} ([result]({link}))"


def page() -> str:
    """Returns the page with a new section."""
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(f"{TITLE}\n")
    end = text.index("\n## ", start) + 1
    return text[:start] + section() + text[end:]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
