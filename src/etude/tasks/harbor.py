"""Reads and writes Harbor task directories.

    instruction.md                 the user's instruction
    task.toml                      image, time limits, resources, network: see `harbor_fields`
    environment/Dockerfile         builds the image that the agent works in
    tests/test.sh                  the verifier: writes the reward to /logs/verifier/reward.txt or reward.json
    solution/solve.sh              the reference solution
    steps/NAME/                    one of its steps: instruction.md, tests/, solution/, workdir/

The layout is Harbor's (harborframework.com/docs/tasks). Our extensions are `docker_image = "host"` (the
programs of the sandboxes' host, with the files of `environment/workspace`) and the table [metadata.etude]:
with `grading = "exams"` the task is graded by runs of test.sh with changed tests (`exams`); with
`grading = "values"` by the values that its tests compute, and its directories contain

    environment/workspace/...      what the agent sees, copied to /workspace
    tests/hidden/...               copied to /workspace before the verifier runs
    solution/files/...             copied to /workspace by the reference solution

`user_facts` in that table are facts that a simulated user tells an agent when asked.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from etude.errors import TaskError
from etude.kit.durable import whole_directory
from etude.kit.toml import toml_text
from etude.records import Task, TaskStep, TestScript
from etude.tasks.archives import directory_error, pack_directories
from etude.tasks.exams import EXAMS, read_exams
from etude.tasks.harbor_fields import (
    StepTable,
    TaskTable,
    at_step,
    check_fields,
    check_graded_by_values,
    field_error,
)
from etude.tasks.harbor_machines import check_host, health_check, read_machine, read_scripts

WORKSPACE = "/workspace"
REWARD_PATH = "/logs/verifier/reward.txt"
EVERYWHERE = "/**"
"""In `allowed_paths`: the whole root of an image, except programs and settings (`environment.carrying`)."""

_NOT_READ = (
    "**/.harborignore",
    "trajectory.json",
    "steps/*/trajectory.json",
    "environment/docker-compose.yaml",
)
"""Patterns of Harbor's files that change the meaning of a task, and are not supported."""
_MARKS = ("task.toml", "instruction.md", "tests/test.sh")
"""A directory with one of these files is intended as a task."""
_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
_DOCKERFILE = f"""FROM python:3.11-slim
RUN pip install --no-cache-dir pytest
WORKDIR {WORKSPACE}
COPY workspace/ {WORKSPACE}/
"""
SOLVE = f"""#!/bin/sh
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
    """Writes `task` as a Harbor task directory, atomically.

    Raises TaskError if the directory exists, if a path leaves the workspace, for metadata that TOML cannot
    represent, and for a task that is graded by a script instead of hidden tests.
    """
    if task.verifier is not None:
        raise TaskError("is graded by a script", field="task", received=task.id, fix="copy its directory")
    if directory.exists():
        raise directory_error(directory, "directory", "exists already", "choose a new directory")
    files = {
        "instruction.md": task.instruction + "\n",
        "task.toml": _toml(task),
        "environment/Dockerfile": _DOCKERFILE,
        "tests/test.sh": _TEST % shlex.join(task.hidden_test_paths),
        "solution/solve.sh": SOLVE,
    }
    folders = {
        "environment/workspace": task.files,
        "tests/hidden": task.hidden_files,
        "solution/files": task.solution_files,
    }
    for folder, contents in folders.items():
        files |= {f"{folder}/{_inside(path, folder)}": text for path, text in contents.items()}
    write_files({path: _encoded(text, path) for path, text in files.items()}, directory, list(folders))


def write_files(files: Mapping[str, bytes], directory: Path, folders: Sequence[str] = ()) -> None:
    """Writes a directory with these files, atomically. `folders`: subfolders to create in any case. Raises
    OSError."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with whole_directory(directory, sync=False) as whole:
        for folder in folders:
            (whole / folder).mkdir(parents=True)
        for path, data in files.items():
            target = whole / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            if path.endswith(".sh") and path.count("/") == 1:
                target.chmod(0o755)


def read_harbor(directory: Path, host_env: Sequence[str] = ()) -> Task:
    """Reads a Harbor task directory. Round trip: equal to the written task, except for `directory`.

    `host_env`: names of this process's variables that the task may read. Raises TaskError, with the file or
    key and a fix, for a missing or unreadable file, invalid TOML, a value of the wrong type, an unsupported
    field, a path or link that leads out of the directory, or a file whose contents or name are not UTF-8.
    """
    try:
        return _read(directory, host_env)
    except OSError as error:
        message, fix = f"cannot be read: {error.strerror}", "correct it, or its permissions"
        raise directory_error(directory, str(error.filename), message, fix) from error


