"""A project's own Python in local sandboxes."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from etude.errors import ConfigError
from etude.sandbox.local.host_view import HostView, find_environment
from etude.sandbox.template import Template
from tests.sandbox.scenes import on_backend


@pytest.fixture
def project():
    """A directory outside of /tmp with an environment that has the project installed in place."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        root = Path(folder).resolve() / "project"
        (root / "src").mkdir(parents=True)
        root.parent.chmod(0o755)
        (root / "src" / "ours.py").write_text("STATE = 'host'\n")
        make = [sys.executable, "-m", "venv", "--without-pip", str(root / ".venv")]
        subprocess.run(make, check=True, timeout=60)
        (packages,) = (root / ".venv").glob("lib/python*/site-packages")
        (packages / "theirs.py").write_text("STATE = 'installed'\n")
        (packages / "ours.pth").write_text(f"{root}/src\n")
        yield root


def run_in(tmp_path: Path, view: HostView, line: str, files=None):
    async def scenario(backend):
        backend.view = view
        sandbox = await backend.create(Template(files or {}))
        return await sandbox.commands.run(line)

    return on_backend(tmp_path, scenario)


def test_commands_run_in_the_projects_environment_on_the_copy(tmp_path: Path, project: Path) -> None:
    view = HostView(project)
    view.add_python(project / ".venv")
    code = "import sys, ours, theirs; print(sys.prefix, ours.STATE, theirs.STATE)"
    copy = {"src/ours.py": "STATE = 'copy'\n"}
    done = run_in(tmp_path, view, f"python -c '{code}'; touch {project}/.venv/x {project}/x", copy)
    assert done.stdout == f"{project}/.venv copy installed\n"
    assert done.stderr.count("Read-only file system") == 2
    assert not (project / ".venv" / "x").exists() and not (project / "x").exists()


def test_the_history_can_be_read_and_not_written(tmp_path: Path, project: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(project)]
    for words in (["init", "-q"], ["add", "src"], ["commit", "-qm", "First version"]):
        subprocess.run([*git, *words], check=True)
    view = HostView(project)
    assert view.add_history()
    copy = {".git": f"gitdir: {project}/.git\n", "src/ours.py": "STATE = 1\n"}
    done = run_in(tmp_path, view, "git log --format=%s; git status --short; git commit -qam x", copy)
    assert done.stdout.startswith("First version\n M src/ours.py\n")
    assert done.exit_code != 0 and "Read-only file system" in done.stderr


def test_the_projects_own_environment_comes_before_the_active_one(tmp_path: Path, monkeypatch) -> None:
    for name in ("one/.venv", "two"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "pyvenv.cfg").touch()
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "two"))
    assert find_environment(tmp_path / "one") == tmp_path / "one" / ".venv"
    assert find_environment(tmp_path) == tmp_path / "two"
    monkeypatch.delenv("VIRTUAL_ENV")
    assert find_environment(tmp_path) is None


def test_what_cannot_be_shown_is_refused_with_what_to_do(project: Path) -> None:
    with pytest.raises(ConfigError, match="no bin/python") as nothing:
        HostView(project).add_python(project)
    assert "python -m venv" in nothing.value.fix
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        (Path(folder) / "bin").mkdir()
        (Path(folder) / "bin" / "python").symlink_to("/bin/sh")
        with pytest.raises(ConfigError, match="lies below /tmp"):
            HostView(Path(folder)).add_python(Path(folder))


@pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes of a plain user may run as that user")
def test_an_environment_that_others_cannot_read_is_refused(project: Path) -> None:
    (project / ".venv" / "lib").chmod(0o700)
    with pytest.raises(ConfigError, match="cannot be read by other users") as refused:
        HostView(project).add_python(project / ".venv")
    assert refused.value.fix is not None and "chmod -R o+rX" in refused.value.fix


class CoveringView(HostView):
    """One that shows a directory of the host in place of /etc, and a link below it."""

    @property
    def links(self) -> dict[str, str]:
        return {"/etc/link": "/workspace"}


def test_making_a_sandbox_writes_nothing_into_what_it_shows(tmp_path: Path, project: Path) -> None:
    (project / "gitconfig").write_text("the host's")
    before = sorted(entry.name for entry in project.iterdir())
    view = CoveringView(project, {"/etc": str(project)})
    assert run_in(tmp_path, view, "cat /etc/gitconfig").stdout == "the host's"
    assert sorted(entry.name for entry in project.iterdir()) == before
