"""Grading by a task's own `tests/test.sh`, and solving it by its `solution/solve.sh`: Harbor's kind of task.

    agent's sandbox ── every process dead ──> its changes, as far as the task allows, or its artifacts
                                                 |
    pristine image ──> a fresh sandbox + /tests + these ── test.sh ── every process dead ──> reward file

What the agent changed in its workspace reaches grading: regular files with their contents, whether they can
be executed, and symbolic links that lead to something of it; so do changes elsewhere (`carrying`). Where the
verifier has a machine of its own, the pristine image is that one's, and only artifacts reach it. The reward
is read once nothing runs that could write it, by the image's programs: none of ours come from the workspace,
whatever the image's PATH says.

Honest limit: code of the agent's that test.sh runs has test.sh's own rights, and can write the reward. Tasks
whose test.sh runs where the agent's changes are laid are said to be forgeable (`Grader.find_twins`), unless
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
from etude.environment.carrying import Carried, carry_artifacts, carry_root, lay, left_behind, stays_inside
from etude.environment.grading import Verdict, allowed_changes, lay_files
from etude.environment.origins import OWN_ENV, OWN_S, run_own, task_origin, verifier_origin
from etude.errors import AgentError, TaskError
from etude.kit.tasks import off_loop
from etude.records import Task, TestScript
from etude.sandbox.errors import PathMissingError, SandboxKilledByAgentError, Unsupported
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.types import CommandResult, Resources
from etude.tasks.archives import pack_texts
from etude.tasks.exams import MAX_OUTCOME_BYTES, OUTCOMES, read_exams, read_outcomes

FORGEABLE = "code of the agent's runs in the same sandbox as tests/test.sh, and could write the reward itself"
_MAX_SOLUTION_S = 3600.0
"""Of a reference solution whose task gives the agent no time limit."""
_LOGS = "/logs/verifier"
_SOLUTION_LOG = "/logs/agent/oracle.txt"
_REWARDS = ("reward.json", "reward.txt")
_REWARD_BYTES = 256 << 10
_SAID_CHARS = 200
_NUM_NAMED = 3
_BYTES_PER_MATCH = 16
"""As many of these as characters that are looked at are worth a thread."""
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
# A link goes only where no link leads: else one of the agent's would put the next one into /tests.
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
class Left:
    """What an agent left behind, as far as it reaches grading."""

    changes: Mapping[str, bytes | None] = field(default_factory=dict[str, "bytes | None"])
    """Allowed changes of the workspace's files: their contents; None: it was removed."""
    executable: frozenset[str] = frozenset()
    """Files that can be executed, also those whose contents are as they were."""
    links: Mapping[str, str] | None = None
    """All symbolic links of the workspace: path -> target. None: not known, the image's stay."""
    elsewhere: Carried | None = None
    """What crosses beside the workspace. None: nothing was done, and nothing was looked for."""


async def judge_by_script(task: Task, left: Left, backend: SandboxBackend, given: Resources) -> Verdict:
    """Runs the task's `tests/test.sh` over the changes, in a fresh sandbox with nothing else in it.

    Of a task with exams the reward is 1 if all of them are passed, else 0, whatever the script writes.
    What the agent's files did to it (a hang, a full disk, no reward) is a failure without a reward, but with
    a cause. Raises SandboxError if our own machinery failed, TaskError for an image in which no script can be
    run, Unsupported without isolation.
    """
    script, began = task.verifier, time.perf_counter()
    assert script is not None, "the caller chose by it"
    await check_isolation(backend)
    if script.machine is not None and left.elsewhere is None:  # what an agent leaves that does nothing
        async with await task_origin(task, given).make(backend) as sandbox:
            left = await find_left(task, sandbox)
    run = partial(_run_script, task, script, left, backend, given)
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
    """Why one of a task's exams is not passed; None if all are. Raises AgentError without a result."""
    found = read_exams(script.exams)
    for exam in found.exams:
        files = found.files_of(exam)
        logs = await run(pack_texts(files) if files else b"")
        outcomes = read_outcomes(logs[OUTCOMES])
        failure = f"{OUTCOMES} is not what it should be" if outcomes is None else exam.judge(outcomes)
        if failure is not None:
            return failure
    return None


async def _run_script(
    task: Task, script: TestScript, left: Left, backend: SandboxBackend, given: Resources, overlay: bytes
) -> dict[str, bytes]:
    """What test.sh has written in a fresh sandbox: rewards, or how its tests ended. `overlay`: tar file over
    `/tests`. Raises AgentError where it is nothing."""
    origin = verifier_origin(task, script, given)
    async with await origin.make(backend) as fresh:
        await _unpack(fresh, task, "/tests", script.archive)
        if not script.archive:  # it lies in the image, and may be run whatever its rights, as in Harbor
            await run_own(fresh, "making tests/test.sh executable", "chmod +x /tests/test.sh")
        if overlay:
            await _unpack(fresh, task, "/tests", overlay)
        if left.elsewhere is not None:
            await lay(left.elsewhere, fresh)
        if script.machine is None:
            await _lay_over(fresh, task, left)
        command = "(/tests/test.sh) > /logs/verifier/test-stdout.txt 2>&1"
        # The workspace is home on the host's programs, and the agent's files would be read as settings.
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
    """The verdict by rewards of which one stands for all: the one named `reward`, or the only one."""
    reward = next(iter(rewards.values())) if len(rewards) == 1 else rewards.get("reward")
    if reward is None:
        cause = f"reward.json has no key `reward`: {dict(rewards)}"
        return Verdict(False, 0, 1, cause, duration_s, rewards=rewards)
    passed = reward >= 1.0
    cause = None if passed else f"tests/test.sh gave {reward:g}"
    return Verdict(passed, int(passed), int(not passed), cause, duration_s, reward=reward, rewards=rewards)


