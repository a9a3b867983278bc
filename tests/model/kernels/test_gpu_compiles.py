"""The GPU's kernels compile for a GPU, which takes none, and fit into its shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "compile_for_gpu.py"
SHARED_BYTES = 227 << 10
"""Of one program on an H100."""


def test_every_kernel_compiles_for_an_h100(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-4000:]
    shared = json.loads(result.stdout)
    assert len(shared) == 12
    assert all(used <= SHARED_BYTES for used in shared.values()), shared
