"""Runs in the guest: keeps the program inside on one line while vsock connections come and go.

    python3 -I -S relay.py vsock:52|unix:PATH PROGRAM ARGUMENT...

Firecracker resets all vsock connections when it takes a snapshot; only listeners survive. The program's
line must survive too. So this process listens, gives the program a socket pair as its standard input and
output, and copies between it and whoever connected last. Nothing is lost in an orderly change: the owner
says `hold` first, after which the program is silent. As the guest's first process it also reaps. Standard
library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys

_CHUNK = 1 << 18
_LIMIT_BYTES = 1 << 20
"""How much may wait in one direction before the other end is no longer read."""


class Relay:
    """One program, one listener, at most one connection. A single thread; waits for any of the three."""

    def __init__(self, listener: socket.socket, program: socket.socket) -> None:
        self._listener = listener
        self._program = program
        self._owner: socket.socket | None = None
        self._inward = bytearray()
        self._outward = bytearray()
        listener.setblocking(False)
        program.setblocking(False)

    def serve(self) -> None:
        """Returns when the program has closed its end."""
        while True:
            poll = select.poll()
            for descriptor, events in self._interests():
                poll.register(descriptor, events)
            ready = dict(poll.poll())
            if self._listener.fileno() in ready:
                self._accept()
                continue
            if self._owner is not None and self._owner.fileno() in ready:
                self._turn_owner(ready[self._owner.fileno()])
            if self._program.fileno() in ready and not self._turn_program(ready[self._program.fileno()]):
                return

    def _interests(self) -> list[tuple[int, int]]:
        rows = [(self._listener.fileno(), select.POLLIN)]
        program = select.POLLOUT if self._inward else 0
        if self._owner is not None:
            owner = select.POLLIN if len(self._inward) < _LIMIT_BYTES else 0
            rows.append((self._owner.fileno(), owner | (select.POLLOUT if self._outward else 0)))
            program |= select.POLLIN if len(self._outward) < _LIMIT_BYTES else 0
        # Without an owner the program's words wait in its pipe; its end shows all the same.
        return [*rows, (self._program.fileno(), program)]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            owner, _ = self._listener.accept()
            if self._owner is not None:
                self._owner.close()
            owner.setblocking(False)
            self._owner = owner

    def _turn_owner(self, events: int) -> None:
        assert self._owner is not None, "it was ready"
        try:
            if events & select.POLLOUT:
                del self._outward[: self._owner.send(self._outward)]
            if events & ~select.POLLOUT:
                data = self._owner.recv(_CHUNK)
                if not data:
                    raise ConnectionResetError
                self._inward += data
        except BlockingIOError:
            return
        except OSError:
            self._owner.close()
            self._owner = None

    def _turn_program(self, events: int) -> bool:
        try:
            if events & select.POLLOUT:
                del self._inward[: self._program.send(self._inward)]
            if events & select.POLLIN:
                data = self._program.recv(_CHUNK)
                self._outward += data
                return bool(data)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return not events & (select.POLLHUP | select.POLLERR)


def listen(place: str) -> socket.socket:
    """`vsock:PORT`, or `unix:PATH` for tests. Raises OSError."""
    kind, _, name = place.partition(":")
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(name)
    else:
        listener = socket.socket(socket.AF_VSOCK)
        listener.bind((socket.VMADDR_CID_ANY, int(name)))
    listener.listen(4)
    return listener


def main(arguments: list[str]) -> None:
    """Runs the program and relays until it ends; as first process, nothing of the guest outlives it."""
    listener = listen(arguments[0])
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        for descriptor in (0, 1):
            os.dup2(theirs.fileno(), descriptor)
        os.execvp(arguments[1], arguments[1:])
    theirs.close()
    signal.signal(signal.SIGCHLD, lambda number, frame: _reap())
    Relay(listener, ours).serve()


def _reap() -> None:
    """Collects orphans; of the program itself the socket tells."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main(sys.argv[1:])
