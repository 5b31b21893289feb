"""Encodes values as JSON for two processes that do not trust each other.

Plain values are copied. A Peer (rpc.py) handles all other values; this module never looks up a
class or function by a name that the other side sent. The containers in one message are numbered, so
that both sides can refer to the same container. Imports only the standard library.
"""

from __future__ import annotations

import builtins
import io
import re
import sys
from binascii import a2b_base64, b2a_base64
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from importlib import import_module

TYPE_CHECKING = False  # importing `typing` is slow
if TYPE_CHECKING:
    from typing import Any, Protocol

    class References(Protocol):
        def encoded(self, value: Any, to: Encoder) -> list[Any]:
            """Encodes a value that is not plain as JSON."""

        def decoded(self, kind: str, parts: list[Any], of: Decoder) -> Any:
            """Decodes JSON that `encoded` produced on the other side."""


# Classes that are identical on both sides: builtin classes of values and errors.
TYPES = {
    **{n: t for n, t in vars(builtins).items() if isinstance(t, type) and n[0] != "_"},
    "NoneType": type(None),
}


class CannotCrossError(TypeError):
    """Raised for a value that is not plain and cannot be referenced by the other side."""


class BrokenError(Exception):
    """Raised if the other side has ended or violated the protocol."""


# Name: of a function, class or module on the other side. Yours: an object exported there.
Name = namedtuple("Name", ("module", "name"))
Yours = namedtuple("Yours", ("number",))

# Maps immutable classes to the function that returns the plain value of a derived object.
IMMUTABLE: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    tuple: tuple,
    bytes: bytes,
    frozenset: frozenset,
    complex: lambda value: complex(value.real, value.imag),
}
ARRAYS = "biufcSUmM"  # kinds of numpy dtypes whose values are plain bytes


class Encoder:
    """Encodes values as JSON. `objects` lists the mutable containers by number."""

    def __init__(self, others: References, known: list[Any]) -> None:
        self.objects, self._others, self._num_known = known, others, len(known)
        self._numbers = {id(value): number for number, value in enumerate(known)}

    def value(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if -(1 << 63) < value < 1 << 63 else ["int", hex(value)]
        if (plain := PLAIN.get(f"{kind.__module__}.{kind.__name__}")) is not None:
            return [kind.__name__, *plain(self, value)]
        if kind in CONTAINERS or _is_array(value):
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self.objects)
                self.objects.append(value)
            return ["ref", self._numbers[id(value)]]
        if _is_number(value):
            return ["number", value.dtype.str, value.tobytes().hex()]
        if isinstance(value, type) and TYPES.get(value.__name__) is value:
            return ["type", value.__name__]
        if isinstance(value, Name):
            return ["name", *value]
        if isinstance(value, Yours):
            return ["yours", *value]
        return self._others.encoded(value, self)

    def values(self, values: Any) -> list[Any]:
        return [self.value(value) for value in values]

    def contents(self, value: Any) -> list[Any]:
        """Encodes the contents of a container as JSON."""
        if _is_array(value):
            data = b2a_base64(value.tobytes(), newline=False).decode()
            return ["array", value.dtype.str, list(value.shape), data]
        return [type(value).__name__, *CONTAINERS[type(value)](self, value)]

    def added(self) -> list[Any]:
        """Encodes the contents of all containers that were added since the encoder was created."""
        found, number = [], self._num_known
        while number < len(self.objects):  # the loop may append to the list
            found.append(self.contents(self.objects[number]))
            number += 1
        return found


