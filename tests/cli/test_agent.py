"""`etude agent` in the terminal, as a user runs it."""

import asyncio
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import Result

from etude.cli.agent_input import Lines
from etude.cli.agent_terminal import TerminalFace, TerminalUser
from etude.controller.agent.events import CallsRequested, ToolCallEnded, ToolCallStarted
from etude.records import ToolCall, ToolResult
from etude.sandbox.backends import open_backend
from tests.cli.agent_scripts import (
    FINISH,
    MEND,
    READ,
    SESSION,
    TALLY,
    command,
    environment,
    make_repository,
    plain_tokens,
    ran,
    recorded_tokens,
    session_folders,
)
from tests.fakes.scripted_model import write_script

MENDED = TALLY.replace("= 1", "= 0")
pytestmark = pytest.mark.skipif(bool(open_backend("local").doctor()), reason="no sandboxes here")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_repository(tmp_path / "repo")
    return tmp_path


def agent(root: Path, messages, *arguments: str, stdin: str = "", backend: str = "local") -> Result:
    """Runs the command on the repository; by default in real sandboxes."""
    script = write_script(root / "script.json", messages)
    more = ("--model", script, "--backend", backend)
    return ran(root, str(root / "repo"), *more, *arguments, stdin=stdin)


def tally(root: Path) -> str:
    return (root / "repo" / "lib" / "tally.py").read_text()


def test_the_terminal_gives_the_tokens_of_a_rollout(root: Path) -> None:
    before = plain_tokens(root / "repo", write_script(root / "script.json", SESSION), "fix it")
    done = agent(root, SESSION, "-p", "fix it", "--apply", backend="local")
    assert done.exit_code == 0, done.stderr
    assert np.array_equal(recorded_tokens(root, str(root / "script.json")), before)
    assert tally(root) == MENDED
    assert "1 passed" in done.stdout


def test_one_instruction_shows_its_changes_and_writes_them_only_when_asked(root: Path) -> None:
    done = agent(root, SESSION, "-p", "fix it")
    assert done.exit_code == 0
    assert "-    total = 1\n+    total = 0\n" in done.stdout
    assert "error: unclosed path" in done.stdout
    assert "--apply" in done.stderr
    assert tally(root) == TALLY
    assert agent(root, SESSION, "--instruction", "fix it", "--apply").exit_code == 0
    assert tally(root) == MENDED


def test_characters_that_no_terminal_has_are_shown_all_the_same() -> None:
    written = io.BytesIO()
    with io.TextIOWrapper(written, "utf-8") as file:
        face = TerminalFace(console := Console(file=file, width=80), console)
        call = ToolCall("read_file", {"path": "half \ud83d, byte \udcff"})
        face.emit(ToolCallEnded(1, 0, call, ToolResult("é")))
        file.flush()
        assert written.getvalue().decode() == "✓ read_file half \ufffd, byte \ufffd\n  é\n"


def test_calls_of_a_turn_that_was_stopped_are_not_shown_as_running_later() -> None:
    console = Console(file=(written := io.StringIO()), width=80, force_terminal=True)
    face = TerminalFace(console, console)
    calls = tuple(ToolCall("run_command", {"command": name}) for name in ("first", "second"))
    for position, call in enumerate(calls):
        face.emit(ToolCallStarted(1, position, call))
    face.hide_running()
    written.seek(0)
    written.truncate()
    face.emit(CallsRequested(2, calls[:1]))
    face.emit(ToolCallStarted(2, 0, calls[0]))
    face.emit(ToolCallEnded(2, 0, calls[0], ToolResult("done")))
    face.hide_running()
    assert "first" in written.getvalue() and "second" not in written.getvalue()


