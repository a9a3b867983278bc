"""Tasks that `tests/test.sh` grades: right and wrong solutions, and failures without a reward."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from etude.agent import registry_named
from etude.environment.grading import Verdict
from etude.environment.origins import task_origin, task_resources
from etude.environment.scripts import AgentDiff, run_solution
from etude.environment.server.host import SessionHost
from etude.environment.server.requests import find_task
from etude.environment.sessions import EnvironmentSession, SessionServices
from etude.environment.verdicts import Grader
from etude.environment.wire import task_document, task_of
from etude.errors import SandboxError, TaskError, UserError
from etude.records import Task, ToolCall, ToolErrorClass, ToolResult
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.types import CommandResult, Resources
from etude.tasks.harbor import read_harbor
from tests.sandbox.backends import with_backend
from tests.tasks.harbor_tasks import KINDS, REWARD_TEXT, write_task

SLEEP = ToolCall("run_command", {"command": "sleep 30"})


async def play(backend: SandboxBackend, task: Task, command: str | None = None) -> Verdict:
    """What the reference solution earns, or a command in its place."""
    sandbox = await task_origin(task, Resources()).make(backend)
    if command is None:
        assert await run_solution(task, sandbox) is None
    else:
        await sandbox.commands.run(command)
    return await Grader(backend).grade(task, sandbox)


class ChangedCommands(LocalBackend):
    """Has an image's environment in every command, and changes what some of them end with."""

    def __init__(
        self,
        env: Mapping[str, str] | None = None,
        change: Callable[[str, CommandResult], CommandResult] = lambda _, result: result,
        directory: str = ".",
    ) -> None:
        """`directory`: the working directory of every command."""
        super().__init__()
        self._env, self._change = dict(env or {}), change
        self._enter = f"mkdir -p {directory} && cd {directory}\n" if directory != "." else ""

    async def create(self, *arguments: Any, **named: Any) -> MachineSandbox:
        sandbox = await super().create(*arguments, **named)
        run = sandbox.commands.run

        async def changed(
            cmd: str, timeout_s: float = 30.0, env: Mapping[str, str] | None = None, *others: Any, **more: Any
        ) -> CommandResult:
            result = await run(self._enter + cmd, timeout_s, {**self._env, **(env or {})}, *others, **more)
            return self._change(cmd, result)

        sandbox.commands.run = changed
        return sandbox


def play_on(backend: LocalBackend, task: Task, command: str) -> Verdict:
    async def scenario(_: SandboxBackend) -> Verdict:
        try:
            return await play(backend, task, command)
        finally:
            await backend.close()

    return with_backend("local", scenario)


def verdicts(directory: Path, *commands: str | None) -> list[Verdict]:
    task = read_harbor(directory)

    async def scenario(backend: SandboxBackend) -> list[Verdict]:
        return [await play(backend, task, command) for command in commands]

    return with_backend("local", scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_the_solution_earns_1_and_doing_nothing_0(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path, "host")
    solved, nothing = verdicts(tmp_path, None, "true")
    assert (solved.passed, solved.reward, solved.cause) == (True, 1.0, None)
    assert (nothing.passed, nothing.reward) == (False, 0.0)


def test_a_reward_between_0_and_1_is_kept(tmp_path: Path) -> None:
    KINDS["fraction"](tmp_path, "host")
    (half,) = verdicts(tmp_path, "touch a b")
    assert (half.passed, half.reward, half.cause) == (False, 0.5, "tests/test.sh gave 0.5")


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("#!/bin/sh\necho no luck; exit 3\n", "tests/test.sh wrote no reward and ended with 3: no luck"),
        ("#!/bin/sh\necho nan > /logs/verifier/reward.txt\n", "reward.txt holds no finite number: 'nan'"),
        ("#!/bin/sh\necho one > /logs/verifier/reward.txt\n", "reward.txt holds no finite number: 'one"),
        ("#!/bin/sh\n: > /logs/verifier/reward.txt\n", "reward.txt holds no finite number: ''"),
        ("#!/bin/sh\necho 1e999 > /logs/verifier/reward.json\n", "reward.json holds no finite number"),
        ('#!/bin/sh\necho \'{"a": 1, "b": 1}\' > /logs/verifier/reward.json\n', "has no key `reward`"),
        ('#!/bin/sh\necho \'{"a": "1"}\' > /logs/verifier/reward.json\n', "reward.json holds no finite"),
        ("#!/bin/sh\necho 1 > /logs/verifier/reward.txt\nsleep 60\n", "timeout: tests/test.sh did not end"),
        ("#!/no/such/program\n", "tests/test.sh wrote no reward and ended with 12"),
        ("#!/bin/sh\nkill -9 -1\n", "wrote no reward"),
        (
            "#!/bin/sh\ncd /logs/verifier; mkdir reward.json; : > reward.json/x\n",
            "wrote no reward",
        ),
    ],
)
def test_what_is_no_reward_is_a_failure_with_its_cause(tmp_path: Path, test: str, expected: str) -> None:
    write_task(tmp_path, test, toml="[verifier]\ntimeout_sec = 1\n")
    (verdict,) = verdicts(tmp_path, "true")
    assert (verdict.passed, verdict.reward) == (False, None)
    assert verdict.cause is not None and expected in verdict.cause


