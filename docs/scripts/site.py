"""Hook of mkdocs that lets pages link to files of the repository outside docs/.

Files in PAGES become pages of the site. The folder of results becomes the page that results.py
makes. All other files are copied to `files/`. A link to another folder or to a missing file ends
the build.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import results  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGES = {
    name: f"project/{name.lower()}"
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
} | {"tests/mutants/README.md": "project/planted_faults.md"}
FOLDERS = {"benchmarks/results": "performance/results.md"}
LINK = re.compile(r"(\]\(|src=\"|href=\")([^)\s\"#]+)(#[^)\s\"]*)?")
_copied: set[str] = set()


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages outside docs/, and every file that a page links to."""
    _copied.clear()
    for name, page in PAGES.items():
        content = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=content))
    (page,) = FOLDERS.values()
    files.append(File.generated(config, page, content=results.page()))
    for file in list(files.documentation_pages()):
        here = source_of(file.src_uri)
        for match in LINK.finditer(file.content_string):
            path = outside(match[2], here)
            if path is not None and path not in {*PAGES, *FOLDERS, *_copied}:
                _copied.add(path)
                content = (ROOT / path).read_bytes()
                files.append(File.generated(config, f"files/{path}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Changes links that leave docs/ to the places where on_files put their targets."""
    uri = page.file.src_uri
    here = source_of(uri)

    def replaced(match: re.Match[str]) -> str:
        path = outside(match[2], here)
        if path is None:
            return moved(match)
        target = {**PAGES, **FOLDERS}.get(path, f"files/{path}")
        return f"{match[1]}{os.path.relpath(target, os.path.dirname(uri) or '.')}{match[3] or ''}"

    def moved(match: re.Match[str]) -> str:
        """Returns a link into docs/, relative to the place of a page of PAGES."""
        is_own = uri in PAGES.values() and not match[2].startswith(("http", "mailto"))
        if not is_own:
            return match[0]
        target = os.path.relpath(os.path.join(here, match[2]), "docs")
        return f"{match[1]}{os.path.relpath(target, os.path.dirname(uri))}{match[3] or ''}"

    return LINK.sub(replaced, markdown)


def source_of(uri: str) -> str:
    """Returns the folder of a page's source, relative to the repository's root."""
    names = {page: name for name, page in PAGES.items()}
    return os.path.dirname(names.get(uri, f"docs/{uri}"))


def outside(target: str, here: str) -> str | None:
    """Returns the path of a link that leaves docs/, relative to the repository's root, else None.

    Raises:
        PluginError: The file does not exist.
    """
    if re.match(r"[a-z]+:|/", target):
        return None
    path = os.path.normpath(os.path.join(here, target))
    if path.startswith("docs/") or path in ("docs", "."):
        return None
    if path not in FOLDERS and not (ROOT / path).is_file():
        raise PluginError(f"a page in {here or 'the root'} links to {target}: no such file")
    return path
