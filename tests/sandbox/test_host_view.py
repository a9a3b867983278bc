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


def lay(base: Path, tree: dict[str, str]) -> Path:
    """Makes links to what is named, and executable files where nothing is."""
    for name, target in tree.items():
        place = base / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if target:
            place.symlink_to(target.replace("BASE", str(base)))
        else:
            place.touch(0o755)
    return base


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
    with pytest.raises(ConfigError, match="no executable bin/python") as nothing:
        HostView(project).add_python(project)
    assert "python -m venv" in str(nothing.value.fix)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        place = lay(Path(folder), {".venv/bin/python": "/bin/sh", ".venv/pyvenv.cfg": ""})
        with pytest.raises(ConfigError, match="is below /tmp"):
            HostView(place).add_python(place / ".venv")


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


OPT = {"opt/bin/python3.12": "", "opt/lib/python3.12/os.py": ""}
TOOL = {"me/secret/bin/tool": "", "me/secret/key": ""}
PYENV = "me/.pyenv/versions/3.12.1"
UV = "me/.local/share/uv/python/cpython-3.12"
ENVIRONMENT = "me/project/.venv"


@pytest.mark.parametrize(
    ("python", "tree", "shown", "hops"),
    [
        pytest.param("/usr/bin/env", {}, [], [], id="system"),
        pytest.param("/bin/sh", {}, [], [], id="link of the root's own directory"),
        pytest.param("BASE/opt/bin/python3.12", OPT, ["opt"], [], id="another installation"),
        pytest.param(
            f"BASE/{PYENV}/bin/python3",
            {
                f"{PYENV}/bin/python3": "python3.12",
                f"{PYENV}/bin/python3.12": "",
                f"{PYENV}/lib/python3.12/os.py": "",
            },
            [PYENV],
            [],
            id="pyenv",
        ),
        pytest.param(
            f"BASE/{UV}/bin/python3.12",
            {UV: "cpython-3.12.5", f"{UV}.5/bin/python3.12": "", f"{UV}.5/lib/python3.12/os.py": ""},
            [UV],
            [],
            id="uv, by a link to its directory",
        ),
        pytest.param(
            "BASE/me/.local/bin/python3",
            {"me/.local/bin/python3": "BASE/opt/bin/python3.12", "me/.local/key": "", **OPT},
            ["opt"],
            ["me/.local/bin/python3"],
            id="a hop through .local/bin",
        ),
        pytest.param(
            "BASE/me/bin/python3",
            {"me/bin/python3": "../../opt/bin/python3.12", **OPT},
            ["opt"],
            ["me/bin/python3"],
            id="a hop through a person's bin",
        ),
        pytest.param(
            "BASE/me/project/bin/python3",
            {"me/project/bin/python3": "BASE/opt/bin/python3.12", **OPT},
            ["opt"],
            [],
            id="a hop through the project, which the copy has",
        ),
    ],
)
def test_of_the_way_to_a_python_nothing_but_the_installation_is_shown(
    project: Path, monkeypatch, python: str, tree: dict[str, str], shown: list[str], hops: list[str]
) -> None:
    base = project.parent
    monkeypatch.setenv("HOME", f"{base}/me")
    lay(base, {f"{ENVIRONMENT}/pyvenv.cfg": "", f"{ENVIRONMENT}/bin/python": python, **tree})
    view = HostView(base / "me" / "project")
    view.add_python(base / ENVIRONMENT)
    assert set(view.directories) == {str(base / name) for name in [ENVIRONMENT, *shown]}
    assert set(view.hops) == {str(base / name) for name in hops}
    assert set(view.links) >= set(view.hops)


