"""The namespaces in which buildah runs, which end with all their processes and mounts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.errors import ResourceError
from etude.sandbox.images.buildah import Buildah, find_ids, open_buildah, open_root, remove_storage
from etude.sandbox.inside.enclosure import FAILED
from etude.sandbox.network.log import RequestLog
from etude.sandbox.network.proxy import EgressProxy
from tests.sandbox.images.image_builders import is_running

pytestmark = pytest.mark.slow


async def enclose(
    folder: Path, script: str, proxy: EgressProxy | None = None, timeout_s: float = 120.0
) -> str:
    """What a shell writes in namespaces of its own, which see `folder` as /tmp."""
    with as_root(folder, proxy) as buildah:
        async with asyncio.timeout(timeout_s):
            status, output = await buildah.enclose(["bash", "-c", script])
        if status == FAILED:
            pytest.skip(output)
        return output


@contextlib.contextmanager
def as_root(folder: Path, proxy: EgressProxy | None = None) -> Iterator[Buildah]:
    """Skips the test of a plain user."""
    try:
        find_ids()
    except ResourceError as error:
        pytest.skip(str(error))
    with open_root(folder, proxy) as (buildah, _):
        yield buildah


def test_what_leads_to_the_files_of_builds_is_out_of_their_reach(tmp_path: Path) -> None:
    output = asyncio.run(
        enclose(
            tmp_path / "root",
            "echo $HOME; for path in /tmp /tmp/work ${HOME%/own}; do"
            " touch $path/made; ln -s /etc $path/link; mv $path/* /tmp/moved; done 2>/dev/null;"
            " touch $HOME/mine /tmp/storage/mine && echo done",
        )
    )
    assert re.fullmatch(r"/tmp/work/\w+/own\ndone\n", output)
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["lock", "storage", "work"]
    assert list((tmp_path / "root/work").iterdir()) == []


@pytest.mark.parametrize("name", ["work", "storage"])
def test_a_link_in_place_of_a_directory_is_refused_and_not_followed(tmp_path: Path, name: str) -> None:
    victim, root = tmp_path / "victim", tmp_path / "root"
    (victim / "folder").mkdir(parents=True)
    root.mkdir()
    (root / name).symlink_to(victim)
    with pytest.raises(ResourceError, match="is a link or a file"), as_root(root):
        pass
    assert (victim / "folder").is_dir()
    assert victim.stat().st_uid == os.geteuid()


def test_what_a_build_is_given_belongs_to_it_and_what_links_name_does_not(tmp_path: Path) -> None:
    context, secret = tmp_path / "context", tmp_path / "secret"
    (context / "deep").mkdir(parents=True)
    (context / "deep/file").write_text("x")
    (context / "deep/link").symlink_to(secret)
    secret.write_text("y")
    with as_root(tmp_path / "root") as buildah:
        given = buildah.copy_in(context)
        first = find_ids().first_uid
        for path in (given, given / "deep", given / "deep/file", given / "deep/link"):
            assert path.lstat().st_uid == first
        assert secret.stat().st_uid == given.parent.stat().st_uid == os.geteuid()


def test_a_storage_goes_whole_or_its_removal_fails(tmp_path: Path) -> None:
    with as_root(tmp_path / "root"):
        made = tmp_path / "root/storage/layer"
        made.mkdir()
        (made / "file").write_text("x")
        os.chown(made, find_ids().first_uid, find_ids().first_gid)
    made.chmod(0o700)
    os.chown(made, 0, 0)  # of nobody that is known inside
    with pytest.raises(ResourceError, match="cannot be removed"):
        asyncio.run(remove_storage(tmp_path / "root"))
    os.chown(made, find_ids().first_uid, find_ids().first_gid)
    asyncio.run(remove_storage(tmp_path / "root"))
    assert not (tmp_path / "root/storage").exists()


def test_a_plain_user_is_told_who_can_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "buildah").touch(0o755)

    async def run() -> None:
        async with open_buildah(tmp_path / "root"):
            pass

    with pytest.raises(ResourceError, match="build as root, or build elsewhere and import an OCI archive"):
        asyncio.run(run())
    assert not (tmp_path / "root").exists()


def test_a_program_that_is_not_there_is_no_lack_of_namespaces(tmp_path: Path) -> None:
    with as_root(tmp_path) as buildah:
        status, output = asyncio.run(buildah.enclose(["no-such-program"]))
    assert (status, "no-such-program cannot be started: " in output) == (127, True)


def test_a_program_inside_is_root_of_little(tmp_path: Path) -> None:
    folder, secret = tmp_path / "folder", tmp_path / "secret"
    secret.mkdir(mode=0o700)
    (secret / "word").write_text("secret")
    script = "id -u; echo $$; pwd; echo made >$HOME/file; cat $HOME/file; grep -c : /proc/net/dev"
    script += "; ls -d /proc/[0-9]* | wc -l"
    uid, pid, place, made, num_networks, num_processes = asyncio.run(enclose(folder, script)).split()
    assert (uid, pid, place, made, num_networks) == ("0", "1", "/tmp", "made", "1")
    assert int(num_processes) <= 5
    output = asyncio.run(
        enclose(folder, f"cat {secret}/word; echo x >>/etc/hostname; echo 1 >/proc/sys/vm/swappiness")
    )
    assert "secret\n" not in output.splitlines()
    assert output.count("denied") + output.count("No such file") + output.count("not permitted") == 3


def test_what_it_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    asyncio.run(enclose(tmp_path, "setsid sleep 1020 & true"))
    assert not is_running("sleep", "1020")
    with pytest.raises(TimeoutError):
        asyncio.run(enclose(tmp_path, "setsid sleep 1021 & sleep 1022", timeout_s=5.0))
    assert not is_running("sleep", "1021")
    assert not is_running("sleep", "1022")


ASK = r"""exec 3<>/dev/tcp/127.0.0.1/3128 || exit
printf 'GET http://{0}/ HTTP/1.1\r\nHost: {0}\r\nConnection: close\r\n\r\n' >&3
cat <&3"""


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A web server."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
    await writer.drain()
    writer.close()


def test_the_network_is_reached_by_the_proxy_alone(tmp_path: Path) -> None:
    lines: list[str] = []

    async def run() -> None:
        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            address = f"127.0.0.1:{port}"
            proxy = EgressProxy([address], RequestLog(lines.append), "a build", allow_private=[address])
            assert (await enclose(tmp_path, ASK.format(address), proxy)).endswith("hello")
            assert "403" in await enclose(tmp_path, ASK.format("127.0.0.1:1"), proxy)
            assert len(lines) == 2
            assert "refused" in await enclose(tmp_path, ASK.format(address))
            assert "refused" in await enclose(tmp_path, f"exec 3<>/dev/tcp/127.0.0.1/{port}", proxy)

    asyncio.run(run())
