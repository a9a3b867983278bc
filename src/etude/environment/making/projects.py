"""Reads a Python project from which tasks are made: its modules, tests and requirements.

    modules     may be changed: the packages below `src/`, or next to pyproject.toml
    tests       directories and files of tests, restored before a verdict
    others      everything else in a user's checkout

No code of the project runs here, and it is not installed: `PYTHONPATH` contains it.
"""

from __future__ import annotations

import configparser
import fnmatch
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from typing import Any

from etude.errors import TaskError
from etude.kit.syntax import read_text
from etude.tasks.making.source import read_tree

STATE = ".making"
"""Directory with the state of task making, in a set of tasks."""
MAX_BYTES = 32 << 20
_NOT_OURS = re.compile(
    r"(\..*|__pycache__|build|dist|node_modules|venv|.*\.egg-info|.*\.dist-info|.*\.py[co]|.*\.whl)"
)
_DOT_FILES = re.compile(r"\.(coveragerc|pylintrc|flake8|gitignore|editorconfig)")
_TEST_NAMES = ("test_*.py", "*_test.py")
"""pytest's default patterns for names of test files."""
_TEST_FOLDERS = ("test", "tests", "testing")
_NO_PACKAGES = {*_TEST_FOLDERS, "docs", "doc", "examples", "bench", "benchmarks", "scripts", "tools", "setup"}
ALWAYS = ("pytest",)
_GROUPS = ("tests", "test", "testing", "dev")
_FILES = tuple(
    form.format(name)
    for name in _GROUPS
    for form in ("requirements/{}.txt", "requirements/{}.in", "requirements-{}.txt", "{}-requirements.txt")
)
_TOOLS = re.compile(
    r"(pre-commit|mypy|pyright|ruff|black|isort|flake8|pylint|tox|nox|sphinx|furo|twine|build|bandit|codecov"
    r"|coveralls|python-semantic-release|towncrier|pytest-(cov|xdist|randomly|sugar|codspeed|mypy-plugins))"
    r"(?![a-z0-9])[-_.a-z0-9]*",
    re.IGNORECASE,
)
"""Packages for developers that no test needs, and plugins that change how tests run, not whether they
pass."""
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Metadata:
    """Metadata of a distribution."""

    name: str
    version: str
    text: str
    entry_points: str
    needs: tuple[str, ...]
    """`Requires-Dist`, including those of extras."""


@dataclass(frozen=True, slots=True)
class Project:
    """A project read from its directory. Paths are relative to its root, with `/`."""

    name: str
    version: str
    files: Mapping[str, bytes]
    """All files, and the metadata that an editable install adds next to the packages."""
    sources: Mapping[str, str]
    """Modules that changes may touch."""
    tests: frozenset[str]
    """Test files, and other files in their directories."""
    test_files: tuple[str, ...]
    """Those that are passed to pytest."""
    source_root: str
    """Directory for PYTHONPATH: `src`, or empty for the root."""
    requirements: tuple[str, ...]
    """Packages that pip installs to run the tests."""
    options: tuple[str, ...] = ()
    """Options of pytest, from the project's configuration."""

    @property
    def source_patterns(self) -> tuple[str, ...]:
        """Glob patterns of files that a solution may change."""
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
        """The topmost directories with tests only, and test files outside of them."""
        return tuple(sorted({_test_root(path) or path for path in self.tests}))


def read_project(root: Path) -> Project:
    """Reads the project in a directory.

    Raises TaskError if it is not a Python project, has no tests or no package, or is too large.
    """
    if not root.is_dir():
        raise TaskError(
            "is not a directory", field="REPO", received=str(root),
            fix="name a checkout, or an unpacked source distribution",
        )  # fmt: skip
    files = _read_files(root)
    pyproject = _pyproject(files)
    metadata = _metadata(files, pyproject, root)
    options = _pytest_options(files, pyproject)
    names = tuple(options.get("python_files", ())) or _TEST_NAMES
    tests = frozenset(path for path in files if is_test_file(path, names))
    test_files = tuple(sorted(path for path in tests if _is_named(path, names)))
    if not test_files:
        raise TaskError(
            f"holds no tests: no file is called {' or '.join(names)}", field="REPO", received=str(root),
            fix="name a checkout, or a source distribution that contains its tests",
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
        _chosen_tests(test_files, options), source_root, _Requirements(metadata, pyproject, files).find(),
        _import_mode(options),
    )  # fmt: skip


