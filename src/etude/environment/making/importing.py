"""Imports rows of solved issues, in SWE-bench's format, as Harbor task directories.

    row ── repository at base_commit, from a clone on this machine ──> environment/workspace
        ── patch, applied ─────────────────────────────────────────> solution/
        ── test_patch, applied; FAIL_TO_PASS and PASS_TO_PASS ─────> tests/
        ── problem_statement ──────────────────────────────────────> instruction.md

Nothing of the repository runs here or is fetched: `etude tasks check` verifies the tasks.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import pyarrow.parquet as parquet
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from etude.environment.making.suites import PROGRAM
from etude.environment.making.writing import TEST, below, task_toml
from etude.environment.origins import repository_template
from etude.errors import ConfigError, ResourceError, TaskError
from etude.kit.durable import make_directory, read_record, write_json
from etude.kit.git import git_fault, run_git
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.base_sources import find_base
from etude.sandbox.images.image_store import ImageStore
from etude.tasks.harbor import WORKSPACE, write_files

_MOST_CHARS = 200
"""Length limit of a name that becomes a path."""
_VERIFIER_S = 1800.0
_REPORT = "report.json"
_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"

Files = Mapping[str, bytes]


def _listed(ids: object) -> object:
    try:
        return json.loads(ids) if isinstance(ids, str) else ids
    except ValueError:
        raise ValueError("is neither a list nor one as JSON") from None


TestIds = Annotated[list[str], BeforeValidator(_listed)]


class Row(BaseModel):
    """One solved issue; further columns are ignored."""

    instance_id: str = Field(pattern=_NAME, max_length=_MOST_CHARS)
    repo: str = Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=_MOST_CHARS
    )
    base_commit: str = Field(pattern="^[0-9a-f]{7,64}$")
    problem_statement: str = Field(min_length=1)
    patch: str = Field(min_length=1)
    test_patch: str = Field(min_length=1)
    fail_to_pass: TestIds = Field(alias="FAIL_TO_PASS", min_length=1)
    pass_to_pass: TestIds = Field(alias="PASS_TO_PASS")
    docker_image: str | None = Field(default=None, pattern="^[!-~]+$", max_length=_MOST_CHARS)
    """The base of its image; overrides the one for all rows."""


@dataclass(slots=True)
class ImportReport:
    """The result of an import."""

    written: list[str] = field(default_factory=list[str])
    """Names of task directories."""
    rejects: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    """For each row without a task: its id or position, and the reason."""


class RejectedRowError(ValueError):
    """The reason why a row is rejected: a kind, a colon, the details."""


async def import_rows(
    rows: Path, repositories: Path, out: Path, store: ImageStore, bases: Mapping[str, str], image: str | None
) -> ImportReport:
    """Writes a task directory below `out` for each row of a JSONL or parquet file, and adds the result to
    `report.json`, under the name of the file. An existing directory with the same files counts as written.

    `image`: base image of rows that name none. Raises ConfigError for a file that cannot be read.
    """
    report = ImportReport()
    for place, raw in await asyncio.to_thread(lambda: list(_read_rows(rows))):
        named = raw.get("instance_id") if isinstance(raw, dict) else None
        try:
            row = _parse(raw)
            base = await _find_image(row.docker_image or image, store, bases)
            files = await _files_of(row, base, repositories)
            taken = row.instance_id in (_REPORT, *report.written)
            if taken or not await asyncio.to_thread(_write, files, out / row.instance_id):
                raise RejectedRowError("directory: its name is taken")
        except (RejectedRowError, OSError, UnicodeError, RecursionError) as error:
            name = named[:_MOST_CHARS] if named and isinstance(named, str) else place
            reason = f"{error}" if isinstance(error, RejectedRowError) else f"row: {error}"
            report.rejects.append({"row": _printable(name), "reason": _printable(reason)})
        else:
            report.written.append(row.instance_id)
    await asyncio.to_thread(make_directory, out)
    reports = read_record(out / _REPORT) | {str(rows): asdict(report)}
    await asyncio.to_thread(write_json, out / _REPORT, reports)
    return report


def _write(files: Files, target: Path) -> bool:
    """Writes a task directory, unless an earlier import wrote the same; False if it exists with other
    contents. `task.toml` is not compared, because calibration extends it."""
    if not target.exists():
        write_files(files, target)
        return True
    places = {target / path: data for path, data in files.items() if path != "task.toml"}
    return all(place.is_file() and place.read_bytes() == data for place, data in places.items())


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _read_rows(path: Path) -> Iterator[tuple[str, object]]:
    """(position, row) of each row; a line that is not JSON is a string. Raises ConfigError."""
    try:
        if path.suffix == ".parquet":
            for number, row in enumerate(parquet.read_table(path).to_pylist(), start=1):
                yield f"row {number}", row
            return
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if line.strip():
                yield f"line {number}", _json(line)
    except (OSError, ValueError) as error:
        fix = "name a file of JSON lines, or a .parquet"
        raise ConfigError(f"cannot be read: {error}", field="ROWS", received=str(path), fix=fix) from error


def _json(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line


def _parse(raw: object) -> Row:
    if not isinstance(raw, dict):
        raise RejectedRowError("row: is no JSON object")
    try:
        return Row.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "row"
        said = first["msg"].removeprefix("Value error, ")
        raise RejectedRowError(f"{name}: {said[:1].lower()}{said[1:]}") from error


async def _find_image(name: str | None, store: ImageStore, bases: Mapping[str, str]) -> str:
    if name is None:
        raise RejectedRowError("image: the row has no docker_image, and --image names none")
    try:
        await find_base(name, store, bases)
    except (TemplateError, TaskError, ResourceError) as error:
        raise RejectedRowError(f"image: {error}") from error
    return name


async def _files_of(row: Row, base: str, repositories: Path) -> dict[str, bytes]:
    """The files of the row's task directory."""
    owner, _, name = row.repo.partition("/")
    places = [repositories / place for place in (row.repo, f"{owner}__{name}", name, f"{name}.git")]
    clone = next((place for place in places if place.is_dir()), None)
    if clone is None:
        raise RejectedRowError(f"repository: there is no {row.repo} below {repositories}")
    try:
        template = await repository_template(clone, row.base_commit)
    except (ConfigError, ResourceError) as error:
        raise RejectedRowError(f"commit: {error}") from error
    before = template.contents
    solution = await asyncio.to_thread(_apply, row.patch, before, "patch")
    tests = await asyncio.to_thread(_apply, row.test_patch, before, "test_patch")
    ids = sorted({*row.fail_to_pass, *row.pass_to_pass})
    paths = sorted({test.partition("::")[0] for test in ids})
    tests = {path: before[path] for path in paths if path in before} | tests
    for path in paths:
        if not path.endswith(".py") or tests.get(path) is None:
            raise RejectedRowError(f"tests: no file of pytest's is named by {path}")
    roots = [f"{WORKSPACE}/src"] if any(path.startswith("src/") for path in before) else []
    env = f"PYTHONPATH={':'.join([*roots, WORKSPACE])} PYTHONDONTWRITEBYTECODE=1"
    dockerfile = f"FROM {base}\nENV {env}\nWORKDIR {WORKSPACE}\nCOPY workspace/ {WORKSPACE}/\n"
    expected = {"ids": ids, "fail_to_pass": sorted(row.fail_to_pass), "paths": paths, "options": []}
    facts = {"repo": row.repo, "base_commit": row.base_commit, "num_failing_tests": len(row.fail_to_pass)}
    toml = task_toml(row.instance_id, facts, ("**",), _VERIFIER_S)
    return {
        "instruction.md": row.problem_statement.rstrip("\n").encode() + b"\n",
        "task.toml": toml.encode(),
        "environment/Dockerfile": dockerfile.encode(),
        "tests/test.sh": (TEST % shlex.join(sorted(tests))).encode(),
        "tests/suite.py": PROGRAM.read_bytes(),
        "tests/expected.json": json.dumps(expected, indent=1).encode() + b"\n",
        "solution/solve.sh": _solve(solution).encode(),
        **below("environment/workspace", before),
        **below("tests/hidden", {path: data for path, data in tests.items() if data is not None}),
        **below("solution/files", {path: data for path, data in solution.items() if data is not None}),
    }


