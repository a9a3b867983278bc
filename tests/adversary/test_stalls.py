"""Large requests of one agent or tenant do not delay others."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("fastapi", reason="needs etude[serve]")
pytest.importorskip("httpx", reason="needs etude[serve]")

from etude.agent import full_registry
from etude.agent.globs import compile_path_pattern
from etude.config import RewardConfig
from etude.environment.grading import allowed_changes, matches_any
from etude.environment.names import template_of
from etude.environment.rewards import count_foreign_lines
from etude.environment.server import build_app
from etude.environment.sessions import SessionServices
from etude.environment.verdicts import Grader
from etude.environment.wire import MAX_PATTERNS, MAX_TEST_CHARACTERS, task_document, task_of
from etude.errors import UserError
from etude.records import Task
from etude.serving.process import ServerThread
from etude_quickstart.memory_backend import MemoryBackend
from tests.adversary.servers import TOKEN, Pulse, Server
from tests.environment.playing import TASK
from tests.environment.server.serving import new_host

STALL_S = 1.0
DEEP = "a/" * 90 + "b"


def seconds(start_s: float) -> float:
    return time.process_time() - start_s


@pytest.mark.parametrize("pattern", ["**/a*" * 12 + "/c", "*a" * 40, "**/" * 40 + "c", "a*" * 60 + "b"])
def test_no_pattern_of_allowed_paths_runs_back(pattern: str) -> None:
    start_s = time.process_time()
    matches_any(DEEP, (pattern,))
    matches_any("a" * 200, (pattern,))
    assert seconds(start_s) < STALL_S


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("src/**", "src/a/b.py", True),
        ("src/**", "src", False),
        ("**/x.py", "x.py", True),
        ("a/**/b", "a/b", True),
        ("a/**/b", "a/c/d/b", True),
        ("app/[id]/page.tsx", "app/[id]/page.tsx", True),
        ("app/[id]/page.tsx", "app/i/page.tsx", False),
        ("*.{py,md}", "a.py", False),
        ("*.py", "lib/a.py", False),
    ],
)
def test_only_stars_and_question_marks_are_special_in_allowed_paths(pattern, path, fits) -> None:
    assert compile_path_pattern(pattern)(path) is fits


def test_thousands_of_changes_beside_thousands_of_hidden_files_are_looked_through_at_once() -> None:
    hidden = {f"tests/d{n}/h.py": "" for n in range(5000)}
    task = Task(id="t", instruction="", files={}, hidden_files=hidden)
    changes = {f"src/d{n}/a.py": b"" for n in range(5000)}
    changes |= {"tests": b"", "tests/d7": b"", "tests/d7/h.py": b"", "tests/d7/h.py/x": b""}
    start_s = time.process_time()
    assert len(allowed_changes(task, changes)) == 5000
    assert seconds(start_s) < STALL_S


def test_blank_lines_by_the_ten_thousand_are_compared_in_linear_time() -> None:
    start_s = time.process_time()
    assert count_foreign_lines("\n" * 80_000, "\n" * 160_000 + "x \n" * 3, 100) == 3
    assert seconds(start_s) < STALL_S


def test_files_of_a_thousand_directories_are_refused_at_once() -> None:
    start_s = time.process_time()
    with pytest.raises(UserError, match="more than 100 names"):
        template_of({f"{n}/" + "d/" * 1900 + "f": "" for n in range(2000)}, "files")
    assert seconds(start_s) < STALL_S


@pytest.mark.parametrize(
    "more",
    [
        {"allowed_paths": ["**"] * (MAX_PATTERNS + 1)},
        {"allowed_paths": ["a" * 10_000]},
        {"hidden_files": {"tests/test_hidden.py": "#" * (MAX_TEST_CHARACTERS + 1)}},
    ],
)
def test_a_clients_task_is_bounded_where_grading_it_would_take_long(more: dict[str, object]) -> None:
    task_of(task_document(TASK))
    with pytest.raises(UserError):
        task_of(task_document(TASK) | more)


def test_a_session_with_hostile_patterns_and_blank_lines_is_graded_while_others_are_answered(
    tmp_path: Path,
) -> None:
    backend = MemoryBackend()
    services = SessionServices(
        backend, Grader(backend, reward=RewardConfig(style_penalty=0.1)), full_registry()
    )
    app = build_app(new_host(services), {TOKEN: "one"})
    task = task_document(TASK) | {"allowed_paths": ["**/a*" * 12 + "/c", "lib/**", DEEP]}
    write = {"name": "write_file", "arguments": {"path": DEEP, "text": "x"}}
    blank = {"name": "write_file", "arguments": {"path": "lib/blank.py", "text": " \n" * 80_000}}
    with ServerThread(app) as thread:
        server = Server("environment", thread.url, "/sessions")
        headers = {"authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=thread.url, headers=headers, timeout=60, trust_env=False) as client:
            made = client.post("/sessions", json={"task": task}).json()
            with Pulse(server) as pulse:
                turn = client.post(f"/sessions/{made['id']}/turns", json={"calls": [write, blank]})
                assert turn.status_code == 200, turn.text
                graded = client.post(f"/sessions/{made['id']}/submit", json={})
        assert graded.status_code == 200, graded.text
        assert graded.json()["verdict"]["style"] == 80_000
    assert pulse.failure is None and pulse.longest_s < STALL_S
