"""What happens in a sandbox before the agent begins: health checks, and the files and setup of a step."""

from __future__ import annotations

import asyncio
import time

from etude.errors import AgentError, SandboxError
from etude.records import HealthCheck, TaskStep
from etude.sandbox.interface import Sandbox
from etude.sandbox.types import CommandResult

OWN_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    **dict.fromkeys(("LD_LIBRARY_PATH", "LD_PRELOAD", "BASH_ENV", "ENV"), ""),
}
"""Of our own commands: those of an image may lead into the workspace, where the agent puts what it likes."""
OWN_S = 60.0
"""How long one of them may take."""
_SETUP_S = 600.0
_SAID_CHARS = 200


async def run_own(sandbox: Sandbox, what: str, command: str, stdin: bytes = b"") -> CommandResult:
    """Runs a command of ours, which does `what`. Raises SandboxError where it takes too long."""
    result = await sandbox.commands.run(command, OWN_S, OWN_ENV, stdin=stdin)
    if result.timed_out:
        raise SandboxError(f"{what} took more than {OWN_S:g} s", field="sandbox", received=sandbox.id)
    return result


async def wait_until_healthy(sandbox: Sandbox, check: HealthCheck) -> str | None:
    """Runs a health check until it succeeds: how it failed, or None. Raises SandboxError."""
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
    """Lays a step's files into the working directory, runs its setup and waits until it is healthy.

    Why that failed, or None. Raises SandboxError if our own machinery failed.
    """
    try:
        if step.files:
            laid = await sandbox.commands.run("tar -x -o -f -", _SETUP_S, OWN_ENV, stdin=step.files)
            if laid.exit_code != 0:
                return f"the files of step {step.name} cannot be laid: {laid.stderr.strip()[-_SAID_CHARS:]}"
        if step.has_setup:
            ran = await sandbox.commands.run("bash ./setup.sh", _SETUP_S)
            if ran.exit_code != 0:
                return f"setup.sh of step {step.name} failed: {ran.stderr.strip()[-_SAID_CHARS:]}"
        failure = step.health and await wait_until_healthy(sandbox, step.health)
        return f"the health check of step {step.name} {failure}" if failure else None
    except AgentError as error:
        return error.message
