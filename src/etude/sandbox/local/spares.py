"""The owner's end of the fork server: starts it, and asks it for clones and layers; and first processes of
sandboxes, cloned and in control groups of their own before anybody asks for a sandbox.

The kernel moves a process between control groups only when none is being forked anywhere: it waits for a
grace period, some 10 ms. No sandbox runs outside its limits meanwhile, and few have to wait:

    clone     a first process in new namespaces says which one it is, and waits for its plan
    enter     its groups are made and it is moved there, in a thread; several in a row share a grace period
    take      the maker of a sandbox takes one, sets its limits, and only then sends the plan

Until it has its plan a spare runs our code alone, whatever the machine is busy with.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import select
import socket
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

from etude.errors import ResourceError, SandboxError
from etude.kit.tasks import Tasks
from etude.sandbox.channel import READY, Channel
from etude.sandbox.errors import TemplateError, fault_error
from etude.sandbox.guest_program import python_words
from etude.sandbox.inside.frames import MAX_REQUEST_BYTES
from etude.sandbox.local.cgroups import ControlGroups
from etude.sandbox.local.doctor import find_problems
from etude.sandbox.waiting import WaitingLine

START_S = 60.0
CLOSE_S = 10.0
LAYER_S = 300.0
"""Longest copy, packing or unpacking of a layer."""


class ForkServer:
    """A running fork server. It ends with `close()`, and with this process however that ends."""

    def __init__(self, launcher: subprocess.Popen[bytes], control: socket.socket, log: IO[bytes]) -> None:
        self._launcher = launcher
        self._control = control
        self._log = log

    @classmethod
    def start(
        cls, interpreter: str, arguments: Sequence[str], name: str, groups: ControlGroups | None = None
    ) -> ForkServer:
        """Starts one and waits until it serves, in its own control group. Blocks for up to a minute.

        Raises ResourceError.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(START_S)
        log = tempfile.TemporaryFile()  # noqa: SIM115 -- open as long as the fork server lives
        owner = os.pidfd_open(os.getpid())
        words = (str(theirs.fileno()), str(owner), *arguments)
        command = python_words("etude.sandbox.inside.zygote", *words, interpreter=interpreter)
        path = os.environ.get("PATH", "/usr/bin:/bin")
        try:
            launcher = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(), owner),
                # Ctrl-C at a terminal is for the program that runs there, not for its sandboxes.
                start_new_session=True,
                env={"PATH": path, "PYTHONHASHSEED": "0", "LANG": "C.UTF-8"},
            )
        finally:
            theirs.close()
            os.close(owner)
        try:
            answer = json.loads(ours.recv(1 << 16) or b"{}")
            if groups is not None and "ready" in answer:
                groups.admit(launcher.pid)
        except (OSError, ValueError) as error:
            answer: dict[str, object] = {"failure": str(error)}
        if "ready" not in answer:
            ours.close()
            _wait_for_end(launcher)
            log.seek(0)
            detail = answer.get("failure") or log.read()[-1000:].decode(errors="replace")
            log.close()
            raise ResourceError(
                f"the sandbox fork server does not start: {detail}",
                field="sandbox.backend",
                received=name,
                fix="; ".join(find_problems()) or "run `etude sandbox doctor` for a diagnosis",
            )
        return cls(launcher, ours, log)

    @property
    def pid(self) -> int:
        """Process id of the fork server's parent."""
        return self._launcher.pid

    @property
    def alive(self) -> bool:
        """Whether it still serves. It lets go of its socket before the kernel ends its sandboxes."""
        if self._launcher.poll() is not None or self._control.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._control, 0)
        return not poll.poll(0)

    def send(self, request: dict[str, object], *descriptors: int) -> None:
        """Sends a request. Raises SandboxError; TemplateError for one that is too long, before it is sent."""
        data = json.dumps(request).encode()
        if len(data) > MAX_REQUEST_BYTES:
            raise TemplateError(
                f"the image's variables and paths take more than {MAX_REQUEST_BYTES} bytes",
                field="template.image",
                received=len(data),
                fix="give long variables to the commands that need them (env)",
            )
        try:
            socket.send_fds(self._control, [data], list(descriptors))
        except OSError as error:
            raise SandboxError(
                f"the fork server does not answer: {error}", field="sandbox.backend", fix="make a new backend"
            ) from error

    async def ask(self, request: dict[str, object], *descriptors: int) -> None:
        """Sends a request about a layer and waits until it is done.

        Raises SandboxError, AgentError for files that cannot be copied.
        """
        ours, theirs = socket.socketpair()
        channel = Channel(ours, f"layer {request['layer']}")
        try:
            with theirs:
                self.send(request, theirs.fileno(), *descriptors)
            answer, _ = await channel.answer(READY, LAYER_S)
        finally:
            channel.close("done")
        if "fault" in answer:
            kind, message = answer["fault"]
            raise fault_error((kind, message), "files")

    async def close(self) -> None:
        """Ends it and every sandbox, and waits for its end."""
        self._control.close()
        await asyncio.to_thread(_wait_for_end, self._launcher)
        self._log.close()


def _wait_for_end(launcher: subprocess.Popen[bytes]) -> None:
    try:
        launcher.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        # The fork server dies with the launcher, and the namespaces with the fork server.
        launcher.kill()
        launcher.wait(CLOSE_S)


