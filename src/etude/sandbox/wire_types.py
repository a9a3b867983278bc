"""The wire format between sandbox server and remote client: calls, results, errors and files.

A frame (`inside.frames`) is a JSON header and raw bytes. Text from the agent's code may contain lone
surrogates, so no parser is used that refuses them. Calls of a sandbox (`calls`) and their answers are sent in
the format of the program inside.

Answers that may take long come as a stream of frames, distinguished by their `event`:

    output    {"fd": 1 | 2} and the bytes     a command printed
    dropped   {"num_bytes"}                   output that was not read in time
    beat                                      a heartbeat: the server is alive
    started   {"value"}                       the answer to the start of a command whose output follows
    piece     and bytes                       a piece of a file
    end       {"num_bytes"}                   the end of a file, and the size of all its pieces
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
"""Version of this protocol; server and client must have the same."""


def _kinds(base: type[EtudeError]) -> Iterator[type[EtudeError]]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


ERRORS: Mapping[str, type[EtudeError]] = {
    kind.__name__: kind
    for kind in _kinds(EtudeError)
    if kind.__module__ in ("etude.errors", "etude.sandbox.errors")
}
"""The error types that are encoded under their own names."""

STATUSES: Mapping[type[BaseException], int] = {
    PathMissingError: 404,
    SandboxMissingError: 404,
    SnapshotMissingError: 404,
    SnapshotRefusedError: 422,
    SandboxStateError: 409,
    CapacityError: 503,
}
"""HTTP statuses of errors that differ from the defaults of all servers."""


def encode_error(error: BaseException) -> dict[str, Any]:
    """`kind`, `message`, `field`, `received` and `fix` of an error.

    TimeoutError is encoded as itself; other exceptions than EtudeErrors are failures of the server, and are
    encoded as SandboxError.
    """
    if not isinstance(error, (EtudeError, TimeoutError)):
        message = f"the sandbox server failed: {type(error).__name__}: {error}"
        error = SandboxError(message, field="sandbox.server")
    return encode_plainly(error, ERRORS)


ERROR_SHAPE = OwnErrors(STATUSES, encode_error)
"""The error format of servers of sandboxes."""


def decode_error(raw: object) -> EtudeError | TimeoutError:
    """The typed error that `encode_error` encoded; SandboxError for an unreadable one."""
    return decode_plainly(raw, ERRORS, SandboxError)


def encode(value: Any) -> Any:
    """Encodes a result of a backend or of a sandbox's lifecycle as JSON; dataclasses as objects."""
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
"""Most bytes of a file in one frame."""


async def pack_file(source: Path) -> AsyncGenerator[bytes, None]:
    """Encodes a file as frames."""
    num_bytes = 0
    with await asyncio.to_thread(source.open, "rb") as stream:
        while piece := await asyncio.to_thread(stream.read, PIECE_BYTES):
            yield pack({"event": "piece"}, piece)
            num_bytes += len(piece)
    yield pack({"event": "end", "num_bytes": num_bytes})


class FileWriter:
    """Writes a file from a stream of frames."""

    def __init__(self, file: BinaryIO, target: Path) -> None:
        self._file = file
        self._target = target
        self.num_bytes = 0
        """Bytes written so far."""
        self.is_whole = False
        """Whether the end of the stream has come and no bytes are missing."""

    def write_frame(self, header: Header, piece: bytes) -> None:
        """Processes one frame. Blocks on the disk. Raises ResourceError if writing fails."""
        if header.get("event") == "piece":
            with _disk_errors(self._target):
                self._file.write(piece)
            self.num_bytes += len(piece)
        self.is_whole = header.get("event") == "end" and header.get("num_bytes") == self.num_bytes


@contextlib.contextmanager
def receive_file(target: Path) -> Iterator[FileWriter]:
    """A writer whose file becomes `target` at the end of the block, and is removed if the block raises, which
    it must do for an incomplete stream. Raises ResourceError."""
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
            f"cannot write the received data: {error.strerror}",
            field="target",
            received=str(target),
            fix="name another path, or free disk space",
        ) from error
