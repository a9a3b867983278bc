"""Differences between environments (`etude env tells`): the probe, the comparison, the command."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from etude.cli.app import app
from etude.cli.environment import read_tasks
from etude.environment import probe_inside
from etude.environment.origins import Origin
from etude.environment.probe_inside import SECTIONS
from etude.environment.sessions import EnvironmentSession
from etude.environment.tells import SCRIPT_PATH, compare, examine, latencies
from etude.errors import SandboxError, TaskError, UserError
from etude.records import ToolCall, ToolResult
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.template import Template
from etude.tasks.harbor import write_harbor
from tests.environment.playing import TASK
from tests.environment.server.serving import new_services
from tests.sandbox.backends import with_backend
from tests.tasks.harbor_tasks import write_task


class Scripted:
    """A workspace in which each section of the probe says what it is told to."""

    def __init__(self, said: Mapping[str, Mapping[str, object]] | None = None, ns: int = 1000) -> None:
        self.said = said or {}
        self.files: dict[str, str] = {}
        self.clock = 0
        self.ns = ns

    async def archive(self, path: str, text: str) -> str:
        self.files[path] = text
        return ""

    async def run_calls(self, calls: Any, known: Any, on_call: Any, on_result: Any) -> list[ToolResult]:
        (call,) = calls
        assert call.name == "run_command"
        *_, path, section = call.arguments["command"].split()
        assert path in self.files
        if section == "moment":
            self.clock += self.ns
            return [ToolResult(json.dumps({"ns": self.clock}))]
        return [ToolResult(json.dumps(self.said.get(section, {})))]


@pytest.mark.slow
def test_each_section_of_the_probe_is_a_short_object_of_texts() -> None:
    for section in SECTIONS:
        done = subprocess.run(
            [sys.executable, probe_inside.__file__, section], capture_output=True, text=True, check=True
        )
        seen = json.loads(done.stdout)
        assert seen
        assert all(isinstance(value, str) and len(value) <= 160 for value in seen.values())


def test_equal_environments_have_no_tells_and_different_ones_name_them() -> None:
    async def scenario() -> None:
        one = Scripted({"identity": {"hostname": "sandbox"}, "clock": {"now": 1}})
        two = Scripted({"identity": {"hostname": "trainer-7"}, "clock": {"now": 2}, "git": {"head": "x"}})
        left, right = await examine(one), await examine(two)
        assert one.files.keys() == {SCRIPT_PATH}
        assert compare(left, left) == []
        found = {tell.key: tell for tell in compare(left, right)}
        assert found.keys() == {"identity.hostname", "clock.now", "git.head"}
        assert found["identity.hostname"].reason is None
        assert found["clock.now"].reason is not None
        assert found["git.head"].left is None

    asyncio.run(scenario())


def test_only_much_slower_answers_are_a_tell() -> None:
    async def scenario() -> list[float]:
        places = [Scripted(ns=1_000_000), Scripted(ns=2_000_000), Scripted(ns=9_000_000)]
        for place in places:
            await examine(place)
        return await latencies(places, 3)

    one, two, three = [{"latency.run_command_ms": str(ms)} for ms in asyncio.run(scenario())]
    assert one["latency.run_command_ms"] == "1.0"
    assert compare(one, two) == []
    assert [tell.key for tell in compare(one, three)] == ["latency.run_command_ms"]
    assert len(compare(one, {})) == 1


def test_a_probe_that_does_not_run_is_no_answer() -> None:
    class Broken(Scripted):
        async def run_calls(self, calls: Any, known: Any, on_call: Any, on_result: Any) -> list[ToolResult]:
            return [ToolResult("python3: not found")]

    with pytest.raises(SandboxError, match="does not run"):
        asyncio.run(examine(Broken()))


@pytest.mark.slow
def test_two_sessions_of_one_backend_look_alike_from_the_inside() -> None:
    async def scenario(backend: SandboxBackend) -> list[Any]:
        seen: list[dict[str, str]] = []
        for _ in range(2):
            session = await EnvironmentSession.open(
                new_services(backend), Origin(Template({"a.py": "x = 1\n"}, "files"))
            )
            seen.append(await examine(session))
            await session.close()
        return compare(seen[0], seen[1])

    found = with_backend("local", scenario)
    assert [tell.key for tell in found if tell.reason is None] == []


# The command


def test_the_command_refuses_what_is_no_environment() -> None:
    result = CliRunner().invoke(app, ["env", "tells", "nonsense:x"])
    assert result.exit_code == 2
    assert "is not an environment" in result.output


@pytest.mark.slow
def test_the_command_says_what_differs_between_rollout_and_cloud() -> None:
    result = CliRunner().invoke(app, ["env", "tells", "--json", "--calls", "1"])
    assert result.exit_code in (0, 1), result.output
    said = json.loads(result.output)
    assert said["num_seen"] > 90
    keys = {tell["key"] for tell in said["tells"] if tell["reason"] is None}
    assert keys <= {"latency.run_command_ms"}
    assert result.exit_code == bool(keys)


def test_tasks_that_are_served_take_their_variables_from_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_KEY", "k")
    write_task(tmp_path / "tasks/shop", toml='[verifier]\nenv = { KEY = "${SHOP_KEY}" }\n')
    with pytest.raises(TaskError, match=r"shop: is a variable of this process.*host_env = ..SHOP_KEY"):
        read_tasks(tmp_path / "tasks")
    (tmp_path / "c.toml").write_text('[tasks]\nhost_env = ["SHOP_KEY"]\n')
    verifier = read_tasks(tmp_path / "tasks", "local", tmp_path / "c.toml")["shop"].verifier
    assert verifier is not None and verifier.env == {"KEY": "k"}


def test_harbor_directories_become_tasks_that_are_graded(tmp_path: Path) -> None:
    write_harbor(TASK, tmp_path / "tally")
    (tmp_path / "notes").mkdir()
    tasks = read_tasks(tmp_path)
    assert list(tasks) == ["tally"]

    async def scenario() -> bool:
        session = EnvironmentSession.begin(new_services(), tasks["tally"])
        fix = ToolCall("edit_lines", {"path": "lib/tally.py", "start": "2", "text": "    return sum(xs)"})
        await session.run_calls([fix], {}, lambda *_: None, lambda *_: None)
        outcome = await session.submit()
        await session.close()
        return outcome.verdict.passed

    assert asyncio.run(scenario())
    (tmp_path / "tally" / "instruction.md").unlink()
    with pytest.raises(TaskError):
        read_tasks(tmp_path)
    with pytest.raises(UserError):
        read_tasks(tmp_path / "absent")
    assert read_tasks(None) == {}