@pytest.mark.parametrize(
    ("environment", "python", "tree", "reason"),
    [
        pytest.param(ENVIRONMENT, "BASE/me/secret/bin/tool", TOOL, "is not a Python", id="any program"),
        pytest.param(
            ENVIRONMENT,
            "../../inner/bin/tool",
            {"me/project/inner": "BASE/me/secret", **TOOL},
            "is not a Python",
            id="any program, by a link of the repository",
        ),
        pytest.param(
            ENVIRONMENT,
            "BASE/home/bin/python3",
            {"home/bin/python3": "", "home/lib/python3.12/os.py": ""},
            "holds .*/home, so",
            id="an installation that is the home directory",
        ),
        pytest.param(
            ENVIRONMENT,
            "../../src/bin/tool",
            {"me/project/src/bin/tool": "", "me/project/src/lib/python3.12/os.py": ""},
            "is in the project",
            id="an installation in the project",
        ),
        pytest.param("me/project", "/bin/sh", {}, "contains the project", id="the project"),
        pytest.param("me", "/bin/sh", {}, "contains the project", id="above the project"),
        pytest.param("me/link", "/bin/sh", {"me/link": "project"}, "contains the project", id="by a link"),
    ],
)
def test_no_environment_shows_what_a_person_or_the_project_has(
    project: Path, monkeypatch, environment: str, python: str, tree: dict[str, str], reason: str
) -> None:
    base = project.parent
    monkeypatch.setenv("HOME", f"{base}/home")
    (base / "me" / "project").mkdir(parents=True)
    lay(base, {**tree, f"{environment}/pyvenv.cfg": "", f"{environment}/bin/python": python})
    view = HostView(base / "me" / "project")
    with pytest.raises(ConfigError, match=reason) as refused:
        view.add_python(base / environment)
    assert refused.value.fix is not None and "--venv none" in refused.value.fix


def test_directories_that_are_no_environment_are_not_shown_when_named(project: Path, monkeypatch) -> None:
    base = lay(project.parent, {"me/.local/bin/python": "/bin/sh"})
    with pytest.raises(ConfigError, match="is not a Python environment or installation"):
        HostView(project).add_python(base / "me" / ".local")
    monkeypatch.setenv("HOME", f"{base}/me/.local")
    (base / "me" / ".local" / "pyvenv.cfg").touch()
    with pytest.raises(ConfigError, match=r"holds .*/\.local, so"):
        HostView(project).add_python(base / "me" / ".local")


def test_a_python_behind_a_hop_runs(tmp_path: Path, project: Path) -> None:
    python = project / ".venv" / "bin" / "python"
    base = lay(project.parent, {"me/bin/python": str(python.resolve()), "me/bin/key": ""})
    python.unlink()
    python.symlink_to(base / "me" / "bin" / "python")
    view = HostView(project)
    view.add_python(project / ".venv")
    done = run_in(tmp_path, view, f"python -c 'import sys, theirs; print(sys.prefix)'; ls {base}/me/bin")
    assert done.stdout == f"{project}/.venv\npython\n"


@pytest.mark.parametrize("active", [".", "..", "../link"])
def test_no_active_environment_is_found_that_holds_the_project(
    project: Path, monkeypatch, active: str
) -> None:
    lay(project.parent, {"pyvenv.cfg": "", "project/pyvenv.cfg": "", "link": "project"})
    (project / ".venv").rename(project / "elsewhere")
    monkeypatch.setenv("VIRTUAL_ENV", str(project / active))
    assert find_environment(project) is None
    (project / ".venv").symlink_to(".")
    assert find_environment(project) is None
    monkeypatch.setenv("VIRTUAL_ENV", str(project / "elsewhere"))
    assert find_environment(project) == project / "elsewhere"


def test_a_project_that_sandboxes_see_as_it_is_gets_no_environment(project: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "base_prefix", str(project.parent))
    with pytest.raises(ConfigError, match="is in a directory that every sandbox sees"):
        HostView(project).add_python(project / ".venv")


def test_a_repositorys_link_to_another_of_its_directories_is_no_environment(
    project: Path, monkeypatch
) -> None:
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    lay(project, {"config/pyvenv.cfg": "", "config/key": "", "venv": "config"})
    shared = (project / ".venv").rename(project.parent / "shared")
    assert find_environment(project) is None
    (project / ".venv").symlink_to(shared)
    assert find_environment(project) == project / ".venv"
