"""Reads a configuration from YAML and `key=value` overrides; reports all violations together."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from hybridrl.config.algorithm import ALGORITHM_NAMES, AlgorithmConfig, nearest_algorithm
from hybridrl.config.interpolation import Path as Place
from hybridrl.config.interpolation import (
    as_written,
    dotted,
    interpolations,
    leaves,
    places_within,
    value_at,
)
from hybridrl.config.other_systems import SECTIONS_ELSEWHERE, counterpart
from hybridrl.config.rules_optimizer import LEVEL_KEY, optimizer_rules
from hybridrl.config.schema import Config, RunConfig
from hybridrl.config.yaml_text import YamlTextError, parse_yaml, read_yaml
from hybridrl.errors import MISSING, ConfigError, UnknownKeyError, UserError, error_text, short

NULLS = ("", "null", "~", "none", "None", "NULL", "Null")

# Longer lists of allowed keys are shortened to the likeliest keys.
MAX_ALLOWED_CHARACTERS = 300
NUM_LIKELY = 8
OTHER_NAMES = "docs/guides/coming_from.md"


def as_config(
    source: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str] = ()
) -> Config:
    """Returns the configuration in a YAML file or a mapping; returns a Config unchanged."""
    if isinstance(source, Mapping):
        return load_config_dict(source, overrides)
    return source if isinstance(source, Config) else load_config(source, overrides)


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    like: Config | None = None,
    is_saved: bool = False,
) -> Config:
    """Reads a YAML file, applies overrides, and validates each value separately.

    Args:
        overrides: `section.key=value` texts with YAML values; later ones override earlier ones.
        like: Configuration whose values replace equal `${...}` texts at the same places. A run's
            file can then be read even if environment variables have changed.
        is_saved: Whether a run saved the file, so that it may have keys of earlier versions.

    Raises:
        ConfigError: All violations.
    """
    file = Path(path)
    try:
        if not os.path.isfile(file):
            found = "a directory" if os.path.isdir(file) else "no such file"
            raise UserError(str(path), found, "an existing YAML file", "Correct the path.")
        loaded = read_yaml(file)
        written = interpolations(OmegaConf.to_container(loaded, resolve=False))
        for place, value in _known(written, like).items():
            OmegaConf.update(loaded, dotted(place), value)
        content = OmegaConf.to_container(loaded, resolve=True)
        if not isinstance(content, dict) or not content:
            found = "an empty file" if not content else type(content).__name__
            allowed = "a mapping with sections run, model, ..."
            raise UserError(str(path), found, allowed, "Write the sections.")
    except UserError as error:
        raise ConfigError([error]) from None
    except OmegaConfBaseException as error:  # an interpolation without a value
        remedy = "Fix the interpolation in the file."
        fault = UserError(str(path), error_text(error), "valid YAML", remedy)
        raise ConfigError([fault]) from None
    values = {str(key): value for key, value in content.items()}
    is_former = is_saved and _takes_former_level(values)
    config = _validated(values, overrides, written)
    is_refused = is_former and any(optimizer_rules(config, "bfloat16"))
    return config.with_values({LEVEL_KEY: "auto"}) if is_refused else config


def load_config_dict(content: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Validates nested sections with overrides applied; raises ConfigError with all violations."""
    return _validated(content, overrides, {})


def _takes_former_level(values: dict[str, Any]) -> bool:
    """Replaces an earlier version's `train.offload_optimizer: true`; returns whether it was set."""
    train = values.get("train")
    if not isinstance(train, dict) or train.pop("offload_optimizer", False) is not True:
        return False
    train.setdefault("optimizer_memory", "host")
    return True


def _known(written: Mapping[Place, str], like: Config | None) -> dict[Place, Any]:
    if like is None:
        return {}
    values = like.model_dump(mode="json")
    same = [place for place, text in written.items() if like.written.get(place) == text]
    return {place: value_at(values, place) for place in same}


def _validated(
    content: Mapping[str, Any], overrides: Sequence[str], written: Mapping[Place, str]
) -> Config:
    violations: list[UserError] = []
    values, texts = _copy(content), dict(written)
    if isinstance(values.get("layout"), str):  # overrides may add keys to the section
        values["layout"] = {"choose": values["layout"]}
    for override in overrides:
        violations += _apply(values, override, texts)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        for details in error.errors():
            violations += _violations(details, texts)
    if violations:
        raise ConfigError(violations)
    config.written.update(texts)
    return config


def to_yaml(config: Config) -> str:
    """Returns the configuration as YAML with defaults, `${...}` as written and headers hidden."""
    return yaml.safe_dump(_storable(config), sort_keys=False, width=1000)


def changed_yaml(config: Config) -> str:
    """Returns the knobs that differ from their defaults as YAML, as in `to_yaml`."""
    changed = _changed(_storable(config), _defaults(config))
    return yaml.safe_dump(changed, sort_keys=False, width=1000)


