"""Decides which calls of a message are run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from etude.records import ToolCall

FINISH_TOOL = "finish"


def admit(calls: Sequence[ToolCall], limit: int) -> tuple[ToolCall, ...]:
    """The calls of one turn; those that may not run carry the reason as `error`.

    Calls above `limit` get one error together; nothing runs after `finish`; no call at all is an error too.
    """
    if not calls:
        return (ToolCall("", error="no call"),)
    admitted = list(calls[:limit])
    if len(calls) > limit:
        admitted.append(ToolCall(calls[limit].name, error=f"more than {limit} calls"))
    for position, call in enumerate(admitted):
        if call.name == FINISH_TOOL and call.error is None:
            rest = (replace(late, error=late.error or "after finish") for late in admitted[position + 1 :])
            return (*admitted[: position + 1], *rest)
    return tuple(admitted)
