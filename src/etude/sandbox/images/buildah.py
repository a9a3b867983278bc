"""Runs the program `buildah`, enclosed: as root of namespaces of its own, a user without rights to the host.

    ROOT/storage/     what buildah keeps between builds: base images, and what each instruction made
    ROOT/names.json   name -> what buildah has under it, as `Base.mark`
    ROOT/work/<any>/  one build each: its context, its result; goes with the build, or with its process
    ROOT/lock         shared by builds; held alone by what tidies up

The program sees ROOT as `/tmp`. Any number of builds, of several processes, may share one ROOT.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from etude.errors import ResourceError
from etude.kit.leftovers import ScratchDirectory, sweep
from etude.sandbox.inside.enclosure import FAILED, PLACE, REASON
from etude.sandbox.inside.ids import Spare
from etude.sandbox.local.host_ids import BUILD_IDS, find_host_ids
from etude.sandbox.network.environment import proxy_environment
from etude.sandbox.network.proxy import EgressProxy
from etude.sandbox.network.streams import AsyncioStream

_REGISTRIES = "registries.conf"
NUM_IDS = 1 << 16
OUTPUT_CHARS = 64_000
"""Of one command's output, the end is kept."""
_LAUNCH = """
import sys
sys.path.insert(0, sys.argv[1])
from etude.sandbox.inside.enclosure import main
main(sys.argv[2:])
"""
_SOURCE = str(Path(__file__).resolve().parents[3])
_ENVIRONMENT = {"_CONTAINERS_USERNS_CONFIGURED": "done", "LC_ALL": "C.UTF-8"}
"""It is root of a user namespace already, and need not make one."""

OnLine = Callable[[str], object]


class Buildah:
    """One build's use of buildah: its directory `work`, and what buildah keeps for all."""

    def __init__(self, root: Path, work: Path, ids: Spare, proxy: EgressProxy | None) -> None:
        self.root = root
        self.work = work
        """For files that go in and come out."""
        self._ids = ids
        self._proxy = proxy

    def inside(self, path: Path) -> str:
        """Where buildah sees a file of `work`."""
        return f"{PLACE}/{path.relative_to(self.root)}"

    async def run(self, *words: str, on_line: OnLine | None = None) -> tuple[int, str]:
        """Runs `buildah words...`: its exit status and the end of what it wrote. Cancelled, it kills all.

        Raises ResourceError if there can be no namespaces.
        """
        status, output = await self.enclose(["buildah", *self._settings(), *words], on_line)
        if status == FAILED and output.startswith(REASON):
            raise ResourceError(
                f"buildah cannot be kept apart from the host: {output.strip()}", field="image",
                fix="run `etude sandbox doctor`: builds need the namespaces that the backend `local` needs",
            )  # fmt: skip
        return status, output

    def give(self, source: Path, name: str) -> Path:
        """Copies a file or directory to where buildah may read it. Raises OSError."""
        target = self.work / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copy2(source, target)
        self._own(target)
        return target

    async def tidy(self) -> None:
        """Removes what killed builds left; for the one that holds the lock alone."""
        lists = self.root.glob("storage/*-containers/containers.json")
        if any(path.stat().st_size > len("[]") for path in lists):
            await self.run("rm", "--all")

    async def remove_storage(self) -> None:
        """Removes what buildah keeps, some of it owned by users that only the namespaces have."""
        await self.enclose(["rm", "-rf", f"{PLACE}/storage", f"{PLACE}/names.json"])

    def _settings(self) -> list[str]:
        """Where its storage lies, and how it reads short names: as Docker does, whatever files say here."""
        places = {
            "root": f"{PLACE}/storage",
            "runroot": self.inside(self.work / "run"),
            "registries-conf": self.inside(self.work / _REGISTRIES),
            "registries-conf-dir": self.inside(self.work / "nothing"),
            "short-name-alias-conf": self.inside(self.work / "aliases"),
        }
        return [f"--{key}={value}" for key, value in places.items()]

    async def enclose(self, command: list[str], on_line: OnLine | None = None) -> tuple[int, str]:
        """Runs any program so. See `run`; FAILED where there can be no namespaces."""
        ours, theirs = socket.socketpair()
        words = [_SOURCE, str(theirs.fileno()), str(self.root), *self._ids.words(), "--", *command]
        with ours, theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-B", "-c", _LAUNCH, *words,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env=self._environment(), pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
            theirs.close()
            assert process.stdout is not None
            try:
                async with self._served(ours):
                    output = await _read(process.stdout, on_line)
                return await process.wait(), output
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                # The pipe ends with the last process that the kernel kills.
                await asyncio.shield(asyncio.gather(process.wait(), process.stdout.read()))

    @contextlib.asynccontextmanager
    async def _served(self, line: socket.socket) -> AsyncIterator[None]:
        """Serves what asks for the network inside, if anything may."""
        _, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, line, 1, 1)
        listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        if self._proxy is None or not listeners:
            for listener in listeners:
                listener.close()
            yield
            return
        proxy = self._proxy
        server = await asyncio.start_server(
            lambda reader, writer: proxy.serve(AsyncioStream(reader, writer)), sock=listeners[0]
        )
        async with server:
            yield

    def _environment(self) -> dict[str, str]:
        home = self.inside(self.work)
        proxy = proxy_environment() if self._proxy is not None else {}
        path = os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        return {**_ENVIRONMENT, "PATH": path, "HOME": home, "TMPDIR": home, **proxy}

    def _own(self, path: Path) -> None:
        """Makes files the property of root inside."""
        if os.geteuid() != 0:
            return
        owner = (self._ids.first_uid, self._ids.first_gid)
        os.lchown(path, *owner)
        for folder, folders, files in os.walk(path):
            for name in (*folders, *files):
                os.lchown(Path(folder, name), *owner)


