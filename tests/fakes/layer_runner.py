"""A `LayerRunner` without sandboxes: each command changes what its script says."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etude.sandbox.images.runner import RunResult
from etude.sandbox.images.tar import Entry, TarWriter
from etude.sandbox.template import Image

Changes = Mapping[str, bytes | None]
"""Path from the root, without a slash in front -> content; None for a deleted file."""
Script = Callable[["Call"], Changes | RunResult | BaseException]


@dataclass(frozen=True)
class Call:
    """What the builder asked for."""

    image: Image
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    user: str
    timeout_s: float


@dataclass
class FakeLayerRunner:
    """Answers with what `script` returns: changes, a result, or an error to raise.

    `calls` lists what was asked. Layers come as files in `folder` (default: the system's), which the
    builder deletes.
    """

    script: Script = lambda call: {}
    folder: Path | None = None
    calls: list[Call] = field(default_factory=list)

    async def run(
        self,
        image: Image,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        user: str,
        timeout_s: float,
    ) -> RunResult:
        """See LayerRunner.run."""
        call = Call(image, tuple(argv), dict(env), cwd, user, timeout_s)
        self.calls.append(call)
        answer = self.script(call)
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, RunResult):
            return answer
        if not answer:
            return RunResult(0, "", None)
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".tar", delete=False) as file:
            file.write(layer_bytes(answer))
        return RunResult(0, "", Path(file.name))


def layer_bytes(changes: Changes) -> bytes:
    """An OCI layer that makes these changes."""
    target = io.BytesIO()
    writer = TarWriter(target)
    for name, data in sorted(changes.items()):
        if data is None:
            folder, slash, last = name.rpartition("/")
            writer.add(Entry(f"{folder}{slash}.wh.{last}".encode(), "file"))
        else:
            writer.add(Entry(name.encode(), "file", 0o644, 0, len(data)), io.BytesIO(data))
    writer.close()
    return target.getvalue()
