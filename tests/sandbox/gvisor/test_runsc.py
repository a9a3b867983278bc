"""Finding runsc, and diagnosing why it does not work."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ResourceError
from etude.sandbox.gvisor.runsc import Runsc, find_problems, parse_version
from tests.fakes.runsc import INTERPRETER, install_fake

needs_interpreter = pytest.mark.skipif(not Path(INTERPRETER).exists(), reason=f"no {INTERPRETER} here")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("runsc version 0.0~20240729.0\nspec: 1.0.2-dev\n", ("0.0~20240729.0", 20240729)),
        ("runsc version release-20250113.0\nspec: 1.1.0-rc.1\n", ("release-20250113.0", 20250113)),
        ("runsc version release-20230102.0-12-g0123abc\n", ("release-20230102.0-12-g0123abc", 20230102)),
        ("runc version 1.1.5\nspec: 1.0.2-dev\n", None),
        ("", None),
    ],
)
def test_versions_are_read(text: str, version: tuple[str, int] | None) -> None:
    assert parse_version(text) == version


@given(st.text())
def test_no_output_breaks_the_parser(text: str) -> None:
    found = parse_version(text)
    assert found is None or 0 <= found[1] <= 99999999


@given(st.integers(10**7, 10**8 - 1), st.sampled_from(["0.0~{}.0", "release-{}.0", "{}"]))
def test_release_dates_are_found_in_any_form(date: int, form: str) -> None:
    text = f"warning: noise\nrunsc version {form.format(date)}\nspec: 1.0.2\n"
    assert parse_version(text) == (form.format(date), date)


def test_a_missing_runsc_is_explained() -> None:
    with pytest.raises(ResourceError, match="apt-get install"):
        Runsc.find("no-such-runsc")


@needs_interpreter
def test_an_old_runsc_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="older than 20240729"):
        Runsc.find(str(install_fake(tmp_path / "runsc", "old")))


@needs_interpreter
def test_a_new_runsc_is_taken(tmp_path: Path) -> None:
    found = Runsc.find(str(install_fake(tmp_path / "runsc")))
    assert found == Runsc(str(tmp_path / "runsc"), "release-20990101.0")


def test_a_program_that_is_not_runsc_is_refused() -> None:
    program = shutil.which("true")
    assert program is not None
    with pytest.raises(ResourceError, match="version"):
        Runsc.find(program)


def sysctl(root: Path, **values: str) -> Path:
    for name, value in values.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value + "\n")
    return root


@needs_interpreter
def test_the_doctor_finds_nothing_on_a_good_machine(tmp_path: Path) -> None:
    program = str(install_fake(tmp_path / "runsc"))
    good = sysctl(tmp_path / "sys", user__max_user_namespaces="1000", kernel__yama__ptrace_scope="1")
    assert find_problems(program, good) == []


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("user__max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"),
        ("kernel__unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        (
            "kernel__apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("kernel__yama__ptrace_scope", "3", "sysctl -w kernel.yama.ptrace_scope=1"),
    ],
)
def test_the_doctor_names_each_obstacle_with_its_fix(tmp_path: Path, name: str, value: str, fix: str) -> None:
    program = str(install_fake(tmp_path / "runsc"))
    (problem,) = find_problems(program, sysctl(tmp_path / "sys", **{name: value}))
    assert fix in problem


def test_the_doctor_tells_how_to_install_runsc(tmp_path: Path) -> None:
    assert any("bookworm-backports" in problem for problem in find_problems("no-such-runsc", tmp_path))
