"""One running container: its directory, its runsc below a guard, its line, and its memory watchdog.

A paused sandbox has no container, and gets a new one on resume. `end` frees all resources, however far the
start had come.

    <directory>/bundle/config.json   its configuration
    <directory>/state/               runsc's own state and control socket
    <directory>/image/               a checkpoint while it is written
    <directory>/pid                  process id of its gVisor kernel

The memory of its programs and files is one memory file of gVisor's kernel, whose size the host can read; what
this kernel uses for them itself (messages, buffers of sockets, names of files) is its private memory.
`MemoryBound` bounds both. In a control group the host's kernel bounds the sum."""

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
from etude.kit.tasks import finish_despite_cancel
from etude.sandbox.channel import READY, Channel
from etude.sandbox.guarded import GuardedProcess
from etude.sandbox.gvisor.bundle import Interpreter, configuration
from etude.sandbox.gvisor.runsc import IMAGE, PREFIX, ROOTFS, WORK, Runsc
from etude.sandbox.inside.rights import NOBODY
from etude.sandbox.local.cgroups import REMOVE_S, ControlGroups
from etude.sandbox.types import Resources

OVERHEAD_BYTES = 256 << 20
"""Memory of gVisor's kernel, its file server and the program inside, besides the agent's programs."""
_MEMORY_FILE = "/memfd:runsc-memory"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryFile:
    """The memory file of one running container."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of(cls, pid: int) -> MemoryFile | None:
        """The file of the gVisor kernel with this process id; None if it has ended or cannot be inspected."""
        try:
            for path in Path(f"/proc/{pid}/fd").iterdir():
                if str(path.readlink()).startswith(_MEMORY_FILE):
                    return cls(path)
        except OSError:
            # It has ended, or closed a descriptor meanwhile: the caller tries again.
            return None
        return None

    def used_bytes(self) -> int:
        """Bytes of programs and files inside; 0 once the container has ended."""
        try:
            return self._path.stat().st_blocks * 512
        except OSError:
            return 0

    def kernel_bytes(self) -> int:
        """Private bytes of gVisor's kernel, besides its memory file; 0 once it has ended."""
        try:
            _, resident, shared, *_ = (self._path.parents[1] / "statm").read_text(encoding="ascii").split()
        except (OSError, ValueError):
            return 0
        return (int(resident) - int(shared)) * _PAGE_BYTES


SERVER_BYTES = 16 << 20
"""Memory of the program inside: 9 to 12 MiB were measured."""
KERNEL_BYTES = 96 << 20
"""Private memory of gVisor's kernel: 10 MiB at the start; 58 MiB with 20,000 files."""
STEP_BYTES = 16 << 20
"""Least increase that counts as growth."""
PATIENCE_S = 2.0
"""How long a container may stay over a limit after its programs were killed."""
SHORTEST_S, LONGEST_S = 0.05, 0.25
"""Bounds of the time between two checks."""
_FASTEST_BYTES_PER_S = 2 << 30
"""Assumed maximal rate at which programs fill memory; 1.1 GiB/s was measured on two cores."""

Verdict = Literal["within", "over", "waiting", "hopeless"]
"""`over`: kill the agent's processes now. `waiting`: for that to take effect. `hopeless`: end the sandbox."""


