"""A user's session: when changes reach the repository, undo, stops, and resumption."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from etude.agent import LocalWorkspace, ToolContext, run_session
from etude.agent.session import AgentSession
from etude.controller.agent.approval import Approver
from etude.controller.agent.changes import TurnChange
from etude.controller.agent.events import AgentText, FilesChanged, Notice, RunEnded, ToolCallEnded
from etude.controller.agent.folders import SessionFolder, list_sessions
from etude.errors import ConfigError, SamplerError, StoreError
from etude.records import Status, ToolCall, ToolErrorClass, TrajectoryId
from etude.sandbox.template import Template
from etude_quickstart.memory_backend import MemoryBackend
from tests.controller.agent_builders import (
    DELETE,
    FINISH,
    MAKE,
    MEND,
    MENDED,
    READ,
    TALLY,
    conversing,
    make_policy,
    make_repository,
    run,
)
from tests.fakes.scripted import ScriptedSampler


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_repository(tmp_path / "repo")
    return tmp_path


def text(root: Path, name: str = "lib/tally.py") -> str | None:
    path = root / "repo" / name
    return path.read_text() if path.exists() else None


def test_changes_reach_the_repository_as_each_turn_ends(root: Path) -> None:
    events = []

    async def go() -> None:
        async with conversing(root, [[READ], [MEND, MAKE, DELETE], [FINISH]], events=events) as conversation:
            outcome = await conversation.say("fix it")
            assert outcome.status is Status.DONE
            assert [file.path for file in conversation.changes()] == [
                "gone.py",
                "lib/tally.py",
                "new/made.py",
            ]

    run(go())
    assert text(root) == MENDED
    assert text(root, "new/made.py") == "made\n"
    assert text(root, "gone.py") is None
    changed = [event for event in events if isinstance(event, FilesChanged)]
    assert [(one.turn, one.written, dict(one.kept_back)) for one in changed] == [(2, True, {})]
    assert "-    total = 1\n+    total = 0\n" in changed[0].files[1].diff()
    assert isinstance(events[-1], RunEnded)


def test_a_preview_writes_nothing_until_it_is_told_to(root: Path) -> None:
    async def go() -> None:
        async with conversing(root, [[MEND], [FINISH]], "preview") as conversation:
            await conversation.say("fix it")
            assert text(root) == TALLY
            assert [file.path for file in conversation.changes()] == ["lib/tally.py"]
            await conversation.write_back()
            assert text(root) == MENDED

    run(go())


def test_undo_takes_back_what_the_last_words_brought_and_the_agent_is_told(root: Path) -> None:
    turns = [[MEND], [MAKE, FINISH], [DELETE, FINISH], [FINISH]]

    async def go() -> None:
        async with conversing(root, turns) as conversation:
            await conversation.say("fix it")
            await conversation.say("delete it")
            undone = await conversation.undo()
            assert [file.path for file in undone.files] == ["gone.py"]
            assert text(root, "gone.py") == "gone\n"
            assert text(root) == MENDED
            await conversation.undo()
            assert text(root) == TALLY
            assert text(root, "new/made.py") is None
            assert not (root / "repo" / "new").exists()
            assert await conversation.undo() is None
            await conversation.say("go on")
            session = conversation.journal.session
            said = session.renderer.tokenizer.decode(session.recording.tokens)
            assert "(I have undone your changes to gone.py, lib/tally.py, new/made.py.)\n\ngo on" in said
            assert conversation.changes() == ()

    run(go())


def test_what_the_person_changed_meanwhile_is_seen_and_never_overwritten(root: Path) -> None:
    events = []
    path = root / "repo" / "lib" / "tally.py"

    class Meddling(ScriptedSampler):
        """The person edits a file while the agent writes its second message."""

        async def stream(self, request):
            if request.id.endswith(":1"):
                path.write_text("mine\n")
            async for chunk in super().stream(request):
                yield chunk

    async def go() -> None:
        rendered = make_policy([]).renderer
        replies = [rendered.message(parts) for parts in ([READ], [READ], [MEND], [FINISH])]
        sampler = Meddling(lambda session_id, context: replies.pop(0))
        async with conversing(root, [], events=events, sampler=sampler) as conversation:
            await conversation.say("fix it")

    run(go())
    outputs = [event.result.output for event in events if isinstance(event, ToolCallEnded)]
    assert "total = 1" in outputs[0]
    assert outputs[1] == "1\tmine"
    # The agent's edit stands on what the person wrote.
    assert text(root) == "mine\n    total = 0\n"


def test_a_file_that_changes_under_an_edit_is_kept_back(root: Path) -> None:
    events = []

    class Racing(MemoryBackend):
        async def create(self, *arguments, **named):
            sandbox = await super().create(*arguments, **named)
            diff = sandbox.diff

            async def late(without):
                (root / "repo" / "lib" / "tally.py").write_text("mine\n")
                return await diff(without)

            sandbox.diff = late
            return sandbox

    async def go() -> None:
        async with conversing(root, [[MEND], [FINISH]], events=events, backend=Racing()) as conversation:
            await conversation.say("fix it")

    run(go())
    assert text(root) == "mine\n"
    kept = [event.kept_back for event in events if isinstance(event, FilesChanged)]
    assert list(kept[0]) == ["lib/tally.py"]


def test_modes_ask_about_what_they_should(root: Path) -> None:
    asked = []

    async def ask(call: ToolCall) -> str:
        asked.append(call.name)
        return {"edit_lines": "always", "write_file": "no"}.get(call.name, "once")

    again = ToolCall("edit_lines", {"path": "lib/tally.py", "start": "2", "text": "    total = 5"})

    async def go(mode: str) -> list:
        asked.clear()
        events = []
        async with conversing(
            root, [[READ, MEND, MAKE], [again], [FINISH]], mode, ask=ask, events=events
        ) as one:
            await one.say("fix it")
            await one.undo()
        return [event.result for event in events if isinstance(event, ToolCallEnded)]

    results = run(go("ask"))
    assert asked == ["edit_lines", "write_file"]
    refused = [result for result in results if result.error is ToolErrorClass.USER_ABORTED]
    assert [result.output for result in refused] == ["error: the user refused this call"]
    run(go("auto-edit"))
    assert asked == []
    run(go("full"))
    assert asked == []
    with pytest.raises(ConfigError, match="no such mode"):
        run(go("yolo"))


def test_auto_edit_asks_about_commands(root: Path) -> None:
    asked = []

    async def ask(call: ToolCall) -> str:
        asked.append(call.name)
        return "no"

    async def go() -> None:
        tests, patch = ToolCall("run_tests"), ToolCall("apply_patch", {"patch": "nonsense"})
        command = ToolCall("run_command", {"command": "rm -rf /"})
        async with conversing(root, [[MEND, command, tests, patch], [FINISH]], "auto-edit", ask=ask) as one:
            await one.say("fix it")

    run(go())
    assert asked[:2] == ["run_command", "run_tests"]


def test_a_stop_leaves_a_session_that_goes_on(root: Path) -> None:
    class Hanging(ScriptedSampler):
        hangs = True

        async def stream(self, request):
            if self.hangs:
                await asyncio.sleep(3600)
            async for chunk in super().stream(request):
                yield chunk

    async def go() -> None:
        rendered = make_policy([]).renderer
        replies = [rendered.message(parts) for parts in ([MEND], [FINISH])]
        sampler = Hanging(lambda session_id, context: replies.pop(0))
        async with conversing(root, [], sampler=sampler) as conversation:
            asyncio.get_running_loop().call_later(0.1, conversation.stop)
            outcome = await conversation.say("fix it")
            assert (outcome.status, outcome.cause) == (Status.LIMIT, "user")
            assert sampler.open_sessions == set()
            assert not conversation.stop()
            sampler.hangs = False
            assert (await conversation.say("now do it")).status is Status.DONE

    run(go())
    assert text(root) == MENDED


def test_a_stop_at_once_is_not_lost(root: Path) -> None:
    async def go() -> None:
        async with conversing(root, [[MEND], [FINISH]]) as conversation:
            task = asyncio.create_task(conversation.say("fix it"))
            await asyncio.sleep(0)
            assert conversation.stop()
            assert (await task).cause == "user"

    run(go())
    assert text(root) == TALLY


def test_a_sampler_that_fails_leaves_a_session_that_goes_on(root: Path) -> None:
    class Failing(ScriptedSampler):
        fails = True

        async def stream(self, request):
            if self.fails:
                raise SamplerError("gone")
            async for chunk in super().stream(request):
                yield chunk

    async def go() -> None:
        rendered = make_policy([]).renderer
        replies = [rendered.message(parts) for parts in ([MEND], [FINISH])]
        sampler = Failing(lambda session_id, context: replies.pop(0))
        async with conversing(root, [], sampler=sampler) as conversation:
            with pytest.raises(SamplerError):
                await conversation.say("fix it")
            sampler.fails = False
            assert (await conversation.say("again")).status is Status.DONE

    run(go())
    assert text(root) == MENDED


def test_a_session_is_taken_up_where_it_was_left(root: Path) -> None:
    async def go() -> str:
        async with conversing(root, [[MEND], ["ok ", FINISH]]) as first:
            await first.say("fix it")
        events = []
        async with conversing(
            root, [[MEND], [FINISH], [READ], [FINISH]], resume=first.id, events=events
        ) as second:
            assert not second.is_open
            assert second.num_turns == 2
            await second.say("look again")
            await second.undo()
            await second.undo()
        assert [event.text for event in events if isinstance(event, AgentText)] == []
        outputs = [event.result.output for event in events if isinstance(event, ToolCallEnded)]
        assert "total = 0" in outputs[0]
        return first.id

    identity = run(go())
    assert text(root) == TALLY
    metas = list_sessions(root / "sessions")
    assert [(one.id, one.title) for one in metas] == [(identity, "fix it")]
    assert [prompt.after_turn for prompt in metas[0].prompts] == [0, 2]


def test_a_preview_that_is_taken_up_still_has_its_changes(root: Path) -> None:
    async def go() -> None:
        async with conversing(root, [[MEND], [FINISH]], "preview") as first:
            await first.say("fix it")
        async with conversing(
            root, [[MEND], [FINISH], [READ], [FINISH]], "preview", resume=first.id
        ) as second:
            await second.say("look")
            assert "total = 0" in second.journal.session.turns[2].results[0].output
            assert text(root) == TALLY
            await second.write_back()
        assert text(root) == MENDED

    run(go())


CHILD = """
import asyncio, os, signal, sys
from pathlib import Path
from etude.controller.agent import mirror, workspace
from tests.controller.agent_builders import FINISH, MAKE, MEND, READ, conversing

