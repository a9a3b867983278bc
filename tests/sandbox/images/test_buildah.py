"""What buildah is run in: namespaces of its own, which end with all that they hold."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from etude.errors import ResourceError
from etude.sandbox.images.buildah import Buildah, find_ids
from etude.sandbox.inside.enclosure import FAILED
from etude.sandbox.network.log import RequestLog
from etude.sandbox.network.proxy import EgressProxy
from tests.sandbox.images.image_builders import is_running

pytestmark = pytest.mark.slow


async def enclose(
    folder: Path, script: str, proxy: EgressProxy | None = None, timeout_s: float = 120.0
) -> str:
    """What a shell writes in namespaces of its own, which see `folder` as /tmp."""
    try:
        ids = find_ids()
    except ResourceError as error:
        pytest.skip(str(error))
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        for path in (folder, work):
            os.chown(path, ids.first_uid, ids.first_gid)
    async with asyncio.timeout(timeout_s):
        status, output = await Buildah(folder, work, ids, proxy).enclose(["bash", "-c", script])
    if status == FAILED:
        pytest.skip(output)
    return output


def test_a_program_inside_is_root_of_little(tmp_path: Path) -> None:
    folder, secret = tmp_path / "folder", tmp_path / "secret"
    secret.mkdir(mode=0o700)
    (secret / "word").write_text("secret")
    script = "id -u; echo $$; pwd; echo made >work/file; grep -c : /proc/net/dev; ls -d /proc/[0-9]* | wc -l"
    uid, pid, place, num_networks, num_processes = asyncio.run(enclose(folder, script)).split()
    assert (uid, pid, place, num_networks) == ("0", "1", "/tmp", "1")
    assert int(num_processes) <= 5
    assert (folder / "work/file").read_text() == "made\n"
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
