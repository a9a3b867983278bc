"""One running container: its directory, its runsc below a guard, its line, and the watch over its memory.

A sandbox that sleeps has none, and gets a new one when it wakes. `end` frees whatever there is, however
far the start had come.

    <directory>/bundle/config.json   what it is made of
    <directory>/state/               runsc's own notes and control socket
    <directory>/image/               a checkpoint that is being written
    <directory>/pid                  process id of its gVisor kernel

What its programs and its files hold lies in one memory file of gVisor's kernel, whose size the host can
read; what they make that kernel hold itself (messages, buffers of sockets, names of files) is its private
memory. `MemoryBound` judges both. In a control group the host's kernel bounds all of it together."""

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
from typing import Literal

from etude.errors import SandboxError
from etude.kit.tasks import to_the_end
from etude.sandbox.channel import READY, Channel
from etude.sandbox.guarded import GuardedProcess
from etude.sandbox.gvisor.bundle import Interpreter, configuration
from etude.sandbox.gvisor.runsc import IMAGE, PREFIX, ROOTFS, WORK, Runsc
from etude.sandbox.inside.rights import NOBODY
from etude.sandbox.local.cgroups import REMOVE_S, ControlGroups
from etude.sandbox.types import Resources

OVERHEAD_BYTES = 256 << 20
"""What gVisor's kernel, its file server and the program inside may use beside the agent's programs."""
_MEMORY_FILE = "/memfd:runsc-memory"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryFile:
    """The memory file of one running container."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of(cls, pid: int) -> MemoryFile | None:
        """That of the gVisor kernel with this process id; None if it has ended or cannot be looked into."""
        try:
            for path in Path(f"/proc/{pid}/fd").iterdir():
                if str(path.readlink()).startswith(_MEMORY_FILE):
                    return cls(path)
        except OSError:
            # It has ended, or closed a descriptor meanwhile: the caller asks again.
            return None
        return None

    def used_bytes(self) -> int:
        """What programs and files inside hold now; 0 once the container has ended."""
        try:
            return self._path.stat().st_blocks * 512
        except OSError:
            return 0

    def kernel_bytes(self) -> int:
        """What gVisor's kernel holds beside its memory file; 0 once it has ended."""
        try:
            _, resident, shared, *_ = (self._path.parents[1] / "statm").read_text(encoding="ascii").split()
        except (OSError, ValueError):
            return 0
        return (int(resident) - int(shared)) * _PAGE_BYTES


SERVER_BYTES = 16 << 20
"""What the program inside holds itself: 9 to 12 MiB were seen."""
KERNEL_BYTES = 96 << 20
"""What gVisor's kernel may hold beside: 10 MiB at the start; 58 MiB with 20,000 files."""
STEP_BYTES = 16 << 20
"""By how much memory must grow to count as growing."""
PATIENCE_S = 2.0
"""How long a container may stay over a limit after its programs were ended."""
SHORTEST_S, LONGEST_S = 0.05, 0.25
"""Bounds of the time between two looks."""
_FASTEST_BYTES_PER_S = 2 << 30
"""How fast programs are taken to fill memory; 1.1 GiB/s was seen on two cores."""

Verdict = Literal["within", "over", "waiting", "hopeless"]
"""`over`: end the agent's processes now. `waiting`: that was done, and may need a moment."""


class MemoryBound:
    """The limits of one container, and how long it has exceeded them.

        within the limits     nothing is done
        over one of them      the agent's processes are killed
        still over, later     the sandbox ends: what its files hold nobody else can free

    gVisor's kernel gives back late what it has freed: up to `OVERHEAD_BYTES` it is tolerated, as long as it
    does not grow further. The watch looks as often as the room that is left demands.
    """

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes`: of programs and files together."""
        self.pause_s = LONGEST_S
        """When to look again."""
        self._programs_bytes = limit_bytes + SERVER_BYTES
        self._usual_bytes = self._programs_bytes + KERNEL_BYTES
        self._most_bytes = limit_bytes + OVERHEAD_BYTES
        self._tolerated_bytes = self._usual_bytes
        self._since_s: float | None = None
        self._seen_bytes = 0

    def look(self, programs_bytes: int, kernel_bytes: int, now_s: float) -> Verdict:
        """Judges what is held now."""
        total_bytes = programs_bytes + kernel_bytes
        # Once the kernel has given something back, it may not grow into it again.
        self._tolerated_bytes = max(self._usual_bytes, min(self._tolerated_bytes, total_bytes + STEP_BYTES))
        room_bytes = min(self._programs_bytes - programs_bytes, self._tolerated_bytes - total_bytes)
        self.pause_s = min(LONGEST_S, max(SHORTEST_S, room_bytes / _FASTEST_BYTES_PER_S))
        if room_bytes >= 0:
            self._since_s = None
            return "within"
        if self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s > PATIENCE_S:
            return self._after_patience(programs_bytes, total_bytes)
        elif total_bytes <= self._seen_bytes + STEP_BYTES:
            return "waiting"
        self._seen_bytes = total_bytes
        return "over"

    def _after_patience(self, programs_bytes: int, total_bytes: int) -> Verdict:
        if programs_bytes > self._programs_bytes or total_bytes > self._most_bytes:
            return "hopeless"
        self._tolerated_bytes = total_bytes + STEP_BYTES
        self._since_s = None
        return "within"


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
        """Held by a start, for whose end `end` waits."""
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
        return self._groups.procs_files(self.name)

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
