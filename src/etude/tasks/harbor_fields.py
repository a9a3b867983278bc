"""The fields of Harbor's `task.toml` (schema 1.4): what each asks of a task's machine and its verifier.

Every field is in one of the models here. Those that are honoured have a type of their own; one that is not
is listed in `REFUSED`, and a task that sets it is refused by that name. A field that no model has is refused
too: a later schema may mean anything by it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from etude.errors import TaskError
from etude.records import Artifact, CollectCommand, HealthCheck, SolutionScript, TaskMachine, TestScript

SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
_OF_NO_MACHINE = {
    "gpus": "take tasks without GPUs: no sandbox has one",
    "gpu_types": "take tasks without GPUs: no sandbox has one",
    "tpu": "take tasks without TPUs: no sandbox has one",
    "mcp_servers": "take tasks whose agent needs no tool servers of its own",
    "skills_dir": "put what the skills say into instruction.md",
}
REFUSED = {
    **{f"environment.{name}": fix for name, fix in _OF_NO_MACHINE.items()},
    **{f"verifier.environment.{name}": fix for name, fix in _OF_NO_MACHINE.items()},
    "verifier.environment.healthcheck": "put it into tests/test.sh: Harbor runs none there",
    "steps": "write each step as a task of its own",
    "multi_step_reward_strategy": "write each step as a task of its own",
}
"""Fields that are not honoured, with what their author can do. None, 0, false and what is empty are taken."""
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_SIZE = re.compile(r"([0-9.]+)\s*([GMK])", re.IGNORECASE)
_KIB_OF = {"G": 1 << 20, "M": 1 << 10, "K": 1}
_MAX_HOSTS = 256
_NOT_BY_VALUES = ("docker_image", "workdir", "user", "env", "network_mode", "allowed_hosts", "allow_internet")

_PUBLISHED = "/logs/artifacts"
"""Always an artifact, as in Harbor."""
_VERIFIERS = ("/tests", "/solution", "/logs/verifier", "/proc", "/sys", "/dev")
"""Where nothing of the agent's is laid."""

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Pause = Annotated[float, Field(ge=0, allow_inf_nan=False)]
User = str | Annotated[int, Field(ge=0)] | None
NetworkMode = Literal["no-network", "public", "allowlist"]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Package(_Table):
    """`[task]`: of these only the name means anything to a run."""

    name: str = Field(min_length=1)
    version: str | None = None
    description: str = ""
    authors: list[dict[str, Any]] = []
    keywords: list[str] = []


class HealthTable(_Table):
    """`[environment.healthcheck]`."""

    command: str = Field(min_length=1)
    interval_sec: Pause = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Pause = 0.0
    start_interval_sec: Pause = 5.0
    retries: Annotated[int, Field(ge=1)] = 3


class ArtifactTable(_Table):
    """One of `artifacts`. Where Harbor keeps them (`destination`) is no matter of grading."""

    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: Literal["main"] | None = None


class CollectTable(_Table):
    """One of `[[verifier.collect]]`."""

    command: str = Field(min_length=1)
    service: Literal["main"] = "main"
    timeout_sec: Seconds = 60.0
    user: User = None


class EnvironmentTable(_Table):
    """`[environment]`."""

    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = Field(default=None, min_length=1)
    os: Annotated[str, Field(pattern="(?i)^linux$")] = "linux"
    cpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    memory_mb: Annotated[int, Field(ge=0)] | None = None
    storage_mb: Annotated[int, Field(ge=0)] | None = None
    memory: str | None = None
    storage: str | None = None
    env: dict[str, str] = {}
    workdir: Annotated[str, Field(pattern="^/.*[^/]")] | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = Field(default=None, max_length=_MAX_HOSTS)
    allow_internet: bool | None = None
    gpus: object = None
    gpu_types: object = None
    tpu: object = None
    mcp_servers: object = None
    skills_dir: object = None
    healthcheck: HealthTable | None = None


class AgentTable(_Table):
    """`[agent]`."""

    timeout_sec: Seconds | None = None
    user: User = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = Field(default=None, max_length=_MAX_HOSTS)


class VerifierTable(_Table):
    """`[verifier]`."""

    timeout_sec: Seconds = 600.0
    env: dict[str, str] = {}
    user: User = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = Field(default=None, max_length=_MAX_HOSTS)
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: list[CollectTable] = []

    @property
    def is_separate(self) -> bool:
        """Whether test.sh runs on a machine of its own."""
        return (self.environment_mode or ("separate" if self.environment else "shared")) == "separate"


class SolutionTable(_Table):
    """`[solution]`."""

    env: dict[str, str] = {}


