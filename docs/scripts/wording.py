"""Finds wording that readers stumble over, in docstrings, comments, messages and pages.

    python docs/scripts/wording.py [FILE ...]

Without files it reads those that differ from the last commit. Prints each place with the rule and exits with 1 if there is one. CONTRIBUTING.md has the
rules of style that only a reader can judge.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("hybridrl/", "kernels/", "examples/", "docs/", "README.md", "CONTRIBUTING.md")
PLAIN = {
    r"mend(?:s|ed|ing)?": "fix",
    r"beside": "next to, in addition to, while",
    r"anew": "again",
    r"at once": "immediately, at the same time",
    r"(?:tells?|told) of": "report, print",
    r"lies (?:in|on|at)": "is stored, is",
    r"now and then": "sometimes",
    r"goes? on from": "continue from",
    r"for itself|by itself": "alone",
    r"of (?:its|their|one's) own": "its own ..., separate",
    r"alike": "in the same way, equal",
    r"likewise": "also",
}
CLAUSES = "of|what|that|as|where|whose|who|which|for|by|in|to|from|with|at|on|and|or|None"
ENTRY = re.compile(rf"^    \*{{0,2}}\w+(?:, \*{{0,2}}\w+)*: (?:{CLAUSES})\b", re.MULTILINE)
MODULE = re.compile(r"(?:What|How|Which|Where|Whether|Of|Whose)\b")
VALUE = re.compile(
    r"\b(?:None|False|True|0): (?:it|they|there|that|as|of|what|those|this|nothing)\b"
)
FRONTED = re.compile(
    r"(?:^|[.;:] )(?:Of (?!course)\w+|What \w+ (?:is|are|has|was|takes|of|that))\b"
)


def faults(text: str, is_module: bool = False) -> Iterator[tuple[int, str]]:
    """Yields faults of a text as (offset, advice)."""
    if is_module and MODULE.match(text):
        yield 0, "begin a module's docstring with a noun or a verb"
    for found in ENTRY.finditer(text):
        yield found.start(), "begin an entry with a noun phrase, or with 'Whether'"
    for found in VALUE.finditer(text):
        yield found.start(), "write 'None if ...' or 'If None, ...'"
    for found in FRONTED.finditer(text):
        yield found.start(), "put the subject first"
    for phrase, plain in PLAIN.items():
        for found in re.finditer(rf"\b(?:{phrase})\b", text):
            yield found.start(), f"{found[0]!r}: write {plain}"


def passages(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yields what people read in a file, as (line, text, whether it is a module's docstring)."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        prose = re.sub(
            r"```.*?```", lambda code: "\n" * code[0].count("\n"), source, flags=re.DOTALL
        )
        yield from ((line, text, False) for line, text in enumerate(prose.splitlines(), 1))
        return
    tree = ast.parse(source)
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, owners) and (doc := ast.get_docstring(node)):
            yield node.body[0].lineno, doc, isinstance(node, ast.Module)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    texts = {part for call in calls for part in ast.walk(call) if isinstance(part, ast.Constant)}
    for part in texts:
        if isinstance(part.value, str) and part.value.count(" ") > 3:
            yield part.lineno, part.value, False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# "), False


def changed_files() -> list[Path]:
    """Returns the files that differ from the last commit."""
    command = ["git", "diff", "--name-only", "--diff-filter=d", "HEAD", "--", *FOLDERS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [ROOT / name for name in done.stdout.split() if name.endswith((".py", ".md"))]


def main() -> int:
    """Prints the faults of the files; returns 1 if there are any."""
    found = set()
    for path in [Path(name) for name in sys.argv[1:]] or changed_files():
        if path.resolve() == Path(__file__).resolve():
            continue  # the list of words
        for line, text, is_module in passages(path):
            found |= {
                (str(path), line + text.count("\n", 0, offset), advice)
                for offset, advice in faults(text, is_module)
            }
    for name, line, advice in sorted(found):
        print(f"{name}:{line}: {advice}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