@contextlib.asynccontextmanager
async def open_buildah(root: Path, proxy: EgressProxy | None = None) -> AsyncIterator[Buildah]:
    """Buildah with its storage at `root`, for one build; `proxy`: the way out of its network.

    Raises ResourceError if buildah is missing, or this machine has no ids for its users.
    """
    if shutil.which("buildah") is None:
        raise ResourceError(
            "buildah is not installed", field="image", received="buildah",
            fix="apt-get install buildah, or build the image elsewhere and import it as an OCI archive",
        )  # fmt: skip
    ids = find_ids()
    works = root / "work"
    works.mkdir(parents=True, exist_ok=True)
    sweep(works)
    with ScratchDirectory(works) as work, _lock(root) as lock:
        if os.geteuid() == 0:
            for folder in (root, works, work):
                os.chown(folder, ids.first_uid, ids.first_gid)
        (work / _REGISTRIES).write_text('unqualified-search-registries = ["docker.io"]\n')
        buildah = Buildah(root, work, ids, proxy)
        if lock.alone:
            await buildah.tidy()
        await asyncio.to_thread(lock.share)
        yield buildah


async def remove_storage(root: Path) -> None:
    """Removes what buildah keeps to be faster. Raises ResourceError while something is being built."""
    if not (root / "storage").exists():
        return
    with _lock(root) as lock, ScratchDirectory(root / "work") as work:
        if not lock.alone:
            raise ResourceError("images are being built", field="image", fix="wait until they are")
        await Buildah(root, work, find_ids(), None).remove_storage()


class _Lock:
    """A lock on a storage: held alone, or shared by builds."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.alone = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.alone = False

    def share(self) -> None:
        """Waits for one that holds it alone, which takes no longer than tidying up."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)


@contextlib.contextmanager
def _lock(root: Path) -> Iterator[_Lock]:
    descriptor = os.open(root / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        yield _Lock(descriptor)
    finally:
        os.close(descriptor)


def find_ids() -> Spare:
    """65,536 ids for the users of builds, the same each time: what they leave belongs to them."""
    if os.geteuid() == 0:
        return Spare(BUILD_IDS, BUILD_IDS, NUM_IDS)
    found = find_host_ids()
    if found.spare is None:
        raise ResourceError(
            f"there are no users for builds: {found.reason}", field="image", received=os.geteuid(),
            fix="see to that, or build as root",
        )  # fmt: skip
    return found.spare


async def _read(stream: asyncio.StreamReader, on_line: OnLine | None) -> str:
    """Reads to the end; returns the end of it."""
    kept, begun = b"", b""
    while data := await stream.read(1 << 16):
        kept = (kept + data)[-OUTPUT_CHARS:]
        if on_line is not None:
            *lines, begun = (begun + data).split(b"\n")
            begun = begun[-OUTPUT_CHARS:]
            for line in lines:
                on_line(line.decode(errors="replace"))
    return kept.decode(errors="replace")
