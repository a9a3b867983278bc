"""Fixtures: the project from which tasks are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.environment.making import twinning
from tests.environment.making.scene import Making


@pytest.fixture
def making(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Making:
    """Makes tasks from a small project, in a directory of its own."""
    monkeypatch.setattr(twinning, "ROUNDS", 3)
    return Making(tmp_path)
