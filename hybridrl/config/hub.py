"""Names of models and data sets on the hub. A run downloads by commit, because branches move."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from hybridrl.config.data import DataConfig
from hybridrl.config.distillation import TaughtConfig
from hybridrl.config.interpolation import Path as Place
from hybridrl.config.interpolation import dotted
from hybridrl.config.reward import SERVED
from hybridrl.config.schema import Config
from hybridrl.errors import DataError, ModelError, UserError

DATASETS = "datasets:"
DATASET_FORM = f"{DATASETS}NAME[@REVISION][:CONFIG]:SPLIT"
MODEL_FORM = "an HF directory that exists or a hub name 'organisation/name[@revision]'"
PLAIN_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
# Small files of a data set; downloading them is enough to learn its commit.
CARD_FILES = ["README.md", ".gitattributes"]
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class HubName:
    """A model or data set on the hub. `rest` is the end of a data set's name: '[:CONFIG]:SPLIT'."""

    kind: Literal["model", "dataset"]
    repository: str
    revision: str | None = None
    rest: str = ""

    def __str__(self) -> str:
        prefix = DATASETS if self.kind == "dataset" else ""
        at = "" if self.revision is None else f"@{self.revision}"
        return f"{prefix}{self.repository}{at}{self.rest}"

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a full commit hash, which never moves."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None


def model_name(text: str, has_organisation: bool = True) -> HubName | None:
    """Parses a hub name, by default with an organisation; None for other texts, such as a path."""
    if text.startswith((".", "/", "~")) or os.path.exists(text):
        return None
    repository, at, revision = text.partition("@")
    num_parts = repository.count("/") + 1
    if not all(repository.split("/")) or num_parts > 2 or (has_organisation and num_parts < 2):
        return None
    if at and not revision:
        return None
    return HubName("model", repository, revision if at else None)


def dataset_name(text: str) -> HubName | None:
    """Parses the hub name in a source of `data.prompts`; returns None for other sources."""
    parts = text.removeprefix(DATASETS).split(":")
    if not text.startswith(DATASETS) or not 2 <= len(parts) <= 3 or not all(parts):
        return None
    found = model_name(parts[0], has_organisation=False)
    return found and replace(found, kind="dataset", rest="".join(f":{part}" for part in parts[1:]))


def hub_names(config: Config) -> dict[Place, HubName]:
    """Returns every hub name in a configuration, by its place."""
    found: dict[Place, HubName | None] = {}
    for key in ("path", "init", "tokenizer"):
        if (text := getattr(config.model, key)) is not None:
            found["model", key] = model_name(text, has_organisation=key != "tokenizer")
    if isinstance(config.algorithm, TaughtConfig):
        found["algorithm", "teacher"] = model_name(config.algorithm.teacher)
    several = config.reward.functions
    for name, scorer in config.reward.scorers().items():
        at: Place = ("reward", "functions", name) if several else ("reward",)
        if scorer.function == SERVED and isinstance(path := scorer.options.get("path"), str):
            found[(*at, "options", "path")] = model_name(path)
    for place, text in _sources(config):
        found[place] = dataset_name(text)
    return {place: name for place, name in found.items() if name is not None}


def _sources(config: Config) -> Iterator[tuple[Place, str]]:
    sections: dict[Place, DataConfig] = {("data",): config.data}
    sections |= {("mix", name, "data"): term.data for name, term in config.mix.items()}
    for place, data in sections.items():
        for key in ("prompts", "validation", "eval_prompts"):
            for number, text in enumerate(getattr(data, key) or ()):
                yield (*place, key, number), text
    for name, section in config.eval.sets.items():
        for number, text in enumerate(section.path or ()):
            yield ("eval", "sets", name, "path", number), text


def names_to_json(names: Mapping[Place, HubName]) -> str:
    return json.dumps([[place, asdict(name)] for place, name in names.items()])


def names_from_json(text: str) -> dict[Place, HubName]:
    """Returns the hub names in a text from `names_to_json`."""
    return {tuple(place): HubName(**name) for place, name in json.loads(text)}


def adopted(config: Config, other: Config) -> dict[Place, HubName]:
    """Returns a configuration's hub names; those without a revision have the commit of `other`."""
    others = hub_names(other)
    found = {}
    for place, name in hub_names(config).items():
        known = others.get(place)
        is_same = known is not None and known.is_commit and replace(known, revision=None) == name
        found[place] = known if known is not None and is_same else name
    return found


def resolved(
    names: Mapping[Place, HubName], known: Mapping[HubName, str | None]
) -> dict[Place, HubName]:
    """Returns hub names with their commits, by place; asks the hub at most once per repository.

    `known` has commits that are already known, by name with an empty `rest`.
    """
    commits = dict(known)
    found = {}
    for place, name in names.items():
        asked = replace(name, rest="")
        if asked not in commits:
            commits[asked] = commit_of(dotted(place), name)
        found[place] = replace(name, revision=commits[asked])
    return found


def commit_of(key: str, name: HubName) -> str:
    """Returns the commit of a hub name; asks the hub unless the name contains it."""
    if name.is_commit and name.revision is not None:
        return name.revision
    # Unlike HfApi, this caches the commit, so that it is known when the hub cannot be reached.
    return download(key, name, PLAIN_FILES if name.kind == "model" else CARD_FILES).name


def download(key: str, name: HubName, patterns: Sequence[str]) -> Path:
    """Downloads a repository's files that match patterns, unless cached; returns the cache folder.

    Raises:
        UserError: The hub has no such repository or revision, or cannot be reached. Names `key`.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RevisionNotFoundError

    kind: type[UserError] = ModelError if name.kind == "model" else DataError
    try:
        found = snapshot_download(
            name.repository, repo_type=name.kind, revision=name.revision, allow_patterns=[*patterns]
        )
        return Path(found)
    except RevisionNotFoundError:
        allowed = f"a branch, tag or commit of {name.repository}"
        remedy = f"Correct the revision {name.revision!r} after the '@'."
        raise kind(key, name, allowed, remedy) from None
    except (OSError, ValueError) as error:  # base classes of the hub's own errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        allowed = MODEL_FORM if name.kind == "model" else DATASET_FORM
        raise kind(key, name, allowed, f"The hub said: {reason}") from None


def with_names(config: Config, names: Mapping[Place, HubName]) -> Config:
    """Returns a copy of a configuration with other hub names, which may replace interpolations."""
    found: Config = config.model_copy(deep=True)
    for place, name in names.items():
        found = _with(found, place, str(name))
        for end in range(1, len(place) + 1):  # the interpolation may be the whole list
            found.written.pop(place[:end], None)
    return found


def _with(value: Any, place: Place, text: str) -> Any:
    if not place:
        return text
    key: Any = place[0]
    if isinstance(value, BaseModel):
        return value.model_copy(update={key: _with(getattr(value, key), place[1:], text)})
    if isinstance(value, Mapping):
        return {**value, key: _with(value[key], place[1:], text)}
    return tuple(_with(v, place[1:], text) if i == key else v for i, v in enumerate(value))
