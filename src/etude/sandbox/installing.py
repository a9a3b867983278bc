"""Putting a template's files into a machine that was booted without them: over its channel, in batches."""

from __future__ import annotations

from etude.errors import SandboxError
from etude.sandbox.channel import Channel
from etude.sandbox.files import batches
from etude.sandbox.template import Template

_BATCH_BYTES, _FILE_BYTES = 8 << 20, 8 << 10
"""Of one batch, and what each file counts for beside its contents."""


async def install_template(
    channel: Channel, template: Template, deadline_s: float, keep: bool = False
) -> None:
    """Fills the workspace. `deadline_s` is for each batch; `keep`: what an image has there stays.

    Raises SandboxError if that cannot be done.
    """
    files = list(template.contents.items())
    more = False
    # One at least, so that a workspace without files is marked complete as well.
    for part in list(batches([len(data) + _FILE_BYTES for _, data in files], _BATCH_BYTES)) or [slice(0)]:
        rows = [[path, len(data)] for path, data in files[part]]
        header: dict[str, object] = {"op": "install", "files": rows, "more": more, "keep": keep and not more}
        answer, _ = await channel.request(header, b"".join(data for _, data in files[part]), deadline_s)
        if "fault" in answer:
            raise SandboxError(
                f"the template cannot be installed: {answer['fault'][1]}", field="template", received=rows[:3]
            )
        more = True