class TaskTable(_Table):
    """The whole of `task.toml`."""

    schema_version: Literal["1.0", "1.1", "1.2", "1.3", "1.4"] = Field(
        default="1.4", validation_alias=AliasChoices("schema_version", "version")
    )
    task: Package | None = None
    metadata: dict[str, Any] = {}
    source: str | None = None
    environment: EnvironmentTable = EnvironmentTable()
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    solution: SolutionTable = SolutionTable()
    steps: object = None
    multi_step_reward_strategy: object = None
    artifacts: list[str | ArtifactTable] = []


def check_fields(table: Mapping[str, Any]) -> TaskTable:
    """The fields of a parsed `task.toml`. Raises TaskError that names the first one that is not honoured, or
    is not what it should be."""
    for path, fix in REFUSED.items():
        value: Any = table
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value:
            raise _refused(path, "is not supported", value, fix)
    try:
        found = TaskTable.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        unknown = first["type"] == "extra_forbidden"
        said = f"is unknown to schema {SCHEMAS[-1]}" if unknown else first["msg"].lower()
        fix = "remove it, or correct its name" if unknown else "correct the value"
        raise _refused(path, said, first["input"], fix) from error
    _check_verifier(found)
    return found


def _check_verifier(table: TaskTable) -> None:
    """Raises TaskError for fields that contradict each other, or ask for what only another mode has."""
    verifier = table.verifier
    if verifier.environment_mode == "shared" and verifier.environment is not None:
        fix = "leave out one of them"
        raise _refused("verifier.environment_mode", "is not with [verifier.environment]", "shared", fix)
    if table.artifacts and not verifier.is_separate:
        fix = 'leave it out (what a session leaves behind is kept as its diff), or "separate"'
        raise _refused("artifacts", "need verifier.environment_mode", table.artifacts, fix)
    for hook in verifier.collect:
        if hook.user is not None and _user(hook.user) != _user(table.agent.user):
            fix = "leave it out: it runs as the agent does"
            raise _refused("verifier.collect.user", "is not the agent's", hook.user, fix)


def check_graded_by_values(table: TaskTable) -> None:
    """Raises TaskError for a field that a task without an image, users, variables or a network cannot have.

    Its sizes and time limits are read and are what the run gives.
    """
    parts = {
        "environment": table.environment,
        "agent": table.agent,
        "verifier": table.verifier,
        "solution": table.solution,
    }
    for name, part in parts.items():
        for key in _NOT_BY_VALUES:
            value = getattr(part, key, None)
            if value is not None and value is not False and value not in ("no-network", [], {}):
                fix = 'set metadata.etude.grading = "test_sh"'
                raise _refused(f"{name}.{key}", "is not supported where values are graded", value, fix)


def read_machine(table: TaskTable, host_env: Sequence[str] = ()) -> TaskMachine:
    """What the task is played on. `host_env`: this process's variables that it may read. Raises TaskError."""
    agent, health = table.agent, table.environment.healthcheck
    return replace(
        _machine(table.environment, "environment", host_env),
        user=_user(agent.user),
        hosts=_hosts(table.environment, agent, "agent", "environment"),
        agent_s=agent.timeout_sec or 0.0,
        health=None
        if health is None
        else HealthCheck(
            health.command,
            health.interval_sec,
            health.timeout_sec,
            health.start_period_sec,
            health.start_interval_sec,
            health.retries,
        ),
    )


def _machine(asked: EnvironmentTable, name: str, host_env: Sequence[str]) -> TaskMachine:
    """A machine without what is its user's. `name`: of the table. Raises TaskError."""
    return TaskMachine(
        docker_image=asked.docker_image or "",
        build_timeout_s=asked.build_timeout_sec,
        workdir=asked.workdir or "",
        env=_resolve(asked.env, f"{name}.env", host_env),
        cpus=asked.cpus or 0.0,
        memory_bytes=_bytes(asked.memory_mb, asked.memory, "memory", name),
        disk_bytes=_bytes(asked.storage_mb, asked.storage, "storage", name),
    )


def read_verifier(table: TaskTable, host_env: Sequence[str] = ()) -> TestScript:
    """How `tests/test.sh` is run, without its archive. Raises TaskError."""
    asked, machine, baseline, name = table.verifier, None, table.environment, "environment"
    images = {table.environment.docker_image, asked.environment and asked.environment.docker_image}
    if asked.is_separate:
        if asked.environment is not None:
            baseline, name = asked.environment, "verifier.environment"
        machine = replace(_machine(baseline, name, host_env), user=_user(asked.user))
    return TestScript(
        b"",
        asked.timeout_sec,
        _resolve(asked.env, "verifier.env", host_env),
        _user(asked.user),
        _hosts(baseline, asked, "verifier", name),
        machine,
        _artifacts(table.artifacts, "host" in images) if asked.is_separate else (),
        tuple(CollectCommand(hook.command, hook.timeout_sec) for hook in asked.collect),
    )


