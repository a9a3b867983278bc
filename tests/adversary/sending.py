"""Sends bytes as a hostile client does, with none of a library's corrections, and reads what comes back."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.adversary.servers import Server

_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request was answered; `status` 0: the connection was closed without an answer."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def text(self) -> str:
        """Head and body as text."""
        return f"{self.headers} {self.body.decode('latin-1')}"


def fill(text: str, server: Server) -> str:
    """`text` with the server's names for `{word}`."""
    for name, value in server.names.items():
        text = text.replace("{" + name + "}", value)
    return text


def request_bytes(
    server: Server, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b""
) -> bytes:
    """One request as it crosses the wire. Headers replace the usual ones; None leaves one out."""
    usual: dict[str, Any] = {
        "host": f"127.0.0.1:{server.port}",
        "authorization": f"Bearer {server.token}",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    usual |= {name.lower(): value for name, value in (headers or {}).items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{n}: {v}" for n, v in usual.items() if v is not None)]
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body


def exchange(server: Server, data: bytes | list[bytes], waits: bool = True) -> list[Answer]:
    """Sends the pieces and reads answers until the server closes the connection.

    `waits` False: nothing is to come, so it is not waited for long.
    """
    answers: list[Answer] = []
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.settimeout(_ANSWER_S if waits else 0.3)
        with contextlib.suppress(OSError):  # it was refused before its end: the answer says why
            for piece in [data] if isinstance(data, bytes) else data:
                connection.sendall(piece)
        with contextlib.suppress(OSError, http.client.HTTPException):
            answers.extend(_read(connection))
    return answers or [Answer(0)]


class _Line(io.BufferedReader):
    """What comes, which stays open from answer to answer."""

    def makefile(self, mode: str) -> _Line:
        """Itself: `http.client` reads all answers through one buffer."""
        return self

    def close(self) -> None:
        """Nothing: the connection is closed by its owner."""


def _read(connection: socket.socket) -> Iterator[Answer]:
    """Answers one after the other, until one that ends the connection."""
    line: Any = _Line(socket.SocketIO(connection, "r"))
    while True:
        response = http.client.HTTPResponse(line)
        response.begin()
        while response.status == 100:
            response.begin()
        body = response.read() if response.status != 101 else b""
        yield Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, body)
        if response.will_close or response.status == 101:
            return


def as_json(value: Any) -> bytes:
    """A body."""
    return json.dumps(value).encode()
