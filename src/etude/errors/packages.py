"""The error for Python packages that are not installed, with the command that installs them.

The command names the packages, within the version bounds of Étude's own metadata, and the running Python. So
it is correct in a checkout and in an installed wheel, whatever their name and origin.
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import sys

from etude.errors import ResourceError

_PACKAGES = {"acp": "agent-client-protocol", "lance": "pylance"}
"""Packages whose name differs from the module that they install, by module."""


class MissingPackageError(ResourceError):
    """A Python package that is not installed."""


def missing_package(
    purpose: str, *packages: str, field: str | None = None, instead: str = ""
) -> MissingPackageError:
    """The error for `purpose`, which needs `packages`: it names those that are not installed.

    `instead`: an alternative, which is appended to the fix.
    """
    missing = [package for package in packages if not is_installed(package)] or packages
    message = f"{purpose} needs {' and '.join(missing)}, which this Python does not have"
    return MissingPackageError(message, field=field, fix=install_command(*missing) + instead)


def is_installed(package: str) -> bool:
    """Whether the package is installed in the running Python."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def package_of(module: str) -> str:
    """The package that installs a module, such as `sentence-transformers` for `sentence_transformers`."""
    top = module.partition(".")[0]
    return _PACKAGES.get(top, top.replace("_", "-"))


def install_command(*packages: str) -> str:
    """A shell command that installs `packages` for the running Python."""
    return shlex.join([sys.executable, "-m", "pip", "install", *map(_requirement, packages)])


def _requirement(package: str) -> str:
    """The package with the version bounds of Étude's metadata, if that is available and has any."""
    try:
        stated = importlib.metadata.requires("etude") or []
    except importlib.metadata.PackageNotFoundError:
        stated = []
    for line in stated:
        requirement = line.partition(";")[0].strip()
        if re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower() == package.lower():
            return requirement
    return package