def _read_files(root: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    total = 0
    made = {one.parent for one in root.rglob(STATE)} - {root}  # sets of tasks inside their own project
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if not made.isdisjoint(path.parents):
            continue
        if any(_NOT_OURS.fullmatch(part) and not _DOT_FILES.fullmatch(part) for part in parts):
            continue
        if path.is_symlink() or not path.is_file():
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
    """Metadata from PKG-INFO, which a source distribution has, else from pyproject.toml."""
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
    """The topmost directory of tests above a path; empty if there is none."""
    parts = path.split("/")
    for index, part in enumerate(parts[:-1]):
        if part in _TEST_FOLDERS:
            return "/".join(parts[: index + 1])
    return ""


def is_test_file(path: str, names: Sequence[str] = _TEST_NAMES) -> bool:
    """Whether a path is a test file, or in a directory of tests. `names`: patterns of test files' names."""
    folder = _test_root(path)
    if folder:
        return not path.startswith(("docs/", "examples/"))
    # If every module may contain tests, only those in a directory of tests count.
    is_named = _is_named(path, [name for name in names if name != "*.py"]) or path.endswith("conftest.py")
    return is_named and not path.startswith(("docs/", "examples/", "bench"))


def _is_named(path: str, names: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(PurePosixPath(path).name, name) for name in names)


def _pytest_options(files: Mapping[str, bytes], pyproject: Mapping[str, Any]) -> dict[str, list[str]]:
    """The words of each of pytest's settings, from the first file in pytest's own order."""
    table = pyproject.get("tool", {}).get("pytest", {})
    found = [
        _section(files, "pytest.ini", "pytest"),
        table.get("ini_options", table),
        _section(files, "tox.ini", "pytest"),
        _section(files, "setup.cfg", "tool:pytest"),
    ]
    chosen = next((one for one in found if one), {})
    return {key: value.split() if isinstance(value, str) else value for key, value in chosen.items()}


def _section(files: Mapping[str, bytes], name: str, section: str) -> dict[str, str]:
    """A section of an INI file; empty if it does not parse."""
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(files.get(name, b"").decode(errors="replace"))
    except configparser.Error:
        return {}
    return dict(parser.items(section)) if section in parser else {}


def _chosen_tests(test_files: tuple[str, ...], options: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The test files below `testpaths`, if it matches any; else all."""
    below = tuple(path.rstrip("/") + "/" for path in options.get("testpaths", ()))
    return tuple(path for path in test_files if path.startswith(below)) or test_files


def _import_mode(options: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The import mode of tests in the project's configuration; its other options are ignored."""
    found = re.search(r"--import-mode[= ]+(\w+)", " ".join(options.get("addopts", ())))
    return (f"--import-mode={found[1]}",) if found else ()


class _Requirements:
    """Requirements of the project, and those of its tests from the first source that has any: a dependency
    group, an extra, a requirements file, tox."""

    def __init__(self, metadata: Metadata, pyproject: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        self._own = _plain(metadata.name)
        self._project = pyproject.get("project", {})
        self._groups = pyproject.get("dependency-groups", {})
        self._poetry = pyproject.get("tool", {}).get("poetry", {})
        self._files = files
        self._extras: dict[str, list[str]] = dict(self._project.get("optional-dependencies", {}))
        self._needs: list[str] = list(self._project.get("dependencies", []))
        for name, text in _section(files, "setup.cfg", "options.extras_require").items():
            self._extras.setdefault(name, _lines(text))
        self._needs += _lines(_section(files, "setup.cfg", "options").get("install_requires", ""))
        if not self._needs and not self._extras:
            self._read_headers(metadata.needs)

    def find(self) -> tuple[str, ...]:
        """All requirements, without duplicates."""
        found = [*self._needs, *_of_poetry(self._poetry.get("dependencies", {})), *self._of_tests(), *ALWAYS]
        kept = [one for one in found if not _TOOLS.fullmatch(_name(one)) and _name(one) != self._own]
        return tuple(dict.fromkeys(kept))

    def _of_tests(self) -> list[str]:
        """Test requirements of the first source that has any."""
        for name in _GROUPS:
            if name in self._groups:
                return self._group(name, ())
            if name in self._extras:
                return self._extra(name, ())
            poetry = self._poetry.get("group", {}).get(name, {}).get("dependencies")
            if poetry:
                return _of_poetry(poetry)
        if "dev-dependencies" in self._poetry:
            return _of_poetry(self._poetry["dev-dependencies"])
        for path in _FILES:
            if path in self._files:
                return self._file(path, ())
        deps = _section(self._files, "tox.ini", "testenv").get("deps", "")
        return self._rows(_lines(deps), "tox.ini", ())

    def _group(self, name: str, above: tuple[str, ...]) -> list[str]:
        found: list[str] = []
        for row in self._groups.get(name, []) if name not in above else []:
            if isinstance(row, str):
                found += self._expanded(row)
            elif "include-group" in row:
                found += self._group(row["include-group"], (*above, name))
        return found

    def _extra(self, name: str, above: tuple[str, ...]) -> list[str]:
        rows = self._extras.get(name, []) if name not in above else []
        return [one for row in rows for one in self._expanded(row, (*above, name))]

    def _expanded(self, row: str, above: tuple[str, ...] = ()) -> list[str]:
        """A requirement; one on extras of the project itself is replaced by these."""
        extras = re.match(r"[^\[;]+\[([^\]]*)\]", row)
        if _name(row) != self._own or extras is None:
            return [row]
        return [one for name in extras[1].split(",") for one in self._extra(name.strip(), above)]

    def _file(self, path: str, above: tuple[str, ...]) -> list[str]:
        if path in above or path not in self._files:
            return []
        return self._rows(_lines(self._files[path].decode(errors="replace")), path, (*above, path))

    def _rows(self, rows: Sequence[str], path: str, above: tuple[str, ...]) -> list[str]:
        found: list[str] = []
        for row in rows:
            plain = re.sub(r"^[^:]*:\s+", "", row) if path == "tox.ini" else row
            other = re.match(r"(?:-r|--requirement)\s*=?\s*(\S+)", plain)
            if other:
                folder = PurePosixPath(path).parent
                found += self._file((folder / other[1]).as_posix(), above)
            elif _PACKAGE.match(plain):
                found.append(plain.partition(" --hash")[0].partition(" \\")[0].strip())
        return found

    def _read_headers(self, needs: Sequence[str]) -> None:
        for row in needs:
            extra = re.search(r"\s*(?:;|and)\s*extra\s*==\s*['\"]([^'\"]+)['\"]", row)
            if extra is None:
                self._needs.append(row)
            else:
                self._extras.setdefault(extra[1], []).append(row.replace(extra[0], ""))


def _lines(text: str) -> list[str]:
    rows = (re.sub(r"(^|\s)#.*", "", row).strip() for row in text.splitlines())
    return [row for row in rows if row]


def _of_poetry(table: Mapping[str, Any]) -> list[str]:
    """Poetry's requirements in pip's syntax; carets and tildes become lower bounds."""
    found: list[str] = []
    for name, value in table.items():
        version = (
            value if isinstance(value, str) else value.get("version") if isinstance(value, dict) else None
        )
        is_optional = isinstance(value, dict) and value.get("optional", False)
        if name.lower() == "python" or version is None or is_optional:
            continue
        bound = re.sub(r"^[\^~](?=\d)", ">=", version.strip())
        found.append(name + ("" if bound == "*" else f"=={bound}" if bound[:1].isdigit() else bound))
    return found


def _name(requirement: str) -> str:
    found = _PACKAGE.match(requirement)
    return _plain(found[0]) if found else ""


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
