"""`etude agent --acp` behind an editor: the protocol library's own client, over pipes to a real process."""

import asyncio
import contextlib
import json
import shlex
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

acp = pytest.importorskip("acp", reason="the package agent-client-protocol is not installed")
from acp import schema  # noqa: E402

from etude.cli.agent_acp import serve_editor  # noqa: E402
from etude.cli.agent_acp_transport import LineTransport  # noqa: E402
from etude.config import McpConfig  # noqa: E402
from etude.controller.agent.models import ModelChoice  # noqa: E402
from etude.controller.agent.surroundings import SandboxChoice  # noqa: E402
from etude.sandbox.backends import open_backend  # noqa: E402
from tests.cli.agent_scripts import (  # noqa: E402
    FINISH,
    MEND,
    READ,
    SESSION,
    TALLY,
    command,
    environment,
    make_repository,
    plain_tokens,
    recorded_tokens,
    session_folders,
)
from tests.controller.test_agent_models import trained_run  # noqa: E402
from tests.fakes.scripted_model import write_script  # noqa: E402

MENDED = TALLY.replace("= 1", "= 0")
FILES = schema.FileSystemCapabilities(read_text_file=True, write_text_file=True)
pytestmark = pytest.mark.skipif(bool(open_backend("local").doctor()), reason="no sandboxes here")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    make_repository(tmp_path / "repo")
    return tmp_path


class Editor:
    """A client that keeps what it is told, answers permissions and has unsaved buffers."""

    def __init__(self, answers: tuple[str | None, ...] = ()) -> None:
        self.answers = list(answers)
        self.buffers: dict[str, str] = {}
        self.updates: list[dict[str, Any]] = []
        self.asked: list[Any] = []
        self.written: list[str] = []
        self.seen = asyncio.Event()

    def on_connect(self, conn: Any) -> None:
        pass

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.updates.append(update.model_dump(mode="json", exclude_none=True))
        self.seen.set()

    async def request_permission(self, session_id: str, tool_call: Any, options: list[Any], **_: Any) -> Any:
        self.asked.append(tool_call)
        answer = self.answers.pop(0) if self.answers else "once"
        if answer is None:
            outcome: Any = schema.DeniedOutcome(outcome="cancelled")
        else:
            outcome = schema.AllowedOutcome(outcome="selected", option_id=answer)
        return schema.RequestPermissionResponse(outcome=outcome)

    async def read_text_file(self, session_id: str, path: str, **_: Any) -> Any:
        text = self.buffers.get(path)
        if text is None:
            text = await asyncio.to_thread(Path(path).read_text)
        return schema.ReadTextFileResponse(content=text)

    async def write_text_file(self, session_id: str, path: str, content: str, **_: Any) -> Any:
        self.buffers.pop(path, None)
        self.written.append(path)
        await asyncio.to_thread(Path(path).write_text, content)
        return schema.WriteTextFileResponse()

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [update for update in self.updates if update["session_update"] == kind]

    def words(self) -> str:
        return "".join(update["content"]["text"] for update in self.told("agent_message_chunk"))


@contextlib.asynccontextmanager
async def connected(
    root: Path,
    messages: Any,
    editor: Editor,
    *arguments: str,
    files: Any = FILES,
    backend: str = "local",
) -> AsyncIterator[Any]:
    """An editor before `etude agent --acp` as a process of its own."""
    script = write_script(root / "script.json", messages)
    line = command("--acp", "--model", script, "--backend", backend, *arguments)
    pipes = {"stderr": subprocess.DEVNULL}
    async with (
        asyncio.timeout(180),
        acp.spawn_agent_process(editor, *line, env=environment(root), transport_kwargs=pipes) as (
            connection,
            _,
        ),
    ):
        await introduce(connection, files)
        yield connection


@contextlib.asynccontextmanager
async def beside(
    root: Path,
    messages: Any,
    editor: Editor,
    mode: str = "ask",
    files: Any = FILES,
    tools: str = "",
    servers: dict[str, McpConfig] | None = None,
    choice: ModelChoice | None = None,
    sandbox: SandboxChoice | None = None,
) -> AsyncIterator[Any]:
    """The same in this process, over a pair of sockets: quicker to start."""
    choice = choice or ModelChoice(model=write_script(root / "script.json", messages), tools=tools)
    ours, theirs = socket.socketpair()
    async with asyncio.timeout(180):
        agents = LineTransport(*await asyncio.open_connection(sock=ours))
        opening = serve_editor(choice, mode, sandbox or SandboxChoice("local"), agents, None, servers)
        serving = asyncio.create_task(opening)
        reader, writer = await asyncio.open_connection(sock=theirs)
        connection = acp.connect_to_agent(editor, writer, reader)
        try:
            await introduce(connection, files)
            yield connection
        finally:
            await connection.close()
            writer.close()
            await serving


