"""The owner's client of the fork server, and a pool of spare processes: first processes of sandboxes that are
cloned, and moved into control groups of their own, before a sandbox is requested.

The kernel moves a process between control groups only while none is being forked on the machine: it waits for
a grace period, some 10 ms. The pool hides this latency, and no sandbox runs outside its limits:

    clone     a first process in new namespaces sends its process id, and waits for its plan
    enter     its groups are created and it is moved there, in a thread; several in a row share a grace period
    acquire   a new sandbox takes a spare, sets its limits, and only then sends the plan

Until it has its plan a spare runs only our code, however busy the machine is.
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
"""Deadline of copying, packing or unpacking a layer."""


class ForkServer:
    """A running fork server. It ends with `close()`, or with this process, however it ends."""

    def __init__(self, launcher: subprocess.Popen[bytes], control: socket.socket, log: IO[bytes]) -> None:
        self._launcher = launcher
        self._control = control
        self._log = log

    @classmethod
    def start(
        cls, interpreter: str, arguments: Sequence[str], name: str, groups: ControlGroups | None = None
    ) -> ForkServer:
        """Starts a fork server in its own control group and waits until it serves. Blocks for up to a minute.

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
                # Ctrl-C at a terminal is meant for the program that runs there, not for its sandboxes.
                start_new_session=True,
                env={"PATH": path, "PYTHONHASHSEED": "0", "LANG": "C.UTF-8"},
            )
        finally:
            theirs.close()
            os.close(owner)
        try:
            answer = json.loads(ours.recv(1 << 16) or b"{}")
            if groups is not None and "ready" in answer:
                groups.admit_fork_server(launcher.pid)
        except (OSError, ValueError) as error:
            answer: dict[str, object] = {"failure": str(error)}
        if "ready" not in answer:
            ours.close()
            _wait_for_end(launcher)
            log.seek(0)
            detail = answer.get("failure") or log.read()[-1000:].decode(errors="replace")
            log.close()
            raise ResourceError(
                f"the sandbox fork server did not start: {detail}",
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
        """Whether it still serves. Its socket closes before the kernel ends its sandboxes."""
        if self._launcher.poll() is not None or self._control.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._control, 0)
        return not poll.poll(0)

    def send(self, request: dict[str, object], *descriptors: int) -> None:
        """Sends a request. Raises SandboxError, or TemplateError without sending if it is too long."""
        data = json.dumps(request).encode()
        if len(data) > MAX_REQUEST_BYTES:
            raise TemplateError(
                f"the image's variables and paths take more than {MAX_REQUEST_BYTES} bytes",
                field="template.image",
                received=len(data),
                fix="pass long variables with `env` to the commands that need them",
            )
        try:
            socket.send_fds(self._control, [data], list(descriptors))
        except OSError as error:
            raise SandboxError(
                f"the fork server does not answer: {error}", field="sandbox.backend", fix="open a new backend"
            ) from error

    async def call(self, request: dict[str, object], *descriptors: int) -> None:
        """Sends a request for a layer and waits for its completion.

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
        """Ends the fork server and every sandbox, and waits for the end."""
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


NUM_SPARES = 4
"""Number of spares kept ready. Each takes 1.2 MB."""
CLONE_S = 60.0


@dataclass(frozen=True)
class SpareProcess:
    """A first process of a future sandbox."""

    number: int
    """Its id at the fork server."""
    group: str
    """Name of its control groups."""
    channel: Channel


class SparePool:
    """The spare processes of one fork server, for one event loop.

    `acquire` waits for the fork server to clone a process and for the kernel to move it, until both are done,
    one fails, or `close` is called. Without control groups no spares are kept, and `acquire` does not wait.
    """

    def __init__(
        self,
        send: Callable[..., None],
        groups: ControlGroups | None,
        remove_group: Callable[[str], None] | None,
        numbers: Iterator[int],
        num_spares: int = NUM_SPARES,
    ) -> None:
        """`send` sends a request and descriptors to the fork server; raises SandboxError."""
        self._send = send
        self._groups = groups
        self._remove_group = remove_group
        self._numbers = numbers
        self._num_spares = num_spares if groups is not None else 0
        self._ready: deque[SpareProcess] = deque()
        self._line = WaitingLine[None, SpareProcess](self._pop_ready, self._add_ready)
        self._tasks = Tasks()
        self._num_starting = 0
        self._starting: set[Channel] = set()
        # Not the default executor: while that is busy sandboxes must still start.
        self._mover = ThreadPoolExecutor(1, "control-groups")
        self._closed = False

    @property
    def counts(self) -> tuple[int, int]:
        """(number of ready spares, number being started)."""
        return len(self._ready), self._num_starting

    async def acquire(self) -> SpareProcess:
        """Takes a spare that is in its groups, as soon as there is one. Raises SandboxError."""
        if self._groups is None:
            return self._clone()
        spare = self._pop_ready()
        if spare is None:
            if self._closed:
                raise _ended_error()
            self._start_clones(len(self._line) + 1 - self._num_starting)
            spare = await self._line.wait(None, timeout_s=None)
        return spare

    def top_up(self) -> None:
        """Starts the missing spares, unless a caller of `acquire` waits: its spare comes first."""
        if not self._closed and not len(self._line):
            self._start_clones(self._num_spares - len(self._ready) - self._num_starting)

    async def close(self) -> None:
        """Ends all spares in the pool; waiting callers of `acquire` get an error. Idempotent."""
        self._closed = True
        self._line.refuse_all(_ended_error())
        while self._ready:
            self.drop(self._ready.popleft())
        for channel in self._starting:
            channel.close("the fork server ends")
        await self._tasks.wait()
        self._mover.shutdown(wait=False)

    def _start_clones(self, count: int) -> None:
        for _ in range(count):
            self._num_starting += 1
            self._tasks.start(self._clone_into_groups())

    async def _clone_into_groups(self) -> None:
        spare = None
        try:
            spare = self._clone()
            self._starting.add(spare.channel)
            await spare.channel.answer(READY, CLONE_S)
            await asyncio.get_running_loop().run_in_executor(self._mover, self._enter_groups, spare)
            if spare.channel.closed:
                raise SandboxError("the first process of a sandbox has died", field="sandbox.backend")
            self._add_ready(spare)
        except Exception as error:
            if spare is not None:
                self.drop(spare)
            self._line.refuse(error)  # without a waiting caller, the next one tries again
        finally:
            self._num_starting -= 1
            if spare is not None:
                self._starting.discard(spare.channel)
        self._line.serve()

    def _clone(self) -> SpareProcess:
        """Requests a clone from the fork server without waiting for it. Raises SandboxError."""
        number = next(self._numbers)
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise SandboxError(f"cannot start a sandbox: {error}", field="sandbox.backend") from error
        spare = SpareProcess(number, secrets.token_hex(8), Channel(ours, f"spare {number}"))
        announces = self._groups is not None
        try:
            with theirs:
                if announces:
                    spare.channel.request_peer_pid()
                self._send({"op": "clone", "id": number, "announces": announces}, theirs.fileno())
        except BaseException:
            spare.channel.close("it was never cloned")
            raise
        return spare

    def _enter_groups(self, spare: SpareProcess) -> None:
        """Creates the groups and moves the process there; runs in a thread. Raises SandboxError."""
        assert self._groups is not None, "the caller has checked that there are groups"
        if not spare.channel.peer_pid:
            raise SandboxError("no control group: its process is out of sight", field="sandbox.backend")
        try:
            self._groups.create(spare.group)
            self._groups.enter(spare.group, spare.channel.peer_pid)
        except OSError as error:
            raise SandboxError(f"no control group: {error}", field="sandbox.backend") from error

    def _add_ready(self, spare: SpareProcess) -> None:
        if self._closed:
            self.drop(spare)
        else:
            self._ready.append(spare)

    def _pop_ready(self, _: None = None) -> SpareProcess | None:
        """A ready spare that is alive; None if there is none."""
        while self._ready:
            spare = self._ready.popleft()
            if not spare.channel.closed:
                return spare
            self.drop(spare)
        return None

    def drop(self, spare: SpareProcess) -> None:
        """Ends a spare that is not used."""
        spare.channel.close("nobody needs it")
        with contextlib.suppress(SandboxError):
            # A fork server that has ended has ended every spare.
            self._send({"op": "kill", "id": spare.number})
        if self._remove_group is not None:
            self._remove_group(spare.group)


def _ended_error() -> SandboxError:
    return SandboxError("the fork server has ended", field="sandbox.backend", fix="try again")
