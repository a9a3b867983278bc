"""Models of Harbor's `task.toml` (schema 1.4).

Every field of the schema is in one of the models. Supported fields have their own types; unsupported ones are
listed in `REFUSED`, and a task that sets one is refused. Unknown fields are refused too, as a later schema
may give them any meaning.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from etude.errors import TaskError

SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
_OF_NO_MACHINE = {
    "gpus": "take tasks without GPUs: no sandbox has one",
    "gpu_types": "take tasks without GPUs: no sandbox has one",
    "tpu": "take tasks without TPUs: no sandbox has one",
    "mcp_servers": "take tasks whose agent needs no tool servers of its own",
    "skills_dir": "put what the skills say into instruction.md",
}
_HAS_ONE_MACHINE = "remove it: one agent works in one sandbox through all steps"
_OF_NO_VERIFIER = {
    **{f"verifier.environment.{name}": fix for name, fix in _OF_NO_MACHINE.items()},
    "verifier.environment.healthcheck": "put it into tests/test.sh: Harbor runs none there",
}
REFUSED = {
    **{f"environment.{name}": fix for name, fix in _OF_NO_MACHINE.items()},
    **_OF_NO_VERIFIER,
    **{f"steps.{name}": fix for name, fix in _OF_NO_VERIFIER.items()},
    **{f"steps.agent.{name}": _HAS_ONE_MACHINE for name in ("user", "network_mode", "allowed_hosts")},
}
"""Unsupported field -> a fix for its author. None, 0, false and empty values are accepted."""
_MAX_HOSTS = 256
_STEP_NAME = r"""^[^<>:"/\\|?*\x00-\x1f\x7f]*[^<>:"/\\|?*\x00-\x1f\x7f. ]$"""
"""A name that is valid for a directory on any system."""
_NOT_BY_VALUES = ("docker_image", "workdir", "user", "env", "network_mode", "allowed_hosts", "allow_internet")

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FiniteReward = Annotated[float, Field(allow_inf_nan=False)]
Pause = Annotated[float, Field(ge=0, allow_inf_nan=False)]
User = str | Annotated[int, Field(ge=0)] | None
NetworkMode = Literal["no-network", "public", "allowlist"]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Package(_Table):
    """`[task]`: only the name is used."""

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
    """One of `artifacts`, which a separate verifier receives. The place where Harbor stores them
    (`destination`), which it also does in shared mode, does not affect grading."""

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


class StepTable(_Table):
    """One of `[[steps]]`."""

    name: Annotated[str, Field(pattern=_STEP_NAME)]
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    min_reward: FiniteReward | dict[str, FiniteReward] | None = None
    healthcheck: HealthTable | None = None
    artifacts: list[str | ArtifactTable] = []


class OwnTable(BaseModel):
    """`[metadata.etude]`, our own table: other fields in it are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)

    id: str | None = Field(default=None, min_length=1)
    grading: Literal["values", "test_sh", "exams"] = "test_sh"
    allowed_paths: list[str] | None = None
    test_paths: list[str] = []
    hidden_test_paths: list[str] | None = None
    user_facts: list[str] = []