async def introduce(connection: Any, files: Any) -> None:
    capabilities = schema.ClientCapabilities(fs=files)
    await connection.initialize(protocol_version=acp.PROTOCOL_VERSION, client_capabilities=capabilities)


async def begin(connection: Any, root: Path) -> Any:
    return await connection.new_session(cwd=str(root / "repo"), mcp_servers=[])


async def say(connection: Any, session: Any, words: str) -> str:
    identity = session if isinstance(session, str) else session.session_id
    return (await connection.prompt(session_id=identity, prompt=[acp.text_block(words)])).stop_reason


def tally(root: Path) -> str:
    return (root / "repo" / "lib" / "tally.py").read_text()


def test_an_editor_gives_the_tokens_of_a_rollout(root: Path) -> None:
    before = plain_tokens(root / "repo", write_script(root / "script.json", SESSION), "fix it")
    editor = Editor()

    async def go() -> None:
        async with connected(root, SESSION, editor, backend="local") as connection:
            assert await say(connection, await begin(connection, root), "fix it") == "end_turn"

    asyncio.run(go())
    assert np.array_equal(recorded_tokens(root, str(root / "script.json")), before)
    assert tally(root) == MENDED
    assert editor.words() == "Look first. Done."
    assert [call.title for call in editor.asked] == ["edit_lines lib/tally.py", "run_tests"]


def test_calls_are_told_with_their_kinds_places_and_diffs(root: Path) -> None:
    editor = Editor()
    todos = json.dumps([{"id": "1", "text": "mend", "status": "done"}, {"id": "2", "text": "test"}])
    plan = {"name": "todo_write", "arguments": {"todos": todos}}
    messages = [[READ, "<read_file><path>x</read_file>", plan], [MEND], [FINISH]]

    async def go() -> None:
        async with beside(root, messages, editor, "full", tools="full") as connection:
            session = await begin(connection, root)
            assert session.modes.current_mode_id == "full"
            await say(connection, session, "fix it")

    asyncio.run(go())
    started = {update["tool_call_id"]: update for update in editor.told("tool_call")}
    assert [started[key]["kind"] for key in ("1.0", "1.2", "2.0")] == ["read", "think", "edit"]
    assert started["1.2"]["raw_input"] == {"todos": json.loads(todos)}, "an array, and not its text"
    assert started["2.0"]["locations"] == [{"path": str(root / "repo" / "lib" / "tally.py"), "line": 2}]
    updates = editor.told("tool_call_update")
    last = {update["tool_call_id"]: update["status"] for update in updates if "status" in update}
    assert last == {
        "1.0": "completed",
        "1.1": "failed",
        "1.2": "completed",
        "2.0": "completed",
        "3.0": "completed",
    }
    diffs = [one for update in updates for one in update.get("content", ()) if one["type"] == "diff"]
    assert [(one["old_text"], one["new_text"]) for one in diffs] == [(TALLY, MENDED)]
    entries = editor.told("plan")[-1]["entries"]
    assert [(one["content"], one["status"]) for one in entries] == [
        ("mend", "completed"),
        ("test", "pending"),
    ]
    assert editor.asked == []


def test_unsaved_buffers_are_read_and_written_through_the_editor(root: Path) -> None:
    editor = Editor()
    path = str(root / "repo" / "lib" / "tally.py")
    editor.buffers[path] = TALLY + "# not saved\n"

    async def go() -> None:
        async with beside(root, [[READ], [MEND], [FINISH]], editor) as connection:
            await say(connection, await begin(connection, root), "fix it")

    asyncio.run(go())
    outputs = [update.get("raw_output", {}).get("output", "") for update in editor.told("tool_call_update")]
    assert any("# not saved" in output for output in outputs)
    assert editor.written == [path]
    assert tally(root) == MENDED + "# not saved\n"


def test_an_editor_without_files_leaves_them_to_the_disk(root: Path) -> None:
    editor = Editor()

    async def go() -> None:
        async with beside(root, [[MEND], [FINISH]], editor, files=None) as connection:
            await say(connection, await begin(connection, root), "fix it")

    asyncio.run(go())
    assert editor.written == []
    assert tally(root) == MENDED


