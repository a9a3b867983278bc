"""Each sandbox has a host user of its own, also a copy."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from etude.errors import ResourceError, SandboxError
from etude.sandbox.images.image_store import LayerStore
from etude.sandbox.inside.ids import BLOCK, SpareIds
from etude.sandbox.interface import Sandbox
from etude.sandbox.local.backend import ForkServerBackend, LocalBackend
from etude.sandbox.local.doctor import find_problems
from etude.sandbox.local.host_ids import HostIds, find_host_ids
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.template import Image, Template
from tests.adversary.escape.weakened import WeakenedBackend
from tests.sandbox.images.image_builders import add, file_member
from tests.sandbox.scenes import becomes_true, copies, fork_server, on_backend

IDS = find_host_ids()
SEPARATE = pytest.mark.skipif(
    IDS.spare is None or os.geteuid() != 0, reason=IDS.reason or "needs a root that may give ids away"
)
MODERN = "6.18.1"


def host_user(sandbox: Sandbox) -> int:
    """Who a sandbox's first process is to the host."""
    assert isinstance(sandbox, MachineSandbox)
    status = Path(f"/proc/{sandbox.channel.peer_pid}/status").read_text()
    (row,) = (line for line in status.splitlines() if line.startswith("Uid:"))
    users = set(row.split()[1:])
    assert len(users) == 1, row
    return int(users.pop())


