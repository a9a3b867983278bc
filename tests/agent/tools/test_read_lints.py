import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_scenes import in_local, in_memory

from etude.agent.tools import linters
from etude.agent.tools.linters import Finding, HostRuff, new_findings, parse_findings
from etude.agent.tools.read_lints import ReadLints
from etude.agent.tools.run_command import RunCommand
from etude.agent.tools.state import ToolState
from etude.errors import InfrastructureError
from etude.records import ToolErrorClass

FILES = {
    "a.py": "import os\nimport sys\n\n\ndef f():\n    return sys.argv\n",
    "lib/b.py": "import json\n",
    "notes.txt": "import nothing\n",
}

if HostRuff.find() is None:
    pytest.skip("no ruff on this machine", allow_module_level=True)


def lint(edits, *calls, files=None, originals=None, state=None):
    """What `read_lints` says after edits."""

    async def scenario(call, context):
        await context.sandbox.files.write_many(edits)
        return [await call(**arguments) for arguments in calls or ({},)]

    files = FILES if files is None else files
    known = {path: text.encode() for path, text in files.items()} if originals is None else originals
    return in_memory([ReadLints()], scenario, files, state=state or ToolState(), originals=known)


def test_only_what_is_new_is_shown():
    (nothing,) = lint({})
    assert nothing.output == "no new findings" and nothing.facts["num_findings"] == 0
    edits = {"a.py": "# moved\n\n" + FILES["a.py"] + "\n\nprint(undefined)\n", "new.py": "import re\n"}
    (result,) = lint(edits)
    assert result.output == (
        "a.py:11: F821 Undefined name `undefined`\nnew.py:1: F401 `re` imported but unused\n2 new findings"
    )
    assert result.facts == {"kind": "lint", "num_findings": 2, "new": True}


def test_a_second_finding_of_the_same_kind_is_new_once():
    files = {"a.py": "print(x)\n"}
    (result,) = lint({"a.py": "print(x)\n" * 3}, files=files)
    assert result.output.split("\n")[-1] == "2 new findings"


def test_all_shows_what_was_there_before_too():
    everything, below, one = lint({}, {"all": "true"}, {"all": "true", "paths": "lib"}, {"paths": '["a.py"]'})
    assert everything.output.split("\n")[-1] == "2 findings"
    assert below.output == "lib/b.py:1: F401 `json` imported but unused\n1 finding"
    assert one.output == "no new findings"


def test_the_first_state_is_linted_once():
    read, state = [], ToolState()

    class Counted(dict[str, bytes]):
        def get(self, path, default=None):
            read.append(path)
            return FILES[path].encode()

    counted = Counted()
    lint({"a.py": FILES["a.py"] + "x = undefined\n"}, {}, {}, originals=counted, state=state)
    again = ToolState.from_dict(json.loads(json.dumps(state.to_dict())))
    lint({"a.py": FILES["a.py"] + "x = undefined\n"}, {}, originals=counted, state=again)
    assert read == ["a.py"] and state.findings == {"a.py": ["F401\timport os"]}


def test_without_a_known_first_state_all_is_new_and_said_so():
    async def scenario(call, context):
        await context.sandbox.files.write("a.py", FILES["a.py"] + "\n")
        return await call()

    result = in_memory([ReadLints()], scenario, FILES)
    assert (
        "1 new finding\nall are shown as new of files whose first state is not known: a.py" in result.output
    )


def test_files_that_do_not_parse_are_findings():
    (result,) = lint({"a.py": "def broken(:\n", "c.py": b"\xff\xfe\0x", "d.py": "(" * 50_000})
    assert "a.py:1: " in result.output and result.error is None
    result.output.encode()


def test_deleted_and_other_files_are_left_out():
    async def scenario(call, context):
        await context.sandbox.files.remove("a.py")
        await context.sandbox.files.write("notes.md", "import os\n")
        return await call()

    assert in_memory([ReadLints()], scenario, FILES).output == "no new findings"


def test_many_findings_are_counted_and_the_first_shown():
    (result,) = lint({"a.py": "".join(f"import m{n}\n" for n in range(100))}, {"paths": "a.py"})
    lines = result.output.split("\n")
    assert len(lines) == 32 and lines[-2:] == ["... 70 more", "100 new findings"]


@pytest.mark.parametrize(
    ("arguments", "message", "error"),
    [
        ({"paths": "../x.py"}, "the path leaves the workspace", "invalid_arguments"),
        ({"paths": "no/such.py", "all": "true"}, "no such file or directory", "unexpected_environment"),
        ({"all": "some"}, "all must be true or false", "invalid_arguments"),
        ({"paths": "[" + '"x",' * 200 + '"y"]'}, "paths has more than 100 entries", "invalid_arguments"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, error):
    (result,) = lint({}, arguments)
    assert (result.output, result.error) == (f"error: {message}", error)


def test_a_machine_without_a_linter_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(linters.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    (result,) = lint({"a.py": "x\n"})
    assert (result.output, result.error) == (
        "error: no linter is installed",
        ToolErrorClass.UNEXPECTED_ENVIRONMENT,
    )


def test_a_linter_that_refuses_to_run_is_never_an_answer(tmp_path):
    def run(script):
        program = tmp_path / "ruff"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return asyncio.run(HostRuff(program).lint("a.py", b"x"))

    with pytest.raises(InfrastructureError, match="bad option"):
        run("echo bad option >&2; exit 2")
    assert run("kill -9 $$")[0].message == "the linter cannot read it"
    assert run("echo no json")[0].rule == "not-linted"


def test_a_repositorys_own_linter_and_last_commit_count():
    fake = '#!/bin/sh\n[ "$1" = --version ] && exit 0\nn=$(cat | wc -l)\necho "[{\\"code\\": \\"OWN$n\\"}]"\n'
    path = "PATH=/workspace/bin:$PATH"

    async def scenario(call, context):
        async def run(line):
            return (await RunCommand().run({"command": line}, context)).output

        commands = context.sandbox.commands
        real = commands.run
        commands.run = lambda cmd, *rest, **more: real(f"export {path}\n{cmd}", *rest, **more)
        await run("chmod +x bin/ruff")
        git = "git -c user.name=a -c user.email=a@example.org"
        made = await run(f"git init -q . && git add a.py && {git} commit -qm first && echo made")
        if made != "made":
            pytest.skip(f"no git in the sandbox: {made}")
        before = await call(paths="a.py")
        await context.sandbox.files.write("a.py", "one\ntwo\nthree\n")
        await context.sandbox.files.write("new.py", "one\n")
        return before.output, (await call(paths="a.py new.py")).output

    before, after = in_local([ReadLints()], scenario, {"a.py": "one\n", "bin/ruff": fake})
    assert before == "no new findings"
    assert after == "a.py:1: OWN3\nnew.py:1: OWN1\n2 new findings"


findings = st.lists(
    st.builds(Finding, st.integers(1, 9), st.sampled_from(["A", "B"]), st.just(""), st.sampled_from("xyz")),
    max_size=8,
)


@given(findings, findings)
def test_nothing_old_is_new_and_nothing_new_is_lost(before, now):
    new = new_findings(now, [finding.key for finding in before])
    assert len(new) >= len(now) - len(before)
    assert new_findings(now, [finding.key for finding in now]) == []
    assert new_findings(now, []) == now


@given(
    st.text(max_size=40)
    | st.recursive(st.none() | st.integers() | st.text(max_size=5), st.lists).map(json.dumps)
)
def test_any_output_of_a_linter_can_be_read(output):
    for finding in parse_findings(output, b"x = 1\n"):
        assert finding.line >= 1
