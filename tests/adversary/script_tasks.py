"""Tasks that `tests/test.sh` grades, by kind: read-only checks, an image, exams, a separate verifier."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from etude.environment.making.suites import PROGRAM
from etude.environment.making.writing import TEST
from etude.records import Task, TaskImage
from etude.tasks.exams import Exam, ExamSet
from etude.tasks.harbor import read_harbor
from tests.environment.host_image import save_image
from tests.sandbox.images.image_builders import file_member, member
from tests.tasks.harbor_tasks import Files, write_task

DIRTYPE, SYMTYPE = b"5", b"2"


def reward_if(condition: str, before: str = "") -> str:
    """A test.sh that pays where a condition of the shell holds."""
    write = "if {}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"
    return f"#!/bin/sh\n{before}{write.format(condition)}\n"


@dataclass(frozen=True)
class Kind:
    """How a task of one kind is written."""

    test: str
    solve: str
    toml: str = ""
    files: Files = field(default_factory=dict[str, str | bytes])
    head: str = ""
    """Lines of task.toml before all tables."""
    image: Callable[[], TaskImage] | None = None


def _image() -> TaskImage:
    rows = [member(name, DIRTYPE, 0o755) for name in ("data", "data/deep", "srv", "root")]
    rows.append(member("data/deep/current", SYMTYPE, link="/srv"))
    made = save_image("cheats:1", *rows, file_member("data/answer", b"unknown\n"))
    return TaskImage(made.name, made.layers, dict(made.env), made.workdir, made.user)


_WANTED: Files = {"tests/wanted": "42\n"}
_SERVE = """import pathlib, socket
answer = pathlib.Path("answer")
said = b"right" if answer.exists() and answer.read_text() == "42\\n" else b"wrong"
server = socket.create_server(("127.0.0.1", 8765))
server.settimeout(5)
server.accept()[0].sendall(said)
"""
_ASK = """import socket, sys, time
for _ in range(40):
    try:
        said = socket.create_connection(("127.0.0.1", 8765), 5).recv(99)
        break
    except OSError:
        time.sleep(0.05)
sys.exit(said != b"right")
"""
_CHECK = """import json, known
with open("answer") as file:
    assert json.load(file) == known.wanted()
"""
KINDS: Mapping[str, Kind] = {
    "answer": Kind(reward_if("cmp -s answer /tests/wanted"), "#!/bin/sh\necho 42 > answer\n", files=_WANTED),
    "slow": Kind(
        reward_if("cmp -s answer /tests/wanted", "sleep 0.2\n"),
        "#!/bin/sh\necho 42 > answer\n",
        files=_WANTED,
    ),
    "folder": Kind(
        reward_if("cmp -s out/wanted /tests/wanted"),
        "#!/bin/sh\nmkdir out && echo 42 > out/wanted\n",
        files=_WANTED,
    ),
    "cached": Kind(
        reward_if("grep -qx passed /tmp/checked", "[ -e /tmp/checked ] || sh /tests/check > /tmp/checked\n"),
        "#!/bin/sh\necho 42 > answer\n",
        files={
            **_WANTED,
            "tests/check": "#!/bin/sh\ncmp -s answer /tests/wanted && echo passed || echo failed\n",
        },
    ),
    "checked": Kind(
        reward_if("python3 /tests/check.py"),
        "#!/bin/sh\necho 42 > answer\n",
        files={"tests/check.py": _CHECK, "tests/known.py": "def wanted():\n    return 42\n"},
    ),
    "served": Kind(
        reward_if("python3 /tests/ask.py", "python3 /tests/serve.py 2> /dev/null &\n"),
        "#!/bin/sh\necho 42 > answer\n",
        files={"tests/serve.py": _SERVE, "tests/ask.py": _ASK},
    ),
    "allowed": Kind(
        reward_if('[ "$(cat out/sum)" = "$(cat wanted)" ]'),
        "#!/bin/sh\necho 42 > out/sum\n",
        '[metadata.etude]\nallowed_paths = ["out/**"]\n',
        {"environment/workspace/wanted": "42\n", "environment/workspace/out/sum": "0\n"},
    ),
    "image": Kind(
        reward_if('[ "$(cat /data/answer)" = "$(cat /tests/wanted)" ]'),
        "#!/bin/sh\necho 42 > /data/answer\n",
        files=_WANTED,
        image=_image,
    ),
    "linked": Kind(
        reward_if('[ -e /srv/answer ] && [ "$(cat /srv/answer)" = "$(cat /tests/wanted)" ]'),
        "#!/bin/sh\necho 42 > /srv/answer\n",
        files=_WANTED,
        image=_image,
    ),
    "separate": Kind(
        reward_if("cmp -s /logs/artifacts/answer /tests/wanted"),
        "#!/bin/sh\necho 42 > /logs/artifacts/answer\n",
        '[verifier]\nenvironment_mode = "separate"\n',
        _WANTED,
    ),
    "declared": Kind(
        reward_if("cmp -s /tmp/app/out/wanted /tests/wanted"),
        "#!/bin/sh\nmkdir -p /tmp/app/out && echo 42 > /tmp/app/out/wanted\n",
        '[verifier]\nenvironment_mode = "separate"\n',
        _WANTED,
        'artifacts = ["/tmp/app/out"]\n',
    ),
}
SHOP = '''def total(amounts, rate=0):
    """The sum less a share of it."""
    if rate > 1:
        raise ValueError("rate")
    return sum(amounts) * (1 - rate)
'''
_BROKEN = SHOP.replace("sum(amounts)", "len(amounts)")
_SUMS = """import pytest
from shop import total


