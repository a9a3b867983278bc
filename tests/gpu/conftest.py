"""Tests that need a GPU; skipped without CUDA and Triton."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = None
    if not torch.cuda.is_available():
        missing = "no GPU"
    elif importlib.util.find_spec("triton") is None:
        missing = "no Triton"
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if missing is not None:
                item.add_marker(pytest.mark.skip(reason=missing))
