"""No template harms another sandbox on its host, and impossible file names are refused by name."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from etude.errors import EtudeError
from etude.sandbox.errors import TemplateError
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.local.backend import ForkServerBackend
from etude.sandbox.template import MAX_DEPTH, Template
from tests.sandbox.scenes import on_backend, unchecked_template

FILES = {"a.txt": b"here"}
NESTED = "/".join(["d"] * 1500) + "/file"

REFUSED: Mapping[str, tuple[dict[str, bytes | str], str]] = {
    "1,500 nested directories": ({NESTED: b""}, "in one path"),
    "one directory too many": ({"/".join(["d"] * MAX_DEPTH) + "/file": b""}, "in one path"),
    "a name of 300 bytes": ({"x" * 300: b""}, "too long"),
    "a name of 300 bytes in characters of three": ({"\u4e2d" * 100: b""}, "too long"),
    "a path of 5,000 bytes": ({"/".join(["x" * 200] * 25): b""}, "too long"),
    "a file and a directory of one name": ({"a": b"", "a/b": b""}, "both a file and a directory"),
    "the same, far apart": ({"a/b/c/d": b"", "z": b"", "a/b": b""}, "both a file and a directory"),
    "the workspace itself": ({".": b""}, "the workspace itself"),
    "the workspace by its whole path": ({"/workspace": b""}, "the workspace itself"),
    "half of a character": ({"\ud800": b""}, "not valid Unicode"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_no_directory_can_hold_is_refused_by_field_value_and_fix(name: str) -> None:
    files, words = REFUSED[name]
    with pytest.raises(TemplateError, match=words) as refused:
        Template(files)
    assert refused.value.field == "template.files"
    assert refused.value.received
    assert refused.value.fix
    assert len(str(refused.value)) < 500


def test_what_a_directory_can_hold_is_taken(tmp_path: Path) -> None:
    deep = "/".join(["d"] * (MAX_DEPTH - 1)) + "/file"
    files: dict[str, bytes | str] = {
        deep: b"deep",
        "x" * 255: b"long",
        "\udcff": b"no text",
        "a/b": b"",
        "ab": b"",
    }

    async def scenario(backend: SandboxBackend) -> None:
        sandbox = await backend.create(Template(files))
        assert await sandbox.files.read(deep) == b"deep"
        assert await sandbox.files.read("\udcff") == b"no text"

    on_backend(tmp_path, scenario)


UNCHECKED: Mapping[str, dict[str, bytes]] = {
    "1,500 nested directories": {NESTED: b""},
    "a name of 300 bytes": {"x" * 300: b""},
    "a file in the place of a directory": {"a": b"", "a/b": b""},
    "a directory in the place of a file": {"a/b": b"", "a": b""},
    "a path out of it": {"../../../../out": b""},
    "half of a character": {"\ud800": b""},
    "a NUL": {"a\0b": b""},
    "the directory itself": {".": b""},
}


@pytest.mark.parametrize("name", UNCHECKED)
def test_whatever_goes_wrong_in_beginning_one_sandbox_ends_that_one_only(tmp_path: Path, name: str) -> None:
    """As if the check outside were not there."""
    broken = unchecked_template(UNCHECKED[name])
    broken.__dict__["digest"] = "0" * 40

    async def scenario(backend: ForkServerBackend) -> None:
        neighbour = await backend.create(Template(FILES))
        pid = backend.launcher_pid
        for _ in range(2):
            try:
                made = await backend.create(broken)
            except EtudeError:
                continue
            await made.kill()
        assert await neighbour.files.read("a.txt") == b"here"
        assert (await neighbour.commands.run("echo on")).stdout == "on\n"
        assert await (await backend.create(Template(FILES))).files.read("a.txt") == b"here"
        assert backend.launcher_pid == pid, "the fork server has ended, and with it all sandboxes"

    on_backend(tmp_path, scenario)


def _begin(**changes: Any) -> Callable[[int], dict[str, Any]]:
    plan = {"digest": "1" * 40, "disk_bytes": 1 << 20, "layers": []}
    request = {
        "op": "begin",
        "plan": plan,
        "limits": {},
        "env": {},
        "emulate_root": False,
        "has_groups": False,
    }
    return lambda number: {**request, "new_template": False, "id": number, **changes}


REQUESTS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "no operation": lambda number: {"id": number},
    "an unknown operation": lambda number: {"op": "fly", "id": number},
    "a plan without its fields": _begin(plan={}),
    "a plan of other fields": _begin(plan={"digest": "1", "disk_bytes": 1, "colour": 1}),
    "a plan that is a list": _begin(plan=[1]),
    "limits that are none": _begin(limits=None),
    "a template that is not there": _begin(),
    "a new template without its files": _begin(new_template=True),
    "layers that are not there": _begin(plan={"digest": "1" * 40, "disk_bytes": 1 << 20, "layers": ["x"]}),
    "a disk below nothing": _begin(plan={"digest": "1" * 40, "disk_bytes": -5}),
    "a kill of a text": lambda number: {"op": "kill", "id": ["x"]},
    "something to forget that is no name": lambda number: {"op": "forget", "kind": 5, "name": None},
    "a copy without descriptors": lambda number: {"op": "copy", "layer": "x"},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_makes_no_sense_ends_no_other_sandbox(tmp_path: Path, name: str) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        neighbour = await backend.create(Template(FILES))
        server = backend._server
        assert server is not None
        ours, theirs = socket.socketpair()
        with ours, theirs:
            server.send({"op": "clone", "id": 10**6, "announces": False}, theirs.fileno())
            server.send(json.loads(json.dumps(REQUESTS[name](10**6))))
        assert (await neighbour.commands.run("echo on")).stdout == "on\n"
        assert await (await backend.create(Template({"b": name}))).files.read("b") == name.encode()
        assert server.alive

    on_backend(tmp_path, scenario)


def test_a_template_larger_than_a_frame_is_refused_by_name(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        neighbour = await backend.create(Template(FILES))
        piece = bytes(1 << 20)
        with pytest.raises(TemplateError, match="too large together"):
            await backend.create(Template({f"f{number}": piece for number in range(257)}))
        assert await neighbour.files.read("a.txt") == b"here"

    on_backend(tmp_path, scenario)


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_many_broken_templates_leave_no_descriptor_behind(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        await backend.create(Template(FILES))
        before = _num_descriptors()
        for number in range(20):
            broken = unchecked_template({f"{number}/{NESTED}": b""})
            with pytest.raises(EtudeError):
                await backend.create(broken)
        await asyncio.sleep(0.2)
        assert _num_descriptors() < before + 10

    on_backend(tmp_path, scenario)
