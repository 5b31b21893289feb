"""Reads users' YAML with errors that name the file and the line. No torch."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.errors import UserError, error_text

# OmegaConf raises OSError for text that is neither a mapping nor a list; PyYAML's constructors
# raise the last four for values that do not match their tags.
_ERRORS = (
    *(yaml.YAMLError, OmegaConfBaseException, OSError),
    *(ValueError, LookupError, TypeError, AttributeError),
)


class YamlTextError(ValueError):
    """Error for text that is not YAML. `line` is the syntax error's line; None if unknown."""

    def __init__(self, problem: str, line: int | None) -> None:
        super().__init__(problem)
        self.line = line


def parse_yaml(text: str, *, is_value: bool = False) -> DictConfig | ListConfig:
    """Returns the content of YAML text; a single value is returned under the key `value`."""
    try:
        if is_value:
            return OmegaConf.from_dotlist([f"value={text}"])
        return OmegaConf.load(StringIO(text))
    except _ERRORS as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
        raise YamlTextError(problem or error_text(error), mark and mark.line + 1) from None


def read_yaml(path: Path, allowed: str = "valid YAML") -> DictConfig | ListConfig:
    """Returns the content of a YAML file; raises UserError, which names the file and the line."""
    where = str(path)
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        found = error.strerror or error_text(error)
        raise UserError(where, found, allowed, "Correct the path.") from None
    except ValueError as error:
        if isinstance(error, YamlTextError) and error.line is not None:
            where = f"{path}:{error.line}"
        raise UserError(where, error_text(error), allowed, "Fix this line of the file.") from None
