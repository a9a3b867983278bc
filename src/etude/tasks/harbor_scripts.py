"""The scripts of a Harbor task directory: what judges a task or one of its steps, and what solves it.

tests/test.sh      steps/NAME/tests/       laid over it, for this step
solution/solve.sh  steps/NAME/solution/    in its place, for this step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from etude.errors import TaskError
from etude.records import SolutionScript, TaskMachine, TestScript
from etude.tasks.archives import pack_directories
from etude.tasks.harbor_fields import StepTable, TaskTable, at_step
from etude.tasks.harbor_machines import read_solution, read_verifier


def read_scripts(
    fields: TaskTable, step: StepTable | None, directory: Path, host_env: Sequence[str]
) -> tuple[TestScript, SolutionScript | None]:
    """The verifier and the reference solution, if there is one. Raises TaskError."""
    own = [] if step is None else [f"steps/{step.name}"]
    effective = at_step(fields, step)
    solution = None
    for top in (directory / place / "solution" for place in (*own, ".")):
        if solution is None and top.is_dir():
            solution = read_solution(effective, pack_directories([top], "solve.sh"), host_env)
    verifier = read_verifier(effective, host_env)
    machine = verifier.machine
    if machine is not None:
        places = [(fields.verifier.environment, "tests")]
        if step is not None:
            places.insert(0, (step.verifier.environment, f"steps/{step.name}/tests"))
        for environment, place in places:
            if (directory / place / "docker-compose.yaml").is_file():
                field = f"{place}/docker-compose.yaml"
                raise TaskError("is not supported", field=field, received=str(directory), fix="remove it")
            if environment is not None and environment.docker_image:
                machine = replace(machine, docker_image=environment.docker_image)
                return replace(verifier, machine=machine), solution
            if (directory / place / "Dockerfile").is_file():
                machine = replace(machine, docker_image="", context=place)
                return replace(verifier, machine=machine), solution
        machine = replace(machine, docker_image=fields.environment.docker_image or "")
        check_host(machine, "verifier.environment")
    tests = [top for place in (".", *own) if (top := directory / place / "tests").is_dir()]
    archive = pack_directories(tests or [directory / "tests"], "test.sh")
    return replace(verifier, archive=archive, machine=machine), solution


def check_host(machine: TaskMachine, table: str) -> None:
    """Raises TaskError for variables where there is no image that has any."""
    if machine.is_host and machine.env:
        raise TaskError(
            "needs an image", field=f"task.toml: {table}.env", received=sorted(machine.env),
            fix="name another image, or set them in tests/test.sh",
        )  # fmt: skip