def read_id(directory: Path) -> str:
    """Reads only the id of a task. Raises TaskError, OSError."""
    return _id(_read_fields(directory), directory)


def _id(fields: TaskTable, directory: Path) -> str:
    return fields.metadata.etude.id or (fields.task.name if fields.task is not None else directory.name)


def _read(directory: Path, host_env: Sequence[str]) -> Task:
    fields = _read_fields(directory)
    own, metadata = fields.metadata.etude, fields.metadata.model_extra or {}
    instruction = "" if fields.steps else _instruction(directory, "instruction.md")
    task = Task(
        id=_id(fields, directory),
        instruction=instruction,
        files={},
        allowed_paths=_paths(("**",) if own.allowed_paths is None else own.allowed_paths, "allowed_paths"),
        test_paths=_paths(own.test_paths, "test_paths"),
        metadata={key: value for key, value in metadata.items() if isinstance(value, str | int | float)},
        user_facts=tuple(own.user_facts),
        directory=str(directory),
    )
    for pattern in _NOT_READ:
        for found in directory.glob(pattern):
            name = found.relative_to(directory).as_posix()
            raise directory_error(directory, name, "is not supported", "remove it")
    if own.grading != "values":
        task = replace(task, instruction=_without_canary(task.instruction))
        return _with_scripts(task, fields, directory, host_env)
    check_graded_by_values(fields)
    _text(directory, "tests/test.sh")
    hidden = _tree(directory, "tests/hidden")
    tests = own.hidden_test_paths
    if tests is None:
        tests = [path for path in hidden if PurePosixPath(path).match("test_*.py")]
    return replace(
        task,
        files=_tree(directory, "environment/workspace"),
        hidden_files=hidden,
        solution_files=_tree(directory, "solution/files"),
        hidden_test_paths=_paths(tests, "hidden_test_paths"),
    )


def _with_scripts(task: Task, fields: TaskTable, directory: Path, host_env: Sequence[str]) -> Task:
    """Completes a task that is graded by `tests/test.sh`: its machine, verifier, solution and steps."""
    own = fields.metadata.etude
    machine = read_machine(fields, host_env)
    if not machine.docker_image and not (directory / "environment/Dockerfile").is_file():
        field, message = "environment.docker_image", "names no image, and there is no environment/Dockerfile"
        raise directory_error(directory, f"task.toml: {field}", message, "add one of them")
    check_host(machine, "environment")
    allowed_paths = task.allowed_paths
    if not machine.is_host and own.allowed_paths is None:
        allowed_paths = ("**", EVERYWHERE)
    if machine.is_host and any(path.startswith("/") for path in allowed_paths):
        raise TaskError(
            "needs an image", field="task.toml: metadata.etude.allowed_paths", received=list(allowed_paths),
            fix="remove absolute paths: on the host only the working directory changes",
        )  # fmt: skip
    files = _tree(directory, "environment/workspace") if machine.is_host else {}
    task = replace(task, files=files, machine=machine, allowed_paths=allowed_paths)
    if not fields.steps:
        verifier, solution = read_scripts(fields, None, directory, host_env)
        if own.grading == "exams":
            verifier = _with_exams(verifier, directory)
        return replace(task, verifier=verifier, solution=solution)
    if own.grading == "exams":
        raise field_error("metadata.etude.grading", "cannot have steps", "exams", 'use "test_sh"')
    steps = tuple(_read_step(fields, step, directory, host_env) for step in fields.steps)
    task = replace(task, steps=steps, step_rewards=fields.multi_step_reward_strategy or "mean")
    return replace(task.at_step(0), steps=steps)


def _with_exams(verifier: TestScript, directory: Path) -> TestScript:
    """The verifier with the task's exams, whose file is not packed into the archive. Raises TaskError."""
    if verifier.machine is not None:
        fix = 'use "shared": exams run over the changes of the agent'
        raise field_error("verifier.environment_mode", "cannot be used with exams", "separate", fix)
    text = _text(directory, f"tests/{EXAMS}")
    read_exams(text)
    archive = pack_directories([directory / "tests"], "test.sh", without=EXAMS)
    return replace(verifier, archive=archive, exams=text)


