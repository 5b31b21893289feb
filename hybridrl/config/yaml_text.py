"""Reading YAML that may be damaged, endless or meant to do harm. No torch.

Owns what text is refused before YAML's parser, which may end the process, makes anything of it.
"""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.files import MAX_DEPTH, read_bytes
from hybridrl.errors import UserError, said

MOST_DIGITS = 300  # of a number; a float has no more
_TOO_DEEP = f"YAML nested more than {MAX_DEPTH} deep"
# libyaml, from the one in PyYAML 6.0.4 on, has a bound of its own, above MAX_DEPTH. It reads ahead,
# so that of a long row of brackets it complains before it tells of the first.
_TOO_DEEP_FOR_LIBYAML = "exceeded maximum nesting depth"
# What YAML's constructors raise of values that are not of their tag, beside its own errors.
_YAML_ERRORS = (
    *(yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, LookupError, TypeError),
    *(AttributeError, RecursionError),
)


def parse_yaml(text: str, *, is_value: bool = False) -> DictConfig | ListConfig:
    """Returns what YAML text says; a value alone, which may be no container, under the key `value`.

    Raises:
        YamlTextError: it is not YAML, nested deeper than MAX_DEPTH, or has a number of more than
            MOST_DIGITS digits.
    """
    try:
        depth = 0
        for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise YamlTextError(_TOO_DEEP, event.start_mark)
            if isinstance(event, yaml.ScalarEvent) and _is_long_number(event):
                found = f"a number of {len(event.value)} digits ({event.value[:8]}...)"
                raise YamlTextError(found, event.start_mark)
        if is_value:
            return OmegaConf.from_dotlist([f"value={text}"])
        return OmegaConf.load(StringIO(text))
    except YamlTextError:
        raise
    except _YAML_ERRORS as error:
        marked = error if isinstance(error, yaml.MarkedYAMLError) else None
        problem = (marked and marked.problem) or said(error)
        if problem == _TOO_DEEP_FOR_LIBYAML:
            problem = _TOO_DEEP
        if isinstance(error, LookupError | TypeError | AttributeError):  # of a wrong tag
            problem = f"a value that is not of its tag ({type(error).__name__}: {said(error)})"
        raise YamlTextError(problem, marked and marked.problem_mark) from None


def read_yaml(path: Path, allowed: str = "valid YAML") -> DictConfig | ListConfig:
    """Returns what a YAML file says.

    Args:
        path: of the file.
        allowed: what it should be, for the message.

    Raises:
        UserError: it cannot be read, or as `parse_yaml`; names file and line.
    """
    content = read_bytes(path, UserError, allowed)
    where = str(path)
    try:
        return parse_yaml(content.decode("utf-8"))
    except (YamlTextError, UnicodeDecodeError) as error:
        if isinstance(error, YamlTextError) and error.line is not None:
            where = f"{path}:{error.line}"
        raise UserError(where, said(error), allowed, "Mend the file at this place.") from None


class YamlTextError(ValueError):
    """Text that is not YAML, or YAML that is refused; `line` says where, if that is known."""

    def __init__(self, problem: str, mark: yaml.Mark | None) -> None:
        super().__init__(problem)
        self.line = None if mark is None else mark.line + 1


def _is_long_number(event: yaml.ScalarEvent) -> bool:
    """Whether a scalar is a number of too many digits, in any of YAML's bases."""
    text = event.value
    is_number = len(text) > MOST_DIGITS and re.fullmatch(r"[-+]?\d[\w:]*", text) is not None
    return is_number and not event.style