def test_sum():
    assert total([1, 2, 3]) == 6


def test_rate():
    assert total([4, 4], 0.5) == 4


def test_refused():
    with pytest.raises(ValueError, match="rate"):
        total([], 2)
"""
_MORE = """import pytest
from shop import total


@pytest.mark.parametrize(("amounts", "wanted"), [([5], 5), ([2, 7], 9)], ids=["one", "two"])
def test_more(amounts, wanted):
    assert total(amounts) == wanted
"""
_IDS = {
    "tests/test_sums.py": ("test_sum", "test_rate", "test_refused"),
    "tests/test_more.py": ("test_more[one]", "test_more[two]"),
}
_CHANGES = (
    {"test_sum": ("== 6", "== 7"), "test_more[two]": ("9)", "8)")},
    {"test_rate": ("== 4", "== 3"), "test_more[one]": ("5)", "6)")},
    {"test_sum": ("== 6", "!= 6"), "test_rate": ("== 4", "== 5")},
)
"""Of each exam after the first: test -> what is changed in its file."""


def _exams() -> ExamSet:
    texts = {"tests/test_sums.py": _SUMS, "tests/test_more.py": _MORE}
    everything = [f"{path}::{name}" for path, names in _IDS.items() for name in names]
    exams = [Exam({}, tuple(everything))]
    for changes in _CHANGES:
        changed, failing = dict(texts), list[str]()
        for name, (old, new) in changes.items():
            path = next(path for path, names in _IDS.items() if name in names)
            assert old in changed[path]
            changed[path] = changed[path].replace(old, new, 1)
            failing.append(f"{path}::{name}")
        passing = tuple(test for test in everything if test not in failing)
        exams.append(
            Exam({f"hidden/{path}": text for path, text in changed.items()}, passing, tuple(failing))
        )
    return ExamSet(tuple(exams), files={f"hidden/{path}": text for path, text in texts.items()})


def _exam_kind() -> Kind:
    found = _exams()
    expected = {"ids": list(found.exams[0].passing), "paths": list(_IDS), "options": []}
    files: Files = {
        "environment/workspace/shop.py": _BROKEN,
        "tests/suite.py": PROGRAM.read_text(),
        "tests/expected.json": json.dumps(expected),
        "tests/exams.json": found.to_text(),
        **{f"tests/{path}": text for path, text in found.files.items()},
    }
    toml = '[metadata.etude]\ngrading = "exams"\n[verifier.env]\nPYTHONPATH = "/workspace"\n'
    solve = f"#!/bin/sh\ncat > shop.py <<'EOF'\n{SHOP}EOF\n"
    return Kind(TEST % "tests", solve, toml, files)


@cache
def script_task(name: str) -> Task:
    """The task of a kind, with its image."""
    kind = _exam_kind() if name == "exams" else KINDS[name]
    with tempfile.TemporaryDirectory() as folder:
        image = "host" if kind.image is None else "cheats:1"
        directory = write_task(Path(folder, name), kind.test, kind.solve, kind.toml, kind.files, image)
        (directory / "task.toml").write_text(kind.head + (directory / "task.toml").read_text())
        task = read_harbor(directory)
    if name == "exams":
        task = replace(task, solution_files={"shop.py": SHOP})
    if kind.image is not None:
        assert task.machine is not None
        task = replace(task, machine=replace(task.machine, image=kind.image()))
    return replace(task, id=f"cheats/{name}", directory=None)
