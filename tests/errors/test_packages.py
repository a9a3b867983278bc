import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest

import etude
from etude.cli.doctor import PACKAGES, PROGRAMS
from etude.errors.packages import install_command, missing_package, package_of


def test_the_command_installs_for_this_python_within_the_stated_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stated = ["mcp<3,>=2", 'ray>=2.50; extra == "ray"', 'etude[s3,ray]; extra == "dev"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: stated)
    pip = f"{sys.executable} -m pip install"
    assert install_command("ray", "mcp", "ra") == f"{pip} 'ray>=2.50' 'mcp<3,>=2' ra"

    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    assert install_command("ray") == f"{pip} ray", "a tree that nobody installed"


def test_the_error_names_what_is_missing_and_nothing_that_is_here() -> None:
    error = missing_package("this", "pytest", "no-such-package", field="it", instead=", or go without")
    assert error.message == "this needs no-such-package, which this Python does not have"
    assert error.fix == f"{sys.executable} -m pip install no-such-package, or go without"
    assert [package_of(name) for name in ("acp.schema", "sentence_transformers")] == [
        "agent-client-protocol",
        "sentence-transformers",
    ]


def test_what_the_doctor_offers_is_an_extra_or_comes_with_the_rest() -> None:
    """So `make train` installs whatever the commands of the README need."""
    project = tomllib.loads((Path(etude.__file__).parents[2] / "pyproject.toml").read_text())["project"]
    core = " ".join(project["dependencies"])
    offered = project["optional-dependencies"]
    assert set(PACKAGES) - {"serve", "acp", "mcp"} == set(offered) - {"dev", "agent"}
    assert "ruff" in PROGRAMS and "ruff>=" in " ".join(offered["agent"])
    for name, (_, packages) in PACKAGES.items():
        text = " ".join(offered[name]) if name in offered else core
        assert all(f"{package}>=" in text for package in packages), name
    assert "ripgrep>=" in core