def _artifacts(listed: Sequence[str | ArtifactTable], is_host: bool) -> tuple[Artifact, ...]:
    """What a separate verifier sees of the agent's. Raises TaskError.

    `is_host`: on the host's programs /tests leads into /tmp.
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
            raise _refused("artifacts.source", "is no plain path of a file or directory", row.source, fix)
        if any(f"{a}/".startswith(f"{b}/") for one in places for a, b in ((source, one), (one, source))):
            fix = "name what the agent makes, elsewhere"
            raise _refused("artifacts.source", "lies where the verifier's own files are", row.source, fix)
    _check_destinations(rows)
    return tuple(Artifact(row.source.rstrip("/"), tuple(row.exclude)) for row in rows)


def _check_destinations(rows: Sequence[ArtifactTable]) -> None:
    """Raises TaskError for artifacts of which Harbor leaves one out, as they have one place there."""
    for one, other in combinations(rows, 2):
        places = [f"{(row.destination or row.source).strip('/')}/" for row in (one, other)]
        overlap = places[0].startswith(places[1]) or places[1].startswith(places[0])
        if overlap and (one.destination or other.destination):
            fix = "leave it out, or name a place of its own"
            raise _refused("artifacts.destination", "overlaps another's place", other.source, fix)


def read_solution(table: TaskTable, archive: bytes, host_env: Sequence[str] = ()) -> SolutionScript:
    """How `solution/solve.sh` is run; `archive`: `solution/` as a tar file. Raises TaskError."""
    return SolutionScript(archive, _resolve(table.solution.env, "solution.env", host_env))


def _user(user: str | int | None) -> str:
    return "" if user is None else str(user)


def _bytes(megabytes: int | None, text: str | None, name: str, table: str) -> int:
    """A size by its field, or by the one that had its place before (`2G`)."""
    if text is None:
        return (megabytes or 0) << 20
    match = _SIZE.fullmatch(text.strip())
    try:
        size = int(float(match[1]) * _KIB_OF[match[2].upper()]) << 10 if match else 0
    except ValueError:
        size = 0
    if size <= 0 or megabytes not in (None, size >> 20):
        fix = f"write {name}_mb alone, a number"
        raise _refused(f"{table}.{name}", "is no size, or not the same twice", text, fix)
    return size


def _hosts(
    baseline: EnvironmentTable, phase: AgentTable | VerifierTable, name: str, baseline_name: str
) -> tuple[str, ...] | None:
    """What may be reached in a phase: nothing, the addresses listed, or (None) what the run allows."""
    if phase.network_mode is not None or phase.allowed_hosts is not None:
        mode, listed, field = phase.network_mode, phase.allowed_hosts, name
    else:
        mode, listed, field = baseline.network_mode, baseline.allowed_hosts, baseline_name
        if mode is None and listed is None and baseline.allow_internet is False:
            mode = "no-network"
    if listed and mode != "allowlist":
        fix = 'write network_mode = "allowlist" with it'
        raise _refused(f"{field}.allowed_hosts", "needs an allow-list", listed, fix)
    if mode == "allowlist":
        return tuple(address for host in listed or () for address in _addresses(host, field))
    return () if mode == "no-network" else None


def _addresses(host: str, field: str) -> tuple[str, str]:
    """A host name, with an asterisk before it or not, as addresses of a sandbox's network."""
    plain = host.strip().lower().rstrip(".")
    try:
        ip_address(plain)
        is_name = False
    except ValueError:
        is_name = re.fullmatch(r"(\*\.)?[a-z0-9-]+(\.[a-z0-9-]+)*", plain) is not None
    if not is_name:
        fix = "name hosts: sandboxes reach no addresses by number"
        raise _refused(f"{field}.allowed_hosts", "is no name of a host", host, fix)
    return f"{plain}:443", f"{plain}:80"


def _resolve(env: Mapping[str, str], field: str, host_env: Sequence[str]) -> dict[str, str]:
    """Variables, with those of this process where a value is `${NAME}` or `${NAME:-default}`.

    Raises TaskError for one that is set and that `host_env` does not name: it may be anybody's secret.
    """
    found: dict[str, str] = {}
    for name, value in env.items():
        match = _TEMPLATE.fullmatch(value)
        if match and match[1] in os.environ and match[1] not in host_env:
            fix = f'set tasks.host_env = ["{match[1]}"]'
            raise _refused(f"{field}.{name}", "is a variable of this process", value, fix)
        resolved = os.environ.get(match[1], match[2]) if match else value
        if resolved is None:
            raise _refused(
                f"{field}.{name}",
                "is not among this process's variables",
                value,
                "set it, and tasks.host_env",
            )
        if not name or "=" in name or "\0" in name + resolved:
            raise _refused(f"{field}.{name}", "cannot be a variable", value, "correct it")
        found[name] = resolved
    return found


def _refused(path: str, message: str, value: object, fix: str) -> TaskError:
    shown = value if isinstance(value, int | float) and math.isfinite(value) else repr(value)[:200]
    return TaskError(message, field=f"task.toml: {path}", received=shown, fix=fix)