def _apply(patch: str, before: Files, name: str) -> dict[str, bytes | None]:
    """Changes of a patch: path -> new contents, or None for a removed file."""
    with tempfile.TemporaryDirectory(prefix="etude-import-") as place:
        folder = Path(place, "workspace")
        write_files(before, folder)
        try:
            run_git(folder, "apply", "--whitespace=nowarn", "-", stdin=f"{patch}\n".encode(), alone=True)
        except subprocess.CalledProcessError as error:
            raise RejectedRowError(f"{name}: does not apply: {git_fault(error)}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RejectedRowError(f"{name}: git apply: {error}") from error
        found = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
        if any(path.is_symlink() for path in found):
            raise RejectedRowError(f"{name}: makes a symbolic link")
        after = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
    changed = {path: data for path, data in after.items() if before.get(path) != data}
    return {**changed, **dict.fromkeys(before.keys() - after.keys())}


def _solve(solution: Mapping[str, bytes | None]) -> str:
    lines = ["#!/bin/sh", "set -e"]
    gone = sorted(f"{WORKSPACE}/{path}" for path, data in solution.items() if data is None)
    if gone:
        lines.append(f"rm -f -- {shlex.join(gone)}")
    if any(data is not None for data in solution.values()):
        lines.append(f'cp -R "$(dirname "$0")/files/." {WORKSPACE}/')
    return "\n".join(lines) + "\n"