def test_nothing_that_the_agent_left_running_or_outside_its_workspace_reaches_grading(tmp_path: Path) -> None:
    """The control: the same file in the workspace does reach it."""
    (directory := tmp_path / "task").mkdir()
    write_task(directory, REWARD_TEXT.replace("greeting.txt", "/tmp/greeting.txt"))
    outside = "echo hello > /tmp/greeting.txt; (while :; do echo hello > /tmp/greeting.txt; done) &"
    faked = "mkdir -p /tmp/logs/verifier; echo 1 > /logs/verifier/reward.txt"
    assert [verdict.reward for verdict in verdicts(directory, outside, faked)] == [0.0, 0.0]
    write_task(directory)
    assert [verdict.reward for verdict in verdicts(directory, "echo hello > greeting.txt")] == [1.0]


def test_a_task_with_scripts_crosses_the_wire_whole(tmp_path: Path) -> None:
    KINDS["variables"](tmp_path, "host")
    task = read_harbor(tmp_path)
    assert task_of(json.loads(json.dumps(task_document(task)))) == replace(task, directory=None)
    with pytest.raises(UserError, match="can only be named"):
        find_task(cast("SessionHost", None), task_document(task))
    document = task_document(task)
    document["verifier"]["archive"] = "no base64!"
    with pytest.raises(UserError, match=r"task\.verifier"):
        task_of(document)


def test_the_time_of_a_task_bounds_all_calls_together(tmp_path: Path) -> None:
    write_task(tmp_path, toml="[agent]\ntimeout_sec = 0.5\n")
    task = read_harbor(tmp_path)
    registry = registry_named("full")

    async def scenario(backend: SandboxBackend) -> list[ToolResult]:
        session = EnvironmentSession.begin(SessionServices(backend, Grader(backend), registry), task)
        results: list[ToolResult] = []
        for call in (SLEEP, SLEEP, ToolCall("finish")):
            results += await session.run_calls([call], {}, lambda *_: None, lambda *_: None)
        assert session.finished
        await session.close()
        return results

    slept, refused, _ = with_backend("local", scenario)
    assert slept.error is refused.error is ToolErrorClass.TIMEOUT
    assert refused.output == "the time for this task is over: 0.5 s for all calls together"


def test_the_reward_is_read_when_nothing_runs_that_could_write_it(tmp_path: Path) -> None:
    KINDS["background"](tmp_path, "host")
    task = read_harbor(tmp_path)

    class LateReader(LocalBackend):
        """Reads the reward long after test.sh has ended."""

        async def create(self, *arguments: Any, **named: Any) -> MachineSandbox:
            sandbox = await super().create(*arguments, **named)
            pack = sandbox.pack

            async def late(*others: Any, **more: Any) -> bytes:
                await asyncio.sleep(1.0)
                return await pack(*others, **more)

            sandbox.pack = late
            return sandbox

    async def scenario(backend: SandboxBackend) -> Verdict:
        late = LateReader()
        try:
            return await play(late, task)
        finally:
            await late.close()

    assert with_backend("local", scenario).reward == 1.0


FORGE = r"""printf '#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n' > /tests/test.sh
/bin/chmod +x /tests/test.sh"""
PLANTED = {"mkdir": "exit 0", "readlink": "exit 1", "tar": f"cat > /dev/null; {FORGE}"}


@pytest.mark.parametrize("tool", PLANTED)
def test_a_tool_that_the_agent_planted_on_the_images_path_is_none_of_ours(tmp_path: Path, tool: str) -> None:
    write_task(tmp_path)
    plant = f"mkdir bin; cat > bin/{tool} << 'END'\n#!/bin/sh\n{PLANTED[tool]}\nEND\n"
    plant += f"chmod +x bin/{tool}"
    path = "/workspace/bin:/usr/bin:/bin"
    verdict = play_on(ChangedCommands({"PATH": path}), read_harbor(tmp_path), plant)
    assert (verdict.reward, verdict.cause) == (0.0, "tests/test.sh gave 0")


def test_settings_that_the_agent_left_in_its_workspace_are_not_those_of_the_tests(tmp_path: Path) -> None:
    KINDS["python"](tmp_path, "host")
    leave = 'there="$(python3 -m site --user-site)"; mkdir -p "$there"; '
    leave += "echo 'import os; os._exit(0)' > \"$there/usercustomize.py\""
    (verdict,) = verdicts(tmp_path, leave)
    assert verdict.reward == 0.0


