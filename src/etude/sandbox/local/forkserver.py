"""The owner's end of the fork server: starts it, and asks it for clones and layers."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from typing import IO

from etude.errors import ResourceError, SandboxError
from etude.sandbox.channel import READY, Channel
from etude.sandbox.errors import TemplateError, fault_error
from etude.sandbox.guest_program import python_words
from etude.sandbox.inside.frames import MAX_REQUEST_BYTES
from etude.sandbox.local.cgroups import ControlGroups
from etude.sandbox.local.doctor import find_problems

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