@SEPARATE
def test_copies_and_restored_sandboxes_are_users_of_their_own_and_own_their_files(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        first = await backend.create(Template({"given": "one", "folder/kept": "two"}))
        await first.commands.run("umask 077; mkdir closed; echo three > closed/made; echo four > /tmp/made")
        await first.commands.run("chmod 600 given; rm folder/kept")
        (copy,) = await copies(first)
        snapshot = await first.create_snapshot("filesystem")
        restored = await backend.create(snapshot=snapshot.id)
        sandboxes = [first, copy, restored]
        users = {host_user(sandbox) for sandbox in sandboxes}
        assert len(users) == 3 and min(users) >= 0x7000_0000
        await restored.pause("filesystem")
        await restored.resume()
        for sandbox in sandboxes:
            said = await sandbox.commands.run(
                "stat -c %u:%g given folder closed closed/made /tmp/made; id -u;"
                "echo more >> closed/made; echo more >> given; echo back > folder/kept; cat closed/made"
            )
            assert said.stdout.split() == ["1000:1000"] * 5 + ["1000", "three", "more"], said
        (grandchild,) = await copies(copy)
        assert (await grandchild.files.read("folder/kept")) == b"back\n"

    on_backend(tmp_path, scenario)


@SEPARATE
@pytest.mark.parametrize("user", ["root", "worker"])
def test_an_images_files_belong_to_the_sandboxs_user_whoever_owned_them(tmp_path: Path, user: str) -> None:
    store = LayerStore(tmp_path / "images")
    ours, theirs = file_member("srv/ours", b"one"), file_member("srv/deep/theirs", b"two", mode=0o600)
    ours[0].uid = ours[0].gid = 0
    passwd = file_member("etc/passwd", b"root:x:0:0::/:/bin/sh\nworker:x:77:77::/srv:/bin/sh\n")
    image = Image("made", (add(store, ours, theirs, passwd),), workdir="/srv", user=user)

    async def run() -> None:
        backend = LocalBackend(tmp_path / "state", tmp_path / "images")
        try:
            sandboxes: list[Sandbox] = [await backend.create(Template({"new": "x"}, image=image))]
            sandboxes += await copies(sandboxes[0])
            sandboxes.append(await backend.create(Template({"plain": "x"})))
            assert len({host_user(sandbox) for sandbox in sandboxes}) == 3
            for sandbox in sandboxes[:2]:
                assert await sandbox.files.read("deep/theirs") == b"two"
                await sandbox.files.write("deep/theirs", b"changed")
                await sandbox.files.remove("ours")
                assert sorted((await sandbox.diff()).items()) == [("deep/theirs", b"changed"), ("ours", None)]
        finally:
            await backend.close()

    asyncio.run(run())


@SEPARATE
def test_the_ids_of_sandboxes_that_ended_are_given_to_others(tmp_path: Path) -> None:
    async def run() -> None:
        backend = WeakenedBackend(tmp_path, frozenset({"blocks of 4096 ids"}))
        try:
            for _ in range(20):
                await (await backend.create()).kill()
            kept = [await backend.create() for _ in range(4)]
            with pytest.raises(SandboxError, match="at most 8 sandboxes at a time"):
                kept += [await backend.create() for _ in range(8)]
        finally:
            await backend.close()

    asyncio.run(run())


def held_blocks() -> list[str]:
    """Names of the blocks that fork servers of this machine hold."""
    rows = (row.split() for row in Path("/proc/net/unix").read_text().splitlines()[1:])
    return [row[7] for row in rows if len(row) == 8 and row[7].startswith("@etude-ids-")]


@SEPARATE
def test_fork_servers_share_no_ids_and_a_killed_one_leaves_its_block_to_others(tmp_path: Path) -> None:
    before = set(held_blocks())

    async def scenario(backend: ForkServerBackend) -> None:
        another = LocalBackend(tmp_path / "another")
        try:
            users = [host_user(await one.create()) for one in (backend, another)]
            assert abs(users[0] - users[1]) >= BLOCK - 1 or users[0] // BLOCK != users[1] // BLOCK
            blocks = {f"@etude-ids-{user // BLOCK * BLOCK}" for user in users}
            assert blocks <= set(held_blocks()) - before
            for one in (backend, another):
                os.kill(fork_server(one), signal.SIGKILL)
            assert await becomes_true(lambda: not blocks & set(held_blocks()))
        finally:
            await another.close()

    on_backend(tmp_path, scenario)


class MappedByPrograms(LocalBackend):
    """Its ids are mapped by programs, as a plain user's are by newuidmap and newgidmap."""

    def __init__(self, state: Path, programs: Sequence[Path]) -> None:
        super().__init__(state)
        self._spare_ids = SpareIds(0x7FF0_0000, 0x7FF8_0000, 2 * BLOCK, tuple(map(str, programs)))


@SEPARATE
@pytest.mark.parametrize("refuses", [False, True])
def test_a_plain_users_ids_are_mapped_by_programs(tmp_path: Path, refuses: bool) -> None:
    programs = [tmp_path / "uid_map", tmp_path / "gid_map"]
    write = 'exec 3>/proc/$1/${0##*/}; shift; printf "%s %s %s\\n%s %s %s\\n" "$@" >&3'
    for program in programs:
        program.write_text(f"#!/bin/sh\n{'exit 1' if refuses else write}\n")
        program.chmod(0o755)

    async def run() -> None:
        backend = MappedByPrograms(tmp_path / "state", programs)
        try:
            if refuses:
                with pytest.raises(ResourceError, match="uid_map ended with 1"):
                    await backend.create()
                return
            sandbox = await backend.create(Template({"given": "one"}))
            assert 0x7FF0_0000 <= host_user(sandbox) < 0x7FF0_0000 + 2 * BLOCK
            assert (await sandbox.commands.run("echo two >> given; cat given")).stdout == "onetwo\n"
        finally:
            await backend.close()

    asyncio.run(run())


@pytest.mark.skipif(bool(find_problems()), reason="; ".join(find_problems()) or "local works")
def test_without_ids_to_give_away_sandboxes_work_and_say_that_they_share(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        assert isinstance(backend, LocalBackend)
        backend._spare_ids = None
        assert backend.capabilities().neighbours_share
        sandboxes = [await backend.create(Template({"given": "one"})) for _ in range(2)]
        assert len({host_user(sandbox) for sandbox in sandboxes}) == 1
        (copy,) = await copies(sandboxes[0])
        assert (await copy.commands.run("echo two >> given; cat given; id -u")).stdout == "onetwo\n1000\n"

    on_backend(tmp_path, scenario)


def find(
    tmp_path: Path,
    euid: int = 4711,
    release: str = MODERN,
    maps: str = "0 0 4294967295",
    sub: str = "",
    no_new_privs: int = 0,
) -> HostIds:
    """What is found on a made-up machine."""
    for name in ("uid_map", "gid_map"):
        (tmp_path / name).write_text(f"{maps}\n")
    (tmp_path / "status").write_text(f"NoNewPrivs:\t{no_new_privs}\nSeccomp:\t0\n")
    (tmp_path / "subuid").write_text(sub)
    (tmp_path / "subgid").write_text(sub.replace("100000", "300000"))
    return find_host_ids(euid, tmp_path, tmp_path, release, path=str(tmp_path))


def test_ids_are_found_where_there_are_any_and_else_the_reason_and_the_fix(tmp_path: Path) -> None:
    assert "older than Linux 6.3" in find(tmp_path, 0, release="6.1.0-13-amd64").reason
    assert find(tmp_path, 0).spare == SpareIds(0x7000_0000, 0x7000_0000, 0x0FFD_0000)
    assert "map them" in find(tmp_path, 0, maps="0 100000 65536").reason
    assert "newuidmap is missing" in find(tmp_path).reason
    for name in ("newuidmap", "newgidmap"):
        (tmp_path / name).touch(mode=0o755)
    assert "no_new_privs" in find(tmp_path, sub="4711:100000:65536\n", no_new_privs=1).reason
    assert "--add-subuids" in find(tmp_path).reason
    assert "--add-subuids" in find(tmp_path, sub="4711:100000:4095\nother:100000:65536\n").reason
    found = find(tmp_path, sub="4711:100000:65536\n").spare
    assert found is not None
    assert (found.first_uid, found.first_gid, found.num) == (100000, 300000, 65536)
    assert found.programs == (str(tmp_path / "newuidmap"), str(tmp_path / "newgidmap"))
    assert SpareIds.from_arguments(found.to_arguments()) == found
    unmapped = find(tmp_path, maps="0 0 165535", sub="4711:100000:65536\n")
    assert "no ids 100000 to 165535" in unmapped.reason
    unmapped = find(tmp_path, maps="0 0 300000", sub="4711:100000:65536\n")
    assert (unmapped.spare, "no ids 300000 to 365535" in unmapped.reason) == (None, True)


@pytest.mark.parametrize(
    ("programs", "has_images", "share"),
    [((), True, False), (("newuidmap", "newgidmap"), False, False), (("newuidmap", "newgidmap"), True, True)],
)
def test_sandboxes_with_an_image_share_unless_root_gives_ids(
    tmp_path: Path, programs: tuple[str, ...], has_images: bool, share: bool
) -> None:
    backend = LocalBackend(tmp_path, tmp_path / "images" if has_images else None)
    backend._spare_ids = SpareIds(100000, 100000, 65536, programs)
    assert backend.capabilities().neighbours_share is share
