"""Temporary directories of killed processes are removed by the next sweep, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from etude.kit.leftovers import ScratchDirectory, sweep

_KEEPS_ONE = """
import pathlib, sys, time
from etude.kit.leftovers import ScratchDirectory
with ScratchDirectory(pathlib.Path(sys.argv[1]), "etude-") as path:
    print(path, flush=True)
    time.sleep(600)
"""


def test_a_directory_goes_with_its_block(tmp_path: Path) -> None:
    with ScratchDirectory(tmp_path, "etude-") as path:
        (path / "file").write_text("x")
        assert path.parent == tmp_path and path.name.startswith("etude-")
    assert not path.exists()


def test_what_a_killed_process_left_is_swept_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _KEEPS_ONE, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    other = tmp_path / "others-directory"
    other.mkdir()
    with process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        sweep(tmp_path, "etude-")
        assert left.exists(), "somebody works in it"
        process.kill()
        process.wait()
    with ScratchDirectory(tmp_path, "etude-") as used:
        sweep(tmp_path, "etude-")
        assert not left.exists()
        assert used.exists() and other.exists()


def test_a_directory_that_somebody_sweeps_as_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    mkdir = Path.mkdir

    def make_and_lose(path: Path, **named: Any) -> None:
        mkdir(path, **named)
        made.append(path)
        if len(made) == 1:
            sweep(tmp_path, "etude-")

    monkeypatch.setattr(Path, "mkdir", make_and_lose)
    with ScratchDirectory(tmp_path, "etude-") as path:
        assert path.is_dir() and made == [made[0], path] and not made[0].exists()


def test_a_name_is_letters_and_digits_for_programs_that_make_names_of_paths(tmp_path: Path) -> None:
    for _ in range(100):
        with ScratchDirectory(tmp_path) as path:
            assert path.name.isalnum()
            assert path.stat().st_mode & 0o777 == 0o700
