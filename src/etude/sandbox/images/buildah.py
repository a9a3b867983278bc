"""Runs the program `buildah` in its own namespaces, as a root user that has no rights on the host.

    ROOT/storage/         buildah's storage between builds: base images, and the layers of instructions
    ROOT/names.json       name -> fingerprint of the image that buildah has under it
    ROOT/work/<any>/      working directory of one build; removed with the build, or with its process
    ROOT/work/<any>/own/  its home, its result
    ROOT/work/<any>/<any> its input files: the context, base images
    ROOT/lock             shared by builds; exclusive for cleaning up

The program sees ROOT as `/tmp`. `storage`, `own` and the input files belong to the root user of the
namespaces; their parent directories belong to the host's root, so that nothing inside can replace them by
links. Any number of builds, of several processes, may share one ROOT.
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
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from etude.errors import ResourceError
from etude.kit.leftovers import ScratchDirectory, sweep
from etude.sandbox.guest_program import python_words
from etude.sandbox.inside.enclosure import FAILED, MOUNT_POINT, REASON
from etude.sandbox.inside.ids import SpareIds
from etude.sandbox.local.host_ids import BUILD_IDS
from etude.sandbox.network.proxy import EgressProxy, proxy_environment
from etude.sandbox.network.streams import AsyncioStream

_REGISTRIES = "registries.conf"
NUM_IDS = 1 << 16
OUTPUT_CHARS = 64_000
"""How much of the end of a command's output is kept."""
_ENVIRONMENT = {"_CONTAINERS_USERNS_CONFIGURED": "done", "LC_ALL": "C.UTF-8"}
"""Tells buildah that it is already root of a user namespace, and need not create one."""

OnLine = Callable[[str], object]


class Buildah:
    """buildah for one build: the build's working directory, and the storage shared by all builds."""

    def __init__(self, root: Path, work: Path, ids: SpareIds, proxy: EgressProxy | None) -> None:
        """`work`: new and empty. Raises OSError."""
        self.root = root
        self.own = work / "own"
        """The directory in which the program may write; its contents are untrusted."""
        self._work = work
        self._ids = ids
        self._proxy = proxy
        (work / _REGISTRIES).write_text('unqualified-search-registries = ["docker.io"]\n')
        self.own.mkdir(mode=0o700)
        self._chown(self.own)
        work.chmod(0o711)

    def inside(self, path: Path) -> str:
        """The path at which buildah sees a file below its root."""
        return f"{MOUNT_POINT}/{path.relative_to(self.root)}"

    async def run(self, *words: str, on_line: OnLine | None = None) -> tuple[int, str]:
        """Runs `buildah words...`; its exit status and the end of its output. Cancelled, it kills all.

        Raises ResourceError if namespaces are not available.
        """
        status, output = await self.enclose(["buildah", *self._settings(), *words], on_line)
        if status == FAILED and output.startswith(REASON):
            raise ResourceError(
                f"buildah cannot be isolated from the host: {output.strip()}", field="image",
                fix="run `etude sandbox doctor`: builds need the namespaces that the backend `local` needs",
            )  # fmt: skip
        return status, output

    def copy_in(self, source: Path) -> Path:
        """Copies a file or directory to a place where buildah may read it. Raises OSError."""
        target = self.make_folder() / "given"
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copy2(source, target)
        return self.open_folder(target)

    def make_folder(self) -> Path:
        """A new input directory, inaccessible to buildah until `open_folder`. Raises OSError."""
        folder = self._work / uuid.uuid4().hex
        folder.mkdir(mode=0o700)
        return folder

    def open_folder(self, target: Path) -> Path:
        """Makes `target`, in a folder of `make_folder`, the property of buildah's user, and the folder
        accessible. Raises OSError."""
        for folder, folders, files in os.walk(target, topdown=False):
            for name in (*folders, *files):
                self._chown(Path(folder, name))
        self._chown(target)
        target.parent.chmod(0o711)
        return target

    async def remove_leftovers(self) -> None:
        """Removes containers of killed builds. The caller holds the exclusive lock."""
        lists = self.root.glob("storage/*-containers/containers.json")
        if any(path.stat().st_size > len("[]") for path in lists):
            await self.run("rm", "--all")

    async def empty_storage(self) -> None:
        """Deletes buildah's storage from within the namespaces, as some files belong to users that exist only
        there. Raises ResourceError if that fails.
        """
        status, output = await self.enclose(["find", f"{MOUNT_POINT}/storage", "-mindepth", "1", "-delete"])
        if status:
            raise ResourceError(
                f"buildah's storage cannot be removed: {output.strip()[-500:]}", field="image",
                received=str(self.root), fix="correct the cause that the message names, then run it again",
            )  # fmt: skip

    def _settings(self) -> list[str]:
        """Options for the storage, and for short names: as in Docker, whatever this host configures."""
        places = {
            "root": f"{MOUNT_POINT}/storage",
            "runroot": self.inside(self.own / "run"),
            "registries-conf": self.inside(self._work / _REGISTRIES),
            "registries-conf-dir": self.inside(self.own / "nothing"),
            "short-name-alias-conf": self.inside(self.own / "aliases"),
        }
        return [f"--{key}={value}" for key, value in places.items()]

    async def enclose(self, command: list[str], on_line: OnLine | None = None) -> tuple[int, str]:
        """Runs any program like `run`; its exit status is FAILED if namespaces are not available."""
        ours, theirs = socket.socketpair()
        # Without a proxy nothing listens inside.
        number = -1 if self._proxy is None else theirs.fileno()
        words = [str(number), str(self.root), *self._ids.to_arguments(), "--", *command]
        with ours, theirs:
            process = await asyncio.create_subprocess_exec(
                *python_words("etude.sandbox.inside.enclosure", *words),
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
        """Serves the program's network requests by the proxy, if there is one."""
        proxy = self._proxy
        if proxy is None:
            yield
            return
        _, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, line, 1, 1)
        if not descriptors:  # there are no namespaces
            yield
            return
        server = await asyncio.start_server(
            lambda reader, writer: proxy.serve(AsyncioStream(reader, writer)),
            sock=socket.socket(fileno=descriptors[0]),
        )
        async with server:
            yield

    def _environment(self) -> dict[str, str]:
        home = self.inside(self.own)
        proxy = proxy_environment() if self._proxy is not None else {}
        path = os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        return {**_ENVIRONMENT, "PATH": path, "HOME": home, "TMPDIR": home, **proxy}

    def _chown(self, path: Path) -> None:
        """Makes one file, or a link itself, the property of the namespaces' root."""
        os.chown(path, self._ids.first_uid, self._ids.first_gid, follow_symlinks=False)