def _storable(config: Config) -> dict[str, Any]:
    return as_written(config.model_dump(mode="json"), config.written)


def _defaults(config: Config) -> dict[str, Any]:
    found = {}
    for name, field in Config.model_fields.items():
        section = getattr(config, name)
        if not isinstance(section, BaseModel):
            found[name] = field.get_default(call_default_factory=True)
            continue
        fields = type(section).model_fields
        required = {key: getattr(section, key) for key in fields if fields[key].is_required()}
        if name == "algorithm":  # its defaults depend on its name
            required["name"] = config.algorithm.name
        usual = type(section)(**required)
        found[name] = usual.model_dump(mode="json", exclude=set(required))
    return found


def _changed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        usual = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(usual, Mapping):
            if inner := _changed(value, usual):
                found[key] = inner
        elif key not in defaults or value != usual:
            found[key] = value
    return found


def knobs() -> list[str]:
    """Returns dotted names of all knobs, with `algorithm[NAME].key` and `section[NAME].key`."""
    return sorted(_knobs(Config, ""))


def _knobs(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        if prefix == "" and name == "algorithm":
            for kind, member in _algorithm_sections().items():
                yield from _knobs(member, f"algorithm[{kind}].")
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _knobs(field.annotation, f"{prefix}{name}.")
        elif (named := _member(field.annotation)) is not None:
            yield from (f"{prefix}{name}[NAME].{key}" for key in named.model_fields)
        else:
            yield f"{prefix}{name}"


def _algorithm_sections() -> dict[str, type[BaseModel]]:
    """Returns the section class of each algorithm by its tag ('custom' for dotted paths)."""
    union = get_args(AlgorithmConfig)[0]
    return {get_args(member)[1].tag: get_args(member)[0] for member in get_args(union)}


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def _apply(values: dict[str, Any], override: str, written: dict[Place, str]) -> list[UserError]:
    """Applies an override to nested dictionaries, with its interpolations; returns violations."""
    key, equals, text = override.partition("=")
    parts = key.lstrip("+").split(".")  # Hydra marks a new key with +
    if not equals or not all(parts):
        remedy = "Write it as train.tp=2."
        return [UserError("override", short(override), "section.key=value", remedy)]
    try:
        holder = parse_yaml(text, is_value=True)
        raw = OmegaConf.to_container(holder, resolve=False)["value"]  # type: ignore[index, call-overload]
        value = OmegaConf.to_container(holder, resolve=True)["value"]  # type: ignore[index, call-overload]
    except (YamlTextError, OmegaConfBaseException) as error:
        remedy = f"Quote or change it ({error_text(error)})."
        return [UserError(key, short(text), "a YAML value", remedy)]
    if value is None and text.strip() not in NULLS:
        value = raw = text  # YAML reads `#` as a comment: `reward.extract=#### (.*)` is text
    for place in places_within(written, tuple(parts)):
        del written[place]
    written.update(interpolations(raw, tuple(parts)))
    target = values
    for part in parts[:-1]:
        below = target.setdefault(part, {})
        if not isinstance(below, dict):
            target[part] = below = {}
        target = below
    target[parts[-1]] = value
    return []


def _violations(details: Any, written: Mapping[Place, str]) -> Iterator[UserError]:
    parts = [str(part) for part in details["loc"]]
    content = details["input"]
    if parts[0] == "algorithm" and len(parts) > 2:
        del parts[1]  # the tag of the algorithm, which is not a key
    is_unknown = details["type"] == "extra_forbidden" and parts[0] != "mix"
    if is_unknown and isinstance(content, Mapping):
        keys = [*leaves(content, ".".join(parts) + ".")]
        if ".".join(parts) in SECTIONS_ELSEWHERE or any(counterpart(key) for key in keys):
            sections = ", ".join(Config.model_fields)
            for key in keys:
                remedy = _as_elsewhere(key) or f"Remove it; {OTHER_NAMES} lists counterparts."
                yield UnknownKeyError(key, "unknown section", sections, remedy)
            return
    yield _violation(details, written)


def _violation(details: Any, written: Mapping[Place, str]) -> UserError:
    parts = [str(part) for part in details["loc"]]
    # Show an interpolation as its text, so that the value of an environment variable stays hidden.
    shown = short(written.get(tuple(parts), details["input"]))
    at = 3 if parts[0] == "mix" else 1
    if parts[at - 1 : at] == ["algorithm"] and len(parts) > at:  # a tag, which is not a key
        section = _section_at(parts[at + 1 : -1], _algorithm_sections()[parts.pop(at)])
    else:
        section = _section_at(parts[:-1])
    key, kind = ".".join(parts), details["type"]
    if kind == "extra_forbidden" and section is not None:
        return _unknown_key(key, parts[-1], section)
    if kind == "missing":
        if parts == ["run"]:  # its other knobs have defaults
            key, section = "run.name", RunConfig
        elif parts[-1] in ("model", "algorithm"):
            return UserError(key, MISSING, "a section with keys", f"Write the section `{key}:`.")
        remedy = f"Set it in the file, or on the command line: {key}=VALUE."
        name = key.rpartition(".")[2]
        return UserError(key, MISSING, "a value", f"{remedy}{_meaning(section, name)}")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _unknown_algorithm(f"{key}.name", details["input"])
    if kind in ("model_type", "model_attributes_type"):
        remedy = f"Write `{key}:`, and its keys on the next lines, indented."
        return UserError(key, shown, "a section with keys", remedy)
    rule = details["msg"].removeprefix("Value error, ")
    name, colon, limit = rule.partition(": ")
    given = details["input"] if isinstance(details["input"], Mapping) else {}
    # A rule between knobs of one section; the text starts with the knob's name.
    if kind == "value_error" and colon and name in given:
        shown = short(written.get((*parts, name), given[name]))
        return UserError(f"{key}.{name}", shown, limit, f"Change {key}.{name}.")
    allowed = rule.removeprefix("Input should be ").removeprefix("a valid ")
    return UserError(key, shown, allowed, f"Change {key}.{_meaning(section, parts[-1])}")


def _section_at(parts: Sequence[str], section: type[BaseModel] = Config) -> type[BaseModel] | None:
    left = list(parts)
    while left:
        field = section.model_fields.get(left.pop(0))
        kind = None if field is None else field.annotation
        if (member := _member(kind)) is not None:
            kind, left = member, left[1:]
        if not isinstance(kind, type) or not issubclass(kind, BaseModel):
            return None
        section = kind
    return section


def _member(kind: Any) -> type[BaseModel] | None:
    """Returns the section type of a mapping whose keys the user chooses; None for other types."""
    value = get_args(kind)[1] if get_origin(kind) is dict else None
    return value if isinstance(value, type) and issubclass(value, BaseModel) else None


def _meaning(section: type[BaseModel] | None, name: str) -> str:
    field = section.model_fields.get(name) if section is not None else None
    return f" ({field.description})" if field is not None and field.description else ""


def _unknown_key(key: str, name: str, section: type[BaseModel]) -> UserError:
    known = list(section.model_fields)
    allowed = ", ".join(known)
    if len(allowed) > MAX_ALLOWED_CHARACTERS:
        likely = sorted(known, key=lambda k: _likeness(name, k))[-NUM_LIKELY:]
        shown = ", ".join(k for k in known if k in likely)
        allowed = f"{shown} and {len(known) - NUM_LIKELY} more"
    return UnknownKeyError(key, "unknown key", allowed, _hint(key, name, known))


def _hint(key: str, name: str, known: Sequence[str]) -> str:
    """Returns a hint with the first of these that exists: a nearly equal key of the section, the
    counterpart of another system's key, a similar key, the same key in another section, the
    likeliest key.
    """
    prefix = key.removesuffix(name)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    if not near and (remedy := _as_elsewhere(key)):
        return remedy
    if near := near or difflib.get_close_matches(name, known, n=1):
        return f"Did you mean '{prefix}{near[0]}'?"
    elsewhere = [k for k in knobs() if k.rpartition(".")[2] == name and "[" not in k]
    likeliest = prefix + max(known, key=lambda k: _likeness(name, k))
    return f"Did you mean {_quoted(elsewhere or [likeliest], 'or')}?"


def _as_elsewhere(key: str) -> str | None:
    if (found := counterpart(key)) is None:
        return None
    system, name, known = found
    if not known.keys:
        return f"Remove it: {known.note} ({system}'s {name})."
    note = f" ({known.note})" if known.note else ""
    return f"Use {_quoted(known.keys, 'and')} for {system}'s {name}{note}."


def _quoted(keys: Sequence[str], word: str) -> str:
    return f" {word} ".join(f"'{key}'" for key in keys)


def _likeness(name: str, key: str) -> tuple[bool, bool, float]:
    """Sort key of `name` for `key`: same initials (`lr`), same beginning, similar letters."""
    initials = "".join(word[0] for word in key.split("_"))
    return initials == name, key.startswith(name), difflib.SequenceMatcher(None, name, key).ratio()


def _unknown_algorithm(key: str, given: object) -> UserError:
    name = given.get("name") if isinstance(given, Mapping) else given
    allowed = f"{', '.join(ALGORITHM_NAMES)} or a dotted path 'package.module:Class'"
    near = None if name is None else nearest_algorithm(str(name))
    remedy = f"Did you mean '{near}'?" if near else f"Set {key}."
    return UserError(key, MISSING if name is None else short(name), allowed, remedy)
