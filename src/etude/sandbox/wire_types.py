"""What sandbox server and remote client say to each other: results, errors and templates as frames.

One frame (`inside.frames`) is a JSON header and raw bytes. Text that the agent's code made may hold lone
surrogates, so nothing here goes through a parser that refuses them.

Answers that may take long come as a stream of frames, told apart by their `event`:

    output    {"fd": 1 | 2} and the bytes     a command printed
    dropped   {"num_bytes"}                   output that nobody took in time
    beat                                      the server is alive, nothing else
    file      {"path", "last"} and bytes      a piece of a file, see `file_trees`
    result    {"value"} and bytes             the last frame of a call that succeeded
    error     {"error"}                       the last frame of a call that failed

A stream without `result` or `error` at its end is torn.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from etude.errors import EtudeError, SandboxError
from etude.sandbox.errors import (
    CapacityError,
    PathMissingError,
    SandboxMissingError,
    SandboxStateError,
    SnapshotMissingError,
    SnapshotRefusedError,
)
from etude.sandbox.template import Image, Template
from etude.sandbox.types import (
    Capabilities,
    CommandResult,
    Network,
    ProbeReport,
    ProbeResult,
    Resources,
    SandboxInfo,
    SnapshotInfo,
    TestFailure,
    TestReport,
)
from etude.serving.errors import OwnErrors
from etude.serving.errors import decode_error as decode_plainly
from etude.serving.errors import encode_error as encode_plainly
from etude.serving.messages import Encoded

API = "/v1"
SPEAKS = 2
"""Version of this protocol; server and client refuse each other's where it differs."""

Record = TypeVar("Record")


# Errors


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


# Results


def encode(value: object) -> Encoded:
    """Any result of the sandbox interface that is no sandbox."""
    if isinstance(value, CommandResult):
        texts = [value.stdout.encode("utf-8", "surrogatepass"), value.stderr.encode("utf-8", "surrogatepass")]
        rest = [value.exit_code, value.timed_out, value.duration_s, value.truncated]
        return [*rest, len(texts[0])], b"".join(texts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _record(value), b""
    if isinstance(value, (list, tuple)):
        return [encode(item)[0] for item in value], b""
    return value, b""


def encode_diff(changes: Mapping[str, bytes | None]) -> Encoded:
    """What `Sandbox.diff` gives: sizes, and contents and names (of any bytes, each NUL-ended) as bytes."""
    names = b"".join(path.encode("utf-8", "surrogatepass") + b"\0" for path in changes)
    sizes = [None if data is None else len(data) for data in changes.values()]
    contents = (data for data in changes.values() if data is not None)
    return {"name_bytes": len(names), "sizes": sizes}, b"".join((*contents, names))


def decode_diff(encoded: Encoded) -> dict[str, bytes | None]:
    """What `encode_diff` wrote."""
    header, data = encoded
    end = len(data) - header["name_bytes"]
    names = [name.decode("utf-8", "surrogatepass") for name in data[end:].split(b"\0")[:-1]]
    changes: dict[str, bytes | None] = {}
    start = 0
    for path, size in zip(names, header["sizes"], strict=True):
        changes[path] = None if size is None else data[start : start + size]
        start += size or 0
    if start != end:
        raise ValueError("sizes and contents differ")
    return changes


def decode_command(encoded: Encoded) -> CommandResult:
    """A CommandResult that `encode` wrote."""
    (exit_code, timed_out, duration_s, truncated, out_bytes), data = encoded
    stdout, stderr = (part.decode("utf-8", "surrogatepass") for part in (data[:out_bytes], data[out_bytes:]))
    return CommandResult(exit_code, stdout, stderr, timed_out, duration_s, truncated)


def decode_tests(raw: Any) -> TestReport:
    """A TestReport that `encode` wrote."""
    failed = tuple(TestFailure(**row) for row in raw["failed"])
    return TestReport(**{**raw, "passed": tuple(raw["passed"]), "failed": failed})


def decode_probes(raw: Any) -> ProbeReport:
    """A ProbeReport that `encode` wrote."""
    results = tuple(ProbeResult(**{**row, "values": tuple(row["values"])}) for row in raw["results"])
    return ProbeReport(**{**raw, "results": results})


def decode_info(raw: Any) -> SandboxInfo:
    """A SandboxInfo that `encode` wrote."""
    return SandboxInfo(
        **{**raw, "resources": Resources(**raw["resources"]), "network": decode_network(raw["network"])}
    )


def decode_snapshot(raw: Any) -> SnapshotInfo:
    """A SnapshotInfo that `encode` wrote."""
    return SnapshotInfo(**raw)


def decode_network(raw: Any) -> Network:
    """A Network that `encode` wrote."""
    return Network(tuple(raw["allow"]))


def decode_capabilities(raw: Any) -> Capabilities:
    """Capabilities that `encode` wrote."""
    return Capabilities(**{**raw, "snapshots": frozenset(raw["snapshots"]), "pause": frozenset(raw["pause"])})


def decode_rows(kind: type[Record], raw: Any) -> list[Record]:
    """A list of flat records that `encode` wrote."""
    return [kind(**row) for row in raw]


def _record(value: Any) -> Any:
    """A dataclass as JSON: an object by field name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _record(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_record(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return {str(key): _record(item) for key, item in value.items()}
    return value


# Templates


def encode_template(template: Template) -> Encoded:
    """A template whole; `decode_template` gives one of the same digest."""
    contents = template.contents
    image = None if template.image is None else _record(template.image)
    rows = [[path, len(data)] for path, data in contents.items()]
    return {"name": template.name, "image": image, "files": rows}, b"".join(contents.values())


def decode_template(encoded: Encoded) -> Template:
    """What `encode_template` wrote. Raises ValueError, TypeError or KeyError for anything else."""
    raw, data = encoded
    files: dict[str, bytes | str] = {}
    start = 0
    for path, size in raw["files"]:
        if not isinstance(path, str) or not isinstance(size, int) or size < 0:
            raise ValueError("files are no rows of path and size")
        files[path] = data[start : start + size]
        start += size
    if start != len(data):
        raise ValueError("sizes and contents differ")
    image = raw["image"]
    if image is not None:
        image = Image(**{**image, "layers": tuple(image["layers"])})
        texts = (image.name, image.workdir, image.user, *image.layers, *image.env, *image.env.values())
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("an image is described in texts")
    if not isinstance(raw["name"], str):
        raise TypeError("the name is no text")
    return Template(files, raw["name"], image)


def template_key(template: Template) -> str:
    """Names a template on the wire: content, name and image together."""
    image = template.image
    rows = [template.digest, template.name, "" if image is None else image.name]
    return hashlib.blake2b("\0".join(rows).encode(), digest_size=20).hexdigest()
