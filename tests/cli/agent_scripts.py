"""A repository and scripts of a model's messages, for tests of `etude agent` as a user runs it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner, Result

from etude.agent import AgentSession, LocalWorkspace, ToolContext, run_session
from etude.agent.journal import replay
from etude.cli import app
from etude.controller.agent.folders import SessionFolder
from etude.controller.agent.models import ModelChoice, open_policy
from etude.controller.agent.trees import DirectoryTree
from etude.records import TrajectoryId
from etude.sandbox.backends import open_backend
from etude.sandbox.template import Template
from tests.fakes.scripted import ScriptedSampler, play
from tests.fakes.scripted_model import PROGRAM, read_script

ROOT = Path(__file__).parents[2]
TALLY = "def tally(xs, a):\n    total = 1\n    for x in xs:\n        total += x\n    return total\n"
TESTS = "from lib.tally import tally\n\n\ndef test_tally():\n    assert tally([1, 2], 0) == 3\n"
MEND: dict[str, Any] = {
    "name": "edit_lines",
    "arguments": {"path": "lib/tally.py", "start": "2", "text": "    total = 0"},
}
READ = {"name": "read_file", "arguments": {"path": "lib/tally.py"}}
FINISH = {"name": "finish"}
SESSION: list[list[Any]] = [
    ["Look first. ", {"name": "list_dir"}, READ, "<read_file><path>x</read_file>"],
    [MEND],
    [{"name": "run_tests"}],
    ["Done.", FINISH],
]
"""A malformed call, parallel calls, an edit, a test run, the end."""


def make_repository(path: Path) -> Path:
    """A directory with a fault and a test that shows it."""
    (path / "lib").mkdir(parents=True)
    (path / "lib" / "tally.py").write_text(TALLY)
    (path / "tests").mkdir()
    (path / "tests" / "test_all.py").write_text(TESTS)
    return path


def command(*arguments: str) -> list[str]:
    """`etude agent` as a process that knows scripted models."""
    return [sys.executable, "-c", PROGRAM, "agent", *arguments]


def environment(root: Path) -> dict[str, str]:
    """Where its sessions lie, and the fakes that it imports."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    state = str(root / "state")
    return {**os.environ, "XDG_STATE_HOME": state, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def session_folders(root: Path) -> list[Path]:
    """The sessions there are."""
    sessions = root / "state" / "etude" / "sessions"
    return sorted(sessions.iterdir()) if sessions.is_dir() else []


def recorded_tokens(root: Path, script: str) -> np.ndarray:
    """The tokens of the one session that was held."""

    async def go() -> np.ndarray:
        async with open_policy(ModelChoice(model=script), one_shot=True) as policy:
            (path,) = session_folders(root)
            session, _ = replay(SessionFolder.open(path.parent, path.name).journal, policy.renderer)
            return session.recording.tokens

    return asyncio.run(go())


def plain_tokens(repository: Path, script: str, instruction: str) -> np.ndarray:
    """The tokens of the same script through `run_session` on a LocalWorkspace, as a rollout has them."""

    async def go() -> np.ndarray:
        async with open_policy(ModelChoice(model=script), one_shot=True) as policy:
            files = await DirectoryTree(repository).scan()
            backend = open_backend("local")
            try:
                sandbox = await backend.create(Template(dict(files)))
                context = ToolContext(sandbox, policy.registry, ("tests/test_all.py",), policy.tool_limits)
                identity = TrajectoryId("run", "task", 0, 0, 0)
                session = AgentSession(instruction, policy.renderer, identity, policy.limits, policy.params)
                sampler = ScriptedSampler(play(map(policy.renderer.message, read_script(Path(script)))))
                await run_session(session, sampler, LocalWorkspace(context), "s", (0,))
                return session.recording.tokens
            finally:
                await backend.close()

    return asyncio.run(go())


def ran(root: Path, *arguments: str, stdin: str = "") -> Result:
    """`etude agent` in this process; sessions lie below `root`."""
    settings = {"COLUMNS": "100", "XDG_STATE_HOME": str(root / "state")}
    done = CliRunner().invoke(app, ["agent", *arguments], input=stdin, env=settings)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done
