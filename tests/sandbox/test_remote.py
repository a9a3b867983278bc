"""The remote client: the same results as the backend itself, typed errors, and retries."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import (
    ConfigError,
    EtudeError,
    SandboxError,
    ToolArgumentError,
    UserError,
)
from etude.kit.retry import Backoff
from etude.sandbox.answers import changes, encode_changes
from etude.sandbox.errors import (
    PathKindError,
    PathMissingError,
    PathOutsideError,
    SandboxLostError,
    SandboxMissingError,
    SandboxStateError,
    SnapshotError,
    Unsupported,
)
from etude.sandbox.files import batches, below, split_write
from etude.sandbox.inside.frames import pack
from etude.sandbox.interface import Sandbox
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.template import Image, Template, decode_template, encode_template, template_key
from etude.sandbox.types import (
    CommandResult,
    FileInfo,
    Network,
    Resources,
    SandboxInfo,
)
from etude.sandbox.wire_types import (
    ERRORS,
    decode_error,
    decode_info,
    encode,
    encode_error,
    receive_file,
)
from etude_quickstart.memory_backend import MemoryBackend
from tests.sandbox.backends import with_sandbox
from tests.sandbox.scenes import comes_alive
from tests.sandbox.serving import (
    TOKEN,
    Limits,
    RemoteBackend,
    ScriptedBackend,
    build_app,
    remote,
    served,
    until,
)
from tests.sandbox.test_contract import FILES, SCENARIOS


def through_server(scenario: Callable[[Sandbox], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        transport = httpx.ASGITransport(build_app({"memory": MemoryBackend()}, TOKEN))
        backend = RemoteBackend("http://test", TOKEN, transport=transport)
        try:
            return await scenario(await backend.create(Template(FILES)))
        finally:
            await backend.close()

    return asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_remote_sandbox_gives_the_results_of_a_local_one(scenario: Any) -> None:
    assert through_server(scenario) == with_sandbox("memory", FILES, scenario)


def with_scripted(scenario: Callable[[RemoteBackend, ScriptedBackend], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        inner = ScriptedBackend()
        async with remote(inner) as backend:
            return await scenario(backend, inner)

    return asyncio.run(run())


def commands_of(inner: ScriptedBackend) -> Any:
    (sandbox,) = inner.live
    return sandbox.scripted


def test_a_command_streams_its_output_and_returns_its_result() -> None:
    async def scenario(backend: RemoteBackend, inner: ScriptedBackend) -> None:
        sandbox = await backend.create()
        seen: list[tuple[int, bytes]] = []
        result = await sandbox.commands.run(
            "echo a",
            env={"SUFFIX": "-b"},
            stdin=b" in",
            on_output=lambda fd, data: seen.append((fd, data)),
        )
        assert result == CommandResult(0, "a-b in", "", False, 0.25, False)
        assert b"".join(data for fd, data in seen if fd == 1) == b"a-b in"
        assert b"".join(data for fd, data in seen if fd == 2) == b"warning"

    with_scripted(scenario)


def test_a_client_that_is_cancelled_ends_its_command() -> None:
    async def scenario(backend: RemoteBackend, inner: ScriptedBackend) -> None:
        sandbox = await backend.create()
        commands = commands_of(inner)
        running = asyncio.ensure_future(sandbox.commands.run("sleep 60"))
        await until(lambda: commands.running)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: commands.cancelled == ["sleep 60"])

    with_scripted(scenario)


def test_a_flood_reaches_a_client_that_reads_and_is_bounded_for_one_that_does_not() -> None:
    async def scenario(backend: RemoteBackend, inner: ScriptedBackend) -> None:
        sandbox = await backend.create()
        total = 0

        def slow(fd: int, data: bytes) -> None:
            nonlocal total
            total += len(data)
            time.sleep(0.005)

        result = await sandbox.commands.run("flood 200", on_output=slow)
        flood_bytes = 200 * (64 << 10)
        assert total == flood_bytes or (result.truncated and 0 < total < flood_bytes)

    with_scripted(scenario)


def test_a_background_command_streams_takes_input_and_is_waited_for_again() -> None:
    async def scenario(backend: RemoteBackend, inner: ScriptedBackend) -> None:
        sandbox = await backend.create()
        seen: list[bytes] = []
        command = await sandbox.commands.start("cat", on_output=lambda fd, data: seen.append(data))
        assert [p.running for p in await sandbox.commands.list()] == [True]
        with pytest.raises(TimeoutError):
            await command.wait(0.05)
        await command.send_stdin("one ")
        await until(lambda: seen == [b"one "])
        other = await sandbox.commands.connect(command.pid)
        await other.send_stdin(b"two", close=True)
        async with asyncio.timeout(60):
            result = await command.wait()
        assert (result.stdout, b"".join(seen)) == ("one two", b"one two")
        assert not sandbox._outputs
        assert await other.wait() == result
        assert not await command.kill()
        plain = await sandbox.commands.start("cat")
        assert await sandbox.commands.kill(plain.pid)
        assert (await plain.wait()).exit_code == -9
        with pytest.raises(Unsupported):
            await sandbox.commands.start("no such", on_output=lambda fd, data: None)

    with_scripted(scenario)


def test_errors_cross_the_wire_as_themselves() -> None:
    async def scenario(backend: RemoteBackend, inner: ScriptedBackend) -> None:
        sandbox = await backend.create(Template({"d/a": "x"}))
        for path, kind in (("none", PathMissingError), ("d", PathKindError), ("../x", PathOutsideError)):
            with pytest.raises(kind) as caught:
                await sandbox.files.read(path)
            assert type(caught.value) is kind
            assert (caught.value.field, caught.value.received) == ("path", path)
        with pytest.raises(ToolArgumentError):
            await sandbox.files.grep("(")
        with pytest.raises(Unsupported, match="memory of processes"):
            await sandbox.pause("full")
        await sandbox.pause("filesystem")
        with pytest.raises(SandboxStateError):
            await sandbox.diff()
        await sandbox.resume()
        with pytest.raises(SandboxMissingError):
            await backend.connect("memory-0")
        with pytest.raises(SnapshotError):
            await backend.delete_snapshot("none")
        with pytest.raises(UserError, match="backend"):
            await RemoteBackend(backend.connection.url, TOKEN, "another").list()
        await sandbox.kill()
        await sandbox.kill()

    with_scripted(scenario)


@pytest.mark.slow
def test_file_names_of_any_bytes_and_large_files_pass() -> None:
    async def scenario(backend: RemoteBackend, inner: ScriptedBackend) -> None:
        sandbox = await backend.create()
        large = bytes(range(256)) * (80 << 10)
        await sandbox.files.write_many({"a b/?&#%41é\udcff.txt": "é", "large": large, "small": b""})
        assert await sandbox.files.read("a b/?&#%41é\udcff.txt") == "é".encode()
        assert await sandbox.files.read("large", 1 << 30) == large
        assert FileInfo("a b/?&#%41é\udcff.txt", "file", 2) in await sandbox.files.list("a b")
        changes = await sandbox.diff()
        assert changes["large"] == large
        assert await sandbox.final_diff() == changes
        await sandbox.files.remove("a b/?&#%41é\udcff.txt")

    with_scripted(scenario)


def test_a_server_that_takes_little_at_once_is_sent_little() -> None:
    async def run() -> None:
        inner = MemoryBackend()
        async with remote(inner, limits=Limits(body_bytes=4000)) as backend:
            sandbox = await backend.create()
            files = {f"f{number}": bytes([number]) * 500 for number in range(20)} | {"big": b"b" * 9000}
            await sandbox.files.write_many(files)
            assert await sandbox.diff() == files

    asyncio.run(run())


def test_trees_go_up_and_come_down_whole(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep/er").mkdir(parents=True)
    (source / "deep/er/big").write_bytes(b"z" * (3 << 20))
    (source / "empty").write_bytes(b"")
    (source / "link").symlink_to("/etc/passwd")

    async def scenario(backend: RemoteBackend, inner: ScriptedBackend) -> None:
        sandbox = await backend.create()
        assert await sandbox.files.upload(source, "tree") == 3 << 20
        assert [f.path for f in await sandbox.files.list("tree", 5) if f.kind == "file"] == [
            "tree/deep/er/big",
            "tree/empty",
        ]
        assert await sandbox.files.download("tree", tmp_path / "back") == 3 << 20
        assert (tmp_path / "back/deep/er/big").read_bytes() == (source / "deep/er/big").read_bytes()
        assert await sandbox.files.download("tree/empty", tmp_path / "one/file") == 0
        assert (tmp_path / "one/file").read_bytes() == b""
        assert await sandbox.files.upload(source / "empty", "again") == 0
        with pytest.raises(PathMissingError):
            await sandbox.files.download("nothing", tmp_path / "nothing")
        with pytest.raises(ToolArgumentError):
            await sandbox.files.upload(tmp_path / "absent", "x")

    with_scripted(scenario)
    assert not list(tmp_path.rglob("*.tmp"))


def test_snapshots_forks_and_their_errors(tmp_path: Path) -> None:
    async def scenario(backend: RemoteBackend, inner: ScriptedBackend) -> None:
        sandbox = await backend.create(Template({"a": "1"}), Resources(num_processes=9), metadata={"k": "v"})
        await sandbox.files.write("b", "2")
        info = await sandbox.create_snapshot(name="mine")
        assert (info.name, info.kind, info.sandbox_id) == ("mine", "filesystem", sandbox.id)
        await backend.export_snapshot(info.id, tmp_path / "export")
        imported = await backend.import_snapshot(tmp_path / "export")
        assert {info.id, imported.id} <= {found.id for found in await backend.list_snapshots()}
        again = await backend.create(snapshot=imported.id)
        assert await again.files.read("b") == b"2"
        with pytest.raises(SnapshotError):
            await backend.import_snapshot(tmp_path / "absent")
        with pytest.raises(SnapshotError):
            await backend.export_snapshot("none", tmp_path / "none")
        await backend.delete_snapshot(info.id)
        copies = await sandbox.fork(2)
        infos = [await copy.get_info() for copy in copies if not isinstance(copy, SandboxError)]
        assert [info.parent for info in infos] == [sandbox.id] * 2
        described = await sandbox.get_info()
        assert (described.resources.num_processes, dict(described.metadata)) == (9, {"k": "v"})
        assert len(await backend.list()) == 4
        await sandbox.set_timeout(0.01)
        await until(lambda: len(inner.live) == 3)

    with_scripted(scenario)


def test_closing_ends_what_this_client_made_and_nothing_else() -> None:
    async def run() -> None:
        inner = MemoryBackend()
        async with served(build_app({"memory": inner}, TOKEN)) as url:
            mine, other = RemoteBackend(url, TOKEN), RemoteBackend(url, TOKEN)
            await mine.create()
            kept = await other.create()
            await mine.close()
            assert [sandbox.id for sandbox in inner.live] == [kept.id]
            await other.disconnect()
            assert len(inner.live) == 1
            found = await other.connect(kept.id)
            assert found.id == kept.id
            await other.close()
            assert not inner.live

    asyncio.run(run())


def test_a_template_is_sent_once_and_again_when_the_server_forgot_it() -> None:
    async def run() -> None:
        app = build_app({"memory": MemoryBackend()}, TOKEN)
        async with served(app) as url:
            backend = RemoteBackend(url, TOKEN)
            template = Template({"a": "1"}, "named")
            await asyncio.gather(*(backend.create(template) for _ in range(3)))
            await backend.create(template)
            text = await app.state.sandboxes.metrics_text()
            assert 'etude_sandbox_requests_total{operation="put_template",status="200"} 1' in text
            app.state.sandboxes.templates = type(app.state.sandboxes.templates)(0)
            sandbox = await backend.create(template)
            assert (await sandbox.get_info()).template == "named"
            await backend.close()

    asyncio.run(run())


def test_sandboxes_move_from_server_to_server_and_to_other_backends() -> None:
    async def run() -> None:
        there = MemoryBackend()
        async with (
            served(build_app({"memory": there}, TOKEN)) as url,
            remote(MemoryBackend(), peers=(url,)) as here,
        ):
            target = RemoteBackend(url, TOKEN)
            sandbox = await here.create(Template({"a": "1"}))
            await sandbox.files.write("b", "2")
            moved = await sandbox.migrate(target)
            assert await moved.files.read("b") == b"2"
            assert await here.list() == []
            assert [live.id for live in there.live] == [moved.id]
            plain = MemoryBackend()
            again = await moved.migrate(plain)
            assert await again.files.read("b") == b"2"
            assert not there.live
            back = await again.migrate(here)
            assert await back.files.read("b") == b"2"
            assert not plain.live
            stranger = RemoteBackend("http://127.0.0.1:9", TOKEN)
            with pytest.raises(Unsupported, match="peers"):
                await back.migrate(stranger)
            assert (await back.get_info()).state == "running"
            await target.close()

    asyncio.run(run())


def test_capabilities_and_doctor_work_without_awaiting() -> None:
    async def run() -> None:
        async with served(build_app({"memory": MemoryBackend()}, TOKEN)) as url:
            backend = RemoteBackend(url, TOKEN)
            able = await asyncio.to_thread(backend.capabilities)
            assert able == MemoryBackend().capabilities()
            assert await asyncio.to_thread(backend.doctor) == []
            wrong = RemoteBackend(url, "wrong")
            with pytest.raises(UserError, match="token"):
                await wrong.create()
            assert "token" in (await asyncio.to_thread(wrong.doctor))[0]

    asyncio.run(run())
    dead = RemoteBackend("http://127.0.0.1:9", TOKEN)
    assert "connection to the sandbox server failed" in dead.doctor()[0]
    with pytest.raises(SandboxLostError):
        dead.capabilities()


class FlakyTransport(httpx.AsyncBaseTransport):
    """Loses answers on their way back: the server has done what was asked."""

    def __init__(self, app: Any, num_lost: int) -> None:
        self._inner = httpx.ASGITransport(app)
        self.num_lost = num_lost
        self.sent: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(f"{request.method} {request.url.path}")
        response = await self._inner.handle_async_request(request)
        if self.num_lost:
            self.num_lost -= 1
            raise httpx.ReadError("lost on its way")
        return response


def over_flaky(
    num_lost: int, scenario: Callable[[RemoteBackend, FlakyTransport, ScriptedBackend], Awaitable[Any]]
) -> Any:
    async def run() -> Any:
        inner = ScriptedBackend()
        transport = FlakyTransport(build_app({"memory": inner}, TOKEN), 0)
        backend = RemoteBackend("http://test", TOKEN, transport=transport, backoff=Backoff(0.01, attempts=3))
        await backend.hello()
        transport.num_lost = num_lost
        try:
            return await scenario(backend, transport, inner)
        finally:
            transport.num_lost = 0
            await backend.close()
            assert not inner.live

    return asyncio.run(run())


def test_a_creation_whose_answer_is_lost_makes_one_sandbox() -> None:
    async def scenario(backend: RemoteBackend, transport: FlakyTransport, inner: ScriptedBackend) -> None:
        sandbox = await backend.create()
        assert inner.num_created == 1
        assert transport.sent.count("POST /v1/sandboxes") == 3
        assert [live.id for live in inner.live] == [sandbox.id]

    over_flaky(2, scenario)


def test_reads_are_sent_again_and_commands_never() -> None:
    async def scenario(backend: RemoteBackend, transport: FlakyTransport, inner: ScriptedBackend) -> None:
        sandbox = await backend.create(Template({"a": "1"}))
        transport.num_lost = 1
        assert await sandbox.files.read("a") == b"1"
        transport.num_lost = 1
        with pytest.raises(SandboxLostError):
            await sandbox.commands.run("echo a")
        assert commands_of(inner).num_started == {"echo a": 1}
        transport.num_lost = 1
        with pytest.raises(SandboxLostError):
            await sandbox.files.write("a", "2")
        assert transport.num_lost == 0

    over_flaky(0, scenario)


def test_a_server_that_is_gone_is_told_after_a_bounded_number_of_tries() -> None:
    async def run() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))  # nobody listens there, nor can anybody else
            port = free.getsockname()[1]
            backend = RemoteBackend(f"http://127.0.0.1:{port}", TOKEN, backoff=Backoff(0.05, attempts=3))
            with pytest.raises(SandboxLostError, match="connection to the sandbox server failed"):
                await backend.create()
            await backend.close()

    asyncio.run(run())


def chunked(*frames: bytes) -> bytes:
    """An answer of these frames."""
    body = b"".join(frames)
    return HEAD + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"


PIECE, RESULT = pack({"event": "piece"}, b"1" * 1000), pack({"event": "result", "value": None})


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ([PIECE], "incomplete"),
        ([PIECE, RESULT], "stream is incomplete"),
        ([PIECE, pack({"event": "end", "num_bytes": 1001}), RESULT], "stream is incomplete"),
        ([PIECE, pack({"event": "end", "num_bytes": 1000}), PIECE, RESULT], "stream is incomplete"),
    ],
)
def test_an_export_without_its_end_leaves_no_file(tmp_path: Path, reply: list[bytes], text: str) -> None:
    async def run() -> None:
        server, url = await answering(chunked(*reply))
        backend = RemoteBackend(url, TOKEN)
        with pytest.raises(SandboxLostError, match=text):
            await backend.export_snapshot("any", tmp_path / "snapshot")
        await backend.close()
        server.close()

    asyncio.run(run())
    assert not list(tmp_path.iterdir())


def test_a_download_that_breaks_off_leaves_no_half_file(tmp_path: Path) -> None:
    async def scenario(backend: RemoteBackend, transport: FlakyTransport, inner: ScriptedBackend) -> None:
        sandbox = await backend.create(Template({"t/a": "1", "t/b": b"2" * (9 << 20)}))
        (made,) = inner.live
        read, num_reads = made.call, 0

        async def breaks_off(header: Any, *more: Any) -> Any:
            nonlocal num_reads
            num_reads += header["op"] == "read"
            if num_reads == 3:
                raise SandboxLostError("gone")
            return await read(header, *more)

        made.call = breaks_off  # type: ignore[method-assign]
        with pytest.raises(SandboxLostError, match="gone"):
            await sandbox.files.download("t", tmp_path / "tree")

    over_flaky(0, scenario)
    assert [path.name for path in (tmp_path / "tree").iterdir()] == ["a"]


async def answering(reply: bytes) -> tuple[asyncio.Server, str]:
    """A server that answers every request with the same bytes and closes."""

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(on_client, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("reply", "kind", "text"),
    [
        (b"", SandboxLostError, "failed"),
        (HEAD + b"5\r\nabcde\r\n0\r\n\r\n", SandboxLostError, "incomplete"),
        (HEAD + b"10\r\n\x01\x00\x00\x00\x00\x00\x00\x00{xxxxxxx\r\n0\r\n\r\n", SandboxLostError, "JSON"),
        (HEAD + b"a\r\nabc", SandboxLostError, "failed"),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno", SandboxError, "not a sandbox server"),
        (b"HTTP/1.1 500 x\r\ncontent-length: 16\r\n\r\n{\"error\": \"bad\"}", SandboxError, "not a sandbox"),
    ],
)  # fmt: skip
def test_torn_and_foreign_answers_are_errors_of_ours(reply: bytes, kind: type[Exception], text: str) -> None:
    async def run() -> None:
        server, url = await answering(reply)
        backend = RemoteBackend(url, TOKEN)
        sandbox = backend.adopt("any")
        with pytest.raises(kind, match=text):
            await sandbox.commands.run("echo a")
        backend.remove("any")
        await backend.close()
        server.close()

    asyncio.run(run())


def test_another_version_of_the_protocol_is_refused() -> None:
    async def run() -> None:
        body = b'{"speaks": 99}'
        server, url = await answering(b"HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\n" + body)
        with pytest.raises(ConfigError, match="version 99"):
            await RemoteBackend(url, TOKEN).hello()
        server.close()

    asyncio.run(run())


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a//b", "a/./b", "a\0b", "link/x"])
def test_a_downloaded_tree_never_leaves_its_target(tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "outside").mkdir()
    (target / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(PathOutsideError):
        below(target, name)


FRAMES_OF_FILES = st.sampled_from([{"event": "piece"}, {"event": "else"}, {}])
ENDS = st.builds(lambda num: {"event": "end", "num_bytes": num}, st.integers(0, 6) | st.none())


@given(st.lists(st.tuples(FRAMES_OF_FILES | ENDS, st.binary(max_size=3)), max_size=6))
def test_any_stream_of_a_file_is_taken_whole_or_refused(frames: list[tuple[dict[str, Any], bytes]]) -> None:
    content = b"".join(piece for header, piece in frames if header.get("event") == "piece")
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory, "target")
        with contextlib.suppress(SandboxError), receive_file(target) as writer:
            for header, piece in frames:
                writer.write_frame(header, piece)
            if not writer.is_whole:
                raise SandboxError("torn")
        ends = [header.get("num_bytes") for header, _ in frames[-1:] if header.get("event") == "end"]
        assert [path.read_bytes() for path in Path(directory).iterdir()] == [content] * (
            ends == [len(content)]
        )


# Real sandboxes


def test_real_commands_through_a_server(tmp_path: Path) -> None:
    async def run() -> None:
        inner = LocalBackend(tmp_path)
        if problems := inner.doctor():
            pytest.skip(f"no namespaces here: {problems[0]}")
        async with remote(inner) as backend:
            sandbox = await backend.create(Template(FILES))
            seen: list[bytes] = []
            result = await sandbox.commands.run(
                "cat; echo $A >&2; pwd; exit 3",
                env={"A": "b"},
                cwd="lib",
                stdin="in\n",
                on_output=lambda fd, data: seen.append(data),
            )
            assert (result.exit_code, result.stdout, result.stderr) == (3, "in\n/workspace/lib\n", "b\n")
            assert sorted(b"".join(seen)) == sorted(b"in\n/workspace/lib\nb\n")
            lines: list[bytes] = []
            command = await sandbox.commands.start(
                "while read line; do echo got $line; done", on_output=lambda fd, data: lines.append(data)
            )
            await command.send_stdin("one\ntwo\n", close=True)
            assert (await command.wait()).stdout == "got one\ngot two\n"
            assert b"".join(lines) == b"got one\ngot two\n"
            running = asyncio.ensure_future(sandbox.commands.run("sleep 600; echo late > late", 600.0))
            assert await comes_alive(sandbox, "sleep 600"), "the command did not start"
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert await comes_alive(sandbox, "sleep 600", 0), "the command goes on"
            snapshot = await sandbox.create_snapshot("filesystem")
            again = await backend.create(snapshot=snapshot.id)
            assert (await again.run_tests(["tests/test_all.py"])).passed == ("test_passes",)
            await sandbox.pause("filesystem")
            with pytest.raises(SandboxStateError):
                await sandbox.commands.run("true")
            await sandbox.resume()
            assert (await sandbox.commands.run("cat lib/tally.py")).exit_code == 0

    asyncio.run(run())


# Codecs

TEXT = st.text(st.characters(), max_size=30)  # lone surrogates too


def is_name(path: str) -> bool:
    """Whether a text is the normalised path of a file."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return "\0" not in path and all(part not in ("", ".", "..") for part in path.split("/"))


