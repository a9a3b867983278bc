"""A task: instruction, files, machine and verifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class TaskImage:
    """A root file system that a sandbox backend has, and how programs run in it."""

    name: str
    layers: tuple[str, ...] = ()
    """Digests of its layers, lowest first; empty: a container engine has the image under its name."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str = "/workspace"
    user: str = "root"


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A command that must succeed before the agent begins, retried like Docker's HEALTHCHECK."""

    command: str
    interval_s: float = 5.0
    """Between tries."""
    timeout_s: float = 30.0
    """Of one try."""
    start_period_s: float = 0.0
    """Period from the start within which failures do not count."""
    start_interval_s: float = 5.0
    """Between tries in that period."""
    retries: int = 3
    """Number of failures in a row after which the check has failed."""


@dataclass(frozen=True, slots=True)
class TaskMachine:
    """The machine that a task requires. 0 and empty strings: the run's own settings. Sizes in bytes."""

    docker_image: str = ""
    """Name of its image; `host`: the programs of the sandboxes' host; empty: the Dockerfile's image."""
    context: str = "environment"
    """Directory of the task with the Dockerfile."""
    build_timeout_s: float = 600.0
    image: TaskImage | None = None
    """The resolved image; None before it is resolved, and with the host's programs."""
    workdir: str = ""
    """Overrides the image's own."""
    user: str = ""
    """The user that the agent's commands run as; overrides the image's own."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment of every command, the verifier's included."""
    cpus: float = 0.0
    memory_bytes: int = 0
    disk_bytes: int = 0
    hosts: tuple[str, ...] | None = ()
    """Hosts that the agent may reach, as in `sandbox.types.Network`; None: those that the run allows."""
    agent_s: float = 0.0
    """Seconds that the agent's tools may run, all calls together; 0: the run's limit."""
    health: HealthCheck | None = None
    """Must succeed before anything else runs on it."""

    @property
    def is_host(self) -> bool:
        """Whether it uses the programs of the sandboxes' host instead of an image."""
        return self.docker_image == "host"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file or directory that is copied from the agent's machine to a verifier's own machine."""

    source: str
    """Its absolute path, in both machines."""
    exclude: tuple[str, ...] = ()
    """Patterns of files below it that are not copied, as of `tar --exclude`."""


@dataclass(frozen=True, slots=True)
class CollectCommand:
    """A command run in the agent's sandbox after the agent has ended, before artifacts are copied."""

    command: str
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class TestScript:
    """A verifier as in Harbor: a program that writes the reward into a file."""

    __test__ = False

    archive: bytes
    """Tar file that is unpacked at `/tests`, with `test.sh`; empty: the verifier's image contains it."""
    timeout_s: float = 600.0
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    user: str = ""
    """The user that it runs as; overrides the image's own."""
    hosts: tuple[str, ...] | None = ()
    """Hosts that may be reached while it runs, as in `TaskMachine.hosts`."""
    machine: TaskMachine | None = None
    """Its own machine, if it has one: of the agent's files only `artifacts` are copied there."""
    artifacts: tuple[Artifact, ...] = ()
    collect: tuple[CollectCommand, ...] = ()
    exams: str = ""
    """Text of `tests/exams.json`, which replaces the reward file (`etude.tasks.exams`); or empty."""


@dataclass(frozen=True, slots=True)
class SolutionScript:
    """The reference solution: a program that solves the task."""

    archive: bytes
    """Tar file that is unpacked at `/solution`, with `solve.sh`."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class TaskStep:
    """One of several instructions of a task, each given after the step before was verified."""

    name: str
    instruction: str
    verifier: TestScript
    solution: SolutionScript | None = None
    files: bytes = b""
    """Tar file that is unpacked in the working directory before the step begins."""
    has_setup: bool = False
    """Whether the files contain a `setup.sh`, which then runs."""
    agent_s: float = 0.0
    """As `TaskMachine.agent_s`, for this step."""
    health: HealthCheck | None = None
    """Must succeed after the setup."""
    min_reward: Mapping[str, float] = field(default_factory=dict[str, float])
    """Name of a reward -> the value that it must reach for the next step to begin."""


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work with a verifier.

    `files` are what the agent sees; `hidden_files` enter the sandbox only after the agent's last
    action; `solution_files` are the contents of the changed files after the reference fix (never
    shown to an agent, read by the scripted expert and by the generator's own checks).
    """

    id: str
    instruction: str
    """The user's words, without any harness formatting."""
    files: Mapping[str, str]
    """Workspace path (POSIX, relative) -> text."""
    hidden_files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Paths laid over the workspace for grading; they win over the agent's versions."""
    solution_files: Mapping[str, str] = field(default_factory=dict[str, str])
    allowed_paths: tuple[str, ...] = ("**",)
    """Glob patterns of the workspace paths whose changes are graded; all others are restored. Patterns that
    begin with a slash are of paths outside the workspace, in the root of the task's image."""
    test_paths: tuple[str, ...] = ()
    """Visible test files, in the order in which `run_tests` runs them."""
    hidden_test_paths: tuple[str, ...] = ()
    """Test files that decide the verdict."""
    metadata: Mapping[str, str | int | float | bool] = field(
        default_factory=dict[str, "str | int | float | bool"]
    )
    """Facts about the task that nothing in the loop depends on: level, family, bug kind, split."""
    user_facts: tuple[str, ...] = ()
    """Sentences that the instruction withholds and a simulated user tells an agent who asks."""
    directory: str | None = None
    """The Harbor task directory that this was read from, if any."""
    machine: TaskMachine | None = None
    """None: the host's programs, with the run's own settings."""
    verifier: TestScript | None = None
    """None: graded by the values that its hidden tests compute."""
    solution: SolutionScript | None = None
    """None: the solution is to replace the agent's files by `solution_files`."""
    steps: tuple[TaskStep, ...] = ()
    """Of a task with several; `instruction`, `verifier` and `solution` are then those of the first."""
    step_rewards: Literal["mean", "final"] = "mean"
    """How the rewards of its steps are combined into the task's."""

    def at_step(self, number: int) -> Task:
        """The task reduced to this step; the task itself if it has no steps."""
        if not self.steps:
            return self
        step, machine = self.steps[number], self.machine
        return replace(
            self,
            instruction=step.instruction,
            machine=machine and replace(machine, agent_s=step.agent_s),
            verifier=step.verifier,
            solution=step.solution,
            steps=(),
        )

    @property
    def verifiers(self) -> tuple[TestScript, ...]:
        """Its verifier scripts: one, or one per step; none if hidden tests grade it by values."""
        if self.steps:
            return tuple(step.verifier for step in self.steps)
        return () if self.verifier is None else (self.verifier,)

    def with_verifiers(self, verifiers: Sequence[TestScript]) -> Task:
        """The task with its `verifiers` replaced, in the same order."""
        if not verifiers:
            return self
        steps = tuple(
            replace(step, verifier=script) for step, script in zip(self.steps, verifiers, strict=False)
        )
        return replace(self, verifier=verifiers[0], steps=steps)
