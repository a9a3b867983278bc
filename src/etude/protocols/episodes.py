"""Progress reports of sessions that another process plays: a worker, or another cluster."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class TokenProgress(Protocol):
    """Receives progress reports of a session that another process samples."""

    def report_tokens(self, num_tokens: int) -> None:
        """`num_tokens`: sampled so far, those of failed attempts included."""
        ...
