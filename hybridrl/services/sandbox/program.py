"""Runs main.py in the program's process, then serves calls from the tests. Runs in the sandbox."""

from __future__ import annotations

import io
import os
import sys
import types
from collections.abc import Callable, Iterator
from importlib import import_module

from hybridrl.services.sandbox.rpc import FORWARDED, METHODS, OPERATORS, SPECIALS, Peer
from hybridrl.services.sandbox.values import (
    IMMUTABLE,
    TYPES,
    BrokenError,
    CannotCrossError,
    Decoder,
    Encoder,
    Name,
    Yours,
)

TYPE_CHECKING = False  # importing `typing` is slow
if TYPE_CHECKING:
    from typing import Any, NoReturn

MAX_PRINTED = 1 << 20


class PrintBuffer(io.BytesIO):
    def write(self, data: Any) -> int:
        """Stores the data. Raises MemoryError beyond MAX_PRINTED bytes in total."""
        if self.tell() + len(data) > MAX_PRINTED:
            raise MemoryError("too much output")
        return super().write(data)

    def fileno(self) -> int:
        """Returns the descriptor of standard output, whose content is ignored."""
        return 1


class Program(Peer):
    """The program's end of the pipes: runs calls from the tests and sends references."""

    def __init__(self, source: int, target: int) -> None:
        super().__init__(source, target)
        self._described: set[int] = set()
        self._test_objects: dict[int, Any] = {}
        self._test_numbers: dict[int, int] = {}

    def fail(self, error: Exception) -> NoReturn:
        if isinstance(error, BrokenError):  # raised because the tests have ended
            os._exit(0)
        os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        os._exit(1)

    def perform(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Runs a call from the tests, and keeps its output to send it back."""
        buffer, before = PrintBuffer(), sys.stdout
        sys.stdout = text = io.TextIOWrapper(buffer, "utf-8", "replace", write_through=True)
        try:
            return target(*args, **kwargs)
        finally:
            sys.stdout = before
            self._printed = buffer.getvalue().decode("utf-8", "replace")
            text.detach()  # otherwise `text` would close the buffer, which other code may still use

    def encoded(self, value: Any, to: Encoder) -> list[Any]:
        """Encodes a reference to an object together with its class."""
        if id(value) in self._test_numbers:
            return ["yours", self._test_numbers[id(value)]]
        own = type(value)  # `__class__` may lie
        if issubclass(own, type):
            return self._class(value)
        found = ["mine", self.export(value), self._class(own)]
        if issubclass(own, BaseException):
            return ["error", *found[1:], *to.values(_sendable(value.args, to))]
        for kind, plain in IMMUTABLE.items():
            if issubclass(own, kind):
                return [*found, to.value(plain(value))]
        return found

    def _class(self, kind: type) -> list[Any]:
        if TYPES.get(kind.__name__) is kind:
            return ["type", kind.__name__]
        number = self.export(kind)
        if number in self._described:
            return ["class", number]
        self._described.add(number)
        own = {name for base in kind.__mro__ if base is not object for name in vars(base)}
        specials = [name for name in (*SPECIALS, *OPERATORS, *METHODS) if name in own]
        bases = [self._class(base) for base in kind.__bases__]
        return ["class", number, kind.__module__, kind.__qualname__, bases, specials]

    def decoded(self, kind: str, parts: list[Any], of: Decoder) -> Any:
        """Decodes a reference from the tests to an object."""
        if kind == "yours":
            return self.exported(parts[0])
        if kind == "name":
            found = import_module(parts[0])
            for name in filter(None, parts[1].split(".")):
                found = getattr(found, name)
            return found
        if kind == "error":
            return of.value(parts[0])(*of.values(parts[1:]))
        number, name = parts[0], parts[1]
        if number not in self._test_objects:
            kinds = {"function": self._function, "iterator": self._iterator, "object": self._object}
            self._test_objects[number] = kinds[kind](number, name)
            self._test_numbers[id(self._test_objects[number])] = number
        return self._test_objects[number]

    def _function(self, number: int, name: str) -> Callable[..., Any]:
        def of_the_tests(*args: Any, **kwargs: Any) -> Any:
            return self.call(Yours(number), *args, **kwargs)

        of_the_tests.__name__ = of_the_tests.__qualname__ = name
        return of_the_tests

    def _iterator(self, number: int, name: str) -> Iterator[Any]:
        while True:
            try:
                yield self.call(Name("builtins", "next"), Yours(number))
            except StopIteration:
                return

    def _object(self, number: int, name: str) -> Any:
        def attribute(_: Any, key: str, *value: Any) -> Any:
            called = Name("builtins", "setattr" if value else "getattr")
            return self.call(called, Yours(number), key, *value)

        def forward(function: Name) -> Callable[..., Any]:
            return lambda _, *args: self.call(function, Yours(number), *args)

        members: dict[str, Any] = {
            "__slots__": (),
            "__getattr__": attribute,
            "__setattr__": attribute,
            "__call__": lambda _, *args, **kwargs: self.call(Yours(number), *args, **kwargs),
            **{special: forward(Name(*function)) for special, function in FORWARDED.items()},
        }
        return type(name, (), members)()


def _sendable(values: tuple[Any, ...], to: Encoder) -> list[Any]:
    """Returns the arguments of an error, converted to text if they cannot be sent."""
    found = []
    for value in values:
        try:
            to.value(value)
            found.append(value)
        except CannotCrossError:
            found.append(str(value))
    return found


def main() -> None:
    """Runs main.py, then serves calls from the tests through the pipes given in argv."""
    pipes = [int(pipe) for pipe in sys.argv[1:3]]
    for pipe in pipes:
        os.set_inheritable(pipe, False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "hybridrl"]:
        del sys.modules[name]  # so that the program imports the installed package
    side, module = Program(*pipes), types.ModuleType("__main__")
    module.__file__ = os.path.abspath("main.py")
    sys.modules["__main__"], sys.argv = module, ["main.py"]
    side.export(module)
    with open("main.py", encoding="utf-8") as file:
        text = file.read()
    exec(compile(text, "main.py", "exec"), module.__dict__)
    side.serve()
