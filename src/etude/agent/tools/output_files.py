"""Long outputs: cleaned of escape sequences, shown by head and tail, saved whole to a workspace file."""

from __future__ import annotations

import re

from etude.agent.tools.interface import ToolContext, shown
from etude.agent.tools.state import HARNESS_DIRECTORY
from etude.errors import ToolArgumentError
from etude.sandbox.errors import DiskFullError

OUTPUT_BYTES = 10 << 20
"""Bound of one output; output beyond it is lost, and the agent reads so."""
OUTPUTS = f"{HARNESS_DIRECTORY}/outputs"
_IGNORE_FILE = f"{HARNESS_DIRECTORY}/.gitignore"

# Character classes of neighbouring parts are disjoint, so that an unterminated sequence costs time linear in
# its length.
_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]?"  # cursor movement, colours
    r"|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # window titles, links
    r"|[PX^_][^\x1b\n]*(?:\x1b\\)?"  # strings for devices
    r"|[ -/]*[0-~]?)"
)
_OVERSTRUCK = re.compile(r"[^\n\b]\x08")
_UNREADABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def readable(text: str) -> str:
    """`text` as a terminal would finally show it.

    Colours and cursor movements are dropped; of a line overwritten after carriage returns (progress bars) the
    last version stays; control characters and bytes that are no UTF-8 become U+FFFD. Linear in time.
    """
    text = shown(text)
    if _UNREADABLE.search(text) is None:
        return text
    text = _ESCAPE.sub("", text).replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(_last_writing(line) if "\r" in line else line for line in text.split("\n"))
    if "\b" in text:
        text = _OVERSTRUCK.sub("", text)
    return _UNREADABLE.sub("\ufffd", text.replace("\x07", ""))


def head_and_tail(text: str, limit: int, where: str = "") -> str:
    """The text, its middle left out beyond `limit` characters; `where` says where the whole text is."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters{where} ...\n{text[-half:]}"


async def bounded(text: str, context: ToolContext) -> str:
    """`text` if it is short; else its head and tail, and the whole is written to a numbered file.

    Short: at most `output_characters`. A file that cannot be written (the agent's disk is full, it replaced
    the directory) is no error: the text says that it was not kept.
    """
    limit = context.limits.output_characters
    if len(text) <= limit:
        return text
    return head_and_tail(text, limit, await keep_output(text, context))


async def keep_output(text: str, context: ToolContext) -> str:
    """Writes `text` to the next numbered file; returns a phrase that says where it is, or why it is not."""
    context.state.num_outputs += 1
    path = f"{OUTPUTS}/{context.state.num_outputs}.txt"
    data = text.encode("utf-8", "replace")
    try:
        await write_harness_file(path, data[:OUTPUT_BYTES], context)
    except (ToolArgumentError, DiskFullError) as error:
        return f", not kept: {error.message}"
    if len(data) > OUTPUT_BYTES:
        return f", the first {OUTPUT_BYTES >> 20} MiB in {path}"
    return f", all in {path}"


async def write_harness_file(path: str, data: bytes, context: ToolContext) -> None:
    """Writes a file below the harness's directory, which hides itself from git. Raises as `Files.write`."""
    await context.sandbox.files.write_many({_IGNORE_FILE: b"*\n", path: data})


def _last_writing(line: str) -> str:
    """The visible part of a line with carriage returns."""
    return next((piece for piece in reversed(line.split("\r")) if piece), "")
