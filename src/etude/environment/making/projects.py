"""A Python project as tasks are made from it: its modules, its tests, and what must be installed to run them.

    modules     what changes may touch: the packages below `src/`, or beside pyproject.toml
    tests       directories and files of tests, restored before a verdict
    others      everything else that a user's checkout holds

Nothing of the project runs here, and it is installed nowhere: `PYTHONPATH` leads to it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from typing import Any

from etude.environment.making.requirements import Metadata, find_requirements
from etude.errors import TaskError
from etude.tasks.making.source import read_text, read_tree

MAX_BYTES = 32 << 20
_NOT_OURS = re.compile(
    r"(\..*|__pycache__|build|dist|node_modules|venv|.*\.egg-info|.*\.dist-info|.*\.py[co]|.*\.whl)"
)
_DOT_FILES = re.compile(r"\.(coveragerc|pylintrc|flake8|gitignore|editorconfig)")
_TEST_FILE = re.compile(r"(test_.*|.*_test)\.py")
_TEST_FOLDERS = ("test", "tests", "testing")
_NO_PACKAGES = {*_TEST_FOLDERS, "docs", "doc", "examples", "bench", "benchmarks", "scripts", "tools", "setup"}


@dataclass(frozen=True, slots=True)
class Project:
    """Paths are relative to its root, with `/`."""

    name: str
    version: str
    files: Mapping[str, bytes]
    """All of it, and the metadata that an editable install leaves beside the packages."""
    sources: Mapping[str, str]
    """Modules that changes may touch."""
    tests: frozenset[str]
    """Test files, and what lies beside them."""
    test_files: tuple[str, ...]
    """Those that pytest is given."""
    source_root: str
    """Directory that is put on the path: `src`, or empty for the root."""
    requirements: tuple[str, ...]
    """What pip installs to run the tests."""
    options: tuple[str, ...] = ()
    """Of pytest, from the project's configuration."""

    @property
    def source_patterns(self) -> tuple[str, ...]:
        """Glob patterns of what a solution may change."""
        below = (PurePosixPath(path).relative_to(self.source_root or ".") for path in self.sources)
        tops = {path.parents[-2].as_posix() + "/**" if len(path.parts) > 1 else path.name for path in below}
        prefix = f"{self.source_root}/" if self.source_root else ""
        return tuple(sorted(prefix + top for top in tops))

    @property
    def test_texts(self) -> dict[str, str]:
        """The test files that are text, by path."""
        return {path: text for path in self.tests if (text := read_text(self.files[path])) is not None}

    @property
    def test_roots(self) -> tuple[str, ...]:
        """The uppermost directories that hold nothing but tests, and test files outside of them."""
        return tuple(sorted({_test_root(path) or path for path in self.tests}))


def read_project(root: Path) -> Project:
    """Reads the project in a directory.

    Raises TaskError for what is no Python project, has no tests or no package, or is too large.
    """
    if not root.is_dir():
        raise TaskError(
            "is no directory", field="REPO", received=str(root),
            fix="name a checkout, or an unpacked source distribution",
        )  # fmt: skip
    files = _read_files(root)
    pyproject = _pyproject(files)
    metadata = _metadata(files, pyproject, root)
    tests = frozenset(path for path in files if is_test_file(path))
    test_files = tuple(sorted(path for path in tests if _TEST_FILE.fullmatch(PurePosixPath(path).name)))
    if not test_files:
        raise TaskError(
            "holds no tests: no file is called test_*.py or *_test.py", field="REPO", received=str(root),
            fix="name a checkout, or a source distribution that its tests are part of",
        )  # fmt: skip
    source_root = "src" if any(path.startswith("src/") and path.endswith(".py") for path in files) else ""
    sources = {path: text for path, text in _modules(files, tests, source_root) if read_tree(text)}
    if not sources:
        raise TaskError(
            "holds no package: no directory with an __init__.py below it or its src, nor a module",
            field="REPO", received=str(root), fix="name the directory that holds pyproject.toml",
        )  # fmt: skip
    folder = f"{source_root}/{metadata.name}.egg-info".removeprefix("/")
    files[f"{folder}/PKG-INFO"] = metadata.text.encode()
    files[f"{folder}/entry_points.txt"] = metadata.entry_points.encode()
    return Project(
        metadata.name, metadata.version, files, sources, tests,
        _chosen_tests(test_files, pyproject), source_root, find_requirements(metadata, pyproject, files),
        _options(files, pyproject),
    )  # fmt: skip