class MetadataTable(BaseModel):
    """`[metadata]`: any fields."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    etude: OwnTable = OwnTable()


class TaskTable(_Table):
    """The whole of `task.toml`."""

    schema_version: Literal["1.0", "1.1", "1.2", "1.3", "1.4"] = Field(
        default="1.4", validation_alias=AliasChoices("schema_version", "version")
    )
    task: Package | None = None
    metadata: MetadataTable = MetadataTable()
    source: str | None = None
    environment: EnvironmentTable = EnvironmentTable()
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    solution: SolutionTable = SolutionTable()
    steps: list[StepTable] = []
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    artifacts: list[str | ArtifactTable] = []


def check_fields(table: Mapping[str, Any]) -> TaskTable:
    """Validates a parsed `task.toml`. Raises TaskError that names the first unsupported or invalid field."""
    for path, fix in REFUSED.items():
        value = next(filter(None, _values(table, path.split("."))), None)
        if value:
            raise field_error(path, "is not supported", value, fix)
    try:
        found = TaskTable.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        unknown = first["type"] == "extra_forbidden"
        said = f"is unknown to schema {SCHEMAS[-1]}" if unknown else first["msg"].lower()
        fix = "remove it, or correct its name" if unknown else "correct the value"
        raise field_error(path, said, first["input"], fix) from error
    _check_verifier(found.verifier, "", found.agent.user)
    for step in found.steps:
        _check_verifier(step.verifier, f"steps.{step.name}.", found.agent.user)
    names = Counter(step.name.casefold() for step in found.steps)
    for step in found.steps:
        if names[step.name.casefold()] > 1:
            raise field_error("steps.name", "is the name of two steps", step.name, "rename one")
    if found.multi_step_reward_strategy is not None and not found.steps:
        value, fix = found.multi_step_reward_strategy, "leave it out"
        raise field_error("multi_step_reward_strategy", "needs [[steps]]", value, fix)
    return found


def _values(table: object, keys: Sequence[str]) -> Iterator[object]:
    """The values at a path of keys in a parsed table; for a list of tables, of each of them."""
    for entry in table if isinstance(table, list) else [table]:
        if not keys:
            yield entry
        elif isinstance(entry, dict):
            yield from _values(entry.get(keys[0]), keys[1:])


def _check_verifier(verifier: VerifierTable, place: str, user: User) -> None:
    """Raises TaskError for fields that contradict each other. `place`: prefix of the table's name."""
    if verifier.environment_mode == "shared" and verifier.environment is not None:
        fix, field = "leave out one of them", f"{place}verifier.environment_mode"
        raise field_error(field, "contradicts [verifier.environment]", "shared", fix)
    for hook in verifier.collect:
        if hook.user is not None and user_name(hook.user) != user_name(user):
            fix = "remove it: the hook runs as the agent's user"
            raise field_error(f"{place}verifier.collect.user", "is not the agent's user", hook.user, fix)


def at_step(table: TaskTable, step: StepTable | None) -> TaskTable:
    """The table with a step's fields applied, as Harbor resolves them: its own, else the task's.

    The time limit of a verifier is not inherited: each step has its own, or 600 s.
    """
    if step is None:
        return table
    task, own = table.verifier, step.verifier
    is_separate = own.is_separate or (own.environment_mode is None and task.is_separate)
    network = own if own.network_mode is not None or own.allowed_hosts is not None else task
    verifier = own.model_copy(
        update={
            "env": {**task.env, **own.env},
            "user": task.user if own.user is None else own.user,
            "network_mode": network.network_mode,
            "allowed_hosts": network.allowed_hosts,
            "environment_mode": "separate" if is_separate else "shared",
            "environment": (own.environment or task.environment) if is_separate else None,
            "collect": [*task.collect, *own.collect],
        }
    )
    limit_s = table.agent.timeout_sec if step.agent.timeout_sec is None else step.agent.timeout_sec
    return table.model_copy(
        update={
            "agent": table.agent.model_copy(update={"timeout_sec": limit_s}),
            "verifier": verifier,
            "artifacts": [*table.artifacts, *step.artifacts] if is_separate else [],
        }
    )


def check_graded_by_values(table: TaskTable) -> None:
    """Raises TaskError for a field that is not supported where values are graded: there is no image, user,
    environment variable or network. Sizes and time limits are ignored in favour of the run's.
    """
    if table.steps:
        fix, names = 'set metadata.etude.grading = "test_sh"', [step.name for step in table.steps]
        raise field_error("steps", "is not supported where values are graded", names, fix)
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
                raise field_error(f"{name}.{key}", "is not supported where values are graded", value, fix)


def user_name(user: str | int | None) -> str:
    """A user's name or number as text; empty for none."""
    return "" if user is None else str(user)


def field_error(path: str, message: str, value: object, fix: str) -> TaskError:
    """The error for a field of `task.toml`, with its value, truncated."""
    is_number = isinstance(value, int | float) and math.isfinite(value)
    shown = value if is_number else (value if isinstance(value, str) else repr(value))[:200]
    return TaskError(message, field=f"task.toml: {path}", received=shown, fix=fix)
