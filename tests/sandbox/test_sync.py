"""The blocking wrapper: same results, typed errors, Ctrl-C, nothing left behind."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from etude.errors import ConfigError, SandboxError
from etude.sandbox.errors import PathMissingError
from etude.sandbox.fake import MemoryBackend
from etude.sandbox.interface import Command, Commands, Files, Sandbox, SandboxBackend
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.sync import LoopThread, SyncBackend, SyncCommand, SyncCommands, SyncFiles, SyncSandbox
from etude.sandbox.template import Template
from tests.sandbox.serving import ScriptedBackend

TESTS = Template({"test_a.py": "def test_one():\n    assert 1\n"})


def names_of_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_a_sandbox_of_a_named_backend_is_used_and_ends_with_its_block() -> None:
    with SyncSandbox.create("memory", TESTS, metadata={"k": "v"}) as sandbox:
        assert sandbox.run_tests(["test_a.py"]).passed == ("test_one",)
        sandbox.files.write("b.txt", "two")
        assert sandbox.files.read("b.txt", limit_bytes=2) == b"tw"
        assert dict(sandbox.diff()) == {"b.txt": b"two"}
        assert dict(sandbox.get_info().metadata) == {"k": "v"}
        with pytest.raises(PathMissingError):
            sandbox.files.read("none")
        (copy,) = sandbox.fork()
        assert not isinstance(copy, SandboxError)
        assert copy.files.read("b.txt") == b"two"
        assert "etude-sandbox" in names_of_threads()
    assert "etude-sandbox" not in names_of_threads()


def test_a_backend_makes_finds_snapshots_and_moves_sandboxes(tmp_path: Path) -> None:
    with SyncBackend.open("memory") as backend:
        sandbox = backend.create(Template({"a": "1"}))
        assert backend.connect(sandbox.id).files.read("a") == b"1"
        assert [info.id for info in backend.list()] == [sandbox.id]
        backend.export_snapshot(sandbox.create_snapshot().id, tmp_path / "s")
        assert backend.import_snapshot(tmp_path / "s").kind == "filesystem"
        assert backend.capabilities().backend == "memory"
        assert backend.doctor() == []
        with SyncBackend(MemoryBackend, backend.thread) as other:
            moved = sandbox.migrate(other)
            assert moved.files.read("a") == b"1"
        with SyncBackend.open("memory") as stranger, pytest.raises(SandboxError, match="another thread"):
            backend.create().migrate(stranger)
    backend.close()
    with pytest.raises(SandboxError, match="closed"):
        backend.create()


def test_commands_in_the_background_take_input() -> None:
    with SyncBackend(ScriptedBackend) as backend, backend.create() as sandbox:
        seen: list[bytes] = []
        command = sandbox.commands.start("cat", on_output=lambda fd, data: seen.append(data))
        with pytest.raises(TimeoutError):
            command.wait(0.01)
        command.send_stdin("x", close=True)
        assert sandbox.commands.connect(command.pid).wait().stdout == "x"
        assert (seen, command.kill()) == ([b"x"], False)


def test_a_blocking_call_in_the_loop_s_own_thread_is_refused() -> None:
    with SyncBackend(ScriptedBackend) as backend, backend.create() as sandbox:
        caught: list[Exception] = []

        def on_output(fd: int, data: bytes) -> None:
            try:
                sandbox.files.list()
            except SandboxError as error:
                caught.append(error)

        sandbox.commands.run("echo a", on_output=on_output)
        assert "blocking call" in str(caught[0])


def test_an_unknown_backend_leaves_no_thread() -> None:
    with pytest.raises(ConfigError):
        SyncSandbox.create("none")
    assert "etude-sandbox" not in names_of_threads()


@pytest.mark.slow
def test_ctrl_c_cancels_the_command_that_is_waited_for() -> None:
    program = """
import signal, sys, threading, time
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.sync import SyncBackend
from tests.sandbox.serving import ScriptedBackend
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
with SyncBackend(ScriptedBackend) as backend, backend.create() as sandbox:
    def announce():
        caller = threading.main_thread().ident
        while not sandbox.wrapped.scripted.running or sys._current_frames()[caller].f_code.co_name != "wait":
            time.sleep(0.01)
        print("ready", flush=True)
    announcing = threading.Thread(target=announce)
    announcing.start()
    try:
        sandbox.commands.run("sleep 600")
    except KeyboardInterrupt:
        print("cancelled", sandbox.wrapped.scripted.cancelled, flush=True)
    announcing.join()
print("ended", [t.name for t in threading.enumerate()], flush=True)
"""
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"},
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert out.splitlines() == ["cancelled ['sleep 600']", "ended ['MainThread']"]


@pytest.mark.parametrize("begins", [False, True], ids=["before", "after"])
def test_ctrl_c_while_a_call_is_handed_over_ends_the_call(
    begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = LoopThread()
    hand_over = thread._loop.call_soon_threadsafe
    interrupts = iter([True])

    def interrupted(callback: Any, *arguments: Any) -> Any:
        is_first = next(interrupts, False)
        if begins or not is_first:
            hand_over(callback, *arguments)
        if is_first:
            raise KeyboardInterrupt

    monkeypatch.setattr(thread._loop, "call_soon_threadsafe", interrupted)
    try:
        call = asyncio.sleep(600)
        with pytest.raises(KeyboardInterrupt):
            thread.run(call)
        assert inspect.getcoroutinestate(call) == inspect.CORO_CLOSED
    finally:
        thread.close()


def test_closing_the_thread_twice_does_nothing() -> None:
    thread = LoopThread()
    thread.close()
    thread.close()


@pytest.mark.parametrize(
    ("protocol", "wrapper"),
    [
        (Files, SyncFiles),
        (Command, SyncCommand),
        (Commands, SyncCommands),
        (Sandbox, SyncSandbox),
        (SandboxBackend, SyncBackend),
    ],
)
def test_every_method_of_the_contract_is_wrapped(protocol: Any, wrapper: Any) -> None:
    methods = [name for name, _ in inspect.getmembers(protocol, inspect.isfunction)]
    public = {name for name in methods if not name.startswith("_")}
    assert public
    assert public <= set(vars(wrapper))


def test_the_example_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    if problems := LocalBackend().doctor():
        pytest.skip(f"no namespaces here: {problems[0]}")
    text = Path(__file__).resolve().parents[2].joinpath("docs/sandbox-server.md").read_text()
    example = text.partition("```python\n")[2].partition("```")[0]
    exec(compile(example, "docs/sandbox-server.md", "exec"), {})
    assert capsys.readouterr().out == "42\n\n"
