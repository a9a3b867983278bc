"""Attempts through the owner's calls: files, test runs, copies. Judged by their lasting effects."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import cast

from etude.errors import AgentError, EtudeError, SandboxError
from etude.sandbox.calls import Answer
from etude.sandbox.inside.frames import Header
from etude.sandbox.interface import Files, OnOutput, Sandbox
from etude.sandbox.template import Template
from tests.adversary.escape.model import DEFAULT_RESOURCES, UNDECIDED_S, Attempt
from tests.adversary.escape.trial import Field, until

_SWAP = """
import os
while True:
    for target in ("d", "/etc"):
        os.symlink(target, "next")
        os.rename("next", "swapped")
"""
_CLIMB = """
import os
def test_climb():
    for number in os.listdir("/proc/self/fd"):
        above = f"/proc/self/fd/{number}/.."
        names = os.listdir(above) if os.path.isdir(above) else []
        for name in names:
            path = f"{above}/{name}/secret.txt"
            assert not os.path.exists(path), open(path).read()
"""


async def read_through_a_link(field: Field) -> str:
    """A link to a file outside of the workspace."""
    await field.sandbox.commands.run("echo outside > /tmp/outside; ln -s /tmp/outside link")
    return found(await field.sandbox.files.read("link"), b"outside\n")


async def write_through_a_link(field: Field) -> str:
    """A link to a directory outside of the workspace."""
    await field.sandbox.commands.run("ln -s /tmp link")
    await field.sandbox.files.write("link/planted", "x")
    listing = await field.sandbox.commands.run("ls /tmp/planted")
    return "ESCAPED the file is there" if listing.exit_code == 0 else "refused"


async def swap_links_while_files_are_read(field: Field) -> str:
    """A name that is a directory of the workspace at one moment and a link out of it at the next."""
    await field.sandbox.files.write_many({"d/passwd": "mine", "swap.py": _SWAP})
    await field.sandbox.commands.start("python3 -S swap.py")

    async def swaps() -> bool:
        return any(entry.path == "swapped" for entry in await field.sandbox.files.list())

    await until(swaps, "the program that swaps links")
    num_refused = 0
    for _ in range(1000):
        try:
            if await field.sandbox.files.read("swapped/passwd") != b"mine":
                return "ESCAPED the file outside was read"
        except EtudeError:
            num_refused += 1
    return f"refused: {num_refused} of 1000 reads"


async def read_above_the_workspace(field: Field) -> str:
    """Plain paths that climb."""
    await field.sandbox.commands.run("echo outside > /tmp/outside")
    return found(await field.sandbox.files.read("../tmp/outside"), b"outside\n")


async def upload_above_the_workspace(field: Field) -> str:
    """A target path that climbs."""
    source = field.directory / "source"
    source.write_text("x")
    await field.sandbox.files.upload(source, "../tmp/planted")
    listing = await field.sandbox.commands.run("ls /tmp/planted")
    return "ESCAPED the file is there" if listing.exit_code == 0 else "refused"


class HostileLine:
    """A sandbox whose server lies about the names of files."""

    id = "hostile"

    def __init__(self, names: list[str]) -> None:
        self._names = names

    async def call(self, header: Header, payload: bytes = b"", on_output: OnOutput | None = None) -> Answer:
        """A listing of the names, and an `x` in each file."""
        if header["op"] == "list":
            return {"entries": [[name, "file", 1] for name in self._names]}, b""
        return {}, b"x" if header.get("offset", 0) == 0 else b""


async def download_names_that_climb(field: Field) -> str:
    """A listing with names that lead out of the host's target directory."""
    target = field.directory / "target"
    (field.directory / "linked").mkdir()
    target.mkdir()
    (target / "link").symlink_to(field.directory / "linked")
    refusals: list[str] = []
    for name in ("../planted", "a/../../planted", "link/planted", str(field.directory / "planted")):
        try:
            await Files(cast("Sandbox", HostileLine(["x", name]))).download(".", target)
        except EtudeError as error:
            refusals.append(type(error).__name__)
    planted = [path for path in field.directory.rglob("planted") if target not in path.parents]
    return f"ESCAPED {len(planted)} files beside the target" if planted else f"refused: {refusals}"


async def climb_from_a_test_run(field: Field) -> str:
    """A test run is a fork of the server: descriptors that it kept lead to other templates."""
    await field.sandbox.files.write("test_climb.py", _CLIMB)
    report = await field.sandbox.run_tests(["test_climb.py"], UNDECIDED_S)
    assert not report.timed_out, "a test run took too long"
    return " ".join(failure.message for failure in report.failed) or f"refused: {report.error}"


async def live_on(field: Field) -> str:
    """A process that has left its parent, its session and its group."""
    word = f"{os.getpid()}{int.from_bytes(os.urandom(4)) % 10**6}"
    await field.sandbox.commands.run(f"setsid sh -c 'sleep {word} & sleep {word} &' >/dev/null 2>&1 &")

    async def runs_inside() -> bool:
        shown = await field.sandbox.commands.run("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'")
        return f"sleep\n{word}\n" in shown.stdout

    await until(runs_inside, "the process that is to live on")
    if not _running(word):
        return "refused: the host does not see it"
    sandbox = await field.backend.create(Template())
    await field.sandbox.kill()
    field.sandbox = sandbox
    # Without the protection it runs on for ever; with it, it ends when the machine finds the time.
    end_s = time.monotonic() + (1.0 if field.scene.facts()["control"] else UNDECIDED_S)
    while time.monotonic() < end_s:
        if not _running(word):
            return "refused: ended with its sandbox"
        await asyncio.sleep(0.01)
    return "ESCAPED it runs long after its sandbox's end"