def _read_files(root: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    total = 0
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if any(_NOT_OURS.fullmatch(part) and not _DOT_FILES.fullmatch(part) for part in parts):
            continue
        if path.is_symlink() or not path.is_file() or any(above.is_symlink() for above in path.parents):
            continue
        total += path.stat().st_size
        if total > MAX_BYTES:
            raise TaskError(
                f"holds more than {MAX_BYTES >> 20} MiB", field="REPO", received=str(root),
                fix="name a copy without data that its tests do not need",
            )  # fmt: skip
        files["/".join(parts)] = path.read_bytes()
    return files


def _pyproject(files: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        return tomllib.loads(files.get("pyproject.toml", b"").decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(
            "is not TOML", field="pyproject.toml", received=str(error), fix="correct the syntax"
        ) from error


def _metadata(files: Mapping[str, bytes], pyproject: Mapping[str, Any], root: Path) -> Metadata:
    """Of PKG-INFO where there is one, which a source distribution has, else of pyproject.toml."""
    table = pyproject.get("project") or pyproject.get("tool", {}).get("poetry") or {}
    text = files.get("PKG-INFO", b"").decode(errors="replace")
    if text:
        headers = HeaderParser().parsestr(text)
        name, version = headers["Name"] or root.name, headers["Version"] or "0"
        needs = tuple(headers.get_all("Requires-Dist") or ())
    else:
        name, version = str(table.get("name", root.name)), str(table.get("version", "0"))
        needs = ()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    groups = {"console_scripts": table.get("scripts", {}), **table.get("entry-points", {})}
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in rows.items())
        for group, rows in groups.items()
        if rows and all(isinstance(value, str) for value in rows.values())
    ]
    return Metadata(name, version, text, "\n".join(lines), needs)


def _modules(
    files: Mapping[str, bytes], tests: frozenset[str], source_root: str
) -> Iterable[tuple[str, str]]:
    prefix = f"{source_root}/" if source_root else ""
    for path, data in files.items():
        rest = path.removeprefix(prefix)
        if not path.startswith(prefix) or not path.endswith(".py") or path in tests:
            continue
        top, slash, _ = rest.partition("/")
        is_package = bool(slash) and f"{prefix}{top}/__init__.py" in files
        if top.removesuffix(".py") in _NO_PACKAGES or top == "conftest.py" or (slash and not is_package):
            continue
        text = read_text(data)
        if text is not None and "_vendor" not in path and "/vendor/" not in path:
            yield path, text


def _test_root(path: str) -> str:
    """The uppermost directory of tests above a path; empty if there is none."""
    parts = path.split("/")
    for index, part in enumerate(parts[:-1]):
        if part in _TEST_FOLDERS:
            return "/".join(parts[: index + 1])
    return ""


def is_test_file(path: str) -> bool:
    """Whether a path of a project is a test file, or lies beside some."""
    name = PurePosixPath(path).name
    folder = _test_root(path)
    if folder:
        return not path.startswith(("docs/", "examples/"))
    is_named = bool(_TEST_FILE.fullmatch(name)) or name == "conftest.py"
    return is_named and not path.startswith(("docs/", "examples/", "bench"))


def _chosen_tests(test_files: tuple[str, ...], pyproject: Mapping[str, Any]) -> tuple[str, ...]:
    """The test files below `testpaths`, where that names some."""
    options = pyproject.get("tool", {}).get("pytest", {}).get("ini_options", {})
    below = [path.rstrip("/") + "/" for path in options.get("testpaths", []) if isinstance(path, str)]
    chosen = tuple(path for path in test_files if path.startswith(tuple(below)))
    return chosen or test_files


def _options(files: Mapping[str, bytes], pyproject: Mapping[str, Any]) -> tuple[str, ...]:
    """How tests are imported, if the project's configuration says so; nothing else of its options counts."""
    options = pyproject.get("tool", {}).get("pytest", {}).get("ini_options", {})
    texts = [str(options.get("addopts", ""))]
    texts += [
        files.get(name, b"").decode(errors="replace") for name in ("pytest.ini", "tox.ini", "setup.cfg")
    ]
    found = re.search(r"--import-mode[= '\",]+(\w+)", "\n".join(texts))
    return (f"--import-mode={found[1]}",) if found else ()
