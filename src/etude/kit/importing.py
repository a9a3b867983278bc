"""Imports the user's own functions and classes, which a configuration names as MODULE:NAME."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from etude.errors import ConfigError


def import_callable(name: str, field: str) -> Callable[..., Any]:
    """Imports the callable `MODULE:NAME` from the installed packages, PYTHONPATH or the current directory.

    Raises ConfigError, which names `field`; also if importing the module fails.
    """
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # last, so that no file there shadows a library
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"there is no such function: {error}",
            field=field,
            received=name,
            fix="name MODULE:FUNCTION, with a module in the current directory or on PYTHONPATH",
        ) from error
    except Exception as error:
        raise ConfigError(
            f"its module cannot be imported: {error!r}",
            field=field,
            received=name,
            fix=f"correct the module {module}",
        ) from error
    if not callable(found):
        raise ConfigError(
            "cannot be called", field=field, received=name, fix="name a function, as MODULE:FUNCTION"
        )
    return found
