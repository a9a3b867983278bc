"""Which packages a project's tests need, by what the project itself says in one of the usual places."""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

ALWAYS = ("pytest",)
_GROUPS = ("tests", "test", "testing", "dev")
_FILES = tuple(
    form.format(name)
    for name in ("tests", "test", "testing", "dev")
    for form in ("requirements/{}.txt", "requirements/{}.in", "requirements-{}.txt", "{}-requirements.txt")
)
_TOOLS = re.compile(
    r"(pre-commit|mypy|pyright|ruff|black|isort|flake8|pylint|tox|nox|sphinx|furo|twine|build|bandit|codecov"
    r"|coveralls|python-semantic-release|towncrier|pytest-(cov|xdist|randomly|sugar|codspeed|mypy-plugins))"
    r"(?![a-z0-9])[-_.a-z0-9]*",
    re.IGNORECASE,
)
"""Of people who develop a project, and of no test; or plugins that change how tests run, not whether they
pass."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a distribution says of itself."""

    name: str
    version: str
    text: str
    entry_points: str
    needs: tuple[str, ...]
    """`Requires-Dist`, those of extras included."""


def find_requirements(
    metadata: Metadata, pyproject: Mapping[str, Any], files: Mapping[str, bytes]
) -> tuple[str, ...]:
    """What the project needs to run, and what the first of these adds that names test requirements: a
    dependency group, an extra, a requirements file, tox."""
    finder = _Finder(metadata, pyproject, files)
    found = [*finder.runtime(), *finder.of_tests(), *ALWAYS]
    kept = [one for one in found if not _TOOLS.fullmatch(_name(one)) and _name(one) != _plain(metadata.name)]
    return tuple(dict.fromkeys(kept))


class _Finder:
    def __init__(self, metadata: Metadata, pyproject: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        self._own = _plain(metadata.name)
        self._project = pyproject.get("project", {})
        self._groups = pyproject.get("dependency-groups", {})
        self._poetry = pyproject.get("tool", {}).get("poetry", {})
        self._files = files
        self._extras: dict[str, list[str]] = dict(self._project.get("optional-dependencies", {}))
        self._needs: list[str] = list(self._project.get("dependencies", []))
        setup = _parse_ini(files, "setup.cfg")
        for name, text in setup.items("options.extras_require") if "options.extras_require" in setup else []:
            self._extras.setdefault(name, _lines(text))
        self._needs += _lines(setup.get("options", "install_requires", fallback=""))
        if not self._needs and not self._extras:
            self._read_headers(metadata.needs)

    def runtime(self) -> list[str]:
        """Without any extra."""
        return [*self._needs, *_of_poetry(self._poetry.get("dependencies", {}))]

    def of_tests(self) -> list[str]:
        """Of the first place that has any."""
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
        tox = _parse_ini(self._files, "tox.ini")
        return self._rows(_lines(tox.get("testenv", "deps", fallback="")), "tox.ini", ())

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
        """A requirement; in the place of one on extras of the project itself, those."""
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
            elif _NAME.match(plain):
                found.append(plain.partition(" --hash")[0].partition(" \\")[0].strip())
        return found

    def _read_headers(self, needs: Sequence[str]) -> None:
        for row in needs:
            extra = re.search(r"\s*(?:;|and)\s*extra\s*==\s*['\"]([^'\"]+)['\"]", row)
            if extra is None:
                self._needs.append(row)
            else:
                self._extras.setdefault(extra[1], []).append(row.replace(extra[0], ""))


def _parse_ini(files: Mapping[str, bytes], name: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(files.get(name, b"").decode(errors="replace"))
    except configparser.Error:
        return configparser.RawConfigParser()
    return parser


def _lines(text: str) -> list[str]:
    rows = (re.sub(r"(^|\s)#.*", "", row).strip() for row in text.splitlines())
    return [row for row in rows if row]


def _of_poetry(table: Mapping[str, Any]) -> list[str]:
    """Requirements in pip's words; carets and tildes become a lower bound."""
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
    found = _NAME.match(requirement)
    return _plain(found[0]) if found else ""


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