@given(st.dictionaries(TEXT.filter(is_name), st.none() | st.binary(max_size=20)))
def test_diffs_survive_the_wire(found: dict[str, bytes | None]) -> None:
    assert changes(*encode_changes(found), "one") == found


PATHS = st.text("abc", min_size=1, max_size=3)


@given(st.dictionaries(PATHS, st.binary(max_size=20)), TEXT, st.booleans())
def test_templates_survive_the_wire(files: dict[str, bytes | str], name: str, with_image: bool) -> None:
    image = Image("i", ("l1", "l2"), {"A": "b"}, "/w", "me") if with_image else None
    template = Template(files, name.encode("utf-8", "replace").decode(), image)
    again = decode_template(*encode_template(template))
    assert (again.digest, again.name, again.image) == (template.digest, template.name, template.image)
    assert template_key(again) == template_key(template)


def test_infos_survive_the_wire() -> None:
    info = SandboxInfo(
        "i", "b", "t", "d", "paused", Resources(cpus=2.5), Network(("a:1",)), 1.0, None, "p", {"k": "v"}
    )
    assert decode_info(encode(info)) == info


@pytest.mark.parametrize("kind", ERRORS.values(), ids=lambda kind: kind.__name__)
def test_every_error_survives_the_wire(kind: type[EtudeError]) -> None:
    error = kind("message", field="f", received={"a": [1]}, fix="mend")
    again = decode_error(encode_error(error))
    assert type(again) is kind
    assert isinstance(again, EtudeError)
    assert (again.message, again.field, again.received, again.fix) == ("message", "f", {"a": [1]}, "mend")


