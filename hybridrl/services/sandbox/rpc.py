"""Remote calls between the tests (judge.py) and the program (program.py), without shared code.

Messages are JSON (values.py, the only module imported here). If a call changes a list, dict or
other container that it received as an argument, the caller's container changes too.
"""

from __future__ import annotations

import json
import os
import struct
from _thread import RLock  # importing `threading` is slower

from hybridrl.services.sandbox.values import BrokenError, CannotCrossError, Decoder, Encoder

TYPE_CHECKING = False  # importing `typing` is slow
if TYPE_CHECKING:
    from typing import Any, NoReturn

MAX_MESSAGE = 64 << 20
LENGTH = struct.Struct("=Q")


def _specials(module: str, names: str) -> dict[str, tuple[str, str]]:
    return {f"__{name.rstrip('_')}__": (module, name) for name in names.split()}


# For each special method, module and name of the function that runs it on the other side.
SPECIALS = {
    **_specials("builtins", "len iter next bool str repr format int float complex abs hash"),
    **_specials("builtins", "reversed round dir bytes"),
    **_specials("operator", "index neg pos invert getitem setitem delitem"),
    **_specials("math", "trunc floor ceil"),
    **_specials("copy", "copy deepcopy"),
    **_specials("os", "fspath"),
}
# Operators with two operands.
COMPARISONS = _specials("operator", "eq ne lt le gt ge contains")
ARITHMETIC = {
    **_specials("operator", "add sub mul truediv floordiv mod pow matmul and_ or_ xor"),
    **_specials("operator", "lshift rshift"),
    **_specials("builtins", "divmod"),
}
REFLECTED = {f"__r{name[2:]}": function for name, function in ARITHMETIC.items()}
IN_PLACE = {
    f"__i{name[2:]}": ("operator", f"i{name[2:-2]}") for name in ARITHMETIC if name != "__divmod__"
}
OPERATORS = {**COMPARISONS, **ARITHMETIC, **REFLECTED, **IN_PLACE}
FORWARDED = {**SPECIALS, **COMPARISONS, **ARITHMETIC, **IN_PLACE}
METHODS = ("__call__", "__enter__", "__exit__")


class Peer:
    """One end of the connection: sends calls, and answers calls while it waits for a result."""

    def __init__(self, source: int, target: int) -> None:
        self._source, self._target = os.fdopen(source, "rb"), os.fdopen(target, "wb")
        self._exported: list[Any] = []
        self._export_numbers: dict[int, int] = {}
        self._lock = RLock()
        self._printed = ""  # output of the last call that ran in this process

    def encoded(self, value: Any, to: Encoder) -> list[Any]:
        """Encodes as JSON a value that is not plain."""
        raise NotImplementedError

    def decoded(self, kind: str, parts: list[Any], of: Decoder) -> Any:
        """Decodes JSON from the other end's `encoded`."""
        raise NotImplementedError

    def target(self, json_value: Any, decoder: Decoder) -> Any:
        """Returns the function that the other side calls."""
        return decoder.value(json_value)

    def perform(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Runs a call that the other side requested."""
        raise NotImplementedError

    def export(self, value: Any) -> int:
        """Returns the number with which the other side refers to a value."""
        if id(value) not in self._export_numbers:
            self._export_numbers[id(value)] = len(self._exported)
            self._exported.append(value)
        return self._export_numbers[id(value)]

    def exported(self, number: int) -> Any:
        return self._exported[number]

    def fail(self, error: Exception) -> NoReturn:
        """Ends this process, because the other side has ended or violated the protocol."""
        raise NotImplementedError

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function on the other side; raises its exception, or CannotCrossError."""
        with self._lock:
            encoder = Encoder(self, [])
            request = {
                "target": encoder.value(target),
                "args": encoder.values(args),
                "kwargs": {name: encoder.value(value) for name, value in kwargs.items()},
            }
            request["added"] = encoder.added()
            try:
                self._send(request)
                while "target" in (reply := self._receive()):
                    self._serve(reply)
                decoder = Decoder(self, encoder.objects, reply["added"])
                for number, (kind, *parts) in reply["changed"]:
                    decoder.fill(number, kind, parts)
                error, result = decoder.value(reply["error"]), decoder.value(reply["result"])
                text = str(reply["printed"])
            except Exception as error:  # the other side may send anything
                self.fail(error)
            if text:
                print(text, end="")
            if error is not None:
                raise error
            return result

    def serve(self) -> NoReturn:
        """Answers calls until the other side ends."""
        while True:
            try:
                self._serve(self._receive())
            except Exception as error:  # as in `call`
                self.fail(error)

    def _serve(self, request: dict[str, Any]) -> None:
        decoder = Decoder(self, [], request["added"])
        target, args = self.target(request["target"], decoder), decoder.values(request["args"])
        kwargs = {name: decoder.value(value) for name, value in request["kwargs"].items()}
        result, raised = None, None
        try:
            result = self.perform(target, args, kwargs)
        except BrokenError:
            raise
        except BaseException as error:  # the caller receives it
            raised = error
        printed, encoder = self._printed, Encoder(self, decoder.objects)
        try:
            reply = {"result": encoder.value(result), "error": encoder.value(raised)}
        except CannotCrossError as error:
            reply = {"result": None, "error": encoder.value(TypeError(str(error)))}
        contents = [encoder.contents(one) for one in decoder.objects[: len(request["added"])]]
        changed = [
            (number, now)
            for number, (now, before) in enumerate(zip(contents, request["added"], strict=True))
            if now != before
        ]
        self._send({**reply, "changed": changed, "added": encoder.added(), "printed": printed})

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        try:
            self._target.write(LENGTH.pack(len(data)) + data)
            self._target.flush()
        except OSError as error:
            raise BrokenError from error

    def _receive(self) -> dict[str, Any]:
        head = self._source.read(LENGTH.size)
        if len(head) < LENGTH.size or (length := LENGTH.unpack(head)[0]) > MAX_MESSAGE:
            raise BrokenError
        found: dict[str, Any] = json.loads(self._source.read(length))
        return found
