"""The agent's processes may remove a file while another operation looks at its directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.sandbox.inside import filesystem
from etude.sandbox.inside.filesystem import Workspace


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    """One whose `gone` is removed right after it was listed."""
    template, root = tmp_path / "template", tmp_path / "root"
    for directory in (template, root):
        directory.mkdir()
    for name in ("gone", "stays"):
        (root / name).write_text("x")
    walk = filesystem._walk

    def walk_and_remove(*arguments: Any, **named: Any) -> Iterator[tuple[str, os.DirEntry[str]]]:
        for path, entry in walk(*arguments, **named):
            (root / "gone").unlink(missing_ok=True)
            yield path, entry

    monkeypatch.setattr(filesystem, "_walk", walk_and_remove)
    descriptor = os.open(template, os.O_RDONLY)
    yield Workspace(str(root), descriptor)
    os.close(descriptor)


def test_a_list_passes_over_what_is_gone(workspace: Workspace) -> None:
    assert workspace.list(".", 1) == [["stays", "file", 1]]


def test_a_search_passes_over_what_is_gone(workspace: Workspace) -> None:
    assert workspace.grep("x", ".", 10) == [["stays", 1, "x"]]


def test_a_diff_passes_over_what_is_gone(workspace: Workspace) -> None:
    assert workspace.diff("none") == ([1], 6, b"xstays\0")