def test_errors_that_nobody_expects_are_ours_and_unreadable_ones_too() -> None:
    assert isinstance(decode_error(encode_error(KeyError("x"))), SandboxError)
    assert isinstance(decode_error(encode_error(TimeoutError("late"))), TimeoutError)
    assert isinstance(decode_error({"kind": "NoSuchError", "message": "m"}), SandboxError)
    assert isinstance(decode_error(["nonsense"]), SandboxError)
    odd = decode_error(encode_error(ConfigError("m", received=object())))
    assert "object object" in str(odd)


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 40))
def test_batches_cover_everything_in_order_and_keep_the_limit(sizes: list[int], limit: int) -> None:
    parts = [list(range(len(sizes)))[part] for part in batches(sizes, limit)]
    assert [index for part in parts for index in part] == list(range(len(sizes)))
    assert all(len(part) == 1 or sum(sizes[i] for i in part) <= limit for part in parts)


def test_records_are_encoded_by_field_name() -> None:
    info = FileInfo("a", "file", 3)
    assert encode([info]) == [dataclasses.asdict(info)]


@given(
    st.lists(st.tuples(st.text("ab", min_size=1, max_size=3), st.binary(max_size=9)), max_size=6),
    st.integers(1, 99),
)
def test_a_write_in_parts_writes_the_same_and_no_part_is_large(
    files: list[tuple[str, bytes]], limit: int
) -> None:
    header = {"op": "write", "files": [[path, len(data)] for path, data in files]}
    written: dict[str, bytes] = {}
    for part, payload in split_write(header, b"".join(data for _, data in files), limit):
        assert len(payload) == sum(size for _, size in part["files"]) <= limit
        start = 0
        for path, size in part["files"]:
            before = written.get(path, b"") if part.get("append") else b""
            written[path] = before + payload[start : start + size]
            start += size
    assert written == dict(files)


