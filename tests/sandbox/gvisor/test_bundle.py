"""A container's configuration: mounts, limits, user."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox.gvisor.bundle import Interpreter, build_rootfs, configuration
from etude.sandbox.types import Resources

APART = Interpreter("/opt/python/bin/python3.11", "/opt/python")
SYSTEM = Interpreter("/usr/bin/python3.11", "/usr")


def config(interpreter: Interpreter = APART, resources: Resources | None = None) -> dict[str, Any]:
    return configuration(interpreter, resources or Resources(), "copy-1")


def mounts(interpreter: Interpreter = APART, resources: Resources | None = None) -> dict[str, dict[str, Any]]:
    return {mount["destination"]: mount for mount in config(interpreter, resources)["mounts"]}


def test_host_directories_are_read_only_and_nothing_else_of_the_host_is_shown() -> None:
    shown = {path: mount for path, mount in mounts().items() if mount["type"] == "bind"}
    assert "/usr" in shown
    allowed = {
        "/usr",
        "/bin",
        "/sbin",
        "/lib",
        "/lib32",
        "/lib64",
        "/libx32",
        "/etc/alternatives",
        "/etc/ssl/certs",
        "/opt/python",
    }
    assert set(shown) <= allowed
    assert all({"ro", "nosuid", "nodev"} <= set(mount["options"]) for mount in shown.values())


def test_an_interpreter_of_the_system_needs_no_mount() -> None:
    assert "/opt/python" in mounts(APART)
    assert not any(path.startswith("/opt") for path in mounts(SYSTEM))


@given(st.integers(1 << 20, 1 << 40))
def test_everything_writable_is_bounded(disk_bytes: int) -> None:
    found = mounts(resources=Resources(disk_bytes=disk_bytes))
    for path in ("/workspace", "/tmp", "/dev/shm"):
        sizes = [option for option in found[path]["options"] if option.startswith("size=")]
        assert len(sizes) == 1
        assert 0 < int(sizes[0].removeprefix("size=")) <= disk_bytes


def test_the_server_is_root_without_most_rights_and_commands_are_not_root() -> None:
    process = config()["process"]
    assert process["user"] == {"uid": 0, "gid": 0}
    assert process["noNewPrivileges"] is True
    rights = set(process["capabilities"]["bounding"])
    assert not rights & {"CAP_SYS_PTRACE", "CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_MKNOD", "CAP_SYS_MODULE"}
    words = process["args"]
    assert words[words.index("--uid") + 1] == "1000"
    assert "--filter" in words


def test_limits_are_those_of_the_resources() -> None:
    resources = Resources(num_processes=7, open_files=33, file_bytes=999)
    process = config(resources=resources)["process"]
    limits = {row["type"]: row["hard"] for row in process["rlimits"]}
    assert limits["RLIMIT_NPROC"] == 7
    assert limits["RLIMIT_NOFILE"] > 33
    assert process["args"][process["args"].index("--open-files") + 1] == "33"
    assert limits["RLIMIT_FSIZE"] == 999
    assert limits["RLIMIT_CORE"] == 0


def test_a_configuration_is_json() -> None:
    assert json.loads(json.dumps(config()))["hostname"] == "copy-1"


def test_the_root_file_system_has_every_mount_point_and_a_program_that_starts(tmp_path: Path) -> None:
    interpreter = Interpreter.of_this_process()
    root = tmp_path / "rootfs"
    build_rootfs(root, interpreter)
    for path in mounts(interpreter):
        if path != "/dev/shm":
            assert (root / path.lstrip("/")).is_dir(), path
    program = root / "opt/etude"
    assert list(program.rglob("server.*.pyc"))
    command = [interpreter.program, "-I", "-S", "-B", str(program), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "--line" in done.stdout, done.stderr


def test_the_root_file_system_is_readable_by_all(tmp_path: Path) -> None:
    root = tmp_path / "rootfs"
    build_rootfs(root, SYSTEM)
    modes = {path: path.lstat().st_mode & 0o777 for path in root.rglob("*") if not path.is_symlink()}
    assert all(mode in (0o755, 0o644) for mode in modes.values()), modes


def test_of_this_process_finds_a_program_below_its_prefix() -> None:
    interpreter = Interpreter.of_this_process()
    assert Path(interpreter.program).is_file()
    assert interpreter.path.split(":")[0] == f"{interpreter.prefix}/bin"


@pytest.mark.parametrize(("prefix", "apart"), [("/usr", False), ("/usr/local", False), ("/usrx", True)])
def test_an_interpreter_is_apart_unless_below_usr(prefix: str, apart: bool) -> None:
    assert Interpreter(f"{prefix}/bin/python3", prefix).is_outside_usr is apart
