"""Harbor task directories: written from a task, and read back.

    instruction.md                 the user's words
    task.toml                      name, time limits, resources, facts ([metadata], [metadata.etude])
    environment/Dockerfile         image with Python and pytest
    environment/workspace/...      what the agent sees, copied to /workspace
    tests/test.sh                  the verifier: writes 1 or 0 to /logs/verifier/reward.txt
    tests/hidden/...               laid over /workspace before the verifier runs
    solution/solve.sh              the reference fix
    solution/files/...             copied to /workspace by it

The layout is Harbor's (harborframework.com/docs/tasks); the folders `workspace`, `hidden` and `files` and
the table [metadata.etude] are ours; its `user_facts` are what a simulated user tells an agent who asks. Of
directories by others, tests lie beside `test.sh`, and the files that an image builds are not known: they
read as tasks without files.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from etude.errors import TaskError
from etude.kit.durable import whole_directory
from etude.records import Task

WORKSPACE = "/workspace"
REWARD_PATH = "/logs/verifier/reward.txt"

_DOCKERFILE = f"""FROM python:3.11-slim
RUN pip install --no-cache-dir pytest
WORKDIR {WORKSPACE}
COPY workspace/ {WORKSPACE}/
"""
_SOLVE = f"""#!/bin/sh
set -e
cp -R "$(dirname "$0")/files/." {WORKSPACE}/
"""
_TEST = f"""#!/bin/sh
cp -R "$(dirname "$0")/hidden/." {WORKSPACE}/
mkdir -p {PurePosixPath(REWARD_PATH).parent}
cd {WORKSPACE}
if PYTHONPATH={WORKSPACE} python -m pytest -q -p no:cacheprovider %s; then
    echo 1 > {REWARD_PATH}
else
    echo 0 > {REWARD_PATH}
