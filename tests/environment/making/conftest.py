"""The project that tasks are made from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environment.making.scene import Making


@pytest.fixture
def making(tmp_path: Path) -> Making:
    """Makes tasks from a small project, in a directory of its own."""
    return Making(tmp_path)
