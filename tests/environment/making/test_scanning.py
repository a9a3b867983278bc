"""An image that shares some words with a solution does not give it away; one that holds it does."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from etude.tasks.making.changes import Change, Place
from etude.tasks.making.leaks import scan_layers

PATH = "src/prices/__init__.py"
OWN = (
    "def total(*args, **kwargs):\n    first = compute(args[0], kwargs['rate'], kwargs['places'])\n"
    "    return first\n"
)
CHANGE = Change(
    "planted_bug", "removed assignment", {PATH: "def total():\n    return 0\n"}, (Place(PATH, "total", 1, 3),)
)


@pytest.mark.parametrize(
    ("folder", "text", "is_leak"),
    [
        ("usr/share/python-wheels", "def total(*args, **kwargs):\n    return None\n", False),
        ("usr/share/python-wheels", OWN, True),
        ("usr/share/doc", "def total(*args, **kwargs):\n    return None\n", False),
        ("srv/wheels", "def total(*args, **kwargs):\n    return None\n", True),
    ],
)
def test_of_a_wheel_of_others_only_the_whole_difference_counts(
    tmp_path: Path, folder: str, text: str, is_leak: bool
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / folder / "pip-23.0.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pip/log.py", text)
    found = scan_layers([tmp_path], [CHANGE], {PATH: OWN.encode()})
    assert list(found) == ([CHANGE.id] if is_leak else [])
