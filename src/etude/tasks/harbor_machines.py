"""Converts a `task.toml` and its scripts into records: machines, verifiers, health checks and solutions.

tests/test.sh      steps/NAME/tests/       overlays it in this step
solution/solve.sh  steps/NAME/solution/    replaces it in this step
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address
from itertools import combinations
from pathlib import Path

from etude.errors import TaskError
from etude.records import Artifact, CollectCommand, HealthCheck, SolutionScript, TaskMachine, TestScript
from etude.tasks.archives import directory_error, pack_directories
from etude.tasks.harbor_fields import (
    AgentTable,
    ArtifactTable,
    EnvironmentTable,
    HealthTable,
    StepTable,
    TaskTable,
    VerifierTable,
    at_step,
    field_error,
    user_name,
)

_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_SIZE = re.compile(r"([0-9.]+)\s*([GMK])", re.IGNORECASE)
_KIB_OF = {"G": 1 << 20, "M": 1 << 10, "K": 1}
_PUBLISHED = "/logs/artifacts"
"""Always an artifact, as in Harbor."""
_VERIFIERS = ("/tests", "/solution", "/logs/verifier", "/proc", "/sys", "/dev")
"""Directories of the verifier, to which no artifacts are copied."""


def health_check(table: HealthTable | None) -> HealthCheck | None:
    """The command that must succeed before the agent starts."""
    return None if table is None else HealthCheck(*table.model_dump().values())


def read_machine(table: TaskTable, host_env: Sequence[str]) -> TaskMachine:
    """The agent's machine. `host_env`: this process's variables that the task may read. Raises TaskError."""
    agent = table.agent
    return replace(
        _machine(table.environment, "environment", host_env),
        user=user_name(agent.user),
        hosts=_hosts(table.environment, agent, "agent", "environment"),
        agent_s=agent.timeout_sec or 0.0,
        health=health_check(table.environment.healthcheck),
    )


def _machine(asked: EnvironmentTable, name: str, host_env: Sequence[str]) -> TaskMachine:
    """A machine without user and network. `name`: of its table. Raises TaskError."""
    return TaskMachine(
        docker_image=asked.docker_image or "",
        build_timeout_s=asked.build_timeout_sec,
        workdir=asked.workdir or "",
        env=_resolve(asked.env, f"{name}.env", host_env),
        cpus=asked.cpus or 0.0,
        memory_bytes=_bytes(asked.memory_mb, asked.memory, "memory", name),
        disk_bytes=_bytes(asked.storage_mb, asked.storage, "storage", name),
    )


def _verifier(table: TaskTable, host_env: Sequence[str]) -> TestScript:
    """The verifier, which runs `tests/test.sh`, without its archive. Raises TaskError."""
    asked, machine, baseline, name = table.verifier, None, table.environment, "environment"
    images = {table.environment.docker_image, asked.environment and asked.environment.docker_image}
    if asked.is_separate:
        if asked.environment is not None:
            baseline, name = asked.environment, "verifier.environment"
        machine = replace(_machine(baseline, name, host_env), user=user_name(asked.user))
    return TestScript(
        b"",
        asked.timeout_sec,
        _resolve(asked.env, "verifier.env", host_env),
        user_name(asked.user),
        _hosts(baseline, asked, "verifier", name),
        machine,
        _artifacts(table.artifacts, "host" in images) if asked.is_separate else (),
        tuple(CollectCommand(hook.command, hook.timeout_sec) for hook in asked.collect),
    )


def read_scripts(
    fields: TaskTable, step: StepTable | None, directory: Path, host_env: Sequence[str]
) -> tuple[TestScript, SolutionScript | None]:
    """The verifier and the reference solution, if there is one. Raises TaskError."""
    own = [] if step is None else [f"steps/{step.name}"]
    effective = at_step(fields, step)
    solution = None
    for top in (directory / place / "solution" for place in (*own, ".")):
        if solution is None and top.is_dir():
            env = _resolve(effective.solution.env, "solution.env", host_env)
            solution = SolutionScript(pack_directories([top], "solve.sh"), env)
    verifier = _verifier(effective, host_env)
    machine = verifier.machine
    if machine is not None:
        places = [(fields.verifier.environment, "tests")]
        if step is not None:
            places.insert(0, (step.verifier.environment, f"steps/{step.name}/tests"))
        for environment, place in places:
            if (directory / place / "docker-compose.yaml").is_file():
                field = f"{place}/docker-compose.yaml"
                raise directory_error(directory, field, "is not supported", "remove it")
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
    """Raises TaskError for environment variables of a machine without an image."""
    if machine.is_host and machine.env:
        raise TaskError(
            "needs an image", field=f"task.toml: {table}.env", received=sorted(machine.env),
            fix="name another image, or set them in tests/test.sh",
        )  # fmt: skip


def _artifacts(listed: Sequence[str | ArtifactTable], is_host: bool) -> tuple[Artifact, ...]:
    """The agent's files that a separate verifier receives. Raises TaskError.

    `is_host`: without an image /tests is a link into /tmp.
    """
    places = (*_VERIFIERS, "/tmp/tests", "/tmp/logs", "/tmp/solution") if is_host else _VERIFIERS
    rows = [ArtifactTable(source=row) if isinstance(row, str) else row for row in listed]
    if not any(row.source.rstrip("/") == _PUBLISHED for row in rows):
        rows.insert(0, ArtifactTable(source=_PUBLISHED))
    for row in rows:
        source = row.source.rstrip("/")
        names = source.split("/")
        if names[0] or len(names) < 2 or {"", ".", ".."} & set(names[1:]) or "\0" in source:
            fix = "write an absolute path, without . and .."
            raise field_error("artifacts.source", "is not a plain path", row.source, fix)
        if any(f"{a}/".startswith(f"{b}/") for top in places for a, b in ((source, top), (top, source))):
            fix = "name a path that the agent writes, outside of these"
            raise field_error("artifacts.source", "is in a directory of the verifier", row.source, fix)
    _check_destinations(rows)
    return tuple(Artifact(row.source.rstrip("/"), tuple(row.exclude)) for row in rows)


def _check_destinations(rows: Sequence[ArtifactTable]) -> None:
    """Raises TaskError for artifacts with overlapping destinations, of which Harbor drops one."""
    for one, other in combinations(rows, 2):
        places = [f"{(row.destination or row.source).strip('/')}/" for row in (one, other)]
        overlap = places[0].startswith(places[1]) or places[1].startswith(places[0])
        if overlap and (one.destination or other.destination):
            fix = "remove it, or name a separate destination"
            raise field_error("artifacts.destination", "overlaps another artifact's", other.source, fix)


def _bytes(megabytes: int | None, text: str | None, name: str, table: str) -> int:
    """A size in bytes, from its field in megabytes or from the older text field (`2G`)."""
    if text is None:
        return (megabytes or 0) << 20
    match = _SIZE.fullmatch(text.strip())
    try:
        size = int(float(match[1]) * _KIB_OF[match[2].upper()]) << 10 if match else 0
    except ValueError:
        size = 0
    if size <= 0 or megabytes not in (None, size >> 20):
        fix = f"write only {name}_mb, as a number"
        raise field_error(f"{table}.{name}", "is not a size, or contradicts the size in MB", text, fix)
    return size


def _hosts(
    baseline: EnvironmentTable, phase: AgentTable | VerifierTable, name: str, baseline_name: str
) -> tuple[str, ...] | None:
    """The hosts that a phase may reach: none, the listed ones, or (None) those that the run allows."""
    if phase.network_mode is not None or phase.allowed_hosts is not None:
        mode, listed, field = phase.network_mode, phase.allowed_hosts, name
    else:
        mode, listed, field = baseline.network_mode, baseline.allowed_hosts, baseline_name
        if mode is None and listed is None and baseline.allow_internet is False:
            mode = "no-network"
    if listed and mode != "allowlist":
        fix = 'write network_mode = "allowlist" with it'
        raise field_error(f"{field}.allowed_hosts", "needs an allow-list", listed, fix)
    if mode == "allowlist":
        return tuple(address for host in listed or () for address in _addresses(host, field))
    return () if mode == "no-network" else None


def _addresses(host: str, field: str) -> tuple[str, str]:
    """Allow-list entries of a sandbox's network for a host name, which may begin with `*.`."""
    plain = host.strip().lower().rstrip(".")
    try:
        ip_address(plain)
        is_name = False
    except ValueError:
        is_name = re.fullmatch(r"(\*\.)?[a-z0-9-]+(\.[a-z0-9-]+)*", plain) is not None
    if not is_name:
        fix = "name hosts: sandboxes cannot reach IP addresses"
        raise field_error(f"{field}.allowed_hosts", "is not a host name", host, fix)
    return f"{plain}:443", f"{plain}:80"


def _resolve(env: Mapping[str, str], field: str, host_env: Sequence[str]) -> dict[str, str]:
    """Environment variables, with `${NAME}` and `${NAME:-default}` replaced by variables of this process.

    Raises TaskError for a variable that is set but not in `host_env`, as it may be a secret.
    """
    found: dict[str, str] = {}
    for name, value in env.items():
        match = _TEMPLATE.fullmatch(value)
        if match and match[1] in os.environ and match[1] not in host_env:
            fix = f'set tasks.host_env = ["{match[1]}"]'
            raise field_error(f"{field}.{name}", "is a variable of this process: not allowed", value, fix)
        resolved = os.environ.get(match[1], match[2]) if match else value
        if match and resolved is None:
            fix = f'set it, and tasks.host_env = ["{match[1]}"]'
            raise field_error(f"{field}.{name}", "is not among this process's variables", value, fix)
        if not name or "=" in name or "\0" in name + resolved:
            raise field_error(f"{field}.{name}", "is not a valid variable", value, "correct it")
        found[name] = resolved
    return found