async def collect(task: Task, sandbox: Sandbox) -> None:
    """Runs the commands that a task has run in the agent's sandbox when the agent has ended.

    As in Harbor how they end does not count: what could not be collected is simply not there.
    """
    if task.verifier is not None:
        for hook in task.verifier.collect:
            await sandbox.commands.run(hook.command, hook.timeout_s)


async def find_left(task: Task, sandbox: Sandbox) -> Left:
    """What the agent left behind: allowed changes, and for a task's script the rest. Ends everything that
    runs. Raises AgentError for what the agent did wrong, SandboxError."""
    script = task.verifier
    await collect(task, sandbox)
    if script is not None and script.machine is not None:
        await _end_processes(sandbox)
        return Left(elsewhere=await carry_artifacts(script.artifacts, sandbox))
    found = await sandbox.final_diff(HARNESS_DIRECTORY)
    size = _BYTES_PER_MATCH * len(found) * len(task.allowed_paths)
    changes = await off_loop(size, allowed_changes, task, found)
    if script is None:
        return Left(changes)
    _, kinds = await sandbox.kinds()  # nothing runs there any more
    found = {path: kinds[path] for path in sorted(allowed_changes(task, dict.fromkeys(kinds)))}
    executable = frozenset(path for path, target in found.items() if not target and "\n" not in path)
    links = {path: target for path, target in found.items() if target}
    return Left(changes, executable, links, await carry_root(task, sandbox))


async def check_isolation(backend: SandboxBackend) -> None:
    """Raises Unsupported where a task's scripts would change the files of this machine."""
    found = await backend.hello()
    if found.isolation == "none":
        raise Unsupported(
            f"{found.backend} does not isolate a task's scripts, which write to /tests and /logs",
            field="sandbox.backend",
            received=found.backend,
            fix="use local or podman",
        )


async def run_solution(task: Task, sandbox: Sandbox) -> str | None:
    """Runs the task's `solution/solve.sh` as the agent would: why it failed, or None.

    As in Harbor its exit code does not count: what it left behind is graded.
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


async def solution_words(task: Task, sandbox: Sandbox) -> str:
    """What may be why `solve.sh` earned nothing: what of its work was not graded, and what it said last."""
    words: list[str] = []
    if lost := await left_behind(task, sandbox):
        named = ", ".join(lost[:_NUM_NAMED]) + (", ..." if len(lost) > _NUM_NAMED else "")
        words.append(f"allowed_paths keeps {named} from grading")
    read = await sandbox.commands.run(f"tail -c 1000 {_SOLUTION_LOG}", OWN_S, OWN_ENV)
    if said := " ".join(read.stdout.split())[-_SAID_CHARS:]:
        words.append(f"solution/solve.sh said: {said}")
    return "; ".join(words)


async def _lay_over(fresh: Sandbox, task: Task, left: Left) -> None:
    """Makes the agent's changes in a sandbox that is as the agent's was at first."""
    here, before = await fresh.kinds()
    images = allowed_changes(task, {path: None for path, target in before.items() if target})
    links = left.links or {}
    for path in images.keys() - (images if left.links is None else links).keys():
        with contextlib.suppress(PathMissingError):
            await fresh.files.remove(path)
    await lay_files(left.changes, fresh)
    executable = [f"{path}\n" for path in sorted(left.executable) if before.get(path) != ""]
    laid = [f"{path}\n{to}\n" for path, to in links.items() if stays_inside(path, to, here)]
    for command, lines in ((_SET_EXECUTABLE, executable), (_SET_LINKS, laid)):
        if lines:
            data = "".join(lines).encode(errors="surrogateescape")
            await run_own(fresh, "making executable files and links", command, data)


async def _unpack(sandbox: Sandbox, task: Task, target: str, archive: bytes) -> None:
    """Unpacks a directory of the task's where Harbor has it.

    Raises TaskError if the image cannot, SandboxError if it was not done in time.
    """
    command = _UNPACK + (f"tar -x -o -f - -C {shlex.quote(target)}" if archive else "")
    result = await run_own(sandbox, f"unpacking {target}", command, archive)
    if result.exit_code != 0:
        raise TaskError(
            f"cannot be unpacked in the task's image: {result.stderr.strip()[:_SAID_CHARS]}",
            field=target.strip("/"),
            received=task.id,
            fix="the image needs sh, tar and coreutils, and a user who may write to /",
        )


async def _end_processes(sandbox: Sandbox) -> None:
    """Ends everything that runs. What else it would tell, of files, nobody needs."""
    try:
        await sandbox.final_diff()
    except SandboxKilledByAgentError:
        raise
    except AgentError:
        pass


async def _read_logs(
    fresh: Sandbox, ran: CommandResult, names: Sequence[str], limit_bytes: int
) -> dict[str, bytes]:
    """Those of the verifier's files that are there; no program of the image's reads them."""
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
    """The numbers in the first of the files; one without a name is `reward`. Raises AgentError where one is
    none, as Harbor does."""
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