async def change_the_template(field: Field) -> str:
    """Every way to write to a file that other sandboxes start from."""
    body = """
    import mmap
    for act in (
        lambda: open("a.txt", "r+").write("changed"),
        lambda: os.link("a.txt", "linked") or open("linked", "a").write("changed"),
        lambda: os.truncate("a.txt", 0),
        lambda: mmap.mmap(os.open("a.txt", os.O_RDWR), 1).write(b"x"),
        lambda: os.rename("a.txt", "b.txt"),
    ):
        try:
            act()
        except (OSError, ValueError) as error:
            say(error)
    """
    said = await field.python(body)
    other = await field.backend.create(Template({"a.txt": "a"}), DEFAULT_RESOURCES)
    try:
        data = await other.files.read("a.txt")
        return f"refused: {said}" if data == b"a" else f"ESCAPED {data!r}"
    except AgentError as error:
        return f"ESCAPED {error.message}"
    finally:
        await other.kill()


async def redirect_a_copy(field: Field) -> str:
    """The overlay's own attributes, set by hand, on a directory that becomes a lower layer of a copy."""
    body = """
    os.mkdir("/tmp/d")
    for name, value in (("redirect", b"/../../templates"), ("metacopy", b""), ("opaque", b"y")):
        for space in ("user.overlay.", "trusted.overlay."):
            try:
                os.setxattr("/tmp/d", space + name, value)
            except OSError as error:
                say(error)
    """
    said = await field.python(body)
    (copy,) = await field.sandbox.fork(1)
    if isinstance(copy, SandboxError):
        raise copy
    try:
        names = (await copy.commands.run("ls -A /tmp/d")).stdout.split()
        return f"ESCAPED the copy sees {names}" if names else f"refused: nothing in it; {said}"
    finally:
        await copy.kill()


async def flood_the_owner(field: Field) -> str:
    """Output without end."""
    result = await field.sandbox.commands.run("head -c 5000000 /dev/zero", limit_bytes=10_000)
    if len(result.stdout) > 10_000:
        return f"ESCAPED {len(result.stdout)} bytes"
    return f"refused: {len(result.stdout)} bytes, truncated {result.truncated}"


def found(data: bytes, wanted: bytes) -> str:
    """What an attempt says that got some bytes, and was after others or these."""
    return f"ESCAPED {data!r}" if data == wanted else f"refused: {data!r}"


def _running(word: str) -> bool:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"sleep\0{word}\0".encode() in (entry / "cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False


_BENEATH = ("opened beneath the workspace",)
"""Of reads: they ask the kernel first, and resolve links by themselves only where it refuses."""
_LINKS = ("links resolved", *_BENEATH)
_LOCAL_PATHS = ("paths normalised", *_LINKS)

CALLS = [
    Attempt(
        "read a file outside through a link",
        "files are opened beneath the workspace only",
        _BENEATH,
        scenario=read_through_a_link,
    ),
    Attempt(
        "write a file outside through a link",
        "links are resolved before a path is trusted, and files opened beneath the workspace only",
        _LINKS,
        scenario=write_through_a_link,
    ),
    Attempt(
        "swap a link while files are read",
        "files are opened beneath the workspace only",
        _BENEATH,
        scenario=swap_links_while_files_are_read,
    ),
    Attempt(
        "read above the workspace",
        "paths are normalised outside, and opened beneath the workspace only",
        ("paths normalised", *_BENEATH),
        scenario=read_above_the_workspace,
    ),
    Attempt(
        "upload above the workspace",
        "paths are normalised outside, resolved inside, and opened beneath the workspace only",
        _LOCAL_PATHS,
        scenario=upload_above_the_workspace,
    ),
    Attempt(
        "download names that climb",
        "names from inside are checked before they name host files",
        ("names of downloads checked",),
        scenario=download_names_that_climb,
    ),
    Attempt(
        "climb out through a leaked descriptor",
        "a test run keeps no descriptor of the server",
        ("descriptors closed",),
        scenario=climb_from_a_test_run,
        neighbour=True,
    ),
    Attempt(
        "live on after the sandbox's end",
        "a pid namespace ends with its first process",
        ("pid namespace",),
        scenario=live_on,
    ),
    Attempt(
        "change the template that others start from",
        "a workspace is an overlay over the template, which is read-only below it",
        ("overlay over the template", "user of its own"),
        scenario=change_the_template,
    ),
    Attempt(
        "redirect a copy by the overlay's attributes",
        "an overlay with user attributes follows no redirects, and copies leave them out",
        (),
        scenario=redirect_a_copy,
        reach="shared kernel",
        no_control="the kernel refuses an overlay that has user attributes and follows redirects",
    ),
    Attempt(
        "flood the owner with output",
        "output is kept up to a limit",
        ("output bounded",),
        scenario=flood_the_owner,
    ),
]