def test_what_happens_during_a_question_is_shown_after_its_answer() -> None:
    """Two commands at once: the first ends while the person is asked about the second."""

    class Typed(Lines):
        async def read(self) -> str | None:
            face.emit(ToolCallEnded(1, 0, ToolCall("run_command", {"command": "first"}), ToolResult("done")))
            return "y"

    console = Console(file=(written := io.StringIO()), width=80)
    face = TerminalFace(console, console)
    tests = ToolCall("run_tests", {"paths": '["tests/test_a.py", "tests/test_b.py::test_c"]'})
    assert asyncio.run(TerminalUser(face, Typed()).allow(tests)) == "once"
    assert written.getvalue() == (
        "run_tests tests/test_a.py tests/test_b.py::test_c\n  tests/test_a.py\n  tests/test_b.py::test_c\n"
        "allow? [y]es, [n]o, [a]lways ✓ run_command first\n  done\n"
    )


def test_arrays_of_a_call_are_arrays_for_programs(root: Path) -> None:
    lints = {"name": "read_lints", "arguments": {"paths": '["lib/tally.py"]'}}
    done = agent(root, [[lints, READ], [FINISH]], "-p", "look", "--json", "--tools", "full")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    made = next(event["calls"] for event in events if event["event"] == "calls")
    assert [call["arguments"] for call in made] == [{"paths": ["lib/tally.py"]}, READ["arguments"]]


def test_events_are_lines_of_json_that_end_with_the_result(root: Path) -> None:
    done = agent(root, SESSION, "-p", "fix it", "--json", "--apply")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [event["event"] for event in events]
    assert {"text", "message_end", "calls", "call_started", "call_ended", "changed", "ended"} < set(kinds)
    result = events[-1]
    assert (result["event"], result["status"], result["files"]) == ("result", "done", ["lib/tally.py"])
    assert result["written"] is True
    assert "".join(event["text"] for event in events if event["event"] == "text") == "Look first. Done."
    failed = agent(root, [[READ]], "-p", "fix it", "--json")
    assert failed.exit_code == 3
    assert json.loads(failed.stdout.splitlines()[-1])["error"] == "SamplerError"


def test_a_conversation_asks_undoes_and_shows(root: Path) -> None:
    messages = [[READ], [MEND], [FINISH], [MEND], [FINISH]]
    typed = "fix it\nperhaps\ny\n/diff\n/undo\n/status\nagain\nn\n/nonsense\n/quit\n"
    done = agent(root, messages, stdin=typed)
    assert done.exit_code == 0, done.stderr
    assert tally(root) == TALLY
    assert done.stderr.count("allow? ") == 3
    assert "✗ edit_lines lib/tally.py\n  error: the user refused this call" in done.stdout
    assert "5 messages" not in done.stderr.split("again")[0]
    assert "no such command" in done.stderr
    assert "+    total = 1" in done.stdout, "what undo brought back is shown"


def test_a_question_that_nobody_answers_is_a_refusal(root: Path) -> None:
    done = agent(root, [[MEND], [FINISH]], "-p", "fix it", "--approve", "ask")
    assert done.exit_code == 4
    assert tally(root) == TALLY


def test_a_session_is_listed_and_taken_up(root: Path) -> None:
    agent(root, [[MEND], [FINISH]], "-p", "fix the total", "--apply")
    (folder,) = session_folders(root)
    listed = ran(root, "--list")
    assert folder.name in listed.stdout
    rows = json.loads(ran(root, "--list", "--json").stdout)
    assert [(row["id"], row["title"]) for row in rows] == [(folder.name, "fix the total")]
    write_script(root / "script.json", [[MEND], [FINISH], [READ], ["Again.", FINISH]])
    done = ran(root, "--resume", "last", "--backend", "local", "-p", "look again")
    assert done.exit_code == 0, done.stderr
    assert "Again." in done.stdout
    assert len(session_folders(root)) == 1


def test_control_characters_of_an_agent_never_reach_the_terminal(root: Path) -> None:
    write = {"name": "search_replace", "arguments": {"path": "lib/tally.py", "old": "1", "new": "\x1b[8m"}}
    done = agent(root, [["\x1b[2Jhidden\x9b", write], ["\x1b]0;title\x07", FINISH]], "-p", "x\x1b[2J")
    assert done.exit_code == 0
    assert not {"\x1b", "\x9b", "\x07"} & set(done.stdout)
    assert "hidden" in done.stdout


