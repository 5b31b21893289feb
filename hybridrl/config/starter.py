"""Starter configurations: commented YAML for a model and an algorithm. No torch."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hybridrl.config.algorithm import (
    ALGORITHM_NAMES,
    AlgorithmConfig,
    GrpoConfig,
    nearest_algorithm,
)
from hybridrl.config.files import read_json_object
from hybridrl.config.load import load_config_dict
from hybridrl.config.needs import Needs
from hybridrl.config.schema import Config
from hybridrl.config.wrapped_models import text_part
from hybridrl.errors import ConfigError, ModelError, UserError
from hybridrl.rollout.registry import ENGINES

COMMENT_COLUMNS = 100
ON_CPU = "Small, so that a step on a CPU is short; raise it on GPUs."
EXPORTED = "hf"  # subfolder of a run for converted weights, used in the documentation
USUAL_PROMPT, USUAL_RESPONSE = 512, 1024  # tokens
# Tokens of a prompt with one image of the default data.max_image_pixels: at most 1,338 of
# Qwen2.5-VL, fewer of other models.
PROMPT_WITH_IMAGE = 2048
CPU_RESPONSE = 64  # tokens; a step of a small model then takes seconds to minutes on a CPU
TINY, SMALL = 20e6, 300e6  # parameters
# Peak learning rates of models below TINY, models below SMALL, and larger ones or models of unknown
# size. They are the rates of the examples: quickstart (0.8 M parameters), arithmetic_gpu (76 M) and
# smollm2 (135 M). The others are usual for models of billions of parameters.
RATES: dict[str, tuple[float, float, float]] = {
    "random weights": (1e-3, 3e-4, 3e-4),
    "samples": (1e-4, 1e-5, 1e-6),
    "responses": (1e-4, 2e-5, 1e-5),
    "feedback": (5e-5, 5e-6, 5e-7),
    "critic": (3e-4, 1e-4, 1e-5),
}
HELD_OUT_SHARE = 0.05
LAST_WORD = r"(\S+?)\.?\s*$"  # the last word without its full stop
ABOUT_ANSWERS = (
    "To ask for a certain form of answer, set data.system_prompt and a matching extract, such as "
    "'Answer:\\s*(\\S+)'. A model that was fine-tuned without a system message may answer worse "
    "with one: first compare both with `hybridrl eval`."
)


@dataclass(frozen=True)
class Start:
    """Inputs of a starter configuration.

    Args:
        name: Name of the run; the default is derived from model and task.
        teacher: HF directory or hub name, for algorithms that learn from a teacher.
        positions: Maximum number of tokens in prompt and response together; None if unknown.
        reward: 'package.module:function' or a reward's name; by default the last word is compared.
        is_fresh: Whether the model has a config.json but no weights yet.
        family: Value of `model.family`; None if config.json determines it.
    """

    task: str
    model: str
    prompts: str
    engine: str
    name: str | None = None
    teacher: str | None = None
    chat: bool = True
    positions: int | None = None
    reward: str | None = None
    is_fresh: bool = False
    num_parameters: int | None = None
    reads_images: bool = False
    family: str | None = None

    def rate(self, kind: str) -> float:
        """Returns the learning rate in `RATES` for this kind of training and the model's size."""
        tiny, small, large = RATES[kind]
        if self.num_parameters is None or self.num_parameters >= SMALL:
            return large
        return tiny if self.num_parameters < TINY else small

    @property
    def runs_on_gpus(self) -> bool:
        """Whether the engine needs GPUs, so that steps may be large."""
        return ENGINES[self.engine].runs_on_gpus

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum prompt length: the usual value, but at most half of the model's positions."""
        usual = PROMPT_WITH_IMAGE if self.reads_images else USUAL_PROMPT
        return min(usual, (self.positions or 2 * usual) // 2)

    @property
    def max_new_tokens(self) -> int:
        """Maximum response length, which fits after the longest prompt."""
        usual = USUAL_RESPONSE if self.runs_on_gpus else CPU_RESPONSE
        left = usual if self.positions is None else self.positions - self.max_prompt_tokens
        return min(usual, left)


def has_template(model: str) -> bool:
    """Whether a model has a chat template; most models on the hub do, so nothing is read there."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return True
    if (folder / "chat_template.jinja").exists():
        return True
    file = folder / "tokenizer_config.json"
    try:
        return "chat_template" in json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the fault is reported when the tokenizer is read
        return False


def has_no_weights(model: str) -> bool:
    """Whether a model's directory contains a config.json but no weight files."""
    folder = Path(model).expanduser()
    files = [*folder.glob("*.safetensors*"), *folder.glob("*.bin*")]
    return (folder / "config.json").is_file() and not files


def local_config(model: str) -> dict[str, Any]:
    """Returns a local model's config.json or its text part; empty if unknown, as for hub names."""
    try:
        return text_part(read_json_object(Path(model).expanduser() / "config.json", ModelError))
    except ModelError:  # the fault is reported when the file is used
        return {}


def known_positions(model: str) -> int | None:
    """Returns the positions in a local config.json; None if unknown."""
    found = local_config(model).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 1 else None


def starter_text(start: Start) -> str:
    """Returns the YAML text; raises UserError for an unknown task or one without its teacher."""
    values, sections = _values(start), starter_config(start)
    lines = [
        f"# Trains {start.model} with {start.task}. To see whether it fits into memory: hybridrl "
        f"plan FILE",
        "# Any knob can also be set on the command line: hybridrl train FILE train.tp=2",
        "# All other knobs keep their defaults: docs/reference/knobs.md describes them, and the",
        "# file config.yaml in the run's folder lists their values.",
        "# For an automatic layout add `layout: auto`, and remove tp, pp and micro_batch_tokens.",
    ]
    for name, knobs in values.items():
        lines.append(f"{name}:")
        section: BaseModel = getattr(sections, name)
        for key, (value, reason) in knobs.items():
            text = _meaning(section, key, value, reason)
            lines += [f"  # {line}" for line in _wrapped(text)]
            lines.append(f"  {key}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def starter_config(start: Start) -> Config:
    """Returns the configuration of the YAML text; raises UserError as `starter_text`."""
    return load_config_dict({name: _plain(knobs) for name, knobs in _values(start).items()})


Knobs = dict[str, tuple[Any, str]]
"""Value of each knob in a section and the reason for it; the reason is empty for a default."""


def _values(start: Start) -> dict[str, Knobs]:
    _check_task(start)
    algorithm = _algorithm(start)
    needs = _known_needs(algorithm)
    name = start.name or f"{_model_name(start.model)}-{start.task}"
    found: dict[str, Knobs] = {
        "run": {"name": (name, "")},
        "model": {("init" if start.is_fresh else "path"): (start.model, "")},
        "train": _train(start, needs),
        "rollout": _rollout(start, needs),
        "algorithm": {"name": (start.task, "Its formula and source are in docs/algorithms.md.")},
        "data": _data(start, needs),
    }
    if start.family is not None:
        reason = "The rows have images; without this key, the model is trained as a text model."
        found["model"]["family"] = (start.family, reason)
    if start.teacher is not None:
        found["algorithm"]["teacher"] = (start.teacher, "")
    if needs.rollouts:
        found["reward"] = {"function": (start.reward or "exact_match", "")}
        if start.reward is None:
            found["reward"]["extract"] = (LAST_WORD, f"Here it is the last word. {ABOUT_ANSWERS}")
    else:
        found["rollout"] |= {"engine": (start.engine, "Used for evaluations only.")}
    found["steps"] = _steps(start, needs)
    if isinstance(algorithm, GrpoConfig) and algorithm.cov_kl_fraction:
        reason = "With one update per step the KL penalty would always be 0."
        found["steps"]["updates_per_step"] = (2, reason)
    reason = "If a machine fails, at most this many steps are lost."
    found["checkpoint"] = {"every": (20, reason), "keep": (2, "")}
    return found


def _model_name(model: str) -> str:
    """Returns NAME from `runs/NAME/hf`, or the last part of the path without the revision."""
    path = Path(model.partition("@")[0])
    name = path.parent.name if path.name == EXPORTED and path.parent.name else path.name
    return re.sub(r"[^a-z0-9_.-]", "-", name.lower()).lstrip("_.-") or "run"


def _train(start: Start, needs: Needs) -> Knobs:
    kind, reason = "samples", ""
    if not needs.rollouts:
        kind, reason = "responses", "Usual for learning from given responses."
    if needs.feedback is not None and not needs.rollouts:
        kind = "feedback"
        reason = "Usual for preferences, whose losses change log-probabilities a lot."
    if not needs.policy:
        kind = "responses"
        reason = "The head is untrained at the start; all other weights are pretrained."
    if start.is_fresh:
        kind, reason = "random weights", "Random weights allow a high rate."
    tiny, small, large = RATES[kind]
    rate = start.rate(kind)
    if start.num_parameters is None:
        higher = [f"{small:g} below {SMALL / 1e6:g} M parameters"] if small != large else []
        higher.append(f"{tiny:g} below {TINY / 1e6:g} M")
        reason += f" Small models need a higher rate: {', '.join(higher)}."
    elif rate != large:
        size = f"{start.num_parameters / 1e6:.3g} M parameters"
        reason += f" Small models need a high rate, and this one has {size}."
    found: Knobs = {
        "tp": (1, ""),
        "pp": (1, ""),
        "micro_batch_tokens": (8192, "Lower it first if memory is short."),
        "learning_rate": (rate, reason.strip()),
        "warmup_steps": (5, "Without warm-up, Adam's first steps are too large."),
    }
    if start.is_fresh and start.reads_images:
        found["freeze"] = ([], "The vision tower has random weights too.")
    if needs.values and needs.policy:
        reason = "High, because the critic's head is untrained at the start."
        found["critic_learning_rate"] = (start.rate("critic"), reason)
    return found


def _rollout(start: Start, needs: Needs) -> Knobs:
    if not needs.rollouts:
        return {}
    reason = "Enough for responses with reasoning." if start.runs_on_gpus else ON_CPU
    return {
        "engine": (start.engine, "vllm is fast on GPUs: pip install 'hybridrl[vllm]'."),
        "tp": (1, ""),
        "temperature": (1.0, ""),
        "max_new_tokens": (start.max_new_tokens, reason),
    }


def _data(start: Start, needs: Needs) -> Knobs:
    found: Knobs = {"prompts": (start.prompts, ""), "prompt_key": ("prompt", "")}
    if needs.rollouts:
        found["answer_key"] = ("answer", "")
    elif needs.feedback == "pairs":
        found |= {"chosen_key": ("chosen", ""), "rejected_key": ("rejected", "")}
    else:
        found["response_key"] = ("response", "")
    if needs.feedback == "labels":
        found["label_key"] = ("label", "")
    why = "False for a base model." if start.chat else ""
    found["chat_template"] = (start.chat, why)
    found["max_prompt_tokens"] = (start.max_prompt_tokens, "")
    if _is_evaluated(needs):
        why = f"The model is evaluated on these {'prompts' if needs.rollouts else 'rows'} before, "
        why += "during and after the run, and never trained on them."
        found["eval_share"] = (HELD_OUT_SHARE, why)
    return found


def _is_evaluated(needs: Needs) -> bool:
    """Whether rows are held out; not for on-policy distillation, whose rows have no answers."""
    return not (needs.rollouts and needs.has_teacher)


def _steps(start: Start, needs: Needs) -> Knobs:
    is_compared = needs.rollouts and not needs.values and not needs.has_teacher
    samples = (8, "With 8, most groups contain good and bad samples.") if is_compared else (1, "")
    is_short = needs.rollouts and not start.runs_on_gpus
    return {
        "prompts_per_step": (8, ON_CPU) if is_short else (64, ""),
        "samples_per_prompt": samples,
        "num_steps": (100, ""),
        "eval_every": (20 if _is_evaluated(needs) else 0, ""),
    }


def _algorithm(start: Start) -> AlgorithmConfig:
    algorithm = {"name": start.task} | ({"teacher": start.teacher} if start.teacher else {})
    sections = {"run": {"name": "a"}, "model": {"path": "m"}, "algorithm": algorithm}
    return load_config_dict(sections).algorithm


def _known_needs(algorithm: AlgorithmConfig) -> Needs:
    assert algorithm.needs is not None  # None only for a user's own algorithm
    return algorithm.needs


def _check_task(start: Start) -> None:
    names = ", ".join(ALGORITHM_NAMES)
    if start.task not in ALGORITHM_NAMES:
        near = nearest_algorithm(start.task)
        remedy = f"Did you mean '{near}'?" if near else "docs/algorithms.md describes all."
        raise UserError("TASK", start.task, names, remedy)
    try:
        needs = _known_needs(_algorithm(start))
    except ConfigError as error:
        if start.teacher is None and "teacher" in error.name:
            allowed = "an HF directory or hub name of a model with the policy's vocabulary"
            remedy = f"Add --teacher MODEL: {start.task} learns from a teacher."
            raise UserError("--teacher", "no value", allowed, remedy) from error
        remedy = f"Remove it: {start.task} does not use a teacher."
        raise UserError("--teacher", start.teacher, "no value", remedy) from error
    assert needs.has_teacher == (start.teacher is not None)
    if start.reward is not None and not needs.rollouts:
        remedy = f"Remove it: {start.task} learns from given responses."
        raise UserError("--reward", start.reward, "no value", remedy)


def _plain(knobs: Knobs) -> dict[str, Any]:
    return {key: value for key, (value, _) in knobs.items()}


def _meaning(section: BaseModel, key: str, value: Any, reason: str) -> str:
    field = type(section).model_fields[key]
    text = field.description or ""
    if field.is_required() or value == field.get_default():
        return f"{text} {reason}".strip()
    meaning = text.split(". ")[0].removesuffix(".")
    return f"{meaning}. {reason}".strip()


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COMMENT_COLUMNS - len("  # "))


def _scalar(value: Any) -> str:
    """Formats a value so that YAML and JSON read it in the same way."""
    if isinstance(value, float) and "e" in (text := repr(value)) and "." not in text:
        return text.replace("e", ".0e")
    plain = isinstance(value, str) and value.replace("-", "").replace("_", "").isalnum()
    return value if plain and not value[0].isdigit() else json.dumps(value)
