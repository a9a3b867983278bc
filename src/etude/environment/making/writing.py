"""Writes a verified change as a Harbor task directory.

instruction.md            what does not work
environment/Dockerfile    the project's image, and COPY workspace/
environment/workspace/    the project with the change
tests/test.sh             puts the project's own tests in place, and runs those that decide
tests/hidden/, tests/expected.json, tests/suite.py
tests/exams.json          runs with changed tests, which decide; not shown to what the agent left behind
tests/structure.py, tests/structure.json    of a refactoring: whether it is done, by the text alone
solution/solve.sh         puts the project's own text in place, or what it is to become
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.environment.grading import matches_any
from etude.environment.making.images import ProjectImage
from etude.environment.making.projects import Project
from etude.environment.making.suites import DISK_BYTES, MEMORY_BYTES, PROGRAM
from etude.kit.toml import toml_text
from etude.tasks.exams import EXAMS, ExamSet
from etude.tasks.harbor import SOLVE, WORKSPACE
from etude.tasks.making import structure_inside
from etude.tasks.making.changes import Verified, split_of
from etude.tasks.making.refactoring import write_check
from etude.tasks.making.selection import NOT_CALIBRATED

_CHECK = b"PYTHONPATH= python3 -s /tests/structure.py /tests/structure.json || exit 0\n"
"""For a refactoring: runs before any code of the agent's."""
TEST = f"""#!/bin/sh
# Puts the project's own tests in place and runs those that decide: all must pass.
cd {WORKSPACE} || exit 1
mkdir -p /logs/verifier
rm -rf -- %s
cp -R /tests/hidden/. {WORKSPACE}/
python3 /tests/suite.py /tests/expected.json
"""


@dataclass(frozen=True, slots=True)
class MadeTask:
    """A task that is to be written."""

    project: Project
    image: ProjectImage
    verified: Verified
    exams: ExamSet
    verifier_s: float

    @property
    def id(self) -> str:
        """The task's id, and the name of its directory."""
        return f"{self.project.name.lower()}-{self.verified.change.id}"

    @property
    def failing(self) -> list[str]:
        """Tests that fail in the workspace; none if its code works."""
        return [] if self.verified.change.smell else [one.test for one in self.verified.failures]

    @property
    def workspace(self) -> dict[str, bytes]:
        """The files that the agent sees."""
        change = self.verified.change
        files = dict(self.project.files)
        for path, text in {**change.files, **change.removed_tests}.items():
            files[path] = text.encode()
        return {path: data for path, data in files.items() if data or path not in change.files}


def task_files(made: MadeTask) -> dict[str, bytes]:
    """The files of the task's directory, by path."""
    project, change = made.project, made.verified.change
    expected = {
        "ids": sorted({*(one.test for one in made.verified.failures), *made.verified.passing}),
        "fail_to_pass": sorted(made.failing),
        "paths": list(project.test_files),
        "options": list(project.options),
    }
    files = {
        "instruction.md": made.verified.instruction.rstrip("\n").encode() + b"\n",
        "task.toml": _toml(made).encode(),
        "environment/Dockerfile": f"{made.image.dockerfile}COPY workspace/ {WORKSPACE}/\n".encode(),
        "tests/test.sh": (TEST % shlex.join(project.test_roots)).encode(),
        "tests/suite.py": PROGRAM.read_bytes(),
        "tests/expected.json": json.dumps(expected, indent=1).encode() + b"\n",
        f"tests/{EXAMS}": made.exams.to_text().encode(),
        "solution/solve.sh": SOLVE.encode(),
    }
    if change.smell:
        modules = {
            path: data if path.endswith(".py") else structure_inside.NO_MODULE
            for path, data in made.workspace.items()
            if matches_any(path, project.source_patterns)
        }
        check = write_check(change, modules, project.source_patterns)
        files["tests/structure.py"] = Path(structure_inside.__file__).read_bytes()
        files["tests/structure.json"] = json.dumps(check, indent=1).encode() + b"\n"
        files["tests/test.sh"] = files["tests/test.sh"].replace(b"rm -rf", _CHECK + b"rm -rf", 1)
    files |= below("environment/workspace", made.workspace)
    files |= below("tests/hidden", {path: project.files[path] for path in project.tests})
    solution = {path: text.encode() for path, text in made.verified.reference.items()}
    return files | below("solution/files", solution)


def below(folder: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files with their paths below a folder."""
    return {f"{folder}/{path}": data for path, data in files.items()}


def _toml(made: MadeTask) -> str:
    change = made.verified.change
    facts = {
        "project": made.project.name,
        "version": made.project.version,
        "kind": change.kind,
        "operator": change.operator,
        "split": split_of(change.places[0].path),
        "difficulty": made.verified.difficulty,
        "calibration": NOT_CALIBRATED,
        "num_failing_tests": len(made.failing),
        "num_suspect_lines": made.verified.num_suspect_lines,
        "names_every_call": made.verified.names_every_call,
        "num_open_tests": len(made.exams.open_tests),
    }
    return task_toml(made.id, facts, made.project.source_patterns, made.verifier_s, "exams")


def task_toml(
    name: str,
    facts: Mapping[str, object],
    patterns: Sequence[str],
    verifier_s: float,
    grading: str = "test_sh",
) -> str:
    """The `task.toml` of a task without network. `patterns`: globs of files that a solution may change."""
    return toml_text({
        "schema_version": "1.4",
        "task": {"name": f"etude/{name}"},
        "metadata": {**facts, "etude": {"id": name, "grading": grading, "allowed_paths": patterns}},
        "agent": {"timeout_sec": 1800.0},
        "verifier": {"timeout_sec": round(verifier_s, 1)},
        "environment": {
            "build_timeout_sec": 1800.0, "cpus": 1, "memory_mb": MEMORY_BYTES >> 20,
            "storage_mb": DISK_BYTES >> 20, "network_mode": "no-network",
        },
    })  # fmt: skip
