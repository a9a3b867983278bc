"""Python packages that are not installed: one error, with the command that installs them.

The command names the packages themselves, within the bounds that Étude's own metadata states, and the Python
that runs. So it is right in a checkout and in an installed wheel, whatever either is called and wherever it
came from.
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import sys

from etude.errors import ResourceError

_PACKAGES = {"acp": "agent-client-protocol", "lance": "pylance"}
"""Packages that are called otherwise than the module that they install."""


class MissingPackageError(ResourceError):
    """A Python package that is not installed."""


def missing_package(
    purpose: str, *packages: str, field: str | None = None, instead: str = ""
) -> MissingPackageError:
    """The error for `purpose`, which needs `packages`: it names those that are not installed.

    `instead`: what else would do, for the fix.
    """
    missing = [package for package in packages if not is_installed(package)] or packages
    message = f"{purpose} needs {' and '.join(missing)}, which this Python does not have"
    return MissingPackageError(message, field=field, fix=install_command(*missing) + instead)


def is_installed(package: str) -> bool:
    """Whether the Python that runs has the package."""
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
    """A shell command that installs `packages` for the Python that runs."""
    return shlex.join([sys.executable, "-m", "pip", "install", *map(_requirement, packages)])


def _requirement(package: str) -> str:
    """The package with the versions that Étude works with, as far as its metadata is here and names it."""
    try:
        stated = importlib.metadata.requires("etude") or []
    except importlib.metadata.PackageNotFoundError:
        stated = []
    for line in stated:
        requirement = line.partition(";")[0].strip()
        if re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower() == package.lower():
            return requirement
    return package
