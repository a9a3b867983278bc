import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_scenes import in_local, in_memory

from etude.agent import ToolLimits
from etude.agent.tools.junit import parse_junit
from etude.agent.tools.run_command import RunCommand
from etude.agent.tools.run_tests import RunChosenTests, RunTests
from etude.records import ToolErrorClass

FILES = {
    "lib/__init__.py": "",
    "lib/one.py": "def one():\n    return 1\n",
    "tests/test_one.py": (
        "import pytest\nfrom lib.one import one\n\n\ndef test_one():\n    assert one() == 1\n\n\n"
        "class TestTwo:\n    def test_two(self):\n        assert one() == 2\n\n\n"
        "@pytest.mark.parametrize('x', [1, 3])\ndef test_each(x):\n    assert x == one()\n\n\n"
        "def test_later():\n    pytest.skip('later')\n"
    ),
    "tests/plain_test.py": "def test_plain():\n    assert True\n\n\ndef test_wrong():\n    assert 1 == 2\n",
    "conftest.py": "",
}


def local(scenario, files=None, **settings):
    async def checked(call, context):
        found = await RunCommand().run({"command": "python3 -m pytest --version"}, context)
        if "exit" in found.output:
            pytest.skip("no pytest in the sandbox")
        return await scenario(call, context)

    return in_local([RunChosenTests()], checked, files or FILES, **settings)


def test_without_paths_the_visible_tests_run_as_ever():
    async def scenario(call, context):
        return await call()

    settings = {"files": {"test_a.py": "def test_a():\n    assert 1 == 2\n"}, "test_paths": ("test_a.py",)}
    results = [in_memory([tool], scenario, **settings) for tool in (RunTests(), RunChosenTests())]
    assert [result.output for result in results] == ["FAIL test_a: 1 != 2\n1 failed, 0 passed"] * 2
    assert in_memory([RunChosenTests()], scenario).output == "error: no tests"


def test_visible_tests_that_import_pytest_run_where_commands_have_it():
    async def scenario(call, context):
        return await call()

    visible = ("tests/test_one.py", "tests/plain_test.py")
    result = local(scenario, test_paths=visible)
    assert result.output.split("\n")[-1].startswith("3 failed, 3 passed, 1 skipped")
    assert result.facts == {"kind": "test", "num_passed": 3, "num_failed": 3, "green": False}


@pytest.mark.slow
def test_the_repositorys_own_runner_runs_what_was_named():
    async def scenario(call, context):
        whole = await call(paths="tests/test_one.py")
        kept = await context.sandbox.files.read(".etude/outputs/1.txt")
        one = await call(paths="tests/test_one.py::test_one")
        each = await call(paths="tests/test_one.py::test_each[1] tests/test_one.py::TestTwo::test_two")
        everything = await call(paths=".")
        return whole, kept, one, each, everything

    whole, kept, one, each, everything = local(scenario)
    assert whole.output == (
        "FAIL tests/test_one.py::TestTwo::test_two: assert 1 == 2 + where 1 = one()\n"
        "FAIL tests/test_one.py::test_each[3]: assert 3 == 1 + where 1 = one()\n"
        "2 failed, 2 passed, 1 skipped, all in .etude/outputs/1.txt"
    )
    assert whole.facts == {"kind": "test", "num_passed": 2, "num_failed": 2, "green": False}
    assert b"TestTwo.test_two" in kept
    assert one.output == "1 passed" and one.facts["green"] is True
    assert each.output.split("\n")[-1].startswith("1 failed, 1 passed")
    assert everything.output.split("\n")[-1].startswith("3 failed, 3 passed, 1 skipped")


@pytest.mark.slow
def test_what_cannot_be_run_is_said():
    async def scenario(call, context):
        return [await call(paths=p) for p in ("no_such.py", "lib", "../up.py", "-x", '["tests", 3]')]

    missing, empty, *wrong = local(scenario)
    assert missing.output == "error: file or directory not found: no_such.py"
    assert empty.output == "error: no tests there"
    assert {missing.error, empty.error} == {ToolErrorClass.UNEXPECTED_ENVIRONMENT}
    assert [result.output for result in wrong] == [
        "error: the path leaves the workspace",
        "error: not a path: -x",
        "error: paths must be a list of texts",
    ]


def test_a_file_that_does_not_import_is_a_failure_of_the_tests():
    async def scenario(call, context):
        return await call(paths="test_broken.py")

    result = local(scenario, {"test_broken.py": "import no_such_module\n"})
    assert result.error is None and result.facts["green"] is False
    assert "FAIL " in result.output and "no_such_module" in result.output
    assert result.output.split("\n")[-1].startswith("1 failed, 0 passed")


@pytest.mark.slow
def test_tests_that_hang_are_the_agents_timeout():
    async def scenario(call, context):
        return await call(paths="test_hang.py")

    files = {"test_hang.py": "import time\n\n\ndef test_hang():\n    time.sleep(60)\n"}
    result = local(scenario, files, limits=ToolLimits(command_timeout_s=1.5))
    assert result.error == ToolErrorClass.TIMEOUT and result.output.endswith("error: tests timed out")


@pytest.mark.slow
def test_a_runner_that_dies_is_shown_and_not_green():
    async def scenario(call, context):
        first = await call(paths="test_one.py")
        await RunCommand().run({"command": "echo 'import os; os._exit(9)' > conftest.py"}, context)
        return first, await call(paths="test_one.py")

    first, second = local(scenario, {"test_one.py": "def test_one():\n    pass\n"})
    assert first.output == "1 passed"
    assert second.output.endswith("error: the test runner failed: exit 9")
    assert second.facts["green"] is False and second.facts["num_passed"] == 0


@pytest.mark.slow
def test_many_failures_are_counted_and_the_first_shown():
    async def scenario(call, context):
        return await call(paths="test_many.py")

    body = "import pytest\n"
    body += "@pytest.mark.parametrize('n', range(50))\ndef test_n(n):\n    assert n < 0, 'x' * 999\n"
    result = local(scenario, {"test_many.py": body})
    lines = result.output.split("\n")
    assert len(lines) == 5 and lines[3] == "... 47 more" and lines[4].startswith("50 failed, 0 passed")
    assert max(map(len, lines)) <= ToolLimits().line_characters


def test_without_pytest_the_built_in_runner_does_what_it_can():
    async def scenario(call, context):
        return [
            (await call(paths=paths)).output
            for paths in ("tests/plain_test.py", "tests/plain_test.py::test_plain", "tests", "lib")
        ]

    files = {path: text for path, text in FILES.items() if path != "tests/test_one.py"}
    whole, one, below, nothing = in_memory([RunChosenTests()], scenario, files)
    assert whole == below == "FAIL test_wrong: 1 != 2\n1 failed, 1 passed"
    assert one == "1 passed" and nothing == "error: no tests there"


@given(st.binary(max_size=80) | st.text("<>/testsuicaefilr =\"'&;!", max_size=80).map(str.encode))
def test_no_report_is_worth_an_exception(data):
    parse_junit(data)
    parse_junit(b"<testsuites><testsuite>" + data + b"</testsuite></testsuites>")


def test_reports_with_entities_are_refused():
    assert parse_junit(b'<!DOCTYPE x [<!ENTITY a "b">]><testsuites></testsuites>') is None
    late = '<?x <testsuite ?><!DOCTYPE x [<!ENTITY a "b">]><testsuites>&a;</testsuites>'
    assert parse_junit(late.encode()) is None
    assert parse_junit(late.replace("<?x <testsuite ?>", "").encode("utf-16")) is None
    assert parse_junit(b"<other/>") is None
