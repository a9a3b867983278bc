"""Tasks made from a small project, in sandboxes of this machine."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from etude.config.images import ImagesConfig
from etude.environment.making import pipeline
from etude.environment.making.images import find_project_image
from etude.environment.making.pipeline import MakeSettings, TaskMaker
from etude.environment.making.projects import STATE, read_project
from etude.environment.making.suites import Baseline, Coverage, Suite, SuiteRun
from etude.environment.making.verifying import Noticed, verify_change
from etude.errors import TaskError
from etude.observe import SilentObserver
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.local.backend import LocalBackend
from etude.tasks.harbor import find_directories, read_harbor
from etude.tasks.making.changes import Change, Place
from etude.tasks.making.undoing import PastChange
from tests.environment.making.python_image import save_python_image
from tests.environment.making.scene import PROJECT, QUOTAS, Making
from tests.sandbox.images.image_builders import write_tree

_TOTALS = "src/prices/totals.py"
PAST = [
    PastChange(
        {_TOTALS: PROJECT[_TOTALS].replace("        if amount > 0:\n    ", "")}, {_TOTALS: PROJECT[_TOTALS]}
    )
]
"""The project once added what is below nothing, too."""


@pytest.mark.slow
def test_a_project_becomes_tasks_whose_solution_earns_1_and_nothing_0(
    making: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = itertools.cycle((0.5, 0.0))

    async def verify_unevenly(change: Change, suite: Suite, baseline: Baseline) -> Noticed | str:
        await asyncio.sleep(next(turn))  # the second of two is known first: that must decide nothing
        return await verify_change(change, suite, baseline)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "verify_change", verify_unevenly)
        report = making.make(PAST)
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
        "tests/test_prices.py::test_words",  # what only pytest's rewritten assertions say
    }
    assert (len(report.written), report.reverified) == (2, 1.0), "\n".join(
        row["reason"] for row in report.rejects if row["stage"] == "check"
    )
    assert report.kinds["past_change"] == 1
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
        visible = (path / "environment/workspace/tests/test_prices.py").read_text()
        failing = {name.partition("::")[2].partition("[")[0] for name in expected["fail_to_pass"]}
        assert failing and not any(f"def {name}(" in visible for name in failing)
        assert "from prices import label, total" in visible and "def test_version(" in visible
        assert (path / "tests/hidden/tests/test_prices.py").read_text() == PROJECT["tests/test_prices.py"]
    report_file = json.loads((making.out / "report.json").read_bytes())
    assert sorted(report_file["tasks"]) == sorted(report.written)
    naming = ["names_every_call = true\n" in (path / "task.toml").read_text() for path in found]
    assert report_file["tasks_naming_every_call"] == sum(naming)

    # Called again it goes on from its journal: nothing is tested twice, and the tasks stay, without time too.
    before = (making.out / STATE / "journal").read_bytes()
    for path in found[:1]:
        shutil.rmtree(path)
    again = making.make(PAST, budget_s=0.0)
    assert sorted(again.written) == sorted(report.written)
    assert (making.out / STATE / "journal").read_bytes() == before
    with pytest.raises(TaskError, match="was begun from another project"):
        making.make(seed=1)


@pytest.mark.slow
def test_a_task_that_its_image_or_workspace_gives_away_is_a_reject(making: Making) -> None:
    text = PROJECT["src/prices/totals.py"]
    save_python_image(making.store, {"srv/discount.txt": text.partition("def total")[0]})
    (making.repo / "notes.gz").write_bytes(gzip.compress(text.encode()))
    report = making.make(quotas=replace(QUOTAS, most_tasks=4))
    leaks = [row for row in report.rejects if row["stage"] == "leaks" and " + " not in row["operator"]]
    by_image = [row["place"] for row in leaks if "srv/discount.txt (text: " in row["reason"]]
    by_workspace = [row["place"] for row in leaks if "the workspace gives the solution" in row["reason"]]
    assert by_image and all(
        place in [f"src/prices/totals.py:{line}" for line in (6, 7, 8)] for place in by_image
    )
    assert by_workspace and all(place.startswith("src/prices/totals.py:1") for place in by_workspace)
    assert len(leaks) == len(by_image) + len(by_workspace)
    solutions = [path for name in report.written for path in (making.out / name / "solution").rglob("*.py")]
    assert {path.name for path in solutions} <= {"names.py"}


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


def test_a_directory_that_was_begun_before_tasks_were_made_otherwise_is_refused(tmp_path: Path) -> None:
    project, out = read_project(write_tree(tmp_path / "repo", PROJECT)), tmp_path / "out"
    store = ImageStore(tmp_path / "images")
    backend = LocalBackend(tmp_path / "state", store.layers.root)

    def begin() -> None:
        how = MakeSettings(image="tests/nowhere")
        images = ImagesConfig()
        maker = TaskMaker(project, out, how, backend, store, images, AsyncMock(), SilentObserver())
        asyncio.run(maker.make())

    with pytest.raises(TemplateError):
        begin()
    path = out / STATE / "key.json"
    key = json.loads(path.read_bytes())
    key.pop("version", None)
    path.write_text(json.dumps(key))
    with pytest.raises(TaskError, match="by another version of this command"):
        begin()


@pytest.mark.slow
def test_a_bug_must_fail_under_the_hash_seed_zone_and_fresh_sandbox_of_grading(making: Making) -> None:
    checks = {
        "passes": "True",
        "seed": "os.environ['PYTHONHASHSEED'] == '0'",
        "zone": "time.timezone == 0",
        "files": "not os.path.exists('left')",
        "leaves": "open('left', 'w').close()",
    }
    text = "import os\nimport time\nfrom prices import total\n\n\n" + "".join(
        f"def test_{name}():\n    assert total([1, 2]) == 3 or {check}\n\n\n"
        for name, check in checks.items()
    )
    absent = {"tests/test_absent.py": "import not_installed\n\n\ndef test_nothing():\n    pass\n"}
    making.change({"tests/test_prices.py": text, **absent})  # which is collected as little without a bug
    own = PROJECT["src/prices/totals.py"]
    broken = own.replace("result + amount", "result - amount")
    line = broken[: broken.index("result - amount")].count("\n") + 1
    path, tests = "src/prices/totals.py", [f"tests/test_prices.py::test_{one}" for one in checks]
    change = Change("planted_bug", "operator", {path: broken}, (Place(path, "total", line, line),))
    # By its coverage the first round is of one test alone, which leaves a file for those that follow.
    baseline = Baseline(tuple(sorted(tests)), {}, Coverage((tests[-1],), {path: {line: "1"}}), 1.0)

    async def verify() -> Noticed | str:
        backend = making.open_backend()
        try:
            image = await find_project_image(read_project(making.repo), making.image, making.store, {})
            suite = Suite.of(read_project(making.repo), image.image, backend, 60.0)
            return await verify_change(change, suite, baseline)
        finally:
            await backend.close()

    found = asyncio.run(verify())
    assert isinstance(found, Noticed), found
    assert [one.test for one in found.failures] == ["tests/test_prices.py::test_leaves"]
    assert found.to_document(baseline)["differing"] == [
        f"tests/test_prices.py::test_{one}" for one in ("files", "seed", "zone")
    ]


@pytest.mark.slow
def test_a_test_that_changes_the_directory_hides_nothing_of_the_others(making: Making) -> None:
    moves = "import os\n\n\ndef test_moves(tmp_path):\n    os.chdir(tmp_path)\n"
    fails = "from prices import total\n\n\ndef test_total():\n    assert total([1]) == 2\n"
    making.change({"tests/test_a.py": moves, "tests/test_b.py": fails})

    async def run() -> SuiteRun:
        backend = making.open_backend()
        try:
            project = read_project(making.repo)
            image = await find_project_image(project, making.image, making.store, {})
            return await Suite.of(project, image.image, backend, 60.0).run(cover=True)
        finally:
            await backend.close()

    found = asyncio.run(run())
    test = "tests/test_b.py::test_total"
    assert found.functions[test] == ("tests/test_b.py", "test_total")
    assert found.failures[test].innermost is not None
    assert found.coverage is not None
    assert test in (found.coverage.tests_of([Place("src/prices/totals.py", "", 1, 99)]) or ())
