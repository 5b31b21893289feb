"""The tests' side: runs a row's text of asserts in a process that no code of the program enters.

Names that the text does not define are the program's. What they stand for comes as a plain copy
(values.py), or as a stand-in whose calls, attributes and special methods run in the program's
process (rpc.py). Asserts, comparisons of plain values and the verdict are of this process.

An operator with a plain operand would tell the program what is expected and let it say that it is
so. It is therefore computed here, of the program's plain value if its class derives from one
(list, int ...), and fails otherwise; `==` is then False. Objects that the tests construct
themselves, by a capitalized name (`Stack()`), are asked all the same: what their operators do is
what such tests are about. Standard library only; of hybridrl, rpc.py and values.py.
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

TYPE_CHECKING = False  # that of typing takes long to import
if TYPE_CHECKING:
    from typing import Any, ClassVar, NoReturn

TESTS = "__main__"  # what their functions and classes say they are of
PROGRAM = Yours(0)  # the program's module
MODULES = {**{name: name for name in sys.stdlib_module_names}, "np": "numpy", "pd": "pandas"}
# Classes of values that change, and how a plain copy is made.
MUTABLE: dict[type, Name] = {
    **{kind: Name("builtins", kind.__name__) for kind in (list, dict, set, bytearray)},
    deque: Name("collections", "deque"),
}
# Of those that do not change and of errors, all but these special methods are this process's.
ASKED = ("__str__", "__repr__", "__format__", "__copy__", "__deepcopy__", *METHODS)
# Of others with two underscores there are some by which libraries find memory (__array_struct__).
READABLE = (
    *("__name__", "__qualname__", "__module__", "__doc__", "__dict__", "__wrapped__"),
    *("__annotations__", "__defaults__", "__members__", "__cause__", "__context__", "__notes__"),
)


class Mirror(type):
    """The class of classes that stand for those of the program."""

    side: ClassVar[Judge]

    def __new__(cls, *args: Any, **kwargs: Any) -> Mirror:
        """Refuses a class that the tests derive."""
        cls.side.is_unjudged = True
        raise TypeError("a class of the tests cannot derive from one of the program")

    def __call__(cls, /, *args: Any, **kwargs: Any) -> Any:
        """Constructs an object of the program."""
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
        return any(one is member or one == member for one in cls)


class Judge(Peer):
    """The tests' side of the pipes. What stands for something of the program is made once, so that
    `is` holds.
    """

    def __init__(self, source: int, target: int) -> None:
        super().__init__(source, target)
        self.is_unjudged = False
        self._stand_ins: dict[int, Any] = {}  # by the program's number
        self._numbers: dict[int, int] = {}  # of stand-ins, by id
        self._mutable: dict[int, Name] = {}  # of such classes, by id
        self._direct: set[int] = set()  # objects that the tests constructed and still hold alone
        self._constructors: dict[int, bool] = {}  # of classes: only by capitalized names
        self._lent: dict[int, str] = {}  # kinds of what the program may use, by id
        Mirror.side = self

    def fail(self, error: Exception) -> NoReturn:
        """Ends this process; the program's death is no error that a test may expect."""
        if not isinstance(error, BrokenError):
            _print(error)
        os._exit(ENDED)

    def ask(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function of the program's side."""
        try:
            return self.call(function, *args, **kwargs)
        except (StopIteration, StopAsyncIteration) as error:
            if function == Name("builtins", "next"):
                raise
            # It would silently end a loop over the tests' own cases.
            raise RuntimeError("the program raised StopIteration") from error

    def name(self, name: str) -> Any:
        """Returns what the program's name stands for.

        Raises:
            AttributeError: it has none.
        """
        found = self.ask(Name("builtins", "getattr"), PROGRAM, name)
        if isinstance(found, Mirror):
            number, is_class_name = self._numbers[id(found)], name[:1].isupper()
            self._constructors[number] = is_class_name and self._constructors.get(number, True)
        return found

    def construct(self, kind: Mirror, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns a new object of a class of the program."""
        made = self._kept(len(self._stand_ins), Yours(self._numbers[id(kind)]), *args, **kwargs)
        if not self._constructors.get(self._numbers[id(kind)], False):
            self._direct.discard(self._numbers.get(id(made), -1))
        return made

    def attribute(self, of: Any, name: str) -> Any:
        """Returns an attribute of a stand-in."""
        if id(of) not in self._numbers or (name.startswith("__") and name not in READABLE):
            raise AttributeError(name)
        return self.ask(Name("builtins", "getattr"), of, name)

    def special(self, name: str, of: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Returns what a special method of a stand-in does."""
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
            return self._plainly(name, of, other)
        operands = (other, of) if name.startswith("__r") and name not in FORWARDED else (of, other)
        is_direct = all(self._numbers.get(id(one), number) in self._direct for one in operands)
        before = len(self._stand_ins) if is_direct else None
        return self._kept(before, Name(*OPERATORS[name]), *operands)

    def _kept(self, before: int | None, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls, and counts what is new since `before` as the tests' own; what was, stays so."""
        were = set(self._direct)
        made = self.ask(function, *args, **kwargs)
        number = self._numbers.get(id(made))
        is_new = before is not None and number in list(self._stand_ins)[before:]
        if number is not None and before is not None and (is_new or number in were):
            self._direct.add(number)
        return made

    def _plainly(self, name: str, of: Any, other: Any) -> Any:
        """Computes an operator with a plain operand here."""
        function = next(
            (self._mutable[id(kind)] for kind in type(of).__mro__ if id(kind) in self._mutable),
            None,
        )
        if function is not None and name not in IN_PLACE:
            value = self.ask(function, of)
            if type(value) not in MUTABLE:
                self.fail(BrokenError())
            return getattr(value, name, lambda _: NotImplemented)(other)
        if name == "__contains__":
            return any(one is other or one == other for one in of)
        return NotImplemented

    def encoded(self, value: Any, to: Encoder) -> list[Any]:
        """Returns JSON of a stand-in, or lends the program something of the tests."""
        if id(value) in self._numbers:
            return ["yours", self._numbers[id(value)]]
        if isinstance(value, BaseException):
            kind = next(k for k in type(value).__mro__ if TYPES.get(k.__name__) is k)
            return ["error", to.value(kind), *to.values(value.args)]
        if isinstance(value, types.ModuleType):
            return ["name", value.__name__, ""]
        if isinstance(value, types.TracebackType):  # of a `with` block
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
            raise CannotCrossError(f"a {kind.__name__} cannot be handed to the program")
        self._lent[id(value)] = lent
        return [lent, self.export(value), str(getattr(value, "__name__", kind.__name__))]

    def decoded(self, kind: str, parts: list[Any], of: Decoder) -> Any:
        """Returns a stand-in, or what was lent."""
        if kind == "yours":
            return self.exported(parts[0])
        if kind not in ("mine", "class", "error"):
            raise BrokenError
        number = parts[0]
        self._direct.discard(number)  # the program hands it out: it may stand for anything
        if number in self._stand_ins:
            return self._stand_ins[number]
        made: Any
        if kind == "class":
            made = self._class(of, *parts[1:])
        elif kind == "error":
            made = self._error(of.value(parts[1]), of.values(parts[2:]))
        else:
            made = self._object(number, of.value(parts[1]), of.values(parts[2:]))
        self._stand_ins[number] = made
        self._numbers[id(made)] = number
        return made

    def _object(self, number: int, kind: type, plain: list[Any]) -> Any:
        if kind.__module__ == "builtins" and kind.__name__ == "coroutine":
            return self._coroutine(number)
        if not isinstance(kind, Mirror):  # of a class that both sides have
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
            made = kind.__new__(kind, *args)
            if not isinstance(kind, Mirror):
                made.__init__(*args)  # type: ignore[misc]
        except TypeError:  # its own arguments are others
            made = BaseException.__new__(kind)
        made.args = tuple(args)
        return made

    def _class(
        self, of: Decoder, module: str, name: str, bases: list[Any], specials: list[str]
    ) -> type:
        found = of.values(bases)
        real = getattr(sys.modules.get(module), name, None) if module != TESTS else None
        if isinstance(real, type) and issubclass(real, BaseException):
            return real  # of a library, which the tests may name
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
            if special in {*SPECIALS, *OPERATORS, *METHODS} and (special in ASKED or not is_local)
        }
        members |= {
            "__module__": module,
            "__slots__": (),
            "__getattr__": _bound(self.attribute),
            "__setattr__": _bound(self._set),
        }
        if (module, name) == ("builtins", "generator"):
            members["__class__"] = property(lambda _: types.GeneratorType)
        made = type.__new__(Mirror, name.rpartition(".")[2], tuple(kept), members)
        for base in bases:
            if base in MUTABLE:
                self._mutable[id(made)] = MUTABLE[base]
        return made

    def _set(self, of: Any, name: str, value: Any) -> None:
        if name.startswith("__"):  # as of errors that are raised
            object.__setattr__(of, name, value)
        else:
            self.ask(Name("builtins", "setattr"), of, name, value)

    def target(self, json_value: Any, decoder: Decoder) -> Any:
        """Returns what the program wants to call; here alone it may say a name."""
        if json_value[0] == "name":
            return Name(*json_value[1:])
        return super().target(json_value, decoder)

    def perform(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Does what the program may do with what it was lent: call functions, take from iterators,
        and of objects of the tests' classes their public attributes and special methods.
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
    """Returns a function that a class may have as a method."""

    def method(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return method


def _importable(value: Any) -> tuple[str, str] | None:
    """Returns module and name by which a function or class is found, unless it is the tests'."""
    name = getattr(value, "__qualname__", None)
    module = getattr(value, "__module__", None) or "builtins"
    if not isinstance(name, str) or not isinstance(module, str) or module == TESTS:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return (module, name) if found is value else None


class Names(dict):
    """The names of the tests; the program's where they define none.

    A builtin name is Python's, though the program defines it, unless the tests use no other name of
    the program: only then can they be about it. A name of the standard library (and np, pd) that
    is only used as `name.something` is that module.
    """

    def __init__(self, side: Judge, tree: ast.Module) -> None:
        super().__init__({"__name__": TESTS, "__builtins__": builtins})
        self._side = side
        nodes = list(ast.walk(tree))
        used = Counter(n.id for n in nodes if isinstance(n, ast.Name))
        dotted = Counter(
            n.value.id
            for n in nodes
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
        )
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
        self._has_own_builtins = not (free - self._modules - set(vars(builtins)))

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or (hasattr(builtins, name) and not self._has_own_builtins):
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
    """Runs the tests against the program at the other ends of the pipes; the exit code is the
    verdict.
    """
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
    except BaseException as error:  # whatever tests raise, they have not passed
        _print(error)
        os._exit(UNJUDGED if side.is_unjudged else FAILED)
    os._exit(PASSED)


def _print(error: BaseException) -> None:
    import_module("traceback").print_exception(error)  # few runs need it
    sys.stderr.flush()
