"""One running container: its directory, its runsc below a guard, its line, and the watch over it.

A sandbox that sleeps has none, and gets a new one when it wakes. `end` frees whatever there is, however
far the start had come.

    <directory>/bundle/config.json   what it is made of
    <directory>/state/               runsc's own notes and control socket
    <directory>/image/               a checkpoint that is being written
    <directory>/pid                  process id of its gVisor kernel
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from etude.errors import SandboxError
from etude.kit.tasks import to_the_end
from etude.sandbox.channel import READY, Channel
from etude.sandbox.guarded import GuardedProcess
from etude.sandbox.gvisor.bundle import Interpreter, configuration
from etude.sandbox.gvisor.entering import IMAGE, PREFIX, ROOTFS, WORK
from etude.sandbox.gvisor.memory import MemoryBound, MemoryFile
from etude.sandbox.gvisor.runsc import Runsc
from etude.sandbox.inside.rights import NOBODY
from etude.sandbox.local.cgroups import REMOVE_S, ControlGroups
from etude.sandbox.types import Resources

IMAGE_FILES = ("checkpoint.img", "pages_meta.img", "pages.img")
LAST_WORDS_S = 0.5


class Container:
    """A container of one sandbox. `start` it once; `end` it in any case."""

    def __init__(
        self,
        name: str,
        directory: Path,
        runsc: Runsc,
        interpreter: Interpreter,
        rootfs: Path,
        groups: ControlGroups | None,
    ) -> None:
        self.name = name
        self.directory = directory
        self.ending = ""
        """Why the watch over its memory ended it, if it did: the agent's doing."""
        self._runsc = runsc
        self._interpreter = interpreter
        self._rootfs = rootfs
        self._process: GuardedProcess | None = None
        self._spawning = asyncio.Lock()
        """Held by a start, which whoever ends the container waits for."""
        self._groups = groups
        self._watch: asyncio.Task[None] | None = None

    async def start(
        self, resources: Resources, hostname: str, image: Sequence[Path] = (), first_id: int = READY + 1
    ) -> Channel:
        """Starts it, out of the files of a checkpoint if there are any. Raises SandboxError.

        The caller waits for the program inside: `ready`, or the answer to `hello` after a restore.
        """
        ours, theirs = socket.socketpair()
        try:
            # What a cancelled caller left half-made would be nobody's.
            async with self._spawning:
                await to_the_end(self._spawn(resources, hostname, image, theirs))
        except BaseException:
            ours.close()
            raise
        return Channel(ours, self.name, first_id)

    async def _spawn(
        self, resources: Resources, hostname: str, image: Sequence[Path], line: socket.socket
    ) -> None:
        with line:
            control = await asyncio.to_thread(self._prepare, resources, hostname, image)
            binds = {WORK: self.directory, ROOTFS: self._rootfs}
            if self._interpreter.is_apart:
                binds[PREFIX] = Path(self._interpreter.prefix)
            binds.update({f"{IMAGE}/{path.name}": path for path in image})
            start = ["restore", f"--image-path={IMAGE}"] if image else ["run"]
            words = [*start, f"--bundle={WORK}/bundle", f"--pid-file={WORK}/pid", self.name]
            self._process = await self._runsc.spawn(words, binds, control, line.fileno())

    def _prepare(self, resources: Resources, hostname: str, image: Sequence[Path]) -> list[Path]:
        """The files by which its processes enter their control groups; none where there are no groups."""
        self.directory.mkdir(mode=0o755)
        for name in ("bundle", "state", "image"):
            (self.directory / name).mkdir(mode=0o755)
        config = json.dumps(configuration(self._interpreter, resources, hostname))
        (self.directory / "bundle" / "config.json").write_text(config, encoding="utf-8")
        for path in image:
            path.chmod(0o644)
        if os.geteuid() == 0:
            for path in (self.directory, *self.directory.iterdir()):
                os.chown(path, NOBODY, NOBODY)
        if self._groups is None:
            return []
        self._groups.create(self.name)
        self._groups.limit(self.name, resources)
        return self._groups.entrances(self.name)

    async def checkpoint(self, target: Path, deadline_s: float) -> None:
        """Writes the state into `target`; the container goes on. Raises SandboxError."""
        # Uncompressed: twice as fast.
        how = (f"--image-path={WORK}/image", "--leave-running", "--compression=none")
        await self._runsc.call(["checkpoint", *how, self.name], {WORK: self.directory}, deadline_s)
        await asyncio.to_thread(self._hand_over, target)

    def _hand_over(self, target: Path) -> None:
        """Takes the files from the user who wrote them. They are readable by all so that the same user may
        read them at a restore; the directories above them are not.
        """
        for name in IMAGE_FILES:
            path = self.directory / "image" / name
            if not path.is_file() or path.is_symlink():
                raise SandboxError("runsc wrote no whole checkpoint", field="runsc", received=name)
            if os.geteuid() == 0:
                os.chown(path, 0, 0)
            path.chmod(0o644)
            shutil.move(path, target / name)

    async def last_words(self) -> str:
        """The end of what runsc and the program inside printed; of one that is just ending, all of it."""
        if self._process is None:
            return ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._process.wait()
        return self._process.log()

    def watch(self, resources: Resources, channel: Channel, on_end: Callable[[], None]) -> None:
        """From now on memory is bounded, and `on_end` called when the container ends by itself."""
        assert self._process is not None, "only what was started is watched"
        limit_bytes = resources.memory_bytes + resources.disk_bytes
        self._watch = asyncio.ensure_future(self._watch_over(self._process, limit_bytes, channel, on_end))

    async def _watch_over(
        self, process: GuardedProcess, limit_bytes: int, channel: Channel, on_end: Callable[[], None]
    ) -> None:
        bound = asyncio.ensure_future(self._bound_memory(limit_bytes, channel, process))
        try:
            await process.wait()
            on_end()
        finally:
            bound.cancel()

    async def _bound_memory(self, limit_bytes: int, channel: Channel, process: GuardedProcess) -> None:
        memory = None
        bound = MemoryBound(limit_bytes)
        while True:
            await asyncio.sleep(bound.pause_s)
            memory = memory or self._memory_file()
            if memory is None:
                continue
            verdict = bound.look(memory.used_bytes(), memory.kernel_bytes(), time.monotonic())
            if verdict == "over" and not channel.closed:
                channel.send({"op": "exhausted", "id": channel.next_id()})
            elif verdict == "hopeless":
                self.ending = f"the sandbox's files exceed its {limit_bytes} bytes of memory and disk"
                channel.close(self.ending)
                await process.kill()
                return

    def _memory_file(self) -> MemoryFile | None:
        try:
            return MemoryFile.of(int((self.directory / "pid").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            # Not written yet.
            return None

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended runsc: nothing inside can send it one."""
        return self._process is not None and self._process.was_killed

    @property
    def num_oom_kills(self) -> int:
        """How many of its processes the host's kernel has ended for want of memory."""
        return 0 if self._groups is None else self._groups.num_killed_for_memory(self.name)

    async def end(self) -> None:
        """Ends everything that it consists of, and removes its directory. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
        async with self._spawning:
            if self._process is not None:
                await self._process.kill()
            await asyncio.to_thread(self._clear)

    def _clear(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._groups is not None:
            self._groups.remove(self.name, REMOVE_S)
