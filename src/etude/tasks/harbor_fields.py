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
from ipaddress import ip_address
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from etude.errors import TaskError
from etude.records import SolutionScript, TaskMachine, TestScript

SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
REFUSED = {
    "environment.gpus": "take tasks without GPUs: no sandbox has one",
    "environment.gpu_types": "take tasks without GPUs: no sandbox has one",
    "environment.tpu": "take tasks without TPUs: no sandbox has one",
    "environment.mcp_servers": "take tasks whose agent needs no tool servers of its own",
    "environment.skills_dir": "put what the skills say into instruction.md",
    "environment.healthcheck": "take tasks without services: nothing is started before the agent",
    "verifier.environment": "build what tests/test.sh needs into the task's own image",
    "verifier.collect": "take tasks without services",
    "steps": "write each step as a task of its own",
    "multi_step_reward_strategy": "write each step as a task of its own",
    "artifacts": "leave it out: what a session leaves behind is kept as its diff",
}
"""Fields that are not honoured, with what their author can do. None, 0, false and what is empty are taken."""
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_SIZE = re.compile(r"([0-9.]+)\s*([GMK])", re.IGNORECASE)
_KIB_OF = {"G": 1 << 20, "M": 1 << 10, "K": 1}
_MAX_HOSTS = 256
_NOT_BY_VALUES = ("docker_image", "workdir", "user", "env", "network_mode", "allowed_hosts", "allow_internet")

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
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
    healthcheck: object = None


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
    environment_mode: Literal["shared"] | None = None
    environment: object = None
    collect: object = None


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
    artifacts: object = None


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
        return TaskTable.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        unknown = first["type"] == "extra_forbidden"
        said = f"is unknown to schema {SCHEMAS[-1]}" if unknown else first["msg"].lower()
        fix = "remove it, or correct its name" if unknown else "correct the value"
        raise _refused(path, said, first["input"], fix) from error


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
    asked, agent = table.environment, table.agent
    return TaskMachine(
        docker_image=asked.docker_image or "",
        build_timeout_s=asked.build_timeout_sec,
        workdir=asked.workdir or "",
        user=_user(agent.user),
        env=_resolve(asked.env, "environment.env", host_env),
        cpus=asked.cpus or 0.0,
        memory_bytes=_bytes(asked.memory_mb, asked.memory, "memory"),
        disk_bytes=_bytes(asked.storage_mb, asked.storage, "storage"),
        hosts=_hosts(asked, agent, "agent"),
        agent_s=agent.timeout_sec or 0.0,
    )


def read_verifier(table: TaskTable, archive: bytes, host_env: Sequence[str] = ()) -> TestScript:
    """How `tests/test.sh` is run; `archive`: `tests/` as a tar file. Raises TaskError."""
    asked = table.verifier
    hosts = _hosts(table.environment, asked, "verifier")
    env = _resolve(asked.env, "verifier.env", host_env)
    return TestScript(archive, asked.timeout_sec, env, _user(asked.user), hosts)


def read_solution(table: TaskTable, archive: bytes, host_env: Sequence[str] = ()) -> SolutionScript:
    """How `solution/solve.sh` is run; `archive`: `solution/` as a tar file. Raises TaskError."""
    return SolutionScript(archive, _resolve(table.solution.env, "solution.env", host_env))


def _user(user: str | int | None) -> str:
    return "" if user is None else str(user)


def _bytes(megabytes: int | None, text: str | None, name: str) -> int:
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
        raise _refused(f"environment.{name}", "is no size, or not the same twice", text, fix)
    return size


def _hosts(
    baseline: EnvironmentTable, phase: AgentTable | VerifierTable, name: str
) -> tuple[str, ...] | None:
    """What may be reached in a phase: nothing, the addresses listed, or (None) what the run allows."""
    if phase.network_mode is not None or phase.allowed_hosts is not None:
        mode, listed, field = phase.network_mode, phase.allowed_hosts, name
    else:
        mode, listed, field = baseline.network_mode, baseline.allowed_hosts, "environment"
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