# For each plain type, by module and name, the function that returns the JSON entries after the type
# name. Subclasses of these types belong to the program and are not encoded here.
PLAIN: dict[str, Callable[[Encoder, Any], list[Any]]] = {
    "builtins.tuple": lambda to, v: to.values(v),
    "builtins.frozenset": lambda to, v: to.values(v),
    "builtins.bytes": lambda to, v: [v.hex()],
    "builtins.complex": lambda to, v: [v.real, v.imag],
    "builtins.range": lambda to, v: to.values((v.start, v.stop, v.step)),
    "builtins.slice": lambda to, v: to.values((v.start, v.stop, v.step)),
    "builtins.ellipsis": lambda to, v: [],
    "builtins.NotImplementedType": lambda to, v: [],
    "decimal.Decimal": lambda to, v: [str(v)],
    "fractions.Fraction": lambda to, v: to.values((v.numerator, v.denominator)),
    "datetime.date": lambda to, v: [v.isoformat()],
    "datetime.time": lambda to, v: [_plain_zone(v).isoformat()],
    "datetime.datetime": lambda to, v: [_plain_zone(v).isoformat()],
    "datetime.timedelta": lambda to, v: [v.days, v.seconds, v.microseconds],
}
DECODERS: dict[str, Callable[[list[Any]], Any]] = {
    "int": lambda parts: int(parts[0], 16),
    "tuple": tuple,
    "frozenset": frozenset,
    "bytes": lambda parts: bytes.fromhex(parts[0]),
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
    "slice": lambda parts: slice(*parts),
    "ellipsis": lambda parts: ...,
    "NotImplementedType": lambda parts: NotImplemented,
    "Decimal": lambda parts: _library("decimal").Decimal(str(parts[0])),
    "Fraction": lambda parts: _library("fractions").Fraction(*map(int, parts)),
    "date": lambda parts: _library("datetime").date.fromisoformat(parts[0]),
    "time": lambda parts: _library("datetime").time.fromisoformat(parts[0]),
    "datetime": lambda parts: _library("datetime").datetime.fromisoformat(parts[0]),
    "timedelta": lambda parts: _library("datetime").timedelta(*parts),
    "type": lambda parts: TYPES[parts[0]],
    "number": lambda parts: _array(parts[0], [], bytes.fromhex(parts[1]))[()],
}
NESTED = ("tuple", "frozenset", "range", "slice", "Fraction")
CONTAINERS: dict[type, Callable[[Encoder, Any], list[Any]]] = {
    list: lambda to, v: to.values(v),
    set: lambda to, v: to.values(v),
    deque: lambda to, v: to.values((v.maxlen, *v)),
    bytearray: lambda to, v: [v.hex()],
    io.StringIO: lambda to, v: [v.getvalue(), v.tell()],
    io.BytesIO: lambda to, v: [v.getvalue().hex(), v.tell()],
    dict: lambda to, v: [to.values(pair) for pair in v.items()],
    OrderedDict: lambda to, v: [to.values(pair) for pair in v.items()],
    Counter: lambda to, v: [to.values(pair) for pair in v.items()],
    defaultdict: lambda to, v: [to.value(v.default_factory), *map(to.values, v.items())],
}
MAPPINGS = ("dict", "OrderedDict", "Counter", "defaultdict")
EMPTY: dict[str, Callable[[list[Any]], Any]] = {
    **{kind.__name__: lambda parts, kind=kind: kind() for kind in CONTAINERS},  # type: ignore[misc]
    "deque": lambda parts: deque(maxlen=parts[0]),
    "array": lambda parts: _array(parts[0], parts[1], a2b_base64(parts[2])),
}


class Decoder:
    """Decodes JSON from an Encoder, using the containers that both sides know."""

    def __init__(self, others: References, known: list[Any], added: list[Any]) -> None:
        self.objects, self._others = known, others
        first = len(known)
        known += [EMPTY[kind](parts) for kind, *parts in added]
        for number, (kind, *parts) in enumerate(added, first):
            self.fill(number, kind, parts)

    def value(self, json_value: Any) -> Any:
        if not isinstance(json_value, list):
            return json_value
        kind, *parts = json_value
        if kind == "ref":
            return self.objects[parts[0]]
        if kind in DECODERS:
            return DECODERS[kind](self.values(parts) if kind in NESTED else parts)
        return self._others.decoded(kind, parts, self)

    def values(self, json_values: list[Any]) -> list[Any]:
        return [self.value(one) for one in json_values]

    def fill(self, number: int, kind: str, parts: list[Any]) -> None:
        into = self.objects[number]
        if kind == "array":
            into[...] = _array(parts[0], parts[1], a2b_base64(parts[2]))
            return
        if kind in ("StringIO", "BytesIO"):
            into.seek(0)
            into.truncate()
            into.write(parts[0] if kind == "StringIO" else bytes.fromhex(parts[0]))
            into.seek(parts[1])
            return
        into.clear()
        if kind == "defaultdict":
            into.default_factory = self.value(parts.pop(0))
        if kind in MAPPINGS:
            for pair in parts:
                key, value = self.values(pair)
                dict.__setitem__(into, key, value)
        elif kind == "bytearray":
            into += bytes.fromhex(parts[0])
        elif kind == "set":
            into.update(self.values(parts))
        else:
            into.extend(self.values(parts[1:] if kind == "deque" else parts))


def _library(name: str) -> Any:
    """Imports a module that few programs need and that is slow to import."""
    return import_module(name)


def _plain_zone(value: Any) -> Any:
    if value.tzinfo is None or type(value.tzinfo) is _library("datetime").timezone:
        return value
    raise CannotCrossError(f"a {type(value).__name__} with a {type(value.tzinfo).__name__}")


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in ARRAYS


def _is_number(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in ARRAYS


def _array(dtype: str, shape: list[int], data: bytes) -> Any:
    if not re.fullmatch(rf"[<>|=][{ARRAYS}]\d+(\[\w+\])?", dtype):
        raise BrokenError
    return import_module("numpy").ndarray(shape, dtype, data).copy()
