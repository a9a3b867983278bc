"""Creates the initial sandbox of an environment session: from a task, files, a directory, a commit or a
snapshot; then runs health checks and writes the files of a step, before the agent begins."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from etude.agent.simulated_user import SimulatedUser
from etude.errors import AgentError, ConfigError, ResourceError, SandboxError, TaskError
from etude.kit.git import git_fault, run_git
from etude.records import HealthCheck, Task, TaskStep, TestScript
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.template import Image, Template
from etude.sandbox.types import CommandResult, Network, Resources
from etude.sandbox.wrapping import WrappedSandbox

SOURCE_BYTES = 256 << 20
"""Size limit for all files of one directory or repository."""
_GIT_S = 60.0
OWN_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    **dict.fromkeys(("LD_LIBRARY_PATH", "LD_PRELOAD", "BASH_ENV", "ENV"), ""),
}
"""Environment of our own commands: an image's variables may name the workspace, which the agent controls."""
OWN_S = 60.0
"""Their time limit."""
_SETUP_S = 600.0
_SAID_CHARS = 200


@dataclass(frozen=True)
class Origin:
    """Describes the initial sandbox of a session, which forks at an earlier turn make again."""

    template: Template | None = None
    resources: Resources = field(default_factory=Resources)
    network: Network | None = None
    snapshot: str | None = None
    """Continues this snapshot; template and resources are then the snapshot's own."""
    health: HealthCheck | None = None
    """Must succeed in a new sandbox before it is used."""
    publishes: bool = False
    """Whether it has `/logs/artifacts`, for files of the agent that the verifier sees."""
    step: TaskStep | None = None
    """The task's first step: its files are written, and its setup runs, before the agent begins."""

    @property
    def digest(self) -> str:
        """Identifies the initial state: the template's digest, or the snapshot's id."""
        return self.snapshot or (self.template or Template()).digest

    async def make(self, backend: SandboxBackend, life_s: float | None = None) -> Sandbox:
        """Creates a sandbox in the initial state. `life_s`: it is killed after so long at the latest."""
        if self.snapshot is not None:
            return await backend.create(timeout_s=life_s, snapshot=self.snapshot)
        sandbox = await backend.create(self.template, self.resources, self.network, life_s)
        try:
            if self.publishes:
                made = await sandbox.commands.run('mkdir -p "$(readlink -f /logs)/artifacts"')
                if made.exit_code != 0:
                    raise SandboxError(f"/logs/artifacts: not created: {made.stderr[-200:]}", field="task")
            failure = self.health and await wait_until_healthy(sandbox, self.health)
            if failure:
                raise SandboxError(f"its health check {failure}", field="environment.healthcheck")
            failure = self.step and await begin_step(sandbox, self.step)
            if failure:
                raise SandboxError(failure, field="steps")
        except BaseException:
            await sandbox.kill()
            raise
        return sandbox


def task_origin(task: Task, given: Resources, reach: tuple[str, ...] = ()) -> Origin:
    """The origin of a session on a task. `reach`: hosts that it may reach in addition to the task's own, as
    in `Network.allow`. Raises TaskError as `task_template`."""
    machine = task.machine
    hosts = (*((machine and machine.hosts) or ()), *reach)
    return Origin(
        task_template(task),
        task_resources(task, given),
        Network(hosts) if hosts else None,
        health=machine.health if machine is not None else None,
        publishes=any(
            script.machine is not None
            or (machine is not None and not machine.is_host and "/**" in task.allowed_paths)
            for script in task.verifiers
        ),
        step=task.steps[0] if task.steps else None,
    )


def verifier_origin(task: Task, script: TestScript, given: Resources) -> Origin:
    """The origin of a verifier's sandbox, on the task's or its own machine. Raises as `task_template`."""
    own = task if script.machine is None else replace(task, files={}, machine=script.machine)
    template = task_template(own, script.user)
    return Origin(template, task_resources(own, given), Network(script.hosts) if script.hosts else None)


def user_of(task: Task | None) -> SimulatedUser | None:
    """The simulated user that answers questions in rollouts; None if the task withholds no facts."""
    return SimulatedUser(task.user_facts) if task is not None and task.user_facts else None


def task_template(task: Task, user: str = "") -> Template:
    """The template of a task: its files, over the image of its machine. `user`: overrides the agent's user.

    Raises TaskError for a task whose image was not resolved (see `task_images`).
    """
    machine = task.machine
    if machine is None or machine.is_host:
        return Template(task.files, task.id)
    found = machine.image
    if found is None:
        raise TaskError(
            "its image is not available",
            field="task",
            received=task.id,
            fix="run `etude tasks check` on its directory to see why",
        )
    user = user or machine.user or found.user
    home = "/root" if user.partition(":")[0] in ("", "root", "0") else "/tmp"
    env = {
        "HOME": home,
        **found.env,
        **machine.env,
    }  # the default is the workspace, with settings of the agent's
    image = Image(found.name, found.layers, env, machine.workdir or found.workdir, user)
    return Template(task.files, task.id, image)


def task_resources(task: Task, given: Resources) -> Resources:
    """The resources of a task's sandboxes: those that it requires, else the run's.

    A machine of its own has at least what programs in images typically need: 256 processes, 1 GiB of files,
    and the processor time of all cores within its time limits.
    """
    machine = task.machine
    if machine is None:
        return given
    disk_bytes = machine.disk_bytes or max(given.disk_bytes, 1 << 30)
    agent_s = sum(step.agent_s for step in task.steps) or machine.agent_s
    limit_s = max([agent_s, *(script.timeout_s for script in task.verifiers)])
    return replace(
        given,
        memory_bytes=machine.memory_bytes or given.memory_bytes,
        disk_bytes=disk_bytes,
        file_bytes=disk_bytes,
        cpus=machine.cpus or given.cpus,
        num_processes=max(given.num_processes, 256),
        open_files=max(given.open_files, 1024),
        cpu_s=max(given.cpu_s, math.ceil(limit_s) * (os.cpu_count() or 1)),
    )