def _read_step(fields: TaskTable, step: StepTable, directory: Path, host_env: Sequence[str]) -> TaskStep:
    """Reads one step of a task. Raises TaskError."""
    top = directory / "steps" / step.name
    if not top.resolve().is_relative_to(directory.resolve()):
        message = "leads out of the task directory"
        raise directory_error(top, f"steps/{step.name}", message, "put the directory itself there")
    try:
        verifier, solution = read_scripts(fields, step, directory, host_env)
    except TaskError as error:
        field = f"{error.field} (step {step.name!r})"
        raise TaskError(error.message, field=field, received=error.received, fix=error.fix) from error
    workdir, asked = top / "workdir", step.min_reward
    return TaskStep(
        step.name,
        _without_canary(_instruction(directory, f"steps/{step.name}/instruction.md")),
        verifier,
        solution,
        pack_directories([workdir], "setup.sh", needs_script=False) if workdir.is_dir() else b"",
        (workdir / "setup.sh").is_file(),
        at_step(fields, step).agent.timeout_sec or 0.0,
        health_check(step.healthcheck),
        {} if asked is None else asked if isinstance(asked, dict) else {"reward": asked},
    )


def _instruction(directory: Path, name: str) -> str:
    text = _text(directory, name)
    if not _without_canary(text).strip():
        raise directory_error(directory, name, "is empty", "say what the agent is to do")
    return text.removesuffix("\n")


def _without_canary(text: str) -> str:
    """An instruction without the canary lines at its beginning, which mark a benchmark's data."""
    lines = text.split("\n")
    while lines and (not lines[0].strip() or _CANARY.fullmatch(lines[0].strip())):
        lines.pop(0)
    return "\n".join(lines)


def find_directories(directory: Path, field: str) -> list[Path]:
    """The task directories below `directory`, including those intended as tasks without a task.toml. `field`:
    of errors. Raises TaskError if there are none."""
    if not directory.is_dir():
        raise directory_error(directory, field, "no such directory", "name one that holds tasks")
    folders = sorted(directory.iterdir())
    found = any((path / "task.toml").is_file() for path in folders)
    if not found and (directory / "task.toml").is_file():
        fix = "name its parent directory"
        raise directory_error(directory, field, "is a task itself, not a set of them", fix)
    if not found:
        message = "holds no task: no directory below it has a task.toml"
        raise directory_error(directory, field, message, "see an example from `etude tasks export`")
    return [path for path in folders if any((path / name).is_file() for name in _MARKS)]


def _toml(task: Task) -> str:
    if "etude" in task.metadata:
        raise TaskError("is reserved for Étude", field="metadata.etude", fix="rename it")
    for key, value in task.metadata.items():
        if not isinstance(value, str | int | float):
            fix = "leave it out"
            raise TaskError(
                "must be text, a number or a bool", field=f"metadata.{key}", received=value, fix=fix
            )
    own: dict[str, Any] = {"id": task.id, "grading": "values"}
    for name in ("allowed_paths", "test_paths", "hidden_test_paths"):
        own[name] = [_inside(entry, name) for entry in getattr(task, name)]
    if task.user_facts:
        own["user_facts"] = task.user_facts
    return toml_text({
        "schema_version": "1.1",
        "task": {"name": f"etude/{task.id}"},
        "metadata": {**task.metadata, "etude": own},
        "agent": {"timeout_sec": 600.0},
        "verifier": {"timeout_sec": 60.0},
        "environment": {"build_timeout_sec": 600.0, "cpus": 1, "memory_mb": 512, "storage_mb": 1024},
    })  # fmt: skip


def _encoded(text: str, field: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TaskError(
            "is not Unicode text", field=field, received=str(error), fix="use only text files"
        ) from error


def _inside(path: str, field: str) -> str:
    """Returns `path` if it is a plain relative path without `..`. Raises TaskError."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\0" in path:
        raise TaskError(
            "leads out of the workspace", field=field, received=path, fix="use a relative path without .."
        )
    if path != str(pure) or path == ".":
        raise TaskError("is not a plain path", field=field, received=path, fix=f"write {str(pure)!r}")
    return path


def _text(directory: Path, name: str) -> str:
    path = directory / name
    if not path.is_file():
        raise directory_error(directory, name, "file is missing", f"add {name}")
    if not path.resolve().is_relative_to(directory.resolve()):
        target = path.readlink() if path.is_symlink() else path.resolve()
        message = "is a link that leads out of the task directory"
        raise directory_error(target, name, message, "put the file itself there")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(
            "is not UTF-8 text", field=name, received=str(error), fix="use only text files"
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


def _read_fields(directory: Path) -> TaskTable:
    try:
        return check_fields(tomllib.loads(_text(directory, "task.toml")))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(
            "is not TOML", field="task.toml", received=str(error), fix="correct the syntax"
        ) from error


def _paths(given: Sequence[str], key: str) -> tuple[str, ...]:
    field = f"task.toml: metadata.etude.{key}"
    rooted = "/" if key == "allowed_paths" else "\0"
    return tuple(
        "/" + _inside(entry[1:], field) if entry.startswith(rooted) else _inside(entry, field)
        for entry in given
    )
