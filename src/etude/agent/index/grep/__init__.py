"""Instant grep: ripgrep's matches by way of an n-gram index, fresh against edits."""

from etude.agent.index.grep.index import GrepIndex as GrepIndex
from etude.agent.index.grep.overlay import Overlay as Overlay
from etude.agent.index.grep.query import GrepQuery as GrepQuery
from etude.agent.index.grep.query import GrepResult as GrepResult