def test_what_a_killed_client_left_is_ended_by_the_next_of_its_name_and_nothing_else() -> None:
    async def scene() -> None:
        async with served(build_app({"memory": MemoryBackend()}, TOKEN)) as url:
            others = RemoteBackend(url, TOKEN, owner="run/worker-1")
            nobody = RemoteBackend(url, TOKEN)
            killed = RemoteBackend(url, TOKEN, owner="run")
            kept = [await others.create(), await nobody.create(metadata={"tenant": "run"})]
            left = [await killed.create(metadata={"tenant": "a"}) for _ in range(2)]
            assert (await left[0].get_info()).metadata == {"tenant": "a", "owner": "run"}
            await killed.disconnect()
            following = RemoteBackend(url, TOKEN, owner="run")
            own = await following.create()
            await following.hello()
            assert {info.id for info in await following.list()} == {own.id, *(one.id for one in kept)}
            for client in (others, nobody, following):
                await client.close()

    asyncio.run(scene())


def test_a_move_whose_copy_here_cannot_be_deleted_leaves_no_sandbox_that_nobody_knows_of() -> None:
    async def run() -> None:
        async with remote(MemoryBackend()) as here:

            async def fails(snapshot: str) -> None:
                raise SandboxLostError("the server is away")

            sandbox, there = await here.create(Template({"a": "1"})), MemoryBackend()
            here.delete_snapshot = fails  # type: ignore[method-assign]
            with pytest.raises(SandboxLostError, match="away"):
                await sandbox.migrate(there)
            assert not there.live
            assert await sandbox.files.read("a") == b"1"

    asyncio.run(run())
