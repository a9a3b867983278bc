import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from etude.config import parse_config
from etude.observe import RunDirectory, make_directory
from etude.store import FileBlobs, TrajectoryLog
from tests.store.builders import make_group


def make_run(path: Path) -> None:
    RunDirectory.create(parse_config({"runs_directory": str(path), "name": "demo"}))


@pytest.mark.parametrize(
    "make",
    [
        make_directory,
        lambda path: TrajectoryLog(path).append([make_group(0)]),
        lambda path: FileBlobs(path).put(np.zeros(3)),
        make_run,
    ],
)
def test_folders_that_are_made_on_the_way_are_as_durable_as_what_is_in_them(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[Path] = set()
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    path = tmp_path / "a" / "b"
    make(path)
    assert {folder for folder in (path, *path.parents[:2]) if any(folder.iterdir())} <= synced