async def run_harness_command(sandbox: Sandbox, what: str, command: str, stdin: bytes = b"") -> CommandResult:
    """Runs one of our own commands; `what` describes it. Raises SandboxError if it takes too long."""
    result = await sandbox.commands.run(command, OWN_S, OWN_ENV, stdin=stdin)
    if result.timed_out:
        raise SandboxError(f"{what} took more than {OWN_S:g} s", field="sandbox", received=sandbox.id)
    return result


async def wait_until_healthy(sandbox: Sandbox, check: HealthCheck) -> str | None:
    """Runs a health check until it succeeds; returns how it failed, or None. Raises SandboxError."""
    began, num_failed = time.monotonic(), 0
    while True:
        is_starting = time.monotonic() - began < check.start_period_s
        try:
            result = await sandbox.commands.run(check.command, check.timeout_s)
        except AgentError as error:
            return f"ended the sandbox: {error}"
        if result.exit_code == 0 and not result.timed_out:
            return None
        num_failed += not is_starting
        if num_failed >= check.retries:
            said = (result.stderr or result.stdout).strip()[-_SAID_CHARS:]
            return f"failed {num_failed} times ({check.command}): {said}"
        await asyncio.sleep(check.start_interval_s if is_starting else check.interval_s)


async def begin_step(sandbox: Sandbox, step: TaskStep) -> str | None:
    """Writes a step's files to the working directory, runs its setup and waits until it is healthy.

    Returns why that failed, or None. Raises SandboxError if our own machinery failed.
    """
    try:
        if step.files:
            laid = await sandbox.commands.run("tar -x -o -f -", _SETUP_S, OWN_ENV, stdin=step.files)
            if laid.exit_code != 0:
                return f"step {step.name} cannot be unpacked: {laid.stderr.strip()[-_SAID_CHARS:]}"
        if step.has_setup:
            ran = await sandbox.commands.run("bash ./setup.sh", _SETUP_S)
            if ran.exit_code != 0:
                return f"setup.sh of step {step.name} failed: {ran.stderr.strip()[-_SAID_CHARS:]}"
        failure = step.health and await wait_until_healthy(sandbox, step.health)
        return f"the health check of step {step.name} {failure}" if failure else None
    except AgentError as error:
        return error.message


def directory_template(path: Path) -> Template:
    """The regular files below a directory, without `.git`. Blocks. Raises ConfigError, ResourceError."""
    if not path.is_dir():
        raise ConfigError("no such directory", field="directory", received=str(path), fix="name another")
    files: dict[str, bytes | str] = {}
    total = 0
    for entry in sorted(path.rglob("*")):
        relative = entry.relative_to(path)
        if ".git" in relative.parts or entry.is_symlink() or not entry.is_file():
            continue
        total += entry.stat().st_size
        _check_size(total, path)
        files[relative.as_posix()] = entry.read_bytes()
    return Template(files, path.name)


async def repository_template(path: Path, commit: str = "HEAD") -> Template:
    """The files of one commit of a repository on this host, without `.git`, so without other commits.

    Raises ConfigError if there is no such repository or commit, ResourceError for more than SOURCE_BYTES.
    """
    # A name that begins with a dash would be an option; `--end-of-options` needs a newer git than many hosts.
    if commit.startswith("-") or not commit:
        raise ConfigError(
            "is not a commit", field="commit", received=commit, fix="name a hash, branch or tag"
        )
    return Template(await asyncio.to_thread(_read_commit, path, commit), path.name)


def _read_commit(path: Path, commit: str) -> dict[str, bytes | str]:
    with tempfile.TemporaryFile() as archive:
        try:
            run_git(path, "archive", "--format=tar", commit, timeout_s=_GIT_S, out=archive)
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(
                f"git: {git_fault(error)}", field="repository", received=str(path),
                fix="name a repository and a commit",
            ) from error  # fmt: skip
        _check_size(os.fstat(archive.fileno()).st_size, path)
        archive.seek(0)
        with tarfile.open(fileobj=archive) as tar:
            return {
                one.name: content.read() for one in tar if one.isreg() and (content := tar.extractfile(one))
            }


def _check_size(total: int, path: Path) -> None:
    if total > SOURCE_BYTES:
        raise ResourceError(
            f"holds more than {SOURCE_BYTES >> 20} MiB",
            field="source",
            received=str(path),
            fix="name a smaller directory, or begin with an image or a snapshot",
        )


class DeferredSandbox(WrappedSandbox):
    """A sandbox that is created in the background. Errors of its creation are raised by the first use."""

    def __init__(self, making: Coroutine[Any, Any, Sandbox]) -> None:
        """Starts creating the sandbox; needs a running event loop."""
        super().__init__("pending")
        self._making = asyncio.create_task(making)

    @property
    def id(self) -> str:
        """The sandbox's id; `pending` until it exists."""
        return self._making.result().id if self._making.done() else "pending"

    async def reach(self, operation: str) -> Sandbox:
        """The sandbox itself. Raises SandboxError if it could not be created."""
        return await asyncio.shield(self._making)

    async def kill(self) -> None:
        """See Sandbox.kill. Does nothing if the sandbox could not be created."""
        with contextlib.suppress(SandboxError):
            await super().kill()
