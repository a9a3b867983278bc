"""Long outputs: made readable, shown by head and tail, kept whole in a file of the workspace."""

from __future__ import annotations

import re

from etude.agent.tools.interface import ToolContext, shown
from etude.agent.tools.state import HARNESS_DIRECTORY
from etude.errors import AgentError
from etude.sandbox.errors import SandboxKilledByAgentError

OUTPUT_BYTES = 10 << 20
"""Of one output at most; what a command prints beyond it is lost, and said to be."""
OUTPUTS = f"{HARNESS_DIRECTORY}/outputs"
_IGNORE_FILE = f"{HARNESS_DIRECTORY}/.gitignore"

# Character classes of neighbouring parts are disjoint, so that a sequence without an end costs no more than
# its own length.
_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]?"  # cursor movement, colours
    r"|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # window titles, links
    r"|[PX^_][^\x1b\n]*(?:\x1b\\)?"  # strings for devices
    r"|[ -/]*[0-~]?)"
)
_OVERSTRUCK = re.compile(r"[^\n\b]\x08")
_UNREADABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def readable(text: str) -> str:
    """`text` as a terminal would have left it on paper.

    Colours and cursor movements go; of a line that was written over by carriage returns (progress bars) the
    last writing stays; control characters and bytes that are no UTF-8 become U+FFFD. Linear in time.
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
    """The text, its middle left out where it has more than `limit` characters; `where` says where it is."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters{where} ...\n{text[-half:]}"


async def bounded(text: str, context: ToolContext) -> str:
    """`text` if it is short; else its head and tail, the whole of it being written to a numbered file.

    Short: at most `output_characters`. A file that cannot be written (the agent's disk is full, it made
    something else of the directory) is no error: the text says that it was not kept.
    """
    limit = context.limits.output_characters
    if len(text) <= limit:
        return text
    return head_and_tail(text, limit, await keep_output(text, context))


async def keep_output(text: str, context: ToolContext) -> str:
    """Writes `text` to the next numbered file; in words where it is now, or why it is not."""
    context.state.num_outputs += 1
    path = f"{OUTPUTS}/{context.state.num_outputs}.txt"
    data = text.encode("utf-8", "replace")
    try:
        await write_harness_file(path, data[:OUTPUT_BYTES], context)
    except SandboxKilledByAgentError:
        raise
    except AgentError as error:
        return f", not kept: {error.message}"
    if len(data) > OUTPUT_BYTES:
        return f", the first {OUTPUT_BYTES >> 20} MiB in {path}"
    return f", all in {path}"


async def write_harness_file(path: str, data: bytes, context: ToolContext) -> None:
    """Writes a file below the harness's directory, which hides itself from git. Raises as `Files.write`."""
    await context.sandbox.files.write_many({_IGNORE_FILE: b"*\n", path: data})


def _last_writing(line: str) -> str:
    """What carriage returns have left of a line."""
    return next((piece for piece in reversed(line.split("\r")) if piece), "")