class MemoryBound:
    """The memory limits of one container, and how long it has exceeded them.

        within the limits     no action
        over one of them      the agent's processes are killed
        still over, later     the sandbox ends: the rest is memory of its files, which nothing else frees

    gVisor's kernel returns freed memory late: up to `OVERHEAD_BYTES` are tolerated, as long as they do not
    grow further. The interval of checks depends on the room that is left.
    """

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes`: of programs and files together."""
        self.pause_s = LONGEST_S
        """Time until the next check."""
        self._programs_bytes = limit_bytes + SERVER_BYTES
        self._usual_bytes = self._programs_bytes + KERNEL_BYTES
        self._max_bytes = limit_bytes + OVERHEAD_BYTES
        self._tolerated_bytes = self._usual_bytes
        self._since_s: float | None = None
        self._seen_bytes = 0

    def check(self, programs_bytes: int, kernel_bytes: int, now_s: float) -> Verdict:
        """Compares the current use with the limits."""
        total_bytes = programs_bytes + kernel_bytes
        # Once the kernel has returned memory, it may not grow to the old size again.
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
        if programs_bytes > self._programs_bytes or total_bytes > self._max_bytes:
            return "hopeless"
        self._tolerated_bytes = total_bytes + STEP_BYTES
        self._since_s = None
        return "within"


IMAGE_FILES = ("checkpoint.img", "pages_meta.img", "pages.img")
LAST_OUTPUT_S = 0.5


class Container:
    """A container of one sandbox. Call `start` once, and `end` in any case."""

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
        self.end_reason = ""
        """Why the memory watchdog ended it, which is a failure of the agent; empty if it did not."""
        self._runsc = runsc
        self._interpreter = interpreter
        self._rootfs = rootfs
        self._process: GuardedProcess | None = None
        self._spawning = asyncio.Lock()
        """Locked during a start, for which `end` waits."""
        self._groups = groups
        self._watch: asyncio.Task[None] | None = None

    async def start(
        self, resources: Resources, hostname: str, image: Sequence[Path] = (), first_id: int = READY + 1
    ) -> Channel:
        """Starts it, from the files of a checkpoint if there are any. Raises SandboxError.

        The caller waits for the program inside: `ready`, or the answer to `hello` after a restore.
        """
        ours, theirs = socket.socketpair()
        try:
            # Completed even if the caller is cancelled, so that `end` knows what to free.
            async with self._spawning:
                await finish_despite_cancel(self._spawn(resources, hostname, image, theirs))
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
            if self._interpreter.is_outside_usr:
                binds[PREFIX] = Path(self._interpreter.prefix)
            binds.update({f"{IMAGE}/{path.name}": path for path in image})
            start = ["restore", f"--image-path={IMAGE}"] if image else ["run"]
            words = [*start, f"--bundle={WORK}/bundle", f"--pid-file={WORK}/pid", self.name]
            self._process = await self._runsc.spawn(words, binds, control, line.fileno())

    def _prepare(self, resources: Resources, hostname: str, image: Sequence[Path]) -> list[Path]:
        """Creates files and groups; returns the `cgroup.procs` files to enter, none without groups."""
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
        """Writes the state into `target`; the container keeps running. Raises SandboxError."""
        # Uncompressed: twice as fast.
        how = (f"--image-path={WORK}/image", "--leave-running", "--compression=none")
        await self._runsc.call(["checkpoint", *how, self.name], {WORK: self.directory}, deadline_s)
        await asyncio.to_thread(self._move_checkpoint, target)

    def _move_checkpoint(self, target: Path) -> None:
        """Moves the files of a checkpoint to `target`, and changes their owner from runsc's user. They are
        readable by all, so that this user may read them at a restore; the directories above them are not.
        """
        for name in IMAGE_FILES:
            path = self.directory / "image" / name
            if not path.is_file() or path.is_symlink():
                raise SandboxError("runsc wrote an incomplete checkpoint", field="runsc", received=name)
            if os.geteuid() == 0:
                os.chown(path, 0, 0)
            path.chmod(0o644)
            shutil.move(path, target / name)

    async def last_output(self) -> str:
        """The last output of runsc and the program inside; waits a moment for a container that is ending."""
        if self._process is None:
            return ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_OUTPUT_S):
                await self._process.wait()
        return self._process.log()

    def watch(self, resources: Resources, channel: Channel, on_end: Callable[[], None]) -> None:
        """Starts to bound the memory, and to call `on_end` when the container ends by itself."""
        assert self._process is not None, "the container has been started"
        limit_bytes = resources.memory_bytes + resources.disk_bytes
        self._watch = asyncio.ensure_future(self._watch_process(self._process, limit_bytes, channel, on_end))

    async def _watch_process(
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
            verdict = bound.check(memory.used_bytes(), memory.kernel_bytes(), time.monotonic())
            if verdict == "over" and not channel.closed:
                channel.send({"op": "exhausted", "id": channel.next_id()})
            elif verdict == "hopeless":
                self.end_reason = f"the sandbox's files exceed its {limit_bytes} bytes of memory and disk"
                channel.close(self.end_reason)
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
        """Whether a signal killed runsc, which nothing inside can send."""
        return self._process is not None and self._process.was_killed

    @property
    def num_oom_kills(self) -> int:
        """Number of its processes that the host's kernel has killed for lack of memory."""
        return 0 if self._groups is None else self._groups.num_killed_for_memory(self.name)

    async def end(self) -> None:
        """Ends all its processes and removes its directory. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
        async with self._spawning:
            if self._process is not None:
                await self._process.kill()
            await asyncio.to_thread(self._remove_files)

    def _remove_files(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._groups is not None:
            self._groups.remove(self.name, REMOVE_S)
