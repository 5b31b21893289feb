"""Runs the asserts of a data row in their own process; no code of the scored program runs here.

Names that the tests do not define refer to the program. Their values arrive as plain copies
(values.py), or as stand-ins whose calls, attributes and special methods run in the program's
process (rpc.py). An operator that ran there on a plain operand would reveal the expected value, so
it runs here: on the plain value of the program's object if its class derives from a plain class
(list, int ...); otherwise it fails, and `==` returns False. Operators of objects that the tests
construct through a capitalized name (`Stack()`) run in the program, because the tests check them.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module

from hybridrl.services.sandbox.rpc import FORWARDED, IN_PLACE, METHODS, OPERATORS, SPECIALS, Peer
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
from hybridrl.services.sandbox.verdict import ENDED, FAILED, PASSED, UNJUDGED

TYPE_CHECKING = False  # importing `typing` is slow
if TYPE_CHECKING:
    from typing import Any, ClassVar, NoReturn

TESTS = "__main__"  # Module name of functions and classes that the tests define.
PROGRAM = Yours(0)  # The program's module.
MODULES = {**{name: name for name in sys.stdlib_module_names}, "np": "numpy", "pd": "pandas"}
# Maps mutable classes to the function that makes a plain copy.
MUTABLE: dict[type, Name] = {
    **{kind: Name("builtins", kind.__name__) for kind in (list, dict, set, bytearray)},
    deque: Name("collections", "deque"),
}
# The only special methods of immutable values and errors that run in the program.
FORWARDED_SPECIALS = ("__str__", "__repr__", "__format__", "__copy__", "__deepcopy__", *METHODS)
# Readable names with two underscores; others (__array_struct__) may expose memory.
READABLE = (
    *("__name__", "__qualname__", "__module__", "__doc__", "__dict__", "__wrapped__"),
    *("__annotations__", "__defaults__", "__members__", "__cause__", "__context__", "__notes__"),
)


class Mirror(type):
    """Metaclass of the stand-ins for the program's classes."""

    side: ClassVar[Judge]

    def __new__(cls, *args: Any, **kwargs: Any) -> Mirror:
        """Rejects any class that the tests derive from a class of the program."""
        cls.side.is_unjudged = True
        raise TypeError("a class in the tests cannot derive from a class of the program")

    def __call__(cls, /, *args: Any, **kwargs: Any) -> Any:
        return cls.side.construct(cls, args, kwargs)

    def __getattr__(cls, name: str) -> Any:
        return cls.side.attribute(cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        cls.side.ask(Name("builtins", "setattr"), cls, name, value)

    def __iter__(cls) -> Iterator[Any]:
        found: Iterator[Any] = cls.side.ask(Name("builtins", "iter"), cls)
        return found

    def __len__(cls) -> int:
        return int(cls.side.ask(Name("builtins", "len"), cls))

    def __bool__(cls) -> bool:
        return True

    def __getitem__(cls, key: Any) -> Any:
        return cls.side.ask(Name("operator", "getitem"), cls, key)

    def __contains__(cls, member: Any) -> bool:
        return any(entry is member or entry == member for entry in cls)


class Judge(Peer):
    """The tests' end of the pipes. An object has exactly one stand-in, so that `is` works."""

    def __init__(self, source: int, target: int) -> None:
        super().__init__(source, target)
        self.is_unjudged = False
        self._stand_ins: dict[int, Any] = {}  # Stand-ins by the number that the program assigned.
        self._numbers: dict[int, int] = {}  # Numbers of stand-ins, by id.
        self._mutable: dict[int, Name] = {}  # Values of MUTABLE, by id of the derived class.
        # Numbers of objects that the tests constructed and the program never sent.
        self._direct: set[int] = set()
        self._constructors: dict[int, bool] = {}  # Whether all of a class's names are capitalized.
        self._lent: dict[int, str] = {}  # Kinds of objects lent to the program, by id.
        Mirror.side = self

    def fail(self, error: Exception) -> NoReturn:
        """Ends this process, so that tests cannot catch the program's death as an error."""
        if not isinstance(error, BrokenError):
            _print(error)
        os._exit(ENDED)

    def ask(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function in the program's process."""
        try:
            return self.call(function, *args, **kwargs)
        except (StopIteration, StopAsyncIteration) as error:
            if function == Name("builtins", "next"):
                raise
            # StopIteration would silently end a loop over test cases.
            raise RuntimeError("the program raised StopIteration") from error

    def name(self, name: str) -> Any:
        """Returns the value of a name in the program; AttributeError if there is none."""
        found = self.ask(Name("builtins", "getattr"), PROGRAM, name)
        if isinstance(found, Mirror):
            number, is_class_name = self._numbers[id(found)], name[:1].isupper()
            self._constructors[number] = is_class_name and self._constructors.get(number, True)
        return found

    def construct(self, kind: Mirror, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        new = self._call_and_track(
            len(self._stand_ins), Yours(self._numbers[id(kind)]), *args, **kwargs
        )
        if not self._constructors.get(self._numbers[id(kind)], False):
            self._direct.discard(self._numbers.get(id(new), -1))
        return new

    def attribute(self, of: Any, name: str) -> Any:
        if id(of) not in self._numbers or (name.startswith("__") and name not in READABLE):
            raise AttributeError(name)
        return self.ask(Name("builtins", "getattr"), of, name)

    def special(self, name: str, of: Any, /, *args: Any, **kwargs: Any) -> Any:
        number = self._numbers[id(of)]
        if name == "__call__":
            return self.ask(Yours(number), *args, **kwargs)
        if name in METHODS:
            method = self.call(Name("builtins", "getattr"), of, name)
            return self.ask(method, *args)
        if name == "__deepcopy__":
            args = ()
        if name not in OPERATORS:
            return self.ask(Name(*FORWARDED[name]), of, *args)
        other = args[0]
        if id(other) not in self._numbers and number not in self._direct:
            return self._local_operator(name, of, other)
        operands = (other, of) if name.startswith("__r") and name not in FORWARDED else (of, other)
        is_direct = all(self._numbers.get(id(x), number) in self._direct for x in operands)
        before = len(self._stand_ins) if is_direct else None
        return self._call_and_track(before, Name(*OPERATORS[name]), *operands)

    def _call_and_track(
        self, before: int | None, function: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a function; a new result (number >= `before`) counts as made by the tests."""
        were = set(self._direct)
        new = self.ask(function, *args, **kwargs)
        number = self._numbers.get(id(new))
        is_new = before is not None and number in list(self._stand_ins)[before:]
        if number is not None and before is not None and (is_new or number in were):
            self._direct.add(number)
        return new

    def _local_operator(self, name: str, of: Any, other: Any) -> Any:
        known = (self._mutable.get(id(kind)) for kind in type(of).__mro__)
        function = next(filter(None, known), None)
        if function is not None and name not in IN_PLACE:
            value = self.ask(function, of)
            if type(value) not in MUTABLE:
                self.fail(BrokenError())
            return getattr(value, name, lambda _: NotImplemented)(other)
        if name == "__contains__":
            return any(entry is other or entry == other for entry in of)
        return NotImplemented

    def encoded(self, value: Any, to: Encoder) -> list[Any]:
        """Encodes a stand-in as JSON, or lends an object of the tests to the program."""
        if id(value) in self._numbers:
            return ["yours", self._numbers[id(value)]]
        if isinstance(value, BaseException):
            kind = next(k for k in type(value).__mro__ if TYPES.get(k.__name__) is k)
            return ["error", to.value(kind), *to.values(value.args)]
        if isinstance(value, types.ModuleType):
            return ["name", value.__name__, ""]
        if isinstance(value, types.TracebackType):  # passed to __exit__
            return to.value(None)
        if (named := _importable(value)) is not None:
            return ["name", *named]
        if isinstance(value, (type({}.keys()), type({}.values()), type({}.items()))):
            return to.value(list(value))
        kind = type(value)
        if kind.__module__ == TESTS or kind is types.SimpleNamespace:
            lent = "object"
        elif callable(value):
            lent = "function"
        elif hasattr(kind, "__next__"):
            lent = "iterator"
        else:
            self.is_unjudged = True
            raise CannotCrossError(f"a {kind.__name__} cannot be sent to the program")
        self._lent[id(value)] = lent
        return [lent, self.export(value), str(getattr(value, "__name__", kind.__name__))]

    def decoded(self, kind: str, parts: list[Any], of: Decoder) -> Any:
        """Decodes JSON to a stand-in or to an object that was lent to the program."""
        if kind == "yours":
            return self.exported(parts[0])
        if kind not in ("mine", "class", "error"):
            raise BrokenError
        number = parts[0]
        self._direct.discard(number)  # the program itself sent it, so it may be any object
        if number in self._stand_ins:
            return self._stand_ins[number]
        new: Any
        if kind == "class":
            new = self._class(of, *parts[1:])
        elif kind == "error":
            new = self._error(of.value(parts[1]), of.values(parts[2:]))
        else:
            new = self._object(number, of.value(parts[1]), of.values(parts[2:]))
        self._stand_ins[number] = new
        self._numbers[id(new)] = number
        return new

    def _object(self, number: int, kind: type, plain: list[Any]) -> Any:
        if kind.__module__ == "builtins" and kind.__name__ == "coroutine":
            return self._coroutine(number)
        if not isinstance(kind, Mirror):  # a class that exists on both sides
            kind = self._mirror(kind.__module__, kind.__name__, [], list(vars(kind)))
        base: Any = next((base for base in IMMUTABLE if issubclass(kind, base)), object)
        if base is not object and [type(value) for value in plain] != [base]:
            raise BrokenError
        return base.__new__(kind, *plain)

    async def _coroutine(self, number: int) -> Any:
        return self.ask(Name("asyncio", "run"), Yours(number))

    def _error(self, kind: type, args: list[Any]) -> BaseException:
        if not issubclass(kind, BaseException):
            raise BrokenError
        try:
            new = kind.__new__(kind, *args)
            if not isinstance(kind, Mirror):
                new.__init__(*args)  # type: ignore[misc]
        except TypeError:  # the constructor expects other arguments
            new = BaseException.__new__(kind)
        new.args = tuple(args)
        return new

    def _class(
        self, of: Decoder, module: str, name: str, bases: list[Any], specials: list[str]
    ) -> type:
        found = of.values(bases)
        real = getattr(sys.modules.get(module), name, None) if module != TESTS else None
        if isinstance(real, type) and issubclass(real, BaseException):
            return real  # an error class from a library, which the tests may refer to
        return self._mirror(module, name, found, specials)

    def _mirror(self, module: str, name: str, bases: list[type], specials: list[str]) -> Mirror:
        kept = [
            base
            for base in bases
            if isinstance(base, Mirror) or base in IMMUTABLE or issubclass(base, BaseException)
        ]
        is_local = any(issubclass(base, (BaseException, *IMMUTABLE)) for base in kept)
        members: dict[str, Any] = {
            special: _bound(partial(self.special, special))
            for special in (*specials, "__copy__", "__deepcopy__")
            if special in {*SPECIALS, *OPERATORS, *METHODS}
            and (special in FORWARDED_SPECIALS or not is_local)
        }
        members |= {
            "__module__": module,
            "__slots__": (),
            "__getattr__": _bound(self.attribute),
            "__setattr__": _bound(self._set),
        }
        if (module, name) == ("builtins", "generator"):
            members["__class__"] = property(lambda _: types.GeneratorType)
        new = type.__new__(Mirror, name.rpartition(".")[2], tuple(kept), members)
        for base in bases:
            if base in MUTABLE:
                self._mutable[id(new)] = MUTABLE[base]
        return new

    def _set(self, of: Any, name: str, value: Any) -> None:
        if name.startswith("__"):  # Python sets such attributes when it raises an error
            object.__setattr__(of, name, value)
        else:
            self.ask(Name("builtins", "setattr"), of, name, value)

    def target(self, json_value: Any, decoder: Decoder) -> Any:
        """Returns the named function. The program may name it only in order to call it."""
        if json_value[0] == "name":
            return Name(*json_value[1:])
        return super().target(json_value, decoder)

    def perform(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Runs a call by the program on an object that the tests have lent to it.

        Allowed are functions, iterators, and public attributes and special methods of objects whose
        classes the tests define.
        """
        if not isinstance(target, Name):
            if self._lent.get(id(target)) not in ("function", "object"):
                raise BrokenError
            return target(*args, **kwargs)
        lent = self._lent.get(id(args[0]))
        if lent == "iterator" and target == Name("builtins", "next"):
            return next(args[0])
        if lent != "object":
            raise BrokenError
        if target in ATTRIBUTES:
            _check_public(*args)
        elif target not in map(tuple, FORWARDED.values()):
            raise BrokenError
        return getattr(import_module(target.module), target.name)(*args)


ATTRIBUTES = (Name("builtins", "getattr"), Name("builtins", "setattr"))


def _check_public(of: Any, name: str, *value: Any) -> None:
    if name.startswith("_") or (value and callable(getattr(type(of), name, None))):
        raise AttributeError(name)


def _bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a callable so that, as a class attribute, it receives the instance first."""

    def method(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return method


def _importable(value: Any) -> tuple[str, str] | None:
    """Returns the module and name of what can be imported; None if the tests define it."""
    name = getattr(value, "__qualname__", None)
    module = getattr(value, "__module__", None) or "builtins"
    if not isinstance(name, str) or not isinstance(module, str) or module == TESTS:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return (module, name) if found is value else None


class Names(dict):
    """Namespace of the tests. Names that the tests do not define are looked up in the program.

    A builtin name refers to Python's builtin even if the program redefines it, unless the tests use
    no other name of the program: in that case they test the redefinition. The name of a standard
    library module (also np and pd) refers to the module if it is used only as `name.something`.
    """

    def __init__(self, side: Judge, tree: ast.Module) -> None:
        super().__init__({"__name__": TESTS, "__builtins__": builtins})
        self._side = side
        nodes = list(ast.walk(tree))
        used = Counter(n.id for n in nodes if isinstance(n, ast.Name))
        owners = (n.value for n in nodes if isinstance(n, ast.Attribute))
        dotted = Counter(n.id for n in owners if isinstance(n, ast.Name))
        bound = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                bound.add(node.name)
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, ast.alias):
                bound.add((node.asname or node.name).partition(".")[0])
        free = set(used) - bound
        self._modules = {name for name in free if name in MODULES and used[name] == dotted[name]}
        self._uses_program_builtins = not (free - self._modules - set(vars(builtins)))

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or (hasattr(builtins, name) and not self._uses_program_builtins):
            raise KeyError(name)
        if name in self._modules:
            try:
                return import_module(MODULES[name])
            except ImportError:
                raise KeyError(name) from None
        try:
            found = self._side.name(name)
        except AttributeError:
            raise KeyError(name) from None
        if isinstance(found, Mirror) or isinstance(type(found), Mirror):
            self[name] = found
        return found


def main(text: str, source: int, target: int) -> NoReturn:
    """Runs the tests against the program at the other ends. The exit code is the verdict."""
    side = Judge(source, target)
    sys.modules[TESTS] = types.ModuleType(TESTS)
    try:
        tree = ast.parse(text, "tests.py")
        code = compile(tree, "tests.py", "exec")
    except (SyntaxError, ValueError, RecursionError) as error:
        _print(error)
        os._exit(UNJUDGED)
    try:
        exec(code, Names(side, tree))
    except BaseException as error:  # any exception means that the tests failed
        _print(error)
        os._exit(UNJUDGED if side.is_unjudged else FAILED)
    os._exit(PASSED)


def _print(error: BaseException) -> None:
    import_module("traceback").print_exception(error)  # imported only when needed
    sys.stderr.flush()