@pytest.mark.parametrize("answer", ["no", None])
def test_what_the_user_refuses_is_not_done(root: Path, answer: str | None) -> None:
    editor = Editor((answer,))

    async def go() -> None:
        async with beside(root, [[MEND], [FINISH]], editor) as connection:
            await say(connection, await begin(connection, root), "fix it")

    asyncio.run(go())
    assert tally(root) == TALLY
    assert "+    total = 0" in editor.asked[0].content[0].content.text
    failed = [update for update in editor.told("tool_call_update") if update.get("status") == "failed"]
    assert "refused" in failed[0]["raw_output"]["output"]


SERVER = """
import os, pathlib, sys
from mcp.server.mcpserver import MCPServer
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
server = MCPServer("echo")
@server.tool()
def shout(text: str) -> str:
    return text.upper()
server.run()
"""
ABSENT = schema.McpServerStdio(name="absent", command="/nonexistent/server", args=[], env=[])
REMOTE = schema.HttpMcpServer(name="remote", type="http", url="http://localhost:1/mcp", headers=[])
SHOUT: Any = {"name": "my_echo_shout", "arguments": {"text": "hello"}}


@pytest.fixture
def servers(root: Path) -> Path:
    """A folder with a file for each server that was started, named by its process."""
    (root / "server.py").write_text(SERVER)
    (root / "servers").mkdir()
    return root / "servers"


def echo(servers: Path, name: str = "My Echo") -> Any:
    arguments = [str(servers.parent / "server.py"), str(servers)]
    return schema.McpServerStdio(name=name, command=sys.executable, args=arguments, env=[])


def running(servers: Path) -> int:
    return sum(Path("/proc", one.name).exists() for one in servers.iterdir())


def outputs_of(editor: Editor) -> list[str]:
    updates = editor.told("tool_call_update")
    return [update["raw_output"]["output"] for update in updates if "raw_output" in update]


def test_a_runs_model_gets_no_servers_of_the_editors_and_its_session_goes_on(
    root: Path, servers: Path
) -> None:
    editor, run = Editor(("once",)), trained_run(root)

    async def go() -> None:
        async with beside(root, [], editor, choice=ModelChoice(run=str(run.path))) as connection:
            cwd = str(root / "repo")
            session = await connection.new_session(cwd=cwd, mcp_servers=[echo(servers)])
            await say(connection, session, "/undo")

    asyncio.run(go())
    assert "[the MCP server My Echo is not connected" in editor.words()
    assert "the tools that it was trained with" in editor.words() and "nothing to undo" in editor.words()
    assert not list(servers.iterdir())


@pytest.mark.slow
def test_servers_that_do_not_work_leave_the_editors_others_to_the_agent(root: Path, servers: Path) -> None:
    first, second = Editor(("once",)), Editor(("once",))
    cwd = str(root / "repo")

    async def go() -> None:
        async with beside(root, [[SHOUT], ["Done."]], first) as connection:
            session = await connection.new_session(cwd=cwd, mcp_servers=[echo(servers)])
            await say(connection, session, "say it")
        async with beside(root, [[SHOUT], ["Done."], [SHOUT], ["Done."]], second) as connection:
            named = [REMOTE, echo(servers), ABSENT, echo(servers)]
            await connection.load_session(cwd=cwd, session_id=session.session_id, mcp_servers=named)
            await say(connection, session, "again")

    asyncio.run(go())
    assert "HELLO" in outputs_of(first)[0] and "HELLO" in outputs_of(second)[-1]
    assert "is not connected" not in first.words()
    told = [line.split(" is not")[0] for line in second.words().splitlines() if "is not connected" in line]
    assert told == [f"[the MCP server {name}" for name in ("remote", "absent", "My Echo")]
    assert running(servers) == 0


@pytest.mark.slow
def test_a_session_starts_the_editors_servers_alone_and_ends_them_if_it_cannot_be_loaded(
    root: Path, servers: Path
) -> None:
    editor = Editor(("once",))
    cwd = str(root / "repo")
    command = shlex.join([sys.executable, str(root / "server.py"), str(servers)])
    own = {"own": McpConfig(command=command, where="host")}
    messages = [[SHOUT], [{**SHOUT, "name": "own_shout"}], ["Done."]]

    async def go() -> None:
        async with beside(root, messages, editor, servers=own) as connection:
            session = await connection.new_session(cwd=cwd, mcp_servers=[echo(servers)])
            await say(connection, session, "say it")
            assert running(servers) == 2
        async with beside(root, messages, editor, servers=own) as connection:
            other = [echo(servers, "other")]
            with pytest.raises(acp.RequestError):
                await connection.load_session(cwd=cwd, session_id=session.session_id, mcp_servers=other)
            assert running(servers) == 0

    asyncio.run(go())
    assert [output.rstrip() for output in outputs_of(editor)] == ["HELLO", "HELLO"]
    assert running(servers) == 0


