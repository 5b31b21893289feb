"""Starter configurations: commented YAML for a model and an algorithm. No torch.

Owns the choice of knobs and their initial values. Comments come from the schema, so they agree with
it.
"""

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
from hybridrl.config.load import load_config_dict
from hybridrl.config.needs import Needs
from hybridrl.errors import ConfigError, UserError
from hybridrl.rollout.registry import ENGINES

COMMENT_COLUMNS = 100
ON_CPU = "Small, so that steps on a CPU are short; raise it on GPUs."
EXPORTED = "hf"  # subfolder of a run for converted weights, as in the documentation
USUAL_PROMPT, USUAL_RESPONSE = 512, 1024  # tokens
CPU_RESPONSE = 64  # tokens; a step of a small model then takes seconds to minutes on a CPU
FRESH_RATE = 1e-3  # for small models with random weights; models of billions take 3e-4
LAST_WORD = r"(\S+?)\.?\s*$"  # without a full stop
ABOUT_ANSWERS = (
    "To request a form of answer, set data.system_prompt and a matching extract, such as "
    "'Answer:\\s*(\\S+)'. A model that was fine-tuned without a system message may answer worse "
    "with one: compare both with `hybridrl eval` first."
)


@dataclass(frozen=True)
class Start:
    """Inputs of a starter configuration.

    Args:
        task: Name of an algorithm.
        model: HF directory or hub name.
        prompts: Value of `data.prompts`.
        engine: Value of `rollout.engine`.
        name: Name of the run; by default it follows from model and task.
        teacher: HF directory or hub name, for algorithms that learn from a teacher.
        chat: Whether prompts become chats by the tokenizer's template.
        positions: Most tokens of prompt and response together; None if unknown.
        reward: 'package.module:function' or a reward's name; by default the last word is compared
            with the answer.
        is_fresh: Whether the model has a config.json and no weights yet.
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

    @property
    def runs_on_gpus(self) -> bool:
        """Whether the engine needs GPUs, so that steps may be large."""
        return ENGINES[self.engine].runs_on_gpus

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt: the usual length, or half of the positions of a short model."""
        return min(USUAL_PROMPT, (self.positions or 2 * USUAL_PROMPT) // 2)

    @property
    def max_new_tokens(self) -> int:
        """Longest response that fits after the longest prompt."""
        usual = USUAL_RESPONSE if self.runs_on_gpus else CPU_RESPONSE
        left = usual if self.positions is None else self.positions - self.max_prompt_tokens
        return min(usual, left)


def has_template(model: str) -> bool:
    """Whether prompts should become chats: whether a local model has a chat template. For a hub
    name nothing is read; the answer is yes, because most models have one.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return True
    if (folder / "chat_template.jinja").exists():
        return True
    file = folder / "tokenizer_config.json"
    try:
        return "chat_template" in json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the command that reads the tokenizer reports the fault
        return False


def has_no_weights(model: str) -> bool:
    """Whether a model's directory has a config.json and no weight files."""
    folder = Path(model).expanduser()
    files = [*folder.glob("*.safetensors*"), *folder.glob("*.bin*")]
    return (folder / "config.json").is_file() and not files


def known_positions(model: str) -> int | None:
    """Returns the number of positions in a local config.json; None if it is unknown, as for a hub
    name.
    """
    try:
        file = Path(model).expanduser() / "config.json"
        found = json.loads(file.read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):  # the command that reads it reports the fault
        return None
    return found if isinstance(found, int) and found > 1 else None


def starter_text(start: Start) -> str:
    """Returns the YAML text.

    Raises:
        UserError: The algorithm is unknown or lacks its teacher.
    """
    _check_task(start)
    values = _sections(start, _algorithm(start))
    sections = load_config_dict({name: _plain(knobs) for name, knobs in values.items()})
    lines = [
        f"# Trains {start.model} with {start.task}. To see whether it fits: hybridrl plan FILE",
        "# Any knob can also be set on the command line: hybridrl train FILE train.tp=2",
        "# All other knobs have their defaults; the documentation lists them.",
        "# For an automatic layout write `layout: auto`, and remove tp, pp and micro_batch_tokens.",
    ]
    for name, knobs in values.items():
        lines.append(f"{name}:")
        section: BaseModel = getattr(sections, name)
        for key, (value, reason) in knobs.items():
            text = _meaning(section, key, value, reason)
            lines += [f"  # {line}" for line in _wrapped(text)]
            lines.append(f"  {key}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


Knobs = dict[str, tuple[Any, str]]
"""Value of each knob in a section and the reason for it; the reason is empty for a default."""


def _sections(start: Start, algorithm: AlgorithmConfig) -> dict[str, Knobs]:
    """Returns the sections of the file, in order."""
    needs = _known_needs(algorithm)
    name = start.name or f"{_model_name(start.model)}-{start.task}"
    found: dict[str, Knobs] = {
        "run": {"name": (name, "")},
        "model": {("init" if start.is_fresh else "path"): (start.model, "")},
        "train": _train(needs, is_fresh=start.is_fresh),
        "rollout": _rollout(start, needs),
        "algorithm": {"name": (start.task, "The documentation has its formula and source.")},
        "data": _data(start, needs),
    }
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
        found["steps"]["updates_per_step"] = (
            2,
            "The KL penalty is 0 at the first update of a step.",
        )
    found["checkpoint"] = {
        "every": (20, "A failed machine costs at most this many steps."),
        "keep": (2, ""),
    }
    return found


def _model_name(model: str) -> str:
    """Returns the name of a model for a run's name: the run in `runs/NAME/hf`, or else the last
    part without a revision.
    """
    path = Path(model.partition("@")[0])
    name = path.parent.name if path.name == EXPORTED and path.parent.name else path.name
    return re.sub(r"[^a-z0-9_.-]", "-", name.lower()).lstrip("_.-") or "run"


def _train(needs: Needs, *, is_fresh: bool) -> Knobs:
    rate = (1e-6, "") if needs.rollouts else (1e-5, "Usual for learning from given responses.")
    if needs.feedback is not None and not needs.rollouts:
        rate = (5e-7, "Usual for preferences, whose losses change log-probabilities a lot.")
    if not needs.policy:
        rate = (1e-5, "The head starts untrained, the rest from pretrained weights.")
    if is_fresh:
        rate = (
            FRESH_RATE,
            "Random weights allow a high rate; use 3e-4 above a billion parameters.",
        )
    found: Knobs = {
        "tp": (1, ""),
        "pp": (1, ""),
        "micro_batch_tokens": (8192, "Lower it first if memory is short."),
        "learning_rate": rate,
        "warmup_steps": (5, "Adam's first steps are too large without it."),
    }
    if needs.values and needs.policy:
        found["critic_learning_rate"] = (1e-5, "The critic's head starts untrained.")
    return found


def _rollout(start: Start, needs: Needs) -> Knobs:
    if not needs.rollouts:
        return {}
    reason = "Room for worked reasoning." if start.runs_on_gpus else ON_CPU
    return {
        "engine": (start.engine, "vllm is fast on GPUs: pip install 'hybridrl[vllm]'."),
        "tp": (1, ""),
        "temperature": (1.0, ""),
        "max_new_tokens": (start.max_new_tokens, reason),
    }


def _data(start: Start, needs: Needs) -> Knobs:
    found: Knobs = {
        "prompts": (start.prompts, ""),
        "prompt_key": ("prompt", ""),
    }
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
    if needs.rollouts and not needs.has_teacher:
        found["eval_share"] = (
            0.05,
            "These prompts are evaluated before and after the run, and never trained on.",
        )
    return found


def _steps(start: Start, needs: Needs) -> Knobs:
    is_compared = needs.rollouts and not needs.values and not needs.has_teacher
    samples = (8, "With 8, most groups have better and worse samples.") if is_compared else (1, "")
    is_short = needs.rollouts and not start.runs_on_gpus
    return {
        "prompts_per_step": (8, ON_CPU) if is_short else (64, ""),
        "samples_per_prompt": samples,
        "num_steps": (100, ""),
        "eval_every": (20 if needs.rollouts and not needs.has_teacher else 0, ""),
    }


def _algorithm(start: Start) -> AlgorithmConfig:
    """Returns the section of the algorithm with its defaults."""
    algorithm = {"name": start.task} | ({"teacher": start.teacher} if start.teacher else {})
    sections = {"run": {"name": "a"}, "model": {"path": "m"}, "algorithm": algorithm}
    return load_config_dict(sections).algorithm


def _known_needs(algorithm: AlgorithmConfig) -> Needs:
    assert algorithm.needs is not None  # only a user's own algorithm has none
    return algorithm.needs


def _check_task(start: Start) -> None:
    names = ", ".join(ALGORITHM_NAMES)
    if start.task not in ALGORITHM_NAMES:
        near = nearest_algorithm(start.task)
        remedy = f"Did you mean '{near}'?" if near else "docs/algorithms.md describes each."
        raise UserError("TASK", start.task, names, remedy)
    try:
        needs = _known_needs(_algorithm(start))
    except ConfigError as error:
        if start.teacher is None and "teacher" in error.name:
            allowed = "an HF directory or hub name with the policy's tokens"
            remedy = f"Add --teacher MODEL: {start.task} learns from a teacher."
            raise UserError("--teacher", "no value", allowed, remedy) from error
        remedy = f"Remove it: {start.task} learns from no teacher."
        raise UserError("--teacher", start.teacher, "no value", remedy) from error
    assert needs.has_teacher == (start.teacher is not None)


def _plain(knobs: Knobs) -> dict[str, Any]:
    return {key: value for key, (value, _) in knobs.items()}


def _meaning(section: BaseModel, key: str, value: Any, reason: str) -> str:
    """Returns the comment of a knob: its meaning, and the reason for its value."""
    field = type(section).model_fields[key]
    text = field.description or ""
    if field.is_required() or value == field.get_default():
        return f"{text} {reason}".strip()
    meaning = text.split(". ")[0].removesuffix(".")
    return f"{meaning}. {reason}".strip()


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COMMENT_COLUMNS - len("  # "))


def _scalar(value: Any) -> str:
    """Returns a value that YAML and JSON read alike."""
    if isinstance(value, float) and "e" in (text := repr(value)) and "." not in text:
        return text.replace("e", ".0e")
    plain = isinstance(value, str) and value.replace("-", "").replace("_", "").isalnum()
    return value if plain and not value[0].isdigit() else json.dumps(value)