@contextlib.asynccontextmanager
async def open_buildah(root: Path, proxy: EgressProxy | None = None) -> AsyncIterator[Buildah]:
    """buildah with its storage at `root`, for one build; `proxy`: its network access.

    Raises ResourceError if buildah is missing, or this process is not root.
    """
    if shutil.which("buildah") is None:
        raise ResourceError(
            "buildah is not installed", field="image", received="buildah",
            fix="apt-get install buildah, or build the image elsewhere and import it as an OCI archive",
        )  # fmt: skip
    with open_root(root, proxy) as (buildah, lock):
        if lock.alone:
            await buildah.remove_leftovers()
        await asyncio.to_thread(lock.share)
        yield buildah


async def remove_storage(root: Path) -> None:
    """Deletes buildah's storage, which is only a cache.

    Raises ResourceError while a build runs, and if it cannot be deleted.
    """
    if not (root / "storage").exists():
        return
    with open_root(root) as (buildah, lock):
        if not lock.alone:
            raise ResourceError("a build is running", field="image", fix="wait for its end")
        await buildah.empty_storage()
        (root / "names.json").unlink(missing_ok=True)
        (root / "storage").rmdir()


@contextlib.contextmanager
def open_root(root: Path, proxy: EgressProxy | None = None) -> Iterator[tuple[Buildah, Lock]]:
    """A `Buildah` with a new working directory in `root`, and the lock on `root`, exclusive if it is free.

    Raises ResourceError if this process is not root, or if a link is in the place of a directory.
    """
    ids = find_ids()
    works = root / "work"
    root.parent.mkdir(parents=True, exist_ok=True)
    for folder, uid, gid, mode in (
        (root, 0, 0, 0o711),
        (works, 0, 0, 0o711),
        (root / "storage", ids.first_uid, ids.first_gid, 0o700),
    ):
        _make_directory(folder, uid, gid, mode)
    sweep(works)
    with ScratchDirectory(works) as work:
        descriptor = os.open(root / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            yield Buildah(root, work, ids, proxy), Lock(descriptor)
        finally:
            os.close(descriptor)


def _make_directory(path: Path, uid: int, gid: int, mode: int) -> None:
    """Creates a directory if needed and sets its owner. Raises ResourceError for anything else there."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if path.is_symlink() or not path.is_dir():
        raise ResourceError(
            "must be a directory for builds, but is a link or a file", field="image", received=str(path),
            fix="find out what created it, and remove it",
        )  # fmt: skip
    os.chown(path, uid, gid, follow_symlinks=False)
    path.chmod(mode)


class Lock:
    """The lock on a storage: exclusive, or shared by builds."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.alone = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.alone = False

    def share(self) -> None:
        """Takes the shared lock; waits for an exclusive holder, which only cleans up."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)


def find_ids() -> SpareIds:
    """65,536 ids for the users of builds, always the same ones, which own the files in the storage.

    Raises ResourceError if this process is not root, as the builds' root would then map to its user.
    """
    if os.geteuid() == 0:
        return SpareIds(BUILD_IDS, BUILD_IDS, NUM_IDS)
    raise ResourceError(
        "only root can build images from Dockerfiles", field="image", received=os.geteuid(),
        fix="build as root, or build elsewhere and import an OCI archive",
    )  # fmt: skip


async def _read(stream: asyncio.StreamReader, on_line: OnLine | None) -> str:
    """Reads a stream to its end; returns the last `OUTPUT_CHARS`."""
    kept, begun = b"", b""
    while data := await stream.read(1 << 16):
        kept = (kept + data)[-OUTPUT_CHARS:]
        if on_line is not None:
            *lines, begun = (begun + data).split(b"\n")
            begun = begun[-OUTPUT_CHARS:]
            for line in lines:
                on_line(line.decode(errors="replace"))
    return kept.decode(errors="replace")
