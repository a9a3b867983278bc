"""Rows of solved issues become task directories, or rejects with their reasons."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from etude.environment.making.importing import ImportReport, import_rows
from etude.errors import ConfigError
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.machine_backend import default_state_directory
from etude.sandbox.template import Image
from etude.tasks.calibration import calibrate
from etude.tasks.harbor import read_harbor

OLD_TEST = "from shop.prices import total\n\n\ndef test_empty():\n    assert total([1]) == 0\n"
NEW_TEST = """import pytest
from shop.prices import total


@pytest.mark.parametrize("n", [1, 2])
def test_total(n):
    assert total([n]) == n


def test_zero():
    assert total([0]) <= 0
"""
BEFORE = {
    "src/shop/__init__.py": "",
    "src/shop/prices.py": "def total(xs):\n    return sum(xs) - 1\n",
    "src/shop/old.py": "x = 1\n",
    "tests/test_prices.py": OLD_TEST,
}
FIXED = {"src/shop/prices.py": "def total(xs):\n    return sum(xs)\n", "src/shop/old.py": None}
TESTED = {"tests/test_prices.py": NEW_TEST}
NON_UTF8 = '--- /dev/null\n+++ "b/\\377.py"\n@@ -0,0 +1 @@\n+x = 1\n'
SECOND = {"src/shop/__init__.py": "name = 'shop'\n"}
SECOND_TESTED = {"tests/test_name.py": "import shop\n\n\ndef test_name():\n    assert shop.name == 'shop'\n"}


def git(clone: Path, *words: str) -> str:
    env = {"HOME": str(clone), "GIT_CONFIG_NOSYSTEM": "1", "PATH": os.environ["PATH"]}
    named = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    return subprocess.run(
        ["git", *named, *words], cwd=clone, env=env, check=True, capture_output=True, text=True
    ).stdout


def write(clone: Path, files: dict[str, str | None]) -> None:
    for path, text in files.items():
        (clone / path).parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            (clone / path).unlink()
        else:
            (clone / path).write_text(text)
    git(clone, "add", "-A")


def diff_of(clone: Path, files: dict[str, str | None]) -> str:
    write(clone, files)
    patch = git(clone, "diff", "--cached")
    git(clone, "reset", "--hard", "-q")
    return patch


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    clone = tmp_path / "clones/acme/shop"
    clone.mkdir(parents=True)
    git(clone, "init", "-q")
    write(clone, dict(BEFORE))
    git(clone, "commit", "-q", "-m", "first")
    common = {"repo": "acme/shop", "base_commit": git(clone, "rev-parse", "HEAD").strip(), "version": "1"}
    first = {
        "instance_id": "acme__shop-1",
        "problem_statement": "total is one too small",
        "patch": diff_of(clone, dict(FIXED)),
        "test_patch": diff_of(clone, dict(TESTED)),
        "FAIL_TO_PASS": [f"tests/test_prices.py::test_total[{n}]" for n in (1, 2)],
        "PASS_TO_PASS": ["tests/test_prices.py::test_zero"],
    }
    second = {
        "instance_id": "acme__shop-2",
        "problem_statement": "the shop has no name",
        "patch": diff_of(clone, dict(SECOND)),
        "test_patch": diff_of(clone, dict(SECOND_TESTED)),
        "FAIL_TO_PASS": json.dumps(["tests/test_name.py::test_name"]),
        "PASS_TO_PASS": "[]",
    }
    return [{**common, **first}, {**common, **second}]


def run_import(
    tmp_path: Path, rows: list[Any], image: str | None = "base", name: str = "rows.jsonl"
) -> ImportReport:
    store = ImageStore(default_state_directory() / "images")
    store.save(Image("base", (), {}, "/"))
    file = tmp_path / name
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return asyncio.run(import_rows(file, tmp_path / "clones", tmp_path / "out", store, {}, image))


def test_the_report_covers_every_file_of_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    run_import(tmp_path, ["{broken\n"], name="a.jsonl")
    reports = {name: asdict(run_import(tmp_path, rows, name=name)) for name in ("a.jsonl", "b.jsonl")}
    said = json.loads((tmp_path / "out/report.json").read_text())
    assert said == {str(tmp_path / name): report for name, report in reports.items()}


def test_a_row_becomes_a_task_directory(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    report = run_import(tmp_path, rows)
    assert asdict(report) == {"written": ["acme__shop-1", "acme__shop-2"], "rejects": []}
    said = {str(tmp_path / "rows.jsonl"): asdict(report)}
    assert json.loads((tmp_path / "out/report.json").read_text()) == said
    first = tmp_path / "out/acme__shop-1"
    task = read_harbor(first)
    assert (task.id, task.instruction) == ("acme__shop-1", "total is one too small")
    workspace = first / "environment/workspace"
    found = {path.relative_to(workspace).as_posix() for path in workspace.rglob("*") if path.is_file()}
    assert found == set(BEFORE), "as at the commit: no history, and nothing of the patches"
    assert (first / "solution/files/src/shop/prices.py").read_text() == FIXED["src/shop/prices.py"]
    assert "rm -f -- /workspace/src/shop/old.py" in (first / "solution/solve.sh").read_text()
    assert (first / "tests/hidden/tests/test_prices.py").read_text() == TESTED["tests/test_prices.py"]
    expected = json.loads((first / "tests/expected.json").read_text())
    assert expected["ids"] == sorted(rows[0]["FAIL_TO_PASS"] + rows[0]["PASS_TO_PASS"])
    assert "FROM base\n" in (first / "environment/Dockerfile").read_text()
    table = pa.Table.from_pylist([{**row, "FAIL_TO_PASS": row["FAIL_TO_PASS"]} for row in rows[:1]])
    parquet.write_table(table, tmp_path / "rows.parquet")
    store, out = ImageStore(default_state_directory() / "images"), tmp_path / "again"
    asyncio.run(import_rows(tmp_path / "rows.parquet", tmp_path / "clones", out, store, {}, "base"))
    assert read_harbor(out / "acme__shop-1").verifier == task.verifier


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"patch": None}, "patch: input should be a valid string"),
        ({"patch": "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"}, "patch: does not apply"),
        ({"test_patch": "nonsense"}, "test_patch: does not apply"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS: list should have at least 1 item"),
        ({"FAIL_TO_PASS": "no list"}, "FAIL_TO_PASS: is neither a list nor one as JSON"),
        ({"FAIL_TO_PASS": ["test_x (tests.Case)"]}, "tests: no file of pytest's is named by test_x"),
        ({"base_commit": "0" * 40}, "commit: "),
        ({"base_commit": "--output=x"}, "base_commit: string should match"),
        ({"repo": "acme/../shop"}, "repo: string should match pattern '^[A-Za-z0-9_]"),
        ({"repo": "acme/none"}, "repository: there is no acme/none"),
        ({"instance_id": "../x"}, "instance_id: string should match"),
        ({"instance_id": "a" * 300}, "instance_id: string should have at most"),
        ({"instance_id": "\ud800"}, "instance_id: input should be a valid string"),
        ({"instance_id": "report.json"}, "directory: its name is taken"),
        ({"repo": f"acme/{'a' * 300}"}, "repo: string should have at most"),
        ({"FAIL_TO_PASS": "[" * 100_000}, "row: maximum recursion"),
        ({"test_patch": NON_UTF8}, "row: "),
        ({"docker_image": "nowhere:1"}, "image: "),
        ({"docker_image": "base\nRUN true"}, "docker_image: string should match"),
    ],
)
def test_a_row_that_lacks_something_is_a_reject_with_its_reason(
    tmp_path: Path, rows: list[dict[str, Any]], changes: dict[str, Any], reason: str
) -> None:
    report = run_import(tmp_path, ["{broken\n", {**rows[0], **changes}, rows[1]])
    assert report.written == ["acme__shop-2"]
    line, row = report.rejects
    assert line == {"row": "line 1", "reason": "row: is no JSON object"}
    named = {**rows[0], **changes}["instance_id"][:200].replace("\ud800", "\\ud800")
    assert row["row"] == named and row["reason"].startswith(reason)
    assert f"{asdict(report)}".encode(), "can be printed"


def test_every_test_file_that_is_named_is_laid_and_what_is_gone_goes_first(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    clone = tmp_path / "clones/acme/shop"
    patch = diff_of(clone, {"src/shop/old.py": None, "src/shop/old.py/new.py": "x = 1\n"})
    row = {**rows[1], "patch": patch, "PASS_TO_PASS": ["tests/test_prices.py::test_empty"]}
    assert run_import(tmp_path, [row]).written == ["acme__shop-2"]
    task = tmp_path / "out/acme__shop-2"
    assert (task / "tests/hidden/tests/test_prices.py").read_text() == OLD_TEST
    assert "rm -rf -- tests/test_name.py tests/test_prices.py\n" in (task / "tests/test.sh").read_text()
    lines = (task / "solution/solve.sh").read_text().splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["rm", "cp"]
    gone = diff_of(clone, {"tests/test_prices.py": None, **SECOND_TESTED})
    report = run_import(tmp_path, [{**row, "instance_id": "gone", "test_patch": gone}])
    assert report.rejects[0]["reason"].startswith("tests: no file of pytest's")


def test_a_repeated_import_counts_what_is_done_and_rejects_what_is_another(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    run_import(tmp_path, rows[:1])
    calibrate(tmp_path / "out/acme__shop-1", 1, 2)
    assert run_import(tmp_path, rows) == run_import(tmp_path, rows)
    changed = {**rows[0], "problem_statement": "total is one too large"}
    report = run_import(tmp_path, [changed, rows[1], rows[1]])
    assert report.written == ["acme__shop-2"]
    assert [one["row"] for one in report.rejects] == ["acme__shop-1", "acme__shop-2"]
    assert {one["reason"] for one in report.rejects} == {"directory: its name is taken"}


def test_a_row_without_an_image_and_a_file_that_cannot_be_read_are_rejects(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    assert (
        run_import(tmp_path, rows, None).rejects[0]["reason"].startswith("image: the row has no docker_image")
    )
    with pytest.raises(ConfigError, match="ROWS: cannot be read"):
        asyncio.run(import_rows(tmp_path / "no", tmp_path, tmp_path, ImageStore(tmp_path), {}, None))


def test_the_tests_that_are_named_pass_with_the_solution_and_not_without(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    run_import(tmp_path, rows[:1])
    task, place = tmp_path / "out/acme__shop-1", tmp_path / "place"
    shutil.copytree(task / "environment/workspace", place)
    shutil.copytree(task / "tests/hidden", place, dirs_exist_ok=True)
    program = f"import json, runpy; run = runpy.run_path({str(task / 'tests/suite.py')!r})['run']\n"
    program += f"print('\\n' + json.dumps(run(json.load(open({str(task / 'tests/expected.json')!r})))))"
    library = tmp_path / "library"  # pytest alone: loading its plugins takes long
    library.mkdir()
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        (library / name).symlink_to(Path(str(importlib.import_module(name).__file__)).parent)
    (library / "py.py").symlink_to(str(importlib.import_module("py").__file__))
    env = {"PYTHONPATH": f"{place / 'src'}:{library}", "PYTHONDONTWRITEBYTECODE": "1"}
    outcomes: list[set[str]] = []
    for _ in range(2):
        words = [sys.executable, "-S", "-c", program]
        ran = subprocess.run(words, cwd=place, env=env, check=True, capture_output=True, text=True)
        found = json.loads(ran.stdout.splitlines()[-1])["outcomes"]
        outcomes.append({test for test, outcome in found.items() if outcome == "passed"})
        shutil.copytree(task / "solution/files", place, dirs_exist_ok=True)
    assert outcomes == [set(rows[0]["PASS_TO_PASS"]), {*rows[0]["PASS_TO_PASS"], *rows[0]["FAIL_TO_PASS"]}]
