"""Where a microVM lives, and the command lines that start it."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.errors import ConfigError
from etude.sandbox.firecracker.guest_files import boot_arguments, guest_files
from etude.sandbox.firecracker.jailer import Cell, Jail
from etude.sandbox.types import Resources

PROGRAM = Path("/opt/firecracker-v1.13.1")


def test_the_jailer_is_told_everything(tmp_path: Path) -> None:
    jail = Jail(Path("/opt/jailer"), 123, 456, arguments=("--new-pid-ns",))
    cell = Cell(tmp_path, "vm-1", PROGRAM, jail)
    command = cell.command(Resources(memory_bytes=1 << 28, cpus=0.5))
    assert cell.root == tmp_path / "firecracker-v1.13.1/vm-1/root"
    assert command == [
        "/opt/jailer", "--id", "vm-1", "--exec-file", str(PROGRAM), "--uid", "123", "--gid", "456",
        "--chroot-base-dir", str(tmp_path), "--cgroup-version", "2", "--parent-cgroup", "etude",
        "--cgroup", f"memory.max={(1 << 28) + (64 << 20)}", "--cgroup", "cpu.max=50000 100000",
        "--new-pid-ns", "--", "--api-sock", "api.sock",
    ]  # fmt: skip


def test_the_older_control_groups_have_other_names(tmp_path: Path) -> None:
    command = Cell(tmp_path, "vm-1", PROGRAM, Jail(cgroup_version=1)).command(Resources())
    assert any(word.startswith("memory.limit_in_bytes=") for word in command)
    assert "--cgroup" not in Cell(tmp_path, "vm-1", PROGRAM, Jail(cgroup_version=0)).command(Resources())


def test_without_a_jailer_the_program_is_started_itself(tmp_path: Path) -> None:
    command = Cell(tmp_path, "vm-1", PROGRAM, None).command(Resources())
    assert command == [str(PROGRAM), "--id", "vm-1", "--api-sock", "api.sock"]


@pytest.mark.parametrize("name", ["", "a/b", "a_b", "..", "x" * 65])
def test_names_that_the_jailer_refuses_are_refused_first(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        Cell(tmp_path, name, PROGRAM, None)


def test_a_program_with_another_name_cannot_be_jailed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="firecracker in their name"):
        Cell(tmp_path, "vm-1", Path("/opt/fc"), Jail())


def test_a_cell_is_removed_whole(tmp_path: Path) -> None:
    cell = Cell(tmp_path, "vm-1", PROGRAM, None)
    cell.make()
    (tmp_path / "image").write_text("x")
    cell.place(tmp_path / "image", "kernel")
    cell.place_copy(tmp_path / "image", "scratch")
    cell.path("scratch").write_text("changed")
    assert (tmp_path / "image").read_text() == "x"
    cell.remove()
    cell.remove()
    assert list((tmp_path / PROGRAM.name).iterdir()) == [] and (tmp_path / "image").exists()


def test_the_guest_gets_its_arguments_through_the_kernel() -> None:
    line = boot_arguments("/workspace", Resources(cpu_s=7), 1000, "pci=off")
    kernel, _, init = line.partition(" -- ")
    assert "init=/opt/etude/init" in kernel and "pci=off" in kernel
    assert init.startswith("vsock:52 --line stdio --workspace /workspace") and init.endswith(
        "--cpu-s 7 --uid 1000"
    )
    # The kernel takes 2048 bytes at most.
    assert len(line) < 1024


def test_the_guest_s_files_are_whole() -> None:
    files = guest_files()
    assert sorted(files) == ["/opt/etude/guest.pyz", "/opt/etude/init", "/opt/etude/relay.py"]
    assert files["/opt/etude/init"][0] == 0o755 and b"{directory}" not in files["/opt/etude/init"][1]
