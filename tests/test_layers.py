"""The house rules that a linter of imports cannot see: what comes along at run time."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIGHT = ["errors", "records", "protocols", "config", "observe", "store", "cli"]


@pytest.mark.parametrize("name", LIGHT)
def test_lower_layers_do_not_load_torch(name: str) -> None:
    code = f"import sys, etude.{name}; assert 'torch' not in sys.modules; assert 'ray' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_records_need_only_numpy() -> None:
    code = (
        "import sys, etude.records\n"
        "foreign = {name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "foreign -= {'numpy', 'etude', 'sitecustomize', 'usercustomize'}\n"
        "foreign = {name for name in foreign if not name.startswith('_')}\n"
        "assert not foreign, foreign\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_prints_nothing_and_makes_no_files(tmp_path) -> None:
    code = "import etude.cli, etude.store, etude.observe.report"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_training_needs_only_what_a_plain_installation_brings() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    missing = sorted(_modules_of(extras) - _modules_of(project["dependencies"]))
    assert {"fastapi", "uvicorn", "pytest"} <= set(missing)
    code = (
        f"import sys; sys.modules |= dict.fromkeys({missing!r})\n"  # None there: not to be imported
        "import etude.cli, etude.controller.train, etude.controller.pretraining, etude.controller.sft\n"
        "import etude.controller.parity, etude.controller.recorded, etude.cli.train, etude.cli.evaluate\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _modules_of(requirements: list[str]) -> set[str]:
    """Importable names of the installed ones among the distributions."""
    wanted = {re.split(r"[^A-Za-z0-9.-]", line)[0].lower() for line in requirements}
    found = importlib.metadata.packages_distributions().items()
    return {module for module, names in found if wanted & {name.lower() for name in names}} - {"etude"}