fi
"""


def write_harbor(task: Task, directory: Path) -> None:
    """Writes `task` as a Harbor task directory; `directory` appears only when whole.

    Raises TaskError if the directory exists, if a path leaves the workspace, or for metadata that TOML
    cannot hold.
    """
    if directory.exists():
        raise TaskError(
            "exists already", field="directory", received=str(directory), fix="choose a new directory"
        )
    files = {
        "instruction.md": task.instruction + "\n",
        "task.toml": _toml(task),
        "environment/Dockerfile": _DOCKERFILE,
        "tests/test.sh": _TEST % shlex.join(task.hidden_test_paths),
        "solution/solve.sh": _SOLVE,
    }
    for folder, contents in (
        ("environment/workspace", task.files),
        ("tests/hidden", task.hidden_files),
        ("solution/files", task.solution_files),
    ):
        for path, text in contents.items():
            files[f"{folder}/{_inside(path, folder)}"] = text
    directory.parent.mkdir(parents=True, exist_ok=True)
    with whole_directory(directory, sync=False) as whole:
        for folder in ("environment/workspace", "tests/hidden", "solution/files"):
            (whole / folder).mkdir(parents=True)
        for path, text in files.items():
            target = whole / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(_encoded(text, path))
            if path.endswith(".sh") and path.count("/") == 1:
                target.chmod(0o755)


def read_harbor(directory: Path) -> Task:
    """Reads a Harbor task directory. Round trip: equal to what was written, but for `directory`.

    Raises TaskError, with the file or key and a fix, for a missing file, broken TOML, a value of the
    wrong type, a path or link that leads out of the directory, or a file that is not UTF-8 text, by its
    contents or its name.
    """
    instruction = _text(directory, "instruction.md").removesuffix("\n")
    table = _parse_toml(_text(directory, "task.toml"))
    _text(directory, "tests/test.sh")
    metadata = _table(table, "metadata", "metadata")
    ours = _table(metadata, "etude", "metadata.etude")
    facts = {key: value for key, value in metadata.items() if isinstance(value, str | int | float | bool)}
    hidden = _tree(directory, "tests/hidden")
    if not ours:
        hidden = {
            f"tests/{path}": text for path, text in _tree(directory, "tests").items() if path != "test.sh"
        }
    tests = tuple(path for path in hidden if PurePosixPath(path).match("test_*.py"))
    return Task(
        id=_task_id(table, ours, directory),
        instruction=instruction,
        files=_tree(directory, "environment/workspace"),
        hidden_files=hidden,
        solution_files=_tree(directory, "solution/files"),
        allowed_paths=_paths(ours, "allowed_paths", ("**",)),
        test_paths=_paths(ours, "test_paths", ()),
        hidden_test_paths=_paths(ours, "hidden_test_paths", tests),
        metadata=facts,
        user_facts=_sentences(ours, "user_facts"),
        directory=str(directory),
    )


def read_tasks(directory: Path, field: str) -> list[Task]:
    """The tasks of all Harbor directories below `directory`, which `field` names in errors.

    Raises TaskError where there is none, for one that cannot be read, and for an id that comes twice.
    """
    if not directory.is_dir():
        raise TaskError(
            "no such directory", field=field, received=str(directory), fix="name one that holds tasks"
        )
    found = [path for path in sorted(directory.iterdir()) if (path / "task.toml").is_file()]
    if not found:
        raise TaskError(
            "holds no task: no directory below it has a task.toml",
            field=field,
            received=str(directory),
            fix="`etude tasks export` shows what one looks like",
        )
    tasks = [read_harbor(path) for path in found]
    num_of_id = Counter(task.id for task in tasks)
    for path, task in zip(found, tasks, strict=True):
        if num_of_id[task.id] > 1:
            raise TaskError(
                f"another task of {field} has this id",
                field=f"{path / 'task.toml'}: id",
                received=task.id,
                fix="give each its own",
            )
    return tasks


def _toml(task: Task) -> str:
    lines = [
        'schema_version = "1.1"',
        "",
        "[task]",
        f"name = {_quoted('etude/' + task.id)}",
        "",
        "[metadata]",
    ]
    if "etude" in task.metadata:
        raise TaskError("is the name of a table of ours", field="metadata.etude", fix="name it otherwise")
    for key, value in task.metadata.items():
        lines.append(f"{_quoted(key)} = {_value(value, f'metadata.{key}')}")
    lines += ["", "[metadata.etude]", f"id = {_quoted(task.id)}"]
    for name in ("allowed_paths", "test_paths", "hidden_test_paths"):
        entries: Sequence[str] = getattr(task, name)
        lines.append(f"{name} = [{', '.join(_quoted(_inside(entry, name)) for entry in entries)}]")
    if task.user_facts:
        lines.append(f"user_facts = [{', '.join(_quoted(fact) for fact in task.user_facts)}]")
    lines += ["", "[agent]", "timeout_sec = 600.0", "", "[verifier]", "timeout_sec = 60.0"]
    lines += [
        "",
        "[environment]",
        "build_timeout_sec = 600.0",
        "cpus = 1",
        "memory_mb = 512",
        "storage_mb = 1024",
    ]
    return "\n".join(lines) + "\n"


def _value(value: str | int | float | bool, field: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return _quoted(value)
    raise TaskError("must be text, a number or a bool", field=field, received=value, fix="leave it out")


def _quoted(text: str) -> str:
    """A TOML basic string. JSON escapes all but DEL as TOML wants it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _encoded(text: str, field: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TaskError(
            "is not Unicode text", field=field, received=str(error), fix="only text files"
        ) from error


def _inside(path: str, field: str) -> str:
    """`path`, if it is a plain relative path that stays below where it starts."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\0" in path:
        raise TaskError(
            "leads out of the workspace", field=field, received=path, fix="a relative path without .."
        )
    if path != str(pure) or path == ".":
        raise TaskError("is not a plain path", field=field, received=path, fix=f"write {str(pure)!r}")
    return path


def _text(directory: Path, name: str) -> str:
    path = directory / name
    if not path.is_file():
        raise TaskError("file is missing", field=name, received=str(directory), fix=f"add {name}")
    if not path.resolve().is_relative_to(directory.resolve()):
        raise TaskError(
            "is a link that leads out of the task directory",
            field=name,
            received=str(path.readlink()) if path.is_symlink() else str(path.resolve()),
            fix="put the file itself there",
        )
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(
            "is not UTF-8 text", field=name, received=str(error), fix="only text files"
        ) from error


def _tree(directory: Path, folder: str) -> dict[str, str]:
    """Path below `folder` -> text, sorted; empty where there is no such folder."""
    top = directory / folder
    paths = sorted(
        path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_symlink() or path.is_file()
    )
    for path in paths:
        _encoded(path, f"a name in {folder}")
    return {path: _text(directory, f"{folder}/{path}") for path in paths}


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TaskError(
            "is not TOML", field="task.toml", received=str(error), fix="correct the syntax"
        ) from error


def _table(table: Mapping[str, Any], key: str, field: str) -> Mapping[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise TaskError(
            "must be a table", field=f"task.toml: {field}", received=value, fix=f"write [{field}]"
        )
    return value


def _task_id(table: Mapping[str, Any], ours: Mapping[str, Any], directory: Path) -> str:
    name = ours.get("id", _table(table, "task", "task").get("name", directory.name))
    if not isinstance(name, str) or not name:
        raise TaskError(
            "must be text", field="task.toml: task.name", received=name, fix='"organisation/name"'
        )
    return name


def _sentences(ours: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = ours.get(key, ())
    if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
        raise TaskError(
            "must be a list of sentences",
            field=f"task.toml: metadata.etude.{key}",
            received=value,
            fix='for example ["Amounts are in cents."]',
        )
    return tuple(value)


def _paths(ours: Mapping[str, Any], key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    value = ours.get(key, default)
    field = f"task.toml: metadata.etude.{key}"
    if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
        raise TaskError("must be a list of paths", field=field, received=value, fix='for example ["lib/**"]')
    return tuple(_inside(entry, field) for entry in value)
