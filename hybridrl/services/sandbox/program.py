"""The program's side of its tests: runs main.py, then what the tests call, in a process that
contain.py has started for it. Nothing of hybridrl but rpc.py and values.py, which are placed beside
it.
"""

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

TYPE_CHECKING = False  # that of typing takes long to import
if TYPE_CHECKING:
    from typing import Any, NoReturn

MAX_PRINTED = 1 << 20


class Kept(io.BytesIO):
    """What a call prints."""

    def write(self, data: Any) -> int:
        """Keeps it, up to MAX_PRINTED bytes in all."""
        if self.tell() + len(data) > MAX_PRINTED:
            raise MemoryError("too much output")
        return super().write(data)

    def fileno(self) -> int:
        """Returns the file of output that nobody keeps."""
        return 1


class Program(Peer):
    """The program's side: does whatever the tests ask, and refers to what is the program's."""

    def __init__(self, source: int, target: int) -> None:
        super().__init__(source, target)
        self._described: set[int] = set()
        self._theirs: dict[int, Any] = {}
        self._their_numbers: dict[int, int] = {}

    def fail(self, error: Exception) -> NoReturn:
        """Ends the program."""
        if isinstance(error, BrokenError):  # the tests have ended
            os._exit(0)
        os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        os._exit(1)

    def perform(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Runs a call of the tests, and keeps what it prints for them."""
        buffer, before = Kept(), sys.stdout
        sys.stdout = text = io.TextIOWrapper(buffer, "utf-8", "replace", write_through=True)
        try:
            return target(*args, **kwargs)
        finally:
            sys.stdout = before
            self._printed = buffer.getvalue().decode("utf-8", "replace")
            text.detach()  # else it closes the buffer, which code may still have

    def encoded(self, value: Any, to: Encoder) -> list[Any]:
        """Returns a reference, with the class of what it refers to."""
        if id(value) in self._their_numbers:
            return ["yours", self._their_numbers[id(value)]]
        own = type(value)  # an object may say that it is of another class
        if issubclass(own, type):
            return self._class(value)
        found = ["mine", self.export(value), self._class(own)]
        if issubclass(own, BaseException):
            return ["error", *found[1:], *to.values(_crossing(value.args, to))]
        for kind, plain in IMMUTABLE.items():
            if issubclass(own, kind):
                return [*found, to.value(plain(value))]
        return found

    def _class(self, kind: type) -> list[Any]:
        """Returns a reference to a class; the first with its name, bases and special methods."""
        if TYPES.get(kind.__name__) is kind:
            return ["type", kind.__name__]
        number = self.export(kind)
        if number in self._described:
            return ["class", number]
        self._described.add(number)
        own = {name for one in kind.__mro__ if one is not object for name in vars(one)}
        specials = [name for name in (*SPECIALS, *OPERATORS, *METHODS) if name in own]
        bases = [self._class(base) for base in kind.__bases__]
        return ["class", number, kind.__module__, kind.__qualname__, bases, specials]

    def decoded(self, kind: str, parts: list[Any], of: Decoder) -> Any:
        """Returns what the tests refer to."""
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
        if number not in self._theirs:
            made = {"function": self._function, "iterator": self._iterator, "object": self._object}
            self._theirs[number] = made[kind](number, name)
            self._their_numbers[id(self._theirs[number])] = number
        return self._theirs[number]

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
        """Returns what forwards all that is done with it to an object of the tests."""

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


def _crossing(values: tuple[Any, ...], to: Encoder) -> list[Any]:
    """Returns an error's arguments, as text where they cannot cross."""
    found = []
    for value in values:
        try:
            to.value(value)
            found.append(value)
        except CannotCrossError:
            found.append(str(value))
    return found


def main() -> None:
    """Runs main.py, and then what the tests call, by the pipes of argv."""
    pipes = [int(pipe) for pipe in sys.argv[1:3]]
    for pipe in pipes:
        os.set_inheritable(pipe, False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "hybridrl"]:
        del sys.modules[name]  # the installed one is the program's to import
    side, module = Program(*pipes), types.ModuleType("__main__")
    module.__file__ = os.path.abspath("main.py")
    sys.modules["__main__"], sys.argv = module, ["main.py"]
    side.export(module)
    with open("main.py", encoding="utf-8") as file:
        text = file.read()
    exec(compile(text, "main.py", "exec"), module.__dict__)
    side.serve()
