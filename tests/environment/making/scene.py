"""A small project from which tests make tasks, in sandboxes of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.config.images import ImagesConfig
from etude.environment.checking import TaskReport, check_tasks
from etude.environment.making.images import find_project_image
from etude.environment.making.pipeline import MakeSettings, TaskMaker
from etude.environment.making.projects import read_project
from etude.environment.making.reports import MakeReport
from etude.observe import SilentObserver
from etude.records import Task, TaskImage
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.local.backend import LocalBackend
from etude.tasks.harbor import read_harbor
from etude.tasks.making.changes import Quotas
from etude.tasks.making.undoing import PastChange
from tests.environment.making.python_image import save_python_image
from tests.sandbox.images.image_builders import write_tree

PROJECT = {
    "pyproject.toml": '[project]\nname = "prices"\nversion = "1.2"\n',
    "src/prices/__init__.py": "from prices.totals import total\nfrom prices.names import label\n",
    "src/prices/totals.py": (
        '"""Totals."""\n\n\ndef discount(amount, rate):\n    """The amount less a share of it."""\n'
        "    if rate < 0 or rate > 1:\n        raise ValueError('rate')\n"
        "    return amount - amount * rate\n\n\n"
        'def total(amounts, rate=0):\n    """The sum after the discount."""\n    result = 0\n'
        "    for amount in amounts:\n        if amount > 0:\n            result = result + amount\n"
        "    return discount(result, rate)\n"
    ),
    "src/prices/names.py": (
        '"""Names."""\n\n\ndef label(name, width=8):\n    """The name in capitals, cut to a width."""\n'
        "    words = name.split()\n    if not words:\n        return '-'\n"
        "    return ' '.join(words).upper()[:width]\n"
    ),
    "tests/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef amounts():\n    return [1, 2, 3]\n",
    "tests/test_prices.py": (
        "import importlib.metadata\nimport os\nimport time\nimport pytest\n"
        "from prices import label, total\n\n\n"
        "def test_total(amounts):\n    assert total(amounts) == 6\n    assert total([1, -2]) == 1\n\n\n"
        "@pytest.mark.parametrize('rate', [0.5, 0.25])\ndef test_discount(amounts, rate):\n"
        "    assert total(amounts, rate) == 6 * (1 - rate)\n\n\n"
        "def test_wrong_rate():\n    with pytest.raises(ValueError, match='rate'):\n        total([], 2)\n"
        "    with pytest.raises(ValueError, match='rate'):\n        total([], -1)\n\n\n"
        "def test_label():\n    assert label('green  tea leaves') == 'GREEN TE'\n"
        "    assert label(' ') == '-'\n\n\n"
        "def test_version():\n    assert importlib.metadata.version('prices') == '1.2'\n\n\n"
        "def test_zone():\n    assert time.timezone == 0\n\n\n"
        "def test_order(tmp_path_factory):\n    assert os.environ['PYTHONHASHSEED'] == '0'\n\n\n"
        "def test_words():\n    with pytest.raises(AssertionError, match='6 == 5'):\n"
        "        assert total([6]) == 5\n"
    ),
}
QUOTAS = Quotas(2, most_per_operator=1.0, least_compound=0.0, most_named_lines=1.0)
"""A project as small as this has no set of tasks by the shares of a large one."""


def read_made_task(directory: Path, image: TaskImage) -> Task:
    """A written task as a run plays it, on the project's image instead of one that buildah makes of it."""
    task, workspace = read_harbor(directory), directory / "environment/workspace"
    assert task.machine is not None
    files = {
        path.relative_to(workspace).as_posix(): path.read_text(errors="replace")
        for path in workspace.rglob("*")
        if path.is_file()
    }
    return replace(task, files=files, machine=replace(task.machine, image=image))


class Making:
    """Makes tasks from one project, in one state directory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.repo = write_tree(folder / "repo", PROJECT)
        self.store = ImageStore(folder / "state/images")
        self.image = save_python_image(self.store)

    def make(self, past: Sequence[PastChange] = (), **settings: Any) -> MakeReport:
        """Raises as `TaskMaker`."""
        how = MakeSettings(**{"quotas": QUOTAS, "num_runs": 4, "image": self.image, **settings})

        async def make() -> MakeReport:
            backend = self.open_backend()
            try:
                project = read_project(self.repo)
                image = await find_project_image(project, how.image or self.image, self.store, {})

                async def check(draft: Path) -> TaskReport:
                    [report] = await check_tasks([read_made_task(draft, image.image)], backend)
                    return report

                images, observer = ImagesConfig(), SilentObserver()
                return await TaskMaker(
                    project, self.out, how, backend, self.store, images, check, observer, past
                ).make()
            finally:
                await backend.close()

        return asyncio.run(make())

    def open_backend(self) -> LocalBackend:
        """The sandboxes; skips where there are none."""
        backend = LocalBackend(self.folder / "state", self.store.layers.root)
        if problems := backend.doctor():
            pytest.skip(problems[0])
        return backend

    def change(self, files: Mapping[str, str]) -> None:
        """Writes other files into the project."""
        write_tree(self.repo, files)
