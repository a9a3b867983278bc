"""A project's past: commits and releases that changed modules and tests."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from etude.environment.making.history import find_past
from etude.environment.making.projects import read_project
from etude.errors import TaskError
from etude.tasks.making.undoing import PastChange
from tests.sandbox.images.image_builders import write_tree

MODULE, TEST = "src/prices/__init__.py", "tests/test_größen.py"
STATES = [
    {MODULE: f"def one():\n    return {number}\n", TEST: f"def test_one():\n    assert {number}\n"}
    for number in (1, 2, 3, 4)
]
STATES[2][TEST] = STATES[1][TEST]  # a change without tests
PAST = [
    PastChange({MODULE: STATES[2][MODULE]}, {MODULE: STATES[3][MODULE]}),
    PastChange({MODULE: STATES[0][MODULE]}, {MODULE: STATES[1][MODULE]}),
]


def git(repo: Path, *words: str) -> None:
    named = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", repo, *named, *words], check=True, capture_output=True)


def test_commits_that_change_modules_and_tests_are_found_newest_first(tmp_path: Path) -> None:
    repo = tmp_path / "prices"
    for number, state in enumerate(STATES):
        write_tree(repo, state)
        if number == 0:
            git(repo, "init", "-q", "-b", "main")
            assert list(find_past(repo, [], read_project(repo))) == []
        if number == 3:  # a merged branch counts as one change
            git(repo, "checkout", "-q", "-b", "topic")
            (repo / "notes.txt").write_text("later\n")
            git(repo, "add", "notes.txt")
            git(repo, "commit", "-q", "-m", "notes")
        git(repo, "add", ".")
        git(repo, "commit", "-q", "-m", f"state {number}")
    git(repo, "checkout", "-q", "main")
    git(repo, "merge", "-q", "--no-ff", "-m", "merge", "topic")
    assert list(find_past(repo, [], read_project(repo))) == PAST


def test_releases_are_compared_wherever_their_packages_lie(tmp_path: Path) -> None:
    flat = {path.removeprefix("src/"): text for path, text in STATES[0].items()}
    folders = [
        write_tree(tmp_path / f"prices-{number}", state) for number, state in enumerate([flat, *STATES[1:]])
    ]
    archive = tmp_path / "prices-1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folders[1], "prices-1")
    releases = [folders[0], archive, folders[2]]
    assert list(find_past(folders[3], releases, read_project(folders[3]))) == PAST


def test_a_release_or_repository_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    repo = write_tree(tmp_path / "prices", STATES[0])
    project = read_project(repo)
    for release in (tmp_path / "nowhere", write_tree(tmp_path / "empty", {"a.txt": "a"}), repo / MODULE):
        with pytest.raises(TaskError, match="cannot be read") as refused:
            find_past(repo, [release], project)
        assert refused.value.field == "--release"
    (repo / ".git").write_text("gitdir: nowhere\n")
    with pytest.raises(TaskError, match="git history cannot be read"):
        find_past(repo, [], project)


def test_a_project_is_read_through_a_link_to_it_but_not_links_in_it(tmp_path: Path) -> None:
    named = {"pyproject.toml": '[project]\nname = "prices"\nversion = "1"\n'}
    project = read_project(write_tree(tmp_path / "repo", STATES[0] | named))
    (tmp_path / "repo/elsewhere").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to("repo")
    assert read_project(tmp_path / "link") == project