where, root = sys.argv[1], Path(sys.argv[2])

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

async def go():
    async with conversing(root, [[READ], [MEND, MAKE], [FINISH]]) as conversation:
        if where == "before":
            workspace.MirroredWorkspace.finish_turn = die
        elif where == "half":
            write = mirror.Mirror.write
            async def once(self, path, after):
                result = await write(self, path, after)
                die()
            mirror.Mirror.write = once
        elif where == "after":
            settle = workspace.MirroredWorkspace.finish_turn
            async def then(self, turn, results):
                await settle(self, turn, results)
                if turn == 2:
                    die()
            workspace.MirroredWorkspace.finish_turn = then
        await conversation.say("fix it")
asyncio.run(go())
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before", "half", "after"])
def test_a_session_survives_a_kill_in_the_middle_of_a_turn(root: Path, where: str) -> None:
    """Killed before a turn's changes are kept, in the middle of their writing, and before the session hears
    of them: each time the same session comes of it, and nothing is done twice."""
    child = subprocess.run([sys.executable, "-c", CHILD, where, str(root)], capture_output=True, text=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    identity = next(os.scandir(root / "sessions")).name
    assert text(root) == (MENDED if where != "before" else TALLY)

    async def go() -> np.ndarray:
        async with conversing(root, [[READ], [MEND, MAKE], [FINISH]], resume=identity) as conversation:
            assert conversation.is_open
            assert (await conversation.resume()).status is Status.DONE
            results = [
                result.output for turn in conversation.journal.session.turns for result in turn.results
            ]
            assert results[1:] == ["ok", "created", ""]
            return conversation.journal.session.recording.tokens.copy()

    tokens = run(go())
    assert text(root) == MENDED
    assert text(root, "new/made.py") == "made\n"
    assert len(SessionFolder.open(root / "sessions", identity).changes()) == 1

    make_repository(root / "other" / "repo")

    async def undisturbed() -> np.ndarray:
        async with conversing(root / "other", [[READ], [MEND, MAKE], [FINISH]]) as conversation:
            await conversation.say("fix it")
            return conversation.journal.session.recording.tokens.copy()

    assert np.array_equal(tokens, run(undisturbed()))


def test_tokens_are_those_of_a_plain_session(root: Path) -> None:
    turns = [["I look. ", READ, "<read_file><path>x</read_file>"], [MEND, MAKE], ["Done. ", FINISH]]

    async def mirrored() -> np.ndarray:
        async with conversing(root, turns) as conversation:
            await conversation.say("fix it")
            return conversation.journal.session.recording.tokens.copy()

    async def plain() -> np.ndarray:
        policy = make_policy(turns)
        files = {"lib/tally.py": TALLY, "gone.py": "gone\n"}
        context = ToolContext(await MemoryBackend().create(Template(files)), policy.registry)
        identity = TrajectoryId("r", "t", 0, 0, 0)
        session = AgentSession("fix it", policy.renderer, identity, policy.limits, policy.params)
        await run_session(session, policy.sampler, LocalWorkspace(context), "s", (0,))
        return session.recording.tokens

    assert np.array_equal(run(mirrored()), run(plain()))


def test_a_session_that_is_none_is_refused(root: Path) -> None:
    (root / "sessions" / "../sessions").mkdir(parents=True, exist_ok=True)
    for name in ("20260101-000000-abcdef", "../repo", "", "last"):
        with pytest.raises(ConfigError):
            SessionFolder.open(root / "sessions", name)


def test_a_broken_session_is_refused_and_left_out_of_the_list(root: Path) -> None:
    async def go() -> None:
        async with conversing(root, [[MEND], [FINISH]]) as first:
            await first.say("fix it")
        journal, meta = first.folder.journal, first.folder.path / "session.json"
        whole, described = journal.read_bytes(), meta.read_text()
        journal.write_bytes(whole[:300] + b"x" + whole[301:])
        with pytest.raises(StoreError):
            async with conversing(root, [], resume=first.id):
                pass
        journal.write_bytes(whole)
        change = next((first.folder.path / "changes").iterdir())
        change.write_text('{"turn": 1}')
        with pytest.raises(StoreError, match="damaged"):
            async with conversing(root, [], resume=first.id):
                pass
        for broken in ("", "[]", '{"format": 2}', described[:-20], json.dumps({"format": 1, "x": 2})):
            meta.write_text(broken)
            with pytest.raises(StoreError):
                SessionFolder.open(root / "sessions", first.id)
            assert list_sessions(root / "sessions") == []

    run(go())


def test_a_session_in_use_is_refused(root: Path) -> None:
    async def go() -> None:
        async with conversing(root, [[FINISH]]) as first:
            await first.say("hello")
            with pytest.raises(StoreError, match="in use"):
                async with conversing(root, [], resume=first.id):
                    pass

    run(go())


def test_changes_of_a_long_session_stay_in_order(tmp_path: Path) -> None:
    folder = SessionFolder.create(tmp_path, tmp_path, {}, "ask")
    for number in (10_000, 9_999, 2):
        folder.save_change(TurnChange(number, number, 1, ()))
    assert [change.number for change in folder.changes()] == [2, 9_999, 10_000]
    assert folder.next_number() == 10_001


def test_too_large_a_change_is_told_and_nothing_is_written(root: Path) -> None:
    from etude.sandbox.errors import DiffTooLargeError

    events = []

    class Large(MemoryBackend):
        async def create(self, *arguments, **named):
            sandbox = await super().create(*arguments, **named)

            async def diff(without):
                raise DiffTooLargeError("more than a diff carries")

            sandbox.diff = diff
            return sandbox

    async def go() -> None:
        async with conversing(root, [[MEND], [FINISH]], events=events, backend=Large()) as conversation:
            assert (await conversation.say("fix it")).status is Status.DONE

    run(go())
    assert text(root) == TALLY
    assert any("nothing was written" in event.text for event in events if isinstance(event, Notice))


def test_a_thousand_files_are_mirrored_quickly(root: Path) -> None:
    for number in range(1000):
        (root / "repo" / f"f{number}.py").write_text(f"x = {number}\n")

    async def go() -> float:
        async with conversing(root, [[READ], [FINISH], [FINISH]]) as conversation:
            await conversation.say("one")
            began = time.perf_counter()
            await conversation.say("two")
            return time.perf_counter() - began

    assert run(go()) < 60.0


def test_what_git_ignores_does_not_come_in_by_its_name(root: Path) -> None:
    subprocess.run(("git", "-c", "init.defaultBranch=main", "init", "-q"), cwd=root / "repo", check=True)
    (root / "repo" / ".gitignore").write_text("secret.env\n")
    (root / "repo" / "secret.env").write_text("a key\n")
    peek = [ToolCall("read_file", {"path": path}) for path in ("secret.env", ".git/config", "later.txt")]
    steal = ToolCall("write_file", {"path": ".git/hooks/pre-commit", "text": "x"})
    spoil = ToolCall("write_file", {"path": "secret.env", "text": "x"})
    events = []

    class Later(ScriptedSampler):
        async def stream(self, request):
            (root / "repo" / "later.txt").write_text("made meanwhile\n")
            async for chunk in super().stream(request):
                yield chunk

    async def go() -> None:
        rendered = make_policy([]).renderer
        replies = [rendered.message(parts) for parts in (peek, [steal, spoil], [FINISH])]
        sampler = Later(lambda session_id, context: replies.pop(0))
        async with conversing(root, [], events=events, sampler=sampler) as conversation:
            await conversation.say("look around")
            assert conversation.changes() == ()

    run(go())
    outputs = [event.result.output for event in events if isinstance(event, ToolCallEnded)]
    assert outputs[0].startswith("error: ")
    assert outputs[1].startswith("error: ")
    assert outputs[2] == "1\tmade meanwhile"
    assert text(root, "secret.env") == "a key\n"
    assert text(root, ".git/hooks/pre-commit") is None


def test_a_preview_without_isolation_asks_before_it_runs_anything(root: Path) -> None:
    registry = make_policy([]).registry
    command, edit = ToolCall("run_command", {"command": "ls"}), MEND

    async def go(isolated: bool) -> list[bool]:
        approver = Approver("preview", registry, None, isolated)
        return [await approver(call) is None for call in (command, edit)]

    assert run(go(True)) == [True, True]
    assert run(go(False)) == [False, True]
