"""Instant grep: ripgrep's matches by way of an n-gram index, fresh against edits."""

from etude.agent.index.grep.builder import Progress
from etude.agent.index.grep.index import GrepIndex
from etude.agent.index.grep.manifest import IndexBusyError
from etude.agent.index.grep.overlay import Overlay
from etude.agent.index.grep.query import GrepMatch, GrepMatches, GrepQuery, GrepResult

__all__ = [
    "GrepIndex",
    "GrepMatch",
    "GrepMatches",
    "GrepQuery",
    "GrepResult",
    "IndexBusyError",
    "Overlay",
    "Progress",
]
