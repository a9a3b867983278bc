"""A build context on disk: its Dockerfile, its .dockerignore, and what ADD may not take from it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.dockerfile import Dockerfile, parse_dockerfile
from etude.sandbox.images.ignore import IgnoreRules
from etude.sandbox.images.sources import Selected

MAX_DOCKERFILE_BYTES = 1 << 20
_REMOTE = re.compile(r"(?:[a-z][a-z0-9+.-]{0,20}://|git@)", re.IGNORECASE)
_ARCHIVES = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


def read_dockerfile(context: Path, name: str) -> Dockerfile:
    """Reads and parses the file. Blocks. Raises TemplateError."""
    path = context / name
    try:
        with path.open("rb") as file:
            data = file.read(MAX_DOCKERFILE_BYTES + 1)
    except OSError as error:
        raise TemplateError(
            f"cannot be read: {error.strerror}", field=name, received=str(path), fix="name a Dockerfile"
        ) from error
    if len(data) > MAX_DOCKERFILE_BYTES:
        raise TemplateError("is too long", field=name, received=f"more than {MAX_DOCKERFILE_BYTES} bytes")
    try:
        return parse_dockerfile(data.decode(), name)
    except UnicodeDecodeError as error:
        raise TemplateError("is not UTF-8 text", field=name, received=str(error)) from error


def read_ignore(context: Path, dockerfile: str) -> IgnoreRules:
    """The rules of `<dockerfile>.dockerignore`, else of `.dockerignore`. Blocks. Raises TemplateError."""
    for name in (f"{dockerfile}.dockerignore", ".dockerignore"):
        try:
            return IgnoreRules((context / name).read_text(encoding="utf-8"), name)
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise TemplateError(f"cannot be read: {error}", field=name) from error
    return IgnoreRules()


def find_stage(dockerfile: Dockerfile, target: str | None) -> int:
    """Index of the stage of that name; None: the last. Raises TemplateError."""
    if target is None:
        return len(dockerfile.stages) - 1
    for index, stage in enumerate(dockerfile.stages):
        if target.lower() == stage.name:
            return index
    names = [stage.name for stage in dockerfile.stages if stage.name]
    raise TemplateError(
        "no such stage", field=dockerfile.name, received=target, fix=f"stages: {', '.join(names) or 'none'}"
    )


def refuse_remote(patterns: Sequence[str]) -> None:
    """Raises TemplateError for sources of ADD that lie elsewhere."""
    for pattern in patterns:
        if _REMOTE.match(pattern):
            raise TemplateError(
                "ADD of a URL is not supported", received=pattern[:200],
                fix="put the file into the build context and COPY it",
            )  # fmt: skip


def refuse_archives(selected: Sequence[Selected]) -> None:
    """Raises TemplateError for files that Docker's ADD would unpack. Blocks."""
    for source in selected:
        path = source.items[0].path
        if path is None:
            continue
        with Path(os.fsdecode(path)).open("rb") as file:
            head = file.read(512)
        if head.startswith(_ARCHIVES) or head[257:262] == b"ustar":
            raise TemplateError(
                "ADD does not unpack archives here", received=source.name.decode(errors="replace"),
                fix="COPY it and unpack it with RUN",
            )  # fmt: skip
