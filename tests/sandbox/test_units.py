"""Frames, paths, templates, the filter program and the doctor."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.sandbox.errors import PathOutsideError
from etude.sandbox.inside import memory_watch
from etude.sandbox.inside.frames import FrameError, Unpacker, pack
from etude.sandbox.inside.seccomp import build_filter
from etude.sandbox.inside.testrunner import shorten
from etude.sandbox.local.doctor import find_problems
from etude.sandbox.paths import normal_path
from etude.sandbox.template import Template

HEADERS = st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.text()), max_size=4)


@given(st.lists(st.tuples(HEADERS, st.binary(max_size=200)), max_size=5), st.integers(1, 50))
def test_frames_survive_any_cutting(frames: list[tuple[dict[str, object], bytes]], step: int) -> None:
    data = b"".join(pack(header, payload) for header, payload in frames)
    unpacker = Unpacker()
    got = [frame for i in range(0, len(data), step) for frame in unpacker.feed(data[i : i + step])]
    assert got == frames


@given(st.binary(max_size=300))
def test_garbage_is_a_frame_error_or_waits_for_more(data: bytes) -> None:
    try:
        Unpacker().feed(data)
    except FrameError:
        return


def test_oversized_frames_are_refused_before_they_arrive() -> None:
    with pytest.raises(FrameError):
        Unpacker().feed(struct.pack("<II", 2, 1 << 31))


@given(st.text(alphabet="ab./\0w", max_size=12))
def test_normal_paths_stay_inside_and_are_stable(path: str) -> None:
    try:
        name = normal_path(path)
    except PathOutsideError:
        return
    assert name == "." or not set(name.split("/")) & {"", ".", ".."}
    assert normal_path(name) == name
    assert normal_path("/workspace/" + name) == name


@pytest.mark.parametrize("path", ["..", "a/../..", "/", "/etc", "/workspacex", "/workspace/..", "a\0"])
def test_paths_that_leave_are_refused(path: str) -> None:
    with pytest.raises(PathOutsideError):
        normal_path(path)


def test_template_digests_tell_contents_and_nothing_else() -> None:
    one = Template({"a": "x", "b/c": b"y"}, "one")
    assert one.digest == Template({"b/./c": "y", "a": b"x"}, "two").digest
    assert one.digest != Template({"a": "x", "b/c": b"z"}).digest
    assert Template({"ab": "c"}).digest != Template({"a": "bc"}).digest


def test_templates_are_read_from_directories(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_bytes(b"\xff")
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert dict(Template.from_directory(tmp_path).contents) == {"d/f": b"\xff"}
    with pytest.raises(ConfigError, match="no such directory"):
        Template.from_directory(tmp_path / "none")


def test_a_template_outside_of_its_workspace_is_refused() -> None:
    with pytest.raises(PathOutsideError):
        Template({"../x": ""})


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filters_are_valid_programs(machine: str) -> None:
    program = list(struct.iter_unpack("HBBI", build_filter(machine)))
    assert len(program) < 256
    for position, (code, if_true, if_false, _) in enumerate(program):
        if code & 0x07 == 0x05:
            assert position + 1 + max(if_true, if_false) < len(program)
    assert program[-1][0] == 0x06


@pytest.mark.parametrize(
    ("listed", "exceeded"),
    [
        ("{}: POSIX  ADVISORY  WRITE 12 00:2b:7 {} {}\n", True),
        ("{}: -> FLOCK  ADVISORY  WRITE 12 00:2b:7 {} {}\n", True),
        ("{}: OFDLCK ADVISORY  WRITE -1 00:2b:7 {} {}\n", False),
    ],
)
def test_locks_that_may_be_a_neighbours_are_not_counted(
    listed: str, exceeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "".join(listed.format(n, n, n) for n in range(30_000)).encode()
    monkeypatch.setattr(memory_watch, "LOCKS_S", 0.0)
    monkeypatch.setattr(memory_watch, "open", lambda *_: io.BytesIO(rows), raising=False)
    no_processes: Any = SimpleNamespace(table=dict)
    settings: Any = SimpleNamespace(memory_bytes=1 << 30, has_groups=True, sockets=None)
    assert memory_watch.MemoryWatch(no_processes, settings).is_exceeded() is exceeded


def test_a_machine_without_a_table_is_refused() -> None:
    with pytest.raises(KeyError):
        build_filter("riscv64")


@given(st.text(max_size=100), st.integers(10, 60))
def test_shortened_text_keeps_its_ends(text: str, limit: int) -> None:
    short = shorten(text, limit)
    assert len(short) <= limit
    assert short == text or ("..." in short and text.startswith(short[:3]) and text.endswith(short[-3:]))


def test_the_doctor_names_obstacles_and_their_fixes(tmp_path: Path) -> None:
    assert find_problems(tmp_path) == []
    for name, value in (
        ("user/max_user_namespaces", "0\n"),
        ("kernel/unprivileged_userns_clone", "0\n"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(value)
    problems = find_problems(tmp_path)
    assert [problem.partition(": ")[2] for problem in problems] == [
        "sysctl -w user.max_user_namespaces=10000",
        "sysctl -w kernel.unprivileged_userns_clone=1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ]


def test_reports_are_json_safe_for_any_text() -> None:
    assert json.loads(json.dumps(pack({"a": "\ud800"}).decode("latin-1")))