@pytest.mark.parametrize(
    ("directory", "said"),
    [("/tmp", "/tests lies in the working directory"), ("/tmp/tests/app", "directory lies in /tests")],
)
def test_the_tests_cannot_be_where_the_agents_changes_are_laid(
    tmp_path: Path, directory: str, said: str
) -> None:
    with pytest.raises(TaskError, match=said):
        play_on(ChangedCommands(directory=directory), read_harbor(write_task(tmp_path)), "true")


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("set -e", "unpacking"),
        ("set --", "making executable files and links"),
    ],
)
def test_what_of_ours_took_too_long_is_no_verdict(tmp_path: Path, start: str, said: str) -> None:
    write_task(tmp_path)

    def change(cmd: str, result: CommandResult) -> CommandResult:
        return replace(result, exit_code=-9, timed_out=True) if cmd.startswith(start) else result

    with pytest.raises(SandboxError, match=said):
        play_on(ChangedCommands(change=change), read_harbor(tmp_path), "touch a; chmod +x a")


def test_links_whose_names_are_too_much_are_the_agents_failure_with_its_cause(tmp_path: Path) -> None:
    make = "import os; [os.symlink('a' * 4000, str(number)) for number in range(4300)]"
    task = read_harbor(write_task(tmp_path))
    verdict = play_on(LocalBackend(), task, f'python3 -c "{make}"; echo hello > greeting.txt')
    assert (verdict.passed, verdict.reward) == (False, None)
    assert verdict.cause == "the changes are too large to carry"


LINK_TEST = """#!/bin/sh
echo 0 > /logs/verifier/reward.txt
[ "$(readlink current)" = new ] && [ "$(cat current/said)" = right ] || exit
echo 1 > /logs/verifier/reward.txt
"""
RUN_TEST = """#!/bin/sh
./run && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""
PLANTED_TEST = """#!/bin/sh
echo 1 > /logs/verifier/reward.txt
if [ -L out ] && [ ! -L sub/planted ]; then echo 0 > /logs/verifier/reward.txt; fi
"""


@pytest.mark.parametrize(
    ("command", "reward"),
    [
        ("mkdir new; echo right > new/said; ln -s new current", 1.0),
        ("mkdir new; echo right > new/said; ln -s ./new current", 0.0),
        ("mkdir new current; echo right > new/said; cp new/said current", 0.0),
    ],
)
def test_symbolic_links_of_the_workspace_reach_grading(tmp_path: Path, command: str, reward: float) -> None:
    task = read_harbor(write_task(tmp_path, LINK_TEST))
    assert play_on(LocalBackend(), task, command).reward == reward


STEAL_TEST = """#!/bin/sh
cmp -s answer.json /tests/expected.json && reward=1
echo ${reward:-0} > /logs/verifier/reward.txt
"""
COUNT_TEST = """#!/bin/sh
echo 0 > /logs/verifier/reward.txt
echo 1 > result.txt
"""


@pytest.mark.parametrize(
    ("test", "command", "reward"),
    [
        (STEAL_TEST, "ln -s /tests/expected.json answer.json", 0.0),
        (STEAL_TEST, "ln -s ../tests/expected.json answer.json", 0.0),
        (STEAL_TEST, 'ln -s "$PWD/../tests/expected.json" answer.json', 0.0),
        (STEAL_TEST, "mkdir d; touch d/f; ln -s .. d/up; ln -s d/up/../tests/expected.json answer.json", 0.0),
        (COUNT_TEST, "ln -s /logs/verifier/reward.txt result.txt", 0.0),
        (STEAL_TEST, 'echo 42 > a; ln -s "$PWD/a" answer.json', 1.0),
        (STEAL_TEST, "mkdir d; echo 42 > a; touch d/f; ln -s ../a d/b; ln -s ./d/b answer.json", 1.0),
    ],
)
def test_no_link_of_the_agents_leads_to_the_tests_or_their_reward(
    tmp_path: Path, test: str, command: str, reward: float
) -> None:
    task = read_harbor(write_task(tmp_path, test, files={"tests/expected.json": "42\n"}))
    assert play_on(LocalBackend(), task, command).reward == reward


class LinkedImage(LocalBackend):
    """Every sandbox begins with a link `current`."""

    async def create(self, *arguments: Any, **named: Any) -> MachineSandbox:
        sandbox = await super().create(*arguments, **named)
        await sandbox.commands.run("ln -s v1.txt current")
        return sandbox


@pytest.mark.parametrize(
    ("command", "test"),
    [
        ("rm current; echo new > current", '[ ! -L current ] && [ "$(cat v1.txt current)" = "old\nnew" ]'),
        ("rm current; mkdir current; echo new > current/a", '[ "$(cat current/a)" = new ]'),
        ("rm current", "[ ! -L current ]"),
        ("ln -sfn v2.txt current", '[ "$(readlink current)" = v2.txt ]'),
        ("ln -sfn /etc/passwd current", '[ "$(readlink current)" = v1.txt ]'),
        ("true", '[ "$(readlink current)" = v1.txt ]'),
    ],
)
def test_what_became_of_the_images_links_reaches_grading(tmp_path: Path, command: str, test: str) -> None:
    script = f"#!/bin/sh\n{test} && reward=1\necho ${{reward:-0}} > /logs/verifier/reward.txt\n"
    script = script.replace("old\nnew", "$(printf 'old\\nnew')")
    task = read_harbor(write_task(tmp_path, script, files={"environment/workspace/v1.txt": "old\n"}))
    assert play_on(LinkedImage(), task, command).reward == 1.0


def test_a_made_up_path_of_a_link_empties_no_directory(tmp_path: Path) -> None:
    """The list of links comes from the agent's sandbox, where its shell may have been replaced."""
    kept = "#!/bin/sh\n[ -d /logs/agent ] && reward=1\n"
    kept += "echo ${reward:-0} > /logs/verifier/reward.txt\n"
    files: dict[str, str | bytes] = {"environment/workspace/a": ""}
    task = read_harbor(write_task(tmp_path, kept, files=files))

    async def scenario(backend: SandboxBackend) -> Verdict:
        return await Grader(backend).judge(task, AgentDiff(links={"..": "a"}))

    assert with_backend("local", scenario).reward == 1.0


