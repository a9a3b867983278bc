"""The contract of every sandbox with explicit expected results, run in real containers."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from etude.sandbox.errors import (
    PathKindError,
    PathMissingError,
    PathOutsideError,
    SandboxStateError,
)
from etude.sandbox.interface import Sandbox

FILES: dict[str, bytes | str] = {
    "lib/tally.py": "def tally(xs):\n    return sum(xs) - 2\n",
    "tests/test_all.py": (
        "from lib.tally import tally\n\ndef test_fails():\n    assert tally([3]) == 3\n\n"
        "def test_passes():\n    assert tally([2]) == 0\n"
    ),
}


async def files_behave(s: Sandbox, scratch: Path) -> None:
    """Reading, writing, listing, searching, copying in and out."""
    await s.files.write("new/a.txt", "é")
    assert await s.files.read("/workspace/new/../new/a.txt") == "é".encode()
    assert [info.path for info in await s.files.list(".", 1)] == ["lib", "new", "tests"]
    assert [match.line_number for match in await s.files.grep("def tally")] == [1]
    for path, kind in (("none", PathMissingError), ("lib", PathKindError), ("../x", PathOutsideError)):
        with pytest.raises(kind):
            await s.files.read(path)
    await s.files.remove("new")
    big = os.urandom(3 << 20)
    (scratch / "big.bin").write_bytes(big)
    await s.files.upload(scratch / "big.bin", "big.bin")
    await s.files.download("big.bin", scratch / "back.bin")
    assert (scratch / "back.bin").read_bytes() == big
    assert dict(await s.diff()) == {"big.bin": big}
    await s.files.remove("big.bin")


async def commands_behave(s: Sandbox) -> None:
    """Results, timeouts, input, output as it comes, background commands."""
    result = await s.commands.run("echo out; echo err >&2; pwd; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n/workspace\n", "err\n")
    assert (await s.commands.run("sleep 30", timeout_s=0.2)).timed_out
    assert (await s.commands.run("cat", stdin="given")).stdout == "given"
    assert (await s.commands.run("kill -9 1; echo still here")).stdout == "still here\n"
    pieces: list[bytes] = []
    command = await s.commands.start("cat; echo end", on_output=lambda fd, data: pieces.append(data))
    await command.send_stdin("ping\n")
    await command.send_stdin("", close=True)
    assert (await command.wait(60.0)).exit_code == 0
    assert b"".join(pieces) == b"ping\nend\n"
    results = await asyncio.gather(*(s.commands.run(f"sleep 0.1; echo {n}") for n in range(4)))
    assert [row.stdout for row in results] == ["0\n", "1\n", "2\n", "3\n"]
    large = await s.commands.run("head -c 3000000 /dev/zero | tr '\\0' x", limit_bytes=4 << 20)
    assert len(large.stdout) == 3_000_000


async def agents_can_change_what_the_tools_wrote(s: Sandbox) -> None:
    """Files that come through the file operations belong to whom commands run as."""
    await s.files.write("made.txt", "a\n")
    await s.files.write("folder/made.txt", "a\n")
    result = await s.commands.run("echo b >> made.txt && touch folder/more && rm folder/made.txt")
    assert (result.exit_code, result.stderr) == (0, "")
    await s.files.remove("made.txt")
    await s.files.remove("folder")


async def tests_run(s: Sandbox) -> None:
    """The warm interpreter runs test files."""
    report = await s.run_tests(["tests/test_all.py"], timeout_s=60.0)
    assert (report.passed, [row.name for row in report.failed]) == (("test_passes",), ["test_fails"])


async def sleeping_refuses_calls(s: Sandbox) -> None:
    """While asleep only `kill`, `resume` and `get_info` work."""
    assert (await s.get_info()).state == "paused"
    with pytest.raises(SandboxStateError):
        await s.commands.run("true")


async def three_sleeps_lose_nothing(s: Sandbox, mode: str) -> None:
    """Files written between three cycles are all there."""
    for number in range(3):
        await s.files.write(f"cycle{number}", str(number) * 5000)
        await s.pause(mode)  # type: ignore[arg-type]
        await sleeping_refuses_calls(s)
        await s.pause(mode)  # type: ignore[arg-type]
        await s.resume()
        await s.resume()
        for past in range(number + 1):
            assert await s.files.read(f"cycle{past}") == str(past).encode() * 5000
    assert sorted(await s.diff()) == ["cycle0", "cycle1", "cycle2"]


async def copies_are_apart(s: Sandbox) -> None:
    """Two copies begin alike, then change alone, and know that they are not the same."""
    await s.files.write("shared", "1")
    copies = [copy for copy in await s.fork(2) if not isinstance(copy, Exception)]
    assert len(copies) == 2
    await copies[0].files.write("shared", "2")
    assert [await copy.files.read("shared") for copy in (s, *copies)] == [b"1", b"2", b"1"]
    names = {(await copy.commands.run("cat /etc/machine-id; hostname")).stdout for copy in (s, *copies)}
    assert len(names) == 3
    for copy in copies:
        assert (await copy.get_info()).parent == s.id
        await copy.kill()
