"""Putting a template's files into a machine that was booted without them: over its channel, in batches."""

from __future__ import annotations

from collections.abc import Iterator

from etude.errors import SandboxError
from etude.sandbox.channel import Channel
from etude.sandbox.template import Template

_BATCH_FILES = 1000
_BATCH_BYTES = 8 << 20

Batch = tuple[list[list[object]], list[bytes]]


async def install_template(
    channel: Channel, template: Template, deadline_s: float, keep: bool = False
) -> None:
    """Fills the workspace. `deadline_s` is for each batch; `keep`: what an image has there stays.

    Raises SandboxError if that cannot be done.
    """
    more = False
    for rows, data in _batches(template):
        header: dict[str, object] = {"op": "install", "files": rows, "more": more, "keep": keep and not more}
        answer, _ = await channel.request(header, b"".join(data), deadline_s)
        if "fault" in answer:
            raise SandboxError(
                f"the template cannot be installed: {answer['fault'][1]}", field="template", received=rows[:3]
            )
        more = True


def _batches(template: Template) -> Iterator[Batch]:
    """At least one, so that a workspace without files is told to be whole as well."""
    rows: list[list[object]] = []
    data: list[bytes] = []
    size = 0
    for path, content in template.contents.items():
        if rows and (len(rows) >= _BATCH_FILES or size + len(content) > _BATCH_BYTES):
            yield rows, data
            rows, data, size = [], [], 0
        rows.append([path, len(content)])
        data.append(content)
        size += len(content)
    yield rows, data