NUM_AHEAD = 4
"""Spares that are kept ready. Each has 1.2 MB of its own."""
CLONE_S = 60.0


@dataclass(frozen=True)
class Spare:
    """A first process without a sandbox around it."""

    number: int
    """What the fork server calls it."""
    group: str
    """Name of its control groups."""
    channel: Channel


class Spares:
    """The spares of one fork server, for one event loop.

    Waits for: the fork server's clone, and the kernel that moves it. What unblocks it: either of them, an
    error of theirs, or `close`. Without control groups nothing is kept ready, and nothing waits.
    """

    def __init__(
        self,
        send: Callable[..., None],
        groups: ControlGroups | None,
        remove_group: Callable[[str], None] | None,
        numbers: Iterator[int],
        num_ahead: int = NUM_AHEAD,
    ) -> None:
        """`send`: a request, and descriptors, to the fork server; raises SandboxError."""
        self._send = send
        self._groups = groups
        self._remove_group = remove_group
        self._numbers = numbers
        self._num_ahead = num_ahead if groups is not None else 0
        self._ready: deque[Spare] = deque()
        self._line = WaitingLine[None, Spare](self._next, self._keep)
        self._tasks = Tasks()
        self._num_making = 0
        self._making: set[Channel] = set()
        # Of its own: a busy default executor must not keep sandboxes from starting.
        self._mover = ThreadPoolExecutor(1, "control-groups")
        self._closed = False

    @property
    def counts(self) -> tuple[int, int]:
        """How many are ready, and how many are being made."""
        return len(self._ready), self._num_making

    async def take(self) -> Spare:
        """A spare that is in its groups, now or as soon as there is one. Raises SandboxError."""
        if self._groups is None:
            return self._clone()
        spare = self._next()
        if spare is None:
            if self._closed:
                raise _ended()
            self._make(len(self._line) + 1 - self._num_making)
            spare = await self._line.wait(None, timeout_s=None)
        return spare

    def top_up(self) -> None:
        """Begins to make as many as are to be ready, unless somebody waits: then theirs come first."""
        if not self._closed and not len(self._line):
            self._make(self._num_ahead - len(self._ready) - self._num_making)

    async def close(self) -> None:
        """Ends all that nobody has taken; callers that wait for one get an error. Idempotent."""
        self._closed = True
        self._line.refuse_all(_ended())
        while self._ready:
            self.drop(self._ready.popleft())
        for channel in self._making:
            channel.close("the fork server ends")
        await self._tasks.wait()
        self._mover.shutdown(wait=False)

    def _make(self, count: int) -> None:
        for _ in range(count):
            self._num_making += 1
            self._tasks.start(self._make_one())

    async def _make_one(self) -> None:
        spare = None
        try:
            spare = self._clone()
            self._making.add(spare.channel)
            await spare.channel.answer(READY, CLONE_S)
            await asyncio.get_running_loop().run_in_executor(self._mover, self._enter, spare)
            if spare.channel.closed:
                raise SandboxError("the first process of a sandbox has died", field="sandbox.backend")
            self._keep(spare)
        except Exception as error:
            if spare is not None:
                self.drop(spare)
            self._line.refuse(error)  # if nobody waits, the next one tries again
        finally:
            self._num_making -= 1
            if spare is not None:
                self._making.discard(spare.channel)
        self._line.serve()

    def _clone(self) -> Spare:
        """Has the fork server clone a first process, and does not wait for it. Raises SandboxError."""
        number = next(self._numbers)
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise SandboxError(f"cannot start a sandbox: {error}", field="sandbox.backend") from error
        spare = Spare(number, secrets.token_hex(8), Channel(ours, f"spare {number}"))
        announces = self._groups is not None
        try:
            with theirs:
                if announces:
                    spare.channel.ask_for_pid()
                self._send({"op": "clone", "id": number, "announces": announces}, theirs.fileno())
        except BaseException:
            spare.channel.close("it was never cloned")
            raise
        return spare

    def _enter(self, spare: Spare) -> None:
        """In a thread. Raises SandboxError."""
        assert self._groups is not None, "nothing is entered without groups"
        if not spare.channel.peer_pid:
            raise SandboxError("no control group: its process is out of sight", field="sandbox.backend")
        try:
            self._groups.create(spare.group)
            self._groups.enter(spare.group, spare.channel.peer_pid)
        except OSError as error:
            raise SandboxError(f"no control group: {error}", field="sandbox.backend") from error

    def _keep(self, spare: Spare) -> None:
        if self._closed:
            self.drop(spare)
        else:
            self._ready.append(spare)

    def _next(self, _: None = None) -> Spare | None:
        """One that is ready, and lives."""
        while self._ready:
            spare = self._ready.popleft()
            if not spare.channel.closed:
                return spare
            self.drop(spare)
        return None

    def drop(self, spare: Spare) -> None:
        """Ends a spare that will be no sandbox."""
        spare.channel.close("nobody needs it")
        with contextlib.suppress(SandboxError):
            # A fork server that is gone has taken every spare with it.
            self._send({"op": "kill", "id": spare.number})
        if self._remove_group is not None:
            self._remove_group(spare.group)


def _ended() -> SandboxError:
    return SandboxError("the fork server has ended", field="sandbox.backend", fix="try again")
