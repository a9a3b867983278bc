"""The pattern generator is the benchmark's; without ripgrep there is nothing to compare with."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "benchmarks"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = shutil.which(str(Path(sys.executable).parent / "rg")) or shutil.which("rg")
    if found is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="ripgrep is not installed: pip install ripgrep"))
