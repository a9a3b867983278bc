"""One contract, all backends: each case gives identical results on all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from etude.errors import AgentError
from etude.sandbox.interface import Sandbox
from etude.sandbox.types import TestReport
from tests.sandbox.backends import with_sandbox

FILES: dict[str, bytes | str] = {
    "lib/tally.py": "def tally(xs):\n    return sum(xs) - 2\n",
    "lib/deep/more.py": "WORD = 'tally'\n",
    "tests/test_all.py": (
        "from lib.tally import tally\n"
        "from helper import twice\n\n"
        "def test_fails():\n    assert tally([1, 2, 3]) == 6\n\n"
        "def test_passes():\n    assert twice(tally([2])) == 0\n\n"
        "def test_raises():\n    return missing\n\n"
        "def test_message():\n    assert not twice(1), 'two is\\n  true'\n\n"
        "def test_truth():\n    assert tally([2])\n"
    ),
    "tests/helper.py": "def twice(x):\n    return 2 * x\n",
    "data.bin": b"tally\0\xff",
    "latin.txt": b"tally \xe9\r\nlast",
}

PATIENT_S = 30.0
"""A guest on a busy host is slow."""


def plain(value: Any) -> Any:
    """A result without durations, for comparison."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: plain(item) for key, item in vars_of(value).items() if key != "duration_s"} | {
            "type": type(value).__name__
        }
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def vars_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


async def attempt(operation: Awaitable[Any]) -> Any:
    """The plain result, or the agent's error as (type, message, field)."""
    try:
        return plain(await operation)
    except AgentError as error:
        return type(error).__name__, error.message, error.field


async def read(s: Sandbox) -> Any:
    f = s.files
    paths = ("lib/tally.py", "/workspace/lib/../lib/tally.py", "data.bin", "none", "lib", ".",
             "lib/tally.py/x", "../x", "/etc/passwd", "a\0b", "/workspaces")  # fmt: skip
    results = [await attempt(f.read(path)) for path in paths]
    return [
        *results,
        await f.read("data.bin", 3),
        await f.read("data.bin", 0),
    ]


async def write(s: Sandbox) -> Any:
    f = s.files
    results = [
        await attempt(f.write(path, data))
        for path, data in (
            ("new/a/b.txt", "é"), ("new/a/b.txt", b"\xff"), ("lib", "x"), (".", "x"),
            ("lib/tally.py/x/y", "x"),
            ("../x", "x"), ("new", "x"), ("empty", ""), ("new/a/b.txt/c", "x"),
        )
    ]  # fmt: skip
    await f.write_many({"m/1": "1", "m/2": b"2"})
    return results, plain(await f.list(".", 9)), await f.read("new/a/b.txt"), await attempt(f.write_many({}))


async def listing(s: Sandbox) -> Any:
    cases = (
        (".", 1),
        (".", 2),
        ("lib", 1),
        ("lib", 5),
        ("lib/tally.py", 1),
        ("none", 1),
        ("..", 1),
        (".", 0),
    )
    return [await attempt(s.files.list(path, depth)) for path, depth in cases]


async def removing(s: Sandbox) -> Any:
    paths = ("lib/tally.py", "lib", "lib", ".", "../x", "data.bin/x", "none/x")
    return [await attempt(s.files.remove(path)) for path in paths], plain(await s.files.list(".", 9))


async def grepping(s: Sandbox) -> Any:
    cases = (("tally", ".", 50), ("tally", "lib", 50), ("tally", "lib/tally.py", 50), ("tally", ".", 2),
             ("^def", ".", 50),
             ("zzz", ".", 50), ("(", ".", 50), ("tally", "none", 50), ("tally", "..", 50),
             ("last$|\\s$", ".", 50),
             ("*", ".", 1))  # fmt: skip
    return [await attempt(s.files.grep(*case)) for case in cases]


async def running(s: Sandbox) -> Any:
    reports = [await attempt(s.run_tests(["tests/test_all.py"], PATIENT_S))]
    await s.files.write("lib/tally.py", "def tally(xs):\n    return sum(xs)\n")
    reports.append(await attempt(s.run_tests(["tests/test_all.py"], PATIENT_S)))
    for text in (
        "def broken(:\n",
        "raise SystemExit(3)\n",
        "import nowhere\n",
        "x = '\0'\n",
    ):
        await s.files.write("lib/tally.py", text)
        reports.append(await attempt(s.run_tests(["tests/test_all.py"], PATIENT_S)))
    await s.files.write("lib/tally.py", "while True: pass\n")
    reports.append(await attempt(s.run_tests(["tests/test_all.py"], 0.3)))
    for paths in (
        ["none.py"],
        [],
        ["tests"],
        ["../x.py"],
        ["tests/helper.py"],
        ["tests/helper.py", "none.py"],
    ):
        reports.append(await attempt(s.run_tests(paths, PATIENT_S)))
    return reports


