"""vLLM's own environment, for tests that run vLLM itself, and its fake for the others."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from etude.inference.vllm.servers import CPU_ENVIRONMENT

_ROOT = Path(__file__).parents[3]
_BUILDER = _ROOT / "benchmarks" / "environments.py"
_FAKE = (
    f"import sys\n\nsys.path.append({str(_ROOT)!r})\nfrom tests.fakes.vllm.process import main\n\nmain()\n"
)
ENVIRONMENT = CPU_ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}


def fake_vllm(directory: Path) -> dict[str, object]:
    """A section `engine.vllm` with which the fake is started as vLLM is, in processes of its own."""
    package = directory / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(_FAKE)
    return {"python": sys.executable, "environment": [f"PYTHONPATH={directory}", "OMP_NUM_THREADS=1"]}


@cache
def vllm_python() -> Path:
    """Its interpreter; `python benchmarks/environments.py vllm` makes it. Skips the test where it cannot be
    made."""
    built = subprocess.run([sys.executable, _BUILDER, "vllm"], stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode:
        pytest.skip("vLLM's environment cannot be made here")
    return Path(built.stdout.strip().splitlines()[-1])
