"""A scan finds the solution wherever a tree holds it, and nothing where it does not."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import os
import py_compile
import tarfile
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from etude.tasks.making import leaks
from etude.tasks.making.changes import Change, Leak, Place
from etude.tasks.making.leaks import find_leaks, scan_layers

OWN = '''"""Words."""


def clamp(value, low, high):
    if low > high:
        raise ValueError("limits are reversed", low, high)
    return max(low, min(value, high))
'''
BROKEN = OWN.replace("max(low, min(value, high))", "max(low, value)")
CHANGE = Change("planted_bug", "x", {"src/pkg/a.py": BROKEN}, (Place("src/pkg/a.py", "clamp", 7, 7),))
SOURCES = {"src/pkg/a.py": OWN, "README.md": "Words.\n"}


def scan(root: Path, **more) -> list[Leak]:
    return find_leaks(root, [CHANGE], SOURCES, **more).get(CHANGE.id, [])


def put(root: Path, name: str, data: str | bytes) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)


def test_a_workspace_with_the_broken_text_holds_no_leak(tmp_path: Path) -> None:
    put(tmp_path, "workspace/src/pkg/a.py", BROKEN)
    put(tmp_path, "workspace/README.md", "Words.\n")
    put(tmp_path, "usr/lib/python3/other/a.py", "def other(value):\n    return max(low, 1)\n")
    assert scan(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("usr/share/doc/notes.txt", "so: return   max( low,\n  min(value , high))  # right\n"),
        ("usr/lib/python3/site-packages/vendored/b.py", OWN.replace('"limits', "'limits")),
        ("workspace/build/lib/pkg/a.py", OWN),
    ],
)
def test_text_of_the_hunk_is_found_in_other_layouts(tmp_path: Path, name: str, text: str) -> None:
    put(tmp_path, name, text)
    assert {leak.path for leak in scan(tmp_path)} == {name}


def test_an_older_copy_of_the_module_is_importable_though_it_lacks_the_hunk(tmp_path: Path) -> None:
    put(tmp_path, "usr/lib/site-packages/pkg/a.py", "def clamp(v, l, h):\n    return sorted((l, v, h))[1]\n")
    assert [leak.how for leak in scan(tmp_path, foreign=["usr"])] == ["importable copy"]


def test_a_change_outside_of_functions_is_leaked_by_what_defines_the_same_names(tmp_path: Path) -> None:
    change = replace(CHANGE, places=(Place("src/pkg/a.py", "", 1, 1),))
    put(tmp_path, "workspace/tests/pkg/a.py", "'Tests.'\n")
    put(tmp_path, "usr/lib/site-packages/pkg/a.py", "def clamp(v, l, h):\n    return v\n")
    found = find_leaks(tmp_path, [change], SOURCES, ["usr"])[change.id]
    assert [leak.path for leak in found] == ["usr/lib/site-packages/pkg/a.py"]


def test_bytecode_is_found_by_its_functions(tmp_path: Path) -> None:
    put(tmp_path, "x/pkg/a.py", OWN)
    target = tmp_path / "cache/pkg/__pycache__" / Path(importlib.util.cache_from_source("a.py")).name
    target.parent.mkdir(parents=True)
    py_compile.compile(str(tmp_path / "x/pkg/a.py"), cfile=str(target), doraise=True)
    (tmp_path / "x/pkg/a.py").unlink()
    assert [leak.how for leak in scan(tmp_path)] == ["bytecode"]


def _wheel(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, OWN)
    return buffer.getvalue()


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("project/notes.txt")
        info.size = len(OWN)
        archive.addfile(info, io.BytesIO(OWN.encode()))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data", [_wheel("pkg/b.py"), _tar(), gzip.compress(_tar()), gzip.compress(_wheel("c.txt"))]
)
def test_archives_are_unpacked(tmp_path: Path, data: bytes) -> None:
    put(tmp_path, "root/.cache/x", data)
    (leak,) = scan(tmp_path)
    assert leak.how == "archive" and leak.path.startswith("root/.cache/x!")


def test_git_objects_are_read(tmp_path: Path) -> None:
    blob = f"blob {len(OWN)}\0{OWN}".encode()
    digest = hashlib.sha1(blob).hexdigest()
    put(tmp_path, f"w/.git/objects/{digest[:2]}/{digest[2:]}", zlib.compress(blob))
    assert [leak.how for leak in scan(tmp_path)] == ["git object"]


def test_in_files_of_others_a_chance_run_is_no_leak_but_the_hunk_is(tmp_path: Path) -> None:
    put(
        tmp_path,
        "usr/lib/python3/b.py",
        "def f(low, value, high):\n    return min(max(low, min(value, high)))\n",
    )
    assert len(scan(tmp_path)) == 1
    assert scan(tmp_path, foreign=["usr/lib"]) == []
    put(tmp_path, "usr/lib/python3/b.py", OWN)
    assert len(scan(tmp_path, foreign=["usr/lib"])) == 1


def test_chance_runs_in_the_systems_packages_of_a_layer_give_no_task_away(tmp_path: Path) -> None:
    chance = "def f(low, value, high):\n    return min(max(low, min(value, high)))\n"
    put(tmp_path, "usr/lib/x86_64-linux-gnu/perl/5.36/CORE/config.h", chance)
    assert scan_layers([tmp_path], [CHANGE], {"src/pkg/a.py": OWN.encode()}) == {}
    put(tmp_path, "srv/config.h", chance)
    assert len(scan_layers([tmp_path], [CHANGE], {"src/pkg/a.py": OWN.encode()})) == 1


def test_a_large_program_is_no_leak(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(leaks, "MOST_BYTES", 1000)
    put(tmp_path, "usr/bin/node", b"\x7fELF\0" + b"x" * 5000)
    assert scan(tmp_path) == []
    put(tmp_path, "usr/share/all.zip", b"PK\x03\x04\0" + b"x" * 5000)
    assert [leak.how for leak in scan(tmp_path)] == ["not read"]


def test_what_is_too_large_or_damaged_counts_as_a_leak(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(leaks, "MOST_BYTES", 1000)
    put(tmp_path, "large.txt", "x\n" * 600)
    put(tmp_path, "bomb.gz", gzip.compress(b"x" * 5000))
    put(tmp_path, "broken.whl", b"PK\x03\x04nothing")
    put(tmp_path, "w/.git/objects/pack/pack-1.pack", b"PACK....")
    assert {leak.path for leak in scan(tmp_path) if leak.how == "not read"} == {
        "large.txt", "bomb.gz", "broken.whl", "w/.git/objects/pack/pack-1.pack",
    }  # fmt: skip


def test_links_and_special_files_are_passed_over(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    put(outside, "a.txt", OWN)
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(outside / "a.txt")
    (root / "folder").symlink_to(outside)
    os.mkfifo(root / "pipe")
    assert scan(root) == []


def test_many_changes_are_scanned_at_once_each_with_its_own_leaks(tmp_path: Path) -> None:
    other_broken = OWN.replace("if low > high:", "if low >= high:")
    other = Change("planted_bug", "y", {"src/pkg/a.py": other_broken}, CHANGE.places)
    put(tmp_path, "notes.txt", "return max(low, min(value, high))")
    put(tmp_path, "more.txt", "def clamp(value, low, high):\n    if low > high:\n        raise")
    found = find_leaks(tmp_path, [CHANGE, other], SOURCES)
    assert {name: [leak.path for leak in leaks] for name, leaks in found.items()} == {
        CHANGE.id: ["notes.txt"],
        other.id: ["more.txt"],
    }


def test_what_the_workspace_holds_elsewhere_is_no_leak(tmp_path: Path) -> None:
    put(tmp_path, "notes.txt", OWN)
    assert find_leaks(tmp_path, [CHANGE], SOURCES)
    assert not find_leaks(tmp_path, [CHANGE], SOURCES | {"docs/a.md": OWN})
