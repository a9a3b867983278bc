"""What sandbox server and remote client say to each other: calls, results, errors and files.

One frame (`inside.frames`) is a JSON header and raw bytes. Text that the agent's code made may hold lone
surrogates, so nothing here goes through a parser that refuses them. Calls of a sandbox (`calls`) and their
answers cross as the program inside takes and gives them.

Answers that may take long come as a stream of frames, distinguished by their `event`:

    output    {"fd": 1 | 2} and the bytes     a command printed
    dropped   {"num_bytes"}                   output that nobody took in time
    beat                                      the server is alive, nothing else
    started   {"value"}                       the answer to the start of a command whose output follows
    piece     and bytes                       of a file
    end       {"num_bytes"}                   of all pieces of a file together
    result    {"value"} and bytes             the last frame of a call that succeeded
    error     {"error"}                       the last frame of a call that failed

A stream without `result` or `error` at its end is torn, and so is a file's without `end`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from etude.errors import EtudeError, ResourceError, SandboxError
from etude.kit.durable import whole_file
from etude.sandbox.errors import (
    CapacityError,
    PathMissingError,
    SandboxMissingError,
    SandboxStateError,
    SnapshotMissingError,
    SnapshotRefusedError,
)
from etude.sandbox.inside.frames import Header, pack
from etude.sandbox.types import Capabilities, Network, Resources, SandboxInfo, SnapshotInfo
from etude.serving.errors import OwnErrors
from etude.serving.errors import decode_error as decode_plainly
from etude.serving.errors import encode_error as encode_plainly

API = "/v1"
SPEAKS = 3
"""Version of this protocol; server and client refuse each other's where it differs."""


def _kinds(base: type[EtudeError]) -> Iterator[type[EtudeError]]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


ERRORS: Mapping[str, type[EtudeError]] = {
    kind.__name__: kind
    for kind in _kinds(EtudeError)
    if kind.__module__ in ("etude.errors", "etude.sandbox.errors")
}
"""Every error that crosses the wire as itself, by its name."""

STATUSES: Mapping[type[BaseException], int] = {
    PathMissingError: 404,
    SandboxMissingError: 404,
    SnapshotMissingError: 404,
    SnapshotRefusedError: 422,
    SandboxStateError: 409,
    CapacityError: 503,
}
"""HTTP statuses of errors, where they are not those of every server."""


def encode_error(error: BaseException) -> dict[str, Any]:
    """`kind`, `message`, `field`, `received` and `fix` of an error.

    What is no EtudeError is a fault of the server: it crosses as SandboxError, and TimeoutError as itself.
    """
    if not isinstance(error, (EtudeError, TimeoutError)):
        message = f"the sandbox server failed: {type(error).__name__}: {error}"
        error = SandboxError(message, field="sandbox.server")
    return encode_plainly(error, ERRORS)


ERROR_SHAPE = OwnErrors(STATUSES, encode_error)
"""How servers of sandboxes answer errors."""


def decode_error(raw: object) -> EtudeError | TimeoutError:
    """The typed error that `encode_error` wrote; what cannot be read is a SandboxError."""
    return decode_plainly(raw, ERRORS, SandboxError)


def encode(value: Any) -> Any:
    """A result of a backend or of a sandbox's lifecycle as JSON: of a dataclass an object by field name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    return value


def decode_info(raw: Any) -> SandboxInfo:
    """A SandboxInfo that `encode` wrote."""
    network = Network(tuple(raw["network"]["allow"]))
    return SandboxInfo(**{**raw, "resources": Resources(**raw["resources"]), "network": network})


def decode_snapshot(raw: Any) -> SnapshotInfo:
    """A SnapshotInfo that `encode` wrote."""
    return SnapshotInfo(**raw)


def decode_capabilities(raw: Any) -> Capabilities:
    """Capabilities that `encode` wrote."""
    return Capabilities(**{**raw, "snapshots": frozenset(raw["snapshots"]), "pause": frozenset(raw["pause"])})


PIECE_BYTES = 1 << 20
"""The most that one frame carries."""


async def pack_file(source: Path) -> AsyncGenerator[bytes, None]:
    """The frames of a file."""
    num_bytes = 0
    with await asyncio.to_thread(source.open, "rb") as stream:
        while piece := await asyncio.to_thread(stream.read, PIECE_BYTES):
            yield pack({"event": "piece"}, piece)
            num_bytes += len(piece)
    yield pack({"event": "end", "num_bytes": num_bytes})


class FileWriter:
    """Writes the pieces of one stream."""

    def __init__(self, file: BinaryIO, target: Path) -> None:
        self._file = file
        self._target = target
        self.num_bytes = 0
        """Written so far."""
        self.is_whole = False
        """Whether the stream came to its end, and nothing of it was missing."""

    def take(self, header: Header, piece: bytes) -> None:
        """One frame. Blocks on the disk. Raises ResourceError for a disk that fails."""
        if header.get("event") == "piece":
            with _disk_errors(self._target):
                self._file.write(piece)
            self.num_bytes += len(piece)
        self.is_whole = header.get("event") == "end" and header.get("num_bytes") == self.num_bytes


@contextlib.contextmanager
def receive_file(target: Path) -> Iterator[FileWriter]:
    """A writer whose file becomes `target` when the block ends; nothing stays of it where the block raises,
    as it must for a stream that is not whole. Raises ResourceError."""
    with contextlib.ExitStack() as stack:
        with _disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(whole_file(target, sync=False))
        yield FileWriter(file, target)


@contextlib.contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"cannot write what came: {error.strerror}",
            field="target",
            received=str(target),
            fix="name another place, or make room",
        ) from error