def test_modes_and_commands(root: Path) -> None:
    editor = Editor(("always",))
    messages = [[MEND], [FINISH], [MEND], [FINISH]]

    async def go() -> None:
        async with beside(root, messages, editor) as connection:
            session = await begin(connection, root)
            assert [mode.id for mode in session.modes.available_modes] == [
                "preview",
                "ask",
                "auto-edit",
                "full",
            ]
            await connection.set_session_mode(session_id=session.session_id, mode_id="preview")
            await say(connection, session, "fix it")
            assert tally(root) == TALLY
            await say(connection, session, "/apply")
            assert tally(root) == MENDED
            await say(connection, session, "/undo")
            assert tally(root) == TALLY
            await connection.set_session_mode(session_id=session.session_id, mode_id="auto-edit")
            await say(connection, session, "again")
            assert tally(root) == MENDED

    asyncio.run(go())
    assert editor.asked == []
    assert "undone: lib/tally.py" in editor.words()
    assert [one["name"] for one in editor.told("available_commands_update")[0]["available_commands"]] == [
        "undo",
        "apply",
    ]


@pytest.mark.slow
def test_a_cancelled_prompt_ends_as_such_and_the_session_goes_on(root: Path) -> None:
    editor = Editor()
    sleep = {"name": "run_command", "arguments": {"command": "sleep 60"}}

    async def go() -> None:
        async with connected(
            root, [[sleep], ["Here.", FINISH]], editor, "--approve", "full", backend="local"
        ) as one:
            session = await begin(one, root)
            prompt = asyncio.create_task(say(one, session, "fix it"))
            while not any(update.get("status") == "in_progress" for update in editor.updates):
                editor.seen.clear()
                await editor.seen.wait()
            with pytest.raises(acp.RequestError, match="Invalid request"):
                await say(one, session, "more")
            await one.cancel(session_id=session.session_id)
            assert await prompt == "cancelled"
            assert await say(one, session, "go on") == "end_turn"

    asyncio.run(go())
    assert editor.words() == "Here."


def test_a_session_is_listed_loaded_and_told_again(root: Path) -> None:
    first, second = Editor(), Editor()

    async def go() -> None:
        async with beside(root, SESSION[:2] + SESSION[3:], first) as connection:
            session = await begin(connection, root)
            await say(connection, session, "fix it")
        messages = SESSION[:2] + SESSION[3:] + [["Again.", FINISH]]
        async with beside(root, messages, second) as connection:
            listed = (await connection.list_sessions(cwd=str(root / "repo"))).sessions
            assert [(one.session_id, one.title) for one in listed] == [(session.session_id, "fix it")]
            await connection.load_session(
                cwd=str(root / "repo"), session_id=session.session_id, mcp_servers=[]
            )
            told = list(second.updates)
            assert [
                one["content"]["text"] for one in told if one["session_update"] == "user_message_chunk"
            ] == ["fix it"]
            await say(connection, session, "look again")

    asyncio.run(go())
    assert second.words() == "Look first. Done.Again."
    kinds = {"tool_call", "tool_call_update"}
    assert any("diff" in json.dumps(update) for update in second.updates if update["session_update"] in kinds)
    assert len(session_folders(root)) == 1


def test_what_an_editor_asks_wrongly_is_answered_with_an_error(root: Path) -> None:
    editor = Editor()

    async def refused(awaitable: Any, code: int, said: str = "") -> None:
        with pytest.raises(acp.RequestError) as caught:
            await awaitable
        assert caught.value.code == code
        assert said in f"{caught.value} {caught.value.data}"

    async def go() -> None:
        async with beside(root, [[FINISH]], editor) as connection:
            await refused(connection.new_session(cwd="relative", mcp_servers=[]), -32602, "absolute")
            await refused(connection.new_session(cwd="/nonexistent", mcp_servers=[]), -32602, "fix")
            await refused(say(connection, "none", "x"), -32002)
            await refused(
                connection.load_session(cwd=str(root / "repo"), session_id="none", mcp_servers=[]), -32602
            )
            session = await begin(connection, root)
            mode = connection.set_session_mode(session_id=session.session_id, mode_id="yolo")
            await refused(mode, -32602, "no such mode")
            picture = acp.image_block("aaaa", "image/png")
            prompt = connection.prompt(session_id=session.session_id, prompt=[picture])
            await refused(prompt, -32602, "cannot read")
            await refused(say(connection, session, "  "), -32602, "is empty")
            await connection.cancel(session_id="none")
            assert await say(connection, session, "finish") == "end_turn"
            await refused(say(connection, session, "the script is at its end"), -32603, "no more messages")

    asyncio.run(go())