def test_the_images_links_stay_where_the_agents_are_not_known(tmp_path: Path) -> None:
    test = "#!/bin/sh\n[ -L current ] && reward=1\necho ${reward:-0} > /logs/verifier/reward.txt\n"
    task = read_harbor(write_task(tmp_path, test))

    async def scenario(_: SandboxBackend) -> Verdict:
        backend = LinkedImage()
        try:
            return await Grader(backend).judge(task, AgentDiff())
        finally:
            await backend.close()

    assert with_backend("local", scenario).reward == 1.0


def test_a_link_takes_the_place_of_directories_in_directories(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"environment/workspace/current/deep/er/a": "wrong"}
    task = read_harbor(write_task(tmp_path, LINK_TEST, files=files))
    command = "rm -r current; mkdir new; echo right > new/said; ln -s new current"
    assert play_on(LocalBackend(), task, command).reward == 1.0


def test_names_that_are_no_utf_8_are_graded(tmp_path: Path) -> None:
    command = (
        'name="$(printf \'a\\377\')"; echo x > "$name"; chmod +x "$name"; ln -s "$name" b; ln -s b "$name"b; '
    )
    verdict = play_on(
        LocalBackend(), read_harbor(write_task(tmp_path)), command + "echo hello > greeting.txt"
    )
    assert verdict.reward == 1.0


def test_a_file_that_was_only_made_executable_reaches_grading(tmp_path: Path) -> None:
    write_task(tmp_path, RUN_TEST, files={"environment/workspace/run": "#!/bin/sh\nexit 0\n"})
    assert play_on(LocalBackend(), read_harbor(tmp_path), "chmod +x run").reward == 1.0
    assert play_on(LocalBackend(), read_harbor(tmp_path), "true").reward == 0.0


def test_a_link_leads_no_other_link_out_of_the_workspace(tmp_path: Path) -> None:
    task = read_harbor(write_task(tmp_path, PLANTED_TEST, files={"environment/workspace/sub/a": ""}))

    async def judge(links: dict[str, str]) -> float | None:
        backend = LocalBackend()
        try:
            return (await Grader(backend).judge(task, AgentDiff(links=links))).reward
        finally:
            await backend.close()

    assert asyncio.run(judge({"out": "sub", "out/planted": "a"})) == 0.0
    assert asyncio.run(judge({"other": "sub"})) == 1.0  # the test can tell


def test_a_task_may_use_every_core_for_as_long_as_it_takes(tmp_path: Path) -> None:
    task = read_harbor(write_task(tmp_path, toml="[verifier]\ntimeout_sec = 700.5\n"))
    assert task_resources(task, Resources()).cpu_s == math.ceil(700.5) * (os.cpu_count() or 1)


def test_an_archive_is_not_written_out_for_each_verdict(tmp_path: Path) -> None:
    class Unshown(bytes):
        def __repr__(self) -> str:
            raise AssertionError("64 MiB become 256")

    task = read_harbor(write_task(tmp_path))
    assert task.verifier is not None
    task = replace(task, verifier=replace(task.verifier, archive=Unshown(task.verifier.archive)))
    assert play_on(ChangedCommands(), task, "true").reward == 0.0
