"""Grades a Harbor task by its own `tests/test.sh`, and solves it by its `solution/solve.sh`.

    agent's sandbox ── all processes killed ──> its changes, as far as the task allows, or its artifacts
                                                 |
    pristine image ──> a fresh sandbox + /tests + these ── test.sh ── all processes killed ──> reward file

Graded are the agent's changes in its workspace (contents and executable bits of regular files, and symbolic
links into it) and outside of it (`carrying`). If the verifier has a machine of its own, the pristine image is
that machine's, and only artifacts are copied there. The reward is read when no process can write it any more,
by the image's programs: none of those that we run come from the workspace, whatever the image's PATH says.

Known limit: code of the agent's that test.sh runs has test.sh's own rights, and can write the reward. Tasks
whose test.sh runs together with the agent's changes are reported as forgeable (`Grader.find_twins`), unless
they have exams (`etude.tasks.exams`).
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import shlex
import tarfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from etude.agent.tools.state import HARNESS_DIRECTORY
from etude.environment.carrying import (
    CarriedFiles,
    apply_carried,
    carry_artifacts,
    carry_root,
    find_ungraded,
    stays_inside,
)
from etude.environment.grading import Verdict, allowed_changes, apply_changes
from etude.environment.origins import OWN_ENV, OWN_S, run_harness_command, task_origin, verifier_origin
from etude.errors import AgentError, TaskError
from etude.kit.tasks import off_loop
from etude.records import Task, TestScript
from etude.sandbox.errors import PathMissingError, SandboxKilledByAgentError, Unsupported
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.types import CommandResult, Resources
from etude.tasks.archives import pack_texts
from etude.tasks.exams import MAX_OUTCOME_BYTES, OUTCOMES, read_exams, read_outcomes

FORGEABLE = "the agent's code runs in the same sandbox as tests/test.sh and could write the reward itself"
_MAX_SOLUTION_S = 3600.0
"""Time limit of a reference solution whose task gives the agent none."""
_LOGS = "/logs/verifier"
_SOLUTION_LOG = "/logs/agent/oracle.txt"
_REWARDS = ("reward.json", "reward.txt")
_REWARD_BYTES = 256 << 10
_SAID_CHARS = 200
_NUM_NAMED = 3
_BYTES_PER_MATCH = 16
"""Work per pattern match, in bytes, for deciding whether to use a thread."""
_UNPACK = """set -e
here="$(pwd -P)"
for path in /tests /solution /logs; do
    real="$path"
    [ ! -L "$path" ] || real="$(readlink -f "$path")"
    case "$real/" in "$here"/*) echo "$path lies in the working directory" >&2; exit 1; esac
    case "$here/" in "$real"/*) echo "the working directory lies in $path" >&2; exit 1; esac
    set -- "$@" "$real"
done
mkdir -p "$@" "$3/verifier" "$3/agent" "$3/artifacts"
for path in "$3/verifier/reward.txt" "$3/verifier/reward.json"; do
    if [ -e "$path" ] || [ -L "$path" ]; then rm -f "$path"; fi
done
"""
# A link is made only in a directory whose path has no links: else one of the agent's could place the next one
# in /tests.
_SET_LINKS = """here="$(pwd -P)"
while IFS= read -r path && IFS= read -r target; do
    folder="$here/$path"
    folder="${folder%/*}"
    [ "$(cd "$folder" 2> /dev/null && pwd -P)" = "$folder" ] || continue
    [ -L "./$path" ] || [ ! -d "./$path" ] || find "./$path" -depth -type d -exec rmdir {} +
    [ -L "./$path" ] || [ ! -d "./$path" ] || continue
    ln -sfn -- "$target" "./$path"
done"""
_SET_EXECUTABLE = """set --
while IFS= read -r path; do
    set -- "$@" "$path"
    if [ $# = 200 ]; then chmod +x -- "$@"; set --; fi
done
if [ $# != 0 ]; then chmod +x -- "$@"; fi"""


@dataclass(frozen=True, slots=True)
class AgentDiff:
    """The agent's changes that are graded."""

    changes: Mapping[str, bytes | None] = field(default_factory=dict[str, "bytes | None"])
    """Allowed changes of files in the workspace: path -> contents; None: removed."""
    executable: frozenset[str] = frozenset()
    """All executable files, also those with unchanged contents."""
    links: Mapping[str, str] | None = None
    """All symbolic links of the workspace: path -> target. None: unknown, the image's stay."""
    elsewhere: CarriedFiles | None = None
    """Files outside of the workspace. None: the agent did nothing, so none were collected."""


async def judge_by_script(task: Task, diff: AgentDiff, backend: SandboxBackend, given: Resources) -> Verdict:
    """Runs the task's `tests/test.sh` over the changes, in a fresh sandbox with nothing else in it.

    For a task with exams the reward is 1 if all of them are passed, else 0, whatever the script writes. A
    fault that the agent's files cause (a hang, a full disk, no reward) is a failed verdict with a cause and
    without a reward. Raises SandboxError if our own machinery failed, TaskError for an image in which no
    script can run, Unsupported without isolation.
    """
    script, began = task.verifier, time.perf_counter()
    assert script is not None, "the caller chose by it"
    await check_isolation(backend)
    if script.machine is not None and diff.elsewhere is None:  # the artifacts of an agent that does nothing
        async with await task_origin(task, given).make(backend) as sandbox:
            diff = await find_changes(task, sandbox)
    run = partial(_run_script, task, script, diff, backend, given)
    try:
        if script.exams:
            cause = await _sit_exams(script, run)
            passed, took_s = cause is None, time.perf_counter() - began
            return Verdict(passed, int(passed), int(not passed), cause, took_s, reward=float(passed))
        return verdict_on(_rewards_in(await run(b"")), time.perf_counter() - began)
    except AgentError as error:
        return Verdict(False, 0, 1, str(error), time.perf_counter() - began)


async def _sit_exams(
    script: TestScript, run: Callable[[bytes], Awaitable[Mapping[str, bytes]]]
) -> str | None:
    """Runs a task's exams: why one failed, or None if all passed. Raises AgentError without a result."""
    found = read_exams(script.exams)
    for exam in found.exams:
        files = found.files_of(exam)
        logs = await run(pack_texts(files) if files else b"")
        outcomes = read_outcomes(logs[OUTCOMES])
        failure = f"{OUTCOMES} is invalid" if outcomes is None else exam.judge(outcomes)
        if failure is not None:
            return failure
    return None


async def _run_script(
    task: Task, script: TestScript, diff: AgentDiff, backend: SandboxBackend, given: Resources, overlay: bytes
) -> dict[str, bytes]:
    """Runs test.sh in a fresh sandbox; returns the files that it wrote: rewards, or the outcomes of its
    tests. `overlay`: tar file unpacked over `/tests`. Raises AgentError if it wrote none."""
    origin = verifier_origin(task, script, given)
    async with await origin.make(backend) as fresh:
        await _unpack(fresh, task, "/tests", script.archive)
        if not script.archive:  # it is part of the image, and runs whatever its mode, as in Harbor
            await run_harness_command(fresh, "making tests/test.sh executable", "chmod +x /tests/test.sh")
        if overlay:
            await _unpack(fresh, task, "/tests", overlay)
        if diff.elsewhere is not None:
            await apply_carried(diff.elsewhere, fresh)
        if script.machine is None:
            await _apply_agent_changes(fresh, task, diff)
        command = "(/tests/test.sh) > /logs/verifier/test-stdout.txt 2>&1"
        # Without an image HOME is the workspace, and the agent's files would be read as settings.
        has_image = origin.template is not None and origin.template.image is not None
        env = {**({} if has_image else {"HOME": "/tmp"}), **script.env}
        result = await fresh.commands.run(command, script.timeout_s, env)
        if result.timed_out:
            raise AgentError(f"timeout: tests/test.sh did not end within {script.timeout_s:g} s")
        await _end_processes(fresh)
        if script.exams:
            return await _read_logs(fresh, result, [OUTCOMES], MAX_OUTCOME_BYTES)
        return await _read_logs(fresh, result, _REWARDS, _REWARD_BYTES)


def verdict_on(rewards: Mapping[str, float], duration_s: float) -> Verdict:
    """The verdict by the main reward: the one named `reward`, or the only one."""
    reward = next(iter(rewards.values())) if len(rewards) == 1 else rewards.get("reward")
    if reward is None:
        cause = f"reward.json has no key `reward`: {dict(rewards)}"
        return Verdict(False, 0, 1, cause, duration_s, rewards=rewards)
    passed = reward >= 1.0
    cause = None if passed else f"tests/test.sh gave {reward:g}"
    return Verdict(passed, int(passed), int(not passed), cause, duration_s, reward=reward, rewards=rewards)


async def run_collect_commands(task: Task, sandbox: Sandbox) -> None:
    """Runs a task's collect commands in the agent's sandbox after the agent has ended.

    As in Harbor their exit codes are ignored: what could not be collected is missing.
    """
    if task.verifier is not None:
        for hook in task.verifier.collect:
            await sandbox.commands.run(hook.command, hook.timeout_s)


async def find_changes(task: Task, sandbox: Sandbox) -> AgentDiff:
    """Kills all processes and collects the agent's changes: those of files and, for a task with a script, all
    others. Raises AgentError for faults of the agent, SandboxError."""
    script = task.verifier
    await run_collect_commands(task, sandbox)
    if script is not None and script.machine is not None:
        await _end_processes(sandbox)
        return AgentDiff(elsewhere=await carry_artifacts(script.artifacts, sandbox))
    found = await sandbox.final_diff(HARNESS_DIRECTORY)
    size = _BYTES_PER_MATCH * len(found) * len(task.allowed_paths)
    changes = await off_loop(size, allowed_changes, task, found)
    if script is None:
        return AgentDiff(changes)
    _, kinds = await sandbox.kinds()  # no process can change them any more
    found = {path: kinds[path] for path in sorted(allowed_changes(task, dict.fromkeys(kinds)))}
    executable = frozenset(path for path, target in found.items() if not target and "\n" not in path)
    links = {path: target for path, target in found.items() if target}
    return AgentDiff(changes, executable, links, await carry_root(task, sandbox))


async def check_isolation(backend: SandboxBackend) -> None:
    """Raises Unsupported if a task's scripts would change files of this machine."""
    found = await backend.hello()
    if found.isolation == "none":
        raise Unsupported(
            f"{found.backend} does not isolate a task's scripts, which write to /tests and /logs",
            field="sandbox.backend",
            received=found.backend,
            fix="use local or podman",
        )


async def run_solution(task: Task, sandbox: Sandbox) -> str | None:
    """Runs the task's `solution/solve.sh` like an agent; returns why it failed, or None.

    As in Harbor its exit code is ignored: the resulting files are graded.
    """
    solution, machine = task.solution, task.machine
    assert solution is not None, "the caller looked"
    try:
        await _unpack(sandbox, task, "/solution", solution.archive)
        limit_s = machine.agent_s if machine is not None and machine.agent_s else _MAX_SOLUTION_S
        command = f'{{ /solution/solve.sh || echo "ended with $?"; }} > {_SOLUTION_LOG} 2>&1'
        env = {"DEBIAN_FRONTEND": "noninteractive", **solution.env}
        result = await sandbox.commands.run(command, limit_s, env)
    except AgentError as error:
        return str(error)
    return f"timeout: solution/solve.sh did not end within {limit_s:g} s" if result.timed_out else None


async def explain_failure(task: Task, sandbox: Sandbox) -> str:
    """Possible reasons why `solve.sh` earned nothing: changes that were not graded, and its last output."""
    words: list[str] = []
    if lost := await find_ungraded(task, sandbox):
        named = ", ".join(lost[:_NUM_NAMED]) + (", ..." if len(lost) > _NUM_NAMED else "")
        words.append(f"allowed_paths keeps {named} from grading")
    read = await sandbox.commands.run(f"tail -c 1000 {_SOLUTION_LOG}", OWN_S, OWN_ENV)
    if said := " ".join(read.stdout.split())[-_SAID_CHARS:]:
        words.append(f"solution/solve.sh said: {said}")
    return "; ".join(words)


async def _apply_agent_changes(fresh: Sandbox, task: Task, diff: AgentDiff) -> None:
    """Applies the agent's changes to a sandbox in the agent's initial state."""
    here, before = await fresh.kinds()
    images = allowed_changes(task, {path: None for path, target in before.items() if target})
    links = diff.links or {}
    for path in images.keys() - (images if diff.links is None else links).keys():
        with contextlib.suppress(PathMissingError):
            await fresh.files.remove(path)
    await apply_changes(diff.changes, fresh)
    executable = [f"{path}\n" for path in sorted(diff.executable) if before.get(path) != ""]
    laid = [f"{path}\n{to}\n" for path, to in links.items() if stays_inside(path, to, here)]
    for command, lines in ((_SET_EXECUTABLE, executable), (_SET_LINKS, laid)):
        if lines:
            data = "".join(lines).encode(errors="surrogateescape")
            await run_harness_command(fresh, "making executable files and links", command, data)


async def _unpack(sandbox: Sandbox, task: Task, target: str, archive: bytes) -> None:
    """Unpacks one of the task's directories at Harbor's path for it.

    Raises TaskError if the image lacks the programs, SandboxError if it took too long.
    """
    command = _UNPACK + (f"tar -x -o -f - -C {shlex.quote(target)}" if archive else "")
    result = await run_harness_command(sandbox, f"unpacking {target}", command, archive)
    if result.exit_code != 0:
        raise TaskError(
            f"cannot be unpacked in the task's image: {result.stderr.strip()[:_SAID_CHARS]}",
            field=target.strip("/"),
            received=task.id,
            fix="use an image with sh, tar, coreutils and a user who can write to /",
        )


async def _end_processes(sandbox: Sandbox) -> None:
    """Kills all processes of the sandbox; the changes that `final_diff` returns are not needed."""
    try:
        await sandbox.final_diff()
    except SandboxKilledByAgentError:
        raise
    except AgentError:
        pass


async def _read_logs(
    fresh: Sandbox, ran: CommandResult, names: Sequence[str], limit_bytes: int
) -> dict[str, bytes]:
    """The verifier's files that exist; read without programs of the image."""
    packed = await fresh.pack([f"{_LOGS}/{name}" for name in names], limit_bytes=limit_bytes)
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as archive:
        files = {row.name.rpartition("/")[2]: archive.extractfile(row) for row in archive if row.isreg()}
        found = {name: file.read() for name in names if (file := files.get(name)) is not None}
    if found:
        return found
    tail = await fresh.commands.run(f"tail -c 1000 {_LOGS}/test-stdout.txt", OWN_S, OWN_ENV)
    said = tail.stdout.strip()[-_SAID_CHARS:]
    what = OUTCOMES if OUTCOMES in names else "reward"
    words = f"tests/test.sh wrote no {what} and ended with {ran.exit_code}"
    raise AgentError(f"{words}: {said}" if said else words)


def _rewards_in(logs: Mapping[str, bytes]) -> dict[str, float]:
    """The numbers in the first existing reward file; one without a name is `reward`. Raises AgentError for
    other values, as Harbor does."""
    name = next(name for name in _REWARDS if name in logs)
    text, is_json = logs[name].decode(errors="replace"), name == "reward.json"
    try:
        found = json.loads(text) if is_json else float(text)
    except (ValueError, RecursionError):
        what = "is not JSON" if is_json else "holds no finite number"
        raise AgentError(f"{name} {what}: {text.strip()[:80]!r}") from None
    named = found if isinstance(found, dict) else {"reward": found}
    if not named:
        raise AgentError(f"{name} holds no number")
    return {str(key): _number(value, name) for key, value in named.items()}


def _number(value: object, name: str) -> float:
    if isinstance(value, int | float):
        with contextlib.suppress(OverflowError):
            if math.isfinite(value):
                return float(value)
    raise AgentError(f"{name} holds no finite number: {str(value)[:80]!r}")
