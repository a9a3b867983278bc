"""What sandbox server and remote client say to each other: calls, results and errors.

One frame (`inside.frames`) is a JSON header and raw bytes. Text that the agent's code made may hold lone
surrogates, so nothing here goes through a parser that refuses them. Calls of a sandbox (`calls`) and their
answers cross as the program inside takes and gives them.

Answers that may take long come as a stream of frames, distinguished by their `event`:

    output    {"fd": 1 | 2} and the bytes     a command printed
    dropped   {"num_bytes"}                   output that nobody took in time
    beat                                      the server is alive, nothing else
    started   {"value"}                       the answer to the start of a command whose output follows
    piece, end                                a file, see `file_streams`
    result    {"value"} and bytes             the last frame of a call that succeeded
    error     {"error"}                       the last frame of a call that failed

A stream without `result` or `error` at its end is torn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from etude.errors import EtudeError, SandboxError
from etude.sandbox.errors import (
    CapacityError,
    PathMissingError,
    SandboxMissingError,
    SandboxStateError,
    SnapshotMissingError,
    SnapshotRefusedError,
)
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
