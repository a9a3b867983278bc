"""A task: what the agent is asked, what it works on, and what it is judged by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class TaskImage:
    """A root file system that a sandbox backend has, and how programs run in it."""

    name: str
    layers: tuple[str, ...] = ()
    """Digests of its layers, lowest first; none: an engine has it under its name."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str = "/workspace"
    user: str = "root"


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A command that must succeed before the agent begins, tried again as Docker's HEALTHCHECK is."""

    command: str
    interval_s: float = 5.0
    """Between tries."""
    timeout_s: float = 30.0
    """Of one try."""
    start_period_s: float = 0.0
    """From the start on; failures within it do not count."""
    start_interval_s: float = 5.0
    """Between tries in that time."""
    retries: int = 3
    """So many failures in a row end the wait."""


@dataclass(frozen=True, slots=True)
class TaskMachine:
    """The machine that a task asks for. 0 and empty texts: what the run gives. Sizes in bytes."""

    docker_image: str = ""
    """Name of its image; `host`: the programs of the sandboxes' host; empty: what the Dockerfile builds."""
    context: str = "environment"
    """Directory of the task with the Dockerfile."""
    build_timeout_s: float = 600.0
    image: TaskImage | None = None
    """What that came to, once it was looked for; None on the host's programs."""
    workdir: str = ""
    """In place of the image's own."""
    user: str = ""
    """Whom the agent works as, in place of the image's own user."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of every command, the verifier's included."""
    cpus: float = 0.0
    memory_bytes: int = 0
    disk_bytes: int = 0
    hosts: tuple[str, ...] | None = ()
    """What the agent reaches, as `sandbox.types.Network` has it; None: what the run allows."""
    agent_s: float = 0.0
    """Seconds that the agent's tools may run, all calls together; 0: as long as the run allows."""
    health: HealthCheck | None = None
    """What must succeed before anything else is done on it."""

    @property
    def is_host(self) -> bool:
        """Whether it has no image, but the programs of the sandboxes' host."""
        return self.docker_image == "host"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file or directory that an agent leaves to a verifier with a machine of its own."""

    source: str
    """Its absolute path, in both machines."""
    exclude: tuple[str, ...] = ()
    """Patterns of what below it stays behind, as of `tar --exclude`."""


@dataclass(frozen=True, slots=True)
class CollectCommand:
    """What is run in the agent's sandbox when the agent has ended, before anything is taken over."""

    command: str
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class TestScript:
    """A verifier of Harbor's kind: a program that writes the reward into a file."""

    __test__ = False

    archive: bytes
    """Tar file of what is unpacked at `/tests`, `test.sh` among it; empty: the verifier's image has it."""
    timeout_s: float = 600.0
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    user: str = ""
    """Whom it runs as, in place of the image's own user."""
    hosts: tuple[str, ...] | None = ()
    """As those of the machine, while it runs."""
    machine: TaskMachine | None = None
    """Where it runs, in place of the task's machine: then nothing of the agent's but `artifacts` is there."""
    artifacts: tuple[Artifact, ...] = ()
    collect: tuple[CollectCommand, ...] = ()
    exams: str = ""
    """Text of `tests/exams.json`, which decides in place of the reward (`etude.tasks.exams`); or empty."""


@dataclass(frozen=True, slots=True)
class SolutionScript:
    """The reference solution: a program that solves the task in the agent's place."""

    archive: bytes
    """Tar file of what is unpacked at `/solution`, `solve.sh` among it."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class TaskStep:
    """One of several things that a task's user asks for, each once the one before was verified."""

    name: str
    instruction: str
    verifier: TestScript
    solution: SolutionScript | None = None
    files: bytes = b""
    """Tar file of what is unpacked in the working directory before the step begins."""
    has_setup: bool = False
    """Whether there is a `setup.sh` among them, which then runs."""
    agent_s: float = 0.0
    """As that of the machine, in this step."""
    health: HealthCheck | None = None
    """What must succeed after that."""
    min_reward: Mapping[str, float] = field(default_factory=dict[str, float])
    """Name of a reward -> what it must come to, for the next step to be asked for."""


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
    """Glob patterns of the workspace paths whose changes reach grading; all others are restored. Those that
    begin with a slash are of paths elsewhere in the root of the task's image."""
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
    """What it is played on; None: on the host's programs, with what the run gives."""
    verifier: TestScript | None = None
    """What judges it; None: the values that its hidden tests compute."""
    solution: SolutionScript | None = None
    """What solves it; None: `solution_files` take the place of the agent's."""
    steps: tuple[TaskStep, ...] = ()
    """What is asked for, one after the other; instruction, verifier and solution are then the first one's."""
    step_rewards: Literal["mean", "final"] = "mean"
    """How the rewards of its steps become the task's."""

    def at_step(self, number: int) -> Task:
        """The task as if it had this step alone; itself without steps."""
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
        """The scripts that judge it: one, or one for each step; none where values are graded."""
        if self.steps:
            return tuple(step.verifier for step in self.steps)
        return () if self.verifier is None else (self.verifier,)

    def with_verifiers(self, verifiers: Sequence[TestScript]) -> Task:
        """The task with others in the place of `verifiers`, in their order."""
        if not verifiers:
            return self
        steps = tuple(
            replace(step, verifier=script) for step, script in zip(self.steps, verifiers, strict=False)
        )
        return replace(self, verifier=verifiers[0], steps=steps)