def started(root: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command at work, its output to be read."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command(*arguments), env=environment(root), text=True, **pipes)


def wait_for(condition, what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)


SLEEP = {"name": "run_command", "arguments": {"command": "touch begun; sleep 60"}}


@pytest.mark.slow
def test_a_killed_agent_is_taken_up_with_its_work(root: Path) -> None:
    """kill -9 while a command runs: the edits of finished turns stay, and the command runs again."""
    counts = "grep -c 'total = 0' lib/tally.py; test -e go_on || sleep 600"
    count = {"name": "run_command", "arguments": {"command": counts}}
    script = write_script(root / "script.json", [[MEND], [count], ["Went on.", FINISH]])
    child = started(root, str(root / "repo"), "--model", script, "-p", "fix it", "--apply", "--json")
    assert child.stdout is not None
    for event in child.stdout:
        if '"call_started", "turn": 2' in event:
            break
    child.kill()
    child.wait()
    child.stdout.close()
    assert tally(root) == MENDED
    (root / "repo" / "go_on").touch()
    done = ran(root, "--resume", "last", "--json", stdin="/quit\n")
    assert done.exit_code == 0, done.stderr
    assert "continuing" in done.stderr
    events = [json.loads(one) for one in done.stdout.splitlines()]
    results = [event["result"]["output"].strip() for event in events if event["event"] == "call_ended"]
    assert results == ["1", ""]
    assert events[-1] == {"event": "ended", "status": "done", "cause": ""}
    assert len(session_folders(root)) == 1


@pytest.mark.slow
def test_an_interrupt_stops_the_agent_and_not_the_program(root: Path) -> None:
    """At a terminal: Ctrl-C while a command runs, then more words, then Ctrl-C at the prompt."""
    script = write_script(root / "script.json", [[MEND, SLEEP], ["Still here.", FINISH]])
    master, slave = pty.openpty()
    line = command(str(root / "repo"), "--model", script, "--approve", "full")
    with (root / "out.txt").open("wb") as out:
        child = subprocess.Popen(
            line,
            stdin=slave,
            stdout=out,
            stderr=out,
            env=environment(root) | {"TERM": "dumb"},
            start_new_session=True,
        )
    os.close(slave)
    try:
        os.write(master, b"fix it\n")
        wait_for(lambda: b"edit_lines" in (root / "out.txt").read_bytes(), "the edit")
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        wait_for(lambda: b"stopped: user" in (root / "out.txt").read_bytes(), "the stop")
        assert tally(root) == MENDED, "what had been done stays, and can be undone"
        os.write(master, b"go on\n")
        wait_for(lambda: b"Still here." in (root / "out.txt").read_bytes(), "the answer")
        wait_for(lambda: (root / "out.txt").read_bytes().count(b"\n> ") == 3, "the prompt")
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=60) == 130
    finally:
        child.kill()
        child.wait()
        os.close(master)


