"""Tasks made from a small project, in sandboxes of this machine."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from etude.config.images import ImagesConfig
from etude.environment.making import pipeline
from etude.environment.making.baseline import Baseline
from etude.environment.making.pipeline import STATE, MakeSettings, make_tasks
from etude.environment.making.projects import read_project
from etude.environment.making.reports import MakeReport
from etude.environment.making.suites import Suite
from etude.environment.making.verifying import Noticed, verify_change
from etude.errors import TaskError
from etude.observe import SilentObserver
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.local.backend import LocalBackend
from etude.tasks.harbor import find_directories, read_harbor
from etude.tasks.making.changes import Change, Quotas, Rejection
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
        "def test_order(tmp_path_factory):\n    assert os.environ['PYTHONHASHSEED'] == '0'\n"
    ),
}
QUOTAS = Quotas(4, most_per_operator=1.0, least_compound=0.0, most_named_lines=1.0)
"""A project as small as this has no set of tasks by the shares of a large one."""


class Making:
    """Makes tasks from one project, in one state directory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.repo = write_tree(folder / "repo", PROJECT)
        self.store = ImageStore(folder / "state/images")
        self.image = save_python_image(self.store)

    def make(self, **settings: Any) -> MakeReport:
        """Raises as `make_tasks`."""
        how = MakeSettings(**{"quotas": QUOTAS, "num_runs": 4, "image": self.image, **settings})

        async def make() -> MakeReport:
            backend = LocalBackend(self.folder / "state", self.store.layers.root)
            if problems := backend.doctor():
                pytest.skip(problems[0])
            try:
                project = read_project(self.repo)
                images, observer = ImagesConfig(), SilentObserver()
                return await make_tasks(project, self.out, how, backend, self.store, images, observer)
            finally:
                await backend.close()

        return asyncio.run(make())

    def change(self, files: Mapping[str, str]) -> None:
        """Writes other files into the project."""
        write_tree(self.repo, files)


@pytest.fixture
def making(tmp_path: Path) -> Making:
    return Making(tmp_path)


@pytest.mark.slow
def test_a_project_becomes_tasks_whose_solution_earns_1_and_nothing_0(
    making: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = itertools.cycle((0.5, 0.0))

    async def verify_unevenly(change: Change, suite: Suite, baseline: Baseline) -> Noticed | Rejection:
        await asyncio.sleep(next(turn))  # the second of two is known first: that must decide nothing
        return await verify_change(change, suite, baseline)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "verify_change", verify_unevenly)
        report = making.make()
    assert report.baseline.stable == (
        "tests/test_prices.py::test_discount[0.25]",
        "tests/test_prices.py::test_discount[0.5]",
        "tests/test_prices.py::test_label",
        "tests/test_prices.py::test_total",
        "tests/test_prices.py::test_version",
        "tests/test_prices.py::test_wrong_rate",
    )
    assert set(report.baseline.unstable) == {
        "tests/test_prices.py::test_zone",
        "tests/test_prices.py::test_order",
    }
    assert (len(report.written), report.reverified) == (4, 1.0), "\n".join(
        row["reason"] for row in report.rejects if row["stage"] == "check"
    )
    assert report.num_tested == report.num_noticed + sum(row["stage"] == "changes" for row in report.rejects)
    found = find_directories(making.out, "out")
    assert sorted(path.name for path in found) == sorted(report.written)
    for path in found:
        task = read_harbor(path)
        assert task.instruction and task.verifier is not None and task.solution is not None
        assert task.allowed_paths == ("src/prices/**",)
        expected = json.loads((path / "tests/expected.json").read_bytes())
        assert expected["fail_to_pass"] and set(expected["ids"]) <= set(report.baseline.stable)
        files = sorted((path / "solution/files").rglob("*.py"))
        assert files, "the project's own text"
        for file in files:
            name = file.relative_to(path / "solution/files").as_posix()
            assert file.read_text() == PROJECT[name]
            assert (path / "environment/workspace" / name).read_text() != PROJECT[name]
    report_file = json.loads((making.out / "report.json").read_bytes())
    assert sorted(report_file["tasks"]) == sorted(report.written)

    # Called again it goes on from its journal: nothing is tested twice, and the tasks stay.
    before = (making.out / STATE / "journal").read_bytes()
    for path in found[:1]:
        shutil.rmtree(path)
    again = making.make()
    assert sorted(again.written) == sorted(report.written)
    assert (making.out / STATE / "journal").read_bytes() == before
    with pytest.raises(TaskError, match="was begun from another project"):
        making.make(seed=1)


@pytest.mark.slow
def test_a_task_that_its_image_or_workspace_gives_away_is_a_reject(making: Making) -> None:
    text = PROJECT["src/prices/totals.py"]
    save_python_image(making.store, {"usr/share/doc/discount.txt": text.partition("def total")[0]})
    (making.repo / "notes.gz").write_bytes(gzip.compress(text.encode()))
    report = making.make()
    leaks = [row for row in report.rejects if row["stage"] == "leaks"]
    by_image = [row["place"] for row in leaks if "usr/share/doc/discount.txt (text: " in row["reason"]]
    by_workspace = [row["place"] for row in leaks if "the workspace gives the solution" in row["reason"]]
    assert set(by_image) == {"src/prices/totals.py:6", "src/prices/totals.py:7"}
    assert by_workspace == ["src/prices/totals.py:13"]
    assert (len(leaks), report.num_checked, report.written) == (4, 0, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("def test_a():\n    assert False, 'never'\n", "none of its tests passes as it is; received 'Asser"),
        ("import time\n\n\ndef test_a():\n    time.sleep(60)\n", "cannot be run; received 'hangs"),
        ("import os\n\n\ndef test_a():\n    os._exit(3)\n", "cannot be run; received 'dies"),
        ("import nowhere\n", "none of its tests passes as it is; received .*No module named 'nowhere'"),
        (
            "import urllib.request\n\n\ndef test_a():\n    urllib.request.urlopen('http://192.0.2.1')\n",
            "none of its tests passes as it is; received .*urlopen error",
        ),
    ],
)
def test_tests_that_cannot_decide_are_one_clear_error(
    making: Making, monkeypatch: pytest.MonkeyPatch, test: str, message: str
) -> None:
    monkeypatch.setattr(pipeline, "FIRST_RUN_S", 5.0)
    making.change({"tests/test_prices.py": test})
    with pytest.raises(TaskError, match=message):
        making.make()
