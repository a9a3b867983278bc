"""Runs commands as a user would, in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner, Result

from etude.cli import app


def etude(*arguments: str, **environment: str) -> Result:
    """Runs one command; `stdout` and `stderr` of the result are apart."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100", **environment})


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, name: str, function: Callable[..., Any]) -> None:
    """Puts a quick function in the place of a part that takes minutes."""
    fake = ModuleType(module)
    setattr(fake, name, function)
    monkeypatch.setitem(sys.modules, module, fake)


def option_names(*names: str) -> set[str]:
    """Options of the command of that name; of several, of the one within the others."""
    found: Any = typer.main.get_command(app)
    for name in names:
        found = found.get_command(None, name)
    return {option for parameter in found.params for option in parameter.opts}