MODULES: dict[str, str] = {
    "random.py": "raise KeyError('the standard library wins')\n",
    "pkg/__init__.py": "from pkg.inner import VALUE\n",
    "pkg/inner.py": "VALUE = 3\n",
    "pkg/conftest.py": "raise KeyError('never read')\n",
    "conftest.py": "raise KeyError('never read')\n",
    "space/leaf.py": "LEAF = 1\n",
    "counter.py": "COUNT = []\n",
    "tests/test_mod.py": (
        "import random, sys\nimport pkg\nfrom space import leaf\nimport counter\nfrom pkg import inner\n\n"
        "def test_packages():\n    assert (pkg.VALUE, leaf.LEAF) == (3, 2)\n\n"
        "def test_fresh_each_run():\n    counter.COUNT.append(1)\n    assert counter.COUNT == []\n\n"
        "def test_names():\n    assert (__name__, pkg.__file__, __file__) == ()\n\n"
        "def test_long():\n    assert 'x' * 200 == ['y' * 200]\n\n"
        "def test_unusual():\n    class Odd:\n        def __repr__(self): return 'odd'\n"
        "    assert Odd() in [1]\n\n"
        "def test_repr_raises():\n    class Bad:\n        def __repr__(self): raise OSError('no repr')\n"
        "    assert Bad() == 1\n\n"
        "def test_exit():\n    raise SystemExit(2)\n\n"
        "def test_argument(fixture):\n    pass\n\n"
        "def test_chained():\n    assert 1 < 2 < 2\n\n"
        "def test_recursion():\n    f = lambda x: f(x + 1)\n    f(0)\n\n"
        "class TestGroup:\n    def test_inside(self):\n        assert False\n"
    ),
}


async def importing(s: Sandbox) -> Any:
    await s.files.write_many(MODULES)
    return [await attempt(s.run_tests(["tests/test_mod.py"], PATIENT_S)) for _ in range(2)]


async def probing(s: Sandbox) -> Any:
    await s.files.write(
        "p.py",
        "from lib.tally import tally\n\ndef test_a():\n    __record__(0, tally([9]))\n"
        "    __record__(1, {'a': [None, 1.5]})\n"
        "    raise ValueError('x')\n\ndef test_b():\n    __record__(2, len)\n",
    )
    return [
        await attempt(s.run_probes(["p.py"], PATIENT_S)),
        await attempt(s.run_probes(["none.py"], PATIENT_S)),
    ]


async def differing(s: Sandbox) -> Any:
    before = await s.diff()
    await s.files.write("lib/tally.py", FILES["lib/tally.py"])
    same = await s.diff()
    await s.files.write("lib/tally.py", "changed")
    await s.files.write("new/x", "1")
    await s.files.remove("lib/deep")
    without = [await s.diff(folder) for folder in ("new", "lib/deep", "none", "lib/tally.py")]
    return before, same, await s.diff(), without, await s.final_diff(), await s.final_diff("lib")


async def forking(s: Sandbox) -> Any:
    await s.files.write("lib/tally.py", "changed")
    await s.files.remove("data.bin")
    one, two = await s.fork(2)
    assert not isinstance(one, Exception)
    assert not isinstance(two, Exception)
    await one.files.write("only", "one")
    ids = {s.id, one.id, two.id}
    return await one.diff(), await two.diff(), await s.diff(), len(ids)


SCENARIOS: list[Callable[[Sandbox], Awaitable[Any]]] = [
    read, write, listing, removing, grepping, running, importing, probing, differing, forking,
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize(
    "name",
    [
        "local",
        "unisolated",
        pytest.param("gvisor", marks=pytest.mark.foreign),
        pytest.param("vm", marks=[pytest.mark.slow, pytest.mark.foreign]),
    ],
)
def test_backends_give_identical_results(name: str, scenario: Callable[[Sandbox], Awaitable[Any]]) -> None:
    assert with_sandbox(name, FILES, scenario) == with_sandbox("memory", FILES, scenario)


@pytest.mark.parametrize("name", ["local", "unisolated", "memory"])
def test_reports_read_as_documented(name: str) -> None:
    async def scenario(s: Sandbox) -> TestReport:
        return await s.run_tests(["tests/test_all.py"], PATIENT_S)

    report = with_sandbox(name, FILES, scenario)
    assert report.passed == ("test_passes",)
    assert [(failure.name, failure.message) for failure in report.failed] == [
        ("test_fails", "4 != 6"),
        ("test_raises", "NameError: name 'missing' is not defined"),
        ("test_message", "AssertionError: two is true"),
        ("test_truth", "assert 0"),
    ]
    assert (report.error, report.timed_out) == (None, False)


@pytest.mark.parametrize("name", ["local", "unisolated", "memory"])
def test_errors_are_typed_and_name_the_path(name: str) -> None:
    async def scenario(s: Sandbox) -> Any:
        return [await attempt(s.files.read(path)) for path in ("none", "lib", "../x")]

    assert with_sandbox(name, FILES, scenario) == [
        ("PathMissingError", "no such file or directory", "path"),
        ("PathKindError", "is a directory", "path"),
        ("PathOutsideError", "the path leaves the workspace", "path"),
    ]
