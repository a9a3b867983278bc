"""Opens code indexes by the kind that a configuration or command line names."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

from etude.agent.index.grep.ripgrep import Ripgrep
from etude.agent.index.semantic.embedding import Embedder
from etude.agent.index.templates import Report, TemplateIndexes
from etude.config import SEARCHING, IndexName
from etude.errors import ConfigError
from etude.sandbox.migration import default_state_directory


def check_index(kind: str) -> None:
    """Raises ConfigError for an unknown kind, MissingPackageError for one whose packages are missing."""
    if kind not in get_args(IndexName):
        raise ConfigError(
            "no such index",
            field="agent.index",
            received=kind,
            fix="use one of " + ", ".join(get_args(IndexName)),
        )
    if kind == "meaning":
        # Heavy.
        from etude.agent.index.semantic.models import default_model

        default_model()


def check_run_index(kind: str) -> None:
    """As `check_index`, and raises MissingPackageError for any kind where ripgrep is missing: a run never
    does without the index that it is configured with."""
    check_index(kind)
    if kind != "none":
        Ripgrep()


def new_indexes(
    kind: str, state: Path | None = None, report: Report = lambda words: None, *, waits: bool = False
) -> TemplateIndexes | None:
    """The indexes of one process, built in the background and kept on disk; None for the kind `none`.
    `waits`: see TemplateIndexes.

    The caller closes them. Raises as `check_index`.
    """
    check_index(kind)
    if kind == "none":
        return None
    state = state or default_state_directory() / "index"
    return TemplateIndexes(state, _embedder(kind), report, searches=kind in SEARCHING, waits=waits)


def run_indexes(kind: str) -> TemplateIndexes | None:
    """The same for the sessions of a run or an evaluation: a search waits, and nothing is left on disk.
    Raises as `check_run_index`."""
    check_run_index(kind)
    if kind == "none":
        return None
    scratch = tempfile.TemporaryDirectory(prefix="etude-index-", ignore_cleanup_errors=True)
    return TemplateIndexes(
        Path(scratch.name), _embedder(kind), searches=kind in SEARCHING, waits=True, scratch=scratch
    )


@contextlib.asynccontextmanager
async def open_indexes(kind: str, state: Path | None = None) -> AsyncIterator[TemplateIndexes | None]:
    """`new_indexes`, closed at the end."""
    indexes = new_indexes(kind, state)
    try:
        yield indexes
    finally:
        if indexes is not None:
            await indexes.close()


def _embedder(kind: str) -> Embedder | None:
    if kind != "meaning":
        return None
    # Heavy: the model's libraries come with it.
    from etude.agent.index.semantic import default_embedder

    return default_embedder()