@pytest.mark.slow
def test_an_interrupt_ends_one_instruction_with_130(root: Path) -> None:
    script = write_script(root / "script.json", [[SLEEP], [FINISH]])
    child = started(root, str(root / "repo"), "--model", script, "-p", "fix it", "--json")
    assert child.stdout is not None
    for event in child.stdout:
        if "call_started" in event:
            break
    child.send_signal(signal.SIGINT)
    rest = child.stdout.read()
    assert child.wait(timeout=60) == 130
    assert json.loads(rest.splitlines()[-1])["cause"] == "user"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--endpoint", "nowhere", "--model-name", "m"], "not a server address"),
        (["--endpoint", "http://127.0.0.1:9/v1"], "--model-name"),
        (
            ["--endpoint", "http://127.0.0.1:9/v1", "--model-name", "m", "--key-variable", "NOT_SET_HERE"],
            "not set",
        ),
        (["--model", "."], "neither config.json"),
        (["--run", "."], "not a run directory"),
        ([], "no model is named"),
        (["--model", "x", "--run", "y"], "more than one model"),
        (["--resume", "20260101-000000-abcdef"], "no such session"),
        (["--resume", "last"], "no session yet"),
        (["--model", ".", "--approve", "yolo"], "no such mode"),
        (["--model", ".", "--approve", "ask", "--apply"], "--apply"),
        (["--model", ".", "--tool-calls", "spoken"], "is not one of"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_fix(root: Path, arguments: list[str], said: str) -> None:
    result = ran(root, str(root / "repo"), "-p", "x", *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert session_folders(root) == []


def test_a_path_that_is_none_is_refused(root: Path) -> None:
    script = write_script(root / "script.json", SESSION)
    result = ran(root, str(root / "none"), "--model", script, "-p", "x")
    assert result.exit_code == 2
    assert "is not a directory" in result.stderr


def test_an_endpoint_that_is_not_there_is_a_failure_of_the_system(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.agent.runner.asyncio.sleep", _no_sleep)
    arguments = ("--endpoint", "http://127.0.0.1:9/v1", "--model-name", "m", "--backend", "local")
    result = ran(root, str(root / "repo"), "-p", "x", *arguments)
    assert result.exit_code == 3, result.output
    assert "no server answers" in result.stderr


async def _no_sleep(delay_s: float) -> None:
    pass


class Model(ThreadingHTTPServer):
    """A chat endpoint on loopback that gives these answers in turn; None drops the stream in mid-token."""

    def __init__(self, answers) -> None:
        super().__init__(("127.0.0.1", 0), Talking)
        self.answers = list(answers)
        self.bodies = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Talking(BaseHTTPRequestHandler):
    """One request to the model."""

    server: Model
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.append(json.loads(body))
        answer = self.server.answers.pop(0)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        if answer is None:
            self._chunk(b'data: {"choices": [{"delta": {"content": "half a wo')
            self.close_connection = True
            return
        for delta, finish in ((answer, None), ({}, "stop")):
            event = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
            self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def model():
    servers = []

    def serve(answers) -> Model:
        servers.append(Model(answers))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def native(name: str, **arguments) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": f"I call {name}. ", "tool_calls": [{"index": 0, "id": "c", "function": function}]}


def test_a_model_behind_an_endpoint_works_on_the_repository(root: Path, model) -> None:
    """One stream drops in mid-token: it is asked for again, and what it said counts for nothing."""
    edit = native("edit_lines", path="lib/tally.py", start=2, text="    total = 0")
    server = model([native("read_file", path="lib/tally.py"), None, edit, native("finish")])
    line = (str(root / "repo"), "--endpoint", server.url, "--model-name", "m", "--backend", "local")
    done = ran(root, *line, "-p", "fix it", "--apply")
    assert done.exit_code == 0, done.stderr
    assert tally(root) == MENDED
    assert "trying again" in done.stdout
    assert done.stdout.count("I call edit_lines.") == 1
    assert len(server.bodies) == 4
    assert server.bodies[1]["messages"] == server.bodies[2]["messages"]
    assert "half a wo" not in json.dumps(server.bodies[3]["messages"])


def test_plain_words_answer_the_user_and_the_project_speaks_to_the_agent(root: Path, model) -> None:
    (root / "repo" / "AGENTS.md").write_text("Never rename tally.\n" + "x" * 20_000)
    server = model([{"content": "It adds numbers."}, {"content": "In a loop."}])
    line = (str(root / "repo"), "--endpoint", server.url, "--model-name", "m", "--backend", "local")
    done = ran(root, *line, stdin="what does tally do?\nhow?\n/quit\n")
    assert done.exit_code == 0, done.stderr
    assert "It adds numbers." in done.stdout and "In a loop." in done.stdout
    system = server.bodies[0]["messages"][0]["content"]
    assert "a message without a call ends your turn" in system and "Never rename tally." in system
    assert len(system) < 17_500 and "only the first 16384 bytes of AGENTS.md are read" in done.stdout
    roles = [message["role"] for message in server.bodies[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]


def test_max_turns_counts_from_each_instruction(root: Path) -> None:
    script = [[READ], [READ], [READ], [FINISH]]
    done = agent(root, script, "--max-turns", "2", "-p", "look")
    assert done.exit_code == 1 and "turns" in done.stdout
    again = ran(root, "--resume", "last", "--backend", "local", "--max-turns", "2", "-p", "go on", "--json")
    assert json.loads(again.stdout.splitlines()[-1])["turns"] == 4
    assert again.exit_code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--image", "a:1", "--dockerfile", "Dockerfile"], "contradicts --image"),
        (["--image", "a:1", "--venv", "x"], "cannot show this machine's Python environment"),
        (["--image", "a:1", "--backend", "unisolated"], "leave --backend out"),
        (["--dockerfile", "nowhere/Dockerfile"], "there is no such file"),
        (["--venv", "x", "--backend", "unisolated"], "only the local backend can show"),
        (["--venv", "nowhere", "--backend", "local"], "is not a Python environment"),
        (["--max-turns", "0"], "--max-turns"),
    ],
)
def test_surroundings_that_do_not_fit_are_refused(root: Path, options: list[str], message: str) -> None:
    script = write_script(root / "script.json", [[FINISH]])
    done = ran(root, str(root / "repo"), "--model", script, "-p", "x", *options)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


MCP_SERVER = """
from mcp.server.mcpserver import MCPServer
server = MCPServer("echo")
@server.tool()
def shout(text: str) -> str:
    "Says it louder."
    return text.upper()
server.run()
"""


@pytest.mark.slow
@pytest.mark.parametrize("apply", [["--apply"], []])
def test_tools_of_an_mcp_server_act_outside_and_are_asked_about(root: Path, apply: list[str]) -> None:
    (root / "server.py").write_text(MCP_SERVER)
    script = write_script(
        root / "script.json", [[{"name": "echo_shout", "arguments": {"text": "hello"}}], ["Done."]]
    )
    line = [str(root / "repo"), "--model", script, "--backend", "local", "-p", "x", *apply]
    server = f"echo={sys.executable} {root / 'server.py'}"
    done = subprocess.run(
        command(*line, "--mcp", server),
        env=environment(root),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == (0 if apply else 4), done.stderr
    assert ("HELLO" in done.stdout, "refused" in done.stdout) == (bool(apply), not apply)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        (["echo"], "is not a valid MCP server"),
        (["Echo=true"], "is not a valid MCP server"),
        (["echo=it's"], "is not a valid MCP server"),
        (["echo=true", "echo=false"], "names a server twice"),
    ],
)
def test_mcp_servers_that_are_named_wrongly_are_refused(root: Path, named: list[str], words: str) -> None:
    options = [option for one in named for option in ("--mcp", one)]
    done = agent(root, [[FINISH]], *options, "-p", "x")
    assert done.exit_code == 2 and words in done.stderr


def test_an_agent_may_ask_and_is_answered(root: Path, model) -> None:
    server = model([native("ask_user", question="Which?", options=["red", "blue"]), native("finish")])
    line = (str(root / "repo"), "--endpoint", server.url, "--model-name", "m", "--backend", "local")
    done = ran(root, *line, stdin="paint it\n2\n/quit\n")
    assert done.exit_code == 0, done.stderr
    assert "Which?\n  1. red\n  2. blue" in done.stderr
    assert server.bodies[1]["messages"][-1]["content"] == "blue"


def test_a_session_of_another_directory_is_refused(root: Path) -> None:
    agent(root, [[FINISH]], "-p", "x")
    result = ran(root, str(root), "--resume", "last")
    assert result.exit_code == 2
    assert "another directory" in result.stderr


def test_a_broken_journal_is_refused(root: Path) -> None:
    agent(root, [[MEND], [FINISH]], "-p", "x")
    (folder,) = session_folders(root)
    (folder / "journal").write_bytes(b"nonsense\nand more\n")
    done = ran(root, "--resume", folder.name, "--backend", "local", "-p", "x")
    assert done.exit_code == 3
    assert "journal is damaged" in done.stderr
    assert done.stdout == ""
