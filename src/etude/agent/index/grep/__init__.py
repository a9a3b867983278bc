"""Instant grep: ripgrep's matches, found through an n-gram index with edits overlaid."""

from etude.agent.index.grep.index import GrepIndex as GrepIndex
from etude.agent.index.grep.overlay import Overlay as Overlay
from etude.agent.index.grep.query import GrepQuery as GrepQuery
from etude.agent.index.grep.query import GrepResult as GrepResult