def test_input_from_a_file_is_refused(root: Path) -> None:
    line = command("--acp", "--model", write_script(root / "script.json", [[FINISH]]), "--backend", "local")
    done = subprocess.run(
        line, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60,
        env=environment(root),
    )  # fmt: skip
    assert done.returncode == 2
    assert "--acp: standard input must be a pipe from an editor" in done.stderr


@pytest.mark.slow
def test_an_editor_that_sends_nonsense_is_told_and_served_on(root: Path) -> None:
    script = write_script(root / "script.json", [[FINISH]])
    nonsense = [
        b"{",
        b"[1]",
        b"5",
        b'"x"',
        b"\xff\xfe",
        b'{"id": {"a": 1}, "method": "initialize"}',
        b'{"method": 5}',
    ]
    requests = [
        {"jsonrpc": "2.0", "id": 1, "method": "nothing/known", "params": {}},
        {"jsonrpc": "2.0", "id": 2, "method": "session/new", "params": {"cwd": 5}},
        {"jsonrpc": "2.0", "id": 3, "method": "session/prompt", "params": None},
        {"jsonrpc": "2.0", "id": 99, "result": {"unasked": True}},
        {"jsonrpc": "2.0", "method": "session/cancel", "params": {"x": 1}},
        {"jsonrpc": "2.0", "id": 4, "method": "initialize", "params": {"protocolVersion": 1}},
    ]
    sent = b"\n".join([*nonsense, *(json.dumps(one).encode() for one in requests)]) + b"\n"
    line = command("--acp", "--model", script, "--backend", "local")
    child = subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(root)
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(sent)
    child.stdin.flush()
    answers = [json.loads(child.stdout.readline()) for _ in range(len(nonsense) + 4)]
    child.stdin.close()
    assert child.wait(timeout=60) == 0
    child.stdout.close()
    by_id = {answer["id"]: answer for answer in answers if answer["id"] is not None}
    codes = [answer["error"]["code"] for answer in answers if answer["id"] is None]
    assert codes == [-32700, -32600, -32600, -32600, -32700, -32600, -32600]
    assert by_id[1]["error"]["code"] == -32601
    assert by_id[2]["error"]["code"] == -32602
    assert "error" in by_id[3]
    assert by_id[4]["result"]["agentCapabilities"]["loadSession"] is True


class Gone:
    """A writer whose reader has left."""

    def write(self, data: bytes) -> None:
        pass

    async def drain(self) -> None:
        raise BrokenPipeError


def test_an_editor_that_leaves_upon_nonsense_has_gone() -> None:
    async def go() -> dict[str, Any] | None:
        reader = asyncio.StreamReader()
        reader.feed_data(b"no json\n[]\n")
        reader.feed_eof()
        return await LineTransport(reader, cast(Any, Gone())).receive()

    assert asyncio.run(go()) is None


def test_in_place_edits_are_on_disk_at_once_and_no_mode_previews(root: Path) -> None:
    seen = {"name": "run_command", "arguments": {"command": "cat lib/tally.py"}}

    async def go() -> None:
        editor = Editor()
        place = SandboxChoice(in_place=True)
        async with beside(root, [[MEND], [seen], [FINISH]], editor, tools="full", sandbox=place) as agent:
            session = await agent.new_session(cwd=str(root / "repo"), mcp_servers=[])
            assert [one.id for one in session.modes.available_modes] == ["ask", "auto-edit", "full"]
            prompt = [schema.TextContentBlock(type="text", text="fix it")]
            await agent.prompt(session_id=session.session_id, prompt=prompt)
            assert (root / "repo" / "lib" / "tally.py").read_text() == MENDED and not editor.written
            undo = [schema.TextContentBlock(type="text", text="/undo")]
            await agent.prompt(session_id=session.session_id, prompt=undo)
        assert len(editor.asked) == 2 and "undone: lib/tally.py" in editor.words()

    asyncio.run(go())
    assert (root / "repo" / "lib" / "tally.py").read_text() == TALLY
